"""A recorded scheduler is run again: the same plans, and no token of a prompt in the file."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from minisgl.core.errors import ConfigError
from minisgl.core.message import UserMsg, ids_from_bytes, ids_to_bytes
from minisgl.core.params import SamplingParams
from minisgl.kvcache.tiers import TierSpec
from minisgl.scheduler import record
from minisgl.scheduler.record import Entry, Result, TokenHasher, recorded
from minisgl.tools.replay import Replay, ReplayError, check
from support import traces
from support.fake_engine import FakeEngine
from support.traces import Harness, run_random_trace


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "record")


@pytest.fixture
def options(path: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Lets the harness record, with these options."""
    given: dict[str, Any] = {"record": path, "overlap": False}

    def record(config: Any, *args: Any) -> Any:
        settings = {key: value for key, value in given.items() if key != "clock"}
        return recorded(replace(config, **settings), *args, clock=given.get("clock", time.monotonic))

    monkeypatch.setattr(traces, "Scheduler", record)
    return given


def replay_of(h: Harness, path: str) -> Replay:
    h.scheduler.engine.shutdown()
    replay = Replay(path)
    # What the harness has set by hand.
    replay.scheduler.depth = h.scheduler.depth
    replay.scheduler.pace.floor = h.scheduler.pace.floor
    replay.scheduler.prefill.patience = h.scheduler.prefill.patience
    return replay


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("has_texts", [False, True])
@pytest.mark.parametrize("speculate", ["off", "auto", "tree"])
def test_random_traces_are_planned_alike(
    seed: int, depth: int, has_texts: bool, speculate: str, options: dict[str, Any], path: str
) -> None:
    """With prefix hits, preemption, grammars, aborts, log-probabilities, drafts and small pools."""
    options["record_texts"] = has_texts
    h, _ = run_random_trace(100 * depth + seed + 2, depth, speculate)
    replay = replay_of(h, path)
    replay.advance()
    assert replay.step > 50
    counts = ("prompt_tokens", "cached_tokens", "generation_tokens", "preemptions", "computed_prompt_tokens")
    for name in (*counts, "accepted_tokens"):
        assert getattr(replay.scheduler.stats, name) == getattr(h.scheduler.stats, name), name
    assert not replay.scheduler.live
    assert (h.scheduler.stats.drafted_tokens > 0) == (speculate != "off")


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("bounded", ["", "window state"])
def test_moves_between_tiers_are_planned_alike(depth: int, bounded: str, options: dict[str, Any], path: str) -> None:
    """A disk too, whose pages are written while nothing else is to do; its folder is not touched."""
    tiers = [TierSpec("host", 90, 1e-6), TierSpec("disk", 180, 1e-6, lasts=True)]
    h, _ = run_random_trace(depth, depth, "off", tiers, damage=0.2, bounded=bounded)
    replay = replay_of(h, path)
    replay.advance()
    for of in (h, replay):
        assert sum(tier.stored_pages for tier in of.scheduler.cache.prefix.tiers) > 0
    again, first = (of.scheduler.stats.snapshot(of.scheduler).tiers for of in (replay, h))
    assert again == first


@pytest.mark.parametrize("depth", [0, 1])
def test_restores_and_captures_are_planned_alike(depth: int, options: dict[str, Any], path: str) -> None:
    h, _ = run_random_trace(3, depth, "ngram", bounded="window state")
    assert min(h.engine.num_copies) > 0
    replay_of(h, path).advance()


def run(h: Harness) -> None:
    for i in range(3):
        h.add([77, 78, 79, 80 + i], 6, stop=("secret",), cache_salt="pepper")
    h.finish_all()


def test_another_plan_is_told(options: dict[str, Any], path: str) -> None:
    h = Harness(FakeEngine(vocab=101), 0)
    run(h)
    replay = replay_of(h, path)
    replay.scheduler.pace.max_tokens = 3
    with pytest.raises(ReplayError, match="step 1 has another plan"):
        replay.advance()


def test_a_record_that_was_cut_off_is_replayed_up_to_there(options: dict[str, Any], path: str) -> None:
    h = Harness(FakeEngine(vocab=101), 0)
    run(h)
    replay = replay_of(h, path)
    replay.advance()
    Path(path).write_bytes(Path(path).read_bytes()[:-3])
    assert check(path) == replay.step - 1 > 3


def test_requests_that_waited_too_long_are_refused_again(options: dict[str, Any], path: str) -> None:
    now = [0.0]
    options |= {"max_queue_time": 5.0, "clock": lambda: now[0]}
    h = Harness(FakeEngine(rows=1, vocab=101), 0)
    h.add([1, 2], 20, ignore_eos=True)
    late = h.add([1, 2], 20, ignore_eos=True)
    while late not in h.endings:
        now[0] += 1.0
        h.step()
    h.finish_all()
    replay = replay_of(h, path)
    replay.advance()
    assert replay.scheduler.stats.generation_tokens == h.scheduler.stats.generation_tokens == 20


def test_no_token_and_no_text_of_a_request_is_in_the_file(options: dict[str, Any], path: str) -> None:
    h = Harness(FakeEngine(vocab=101), 0)
    run(h)
    replay = replay_of(h, path)
    for _ in range(3):
        entry = msgspec.msgpack.decode(replay._frame() or b"", type=Entry)
        ids = [ids_from_bytes(m.input_ids) for m in entry.messages if isinstance(m, UserMsg)]
        assert all((row >= 101).all() for row in ids)
        assert all((row[:3] == ids[0][:3]).all() and (row[3] != ids[0][3]) == (row is not ids[0]) for row in ids)
        eos = [*h.scheduler.rows.eos_ids]
        tokens = np.concatenate([np.empty(0, "<i4"), *(ids_from_bytes(r.tokens) for r in entry.results)])
        assert ((tokens >= 101) | np.isin(tokens, eos)).all()
    data = Path(path).read_bytes()
    assert b"secret" not in data and b"pepper" not in data
    assert Path(path).stat().st_mode & 0o777 == 0o600


def test_hidden_outputs_are_the_hidden_prompts_that_repeat_them() -> None:
    """So a later turn of a conversation finds what the first has left in the cache."""
    hasher = TokenHasher(1000, frozenset({2}))

    def prompt(uid: int, ids: list[int]) -> list[int]:
        params = SamplingParams()
        entry = Entry(messages=[UserMsg(uid=uid, input_ids=ids_to_bytes(ids), sampling_params=params)])
        hasher.hide(entry, [])
        assert isinstance(entry.messages[0], UserMsg)
        return ids_from_bytes(entry.messages[0].input_ids).tolist()

    first, other = prompt(1, [5, 6, 7]), prompt(4, [31])
    assert first != other
    for token in (8, 2, 9):
        entry = Entry(results=[Result(ids_to_bytes([token]))])
        hasher.hide(entry, [np.array([1])])
        first += ids_from_bytes(entry.results[0].tokens).tolist()
    drafts = Result(ids_to_bytes([20, 21, 22, 23, 30]), b"", ids_to_bytes([1, 1, 1, 0, 1]), ids_to_bytes([0] * 5))
    entry = Entry(results=[drafts])
    hasher.hide(entry, [np.array([1, 1, 1, 1, 4])])
    hidden = ids_from_bytes(drafts.tokens).tolist()
    assert hidden[3] == 1000, "a rejected token is told"
    assert first[4] == 2
    assert prompt(5, [5, 6, 7, 8, 2, 9, 20, 21, 22])[6:] == hidden[:3]
    assert prompt(2, [5, 6, 7, 8, 2, 9, 10])[:6] == first
    assert not {*prompt(3, [6, 5, 7, 8, 2, 9])} & {*first} - {2}


def test_a_full_disk_ends_the_record_only(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(record.logger, "error", lambda text, *values: said.append(text % values))
    options["record"] = "/dev/full"
    h = Harness(FakeEngine(vocab=101), 0)
    run(h)
    h.scheduler.engine.shutdown()
    h.check_outputs()
    assert [text[:42] for text in said] == ["the record /dev/full ends here: [Errno 28]"]


def test_what_is_no_record_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        check(path)
    for data in (b"", b"hello", b"\x02\x00\x00\x00{}"):
        Path(path).write_bytes(data)
        with pytest.raises(ConfigError, match="is not a record of minisgl"):
            check(path)
