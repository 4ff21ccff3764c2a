"""Paged attention on an NVIDIA GPU in Triton, and in CUDA C++ where there is a kernel; see `kernels/triton/`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import log2
from typing import TYPE_CHECKING, Final

import torch
from triton import next_power_of_2

from minisgl.attention.backend import AttentionBackend, StepAttention
from minisgl.core.rounding import ceil_div
from minisgl.kernels.triton.attention_decode import BEGINS, PART, PLAN_ROWS, decode_attention, plan_decode
from minisgl.kernels.triton.attention_prefill import COUNTERS, TILE, plan_prefill, prefill_attention
from minisgl.kernels.triton.launch import INTERPRETED, MAX_CHAINED, hopper, is_compiling_ahead, pdl_options
from minisgl.ops.quantized import Pages, QuantizedPages, data_and_scale, page_strides

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.attention.backend import AttentionSpec
    from minisgl.core.plan import Batch, SeqLayout, StepShape
    from minisgl.ops.reference import HeadTransform
    from minisgl.ops.table import OpTable

LOG2_E: Final = log2(2.718281828459045)
FEW_ROWS: Final = 8  # up to this many sequences, latency counts: half as many programs with twice the warps
# Up to this many sequences (FEW_ROWS with `decode.cu`), norm, RoPE and K/V storage are fused into attention.
FUSED_ROWS: Final = 64
LONG_CONTEXT: Final = 8192  # from this many keys on, reading them for more queries pays more than many programs
INTERPRETER_SMS: Final = 4  # tests run the kernels in Triton's interpreter on a CPU


@dataclass(frozen=True, slots=True)
class _Tiling:
    """A tile size and its kernel options."""

    queries: int
    plan: dict[str, int]
    kernel: dict[str, int]


class TritonAttention(AttentionBackend):
    """Runs `decode_attention` for decoding sequences and `prefill_attention` for prompt chunks, without copies.

    A pure decode step reads only device tensors, so a CUDA graph can capture it. The buffers for decoding are allocated
    once, because graphs keep their addresses. All layers and steps use them, and must run in one stream. The split of a
    sequence over programs depends on the whole batch, and so do the last bits of its result; the same batch always
    gives the same bits.
    """

    name = "triton"
    captures_decodes = True
    captures_prompts = True

    def __init__(self, spec: AttentionSpec, ops: OpTable) -> None:
        super().__init__(spec, ops)
        device = torch.device(spec.device_type)
        heads, dim = spec.kind.kv_heads, spec.kind.head_dim
        width = next_power_of_2(dim)  # of tiles
        group = spec.kind.heads // heads
        self._num_sms = (
            INTERPRETER_SMS if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count
        )
        parts = 2 * self._num_sms
        self._scale = spec.kind.scale * LOG2_E
        self._softcap = spec.kind.softcap * LOG2_E
        self._window = spec.kind.window or 0  # all positions
        shared = {"NUM_KV_HEADS": heads, "GROUP_SIZE": group, "HEAD_DIM": dim, "PAGE_SIZE": spec.page_size}

        # An SM holds two programs of four warps, or four of two warps (255 registers per thread) if tiles are not too
        # large.
        resident = 4 if width <= 128 else 2
        splits, few_splits = (max(1, n * self._num_sms // heads) for n in (resident, 2))
        slots = (spec.max_rows + splits) * heads * group * spec.max_queries
        int32, float32 = torch.int32, torch.float32
        size = BEGINS.value + (splits + spec.max_rows) * PART.value
        self._work = torch.empty(size, dtype=int32, device=device)
        self._counters = torch.empty(spec.max_rows * heads, dtype=int32, device=device)
        self._part = torch.empty(slots, dim, dtype=float32, device=device)
        self._lse = torch.empty(slots, dtype=float32, device=device)
        # Read as many bytes at a time from 8-bit pages as from 16-bit ones, and from heads of 512 as from those of 256.
        tile = {"TILE_KEYS": 16 if width > 256 else 64 if spec.fp8_cache and width <= 128 else 32}
        self._decode = {}
        for queries in {1, spec.max_queries}:
            block = next_power_of_2(queries * group)
            block_m = max(16, block)
            self._decode[queries] = {
                **shared,
                **tile,
                "MAX_QUERIES": queries,
                "BLOCK_G": min(block, 2048 // width),
                "BLOCK_M": block_m,
                "NUM_STAGES": 3 if spec.dtype is torch.float32 else 5,
                "NUM_SPLITS": splits,
                "num_warps": 2 if block_m * width <= 4096 else 8 if width > 256 and block_m > 16 else 4,
            }
        room = hopper() if spec.fp8_cache and not spec.kind.softcap and not spec.kind.has_sinks else None
        self._cuda = room if room is not None and room.supports(spec.dtype, dim, group, spec.page_size) else None
        # The fused kernel's heads of 512 do not fit in registers.
        self._fused_rows = FEW_ROWS if self._cuda is not None else FUSED_ROWS if width <= 256 else 0
        self._decode_few = {**self._decode[1], "NUM_SPLITS": few_splits, "num_warps": 4}

        # Large tiles read the keys half as often (with 64 rows, 400 TFLOP/s would need the whole bandwidth of the L2).
        # With 128 registers, an SM holds two of their programs: one computes while the other waits. Small tiles are for
        # chunks with too few large ones.
        small = {"BLOCK_M": 64, "BLOCK_N": 64 if width <= 128 else 32, "NUM_STAGES": 2, "num_warps": 4}
        large = {"BLOCK_M": 128, "BLOCK_N": 64, "NUM_STAGES": 2, "num_warps": 8}
        if width <= 128:
            large["maxnreg"] = 128
        elif width > 256:  # limited by registers and shared memory
            small = large = {"BLOCK_M": 64, "BLOCK_N": 32, "NUM_STAGES": 2, "num_warps": 8}
        if spec.dtype is torch.float32:  # without tensor cores: limited by registers
            small = large = {"BLOCK_M": 32, "BLOCK_N": 16, "NUM_STAGES": 2, "num_warps": 8}

        def tiling(options: dict[str, int]) -> _Tiling:
            options["BLOCK_M"] = max(options["BLOCK_M"], next_power_of_2(group))
            queries, bound = options["BLOCK_M"] // group, {"MAX_PARTS": next_power_of_2(parts)}
            plan = {"NUM_KV_HEADS": heads, "BLOCK_Q": queries, "num_programs": parts}
            return _Tiling(queries, plan | bound, shared | options | bound)

        self._small, self._large = tiling(small), tiling(large)
        self._whole = replace(self._large, plan=self._large.plan | {"num_programs": 1})  # never split
        self._tile_part = torch.empty(parts * large["BLOCK_M"], dim, dtype=float32, device=device)
        self._tile_lse = torch.empty(parts * large["BLOCK_M"], dtype=float32, device=device)

    def prepare(self, batch: Batch, page_table: Tensor, out_loc: Tensor) -> StepAttention:
        shape, layout = batch.shape, batch.layout
        assert shape.decodes <= self.spec.max_rows, f"{shape.decodes} sequences decode, of {self.spec.max_rows}"
        is_few = shape.queries == 1 and not shape.chunks and shape.decodes <= FEW_ROWS
        kernel = self._decode_few if is_few else self._decode[1 if shape.queries == 1 else self.spec.max_queries]
        if shape.decodes:
            # The first of several queries attends to that many more keys.
            reach = self._window and self._window + kernel["MAX_QUERIES"] - 1
            plan_decode[(ceil_div(shape.decodes, PLAN_ROWS.value),)](
                layout.rows,
                layout.kv_lens,
                self._work,
                self._counters,
                shape.decodes,
                WINDOW=reach,
                EVEN=self._cuda is not None and kernel is self._decode[1],
                **{name: kernel[name] for name in ("NUM_SPLITS", "NUM_KV_HEADS", "TILE_KEYS")},
            )
        chunks = self._list_chunks(layout, shape) if shape.chunks else None
        is_fused = chunks is None and shape.queries == 1 and shape.decodes <= self._fused_rows
        return _Step(self.ops, batch, page_table, out_loc, self, kernel, chunks, is_fused)

    def _list_chunks(self, layout: SeqLayout, shape: StepShape) -> _Tiles:
        longest = min(shape.context, self._window) if self._window else shape.context
        tiling = self._tiling(shape.chunk_tokens, shape.chunks, longest)
        max_items = max(
            shape.chunk_tokens // tiling.queries + shape.chunks,
            tiling.plan["num_programs"] // self.spec.kind.kv_heads,
        )
        size = COUNTERS.value + tiling.plan["MAX_PARTS"] + TILE.value * max_items
        work = torch.empty(size, dtype=torch.int32, device=layout.kv_lens.device)
        plan_prefill[(shape.chunks,)](
            layout.rows,
            layout.kv_lens,
            layout.cu_query_lens,
            work,
            shape.decodes,
            shape.chunks,
            WINDOW=self._window,
            **tiling.plan,
        )
        return _Tiles(tiling, work, max_items * self.spec.kind.kv_heads)

    def _tiling(self, num_tokens: int, num_chunks: int, longest: int) -> _Tiling:
        """Select large tiles if they occupy every SM, or if a long context splits them anyway."""
        num_large = num_tokens // self._large.queries
        if num_large * self.spec.kind.kv_heads >= self._num_sms:
            return self._whole
        return self._large if longest >= LONG_CONTEXT and num_large >= num_chunks else self._small

    def run_chunks(
        self, q: Tensor, pages: Pages, page_table: Tensor, chunks: _Tiles, out: Tensor, sinks: Tensor | None
    ) -> None:
        """Write the output of the prompt chunks to their rows of `out`."""
        assert (sinks is not None) == self.spec.kind.has_sinks, "layers have sinks if their `GroupedQuery` says so"
        if self._cuda is not None and chunks.tiling is self._whole and q.dtype is torch.float16:
            data, scales = data_and_scale(pages)
            if self._cuda.cuda_prefill(
                q, data, scales, page_table, chunks.work, chunks.tiling.plan["MAX_PARTS"], out, self._scale,
                self._window, self._num_sms,
            ) and not is_compiling_ahead():  # fmt: skip
                return  # otherwise also note Triton's kernel, which long contexts take
        prefill_attention[(chunks.grid,)](
            q,
            *data_and_scale(pages),
            page_table,
            chunks.work,
            self._tile_part,
            self._tile_lse,
            out,
            sinks,
            self._scale,
            q.stride(0),
            page_table.stride(0),
            *page_strides(pages),
            WINDOW=self._window,
            SOFTCAP=self._softcap,
            IS_FP8=isinstance(pages, QuantizedPages),
            **chunks.tiling.kernel,
        )

    def run_decode(
        self,
        q: Tensor,
        pages: Pages,
        step: _Step,
        out: Tensor,
        sinks: Tensor | None,
        heads: HeadTransform | None = None,
    ) -> None:
        """Write the output of the decoding sequences to the first rows of `out`.

        With `heads`, `q` has q, k and v, which are not normalised and rotated yet.
        """
        table, kernel = step.page_table, step.kernel
        assert (sinks is not None) == self.spec.kind.has_sinks, "layers have sinks if their `GroupedQuery` says so"
        if self._cuda is not None and kernel is self._decode[1] and q.dtype is torch.float16:
            data, scales = data_and_scale(pages)
            if self._cuda.cuda_decode(
                q, data, scales, table, self._work, self._counters, self._part, self._lse, out, self._scale,
                kernel["NUM_SPLITS"], self._window,
            ):  # fmt: skip
                return
        is_chained = len(q) <= MAX_CHAINED
        has_norm = heads is not None and heads.q_weight is not None
        decode_attention[(kernel["NUM_SPLITS"] * self.spec.kind.kv_heads,)](
            q,
            *data_and_scale(pages),
            table,
            step.batch.layout.cu_query_lens,
            self._work,
            self._counters,
            self._part,
            self._lse,
            out,
            sinks,
            heads.q_weight if heads is not None else None,
            heads.k_weight if heads is not None else None,
            heads.cos_sin if heads is not None else None,
            heads.q_scale if heads is not None else None,
            step.out_loc if heads is not None else None,
            self._scale,
            heads.eps if heads is not None else 0.0,
            q.stride(0),
            table.stride(0),
            *page_strides(pages),
            WINDOW=self._window,
            SOFTCAP=self._softcap,
            FUSED=heads is not None,
            HAS_NORM=has_norm,
            NORMS_V=heads is not None and heads.norms_v,
            IS_FP8=isinstance(pages, QuantizedPages),
            **pdl_options(q.device, is_chained),
            **kernel,
        )


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The tiles of the prompt chunks."""

    tiling: _Tiling
    work: Tensor  # the output of `plan_prefill`
    grid: int  # enough programs for any split of the tiles


@dataclass(frozen=True, slots=True)
class _Step(StepAttention):
    """The work of a step: its sequences that decode, with the options of `decode_attention`, then its chunks."""

    backend: TritonAttention
    kernel: dict[str, int]
    chunks: _Tiles | None
    is_fused: bool  # the decode kernel does all of `attend`

    def attend(self, qkv: Tensor, heads: HeadTransform, pages: Pages) -> Tensor:
        if not self.is_fused or heads.reads:
            return StepAttention.attend(self, qkv, heads, pages)
        kind = self.backend.spec.kind
        out = qkv.new_empty(len(qkv), kind.heads, kind.head_dim)
        self.backend.run_decode(qkv.view(len(qkv), -1, kind.head_dim), pages, self, out, heads.sinks, heads)
        return out

    def forward(self, q: Tensor, pages: Pages, sinks: Tensor | None = None) -> Tensor:
        spec = self.backend.spec
        assert q.stride()[1:] == (spec.kind.head_dim, 1), "the heads of a token must be adjacent"
        out = torch.empty(q.shape, dtype=spec.dtype, device=q.device)
        if self.batch.shape.decodes:
            self.backend.run_decode(q, pages, self, out, sinks)
        if self.chunks is not None:
            self.backend.run_chunks(q, pages, self.page_table, self.chunks, out, sinks)
        return out
