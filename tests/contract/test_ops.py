"""Every registered op table against the reference."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from torch.testing import assert_close

from minisgl.ops import adapters, reference
from minisgl.ops.adapters import AdapterWeights, ModuleRows, TokenSlots
from minisgl.ops.reference import Experts
from minisgl.ops.table import OPS, OpTable, load_ops, resolve_ops

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # see tests/test_interpreter.py
TABLES = ["triton"] if INTERPRETED else [name for name in OPS.names if OPS.refusal(name, "cpu") is None]
DTYPES = [torch.float32, torch.float16 if INTERPRETED else torch.bfloat16]  # Triton's interpreter has no bfloat16 dot
EPS = 1e-6
RTOL = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(params=TABLES)
def ops(request: pytest.FixtureRequest) -> OpTable:
    return load_ops(request.param)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    return request.param


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    assert_close(a, b, rtol=RTOL[a.dtype], atol=RTOL[a.dtype])


def combinations(bias: torch.Tensor) -> list[tuple[torch.Tensor | None, str]]:
    """Every bias with every gate; interpreted, which is slow, each of them once or twice."""
    both = [(b, gate) for gate in ("", *reference.GATES) for b in (None, bias)]
    return [both[i] for i in (0, 1, 3, 4)] if INTERPRETED else both


def test_cpu_has_its_own_table():
    assert resolve_ops("cpu").name == "cpu"
    assert resolve_ops("some future device").name == "reference"


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 16, 17, 40])
def test_linear(ops: OpTable, dtype: torch.dtype, rows: int):
    x, w, b = (torch.randn(*s).to(dtype) for s in ((rows, 48), (96, 48), (96,)))
    for bias, gate in combinations(b):
        out = ops.linear(x, w, bias, gate)
        assert out.is_contiguous()
        assert_close(out, reference.linear(x, w, bias, gate), rtol=RTOL[dtype], atol=RTOL[dtype] * 8)


@pytest.mark.parametrize("rows", [1, 7])
def test_norms_embedding_and_activation(ops: OpTable, dtype: torch.dtype, rows: int):
    x, r, w = (torch.randn(*s).to(dtype) for s in ((rows, 64), (rows, 64), (64,)))
    close(ops.rms_norm(x, w, EPS), reference.rms_norm(x, w, EPS))
    close(ops.rms_norm(x, w, EPS, r.clone()), reference.rms_norm(x, w, EPS, r))
    scale = torch.tensor([0.375], dtype=dtype)
    close(ops.rms_norm(x, w, EPS, r.clone(), scale), 0.375 * reference.rms_norm(x, w, EPS, r))
    expected = reference.add_rms_norm(x, r, w, EPS)
    for got, want in zip(ops.add_rms_norm(x, r.clone(), w, EPS), expected, strict=True):
        close(got, want)
    ids = torch.randint(0, rows, (5,), dtype=torch.int32)
    close(ops.embedding(ids, x), x[ids.long()])


ADAPTED = {  # K, r, gate, bounds of modules, which may repeat
    "one output": (16, 16, "", (0, 1)),
    "q, k, v": (272, 16, "", (0, 72, 104, 136)),
    "gate and up": (48, 48, "silu", (0, 80, 160)),
    "gate and up of odd sizes": (64, 16, "gelu_tanh", (0, 37, 74)),
    "rows of modules in turns": (32, 16, "", (0, 16, 48, 64, 96)),
}


@pytest.mark.parametrize("case", ADAPTED.values(), ids=[*ADAPTED])
@pytest.mark.parametrize("tokens", [0, 1, 70, 300])
def test_adapters(ops: OpTable, dtype: torch.dtype, tokens: int, case: tuple[int, int, str, tuple[int, ...]]):
    """Tokens of several slots and of none, in any order, with a slot of NaN among them, from a slice of the inputs."""
    n_in, rank, gate, bounds = case
    slots, n_rows, parts = 20 if tokens == 70 else 3, bounds[-1], 2 if len(bounds) == 5 else len(bounds) - 1
    memory = torch.randn(slots, parts * rank * (n_in + 1) + n_rows * rank).to(dtype) / 8
    a, shift, b = memory.split([parts * rank * n_in, parts * rank, n_rows * rank], 1)
    a[1] = torch.nan
    rows = tuple(ModuleRows(start, stop, i % parts) for i, (start, stop) in enumerate(pairwise(bounds)))
    weights = AdapterWeights(a.view(slots, -1, n_in), shift, b.view(slots, -1, rank), rows)
    projection, bias = torch.randn(n_rows, n_in).to(dtype) / n_in**0.5, torch.randn(n_rows).to(dtype)
    x = torch.randn(tokens, n_in + 16).to(dtype)[:, :n_in]
    for choice in (torch.arange(tokens) // 50, torch.arange(tokens) * 7 + 3, torch.zeros(tokens)):
        chosen = (choice % (slots + 1)).int()
        given = x, projection, bias, gate, TokenSlots.of(chosen, slots), weights
        got = ops.adapted_linear(ops.linear, *given)
        want = adapters.adapted_linear(reference.linear, *given)
        assert got.dtype == dtype and (chosen == 2).equal(want.isnan().any(1))
        assert_close(got, want, rtol=2 * RTOL[dtype], atol=2 * RTOL[dtype], equal_nan=True)


@pytest.mark.parametrize("rows", [1, 7])
def test_norms_whose_weight_is_float32_round_once(ops: OpTable, dtype: torch.dtype, rows: int):
    """The weight is what tells the two orders of rounding apart, so compare closer than `close` does."""
    x, r, w = torch.randn(rows, 64).to(dtype), torch.randn(rows, 64).to(dtype), torch.rand(64) + 0.5
    total = x + r
    exact = torch.nn.functional.rms_norm(total.float(), (64,), w, EPS).to(dtype)
    for got in (ops.rms_norm(total, w, EPS), ops.add_rms_norm(x, r.clone(), w, EPS)[0]):
        assert got.dtype is dtype
        rounded_apart = (got - exact).abs() > 1e-6 * exact.abs()
        assert int(rounded_apart.sum()) <= (0.01 if dtype is not torch.float32 else 0) * exact.numel()
    qkv, pages = torch.randn(rows, 4 * 64).to(dtype), torch.zeros(rows, 2, 1, 1, 64, dtype=dtype)
    cos_sin = torch.cat([torch.ones(1, 32), torch.zeros(1, 32)], -1)
    at = torch.zeros(rows, dtype=torch.int32), pages, torch.arange(rows)
    q = ops.norm_rope_store(qkv.clone(), reference.HeadTransform(w, w, EPS, cos_sin), *at)
    exact = torch.nn.functional.rms_norm(qkv.view(rows, 4, 64)[:, :3].float(), (64,), w, EPS).to(dtype)
    for got, want in ((q, exact[:, :2]), (pages[:, 0, 0, 0], exact[:, 2])):
        assert int(((got - want).abs() > 1e-6 * want.abs()).sum()) <= 0.01 * want.numel()


@pytest.mark.parametrize("rows", [0, 1, 2, 16, 40])
@pytest.mark.parametrize("has_residual", [False, True])
def test_projections_behind_a_norm(ops: OpTable, dtype: torch.dtype, rows: int, has_residual: bool):
    x, r, w, b = (torch.randn(*s).to(dtype) for s in ((rows, 64), (rows, 64), (96, 64), (96,)))
    norm = torch.rand(64).to(dtype) + 0.5
    for bias, gate in combinations(b):
        residual = r if has_residual else None
        given = x.clone()
        out, total = ops.add_norm_linear(given, r.clone() if has_residual else None, norm, EPS, w, bias, gate)
        want, want_total = reference.add_norm_linear(x, residual, norm, EPS, w, bias, gate)
        assert_close(out, want, rtol=RTOL[dtype], atol=RTOL[dtype] * 16)
        close(total, want_total)
        assert torch.equal(given, x), "x was overwritten"


@pytest.mark.parametrize("rows", [0, 1, 3, 40])
@pytest.mark.parametrize(("top_k", "normalise"), [(1, True), (2, False), (3, True), (5, True)])
def test_moe(ops: OpTable, dtype: torch.dtype, rows: int, top_k: int, normalise: bool):
    """Against each token on its own, in float64; one expert has no tokens unless all are used."""
    x, gate_up, down = ((torch.randn(*s) / 5).to(dtype) for s in ((rows, 32), (5, 48, 32), (5, 32, 24)))
    logits = torch.randn(rows, 5).to(dtype)
    logits[:, 3] = -20
    given = x.clone()
    out = ops.moe(x, logits, Experts(gate_up, down, top_k, normalise))
    assert out.dtype == dtype and out.shape == x.shape and torch.equal(given, x)
    want = torch.zeros(rows, 32, dtype=torch.float64)
    for t in range(rows):
        experts = logits[t].sort(descending=True, stable=True).indices[:top_k]
        weights = logits[t].double().softmax(-1)[experts]
        for weight, e in zip(weights / weights.sum() if normalise else weights, experts.tolist(), strict=True):
            gate, up = (gate_up[e].double() @ x[t].double()).chunk(2)
            want[t] += weight * (down[e].double() @ (torch.nn.functional.silu(gate) * up))
    assert_close(out.double(), want, rtol=RTOL[dtype], atol=RTOL[dtype])
    assert torch.equal(out, ops.moe(x, logits, Experts(gate_up, down, top_k, normalise)))


def test_experts_with_biases_and_clamped_gates(ops: OpTable, dtype: torch.dtype):
    """Against the formula of gpt-oss in float64, with gates and ups beyond the limits."""
    shapes = (7, 32), (5, 48, 32), (5, 32, 24), (5, 48), (5, 32)
    x, gate_up, down, up_bias, bias = ((torch.randn(*s) / 5).to(dtype) for s in shapes)
    up_bias, logits = up_bias * 40, torch.randn(7, 5)
    out = ops.moe(x, logits, Experts(gate_up, down, 2, True, up_bias, bias, "clamped"))
    values, chosen = logits.double().topk(2)
    want = torch.zeros(7, 32, dtype=torch.float64)
    for t, i in product(range(7), range(2)):
        e = int(chosen[t, i])
        gate, up = (gate_up[e].double() @ x[t].double() + up_bias[e].double()).chunk(2)
        gate, up = gate.clamp(max=7), up.clamp(-7, 7) + 1
        hidden = gate / (1 + (-1.702 * gate).exp()) * up
        want[t] += values[t].softmax(0)[i] * (down[e].double() @ hidden + bias[e].double())
    assert_close(out.double(), want, rtol=RTOL[dtype], atol=RTOL[dtype] * 32)


def test_moe_chooses_the_lowest_of_equals(ops: OpTable):
    """An expert e of this model gives e + 1 whatever its input is."""
    silu = torch.nn.functional.silu(torch.tensor(1.0)).item()
    gate_up, down = torch.zeros(6, 2, 4), torch.zeros(6, 4, 1)
    gate_up[:, :, 0] = 1
    down[:] = torch.arange(1.0, 7.0)[:, None, None] / silu
    x = torch.eye(4)[:1].repeat(5, 1)
    logits = torch.zeros(5, 6)
    logits[1, 4], logits[2, [0, 3]], logits[3, 5], logits[4, [1, 2]] = 1.0, -1.0, -0.0, float("-inf")
    out = ops.moe(x, logits, Experts(gate_up, down, 2, True))
    p = torch.tensor([1.0, 0.0]).softmax(0).tolist()
    assert_close(out[:, 0], torch.tensor([1.5, 5 * p[0] + 1 * p[1], 2.5, 1.5, 2.5]), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of what a GPU computes without a word
def test_moe_of_logits_that_are_no_numbers_is_none(ops: OpTable):
    x, gate_up, down = torch.ones(4, 4), torch.ones(3, 6, 4), torch.ones(3, 4, 3)
    logits = torch.zeros(4, 3)
    logits[0], logits[1, 1], logits[2] = float("nan"), float("inf"), float("-inf")
    out = ops.moe(x, logits, Experts(gate_up, down, 2, True))
    assert bool(out[:3].isnan().all()) and bool(out[3].isfinite().all())


def test_moe_does_not_let_overflow_in_one_expert_reach_other_tokens(ops: OpTable):
    x, gate_up, down = torch.ones(2, 4), torch.ones(2, 6, 4), torch.ones(2, 4, 3)
    down[1] = float("inf")
    out = ops.moe(x, torch.tensor([[9.0, 0.0], [0.0, 9.0]]), Experts(gate_up, down, 1, True))
    assert bool(out[0].isfinite().all()) and not bool(out[1].isfinite().any())


def test_experts_have_scales(ops: OpTable, dtype: torch.dtype):
    """A scale of an expert is one of its down projection; one is negative."""
    x, gate_up, down = ((torch.randn(*s) / 5).to(dtype) for s in ((7, 32), (5, 48, 32), (5, 32, 24)))
    scale, logits = torch.tensor([0.5, 2.0, -1.0, 4.0, 1.0], dtype=dtype), torch.randn(7, 5)
    want = ops.moe(x, logits, Experts(gate_up, down * scale[:, None, None], 2, True))
    close(ops.moe(x, logits, Experts(gate_up, down, 2, True, scale=scale)), want)


@pytest.mark.parametrize("with_norm", [False, True])
def test_heads_of_v_have_a_norm_and_a_layer_may_only_read(ops: OpTable, dtype: torch.dtype, with_norm: bool):
    qkv = torch.randn(5, 8 * 64).to(dtype)
    w, cos_sin, positions = torch.rand(64).to(dtype), torch.rand(50, 64), torch.randint(0, 50, (5,), dtype=torch.int32)
    weights, at = (w, w) if with_norm else (None, None), torch.randperm(16)[:5]
    plain, normed, read = (torch.full((4, 2, 2, 4, 64), 7.0, dtype=dtype) for _ in range(3))
    transform = reference.HeadTransform(*weights, EPS, cos_sin)
    want = ops.norm_rope_store(qkv.clone(), transform, positions, plain, at)
    got = ops.norm_rope_store(qkv.clone(), replace(transform, norms_v=True), positions, normed, at)
    assert torch.equal(got, want) and torch.equal(normed[:, 0], plain[:, 0])
    v = plain[at // 4, 1, :, at % 4].float()
    close(normed[at // 4, 1, :, at % 4], torch.nn.functional.rms_norm(v, (64,), None, EPS).to(dtype))
    reads = replace(transform, k_weight=None, reads=True)
    close(ops.norm_rope_store(qkv[:, : 4 * 64].clone(), reads, positions, read, at), want)
    assert bool((read == 7).all())


@pytest.mark.parametrize(("page_size", "dim", "with_q_scale"), [(1, 64, False), (16, 64, True), (16, 80, False)])
@pytest.mark.parametrize("with_norm", [False, True])
def test_norm_rope_store(
    ops: OpTable, dtype: torch.dtype, page_size: int, dim: int, with_q_scale: bool, with_norm: bool
):
    tokens, heads, kv_heads, pages = 9, 6, 2, 80 // page_size
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    weights = [torch.randn(dim).to(dtype) if with_norm else None for _ in range(2)]
    cos_sin = torch.rand(100, dim)
    positions = torch.randint(0, 100, (tokens,), dtype=torch.int32)
    out_loc = torch.randperm(pages * page_size)[:tokens]
    stored = [torch.full((pages, 2, kv_heads, page_size, dim), 7.0, dtype=dtype) for _ in range(2)]
    q_scale = 1 + torch.arange(100.0) if with_q_scale else None
    transform = reference.HeadTransform(*weights, EPS, cos_sin, q_scale)
    q = ops.norm_rope_store(qkv.clone(), transform, positions, stored[0], out_loc)
    want = reference.norm_rope_store(qkv.clone(), transform, positions, stored[1], out_loc)
    if q_scale is not None:  # of the queries alone, by position
        plain = reference.HeadTransform(*weights, EPS, cos_sin)
        unscaled = reference.norm_rope_store(qkv.clone(), plain, positions, stored[1].clone(), out_loc)
        close(want, unscaled * (1 + positions[:, None, None]).to(dtype))
    close(q, want)
    close(stored[0], stored[1])
    untouched = torch.ones(pages * page_size, dtype=torch.bool)
    untouched[out_loc] = False
    slots = stored[0].permute(0, 3, 1, 2, 4).flatten(0, 1)
    assert bool((slots[untouched] == 7).all())


def test_rope_is_a_rotation_and_store_kv_is_a_scatter():
    torch.manual_seed(0)
    angle = torch.rand(50, 16) * 6
    cos_sin = torch.cat([angle.cos(), angle.sin()], -1)
    q, k = torch.randn(4, 3, 32), torch.randn(4, 1, 32)
    positions = torch.tensor([0, 7, 7, 49], dtype=torch.int32)
    for x, y in zip((q, k), reference.rope(q, k, cos_sin, positions), strict=True):
        turned = torch.view_as_complex(torch.stack(x.chunk(2, -1), -1)) * torch.polar(torch.ones_like(angle), angle)[
            positions.long()
        ].unsqueeze(1)
        assert_close(y, torch.cat([turned.real, turned.imag], -1))
    pages = torch.zeros(5, 2, 1, 4, 32)
    loc = torch.tensor([19, 0, 6, 5])
    reference.store_kv(k, k + 1, pages, loc)
    for i, slot in enumerate(loc.tolist()):
        assert_close(pages[slot // 4, 0, :, slot % 4], k[i])
        assert_close(pages[slot // 4, 1, :, slot % 4], k[i] + 1)
