"""What attention is to a model and to an engine, and the reference backend as the smallest implementation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from minisgl.core.plan import Batch, SeqLayout, StepShape

if TYPE_CHECKING:
    from minisgl.core.specs import GroupedQuery, Mixer
    from minisgl.ops.quantized import Pages
    from minisgl.ops.reference import HeadTransform
    from minisgl.ops.table import OpTable

Kind = TypeVar("Kind", bound="Mixer")


@dataclass(frozen=True, slots=True)
class MixerSpec(Generic[Kind]):
    """What a mixer is built for. `dtype` is that of queries and, unless `fp8_cache`, of the cache.

    `max_rows` is the largest number of sequences in a step: the running requests, and one row for padding.
    `max_queries` is the largest number of tokens that a decoding sequence computes: more than 1 with drafts.
    """

    device_type: str
    dtype: torch.dtype
    kind: Kind
    page_size: int
    max_rows: int = 257
    max_queries: int = 1
    fp8_cache: bool = False  # pages are `QuantizedPages`


AttentionSpec: TypeAlias = "MixerSpec[GroupedQuery]"


@dataclass(frozen=True, slots=True)
class StepAttention(ABC):
    """Causal attention of one step over the paged cache, for all layers that attend alike.

    page_table is [rows, pages per row] int32. out_loc [T] int64 is the slot (page * page_size + offset) of each
    token's K/V.
    """

    ops: OpTable
    batch: Batch
    page_table: Tensor
    out_loc: Tensor

    def attend(self, qkv: Tensor, heads: HeadTransform, pages: Pages) -> Tensor:
        """Normalise and rotate q and k, store k and v, and attend: qkv [T, (Hq + 2 Hk) D] -> [T, Hq, D].

        May overwrite qkv.
        """
        q = self.ops.norm_rope_store(qkv, heads, self.batch.positions, pages, self.out_loc)
        return self.forward(q, pages, heads.sinks)

    @abstractmethod
    def forward(self, q: Tensor, pages: Pages, sinks: Tensor | None = None) -> Tensor:
        """Attend: q [T, Hq, D], pages [P, 2, Hk, page, D] of a layer -> contiguous [T, Hq, D].

        `sinks` [Hq] float32 are the layer's, given if its `GroupedQuery` has sinks. The pages have the K/V of this
        step's tokens. Slots at or beyond a sequence's kv_len, pages before the window and unowned pages may have any
        values, NaN included. Other sequences of the batch may change only the last bits of a sequence's result, by the
        split of its sums.
        """


class AttentionBackend(ABC):
    """One way to attend."""

    name: ClassVar[str]
    # Whether steps that decode, and steps with prompts, read only device data and `StepShape`, so that a graph can
    # replay them.
    captures_decodes: ClassVar[bool] = False
    captures_prompts: ClassVar[bool] = False

    def __init__(self, spec: AttentionSpec, ops: OpTable) -> None:
        self.spec = spec
        self.ops = ops

    @abstractmethod
    def prepare(self, batch: Batch, page_table: Tensor, out_loc: Tensor) -> StepAttention:
        """Return what the layers call; see `StepAttention`.

        Runs once per step, in the order of steps and after the step's page-table writes.
        """


class Attention:
    """Attention of layers that attend alike: a backend for chunks of prompts, and one for sequences that decode."""

    def __init__(self, prefill: AttentionBackend, decode: AttentionBackend) -> None:
        self.prefill, self.decode = prefill, decode
        self.group = prefill.spec.kind.group
        self.captures_decodes, self.captures_prompts = decode.captures_decodes, prefill.captures_prompts
        self.name = prefill.name if prefill is decode else f"{prefill.name},{decode.name}"

    def prepare(self, batch: Batch, page_table: Tensor, out_loc: Tensor) -> StepAttention:
        """Do what `AttentionBackend.prepare` does, with the backend of each part of the step."""
        decodes = batch.shape.decodes
        if self.prefill is self.decode or not decodes:
            return self.prefill.prepare(batch, page_table, out_loc)
        if not batch.shape.chunks:
            return self.decode.prepare(batch, page_table, out_loc)
        prompts, decodes_only = replace(batch.shape, decodes=0), replace(batch.shape, chunks=0, chunk_tokens=0)
        first = _sequences(batch, slice(decodes), decodes_only)
        rest = _sequences(batch, slice(decodes, None), prompts)
        parts = (
            self.decode.prepare(first, page_table, out_loc[: first.num_tokens]),
            self.prefill.prepare(rest, page_table, out_loc[first.num_tokens :]),
        )
        return _Mixed(self.prefill.ops, batch, page_table, out_loc, parts)


@dataclass(frozen=True, slots=True)
class _Mixed(StepAttention):
    """The sequences of a step that decode, and the others."""

    parts: tuple[StepAttention, StepAttention]

    def forward(self, q: Tensor, pages: Pages, sinks: Tensor | None = None) -> Tensor:
        queries = torch.split(q, [part.batch.num_tokens for part in self.parts])
        return torch.cat([part.forward(x, pages, sinks) for part, x in zip(self.parts, queries, strict=True)])


def _sequences(batch: Batch, which: slice, shape: StepShape) -> Batch:
    """Return some consecutive sequences of a step, with the fields that attention reads."""
    layout, lens = batch.layout, batch.sequences["stop"] - batch.sequences["start"]
    start = int(lens[: which.start].sum()) if which.start else 0
    tokens = slice(start, start + int(lens[which].sum()))
    ends = layout.cu_query_lens[which.start : None if which.stop is None else which.stop + 1] - start
    return replace(
        batch,
        shape=shape,
        sequences=batch.sequences[which],
        layout=SeqLayout(layout.rows[which], layout.kv_lens[which], ends),
        input_ids=batch.input_ids[tokens],
        positions=batch.positions[tokens],
    )


class ReferenceAttention(AttentionBackend):
    """The op table's `paged_attention`: slow, but correct on every device."""

    name = "reference"

    def prepare(self, batch: Batch, page_table: Tensor, out_loc: Tensor) -> StepAttention:
        return _ReferenceStep(self.ops, batch, page_table, out_loc, self.spec.kind)


@dataclass(frozen=True, slots=True)
class _ReferenceStep(StepAttention):
    kind: GroupedQuery

    def forward(self, q: Tensor, pages: Pages, sinks: Tensor | None = None) -> Tensor:
        layout, kind = self.batch.layout, self.kind
        return self.ops.paged_attention(q, pages, self.page_table, layout, kind.scale, kind.window, kind.softcap, sinks)
