"""Grammars in the scheduler: masks for overlapped steps, aborts, refusals and deadlines during compilation."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from minisgl.core.errors import RequestError
from minisgl.core.layout import Flag
from minisgl.core.message import ExitMsg
from minisgl.core.params import Grammar
from minisgl.core.plan import BatchPlan, FinishReason
from minisgl.scheduler import grammars
from support.fake_engine import FakeEngine
from support.fake_grammar import FakeCompiler, FakeMatcher
from support.processes import PATIENCE_S, eventually
from support.traces import Harness


def unpacked(plan: bytes) -> BatchPlan:
    return BatchPlan.unpack(np.frombuffer(plan, np.int32))


def grammar(text: str) -> dict[str, Any]:
    return {"grammar": Grammar("regex", text, param="regex")}


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_grammars_delay_no_step(depth: int) -> None:
    """Every row samples a token in every step at any depth: masks reach steps that were launched without."""
    h = Harness(FakeEngine(rows=3, vocab=101, late=depth), depth)
    free = h.add([1, 2, 3], 20, ignore_eos=True)
    bound = h.add([1, 2, 4], 20, ignore_eos=True, **grammar("3 99"))
    steps = 0
    while not h.endings.keys() >= {free, bound}:
        h.step()
        steps += 1
    assert steps <= 20 + 2 + depth
    h.finish_all()
    h.check_outputs()


def test_a_synchronous_engine_gets_masks_with_its_plans() -> None:
    engine = FakeEngine(rows=3, vocab=101, late=0)
    engine.is_async = False
    h = Harness(engine, 1)
    for i in range(3):
        h.add([1, 2, i], 20, ignore_eos=True, **grammar(f"{i} 99") if i else {})
    h.finish_all()
    h.check_outputs()
    masked = [plan for plan in map(unpacked, engine.plans) if (plan.sequences["flags"] & Flag.MASKED).any()]
    assert len(masked) >= 20 and all(len(plan.masks) for plan in masked)


def test_a_complete_grammar_ends_the_text() -> None:
    h = Harness(FakeEngine(vocab=101), 1)
    uids = [h.add([1, 2, i], 20, ignore_eos=True, **grammar(f"2 {i}")) for i in range(1, 5)]
    h.finish_all()
    h.check_outputs()
    assert [len(h.outputs[u]) for u in uids] == [1, 2, 3, 4]
    assert {h.endings[u] for u in uids} == {FinishReason.STOP}


@pytest.mark.parametrize("steps", range(8))
def test_abort_at_each_step(steps: int) -> None:
    h = Harness(FakeEngine(vocab=101), 1)
    bound = h.add([1, 2, 3], 20, ignore_eos=True, **grammar("3 99"))
    other = h.add([1, 2, 3], 20, ignore_eos=True, **grammar("4 99"))
    for _ in range(steps):
        h.step()
    h.abort(bound)
    h.finish_all()
    h.check_outputs()
    assert (h.endings[bound], h.endings[other]) == (FinishReason.ABORT, FinishReason.LENGTH)
    assert not len(h.scheduler.grammars)


def test_an_invalid_grammar_is_refused_with_its_field() -> None:
    h = Harness(FakeEngine(vocab=101), 1)
    bad = h.add([1, 2, 3], 20, **grammar("bad"))
    good = h.add([1, 2, 3], 20)
    h.finish_all()
    assert h.errors[bad] == "no grammar" and h.params[bad] == "regex"
    assert h.endings[good] in (FinishReason.STOP, FinishReason.LENGTH)


def test_known_grammars_do_not_wait_for_trials() -> None:
    release = threading.Event()

    class Compiler(FakeCompiler):
        def is_known(self, grammar: Grammar) -> bool:
            return grammar.text == "3 4"

        def compile(self, grammar: Grammar, ignore_eos: bool) -> FakeMatcher:
            assert self.is_known(grammar) or release.wait(PATIENCE_S)
            return super().compile(grammar, ignore_eos)

    h = Harness(FakeEngine(rows=40, num_pages=400, vocab=101), 1)
    h.scheduler.grammars = grammars.Grammars(Compiler(101))  # type: ignore[arg-type]
    unknown = [h.add([1, 2, i], 5, **grammar(f"{i} 5")) for i in range(2 * grammars.THREADS)]
    known = h.add([1, 2, 3], 5, **grammar("3 4"))

    def is_answered() -> bool:
        h.step()
        return known in h.endings

    try:
        assert eventually(is_answered)
        assert h.endings.keys().isdisjoint(unknown)
    finally:
        release.set()
    h.finish_all(1_000_000)
    h.check_outputs()


def test_compilation_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars, "COMPILE_S", 0.0)
    h = Harness(FakeEngine(vocab=101), 1)
    uid = h.add([1, 2, 3], 20, **grammar("3 99"))
    h.scheduler.step()
    h.scheduler.step()
    h.drain_replies()
    assert "not compiled within" in h.errors[uid]
    h.compiling.work()  # too late: ignored
    h.finish_all()


def test_a_compiler_bug_fails_one_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: FakeCompiler, grammar: Grammar, ignore_eos: bool) -> FakeMatcher:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(FakeCompiler, "compile", broken)
    h = Harness(FakeEngine(vocab=101), 1)
    uid, other = h.add([1, 2, 3], 20, **grammar("3 99")), h.add([1, 2], 5)
    h.finish_all()
    assert h.errors[uid] == "preparing the request failed: oh"
    assert h.endings[other] is not FinishReason.ERROR


@pytest.mark.parametrize("max_tokens", [1, 3, 9])
def test_a_grammar_that_cannot_be_followed_fails_its_request(monkeypatch: pytest.MonkeyPatch, max_tokens: int) -> None:
    def confused(self: FakeMatcher, token: int) -> None:
        self.history.append(token)
        if len(self.history) == 3:
            self.error = RequestError("too ambiguous")
        self._compute_mask()

    monkeypatch.setattr(FakeMatcher, "advance", confused)
    h = Harness(FakeEngine(vocab=101), 1)
    uid, other = h.add([1, 2, 3], max_tokens, ignore_eos=True, **grammar("3 99")), h.add([1, 2], 9, ignore_eos=True)
    h.finish_all()
    assert (h.endings[uid] is FinishReason.ERROR, h.errors[uid]) == (max_tokens > 3, "too ambiguous" * (max_tokens > 3))
    assert h.endings[other] is FinishReason.LENGTH


def test_exit_ends_requests_that_are_compiling() -> None:
    h = Harness(FakeEngine(vocab=101), 1)
    uid = h.add([1, 2, 3], 20, **grammar("3 99"))
    h.io.inbox.append(ExitMsg())
    h.scheduler.run_forever()
    h.drain_replies()
    assert h.errors[uid] == "the server is shutting down"
