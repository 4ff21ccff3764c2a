"""The Triton attention backend on a GPU, with its real program order and rounding, against the reference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from contract.test_attention import MIXES, OPTIONS
from minisgl.attention.triton import TritonAttention
from minisgl.engine.graphs.capture import Capture
from minisgl.kernels.triton.linear import gemv
from minisgl.kernels.triton.norm import norm_rope_store
from minisgl.ops import reference
from minisgl.ops.deferred import finished
from minisgl.ops.quantized import Format
from minisgl.ops.table import OpTable, load_ops
from unit.attention.triton_cases import (
    PLAIN,
    Case,
    Option,
    assert_near,
    check_attend,
    check_drafted,
    check_forward,
    check_fp8,
    check_needle,
    check_padded,
    check_repeats,
    quantized,
)

pytestmark = pytest.mark.gpu
BF16, CUDA = torch.bfloat16, "cuda"
LONG = {
    "long decode": [(1, 20_000), (1, 5), (1, 131)],
    "many decodes": [(1, 1 + 37 * i % 900) for i in range(256)],
    "many prompts": [(600 + i, 600 + i) for i in range(30)],
    "short chunk after a long context": [(64, 20_000)],
    "long and short": [(1, 6000), (1, 64), (700, 4000), (5, 8000), (129, 129)],
}


@pytest.mark.parametrize("mix", ["decode", "chunks", "mixed"])
@pytest.mark.parametrize(
    ("page_size", "group", "dim", "window"),
    [(64, 4, 128, None), (16, 3, 64, 40), (64, 2, 256, None), (32, 5, 128, 70), (1, 2, 64, None), (64, 1, 256, 33)],
)
def test_pages_of_8_bits(mix: str, page_size: int, group: int, dim: int, window: int | None):
    check_fp8(MIXES[mix], page_size, group, dim, BF16, CUDA, window)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("window", [None, 300])
def test_decode_over_pages_of_8_bits(dim: int, window: int | None):
    """One row in a chain, few rows with all before attention in one kernel, and many rows."""
    for mix in ([(1, 1)], [(1, 700)], [(1, 30 * i + 1) for i in range(40)], [(1, 10 * i + 1) for i in range(70)]):
        check_fp8(mix, 64, 4, dim, BF16, CUDA, window)


@pytest.mark.parametrize(
    "mix",
    [
        [(1, 60 + 13 * i % 190) for i in range(700)],
        [(1, 2000 + 37 * i) for i in range(20)],
        [(1, 30 + i) for i in range(9)],
    ],
    ids=["whole sequences by ticket", "parts", "short"],
)
@pytest.mark.parametrize(("page_size", "group"), [(64, 1), (128, 5), (64, 8)])
def test_more_rows_over_pages_of_8_bits(mix: list[tuple[int, int]], page_size: int, group: int):
    check_fp8(mix, page_size, group, 128, BF16, CUDA, None)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("page_size", "group"), [(64, 1), (128, 4), (64, 5), (64, 8)])
def test_many_chunks_over_pages_of_8_bits(page_size: int, group: int, window: int | None):
    """Tiles of `prefill.cu`, which are not split: more of them than SMs, and more than two for each."""
    for mix in (LONG["many prompts"], [(1, 50), (1, 900), (2300, 6000), (9000, 9100), (129, 129), (64, 64)]):
        check_fp8(mix, page_size, group, 128, BF16, CUDA, window)


def test_what_is_beyond_the_last_key_does_not_count():
    """Pages of 8 bits with NaN there."""
    case = Case([(1, 1 + 29 * i) for i in range(40)], 64, 4, 128, BF16, CUDA)
    case.attention = TritonAttention(replace(case.attention.spec, fp8_cache=True), OpTable())
    case.attention.ops = replace(case.attention.ops, norm_rope_store=norm_rope_store)
    case.pages = quantized(case.pages)

    def attend() -> torch.Tensor:
        return case.step().attend(case.qkv.flatten(1).clone(), case.heads(True), case.pages)

    want = attend()
    for row, span in enumerate(case.spans):
        length = span.start + 1
        page = int(case.table[case.batch.layout.rows[row].long(), (length - 1) // 64])
        case.pages.data.view(torch.uint8)[page, :, :, (length - 1) % 64 + 1 :] = 0x7F
        case.pages.scale[page, :, :, (length - 1) % 64 + 1 :] = torch.nan
    assert want.isfinite().all() and torch.equal(attend(), want)


def test_a_needle_among_32_000_keys_of_8_bits():
    check_needle(32_000, BF16, CUDA)


@pytest.mark.parametrize("page_size", [16, 32, 64, 128])
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (2, 128), (3, 64), (4, 128), (5, 128), (7, 64), (16, 128)])
@pytest.mark.parametrize("mix", MIXES)
def test_forward_matches_reference(mix: str, group: int, dim: int, page_size: int):
    check_forward(MIXES[mix], page_size, group, dim, BF16, CUDA)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize(("dim", "dtype"), [(64, torch.float16), (256, BF16), (128, torch.float32)], ids=str)
@pytest.mark.parametrize("mix", MIXES)
def test_forward_with_other_dtypes_and_head_dims(mix: str, dim: int, dtype: torch.dtype, page_size: int):
    check_forward(MIXES[mix], page_size, 2, dim, dtype, CUDA)


@pytest.mark.parametrize("mix", LONG)
@pytest.mark.parametrize("group", [2, 5])
def test_long_sequences_and_large_batches(mix: str, group: int):
    check_forward(LONG[mix], 64, group, 128, BF16, CUDA)


@pytest.mark.parametrize(
    "mix",
    [[(1, 1)], [(1, 700)], [(1, 20_000)], MIXES["decode"], [(1, 30 * i + 1) for i in range(40)]],
    ids=lambda mix: f"{len(mix)} x {mix[0][1]}",
)
@pytest.mark.parametrize("group", [2, 5])
@pytest.mark.parametrize("with_norm", [False, True])
def test_attend_matches_reference(mix: list[tuple[int, int]], group: int, with_norm: bool):
    check_attend(mix, 64, group, 128, BF16, CUDA, with_norm)


@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("mix", [[(1, 1)], [(1, 300)], [(1, 20_000)]], ids=str)
def test_one_row_behind_its_projection(mix: list[tuple[int, int]], is_fp8: bool):
    case = Case(mix, 64, 4, 128, BF16, CUDA)
    weight = torch.randn(case.qkv[0].numel(), 16384, dtype=BF16, device=CUDA) / 128
    check_behind(case, is_fp8, lambda x: gemv(x, weight, None)[0])


@pytest.mark.parametrize("group", [4, 5])
@pytest.mark.parametrize(
    "mix",
    [
        [(1, 40 + 7 * i) for i in range(9)],
        [(1, 64 * i % 2048 + 1 + i % 2) for i in range(64)],
        [(1, 60 + 13 * i % 190) for i in range(128)],
    ],
    ids=len,
)
def test_more_rows_behind_their_projection(mix: list[tuple[int, int]], group: int):
    case = Case(mix, 64, group, 128, BF16, CUDA)
    weight = Format(8, 0).empty(case.qkv[0].numel(), 16384, torch.device(CUDA))
    weight.round_from(torch.randn(*weight.shape, device=CUDA) / 128)
    ops = load_ops("triton")
    check_behind(case, True, lambda x: finished(ops.linear(x, weight, None)))


def check_behind(case: Case, is_fp8: bool, project: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The kernel starts while the projection still runs, and must not read what an earlier replay left."""
    if is_fp8:
        case.attention = TritonAttention(replace(case.attention.spec, fp8_cache=True), load_ops("triton"))
        case.pages = quantized(case.pages)
    heads, x = case.heads(True), torch.zeros(len(case.spans), 16384, dtype=BF16, device=CUDA)

    def step() -> torch.Tensor:
        attention = case.step()
        qkv = project(x.clone())  # an ordinary launch after the plan, then the chain
        return attention.attend(qkv, heads, case.pages)

    with Capture() as capture:
        graph, out = capture(step)
    for _ in range(5):
        x.normal_()
        with torch.inference_mode():
            out.fill_(float("nan"))
        graph.replay()
        qkv, pages = project(x), copy.deepcopy(case.pages)
        q = reference.norm_rope_store(qkv, heads, case.batch.positions, pages, case.out_loc)
        assert_near(out, case.expected(q, pages), case.spans, 0.02 if is_fp8 else 0.0)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("mix", [*MIXES, *LONG])
def test_padded_steps_match_reference(mix: str, window: int | None):
    check_padded((MIXES | LONG)[mix], 4, 128, BF16, CUDA, window)


@pytest.mark.parametrize("window", [1, 50, 512, 4096])
@pytest.mark.parametrize(("page_size", "group", "dim"), [(64, 4, 256), (64, 4, 128), (16, 3, 64), (1, 2, 128)])
@pytest.mark.parametrize("mix", [*MIXES, *LONG])
def test_sliding_windows(mix: str, page_size: int, group: int, dim: int, window: int):
    check_forward((MIXES | LONG)[mix], page_size, group, dim, BF16, CUDA, window=window)


@pytest.mark.parametrize("window", [1, 33, 64, 500])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_attend_with_sliding_window(dim: int, window: int):
    for mix in ([(1, 1)], [(1, 700)], MIXES["decode"], [(1, 30 * i + 1) for i in range(40)]):
        check_attend(mix, 64, 4, dim, BF16, CUDA, True, window=window)


DRAFTED = [(3, 3), (1, 70), (5, 1700), (2, 128), (5, 9000), (1, 1)]


@pytest.mark.parametrize("dim", [80, 96, 192, 512])
@pytest.mark.parametrize("window", [None, 300])
def test_other_head_sizes(dim: int, window: int | None):
    """Decode, prompts and both, split and not, with drafts, and over pages of 8 bits; what stands before attention."""
    for mix in (MIXES | LONG).values():
        check_forward(mix, 64, 4, dim, BF16, CUDA, window=window)
    check_forward(MIXES["mixed"], 16, 2, dim, torch.float32, CUDA, window=window)
    check_padded(MIXES["mixed"], 8, dim, BF16, CUDA, window)
    for mix in ([(1, 700)], [(1, 30 * i + 1) for i in range(40)], [(1, 10 * i + 1) for i in range(70)]):
        check_attend(mix, 64, 8, dim, BF16, CUDA, True, window=window)
        check_fp8(mix, 64, 4, dim, BF16, CUDA, window)
    check_fp8(MIXES["mixed"], 64, 4, dim, BF16, CUDA, window)
    for fp8_cache in (False, True):
        check_drafted(DRAFTED, 64, 4, dim, BF16, CUDA, 5, window, fp8_cache)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    ("page_size", "group", "dim", "window"),
    [(64, 8, 64, 128), (64, 8, 64, None), (16, 2, 256, 300), (64, 4, 128, None)],
)
def test_options_of_scores(page_size: int, group: int, dim: int, window: int | None, option: str):
    """Those of GPT-OSS, Gemma 2 and of both, with all of `test_other_head_sizes`."""
    for mix in (MIXES | LONG).values():
        check_forward(mix, page_size, group, dim, BF16, CUDA, window=window, option=OPTIONS[option])
    check_padded(MIXES["mixed"], group, dim, BF16, CUDA, window, OPTIONS[option])
    for mix in ([(1, 700)], [(1, 30 * i + 1) for i in range(40)], [(1, 10 * i + 1) for i in range(70)]):
        check_attend(mix, page_size, group, dim, BF16, CUDA, False, window=window, option=OPTIONS[option])
    check_fp8(MIXES["mixed"], page_size, group, dim, BF16, CUDA, window, option=OPTIONS[option])
    for fp8_cache in (False, True):
        check_drafted(DRAFTED, page_size, group, dim, BF16, CUDA, 5, window, fp8_cache, OPTIONS[option])


@pytest.mark.parametrize("mix", LONG)
def test_same_batch_gives_same_bits(mix: str):
    check_repeats(LONG[mix], 2, BF16, CUDA)


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize(
    ("dim", "window", "option"), [(128, None, PLAIN), (128, 300, PLAIN), (64, 300, OPTIONS["both"]), (512, None, PLAIN)]
)
def test_captured_step_reads_new_sequence_lengths(is_fused: bool, dim: int, window: int | None, option: Option):
    """A graph captured with short sequences replays long ones; each layer draws tickets of its own."""
    case = Case([(1, 5000), (1, 900), (1, 64), (1, 3)], 64, 2, dim, BF16, CUDA, window=window, option=option)
    case.attention.ops = replace(case.attention.ops, norm_rope_store=norm_rope_store)
    lens, heads = case.batch.layout.kv_lens.clone(), case.heads(True)
    expected = case.expected(case.q, case.pages)
    outs: list[torch.Tensor] = []

    def step() -> None:
        attention = case.step()
        for _ in range(3):
            if is_fused:
                outs.append(attention.attend(case.qkv.flatten(1).clone(), heads, case.pages))
            else:
                outs.append(attention.forward(case.q, case.pages, case.sinks))

    if is_fused:
        pages = case.pages.clone()
        qkv = case.qkv.flatten(1).clone()
        q = reference.norm_rope_store(qkv, heads, case.batch.positions, pages, case.out_loc)
        expected = case.expected(q, pages)
    case.batch.layout.kv_lens.copy_(torch.tensor([1, 2, 1, 1], dtype=torch.int32))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    outs.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    case.batch.layout.kv_lens.copy_(lens)
    for _ in range(3):
        for out in outs:
            out.fill_(float("nan"))
        graph.replay()
        for out in outs:
            assert_near(out, expected, case.spans)


@pytest.mark.parametrize("part", range(8))
def test_random_mixes(part: int):
    rng = np.random.default_rng(part)
    for seed in range(25):
        window = None if seed % 2 else int(rng.integers(1, 1500))
        decodes = int(rng.integers(0, 30))
        chunks = int(rng.integers(0 if decodes else 1, 4))
        mix = [(1, int(n)) for n in rng.integers(1, 1 << int(rng.integers(2, 13)), decodes)]
        for n in rng.integers(2, 600, chunks):
            mix.append((int(n), int(n + rng.integers(0, 1 << int(rng.integers(1, 12))))))
        page_size, group = int(rng.choice([16, 64])), int(rng.choice([2, 4]))
        check_forward(mix, page_size, group, 128, BF16, CUDA, seed, window)
