"""A model whose first layer is a recurrence instead of attention: a sum with decay in each dimension."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from minisgl.core.layout import STATE
from minisgl.core.plan import Batch, Context
from minisgl.core.specs import PerRow
from minisgl.layers.builder import Builder
from minisgl.layers.linear import RMSNorm, Stream
from minisgl.models.llama import DecoderLayer
from minisgl.models.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Decay:
    """The layer's `specs.Mixer`."""

    size: int

    @property
    def states(self) -> tuple[PerRow]:
        return (PerRow("sum", (self.size,)),)


class DecayMixer:
    """The `engine.runner.Mixer`."""

    name, group, captures_decodes, captures_prompts = "decay", STATE, False, False

    def __init__(self, *_: Any) -> None:
        pass

    def prepare(self, batch: Batch, page_table: Tensor, out_loc: Tensor) -> DecayStep:
        return DecayStep(batch, page_table[batch.layout.rows.long(), 0].tolist())


@dataclass(frozen=True)
class DecayStep:
    batch: Batch
    slots: list[int]

    def run(self, x: Tensor, states: Tensor) -> Tensor:
        out, batch = torch.empty_like(x), self.batch
        targets = {(row, at): target for _, target, row, at in batch.captures.tolist()}
        ends, rows, positions = (
            batch.layout.cu_query_lens.tolist(),
            batch.layout.rows.tolist(),
            batch.positions.tolist(),
        )
        for slot, row, first, end in zip(self.slots, rows, ends, ends[1:], strict=False):
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
        self.state, self.mixer = builder.state(*mixer.states), builder.mixer(mixer)

    def forward(self, stream: Stream, norm: RMSNorm, ctx: Context) -> Stream:
        normed, total = norm.sum_add(stream)
        return Stream(ctx.mixers[self.mixer].run(normed, self.state.pages), total)


class ToyConfig(ModelConfig):
    @classmethod
    def of(cls, config: ModelConfig) -> ToyConfig:
        return cls(**{f.name: getattr(config, f.name) for f in fields(config)})

    def mixer(self, layer: int, info: Any) -> Any:
        return super().mixer(layer, info) if layer else Decay(self.hidden_size)


class ToyLayer(DecoderLayer):
    """The first layer of a model has a recurrence."""

    def __init__(self, builder: Builder, config: ModelConfig, index: int, *tables: Any) -> None:
        super().__init__(builder, config, index, *tables)
        if index == 0:
            del builder.states[0]
            self.self_attn = Recurrence(builder, config.mixer(0, builder.info))  # type: ignore[assignment]
