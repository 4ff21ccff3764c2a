"""Logits equal Hugging Face transformers': prefill, chunks, decode, shared prefixes and mixtures of them."""

from __future__ import annotations

import random
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from transformers import Qwen3Config

from contract.checkpoints import COMMON, SCALED_ROPES, Checkpoint, architecture, configurations, save
from contract.harness import CPU, MiniEngine, Span
from minisgl.distributed.communicator import Communicator
from minisgl.models.families import FAMILIES
from minisgl.tools.verify.checks import HALF_FACTOR, reference, relative_errors
from support.ranks import run_ranks

RNG = random.Random(0)
A, B, C = ([RNG.randrange(160) for _ in range(n)] for n in (90, 37, 61))


@pytest.fixture(scope="module", params=configurations())
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return save(tmp_path_factory.mktemp(request.param), configurations()[request.param])


def assert_equal(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-4) -> None:
    """Largest difference relative to the largest logit."""
    assert ours.dtype is torch.float32 and ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_every_architecture_has_a_checkpoint():
    assert {architecture(c) for c in configurations().values()} == FAMILIES.keys()


@pytest.mark.parametrize(
    ("page_size", "ops", "attention"), [(16, "cpu", "cpu"), (1, "cpu", "reference,cpu"), (64, "reference", "reference")]
)
def test_prefill_and_decode(checkpoint: Checkpoint, page_size: int, ops: str, attention: str):
    engine = MiniEngine.load(checkpoint.folder, page_size=page_size, ops=ops, attention=attention)
    check_decoding(engine, checkpoint)


def check_decoding(engine: MiniEngine, checkpoint: Checkpoint) -> None:
    """A prompt of 80 tokens, and ten that are decoded."""
    want = checkpoint.logits(A)
    assert_equal(engine.step([Span(0, 0, A[:80])]), want[79:80])
    for i in range(80, 90):
        assert_equal(engine.step([Span(0, i, [A[i]])]), want[i : i + 1])


@pytest.mark.parametrize("chunk", [1, 33])
def test_chunked_prefill(checkpoint: Checkpoint, chunk: int):
    engine = MiniEngine.load(checkpoint.folder)
    want = checkpoint.logits(A)
    for start in range(0, len(A), chunk):
        logits = engine.step([Span(0, start, A[start : start + chunk])])
        assert_equal(logits, want[start + chunk - 1 : start + chunk] if start + chunk <= len(A) else want[-1:])


def test_after_a_prefix_hit(checkpoint: Checkpoint):
    engine = MiniEngine.load(checkpoint.folder)
    engine.step([Span(3, 0, A)])
    engine.share_prefix(3, 5, 64)
    ids = A[:64] + B
    assert_equal(engine.step([Span(5, 64, B)]), checkpoint.logits(ids)[-1:])
    assert_equal(engine.step([Span(3, 90, B)]), checkpoint.logits(A + B)[-1:])


def test_mixed_batch(checkpoint: Checkpoint):
    """Decode, a whole prompt, a middle chunk that samples nothing, and a continuation, all in one step."""
    engine = MiniEngine.load(checkpoint.folder)
    engine.step([Span(1, 0, A[:50]), Span(7, 0, C[:20], samples=False)])
    spans = [Span(1, 50, [A[50]]), Span(4, 0, B), Span(0, 0, A[:30], samples=False), Span(7, 20, C[20:])]
    want = torch.cat([checkpoint.logits(ids)[-1:] for ids in (A[:51], B, C)])
    assert_equal(engine.step(spans), want)
    assert_equal(engine.step([Span(0, 30, A[30:])]), checkpoint.logits(A)[-1:])


@pytest.mark.parametrize("size", [2, 4])
def test_several_ranks(checkpoint: Checkpoint, size: int):
    """Prefill, a mixed step, decode; with 4 ranks, KV heads that some of them share.

    A step sums after embeddings and after each block (attention and MLP in parallel are one, experts beside an MLP are
    two), for norms over all heads, and nowhere else.
    """
    steps = [
        [Span(1, 0, A[:50]), Span(7, 0, C[:20], samples=False)],
        [Span(1, 50, [A[50]]), Span(4, 0, B), Span(0, 0, A[:30], samples=False), Span(7, 20, C[20:])],
        [Span(0, 30, A[30:])],
        [Span(1, 51, [A[51]])],
    ]
    want = [[A[:50]], [A[:51], B, C], [A], [A[:52]]]

    def rank(comm: Communicator) -> list[torch.Tensor]:
        with patch.object(comm, "sum", wraps=comm.sum) as calls:
            engine = MiniEngine.load(checkpoint.folder, comm=comm)
            assert sum(p.tensor.numel() for p in engine.model.parameters) < 0.8 * engine.model.num_parameters
            logits = [engine.step(spans) for spans in steps]
            config = engine.model.config
            blocks = (1 if config.family.is_parallel else 2) + (config.qk_norm == "all")
            blocks += config.experts is not None and config.experts.flags.is_beside
            embeddings = 1 + bool(config.layer_input_size)
            assert calls.call_count == len(steps) * (embeddings + blocks * config.num_layers)
        return logits

    for logits in run_ranks(size, rank):
        for ours, prompts in zip(logits, want, strict=True):
            assert_equal(ours, torch.cat([checkpoint.logits(ids)[-1:] for ids in prompts]))


def test_uneven_vocabulary_shards(tmp_path: Path):
    config = Qwen3Config(**COMMON | {"vocab_size": 163}, num_attention_heads=4, num_key_value_heads=2)
    checkpoint = save(tmp_path, config)
    for ours in run_ranks(4, lambda comm: MiniEngine.load(tmp_path, comm=comm).step([Span(0, 0, A)])):
        assert_equal(ours, checkpoint.logits(A)[-1:])


@pytest.mark.parametrize("name", SCALED_ROPES)
def test_past_the_original_context(tmp_path: Path, name: str):
    """To the last position there is, four times the original context where the scaling has one."""
    config = Qwen3Config(**COMMON, num_attention_heads=4, num_key_value_heads=2, rope_parameters=SCALED_ROPES[name])
    checkpoint = save(tmp_path, config)
    ids = [RNG.randrange(160) for _ in range(256)]
    want = checkpoint.logits(ids)
    engine = MiniEngine.load(tmp_path)
    for start, stop in ((0, 60), (60, 100), (100, 250), *((i, i + 1) for i in range(250, 256))):
        assert_equal(engine.step([Span(0, start, ids[start:stop])]), want[stop - 1 : stop])


def test_step_without_sampling(checkpoint: Checkpoint):
    engine = MiniEngine.load(checkpoint.folder)
    assert engine.step([Span(0, 0, A, samples=False)]).shape == (0, 160)


def test_bfloat16_is_close(checkpoint: Checkpoint):
    """Against float32 and over some prefixes: no further off than transformers' own bfloat16, give or take.

    One prefix says little where there are experts: rounding makes both choose another one now and then.
    """
    lengths = range(60, 91, 3)
    last = torch.tensor(lengths) - 1
    want = checkpoint.logits(A)[last]
    theirs = reference(checkpoint.folder, [A], torch.bfloat16, CPU).logits[0][last]
    engine = MiniEngine.load(checkpoint.folder, dtype=torch.bfloat16)
    ours = torch.cat([engine.step([Span(row, 0, A[:n])]) for row, n in enumerate(lengths)])
    assert ours.dtype is torch.bfloat16
    assert relative_errors(ours, want).mean() <= HALF_FACTOR * relative_errors(theirs, want).mean() <= 0.2
