"""The sampler: right distribution, exact support, and nothing that depends on the neighbours."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl.ops.sampling import gumbel_noise, mask_top_k_top_p, mix32, noise_bits, sample

INT32 = torch.int32


def draw(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, keys=0, positions=0):
    """`sample` with scalars spread over the rows."""
    n = len(logits)

    def full(value, dtype):
        return torch.as_tensor(value, dtype=dtype).expand(n).clone()

    return sample(
        logits,
        full(temperature, torch.float32),
        full(top_k, INT32),
        full(top_p, torch.float32),
        full(min_p, torch.float32),
        full(keys, torch.int64),
        full(positions, INT32),
    )


def support(z: np.ndarray, k: int, p: float) -> set[int]:
    """Top-k then top-p of one row of tempered logits, in float64, straight from the definition."""
    order = np.lexsort((np.arange(len(z)), -z))
    order = order[: k or len(z)]
    mass = np.exp(z[order].astype(np.float64) - z.max())
    before = np.cumsum(mass) - mass
    return set(order[before < p * mass.sum()].tolist()) if p < 1 else set(order.tolist())


def chi_square_z(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """Pearson's statistic as standard deviations of a normal variable (Wilson and Hilferty 1931)."""
    expected = probabilities * counts.sum()
    df = len(counts) - 1
    ratio = ((counts - expected) ** 2 / expected).sum() / df
    return float((ratio ** (1 / 3) - (1 - 2 / (9 * df))) / (2 / (9 * df)) ** 0.5)


def test_greedy_takes_the_lowest_of_equals():
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, -1.0, 2.0, float("-inf")]])
    tokens, ok = draw(logits, temperature=0.0, top_k=2, top_p=0.1)
    assert tokens.tolist() == [1, 0] and tokens.dtype is INT32 and ok.all() and ok.dtype is torch.bool


def test_empty_batch():
    tokens, ok = draw(torch.empty(0, 10))
    assert tokens.shape == ok.shape == (0,)


@pytest.mark.parametrize("by", ["keys", "positions"])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_distribution_is_softmax(by: str, temperature: float):
    n = 40_000
    row = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, 0.5, -3.0, 1.5])
    tokens, _ = draw(row.repeat(n, 1), temperature=temperature, **{by: torch.arange(n)})
    counts = np.bincount(tokens.numpy(), minlength=8)
    assert chi_square_z(counts, torch.softmax(row.double() / temperature, 0).numpy()) < 3.1


def test_distribution_over_a_large_vocabulary():
    """Flat logits: each of 32 equal parts of 50,000 tokens wins equally often."""
    tokens = torch.cat([draw(torch.zeros(100, 50_048), keys=torch.arange(i, i + 100))[0] for i in range(0, 1600, 100)])
    counts = np.bincount(tokens.numpy() // 1564, minlength=32)
    assert chi_square_z(counts, np.full(32, 1 / 32)) < 3.1


def test_noise_of_neighbouring_keys_positions_and_tokens_is_unrelated():
    keys = torch.tensor([0, 1, 2, 1 << 32, -1, 7], dtype=torch.int64)
    noise = gumbel_noise(keys, torch.zeros(6, dtype=INT32), 20_000)
    more = gumbel_noise(torch.zeros(6, dtype=torch.int64), torch.arange(6, dtype=INT32) + 1, 20_000)
    rows = torch.cat([noise, more])
    correlation = np.corrcoef(rows.numpy()) - np.eye(len(rows))
    assert np.abs(correlation).max() < 0.035  # five standard deviations
    lagged = np.corrcoef(noise[0, :-1], noise[0, 1:])[0, 1]
    assert abs(lagged) < 0.035
    for row in rows:
        x = row.double().sort().values
        distance = (torch.exp(-torch.exp(-x)) - torch.arange(1, len(x) + 1) / len(x)).abs().max()
        assert distance < 2.2 / len(x) ** 0.5  # Kolmogorov-Smirnov, p about 1e-4


def test_noise_bits_are_a_fixed_function():
    """Every implementation must give these very bits: here in Python's integers, and as golden values."""

    def mix(x: int) -> int:
        x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
        x = (x ^ x >> 15) * 0x735A2D97 % 2**32
        return x ^ x >> 15

    def one(key: int, position: int, token: int) -> int:
        low, high = key % 2**32, (key >> 32) % 2**32
        a = mix(mix((low + position * 0x9E3779B9) % 2**32) ^ high)
        b = mix(mix((high + position * 0x85EBCA6B) % 2**32) ^ low ^ 0x6A09E667)
        x = token ^ a
        x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
        x = ((x ^ x >> 15) + b) * 0x735A2D97 % 2**32
        return x ^ x >> 15

    keys, positions = [0, 123456789012345, -1, -(2**63), 2**63 - 1], [0, 77, 2**31 - 1, 5, 4096]
    bits = noise_bits(torch.tensor(keys), torch.tensor(positions, dtype=INT32), 1000)
    rows = zip(keys, positions, strict=True)
    assert bits.tolist() == [[one(key, position, t) for t in range(1000)] for key, position in rows]
    assert bits[:2, :2].tolist() == [[1883383724, 4145500368], [1691138973, 3218211165]]


def test_mix32_is_a_bijection_with_avalanche():
    x = torch.arange(1 << 18)
    assert len(mix32(x).unique()) == 1 << 18
    flips = torch.stack([mix32(x[:4096]) ^ mix32(x[:4096] ^ (1 << b)) for b in range(32)])
    rate = torch.stack([((flips >> b) & 1).float().mean(1) for b in range(32)])
    assert (rate - 0.5).abs().max() < 0.06


def test_noise_is_finite_at_both_ends():
    ends = torch.tensor([0, 2**32 - 1])
    x = ends.float().add(0.5).mul(2.0**-32).clamp(max=1 - 2.0**-24)
    assert (-(-torch.log1p(-x)).log()).isfinite().all()


@pytest.mark.parametrize("vocab", [5, 300, 3000])
@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
def test_support_is_exact(vocab: int, scale: float):
    rng = np.random.default_rng(vocab)
    cases = [(k, p) for k in (0, 1, 2, 40, vocab, vocab + 9) for p in (1.0, 0.999, 0.9, 0.5, 1e-6)]
    z = torch.tensor(rng.normal(0, scale, (len(cases), vocab)), dtype=torch.float32)
    z -= z.amax(-1, keepdim=True)
    k = torch.tensor([c[0] for c in cases], dtype=INT32)
    p = torch.tensor([c[1] for c in cases], dtype=torch.float32)
    masked = z.clone()
    mask_top_k_top_p(masked, k, p)
    for i in range(len(cases)):
        kept = set(masked[i].isfinite().nonzero().squeeze(1).tolist())
        assert kept == support(z[i].numpy(), min(cases[i][0], vocab), float(p[i])), cases[i]
        assert torch.equal(masked[i][list(kept)], z[i][list(kept)])


def test_ties_at_the_cut_go_to_the_lowest_index():
    z = torch.tensor([[-1.0, 0.0, -1.0, -1.0, -2.0]]).repeat(2, 1)
    mask_top_k_top_p(z, torch.tensor([3, 0], dtype=INT32), torch.tensor([1.0, 0.6]))
    assert z[0].isfinite().tolist() == [True, True, True, False, False]
    assert z[1].isfinite().tolist() == [True, True, False, False, False]


def test_samples_stay_in_the_support():
    torch.manual_seed(1)
    row = torch.randn(400) * 2
    for k, p, t in ((10, 1.0, 1.0), (0, 0.7, 1.3), (20, 0.5, 0.8)):
        tokens, _ = draw(row.repeat(500, 1), t, k, p, keys=torch.arange(500))
        allowed = support((row / t).numpy(), k, p)
        assert set(tokens.tolist()) <= allowed and len(set(tokens.tolist())) > len(allowed) // 3


def mixed(n: int, vocab: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    pick = torch.randint(0, 4, (n,), generator=g)
    return (
        torch.randn(n, vocab, generator=g) * 3,
        torch.tensor([0.0, 0.3, 1.0, 1.7])[pick],
        torch.tensor([0, 50, 3, 0], dtype=INT32)[pick.roll(1)],
        torch.tensor([1.0, 0.9, 0.5, 0.999])[pick.roll(2)],
        torch.tensor([0.0, 0.1, 0.0, 0.02])[pick.roll(3)],
        torch.randint(-(2**62), 2**62, (n,), generator=g),
        torch.randint(0, 10_000, (n,), generator=g).int(),
    )


@pytest.mark.parametrize("min_p", [0.02, 0.3, 1.0])
def test_min_p_keeps_what_is_likely_enough_beside_the_likeliest(min_p: float):
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(3)) * 2
    tokens, ok = draw(logits.expand(3000, -1), temperature=0.8, min_p=min_p, keys=torch.arange(3000))
    p = (logits[0] / 0.8).softmax(0)
    allowed = set((p >= min_p * p.max()).nonzero().squeeze(1).tolist())
    assert ok.all() and set(tokens.tolist()) <= allowed
    if min_p == 0.3:
        assert set(tokens.tolist()) == allowed


@pytest.mark.parametrize("vocab", [777, 4096])
def test_a_row_does_not_depend_on_its_batch_mates(vocab: int):
    batch = mixed(64, vocab)
    together, _ = sample(*batch)
    for i in range(64):
        assert sample(*(x[i : i + 1] for x in batch))[0].item() == together[i]
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    assert torch.equal(sample(*(x[order] for x in batch))[0], together[order])


def test_noise_is_the_same_in_any_shape():
    *_, keys, positions = mixed(37, 1)
    together = gumbel_noise(keys, positions, 4099)
    for i in range(37):
        assert torch.equal(gumbel_noise(keys[i : i + 1], positions[i : i + 1], 4099)[0], together[i])
    assert torch.equal(gumbel_noise(keys, positions, 100), together[:, :100])


def test_same_seed_same_tokens_other_seed_others():
    logits = torch.zeros(8, 5000)
    positions = torch.arange(8)
    a = draw(logits, keys=5, positions=positions)[0]
    assert torch.equal(a, draw(logits, keys=5, positions=positions)[0])
    assert (a != draw(logits, keys=6, positions=positions)[0]).sum() >= 7
    assert len(set(a.tolist())) == 8


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_rows_are_flagged_and_harm_nobody(temperature: float):
    good = torch.randn(6, 50, generator=torch.Generator().manual_seed(3))
    expected, _ = draw(good, temperature, top_k=5, keys=torch.arange(6))
    bad = good.clone()
    bad[1, 7], bad[2, 0], bad[4] = float("nan"), float("inf"), float("-inf")
    tokens, ok = draw(bad, temperature, top_k=5, keys=torch.arange(6))
    assert ok.tolist() == [True, False, False, True, False, True]
    assert tokens[~ok].tolist() == [0, 0, 0]
    assert torch.equal(tokens[ok], expected[ok])


def test_extreme_temperatures_and_masked_logits():
    logits = torch.tensor([[1.0, float("-inf"), 1.1, -1e30]])
    assert draw(logits, 1e-30)[0].item() == 2
    hot = {draw(logits, 100.0, keys=k)[0].item() for k in range(60)}
    assert hot == {0, 2}
