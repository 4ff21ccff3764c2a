"""The optional attention backends, alone and mixed with ours, against the reference in bfloat16."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

from contract.harness import make_batch
from contract.test_attention import MIXES, setting
from minisgl.attention.backend import Attention, MixerSpec, StepAttention
from minisgl.attention.selection import ATTENTION, resolve_attention
from minisgl.core.plan import Batch
from minisgl.core.specs import GroupedQuery
from minisgl.ops import reference
from minisgl.ops.reference import HeadTransform
from minisgl.ops.table import OpTable
from unit.attention.triton_cases import EPS, assert_near, on, poison

# The packages of these backends raise warnings of their own.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
BF16, CUDA, KV_HEADS = torch.bfloat16, "cuda", 2
Mix = list[tuple[int, int]]
LONG = {
    "long decode": [(1, 20_000), (1, 5), (1, 131)],
    "many decodes": [(1, 1 + 37 * i % 900) for i in range(256)],
    "short chunk after a long context": [(64, 20_000)],
    "long and short": [(1, 6000), (1, 64), (700, 4000), (5, 8000), (129, 129)],
    "many prompts": [(1 + 61 * i % 300, 1 + 61 * i % 300) for i in range(64)],
}
# Every build of FlashInfer takes a minute, so it is tested with one head dimension; fa3 is compiled already.
CASES = [
    *(("fi", page, group, 128) for page in (1, 16, 64, 128) for group in (1, 2, 4, 5)),
    *(("fa3", page, group, dim) for page in (128, 256) for group, dim in ((1, 64), (2, 128), (4, 64), (5, 128))),
    *((names, 128, group, 128) for names in ("fa3,triton", "fa3,fi", "triton,fa3") for group in (2, 4)),
    *((names, 64, group, 128) for names in ("fi,triton", "triton,fi") for group in (2, 4)),
]


@cache
def backend(
    names: str, page_size: int, group: int, dim: int, window: int | None = None, softcap: float = 0.0
) -> Attention:
    """Resolve the backend as users do. Skip the test if one of `names` is refused: a replacement would test nothing.

    A failed build fails the test.
    """
    kind = GroupedQuery(KV_HEADS * group, KV_HEADS, dim, dim**-0.5, window, softcap=softcap)
    spec = MixerSpec(CUDA, BF16, kind, page_size)
    for name in names.split(","):
        reason = ATTENTION.refusal(name, spec)
        if reason is not None:
            pytest.skip(f"{name}: {reason}")
    (attention,) = resolve_attention(names, [spec], OpTable())
    assert attention.name == names, "a backend was replaced"
    return attention


class Step:
    """A step of `mix` whose queries lie between other heads, as in the output of the projection."""

    def __init__(self, mix: Mix, page_size: int, group: int, dim: int, seed: int = 0) -> None:
        pages, table, q, self.spans = setting(mix, page_size, group, dim, BF16, seed)
        self.pages, self.table, self.q = pages.to(CUDA), table.to(CUDA), q.to(CUDA)
        self.batch: Batch = on(make_batch(self.spans), CUDA)
        positions = self.batch.positions.long()
        page = self.table[self.batch.token_rows.long(), positions // page_size].long()
        self.out_loc = page * page_size + positions % page_size
        self.qkv = torch.cat([self.q, torch.randn(len(q), 2 * KV_HEADS, dim, dtype=BF16, device=CUDA)], 1)
        self.scale = dim**-0.5

    def prepared(self, attention: Attention) -> StepAttention:
        return attention.prepare(self.batch, self.table, self.out_loc)

    def forward(self, attention: Attention) -> torch.Tensor:
        poison(self.q)
        return self.prepared(attention).forward(self.qkv[:, : self.q.shape[1]], self.pages)

    def expected(self, window: int | None = None, softcap: float = 0.0) -> torch.Tensor:
        return reference.paged_attention(self.q, self.pages, self.table, self.batch.layout, self.scale, window, softcap)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize(("names", "page_size", "group", "dim"), CASES)
def test_forward_matches_reference(names: str, page_size: int, group: int, dim: int, mix: str):
    step = Step(MIXES[mix], page_size, group, dim)
    expected = step.expected()
    assert_near(step.forward(backend(names, page_size, group, dim)), expected, step.spans)


@pytest.mark.parametrize("mix", LONG)
@pytest.mark.parametrize("group", [2, 5])
@pytest.mark.parametrize(("names", "page_size"), [("fi", 64), ("fa3", 128)])
def test_long_sequences_and_large_batches(names: str, page_size: int, group: int, mix: str):
    step = Step(LONG[mix], page_size, group, 128)
    expected = step.expected()
    assert_near(step.forward(backend(names, page_size, group, 128)), expected, step.spans)


@pytest.mark.parametrize("mix", [*MIXES, *LONG])
@pytest.mark.parametrize("names", ["fi", "triton,fi"])
def test_layers_with_different_windows(names: str, mix: str):
    """Layers with different windows in one step."""
    windows = (None, 1, 100, 512)
    step = Step((MIXES | LONG)[mix], 64, 2, 128)
    expected = {window: step.expected(window) for window in windows}
    prepared = {window: step.prepared(backend(names, 64, 2, 128, window)) for window in windows}
    for window in windows:
        poison(step.q)
        out = prepared[window].forward(step.qkv[:, : step.q.shape[1]], step.pages)
        assert_near(out, expected[window], step.spans)


def test_soft_caps():
    for mix in ("decode", "mixed"):
        step = Step(MIXES[mix], 64, 2, 128)
        attention = backend("fi", 64, 2, 128, softcap=2.0)
        assert_near(step.forward(attention), step.expected(softcap=2.0), step.spans)


@pytest.mark.parametrize("mix", ["decode", "mixed"])
def test_fa3_attends_with_a_soft_cap_or_is_replaced(mix: str):
    """Its wheel may have been built without soft caps; it must then fail when it is built."""
    step = Step(MIXES[mix], 128, 2, 128)
    kind = GroupedQuery(2 * KV_HEADS, KV_HEADS, 128, 128**-0.5, softcap=2.0)
    (attention,) = resolve_attention("fa3", [MixerSpec(CUDA, BF16, kind, 128)], OpTable())
    assert_near(step.forward(attention), step.expected(softcap=2.0), step.spans)


@pytest.mark.parametrize(("names", "page_size"), [("fi", 64), ("fa3", 128), ("fa3,triton", 128), ("triton,fi", 64)])
@pytest.mark.parametrize("mix", ["decode", "mixed"])
def test_attend_stores_what_it_reads(names: str, page_size: int, mix: str):
    """The slots of the step's tokens are NaN before the call; afterwards all pages match the reference's."""
    step = Step(MIXES[mix], page_size, 2, 128)
    attention = backend(names, page_size, 2, 128)
    step.pages[step.out_loc // page_size, :, :, step.out_loc % page_size] = float("nan")
    angle = torch.rand(512, 64, device=CUDA) * 6
    weights = [1 + 0.1 * torch.randn(128, dtype=BF16, device=CUDA) for _ in range(2)]
    heads = HeadTransform(weights[0], weights[1], EPS, torch.cat([angle.cos(), angle.sin()], -1))
    pages, qkv, positions = step.pages.clone(), step.qkv.flatten(1), step.batch.positions
    out = step.prepared(attention).attend(qkv.clone(), heads, step.pages)
    q = reference.norm_rope_store(qkv, heads, positions, pages, step.out_loc)
    assert_near(out, reference.paged_attention(q, pages, step.table, step.batch.layout, step.scale), step.spans)
    is_valid = ~pages.isnan()
    assert float((step.pages - pages)[is_valid].abs().max()) <= 0.05  # a rounding apart


@pytest.mark.parametrize(("names", "page_size"), [("fi", 64), ("fa3", 128)])
def test_same_batch_gives_same_bits(names: str, page_size: int):
    for mix in (MIXES["mixed"], LONG["long decode"], LONG["long and short"]):
        step, attention = Step(mix, page_size, 2, 128), backend(names, page_size, 2, 128)
        first = step.forward(attention)
        assert all(torch.equal(step.forward(attention), first) for _ in range(3))


@pytest.mark.parametrize(("names", "page_size"), [("fi", 64), ("fa3", 128)])
def test_steps_launched_ahead_keep_their_plans(names: str, page_size: int):
    """Many steps are in the queue of a busy GPU while the host plans the next ones."""
    attention = backend(names, page_size, 2, 128)
    rng = np.random.default_rng(0)
    steps = []
    for seed in range(12):
        chunks = [(int(n), int(n + rng.integers(0, 500))) for n in rng.integers(1, 200, 3)]
        steps.append(
            Step([(1, int(n)) for n in rng.integers(1, 900, 20)] + (chunks if seed % 2 else []), page_size, 2, 128)
        )
    expected = [step.expected() for step in steps]
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)  # 50 ms
    outs = [step.forward(attention) for step in steps]
    for step, out, wanted in zip(steps, outs, expected, strict=True):
        assert_near(out, wanted, step.spans)


@pytest.mark.parametrize(("names", "page_size"), [("fi", 64), ("fa3", 128)])
@pytest.mark.parametrize(("built_in", "used_in"), [(False, True), (True, False), (True, True)])
def test_inference_mode_does_not_matter(names: str, page_size: int, built_in: bool, used_in: bool):
    with torch.inference_mode(built_in):
        attention = backend.__wrapped__(names, page_size, 2, 128)
    for mix in ("decode", "mixed"):
        with torch.inference_mode(used_in):
            step = Step(MIXES[mix], page_size, 2, 128)
            assert_near(step.forward(attention), step.expected(), step.spans)


def test_fa3_zeroes_only_the_rest_of_each_last_tile():
    """Slots from the end of each sequence to the end of its tile become zero; all others stay, NaN included."""
    mix: Mix = [(1, 1), (1, 127), (1, 128), (1, 129), (200, 300), (64, 256), (5, 500)]
    step, attention = Step(mix, 256, 2, 128), backend("fa3", 256, 2, 128)
    before = step.pages.clone()
    step.forward(attention)
    for row, (_, kv_len) in zip((s.row for s in step.spans), mix, strict=True):
        page, begin = step.table[row, (kv_len - 1) // 256].long(), (kv_len - 1) % 256 + 1
        tail = slice(begin, -(-begin // 128) * 128)
        assert step.pages[page, 1, :, tail].eq(0).all()
        before[page, 1, :, tail] = 0
    assert torch.equal(step.pages.nan_to_num(7.0), before.nan_to_num(7.0))
