"""Answers do not depend on drafts: bytes are equal in float32 with the C++ step, tokens with steps op by op."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.core.errors import ConfigError
from minisgl.core.layout import PROPOSED
from minisgl.core.message import AbortMsg, UserMsg, ids_from_bytes, ids_to_bytes
from minisgl.core.params import Grammar, SamplingParams
from minisgl.device.device import CpuDevice, Device
from minisgl.engine.engine import Engine
from minisgl.engine.resolve import resolve
from minisgl.ops.table import load_ops
from minisgl.scheduler.grammars import Grammars
from minisgl.scheduler.io import OfflineIO
from minisgl.scheduler.req import Req
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.stats import Stats
from minisgl.settings.options import MAX_DRAFTS, SchedulerConfig, build_config
from minisgl.speculative.lookup import look_up
from minisgl.speculative.ngram import NGramDrafter
from support.fake_grammar import FakeCompiler, LateExecutor
from support.late_device import LateDevice
from support.tiny_model import VOCAB, write_tiny_model

pytestmark = pytest.mark.usefixtures("fixed_costs")

Requests = list[tuple[list[int], SamplingParams]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), 160)


def make_requests(rng: random.Random, count: int) -> Requests:
    """Requests of every kind, with shared beginnings."""
    heads = [[rng.randrange(1, VOCAB) for _ in range(40)] for _ in range(2)]
    requests = []
    for i in range(count):
        prompt = rng.choice(heads)[: rng.randrange(1, 41)] + [rng.randrange(1, VOCAB) for _ in range(rng.randrange(30))]
        given: dict[str, Any] = {"temperature": rng.choice((0.0, 0.5, 1.0)), "max_tokens": rng.randrange(1, 60)}
        for likely, fields in (
            (0.3, {"top_k": 20, "top_p": 0.9}),
            (0.2, {"min_p": 0.02}),
            (0.3, {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2}),
            (0.2, {"logit_bias": ((3, 1.5), (5, -2.0))}),
            (0.2, {"min_tokens": min(6, given["max_tokens"])}),
            (0.3, {"logprobs": rng.randrange(4)}),
            (0.1, {"logprobs": 2, "echo": True}),
            (0.4, {"ignore_eos": True}),
            (0.5, {"seed": rng.randrange(4)}),
            (0.2, {"stop_token_ids": (rng.randrange(VOCAB), rng.randrange(VOCAB))}),
            (0.2, {"grammar": Grammar("regex", f"{i} {rng.randrange(5, 30)}", param="regex")}),
            (0.1, {"speculate": False}),
            (0.1, {"cache_salt": "a"}),
        ):
            if rng.random() < likely:
                given |= fields
        requests += [(prompt, SamplingParams(**given))] * rng.choice((1, 1, 1, 2))
    return requests[:count]


class Oracle:
    """Drafts what follows in an answer that begins like this one, with mistakes."""

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        self.rng = np.random.default_rng(0)
        self.answers = np.full((len(answers), max(map(len, answers)) + 2 * PROPOSED), -1)
        for row, ids in zip(self.answers, answers, strict=True):
            row[: len(ids)] = ids

    def propose(
        self, history: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, longest: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert lengths.min() > 0 and lengths.max() <= longest
        texts = zip(history[rows].numpy(), lengths.tolist(), strict=True)
        drafts = np.stack([self.following(ids[:length], MAX_DRAFTS) for ids, length in texts])
        ready = self.rng.integers(MAX_DRAFTS + 1, size=len(rows))
        return torch.from_numpy(drafts), torch.from_numpy(ready.astype(np.int32))

    def following(self, known: np.ndarray, count: int) -> np.ndarray:
        """What follows the tokens `known`, of which -1 is any."""
        answers = self.answers[:, : len(known)]  # the device may go on after the end of one
        matches = np.flatnonzero(((answers == known) | (known == -1) | (answers == -1)).all(1))
        assert len(matches), f"no answer begins with {known}"
        right = self.answers[matches[0], len(known) : len(known) + count].clip(0)
        return np.where(self.rng.random(count) < 0.9, right, self.rng.integers(VOCAB, size=count)).astype(np.int32)


@dataclass
class Answers:
    """What each request got; log-probabilities are bytes."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, Any] = field(default_factory=dict)
    logprobs: dict[int, list[tuple[bytes, ...]]] = field(default_factory=dict)
    drafted: dict[int, int] = field(default_factory=dict)


def run(
    folder: Path,
    requests: Requests,
    depth: int = 0,
    device: Device | None = None,
    oracle: Oracle | None = None,
    aborts: frozenset[int] = frozenset(),
    **options: Any,
) -> tuple[Answers, Scheduler]:
    torch.manual_seed(0)
    backend = "auto" if device is None else "cpu"
    config = build_config(
        SchedulerConfig, {"model": str(folder), "dummy_weight": True, "attention_backend": backend, **options}
    )
    engine, io = Engine(resolve(config.engine, "cpu"), device or CpuDevice(1)), OfflineIO()
    assert engine.general.name.startswith("native" if device is None else "eager")
    compiling = LateExecutor()
    scheduler = Scheduler(config, engine, io, Grammars(FakeCompiler(VOCAB), compiling))
    if oracle is not None:
        engine.parts.drafting.drafter = oracle
        assert scheduler.drafts is not None

        def guess(req: Req) -> np.ndarray:
            return oracle.following(scheduler.rows.text(req), int(oracle.rng.integers(PROPOSED)))

        scheduler.drafts.guess = guess
        scheduler.drafts._asks_device = device is not None and bool(len(oracle.answers) % 2)
    scheduler.depth = depth
    if device is not None:
        scheduler.cache.on_free = engine.parts.store.poison
    answers = Answers({uid: [] for uid in range(len(requests))}, {}, {uid: [] for uid in range(len(requests))})
    todo, step = list(enumerate(requests)), 0
    while todo or io.inbox or scheduler.is_busy:
        for uid, (prompt, params) in todo[:2]:
            io.inbox.append(UserMsg(uid=uid, input_ids=ids_to_bytes(prompt), sampling_params=params))
        del todo[:2]
        if step in (9, 15, 21):
            io.inbox.extend(AbortMsg(uid) for uid in aborts)
        compiling.work()
        scheduler.step()
        step += 1
        while io.replies:
            msg = io.replies.popleft()
            for uid, token in zip(np.frombuffer(msg.uids, "<i8").tolist(), ids_from_bytes(msg.tokens), strict=True):
                answers.tokens[uid].append(int(token))
            columns = [c for c in (*(s.prompt_logprobs for s in msg.started), *msg.logprobs) if c is not None]
            for c in columns:
                answers.logprobs[c.uid].append((c.logprobs, c.top_ids, c.top_logprobs))
            for uid, count in msg.drafted:
                answers.drafted[uid] = answers.drafted.get(uid, 0) + count
            for end in msg.finished:
                assert end.uid not in answers.ends and end.failure is None, end
                answers.ends[end.uid] = end.reason, end.stop_reason, end.has_text
    assert len(answers.ends) == len(requests)
    assert scheduler.cache.available == scheduler.cache.num_pages
    return answers, scheduler


LAYOUTS: list[dict[str, Any]] = [
    {"page_size": 16},
    {"page_size": 1, "max_prefill_length": 24, "schedule_policy": "lpm"},
    {"page_size": 4, "num_pages": 34, "max_running_requests": 8, "max_prefill_length": 48},
    {"page_size": 128, "cache_type": "naive", "mixed_batches": False},
]
# Two of them by default, all by `make soak`.
SOME_LAYOUTS = [
    pytest.param(layout, marks=() if i % 2 else pytest.mark.slow, id=f"pages of {layout['page_size']}")
    for i, layout in enumerate(LAYOUTS)
]


def check_equal(folder: Path, seed: int, depth: int, count: int, layout: dict[str, Any], speculate: str) -> Stats:
    """Compare `count` random requests with and without drafts, and with as many of these as a row may have."""
    rng = random.Random(seed)
    requests = make_requests(rng, count)
    plain, _ = run(folder, requests, **layout)
    oracle = Oracle([[*prompt, *plain.tokens[uid]] for uid, (prompt, _) in enumerate(requests)])
    drafted, scheduler = run(
        folder, requests, depth, oracle=oracle, speculate=speculate, num_draft_tokens=rng.randrange(1, 9), **layout
    )
    for uid, (prompt, params) in enumerate(requests):
        what = f"request {uid}: {prompt} {params}"
        assert drafted.tokens[uid] == plain.tokens[uid], what
        assert drafted.ends[uid] == plain.ends[uid], what
        assert drafted.logprobs[uid] == plain.logprobs[uid], what
        assert params.speculate or uid not in drafted.drafted
    constrained = [uid for uid, (_, params) in enumerate(requests) if params.grammar is not None and params.speculate]
    assert any(uid in drafted.drafted for uid in constrained) or len(constrained) < 2
    stats = scheduler.stats
    # Drafts of a request that has ended meanwhile are not announced.
    assert 0 < stats.accepted_tokens < sum(drafted.drafted.values()) <= stats.drafted_tokens
    return stats


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("layout", SOME_LAYOUTS)
def test_answers_are_equal_with_and_without_drafts(folder: Path, layout: dict[str, Any], depth: int) -> None:
    count = 60 if "num_pages" in layout else 30 + depth % 2
    stats = check_equal(folder, 9 + depth, depth, count, layout, ("auto", "ngram")[depth % 2])
    if "num_pages" in layout:
        assert stats.preemptions > 0 and stats.cached_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(36))
def test_a_thousand_answers_are_equal(folder: Path, seed: int) -> None:
    check_equal(folder, 100 + seed, seed % 3, 28 + seed % 2, LAYOUTS[seed // 3 % 4], ("auto", "ngram")[seed % 2])


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, {"page_size": 16, "attention_backend": "reference,cpu"}], ids=lambda o: str(list(o.values()))
)
def test_drafts_while_late_change_no_token(folder: Path, layout: dict[str, Any]) -> None:
    """A device that runs behind the plans, op by op, with freed pages full of NaN."""
    requests = make_requests(random.Random(5), 24)
    plain, _ = run(folder, requests, device=CpuDevice(1), **layout)
    oracle = Oracle([[*prompt, *plain.tokens[uid]] for uid, (prompt, _) in enumerate(requests)])
    late, scheduler = run(folder, requests, 1, LateDevice(1), oracle, speculate="ngram", **layout)
    assert late.tokens == plain.tokens
    assert scheduler.stats.accepted_tokens > 0


def test_aborts_leave_the_others_untouched(folder: Path) -> None:
    requests, aborts = make_requests(random.Random(6), 24), frozenset(range(0, 24, 3))
    plain, _ = run(folder, requests, **LAYOUTS[2])
    oracle = Oracle([[*prompt, *plain.tokens[uid]] for uid, (prompt, _) in enumerate(requests)])
    drafted, _ = run(folder, requests, 1, oracle=oracle, aborts=aborts, speculate="ngram", **LAYOUTS[2])
    for uid, tokens in drafted.tokens.items():
        assert tokens == plain.tokens[uid][: len(tokens)] if uid in aborts else tokens == plain.tokens[uid]


# -- the drafter


def drafts_of(*rows: list[int]) -> list[list[int]]:
    """The drafts that the n-gram drafter thinks are worth computing."""
    longest = max(map(len, rows))
    history = torch.full((len(rows), longest + 5), 7, dtype=torch.int32)
    for row, ids in zip(history, rows, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    drafter, lengths = NGramDrafter(load_ops("reference")), torch.tensor([len(ids) for ids in rows])
    drafts, count = drafter.propose(history, torch.arange(len(rows)), lengths, longest)
    found = [d[:n].tolist() for d, n in zip(drafts, count.tolist(), strict=True)]
    assert [look_up(np.array(ids, np.int32)).tolist() for ids in rows] == found
    return found


def test_ngram_drafts_what_followed_the_longest_match() -> None:
    short, long = [3, 4, 50, 51], [1, 2, 3, 4, 60, 61, 62, 63, 64, 65, 66, 67]
    assert drafts_of([*long, *short, 1, 2, 3, 4]) == [[60, 61, 62, 63, 64, 65, 66, 67]]
    assert drafts_of([*long, 3, 4, 50, 51, 9, 3, 4])[0][:3] == [50, 51, 9], "not the most recent of equal matches"
    assert drafts_of([1, 2, 3, 9, 8, 3]) == [[]], "one token is no match"


def test_ngram_goes_on_with_a_repetition() -> None:
    assert drafts_of([9, 1, 2, 3, 1, 2, 3, 1, 2]) == [[3, 1, 2, 3, 1, 2, 3, 1]]


def test_ngram_looks_at_each_row_alone() -> None:
    rows = [[1], [5, 6], [1, 2, 3, 1, 2], [*range(20, 40), 20, 21], [7, 7, 7]]
    assert drafts_of(*rows) == [drafts_of(row)[0] for row in rows]
    assert drafts_of(*rows)[0] == [] and drafts_of(*rows)[3][:2] == [22, 23]


def test_ngram_searches_the_newest_tokens_of_a_long_history(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.speculative.lookup.WINDOW", 16)
    forgotten, known = [1, 2, 3, *range(10, 40), 1, 2], [*range(10, 40), 1, 2, 3, 50, 51, 1, 2]
    assert drafts_of(forgotten, known, [8, 9, 3, 8, 9]) == [[], [3, 50, 51, 1, 2, 3, 50, 51], [3, 8, 9, 3, 8, 9, 3, 8]]


def test_ngram_finds_the_same_in_a_batch_and_alone() -> None:
    rng = random.Random(0)
    for _ in range(200):
        drafts_of(*([rng.randrange(3) for _ in range(rng.randrange(1, 30))] for _ in range(5)))


# -- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_draft_tokens": 9}, "num_draft_tokens=9 must be at most 8"),
        ({"num_draft_tokens": 0}, "num_draft_tokens=0 must be at least 1"),
        ({"speculate": "crystal-ball"}, "speculate='crystal-ball' is not one of off, auto, ngram, tree"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_config(SchedulerConfig, options)
