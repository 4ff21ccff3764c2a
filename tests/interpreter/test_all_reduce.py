"""The peer-to-peer all-reduce: ranks are processes, their inboxes are memory that they share."""

from __future__ import annotations

import dataclasses
import multiprocessing as mp
import random
import time

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from minisgl.kernels.triton import all_reduce as peer
from minisgl.ops import reference
from support.processes import PATIENCE_S

HIDDEN, PART_ROWS, MAX_ROWS, EPS = 48, 4, 7, 1e-5


def inputs(call: int, rank: int, rows: int, dtype: torch.dtype) -> Tensor:
    """In bfloat16 small integers: the interpreter cuts where a GPU rounds."""
    numbers = torch.randn(rows, HIDDEN, generator=torch.Generator().manual_seed(1000 + 10 * call + rank))
    return (numbers.round() if dtype is torch.bfloat16 else numbers).to(dtype)


def expected_sum(parts: list[Tensor]) -> Tensor:
    """In float32, rank 0 first, rounded once."""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for part in parts:
        total = total + part.float()
    return total.to(parts[0].dtype)


def inbox_of(rank: int, words: list[Tensor], state: Tensor) -> peer.Inbox:
    addresses = torch.tensor([inbox.data_ptr() for inbox in words], dtype=torch.int64)
    return peer.Inbox(words[rank], addresses, state, rank, PART_ROWS)


def empty_inboxes(ranks: int) -> list[Tensor]:
    cpu = torch.device("cpu")
    max_rows = min(MAX_ROWS, ranks * PART_ROWS)
    return [peer.Inbox.empty(ranks, PART_ROWS, max_rows, HIDDEN, cpu).share_memory_() for _ in range(ranks)]


def run_rank(rank: int, ranks: int, words: list[Tensor], dtype: torch.dtype, calls: int) -> None:
    """The same random calls on every rank, each at its own pace."""
    shared, own = random.Random(7), random.Random(rank)
    inbox = inbox_of(rank, words, torch.zeros(2, dtype=torch.int32))
    weight = inputs(-1, 0, 1, dtype)[0]
    residual = inputs(-2, 0, MAX_ROWS, dtype)
    for call in range(calls):
        two_shot = shared.random() < 0.5
        rows = shared.randint(1, MAX_ROWS if two_shot else PART_ROWS)
        x = [inputs(call, r, rows, dtype) for r in range(ranks)]
        time.sleep(own.choice([0, 0, 0.02]))
        total = expected_sum(x)
        if shared.random() < 0.5:
            normed, new = reference.add_rms_norm(total, residual[:rows], weight, EPS)
            got = peer.all_reduce(x[rank], inbox, two_shot=two_shot, norm=(residual[:rows], weight, EPS))
            assert torch.equal(residual[:rows], new)
            torch.testing.assert_close(got, normed, rtol=2e-2, atol=1e-3)
        else:
            got = peer.all_reduce(x[rank], inbox, two_shot=two_shot)
            assert torch.equal(got, total)
        assert inbox.state.tolist() == [(call + 1) % 2, 0]


@pytest.mark.parametrize(("ranks", "dtype", "calls"), [(2, torch.bfloat16, 8), (4, torch.float16, 4)], ids=str)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_ranks_at_their_own_pace_agree(ranks: int, dtype: torch.dtype, calls: int):
    words = empty_inboxes(ranks)
    context = mp.get_context("fork")  # the interpreter's patches come with it
    workers = [context.Process(target=run_rank, args=(r, ranks, words, dtype, calls)) for r in range(ranks)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(PATIENCE_S)
    codes = [worker.exitcode for worker in workers]
    for worker in workers:
        worker.kill()
    assert codes == [0] * ranks
    assert all((inbox == peer.EMPTY).all() for inbox in words)


@pytest.mark.parametrize("two_shot", [False, True])
def test_one_rank_sends_takes_and_leaves_the_inbox_empty(two_shot: bool):
    """Rank 1 of 2, in slot 1; what rank 0 sends is there before."""
    rows, dtype = 3, torch.bfloat16
    words, x = empty_inboxes(2), [inputs(0, r, 3, torch.bfloat16) for r in range(2)]
    inbox = inbox_of(1, words, torch.tensor([1, 0], dtype=torch.int32))
    sent = [part.view(torch.int32) for part in x]
    total = expected_sum(x)
    sums = total.view(torch.int32)
    if two_shot:  # rank 1 owns row 1
        words[1][1, 0] = sent[0][1]
        for row in (0, 2):
            words[1][1, 2 * PART_ROWS + row] = sums[row]
    else:
        words[1][1, :rows] = sent[0]
    got = peer.all_reduce(x[1], inbox, two_shot=two_shot, programs=1 if two_shot else rows)
    assert got.dtype == dtype and torch.equal(got, total)
    assert (words[1] == peer.EMPTY).all()
    assert inbox.state.tolist() == [0, 0]
    expected = torch.full_like(words[0], peer.EMPTY)
    if two_shot:
        expected[1, PART_ROWS : PART_ROWS + 2] = sent[1][[0, 2]]
        expected[1, 2 * PART_ROWS + 1] = sums[1]
    else:
        expected[1, PART_ROWS : PART_ROWS + rows] = sent[1]
    assert torch.equal(words[0], expected)


@pytest.mark.parametrize("two_shot", [False, True])
def test_numbers_that_look_empty_are_sent_as_other_nans(two_shot: bool):
    inbox = inbox_of(0, empty_inboxes(1), torch.zeros(2, dtype=torch.int32))
    x = torch.full((1, HIDDEN // 2), peer.EMPTY, dtype=torch.int32).view(torch.bfloat16)
    assert peer.all_reduce(x, inbox, two_shot=two_shot).isnan().all()


@pytest.mark.parametrize("two_shot", [False, True])
def test_a_part_that_never_comes_is_an_error(two_shot: bool, monkeypatch: pytest.MonkeyPatch):
    builder = interpreter.interpreter_builder
    checking = dataclasses.replace(builder.options, debug=True, sanitize_overflow=False)  # as kernels are compiled
    monkeypatch.setattr(builder, "options", checking)
    words = empty_inboxes(2)
    inbox = inbox_of(0, words, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(InterpreterError, match="did not send its part in time"):
        peer.all_reduce(torch.ones(1, HIDDEN, dtype=torch.bfloat16), inbox, two_shot=two_shot, patience=3)
