"""Random traces: one terminal reply a request, no lost page, the text of solo runs, the same plans."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from minisgl.core.message import ExitMsg
from minisgl.core.plan import FinishReason
from minisgl.scheduler import drafts
from minisgl.scheduler.req import Req
from support.fake_engine import FakeEngine, expected_output
from support.traces import Harness, run_random_trace

SEEDS = int(os.environ.get("MINISGL_TRACES", "3"))


@pytest.mark.parametrize("speculate", ["off", "auto", "ngram", "tree"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_random_traces_keep_all_invariants(depth: int, speculate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    endings: Counter[str] = Counter()
    preemptions = hits = accepted = 0
    for seed in range(SEEDS):
        # These texts do not repeat themselves as often as drafts are right, so a look at them often finds none.
        monkeypatch.setattr(drafts, "PEEK_ROWS", seed % 2 * 64)
        h, counts = run_random_trace(seed, depth, speculate)
        endings += counts
        preemptions += h.scheduler.stats.preemptions
        stats = h.scheduler.stats
        hits += stats.cached_tokens
        accepted += stats.accepted_tokens
        assert stats.accepted_tokens <= stats.drafted_tokens
        assert stats.cached_tokens <= stats.looked_up_tokens <= stats.prompt_tokens
    # The traces must reach every kind of ending, preemptions and prefix hits.
    assert min(endings[r] for r in FinishReason) > SEEDS // 20, endings
    assert preemptions > SEEDS // 10
    assert hits > 10 * SEEDS
    assert {"off": 0, "tree": 0, "auto": 10 * SEEDS}.get(speculate, 20 * SEEDS) <= accepted
    assert (accepted == 0) == (speculate == "off")


BOUNDED = [*product((0, 1, 2), ("window", "state", "window state"), ("off", "auto", "ngram", "tree"))]
DRAFTED = {"window": "ngram", "state": "auto", "window state": "tree"}  # by default; the others by `make soak`


@pytest.mark.parametrize(
    ("depth", "bounded", "speculate"),
    [pytest.param(*c, marks=() if c[2] == DRAFTED[c[1]] else pytest.mark.slow) for c in BOUNDED],
)
def test_random_traces_with_windows_and_recurrent_states(depth: int, bounded: str, speculate: str) -> None:
    restores = captures = hits = preemptions = accepted = 0
    for seed in range(SEEDS):
        number = 1000 + 100 * depth + seed
        h, _ = run_random_trace(number, depth, speculate, bounded=bounded, deaths=number % 2)
        restores, captures = restores + h.engine.num_copies[0], captures + h.engine.num_copies[1]
        hits += h.scheduler.stats.cached_tokens
        preemptions += h.scheduler.stats.preemptions
        accepted += h.scheduler.stats.accepted_tokens
    assert hits > 10 * SEEDS
    assert min(captures, restores) > SEEDS if "state" in bounded else captures == restores == 0, "windows are shared"
    assert preemptions >= SEEDS // 10
    assert (accepted == 0) == (speculate == "off")


@pytest.mark.parametrize("speculate", ["off", "ngram"])
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_requests_outlive_their_scheduler(depth: int, speculate: str) -> None:
    """With tokens, grammars, log-probabilities and drafts as in one scheduler that lives."""
    endings: Counter[str] = Counter()
    for seed in range(SEEDS):
        _, counts = run_random_trace(seed, depth, speculate, deaths=1 + seed % 4)
        endings += counts
    assert min(endings[r] for r in FinishReason) > SEEDS // 20, endings


def test_plans_do_not_depend_on_the_hash_seed() -> None:
    tests = str(Path(__file__).parents[2])
    seen = set()
    for hash_seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join((tests, *sys.path))}
        cmd = [sys.executable, "-c", "from support.traces import digest_of_plans; print(digest_of_plans())"]
        seen.add(subprocess.run(cmd, env=env, check=True, capture_output=True, text=True).stdout)
    assert len(seen) == 1


PROMPT = list(range(1, 10)) * 3  # 27 tokens: four chunks of 8


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("abort_at", range(18))
def test_abort_at_each_step_releases_once(abort_at: int, depth: int) -> None:
    """Abort while queued, after each chunk, with the last chunk or a decode in flight, at the end, after the end."""
    for variant in range(27):  # each length of the prompt
        engine = FakeEngine(rows=2, num_pages=40, page_size=4, vocab=5003)
        h = Harness(engine, depth, max_prefill_length=8)
        twin = h.add([*PROMPT, variant], 6, ignore_eos=True)
        victim = h.add([*PROMPT[: 1 + variant % 27], 3], 1 + variant % 9, ignore_eos=True)
        given_back = count_releases(h)
        for _ in range(abort_at):
            h.step()
        had_row = h.table_row(victim) is not None
        h.abort(victim)
        h.abort(victim)
        for _ in range(2 + depth):
            h.step()
        assert victim not in h.scheduler.live, "not gone within two steps of the last batch in flight"
        h.finish_all()
        assert given_back[victim] <= 1
        assert given_back[victim] == 1 or not had_row, "its row was not given back"
        h.check_outputs()
        assert h.endings[twin] is FinishReason.LENGTH


def count_releases(h: Harness) -> Counter[int]:
    """Count from now on how often each request's row and pages are released."""
    counts: Counter[int] = Counter()
    release = h.scheduler.cache.release

    def counting(req: Req) -> None:
        counts[req.uid] += 1
        release(req)

    h.scheduler.cache.release = counting  # type: ignore[method-assign]
    return counts


def test_preemption_in_a_tiny_pool_does_not_change_the_text() -> None:
    engine = FakeEngine(rows=8, num_pages=24, page_size=4, max_model_len=64, vocab=5003)
    h = Harness(engine, 1, max_prefill_length=16)
    for i in range(40):
        h.add([1 + i, 2, 3, 4 + i % 3] * (1 + i % 5), 30, ignore_eos=True)
    h.finish_all()
    h.check_outputs()
    assert h.scheduler.stats.preemptions > 0
    assert set(h.endings.values()) == {FinishReason.LENGTH}


def test_the_same_prompt_in_flight_is_remapped_to_one_copy() -> None:
    engine = FakeEngine(rows=4, num_pages=64, page_size=4, vocab=5003)
    h = Harness(engine, 1)
    prompt = list(range(1, 34))
    for _ in range(3):
        h.add(prompt, 12, ignore_eos=True)
    h.step()
    h.step()
    h.step()
    live = list(h.scheduler.live.values())
    assert len(live) == 3
    assert len({tuple(r.pages[:8]) for r in live}) == 1, "the copies of the prompt were not folded into one"
    h.finish_all()
    h.check_outputs()


def test_a_wholly_cached_prompt_computes_one_page_at_most() -> None:
    engine = FakeEngine(rows=2, num_pages=32, page_size=4, vocab=5003)
    h = Harness(engine, 0)
    prompt = list(range(1, 17))
    h.add(prompt, 4, ignore_eos=True)
    h.finish_all()
    before = h.scheduler.stats.computed_prompt_tokens
    h.add(prompt, 4, ignore_eos=True)
    h.finish_all()
    assert 1 <= h.scheduler.stats.computed_prompt_tokens - before <= 4
    h.check_outputs()


def test_nan_logits_end_one_request_and_are_not_cached() -> None:
    engine = FakeEngine(rows=2, num_pages=32, page_size=4, vocab=5003)
    h = Harness(engine, 1)
    good, bad = h.add([1] * 9, 10, ignore_eos=True), h.add([2] * 9, 10, ignore_eos=True)
    engine.nan_rows = {1}
    h.finish_all()
    assert h.endings == {good: FinishReason.LENGTH, bad: FinishReason.ERROR}
    assert "NaN" in h.errors[bad]
    assert h.outputs[good] == expected_output([1] * 9, 10, 5003, ignore_eos=True)
    assert h.scheduler.cache.prefix.match_prefix(np.array([2] * 9, np.int32)).handle.num_pages == 0


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_exit_answers_every_request_once(depth: int) -> None:
    """Requests that have ended but are held by a step in flight get no second reply."""
    for steps in range(16):
        h = Harness(FakeEngine(rows=3, num_pages=40, page_size=4, vocab=7), depth, max_prefill_length=8)
        for i in range(6):
            h.add([1 + i, 2, 3 + i % 2] * (1 + i), 2 + 2 * i)
        for _ in range(steps):
            h.step()
        h.abort(steps % 6)
        h.io.inbox.append(ExitMsg())
        h.scheduler.run_forever()
        h.drain_replies()
        assert sorted(h.endings) == sorted(h.requests)
        h.check_outputs()


@pytest.mark.parametrize("speculate", ["off", "ngram", pytest.param("tree", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("depth", "slots"), [(0, 1), (1, 2), (2, 3)])
def test_random_traces_with_adapters(depth: int, slots: int, speculate: str) -> None:
    """Of more adapters than slots; a step, a page or a draft of another one would change the text."""
    hits = loads = refused = 0
    for seed in range(SEEDS):
        number = 2000 + 100 * depth + seed
        kinds = ("", "state", "window")[seed % 3]
        h, counts = run_random_trace(number, depth, speculate, bounded=kinds, deaths=number % 2, adapter_slots=slots)
        hits += h.scheduler.stats.cached_tokens
        refused += counts[FinishReason.ERROR]
        loads += h.engine.num_loads
    assert hits > 10 * SEEDS and loads > 3 * SEEDS and refused > SEEDS
