"""Gated DeltaNet's kernels on a GPU, in the sizes of Qwen3-Next, against their specification in float32."""

from __future__ import annotations

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
if torch.cuda.is_available():
    from minisgl.ops.table import load_ops
    from support.delta import Sequence, Sizes, compare, compare_folds, make_states, make_step, make_weights

    OPS = load_ops("triton")
    NEXT, SMALL = Sizes(16, 32, 128, 128, 44), Sizes(4, 12, 64, 256, 20, 3)
    BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
    ERROR = {BF16: 3e-2, F16: 6e-3, F32: 5e-5}  # relative to the largest number
    TYPES = [(BF16, F32), (BF16, BF16), (F16, F32), (F32, F32)]


@pytest.fixture(autouse=True)
def _exact(monkeypatch: pytest.MonkeyPatch):
    torch.manual_seed(0)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # of the reference's convolution


@pytest.mark.parametrize("kind", range(4))
@pytest.mark.parametrize("tokens", [1, 3, 9])
@pytest.mark.parametrize("rows", [1, 24])
def test_decoding(kind: int, tokens: int, rows: int):
    dtype, delta = TYPES[kind]
    for sizes in (NEXT, SMALL):
        most = sizes.entries - tokens
        state_lens = [40 + 3 * i for i in range(rows)]
        sequences = [Sequence(i, n + 7 * i % (most + 1), tokens - i % tokens, n) for i, n in enumerate(state_lens)]
        sequences.append(Sequence(rows, 50 + most, tokens, 50))
        assert compare(OPS, sizes, sequences, dtype, delta, "cuda") < ERROR[dtype]


@pytest.mark.parametrize("kind", range(4))
def test_chunks(kind: int):
    """Chunks of any length beside rows that decode, with captures; one chunk alone takes narrower parts of S."""
    dtype, delta = TYPES[kind]
    mixed = [Sequence(0, 30, 1, 30), Sequence(1, 41, 1, 30)]
    mixed += [Sequence(2, 0, 1), Sequence(3, 0, 2, captures=[(1, 10), (2, 11)]), Sequence(4, 1, 63), Sequence(5, 7, 64)]
    mixed += [Sequence(6, 100, 65, captures=[(165, 12), (164, 13), (101, 14), (101, 15)]), Sequence(7, 5, 0)]
    mixed += [Sequence(8, 0, 1000, captures=[(64, 16), (640, 17), (65, 18)]), Sequence(9, 3, 300)]
    alone = [Sequence(0, 11, 700, captures=[(400, 1)])]
    for sizes in (NEXT, SMALL):
        for sequences in (mixed, alone):
            assert compare(OPS, sizes, sequences, dtype, delta, "cuda") < ERROR[dtype]


def test_a_repeated_token():
    """Equal keys with beta near 1 are the hardest system: its series has terms of 1e18."""
    weights, (state,) = make_weights(NEXT, F32, "cuda"), make_states(1, 1, NEXT, F32, F32, "cuda")
    qkvz = torch.randn(1, NEXT.channels + 32 * 128, device="cuda").expand(128, -1)
    ba = torch.cat([torch.full((128, 32), 6.0), torch.full((128, 32), -9.0)], 1).cuda()
    step = make_step([Sequence(0, 0, 128)], "cuda")
    want = load_ops("reference").gated_delta(qkvz, ba, weights, type(state)(*(x.clone() for x in state)), step)
    got = OPS.gated_delta(qkvz, ba, weights, state, step)
    assert (got - want).abs().max() < 1e-4 * want.abs().max()


@pytest.mark.parametrize("kind", range(4))
def test_folds(kind: int):
    dtype, delta = TYPES[kind]
    folds = [(2, 15, 35), (0, 40, 41), (1, 7, 7), (3, 100, 117)]
    for sizes in (NEXT, SMALL):
        assert compare_folds(OPS, sizes, folds, 3, dtype, delta, "cuda") < ERROR[delta if delta == BF16 else dtype]


def test_captured_steps_follow_their_inputs():
    """A graph of a step with rows and chunks replays with other lengths, as long as they fit."""
    weights, (state,) = make_weights(NEXT, BF16, "cuda"), make_states(1, 5, NEXT, BF16, F32, "cuda")
    sequences = [Sequence(0, 30, 1, 25), Sequence(1, 0, 200), Sequence(2, 64, 0)]
    others = [Sequence(3, 45, 1, 44), Sequence(4, 70, 90, captures=[(100, 2)]), Sequence(2, 0, 110)]
    step, other = make_step(sequences, "cuda"), make_step(others, "cuda")
    step.captures.resize_(other.captures.shape).fill_(-1)
    qkvz, ba = (
        torch.randn(201, NEXT.channels + 4096, device="cuda").to(BF16),
        torch.randn(201, 64, device="cuda").to(BF16),
    )
    OPS.gated_delta(qkvz, ba, weights, state, step)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = OPS.gated_delta(qkvz, ba, weights, state, step)
    for name in ("slots", "state_lens", "rows", "cu_query_lens", "positions", "captures"):
        getattr(step, name).copy_(getattr(other, name))
    before = [x.clone() for x in state]
    graph.replay()
    replayed, after = out.clone(), [x.clone() for x in state]
    for x, old in zip(state, before, strict=True):
        x.copy_(old)
    want = OPS.gated_delta(qkvz, ba, weights, state, other)
    assert torch.equal(replayed, want)
    assert all(torch.equal(a, b) for a, b in zip(after, state, strict=True))
