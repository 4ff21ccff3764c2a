"""The attention kernels against the reference, on pages full of NaN.

In float16, since the interpreter gets products of bfloat16 wrong.
"""

from __future__ import annotations

import pytest
import torch

from contract.test_attention import MIXES, OPTIONS
from minisgl.attention import triton as triton_attention
from minisgl.kernels.hopper import attention as cuda_attention
from minisgl.kernels.hopper import kernels
from support.cuda_on_cpu import compiler, emulate
from unit.attention.triton_cases import (
    Case,
    check_attend,
    check_drafted,
    check_forward,
    check_fp8,
    check_needle,
    check_padded,
    check_repeats,
    poison,
)

HALF, CPU = torch.float16, "cpu"
Shape = tuple[int, int, int]


def pairs(shapes: list[Shape]) -> list[tuple[str, Shape]]:
    """Each shape with every second mix, each mix with every second shape: the interpreter is slow."""
    return [(mix, shape) for i, mix in enumerate(MIXES) for shape in shapes[i % 2 :: 2]]


@pytest.mark.parametrize(
    ("mix", "shape"),
    pairs([(1, 2, 64), (16, 1, 64), (16, 16, 64), (32, 3, 64), (64, 5, 64), (64, 2, 128), (128, 7, 64)]),
)
def test_forward(mix: str, shape: Shape):
    check_forward(MIXES[mix], *shape, HALF, CPU)


@pytest.mark.parametrize("mix", ["decode", "mixed"])
def test_float32(mix: str):
    check_forward(MIXES[mix], 16, 2, 64, torch.float32, CPU)


MANY, SPLIT = [(1, 40 + i) for i in range(45)], [(1, 5), (1, 1200), (5, 700)]  # whole ones by ticket, and parts


@pytest.mark.parametrize("dim", [80, 96, 192, 256, 512])
def test_other_head_sizes(dim: int):
    for mix, page_size, window in (([(1, 100), (1, 3), (40, 90)], 64, None), (SPLIT, 16, 500)):
        check_forward(mix, page_size, 2, dim, HALF, CPU, window=window)
    check_attend([(1, 100), (1, 3), (1, 65)], 64, 3, dim, HALF, CPU, True)
    check_drafted([(3, 3), (1, 70), (5, 300)], 64, 2, dim, HALF, CPU, 5, 40)
    check_fp8([(1, 100), (1, 3), (30, 70)], 64, 2, dim, HALF, CPU, None)


@pytest.mark.parametrize(
    ("option", "mix", "page_size", "group", "dim", "window"),
    [
        ("sinks", "split", 64, 2, 64, None),
        ("sinks", "many", 16, 8, 64, 40),
        ("softcap", "split", 16, 1, 96, 300),
        ("softcap", "mixed", 64, 3, 64, None),
        ("both", "mixed", 16, 2, 80, 40),
        ("both", "split", 64, 4, 64, 700),
    ],
)
def test_options_of_scores(option: str, mix: str, page_size: int, group: int, dim: int, window: int | None):
    """A sink in each part of a split sequence, or in none, changes outputs by more than the tolerance."""
    chosen = (MIXES | {"many": MANY, "split": SPLIT})[mix]
    check_forward(chosen, page_size, group, dim, HALF, CPU, window=window, option=OPTIONS[option])
    decodes = [pair for pair in chosen if pair[0] == 1]
    check_attend(decodes, page_size, group, dim, HALF, CPU, option == "both", window=window, option=OPTIONS[option])


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_scores_with_drafts_graphs_and_pages_of_8_bits(option: str):
    for fp8_cache in (False, True):
        check_drafted(DRAFTED, 64, 3, 64, HALF, CPU, 5, 40, fp8_cache, OPTIONS[option])
    check_padded(MIXES["mixed"], 2, 64, HALF, CPU, option=OPTIONS[option])
    check_fp8([(1, 300), (1, 30), (40, 90)], 64, 2, 80, HALF, CPU, None, option=OPTIONS[option])


@pytest.mark.skipif(compiler is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("option", OPTIONS)
def test_kernels_in_cuda_are_not_used_with_options_of_scores(option: str, monkeypatch: pytest.MonkeyPatch):
    ran = emulate(cuda_attention, monkeypatch)
    monkeypatch.setattr(triton_attention, "hopper", lambda: kernels)
    check_fp8([(1, 300), (1, 3), (1, 64)] * 3, 64, 4, 128, HALF, CPU, None, option=OPTIONS[option])
    assert not ran


@pytest.mark.parametrize(("page_size", "group", "dim"), [(1, 1, 64), (16, 2, 64), (64, 5, 64), (64, 4, 128)])
@pytest.mark.parametrize("with_norm", [False, True])
def test_fused_decode(page_size: int, group: int, dim: int, with_norm: bool):
    check_attend(MIXES["decode"] + [(1, 65), (1, 2)], page_size, group, dim, HALF, CPU, with_norm)


@pytest.mark.parametrize(("group", "lengths"), [(1, (1, 2, 3)), (3, (1, 33)), (2, (1, 65, 900))])
@pytest.mark.parametrize("rows", [1, 8, 9])
def test_fused_decode_of_few_rows_and_of_more(rows: int, group: int, lengths: tuple[int, ...]):
    """Parts that hold the new key alone, and parts of one row that are merged."""
    mix = [(1, lengths[-1 - i % len(lengths)]) for i in range(rows)]
    check_attend(mix, 32, group, 64, HALF, CPU, True)


@pytest.mark.slow
def test_attend_of_mixed_batches_and_large_ones():
    check_attend(MIXES["mixed"], 16, 2, 64, HALF, CPU, True)
    check_attend([(1, 3 + i % 5) for i in range(65)], 16, 2, 64, HALF, CPU, True)


def test_one_long_sequence_among_short_ones():
    check_forward([(1, 5), (1, 3000), (1, 64), (1, 128)], 64, 2, 64, HALF, CPU)


@pytest.mark.parametrize(("mix", "window"), [("decode", None), ("chunks", None), ("mixed", None), ("mixed", 40)])
def test_steps_padded_as_graphs_are(mix: str, window: int | None):
    check_padded(MIXES[mix], 2, 64, HALF, CPU, window)


def test_needle_in_pages_of_8_bits():
    check_needle(1500, HALF, CPU)


DRAFTED = [(3, 3), (1, 70), (5, 17), (2, 128), (5, 300), (1, 1), (4, 33)]


@pytest.mark.parametrize(
    ("page_size", "group", "dim", "window", "fp8_cache"),
    [
        (16, 2, 64, None, False),
        (64, 4, 128, None, False),
        (16, 3, 64, 40, False),
        (64, 2, 64, None, True),
        (16, 4, 64, 33, True),
    ],
)
def test_drafts(page_size: int, group: int, dim: int, window: int | None, fp8_cache: bool):
    check_drafted(DRAFTED, page_size, group, dim, HALF, CPU, 5, window, fp8_cache)


def test_one_long_sequence_with_drafts():
    check_drafted([(5, 9), (9, 3000), (1, 64)], 64, 2, 64, HALF, CPU, 9)


def test_drafts_beside_prompts():
    check_forward([(5, 80), (1, 9), (3, 40), (20, 50), (70, 90)], 16, 2, 64, HALF, CPU, max_queries=5)


WINDOWS = (1, 2, 31, 32, 33, 70, 150, 1000)


@pytest.mark.parametrize(("mix", "shape"), pairs([(1, 2, 64), (16, 3, 64), (32, 1, 64), (64, 4, 64)]))
def test_windows(mix: str, shape: Shape):
    for window in WINDOWS[shape[1] - 1 :: 4]:
        check_forward(MIXES[mix], *shape, HALF, CPU, window=window)


@pytest.mark.parametrize(("page_size", "group", "dim"), [(128, 2, 128), (64, 4, 256)])
def test_windows_of_larger_heads(page_size: int, group: int, dim: int):
    for window in (40, 96):
        check_forward([(1, 300), (1, 30), (90, 250)], page_size, group, dim, HALF, CPU, window=window)
        check_attend([(1, 300), (1, 30), (1, 97)], page_size, group, dim, HALF, CPU, True, window=window)


@pytest.mark.parametrize(("page_size", "window"), list(zip([16, 64, 64, 16] * 2, WINDOWS, strict=True)))
def test_fused_decode_with_a_window(page_size: int, window: int):
    check_attend(MIXES["decode"] + [(1, 65), (1, 2)], page_size, 2, 64, HALF, CPU, True, window=window)


@pytest.mark.slow
def test_windows_that_are_split():
    check_forward([(1, 5), (1, 3000), (1, 64), (1, 1200)], 64, 2, 64, HALF, CPU, window=1000)
    for window in (200, 700):
        check_forward([(1, 9), (5, 1600)], 64, 2, 64, HALF, CPU, window=window)
        check_forward([(70, 1041)], 64, 2, 64, HALF, CPU, window=window)


@pytest.mark.parametrize(
    ("mix", "page_size", "group", "window"),
    [
        ("decode", 16, 2, None),
        pytest.param("chunks", 64, 3, 40, marks=pytest.mark.slow),
        ("mixed", 16, 3, None),
        ("decode", 64, 2, 40),
    ],
)
def test_pages_of_8_bits(mix: str, page_size: int, group: int, window: int | None):
    check_fp8(MIXES[mix], page_size, group, 64, HALF, CPU, window)


@pytest.mark.skipif(compiler is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("lengths", "page_size", "group", "window"),
    [
        ([1 + 29 * i for i in range(9)], 64, 4, None),
        ([300, 3, 64, 65, 1, 130, 2, 260, 63], 128, 8, 100),
        ([40 + i for i in range(24)], 64, 1, None),  # whole sequences by ticket
    ],
)
def test_the_decode_kernel_in_cuda(
    lengths: list[int], page_size: int, group: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = emulate(cuda_attention, monkeypatch)
    monkeypatch.setattr(triton_attention, "hopper", lambda: kernels)
    check_fp8([(1, length) for length in lengths], page_size, group, 128, HALF, CPU, window)
    assert "decode" in ran


@pytest.mark.skipif(compiler is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("mix", "page_size", "group", "window"),
    [
        ([(1, 70), (70, 200), (33, 33), (3, 3)], 64, 4, None),
        ([(100, 170), (28, 140)], 128, 5, 60),
    ],
)
def test_the_prefill_kernel_in_cuda(
    mix: list[tuple[int, int]], page_size: int, group: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    ran = emulate(cuda_attention, monkeypatch)
    monkeypatch.setattr(triton_attention, "hopper", lambda: kernels)
    check_fp8(mix, page_size, group, 128, HALF, CPU, window)
    assert "prefill" in ran


@pytest.mark.parametrize("mix", ["decode", pytest.param("mixed", marks=pytest.mark.slow)])
def test_small_values_in_pages_of_8_bits(mix: str):
    """Their scales, and the products of these with probabilities, are near the least numbers of float16."""
    check_fp8(MIXES[mix], 64, 2, 64, HALF, CPU, None, values=1e-3)


def test_parts_of_a_short_prompt_beside_a_long_one_have_no_keys():
    for window in (None, 700):
        check_forward([(5, 1600), (16, 16)], 16, 2, 64, HALF, CPU, window=window)


def test_the_plan_of_prefill_lists_every_tile_once_and_the_latest_first():
    mix = [(1, 9), (300, 300), (70, 400), (300, 300), *((2 + i % 3, 4 + i % 5) for i in range(70))]
    case = Case(mix, 16, 2, 64, HALF, CPU)
    chunks = case.step().chunks
    tiles, tiling = chunks.work.tolist(), chunks.tiling
    step, parts = tiling.queries, tiling.plan["MAX_PARTS"]
    tiles = [tuple(tiles[i : i + 4]) for i in range(2 + parts, 2 + parts + 4 * tiles[0], 4)]
    wanted = []
    for i, (span, token) in enumerate(zip(case.spans, case.batch.layout.cu_query_lens.tolist(), strict=False)):
        for j in range(0, len(span.ids) if i else 0, step):
            wanted.append((span.row, span.start + j, token + j, min(step, len(span.ids) - j)))
    assert sorted(tiles) == sorted(wanted)
    begins = [position for _, position, _, _ in tiles]
    assert begins == sorted(begins, reverse=True)


def test_tiles_are_split_where_there_are_few():
    case = Case([(1, 9), (5, 1600)], 64, 2, 64, HALF, CPU)
    assert int(case.step().chunks.work[1]) == 4
    check_forward([(1, 9), (5, 1600)], 64, 2, 64, HALF, CPU)
    check_forward([(30, 1041)], 64, 2, 64, HALF, CPU)


def test_large_tiles_are_for_much_work_or_long_contexts():
    attention = Case([(2, 3)], 16, 2, 64, HALF, CPU).attention
    small, large = attention._small, attention._large
    assert small.queries == 32 and large.queries == 64
    assert attention._tiling(num_tokens=100, num_chunks=1, longest=1000) is small
    assert attention._tiling(num_tokens=600, num_chunks=9, longest=1000) is attention._whole
    assert attention._tiling(num_tokens=64, num_chunks=1, longest=10_000) is large
    assert attention._tiling(num_tokens=63, num_chunks=1, longest=10_000) is small


@pytest.mark.parametrize(
    "mix",
    [
        [(1, 300), (1, 30), (20, 50)],
        [(5, 1600)],
        pytest.param([(1, 40 + i) for i in range(45)], marks=pytest.mark.slow),
    ],
    ids=["mixed", "split", "by ticket"],
)
def test_layers_share_a_step(mix: list[tuple[int, int]]):
    case = Case(mix, 16, 2, 64, HALF, CPU)
    step = case.step()
    layers = []
    for _ in range(3):
        poison(case.q)
        layers.append(step.forward(case.q, case.pages))
    assert torch.equal(layers[0], layers[1]) and torch.equal(layers[0], layers[2])


@pytest.mark.slow
def test_the_same_batch_gives_the_same_bits():
    check_repeats([(1, 700), (1, 3), (5, 1100)], 2, HALF, CPU)
