"""Steps of an embedding model: hidden states are pooled, no token is sampled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from minisgl.core.plan import Batch
from minisgl.engine.batch import make_batch
from minisgl.engine.runner import EagerRunner, ForwardOutput
from minisgl.models.llama import LlamaForCausalLM

if TYPE_CHECKING:
    from minisgl.checkpoint.embedder import Pooling
    from minisgl.core.plan import BatchPlan
    from minisgl.engine.config import EngineSpec
    from minisgl.engine.runner import Parts


Pooler = Callable[[Batch], Tensor]
"""Computes a step and returns the pooled hidden states of the sequences that sample, float32 [S, H]."""


def last_token(parts: Parts) -> Pooler:
    """Take the hidden state of the last token, which attends to all tokens."""
    return lambda batch: _normed(parts, batch).float()


def _normed(parts: Parts, batch: Batch) -> Tensor:
    assert isinstance(parts.model, LlamaForCausalLM), "transformers' models give only logits"
    return parts.model.normed(parts.hidden(*parts.begin(batch)))


class MeanOfTokens:
    """Takes the mean over all tokens of a prompt. Each chunk adds to the sum of its row; the first one starts it."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        state = parts.state.last_token
        self._sums = torch.zeros(len(state), parts.model.config.hidden_size, device=state.device)

    def __call__(self, batch: Batch) -> Tensor:
        parts, layout, lens = self._parts, batch.layout, batch.sequences["stop"] - batch.sequences["start"]
        every = torch.arange(batch.num_tokens, device=batch.positions.device)
        hidden = _normed(parts, replace(batch, logit_tokens=every))
        # A sum for each sequence: a scattered sum would add in a different order in every run.
        sums = torch.stack([h.float().sum(0) for h in hidden.split_with_sizes(lens.tolist())])
        is_first = layout.kv_lens == layout.cu_query_lens.diff()
        rows = layout.rows.long()
        self._sums[rows] = torch.where(is_first.unsqueeze(1), sums, self._sums[rows] + sums)
        return self._sums[batch.sampling.rows] / batch.sampling.positions.unsqueeze(1)


POOLERS: Final[dict[Pooling, Callable[[Parts], Pooler]]] = {"last": last_token, "mean": MeanOfTokens}


class PoolingRunner:
    """Runs any plan, op by op. All sampled tokens are 0."""

    name = "pooling"

    def __init__(self, parts: Parts, pooling: Pooling) -> None:
        self._device = parts.device
        self._pool = POOLERS[pooling](parts)
        self._flops_per_token = parts.flops_per_token

    def fits(self, plan: BatchPlan) -> bool:
        return True

    def launch(self, plan: BatchPlan) -> ForwardOutput:
        batch = make_batch(plan, self._device)
        flops = self._flops_per_token * batch.num_tokens
        return ForwardOutput(plan, lambda _: self._device.submit(lambda: self._step(batch), flops), embeds=True)

    @torch.inference_mode()
    def _step(self, batch: Batch) -> Tensor:
        pooled = self._pool(batch)
        finite = pooled.isfinite().all(1).int()
        return torch.cat([torch.zeros_like(finite).unsqueeze(0), finite.unsqueeze(0), pooled.view(torch.int32).t()])


def base_runner(parts: Parts, spec: EngineSpec) -> EagerRunner | PoolingRunner:
    """The eager runner of the model, which fits any plan."""
    return EagerRunner(parts) if spec.pooling is None else PoolingRunner(parts, spec.pooling)
