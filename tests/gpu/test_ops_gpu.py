"""The Triton op table on a GPU, against the reference in higher precision."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from minisgl.core.rounding import round_up
from minisgl.ops import adapters, reference
from minisgl.ops.adapters import AdapterWeights, ModuleRows, TokenSlots
from minisgl.ops.sampling import noise_bits
from minisgl.ops.table import load_ops

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
if torch.cuda.is_available():
    import triton
    import triton.language as tl

    from contract.sampling import (
        adversarial_logits,
        check_cuts,
        check_logprobs,
        check_penalties,
        check_samples,
        make_state,
        mixed_state,
        noise64,
    )
    from minisgl.kernels.triton import sample, top_k_top_p
    from minisgl.kernels.triton.epilogue import gate_and_mul
    from minisgl.kernels.triton.launch import counters

    OPS = load_ops("triton")

    @triton.jit
    def _noise(keys_ptr, positions_ptr, bits_ptr, noise_ptr, vocab, BLOCK: tl.constexpr):
        row, e = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        a, b = sample.row_words(tl.load(keys_ptr + row), tl.load(positions_ptr + row))
        x = sample.noise_bits(e, a, b)
        tl.store(bits_ptr + row * vocab + e, x.to(tl.int64), mask=e < vocab)
        tl.store(noise_ptr + row * vocab + e, sample.noise_log2(x), mask=e < vocab)


ROWS = [1, 2, 3, 8, 16, 17, 64, 256, 1000]
ERROR = {torch.float32: 2e-5, torch.bfloat16: 6e-3, torch.float16: 1e-3}
VOCAB = 151936


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Assert that the relative error of the whole tensor is small, and no element is far off."""
    assert got.shape == want.shape
    got64, want64 = got.double(), want.double()
    error = ((got64 - want64).norm() / want64.norm().clamp(min=1e-30)).item()
    assert error < ERROR[got.dtype], error
    assert (got64 - want64).abs().max() < 20 * ERROR[got.dtype] * want64.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("n_out", "n_in"),
    [(4096, 1024), (1024, 2048), (1024, 3072), (6144, 4096), (4096, 12288), (101, 72), (333, 1000), (48, 16)],
)
def test_linear(n_out: int, n_in: int, dtype: torch.dtype):
    w, b = randn(n_out, n_in, dtype=dtype), randn(n_out, dtype=dtype)
    for rows in ROWS if dtype is torch.bfloat16 else (1, 2, 16, 17):
        x = randn(rows, n_in, dtype=dtype)
        for bias in (None, b):
            out = OPS.linear(x, w, bias)
            near(out, reference.linear(x.double(), w.double(), None if bias is None else bias.double()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("size", "hidden"), [(6144, 1024), (1536, 4096), (130, 896), (96, 64)])
def test_projections_after_norm(size: int, hidden: int, dtype: torch.dtype):
    w, b, norm = randn(size, hidden, dtype=dtype), randn(size, dtype=dtype), (randn(hidden) / 4 + 1).to(dtype)
    for rows in ROWS if dtype is torch.bfloat16 else (1, 2):
        x, r = randn(rows, hidden, dtype=dtype), randn(rows, hidden, dtype=dtype)
        for gate in ("", *reference.GATES):
            for residual in (None, r):
                for bias in (None, b):
                    given = None if residual is None else r.clone()
                    out, total = OPS.add_norm_linear(x, given, norm, 1e-6, w, bias, gate)
                    want_total = x if residual is None else x + r
                    exact = (want_total.double(), None, norm.double(), 1e-6, w.double())
                    want = reference.add_norm_linear(*exact, None if bias is None else bias.double(), gate)[0]
                    near(out, want)
                    assert torch.equal(total, want_total)


ADAPTED = {  # K, r, gate, bounds of modules
    "q, k, v": (4096, 16, "", (0, 4096, 5120, 6144)),
    "down": (12288, 16, "", (0, 4096)),
    "gate and up": (1024, 64, "silu", (0, 3072, 6144)),
    "gate and up of odd sizes": (48, 48, "gelu_tanh", (0, 37, 74)),
    "one output": (64, 32, "", (0, 1)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", ADAPTED.values(), ids=[*ADAPTED])
def test_adapters(case: tuple[int, int, str, tuple[int, ...]], dtype: torch.dtype):
    """Of 1, 8 and all of 11 slots and none, in turns and in runs; a token's bits do not depend on the others."""
    n_in, rank, gate, bounds = case
    slots, n_rows, inner = 11, bounds[-1], (len(bounds) - 1) * rank
    rows = tuple(ModuleRows(*at, i) for i, at in enumerate(pairwise(bounds)))
    sizes = inner * n_in, inner, n_rows * rank
    memory = randn(slots, round_up(sum(sizes), 64), dtype=dtype) / 8
    a, shift, b = (memory[:, sum(sizes[:i]) :][:, : sizes[i]] for i in range(3))
    weights = AdapterWeights(a.view(slots, inner, n_in) / n_in**0.5, shift, b.view(slots, n_rows, rank), rows)
    exact = AdapterWeights(weights.a.double(), shift.double(), weights.b.double(), rows)
    for tokens in (1, 2, 8, 64, 300, 2048):
        projection = randn(n_rows, n_in, dtype=dtype) / n_in**0.5
        x = randn(tokens, n_in + 64, dtype=dtype)[:, :n_in]
        order = torch.arange(tokens, device="cuda")
        for chosen in (order // 50 % 2 * 3, order * 7 % 8 + 1, order % (slots + 1)):
            of = TokenSlots.of(chosen.int(), slots)
            got = OPS.adapted_linear(OPS.linear, x, projection, None, gate, of, weights)
            given = x.double(), projection.double(), None, gate, of, exact
            near(got, adapters.adapted_linear(reference.linear, *given))
            alone = TokenSlots.of(torch.where(order == tokens - 1, chosen, 0).int(), slots)
            assert torch.equal(got[-1], OPS.adapted_linear(OPS.linear, x, projection, None, gate, alone, weights)[-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("size", [64, 896, 1024, 5120])
def test_elementwise(size: int, dtype: torch.dtype):
    w = randn(size, dtype=dtype)
    for rows in (1, 7, 1000, 20_000):
        x, r = randn(rows, size, dtype=dtype), randn(rows, size, dtype=dtype)
        near(OPS.rms_norm(x, w, 1e-6), reference.rms_norm(x.double(), w.double(), 1e-6))
        normed, total = OPS.add_rms_norm(x, r.clone(), w, 1e-6)
        assert torch.equal(total, x + r)
        near(normed, reference.rms_norm((x + r).double(), w.double(), 1e-6))
        for gate in reference.GATES:
            near(gate_and_mul(x, gate), reference.gate_and_mul(x.double(), gate))
        near(OPS.rms_norm(x, w.float(), 1e-6), reference.rms_norm(x.double(), w.double(), 1e-6))
        ids = torch.randint(0, rows, (rows,), device="cuda", dtype=torch.int32)
        assert torch.equal(OPS.embedding(ids, x), x[ids.long()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page"),
    [(16, 8, 128, 64), (40, 8, 128, 16), (4, 2, 32, 16), (3, 1, 16, 1), (5, 1, 256, 64)],
)
@pytest.mark.parametrize("has_norm", [False, True])
def test_norm_rope_store(heads: int, kv_heads: int, dim: int, page: int, has_norm: bool, dtype: torch.dtype):
    for tokens in (1, 9, 64, 65, 3000):
        pages = 4000 // page
        qkv = randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
        weights = [(randn(dim) / 4 + 1).to(dtype) if has_norm else None for _ in range(2)]
        angle = torch.rand(5000, dim // 2, device="cuda") * 6
        cos_sin = torch.cat([angle.cos(), angle.sin()], -1)
        positions = torch.randint(0, 5000, (tokens,), dtype=torch.int32, device="cuda")
        out_loc = torch.randperm(pages * page, device="cuda")[:tokens]
        layers = torch.full((2, pages, 2, kv_heads, page, dim), 7.0, dtype=dtype, device="cuda")
        want_pages = layers[1].double()
        exact = [None if w is None else w.double() for w in weights]
        transform = reference.HeadTransform(*exact, 1e-6, cos_sin.double())
        want = reference.norm_rope_store(qkv.double(), transform, positions, want_pages, out_loc)
        transform = reference.HeadTransform(*weights, 1e-6, cos_sin)
        q = OPS.norm_rope_store(qkv, transform, positions, layers[1], out_loc)
        near(q, want)
        near(layers[1], want_pages)
        assert bool((layers[0] == 7).all()) and int((layers[1] != 7).any(-1).sum()) == tokens * 2 * kv_heads


def test_noise_bits_are_exact_and_noise_is_accurate():
    keys = torch.tensor([0, 123456789012345, -1, -(2**63), 2**63 - 1], device="cuda")
    positions = torch.tensor([0, 77, 2**31 - 1, 5, 4096], dtype=torch.int32, device="cuda")
    bits, noise = torch.zeros(5, VOCAB, dtype=torch.int64, device="cuda"), torch.zeros(5, VOCAB, device="cuda")
    _noise[(5, triton.cdiv(VOCAB, 1024))](keys, positions, bits, noise, VOCAB, BLOCK=1024)
    assert torch.equal(bits, noise_bits(keys, positions, VOCAB))
    want = noise64(keys, positions, VOCAB)
    got = noise.cpu().double() * np.log(2)
    large = want > 5
    assert ((got - want).abs() / want)[large].max() < 1e-5
    assert (got - want).abs()[want > -2].max() < 5e-5  # below, x in float32 is coarse


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("is_filtered", [False, True])
def test_sampled_tokens_match_reference(is_filtered: bool, dtype: torch.dtype):
    for sampled, vocab in ((1, VOCAB), (40, VOCAB), (300, 1003), (33, 50257)):
        logits = randn(sampled, vocab, dtype=torch.float32).mul(3).to(dtype)
        if sampled > 9:
            logits[3, 7], logits[4, 0], logits[5] = float("nan"), float("inf"), float("-inf")
            logits[6, 5:] = float("-inf")
        state = mixed_state(sampled + 7, "cuda", seed=sampled)
        rows = torch.randperm(sampled + 7, device="cuda")[:sampled]
        positions = torch.randint(0, 9999, (sampled,), device="cuda", dtype=torch.int32)
        tokens = check_samples(OPS, logits, state, positions, rows, is_filtered)
        for i in (0, sampled // 2, sampled - 1):  # alone, so split over programs in another way
            alone = OPS.sample_rows(logits[i : i + 1], rows[i : i + 1], positions[i : i + 1], state, is_filtered)
            assert alone[0].item() == tokens[i].item()
    assert not counters(torch.device("cuda", 0)).any()


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("is_filtered", [False, True])
def test_sampled_tokens_follow_the_distribution(temperature: float, is_filtered: bool):
    """Pearson's chi-square of 50,000 draws, as standard deviations (Wilson and Hilferty 1931)."""
    draws, row = 10_000, torch.randn(40, device="cuda")
    counts = np.zeros(40)
    for i in range(5):
        state = make_state(
            draws, "cuda", temperature, top_k=30 if is_filtered else 0, keys=torch.arange(draws) + i * draws
        )
        rows = torch.arange(draws, device="cuda")
        tokens = OPS.sample_rows(row.repeat(draws, 1), rows, rows.int(), state, is_filtered)[0]
        counts += np.bincount(tokens.cpu().numpy(), minlength=40)
    p = torch.softmax(row.double() / temperature, 0).cpu().numpy()
    if is_filtered:
        p[np.argsort(-p)[30:]] = 0
    kept, p = p > 0, p / p.sum()
    assert counts[~kept].sum() == 0
    df = kept.sum() - 1
    ratio = ((counts - p * counts.sum())[kept] ** 2 / (p[kept] * counts.sum())).sum() / df
    assert (ratio ** (1 / 3) - (1 - 2 / (9 * df))) / (2 / (9 * df)) ** 0.5 < 3.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_top_k_top_p_cuts(dtype: torch.dtype):
    for vocab in (100, 10_000, 60_001):
        logits = torch.cat([adversarial_logits(vocab, torch.float32), torch.randn(6, vocab), torch.randn(6, vocab) * 5])
        logits = logits.repeat(3, 1).to(dtype).cuda()
        state = mixed_state(len(logits), "cuda", seed=vocab)
        state.top_k[:5] = torch.tensor([1500, vocab - 1, vocab, 1023, 5000])
        state.temperature.clamp_(min=0.3)
        check_cuts(*top_k_top_p.find_cuts(logits, torch.arange(len(logits), device="cuda"), state), logits, state)


@pytest.mark.parametrize("hidden", [1024, 4096])
def test_captured_one_row_chain_matches_eager(hidden: int):
    """Replay every kernel of a one-row step but attention: with PDL each must wait for its predecessor.

    At 1,024 the norms are fused into the projections, at 4,096 they are kernels of their own.
    """
    size = 3072
    table = randn(500, hidden)
    weights = [randn(hidden, hidden) / hidden**0.5, randn(2 * size, hidden) / hidden**0.5, randn(hidden, size) / 55]
    norm, head = torch.ones(hidden, device="cuda", dtype=torch.bfloat16), randn(5000, hidden)
    state = make_state(1, "cuda", temperature=0.7)
    ids, row = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")

    def step(ops=OPS):
        x, residual = ops.embedding(ids, table), None
        for _ in range(8):
            x, residual = ops.add_norm_linear(x, residual, norm, 1e-6, weights[0])
            x = ops.linear(x, weights[0], None)
            x, residual = ops.add_norm_linear(x, residual, norm, 1e-6, weights[1], gate="silu")
            x = ops.linear(x, weights[2], None)
        logits = ops.add_norm_linear(x, residual, norm, 1e-6, head)[0]
        return logits, ops.sample_rows(logits, row, ids, state, False)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits, out = step()
    for i in range(50):
        ids.fill_(i * 7)
        graph.replay()
        got, token = logits.clone(), out.clone()
        again_logits, again = step()
        assert torch.equal(got, again_logits) and torch.equal(token, again)
    want = step(load_ops("reference"))[0].double()
    assert (again_logits.double() - want).norm() < 0.03 * want.norm()


@pytest.mark.parametrize("vocab", [33, 50257, VOCAB])
def test_penalties_match_their_formula(vocab: int):
    check_penalties("cuda", vocab)


@pytest.mark.parametrize("vocab", [7, 50257, VOCAB, 262_144])
def test_logprobs_match_their_formula(vocab: int):
    check_logprobs("cuda", vocab)
