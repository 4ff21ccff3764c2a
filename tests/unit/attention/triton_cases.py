"""Checks of the Triton backend that hold on every device: the interpreter's tests and those on a GPU share them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from contract.harness import Span, make_batch
from contract.test_attention import give_back, setting, sinks_of
from minisgl.attention.backend import MixerSpec
from minisgl.attention.triton import TritonAttention
from minisgl.core.layout import Flag
from minisgl.core.plan import Batch, SeqLayout, StepShape
from minisgl.core.specs import GroupedQuery
from minisgl.engine.batch import step_shape
from minisgl.kernels.triton.norm import norm_rope_store
from minisgl.ops import reference
from minisgl.ops.quantized import QuantizedPages, round_fp8
from minisgl.ops.reference import HeadTransform
from minisgl.ops.table import OpTable

Mix = list[tuple[int, int]]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}  # of the norm of one sequence's output
EPS = 1e-6
Option = tuple[float, bool]  # a soft cap, and whether there are sinks
PLAIN: Option = (0.0, False)


class Case:
    """Inputs of one step on `device` and a backend for it."""

    def __init__(
        self,
        mix: Mix,
        page_size: int,
        group: int,
        dim: int,
        dtype: torch.dtype,
        device: str,
        seed: int = 0,
        window: int | None = None,
        max_queries: int = 1,
        option: Option = PLAIN,
    ) -> None:
        pages, table, q, self.spans = setting(mix, page_size, group, dim, dtype, seed)
        self.pages: Any = apart(pages.to(device))
        self.table, self.q = table.to(device), q.to(device)
        self.kv_heads, self.dim, self.page_size = pages.shape[2], dim, page_size
        batch = make_batch(self.spans)
        if max_queries > 1:  # the first sequences decode
            for sequence in batch.sequences[: next((i for i, (n, _) in enumerate(mix) if n > max_queries), len(mix))]:
                sequence["flags"] |= Flag.FROM_DEVICE
            batch = replace(batch, shape=step_shape(batch.sequences))
        self.batch = on(batch, device)
        softcap, has_sinks = option
        self.sinks = sinks_of(q.shape[1]).to(device) if has_sinks else None
        scale = dim**-0.5
        self.kind = GroupedQuery(q.shape[1], self.kv_heads, dim, scale, window, softcap=softcap, has_sinks=has_sinks)
        spec = MixerSpec(device, dtype, self.kind, page_size, len(mix) + 1, max_queries)
        self.attention = TritonAttention(spec, OpTable())
        generator = torch.Generator().manual_seed(seed)
        positions = self.batch.positions.long()
        page = self.table[self.batch.token_rows.long(), positions // page_size].long()
        self.out_loc = page * page_size + positions % page_size
        angle = torch.rand(int(positions.max()) + 1, dim // 2, generator=generator) * 6
        self.cos_sin = torch.cat([angle.cos(), angle.sin()], -1).to(device)
        self.q_scale = None if option == PLAIN else (2.0 ** (torch.arange(len(angle)) % 3 - 1)).to(device)
        norm = dtype if window is None else torch.float32  # the two ways in which families have norms and windows
        self.weights = [(torch.rand(dim, generator=generator) + 0.5).to(device, norm) for _ in range(2)]
        new = torch.randn(len(positions), 2 * self.kv_heads, dim, generator=generator).to(device, dtype)
        self.qkv = torch.cat([self.q, new], 1)

    def step(self) -> Any:
        return self.attention.prepare(self.batch, self.table, self.out_loc)

    def forward(self) -> torch.Tensor:
        """Of queries that lie between other heads, as they do in the result of the projection."""
        q = self.qkv[:, : self.q.shape[1]]
        poison(self.q)
        pages = self.pages
        if self.kind.window is not None and isinstance(pages, torch.Tensor):
            pages = apart(pages)
            give_back(pages, self.table, self.spans, self.kind.window)
        return self.step().forward(q, pages, self.sinks)

    def expected(self, q: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        kind = self.kind
        return reference.paged_attention(
            q, pages, self.table, self.batch.layout, kind.scale, kind.window, kind.softcap, self.sinks
        )

    def heads(self, with_norm: bool) -> HeadTransform:
        q_weight, k_weight = self.weights if with_norm else (None, None)
        return HeadTransform(q_weight, k_weight, EPS, self.cos_sin, self.q_scale, self.sinks)


def apart(pages: torch.Tensor) -> torch.Tensor:
    """Return a copy in which the pages lie apart, as where other layers' are between them."""
    memory = torch.full((len(pages), pages[0].numel() + 64), 0.0, dtype=torch.float32, device=pages.device)
    copy = memory.to(pages.dtype)[:, : pages[0].numel()].view(pages.shape)
    copy.view(torch.uint8)[:] = pages.view(torch.uint8)
    return copy


def on(batch: Batch, device: str) -> Batch:
    layout = batch.layout
    layout = replace(
        layout,
        rows=layout.rows.to(device),
        kv_lens=layout.kv_lens.to(device),
        cu_query_lens=layout.cu_query_lens.to(device),
    )
    return replace(batch, layout=layout, positions=batch.positions.to(device), token_rows=batch.token_rows.to(device))


def poison(like: torch.Tensor) -> None:
    """Makes it likely that the next tensor of this size is full of NaN until it is written."""
    torch.full_like(like, float("nan"))


def assert_near(out: torch.Tensor, expected: torch.Tensor, spans: list[Span], tolerance: float = 0.0) -> None:
    assert out.is_contiguous() and out.dtype == expected.dtype and out.shape == expected.shape
    sizes = [len(s.ids) for s in spans]
    for span, a, b in zip(spans, out.double().split(sizes), expected.double().split(sizes), strict=True):
        error = float((a - b).norm() / b.norm())
        assert error < (tolerance or TOLERANCE[out.dtype]), f"{span.start} + {len(span.ids)}: relative error {error}"


def check_forward(
    mix: Mix,
    page_size: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
    window: int | None = None,
    max_queries: int = 1,
    option: Option = PLAIN,
) -> None:
    case = Case(mix, page_size, group, dim, dtype, device, seed, window, max_queries, option)
    assert_near(case.forward(), case.expected(case.q, case.pages), case.spans)


def check_drafted(
    mix: Mix,
    page_size: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    device: str,
    max_queries: int,
    window: int | None = None,
    fp8_cache: bool = False,
    option: Option = PLAIN,
) -> None:
    """Sequences with drafts by the kernel that decodes, with unused sequences and a sequence that pads after them."""
    case = Case(mix, page_size, group, dim, dtype, device, 0, window, max_queries, option)
    if fp8_cache:
        case.attention = TritonAttention(replace(case.attention.spec, fp8_cache=True), OpTable())
        case.pages = quantized(case.pages)
    layout, used, extra = case.batch.layout, len(case.q), 2 * max_queries
    rows, kv_lens = (torch.cat([t, t.new_zeros(1)]) for t in (layout.rows, layout.kv_lens))
    kv_lens[-1] = extra
    cu_query_lens = torch.cat([layout.cu_query_lens, layout.cu_query_lens.new_full((1,), used + extra)])
    shape = StepShape(len(mix) + 1, max_queries)
    case.batch = replace(case.batch, shape=shape, layout=SeqLayout(rows, kv_lens, cu_query_lens))
    q = torch.cat([case.q, torch.full_like(case.q[:1], 0.5).expand(extra, -1, -1)])
    poison(q)
    out = case.step().forward(q, case.pages, case.sinks)
    case.batch = replace(case.batch, layout=layout)
    assert_near(out[:used], case.expected(case.q, case.pages), case.spans)


def check_padded(
    mix: Mix,
    group: int,
    dim: int,
    dtype: torch.dtype,
    device: str,
    window: int | None = None,
    option: Option = PLAIN,
) -> None:
    """A step as graphs have it: unused decoding sequences without keys, and a chunk that only pads."""
    case = Case(mix, 64, group, dim, dtype, device, window=window, option=option)
    layout, used, extra = case.batch.layout, len(case.q), 5
    decodes = next((i for i, (queries, _) in enumerate(mix) if queries > 1), len(mix))
    first, chunks = min(decodes + 3, len(mix) + 1), len(mix) - decodes + 3
    rows, kv_lens = torch.zeros(2, first + chunks, dtype=torch.int32, device=device)
    cu_query_lens = torch.full((first + chunks + 1,), used + extra, dtype=torch.int32, device=device)
    kv_lens[first + len(mix) - decodes] = extra
    for to, own in ((rows, layout.rows), (kv_lens, layout.kv_lens)):
        to[:decodes] = own[:decodes]
        to[first : first + len(mix) - decodes] = own[decodes:]
    cu_query_lens[first : first + len(mix) - decodes + 1] = layout.cu_query_lens[decodes:]
    shape, padded = StepShape(first, 1, chunks, used + extra, used + extra), SeqLayout(rows, kv_lens, cu_query_lens)
    case.batch = replace(case.batch, shape=shape, layout=padded)
    q = torch.cat([case.q, torch.full_like(case.q[:1], 0.5).expand(extra, -1, -1)])
    poison(q)
    out = case.step().forward(q, case.pages, case.sinks)
    case.batch = replace(case.batch, layout=layout)
    assert_near(out[:used], case.expected(case.q, case.pages), case.spans)


def check_attend(
    mix: Mix,
    page_size: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    device: str,
    with_norm: bool,
    seed: int = 0,
    window: int | None = None,
    option: Option = PLAIN,
) -> None:
    """Decode with all that stands before it; the slots of the new tokens are NaN at the start."""
    case = Case(mix, page_size, group, dim, dtype, device, seed, window, option=option)
    case.pages[case.out_loc // page_size, :, :, case.out_loc % page_size] = float("nan")
    heads, pages, qkv = case.heads(with_norm), case.pages.clone(), case.qkv.flatten(1)
    poison(case.q)
    out = case.step().attend(qkv.clone(), heads, case.pages)
    q = reference.norm_rope_store(qkv, heads, case.batch.positions, pages, case.out_loc)
    assert_near(out, case.expected(q, pages), case.spans)
    assert torch.equal(case.pages.isnan(), pages.isnan())
    stored, wanted = case.pages.nan_to_num(0.0), pages.nan_to_num(0.0)
    assert torch.equal(stored == 0, wanted == 0)
    assert float((stored - wanted).abs().max()) <= 0.05  # a rounding apart


def quantized(pages: torch.Tensor) -> QuantizedPages:
    """The pages rounded; NaN stays NaN."""
    q, scale = round_fp8(pages.reshape(-1, pages.shape[-1]), 0)
    return QuantizedPages(apart(q.view(pages.shape)), apart(scale.view(pages.shape[:-1])))


def check_fp8(
    mix: Mix,
    page_size: int,
    group: int,
    dim: int,
    dtype: torch.dtype,
    device: str,
    window: int | None,
    values: float = 1.0,
    option: Option = PLAIN,
) -> None:
    """Pages in 8 bits: products, and what is stored, are those of the rounded numbers. `values` is the size of V."""
    case = Case(mix, page_size, group, dim, dtype, device, 0, window, option=option)
    case.pages[:, 1] *= values
    case.qkv[:, -case.kv_heads :] *= values
    case.attention = TritonAttention(replace(case.attention.spec, fp8_cache=True), OpTable())
    case.pages = quantized(case.pages)
    assert_near(case.forward(), case.expected(case.q, case.pages), case.spans)
    page, offset = case.out_loc // page_size, case.out_loc % page_size
    case.pages.scale[page, :, :, offset] = float("nan")
    pages = QuantizedPages(case.pages.data.clone(), case.pages.scale.clone())
    heads, qkv = case.heads(True), case.qkv.flatten(1)
    case.attention.ops = replace(case.attention.ops, norm_rope_store=norm_rope_store)
    out = case.step().attend(qkv.clone(), heads, case.pages)
    q = reference.norm_rope_store(qkv, heads, case.batch.positions, pages, case.out_loc)
    # A rounded number may be the next, which counts for more in a short head.
    assert_near(out, case.expected(q, pages), case.spans, 0.02 if q.shape[-1] >= 128 else 0.03)
    stored, wanted = (p.dense(page.unique()).nan_to_num(0.0) for p in (case.pages, pages))
    assert float((stored - wanted).norm() / wanted.norm()) < 0.01


def check_needle(length: int, dtype: torch.dtype, device: str) -> None:
    """One key of many has most of the weight, wherever it is; rounding the cache to 8 bits changes the output little.

    The expected output is that of the pages before they are rounded.
    """
    for place in (0, length // 3, length - 1):
        for queries in (1, 32):
            case = Case([(queries, length + queries)], 64, 4, 128, dtype, device)
            page, offset = case.table[case.batch.layout.rows[0].long(), place // 64].long(), place % 64
            direction = torch.ones(case.dim, device=device).to(dtype)
            case.q[:] += direction
            case.pages[page, 0, :, offset] = direction * (np.log(length) + 3) / case.dim**0.5
            want = case.expected(case.q, case.pages)
            needle = case.pages[page, 1, :, offset].repeat_interleave(4, 0)
            assert (want - needle).norm(dim=-1).mean() < 0.3 * needle.norm(dim=-1).mean(), "it has most of the weight"
            case.attention = TritonAttention(replace(case.attention.spec, fp8_cache=True), OpTable())
            case.pages = quantized(case.pages)
            assert_near(case.step().forward(case.q, case.pages), want, case.spans, 0.04)


def check_repeats(mix: Mix, group: int, dtype: torch.dtype, device: str) -> None:
    """Whichever program comes last merges the parts in the same order."""
    case = Case(mix, 64, group, 128, dtype, device)
    first = case.forward()
    for _ in range(4):
        assert torch.equal(case.forward(), first)
