"""Grammars that make the library crash, loop or grow are refused, and cost nobody else anything."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.core.errors import RequestError
from minisgl.core.params import Grammar, GrammarKind
from minisgl.grammar.trial import LIMITS, TriedCompiler
from minisgl.scheduler.grammars import THREADS
from support.processes import PATIENCE_S, eventually

LOW = -(2**63)
GOOD = Grammar("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}}', param="schema")


def chain(count: int) -> str:
    """A schema of `count` references, each to the next."""
    defs: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(count)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": defs | {f"d{count}": {"type": "integer"}}})


HOSTILE: list[tuple[GrammarKind, str]] = [
    ("json_schema", json.dumps({"type": "integer", "minimum": LOW, "maximum": LOW})),
    ("json_schema", chain(3000)),
    ("json_schema", '{"type":"array","items":' * 3000 + "{}" + "}" * 3000),
    ("json_schema", '{"type": "integer", "multipleOf": 1000003}'),
    ("regex", "x{100000}"),
    ("regex", "(" * 20000 + "a" + ")" * 20000),
    ("ebnf", "start: " + "(" * 20000 + '"a"' + ")" * 20000),
]


@pytest.fixture(scope="module")
def compiler() -> Iterator[TriedCompiler]:
    tried = TriedCompiler(BUILTIN_MODEL, vocab_size=4096, eos_ids=frozenset({1}))
    yield tried
    tried.close()


@pytest.mark.parametrize(
    ("kind", "text"), HOSTILE, ids=["bounds", "refs", "items", "multiple", "repeats", "groups", "rules"]
)
def test_hostile_grammars_are_refused(compiler: TriedCompiler, kind: GrammarKind, text: str) -> None:
    with pytest.raises(RequestError, match=r"^the_field is not a usable grammar: ") as refused:
        compiler.compile(Grammar(kind, text, param="the_field"), False)
    assert (refused.value.status, refused.value.param) == (400, "the_field")
    assert compiler.compile(GOOD, False).mask.any()


def test_hostile_grammars_delay_no_other(compiler: TriedCompiler) -> None:
    def refuse(i: int) -> None:
        with pytest.raises(RequestError):
            compiler.compile(Grammar("json_schema", f'{{"multipleOf": {1000003 + 2 * i}, "type": "integer"}}'), False)

    with ThreadPoolExecutor(THREADS) as pool:
        hostile = [pool.submit(refuse, i) for i in range(THREADS - 1)]
        time.sleep(0.1)
        began = time.monotonic()
        compiler.compile(Grammar("regex", "[a-z]{3}"), False)
        assert time.monotonic() - began < LIMITS.wall_s
        for job in hostile:
            job.result()


def test_verdicts_are_remembered(compiler: TriedCompiler) -> None:
    grammar = Grammar("regex", "x{90000}", param="regex")
    assert not compiler.is_known(grammar)
    for _ in range(2):
        began = time.monotonic()
        with pytest.raises(RequestError):
            compiler.compile(grammar, False)
    assert time.monotonic() - began < 0.05
    assert compiler.is_known(grammar)


def test_killed_process_is_replaced(compiler: TriedCompiler) -> None:
    compiler.compile(Grammar("regex", "[a-c]"), False)
    process = compiler.trials.process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    compiler.compile(Grammar("regex", "[a-d]"), False)
    assert eventually(lambda: process.returncode == -signal.SIGKILL)


def test_frozen_process_is_replaced(compiler: TriedCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler.compile(GOOD, False)
    frozen = compiler.trials.process
    assert frozen is not None
    monkeypatch.setattr(compiler.trials, "timeout_s", 2.0)
    os.kill(frozen.pid, signal.SIGSTOP)
    compiler.compile(Grammar("regex", "frozen", param="regex"), False)
    assert compiler.trials.process is not frozen


def test_grammars_that_come_at_once_are_all_tried(compiler: TriedCompiler) -> None:
    grammars = [Grammar("regex", f"at once {i}", param="regex") for i in range(3 * THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        assert all(pool.map(lambda grammar: compiler.compile(grammar, False).mask.any(), grammars))


def test_processes_end_with_their_parent() -> None:
    compiler = TriedCompiler(BUILTIN_MODEL, vocab_size=4096, eos_ids=frozenset({1}))
    compiler.compile(GOOD, False)
    process = compiler.trials.process
    assert process is not None
    compiler.trials._control.close()
    assert process.wait(PATIENCE_S) == 0


def test_expensive_masks_end_the_request() -> None:
    from minisgl.grammar.compiler import GrammarCompiler

    matcher = GrammarCompiler(BUILTIN_MODEL, 4096, frozenset({1})).compile(GOOD, False)
    matcher._overdraft = 10.0
    matcher.compute_mask(matcher.mask)
    assert matcher.error is not None and "masks take more than" in matcher.error.message
