"""What a sampler must give, in float64 and straight from the definitions; for samplers that round differently."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from minisgl.core.layout import Flag
from minisgl.core.plan import StepResult
from minisgl.distributed.tensor_parallel import winners
from minisgl.ops import sampling
from minisgl.ops.sampling import TOP, SamplingState, noise_bits
from minisgl.ops.table import OpTable, load_ops


def make_state(
    rows: int, device: str, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, keys: Tensor | None = None
) -> SamplingState:
    """Scalars, or one value a row."""
    state = SamplingState(rows, torch.device(device))
    state.last_token.fill_(-1)
    keys = torch.arange(rows) * 7919 if keys is None else keys
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "noise_key": keys}
    for name, value in given.items():
        getattr(state, name)[:] = torch.as_tensor(value)
    return state


def mixed_state(rows: int, device: str, seed: int = 0) -> SamplingState:
    """Rows with all kinds of parameters."""
    g = torch.Generator().manual_seed(seed)

    def pick(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(0, len(values), (rows,), generator=g)]

    return make_state(
        rows,
        device,
        pick(0.0, 0.3, 0.6, 1.0, 1.7),
        pick(0, 0, 1, 3, 50),
        pick(1.0, 1.0, 0.95, 0.5, 0.999, 1e-6),
        pick(0.0, 0.0, 0.02, 0.3),
        torch.randint(-(2**62), 2**62, (rows,), generator=g),
    )


def noise64(keys: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Gumbel noise [S, V] in float64 of the bits that the specification fixes."""
    x = noise_bits(keys.cpu(), positions.cpu(), vocab).double().add(0.5).mul(2.0**-32).clamp(max=1 - 2.0**-24)
    return -(-torch.log1p(-x)).log()


def surely_kept(row: Tensor, t: float, k: int, p: float, m: float) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens of a float32 row of logits [V] surely stay, and which may, by rounding at a cut."""
    z = ((row - row.max()) / torch.tensor(t)).double().numpy()
    bound = float(torch.tensor(m).log())
    unsure = np.abs(z - bound) <= 1e-6 * abs(bound) if m else np.zeros(len(z), bool)
    z = np.where(z < bound, -np.inf, z)
    order = np.lexsort((np.arange(len(z)), -z))[: k if 0 < k < len(z) else len(z)]
    mass = np.exp(z[order])
    before = (np.cumsum(mass) - mass) / mass.sum()
    kept = np.zeros(len(z), bool)
    kept[order[before < p] if p < 1 else order] = True
    kept &= z > -np.inf
    if p < 1:
        unsure[order[(np.abs(before - p) < 2e-6 + 2e-6 * p) & (before > 0)]] = True
    return kept & ~unsure, kept | unsure


def check_samples(
    ops: OpTable, logits: Tensor, state: SamplingState, positions: Tensor, rows: Tensor, is_filtered: bool
):
    """Sample and compare with float64; returns the tokens."""
    device = logits.device
    others = torch.ones(len(state.last_token), dtype=torch.bool, device=device)
    others[rows] = False
    out = ops.sample_rows(logits, rows, positions, state, is_filtered)
    assert out.dtype is torch.int32 and out.shape == (2, len(rows))
    assert torch.equal(state.last_token[rows], out[0]) and bool((state.last_token[others] == -1).all())
    noise = noise64(state.noise_key[rows], positions, logits.shape[1])
    params = zip(*(x[rows].tolist() for x in (state.temperature, state.top_k, state.top_p, state.min_p)), strict=True)
    for i, (t, k, p, m) in enumerate(params):
        row, token = logits[i].float().cpu(), int(out[0, i])
        is_sound = bool(row.max().isfinite())
        assert int(out[1, i]) == is_sound
        if not is_sound:
            assert token == 0
        elif t == 0:
            assert token == int(row.argmax())
        else:
            must, may = surely_kept(row, t, k, p, m) if is_filtered else (np.ones(len(row), bool),) * 2
            assert may[token], (i, token, t, k, p, m)
            score = row.double().numpy() / t + noise[i].numpy()
            tolerance = 1e-4 + 1e-6 * float(row.abs().max().clamp(max=1e4)) / t
            assert score[token] >= score[must].max() - tolerance, (i, token, t, k, p, m)
    return out[0]


def check_candidates(ops: OpTable, logits: Tensor, state: SamplingState, positions: Tensor, rows: Tensor, parts: int):
    """The best of the parts' candidates is the choice from all logits, which no state has been told of."""
    bounds = [len(logits[0]) * i // parts for i in range(parts + 1)]
    own = [ops.candidates(logits[:, lo:hi].contiguous(), rows, positions, state, lo) for lo, hi in pairwise(bounds)]
    assert all(c.dtype is torch.int32 and c.shape == (2, len(rows)) for c in own)
    assert bool((state.last_token == -1).all())
    assert torch.equal(winners(torch.stack(own)), ops.sample_rows(logits, rows, positions, state, False))


def check_cuts(cuts: Tensor, lasts: Tensor, logits: Tensor, state: SamplingState) -> None:
    """(cut, last) of every row describe the set of tokens that the specification keeps."""
    at = torch.arange(logits.shape[1])
    rows = zip(cuts.tolist(), lasts.tolist(), strict=True)
    params = zip(*(x.tolist() for x in (state.temperature, state.top_k, state.top_p, state.min_p)), strict=True)
    for i, ((cut, last), (t, k, p, m)) in enumerate(zip(rows, params, strict=True)):
        row = logits[i].float().cpu()
        if t == 0 or not row.max().isfinite():
            assert cut == float("-inf"), i
            continue
        got = (((row > cut) | ((row == cut) & (at <= last))) & (row > float("-inf"))).numpy()
        must, may = surely_kept(row, t, k, p, m)
        wrong = np.flatnonzero((must & ~got) | (got & ~may))
        assert not len(wrong), (i, t, k, p, m, int(got.sum()), int(must.sum()), int(may.sum()), wrong[:5])


def adversarial_logits(vocab: int, dtype: torch.dtype) -> Tensor:
    """Rows [10, V] that are hard to cut: equals, few values, one huge one, masked ones, all in one lane of a tile."""
    g = torch.Generator().manual_seed(5)
    rows = torch.randn(10, vocab, generator=g) * 2
    rows[0] = 0.25
    rows[1] = torch.randint(0, 3, (vocab,), generator=g).float()
    rows[2, vocab // 2] = 1e4
    rows[3, torch.randperm(vocab, generator=g)[3:]] = float("-inf")
    rows[4] = rows[4].sort().values
    rows[5] = rows[5].sort(descending=True).values
    rows[6] = -1e30
    rows[6, 5] = -1e29
    rows[7] = (rows[7] > 0).float() * -0.0
    rows[8, ::64] += 30
    rows[9] *= 1e-3
    return rows.to(dtype)


def check_penalties(device: str, vocab: int) -> None:
    """The kernels give what the reference gives, all in one batch; sequences without flags stay as they are."""
    g = torch.Generator().manual_seed(3)
    tables, rows, positions, flags, mask_index = penalized_batch(vocab, g)
    on_device = SimpleNamespace(**{name: x.to(device) for name, x in vars(tables).items()})
    batch = [x.to(device) for x in (flags, mask_index, rows, positions)]
    for dtype in (torch.float32, torch.float16):
        logits = (torch.randn(len(rows), vocab, generator=g) * 3).to(dtype)
        want = sampling.apply_penalties(logits, flags, mask_index, rows, positions, tables)
        before = logits.to(device)
        got = load_ops("triton").apply_penalties(before, *batch, on_device)
        assert got.dtype is torch.float32 and torch.equal(before.cpu(), logits)
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)
        free = (flags & (Flag.PENALIZED | Flag.MASKED)) == 0
        assert torch.equal(got.cpu()[free], logits[free].float()) and torch.equal(want[free], logits[free].float())
        for i in range(len(rows)):  # alone
            one = load_ops("triton").apply_penalties(before[i : i + 1], *(x[i : i + 1] for x in batch), on_device)
            assert torch.equal(one[0], got[i])
    tokens = torch.randint(0, vocab, (len(rows),), generator=g, dtype=torch.int32)
    sampling.count_tokens(tokens, flags, rows, tables)
    load_ops("triton").count_tokens(tokens.to(device), batch[0], batch[2], on_device)
    assert torch.equal(on_device.seen.cpu(), tables.seen)
    check_penalties_of_drafts(device, tables, on_device, rows, positions, flags, mask_index, g)


def check_penalties_of_drafts(
    device: str, tables: SimpleNamespace, on_device: SimpleNamespace, *batch: Tensor | torch.Generator
) -> None:
    """Drafts count as tokens that were sampled; some are biased, and some are there twice."""
    rows, positions, flags, mask_index, g = batch
    vocab, count = tables.seen.shape[1], 4
    rows, positions, flags, mask_index = (x.repeat_interleave(count) for x in (rows, positions, flags, mask_index))
    drafted = torch.arange(count, dtype=torch.int32).repeat(len(rows) // count)
    biased = torch.where(tables.bias_ids < 0, ~tables.bias_ids, tables.bias_ids)[rows, drafted.long() // 2]
    inputs = biased.where(tables.num_biases[rows] > 0, tables.seen[rows].argmax(1).int())
    logits = torch.randn(len(rows), vocab, generator=g) * 3
    arguments = (flags, mask_index, rows, positions)
    got = load_ops("triton").apply_penalties(
        logits.to(device), *(x.to(device) for x in arguments), on_device, drafted.to(device), inputs.to(device)
    )
    seen = tables.seen.clone()
    for i in range(len(rows)):
        if drafted[i]:
            sampling.count_tokens(inputs[i : i + 1], flags[i : i + 1], rows[i : i + 1], tables)
        else:
            tables.seen.copy_(seen)
        want = sampling.apply_penalties(logits[i : i + 1], *(x[i : i + 1] for x in arguments), tables)
        torch.testing.assert_close(got[i : i + 1].cpu(), want, rtol=1e-5, atol=1e-5)
    tables.seen.copy_(seen)
    want = sampling.apply_penalties(logits, *arguments, tables, drafted, inputs)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)
    load_ops("triton").count_tokens(inputs.to(device), *(x.to(device) for x in (flags, rows)), on_device)
    sampling.count_tokens(inputs, flags, rows, tables)
    assert torch.equal(on_device.seen.cpu(), tables.seen)


def penalized_batch(vocab: int, g: torch.Generator) -> tuple[SimpleNamespace, Tensor, Tensor, Tensor, Tensor]:
    """Tables of 9 rows; rows, positions, flags and places of masks of 7 sequences: with all, some and no changes."""
    allowed = torch.rand(3, -(-vocab // 32) * 32, generator=g) < 0.4
    allowed[2] = False
    allowed[2, vocab - 1] = True
    biased, ends = min(300, vocab // 2), 3
    ids = torch.stack([torch.randperm(vocab, generator=g)[:biased] for _ in range(9)]).int()
    ids[:, :ends] = ~ids[:, :ends]
    tables = SimpleNamespace(
        seen=torch.randint(0, 6, (9, vocab), dtype=torch.int32, generator=g),
        penalties=torch.rand(9, 3, generator=g) + 0.5,
        first_end=torch.tensor([10, 10, 10, 0, 10, 10, 10, 10, 10], dtype=torch.int32),
        num_biases=torch.tensor([0, 1, biased, ends, biased, 2, 0, 4, biased], dtype=torch.int32),
        bias_ids=ids,
        biases=torch.randn(9, biased, generator=g),
        masks=torch.from_numpy(np.packbits(allowed.numpy(), axis=1, bitorder="little").view(np.int32)),
    )
    a, m = Flag.PENALIZED | Flag.FROM_DEVICE, Flag.MASKED
    rows = torch.tensor([4, 0, 1, 8, 2, 3, 7])
    positions = torch.tensor([4, 4, 4, 4, 30, 4, 9], dtype=torch.int32)
    flags = torch.tensor([a | m, 0, m, Flag.LOGPROBS, a, a, a | m], dtype=torch.int32)
    return tables, rows, positions, flags, torch.tensor([0, 0, 1, 1, 1, 1, 2], dtype=torch.int32)


def check_logprobs(device: str, vocab: int) -> None:
    """The kernel's log-probabilities are the reference's, the lowest of equally likely tokens first."""
    g = torch.Generator().manual_seed(6)
    count, most = 9, min(TOP, vocab)
    for dtype in (torch.float32, torch.bfloat16 if device == "cuda" else torch.float16):
        logits = (torch.randn(count, vocab, generator=g) * 4).to(dtype)
        logits[1] = 0.5
        logits[2, vocab // 2] = 300.0
        logits[3, torch.randperm(vocab, generator=g)[2:]] = float("-inf")
        logits[4] = (torch.rand(vocab, generator=g) * 3).floor()
        logits[5] -= 40.0
        tokens = torch.randint(0, vocab, (count,), generator=g, dtype=torch.int32)
        flags = torch.full((count,), Flag.LOGPROBS | Flag.SAMPLES, dtype=torch.int32)
        flags[7] = Flag.PENALIZED
        args = [x.to(device) for x in (logits, tokens, flags)]
        scores = load_ops("triton").token_logprobs(*args)
        for i in (0, 8):  # alone
            assert torch.equal(load_ops("triton").token_logprobs(*(x[i : i + 1] for x in args))[:, 0], scores[:, i])
        scores = scores.cpu()
        assert scores.shape == (StepResult.WIDTH, count) and scores.dtype is torch.int32 and not scores[:, 7].any()
        # In float64: torch's sums of a quarter of a million equal float32 numbers are off by 1e-4.
        want = torch.log_softmax(logits.double(), 1)
        order = torch.sort(logits.float(), dim=1, descending=True, stable=True).indices[:, :most]
        want = torch.cat([want.gather(1, tokens.long()[:, None]), want.gather(1, order)], 1).float().t()
        is_wanted = flags != Flag.PENALIZED
        got = torch.cat([scores[:1], scores[1 + TOP :][:most]]).view(torch.float32)
        torch.testing.assert_close(got[:, is_wanted], want[:, is_wanted], rtol=1e-6, atol=3e-5)
        ids = scores[1 : 1 + TOP].long()
        assert torch.equal(ids[:most, is_wanted], order.t()[:, is_wanted])
        assert not ids[most:].any()
