"""A model whose first layer is a recurrence instead of attention: a sum with decay in each dimension."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from minisgl.core.layout import STATE, STATE_LEN
from minisgl.core.plan import Batch, Context
from minisgl.core.specs import PerRow
from minisgl.kvcache.snapshots import STEP_TOKENS, recent_tokens
from minisgl.layers.builder import Builder
from minisgl.layers.linear import RMSNorm, Stream
from minisgl.models.llama import DecoderLayer
from minisgl.models.model_config import ModelConfig
from minisgl.ops.table import OpTable

RECENT = recent_tokens(STEP_TOKENS)


@dataclass(frozen=True, slots=True)
class Decay:
    """The layer's `specs.Mixer`."""

    size: int

    @property
    def states(self) -> tuple[PerRow]:
        return PerRow("sum", (self.size,)), PerRow("recent", (RECENT, self.size))


class DecayMixer:
    """The `engine.runner.Mixer`."""

    name, group, captures_decodes, captures_prompts = "decay", STATE, False, False

    def __init__(self, spec: Decay, ops: OpTable) -> None:
        pass

    def prepare(self, batch: Batch, page_table: Tensor, out_loc: Tensor) -> DecayStep:
        return DecayStep(batch, page_table[batch.layout.rows.long(), : STATE_LEN + 1].tolist())

    def fold(self, layers: list[Recurrence], folds: Tensor) -> None:
        for layer in layers:
            for slot, start, stop in folds.tolist():
                for position in range(start, stop):
                    layer.states[slot] = 0.8 * layer.states[slot] + layer.recent[slot, position % RECENT]


@dataclass(frozen=True)
class DecayStep:
    batch: Batch
    slots: list[list[int]]

    def run(self, x: Tensor, states: Tensor, recent: Tensor) -> Tensor:
        out, batch = torch.empty_like(x), self.batch
        assert batch.captures is not None
        targets = {(row, at): target for row, at, target in batch.captures.tolist()}
        ends, rows, positions = (
            batch.layout.cu_query_lens.tolist(),
            batch.layout.rows.tolist(),
            batch.positions.tolist(),
        )
        for (slot, state_len), row, first, end in zip(self.slots, rows, ends, ends[1:], strict=False):
            if first == end:
                continue
            if state_len <= positions[first]:  # the row decodes
                recent[slot, torch.tensor(positions[first:end]) % RECENT] = x[first:end]
                for i in range(first, end):
                    out[i] = states[slot]
                    for position in range(state_len, positions[i] + 1):
                        out[i] = 0.8 * out[i] + recent[slot, position % RECENT]
                continue
            state = states[slot] if positions[first] else torch.zeros_like(states[slot])
            for i in range(first, end):
                out[i] = state = 0.8 * state + x[i]
                if (target := targets.pop((row, positions[i] + 1), None)) is not None:
                    states[target] = state
            states[slot] = state
        assert not targets, f"no chunk comes to {targets}"
        return out


class Recurrence:
    """In place of `Attention`."""

    def __init__(self, builder: Builder, mixer: Decay) -> None:
        self._states, self.mixer = [builder.state(spec) for spec in mixer.states], builder.mixer(mixer)
        builder.recurrences.setdefault(self.mixer, []).append(self)

    @property
    def states(self) -> Tensor:
        return self._states[0].pages  # type: ignore[return-value]

    @property
    def recent(self) -> Tensor:
        return self._states[1].pages  # type: ignore[return-value]

    def forward(self, stream: Stream, norm: RMSNorm, ctx: Context) -> Stream:
        normed, total = norm.sum_add(stream)
        return Stream(ctx.mixers[self.mixer].run(normed, self.states, self.recent), total)


class ToyConfig(ModelConfig):
    @classmethod
    def of(cls, config: ModelConfig) -> ToyConfig:
        return cls(**{f.name: getattr(config, f.name) for f in fields(config)})

    def mixer(self, layer: int, info: Any) -> Any:
        return super().mixer(layer, info) if layer else Decay(self.hidden_size)


class ToyLayer(DecoderLayer):
    """The first layer of a model has a recurrence."""

    def __init__(self, builder: Builder, config: ModelConfig, index: int, *tables: Any) -> None:
        plain = ModelConfig(**{f.name: getattr(config, f.name) for f in fields(ModelConfig)})
        super().__init__(builder, plain, index, *tables)
        if index == 0:
            del builder.states[0]
            self.self_attn = Recurrence(builder, config.mixer(0, builder.info))  # type: ignore[assignment]
