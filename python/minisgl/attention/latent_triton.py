"""Attention to latents on an NVIDIA GPU in Triton; see `kernels/triton/attention_latent.py`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from minisgl.attention.latent import LatentMixer, LatentStep
from minisgl.core.rounding import ceil_div
from minisgl.kernels.triton.attention_decode import BEGINS, PART, PLAN_ROWS, plan_decode
from minisgl.kernels.triton.attention_latent import attend_latents, merge_latents
from minisgl.kernels.triton.launch import INTERPRETED, is_compiling_ahead
from minisgl.ops.quantized import Pages, QuantizedPages, data_and_scale, page_strides

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.attention.backend import MixerSpec
    from minisgl.core.plan import Batch, Ints
    from minisgl.core.specs import Latent
    from minisgl.ops.table import OpTable

LOG2_E: Final = log2(2.718281828459045)
COLUMNS: Final = 32  # of a tile at most: a result of 512 by 32 takes half the registers of four warps
INTERPRETER_SMS: Final = 4  # tests run the kernels in Triton's interpreter on a CPU
MERGED_ROWS: Final = 4


@dataclass(frozen=True, slots=True)
class _Tiling:
    """The columns of a tile: up to `queries` of a sequence, each with `group` heads."""

    queries: int
    group: int

    @property
    def used(self) -> int:
        return self.queries * self.group

    @property
    def columns(self) -> int:
        return 16 if self.used <= 16 else COLUMNS


class Tile(NamedTuple):
    """The keys of a tile, and how many tiles and programs there are at a time."""

    keys: int
    stages: int
    programs: int


@dataclass(frozen=True, slots=True)
class _Sequences:
    """Sequences of one tiling, and their plan. Sequence j has the tokens from starts[j] to ends[j], or is token j."""

    tiling: _Tiling
    count: int
    kv_lens: Tensor
    starts: Tensor | None
    ends: Tensor | None
    work: Tensor


class TritonLatents(LatentMixer):
    """Runs `attend_latents` for sequences that decode, and for chunks of prompts after their first tokens.

    Decode steps read only device tensors. Their buffers are allocated once, because graphs keep their addresses; all
    layers and steps use them, and must run in one stream.
    """

    name = "latent, triton"
    captures_decodes = True

    def __init__(self, spec: MixerSpec[Latent], ops: OpTable) -> None:
        super().__init__(spec, ops)
        kind, device = spec.kind, torch.device(spec.device_type)
        sms, has_room = INTERPRETER_SMS, True
        if not INTERPRETED:
            properties = torch.cuda.get_device_properties(device)
            sms, has_room = properties.multi_processor_count, properties.major in (9, 10)
        # Tiles of 64 latents of 16 bits take the tensor cores' fastest form and 188 KB of shared memory, which Hopper
        # has. Those of 8 bits are widened in registers, which are too few for 64. With 16 columns, tiles of 32 and two
        # programs on an SM take 0.75 of the time on an H200.
        narrow = Tile(32, 5 if has_room or spec.fp8_cache else 2, 2 * sms)
        wide = Tile(64, 3, sms if kind.rank > 256 else 2 * sms) if has_room and not spec.fp8_cache else narrow
        self.tiles = {16: narrow, COLUMNS: wide}  # by columns
        self.options = {"ROPE_DIM": kind.rope_dim, "PAGE_SIZE": spec.page_size, "num_warps": 4}
        groups = [heads for heads in range(1, min(kind.heads, COLUMNS) + 1) if kind.heads % heads == 0]
        decodes = {q: max(g for g in groups if g == 1 or g * q <= COLUMNS) for q in {1, spec.max_queries}}
        self._decode = {queries: _Tiling(queries, group) for queries, group in decodes.items()}
        self._chunk = max((_Tiling(COLUMNS // group, group) for group in groups), key=lambda t: (t.used, t.group))
        self._work = self._new_work(spec.max_rows)
        tilings = *self._decode.values(), self._chunk
        size = max(2 * (self.tiles[t.columns].programs + kind.heads) * t.columns for t in tilings)
        self.part = torch.empty(size, kind.rank, device=device)
        self.lse = torch.empty(size, device=device)

    def _new_work(self, count: int) -> Tensor:
        programs = max(tile.programs for tile in self.tiles.values())
        return torch.empty(
            BEGINS.value + (programs + count) * PART.value, dtype=torch.int32, device=self.spec.device_type
        )

    def blocks(self, tiling: _Tiling) -> dict[str, int]:
        """Return the parameters that the kernels share."""
        blocks, tile = self.kind.heads // tiling.group, self.tiles[tiling.columns]
        return {
            "RANK": self.kind.rank,
            "HEAD_BLOCKS": blocks,
            "GROUP_SIZE": tiling.group,
            "MAX_QUERIES": tiling.queries,
            "BLOCK_M": tiling.columns,
            "NUM_SPLITS": max(1, tile.programs // blocks),
        }

    def prepare(self, batch: Batch, page_table: Tensor, out_loc: Tensor) -> LatentStep:
        step = super().prepare(batch, page_table, out_loc)
        shape, layout, parts = batch.shape, batch.layout, []
        assert shape.decodes <= self.spec.max_rows, f"{shape.decodes} sequences decode, of {self.spec.max_rows}"
        if is_compiling_ahead():
            step = replace(step, prompts=[])  # notes the kernel that later chunks take
        if shape.decodes:
            tiling, ends = self._decode[1], layout.cu_query_lens
            tokens: tuple[Tensor | None, Tensor | None] = None, None
            if shape.queries > 1:
                tiling, tokens = self._decode[self.spec.max_queries], (ends, ends[1:])
            parts.append(self._plan(tiling, shape.decodes, layout.rows, layout.kv_lens, *tokens, self._work))
        if shape.chunks and (pieces := self._pieces(batch, {start for start, _ in step.prompts})).size:
            rows, kv_lens, starts, stops = torch.from_numpy(pieces).to(self.spec.device_type).unbind()
            work = self._new_work(pieces.shape[1])
            parts.append(self._plan(self._chunk, pieces.shape[1], rows, kv_lens, starts, stops, work))
        fields = step.mixer, step.batch, step.page_table, step.out_loc, step.prompts
        return _Step(*fields, self, parts)

    def _pieces(self, batch: Batch, whole: set[int]) -> Ints:
        """Cut the chunks whose first tokens are not in `whole` into sequences of a few queries.

        Returns int32 [4, sequences]: the row of each, its length, and its tokens.
        """
        sequences, queries = batch.sequences, self._chunk.queries
        ends = np.cumsum(sequences["stop"] - sequences["start"])
        pieces: list[Ints] = [np.empty((4, 0), np.int32)]
        for sequence, end in zip(sequences[batch.shape.decodes :], ends[batch.shape.decodes :].tolist(), strict=True):
            first = end - int(sequence["stop"] - sequence["start"])
            if first not in whole:
                starts = np.arange(first, end, queries)
                stops = np.minimum(starts + queries, end)
                pieces.append(
                    np.stack([np.full_like(starts, sequence["row"]), sequence["stop"] - (end - stops), starts, stops])
                )
        return np.concatenate(pieces, 1).astype(np.int32)

    def _plan(
        self,
        tiling: _Tiling,
        count: int,
        rows: Tensor,
        kv_lens: Tensor,
        starts: Tensor | None,
        ends: Tensor | None,
        work: Tensor,
    ) -> _Sequences:
        splits, tile = self.blocks(tiling)["NUM_SPLITS"], self.tiles[tiling.columns].keys
        options = {"NUM_SPLITS": splits, "NUM_KV_HEADS": 0, "TILE_KEYS": tile, "WINDOW": 0, "EVEN": False}
        plan_decode[(ceil_div(count, PLAN_ROWS.value),)](rows, kv_lens, work, work, count, **options)
        return _Sequences(tiling, count, kv_lens, starts, ends, work)


@dataclass(frozen=True, slots=True)
class _Step(LatentStep):
    """The work of a step: its sequences that decode, and the pieces of its chunks."""

    latents: TritonLatents
    parts: list[_Sequences]

    def read(self, q: Tensor, q_rope: Tensor, pages: Pages) -> Tensor:
        own, table, out = self.latents, self.page_table, torch.empty_like(q)
        for part in self.parts:
            blocks, tile = own.blocks(part.tiling), own.tiles[part.tiling.columns]
            attend_latents[(blocks["NUM_SPLITS"] * blocks["HEAD_BLOCKS"],)](
                q, q_rope, *data_and_scale(pages), table, part.starts, part.ends, part.work, own.part, own.lse, out,
                own.kind.scale * LOG2_E, *q_rope.stride()[:2], table.stride(0), *page_strides(pages),
                IS_FP8=isinstance(pages, QuantizedPages), TILE_KEYS=tile.keys, NUM_STAGES=tile.stages,
                **blocks, **own.options,
            )  # fmt: skip
            merge_latents[(part.count, ceil_div(part.tiling.used, MERGED_ROWS), blocks["HEAD_BLOCKS"])](
                own.part, own.lse, part.work, part.kv_lens, part.starts, part.ends, out, ROWS=MERGED_ROWS, **blocks
            )
        return out
