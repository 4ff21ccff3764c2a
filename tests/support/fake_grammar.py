"""Grammars without llguidance: the allowed tokens are a function of those before, and compiling takes some steps."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from copy import copy
from typing import Any

import numpy as np

from minisgl.core.errors import RequestError
from minisgl.core.params import Grammar, Thinking
from minisgl.grammar.thinking import Anything, ThinkingMatcher

EOS = 0
FIRST_CHAR = 0x4E00  # of the token 0; none of its neighbours is white space


class FakeMatcher:
    """The grammar "seed length": at most `length` tokens, of which about two thirds are allowed each time."""

    def __init__(self, text: str, vocab: int, may_end: bool) -> None:
        self.seed, self.length = (int(x) for x in text.split())
        self.vocab, self.may_end = vocab, may_end
        self.history: list[int] = []
        self.error: RequestError | None = None
        self.is_stale = False
        self._compute_mask()

    def allowed(self) -> list[int]:
        count, salt = len(self.history), self.seed + sum(self.history)
        if count == self.length:
            return [EOS] * self.may_end
        ends = [EOS] * (self.may_end and count % 3 == 2)
        return ends + ([t for t in range(1, self.vocab) if (7 * t + salt) % 3] or [1])

    def advance(self, token: int) -> None:
        assert token != EOS and token in self.allowed(), f"{token} after {self.history}"
        self.history.append(token)
        self._compute_mask()

    def forced(self) -> np.ndarray:
        """Now and then the grammar forces what may come next, and more."""
        probe, ids = self._copy(), []
        while not probe.is_complete and (len(probe.history) + self.seed) % 5 in (1, 2):
            ids.append(min(t for t in probe.allowed() if t != EOS))
            probe.advance(ids[-1])
        return np.array(ids, np.int32)

    def count_allowed(self, tokens: np.ndarray) -> int:
        probe = self._copy()
        for i, token in enumerate(tokens.tolist()):
            if token == EOS or token not in probe.allowed():
                return i
            probe.advance(token)
        return len(tokens)

    def along(self, drafts: np.ndarray) -> list[np.ndarray]:
        probe, masks = self._copy(), []
        for token in drafts[: self.count_allowed(drafts)].tolist():
            probe.advance(token)
            masks.append(probe.mask)
        return masks + [self.mask] * (len(drafts) - len(masks))

    def _copy(self) -> FakeMatcher:
        probe = copy(self)
        probe.history = list(self.history)
        return probe

    def _compute_mask(self) -> None:
        bits = np.zeros(-(-self.vocab // 32) * 32, np.uint8)
        bits[self.allowed() or [EOS]] = 1  # a step in flight at its completion still holds the row
        self.mask = np.packbits(bits, bitorder="little").view(np.int32)
        self.is_complete = len(self.history) == self.length


def text_of(tokens: Sequence[int]) -> str:
    """The text of tokens, each of which is one character."""
    return "".join(chr(FIRST_CHAR + token) for token in tokens)


class LimitedMatcher:
    """What `ThinkingMatcher` allows of the tokens that `inner` does, found in the whole text each time."""

    def __init__(self, thinking: Thinking, vocab: int, inner: FakeMatcher | None) -> None:
        self.thinking, self.vocab, self.inner = thinking, vocab, inner
        self.output: list[int] = []

    @property
    def is_complete(self) -> bool:
        return self.inner is not None and self.inner.is_complete

    def advance(self, token: int) -> None:
        self.output.append(token)
        if self.inner is not None:
            self.inner.advance(token)

    def allowed(self) -> list[int]:
        allowed = [*range(self.vocab)] if self.inner is None else self.inner.allowed()
        marker, is_forced = self.marker()
        next_ones = [t for t in allowed if (text_of([t]) == marker) == is_forced] if marker else allowed
        return next_ones or allowed

    def marker(self) -> tuple[str, bool]:
        """The character of a marker that must come next, or that must not."""
        t, text, count, has_closed = self.thinking, text_of(self.output), 0, False
        is_inside, start = t.is_open, 0
        while (at := text.find(t.close if is_inside else t.open, start)) >= 0:
            if not is_inside and (has_closed or at) and not t.lead:
                break
            count += (at - start) * is_inside
            has_closed |= is_inside
            start, is_inside = at + len(t.close if is_inside else t.open), not is_inside
        count += (len(text) - start) * is_inside
        if count < (t.budget or 0) or not (is_inside or (has_closed and t.lead)):
            return "", False
        marker = t.close if is_inside else t.open
        begun = max(n for n in range(len(marker)) if text[start:].endswith(marker[:n]))
        shared = next((n for n in range(len(marker)) if t.lead[: n + 1] != marker[: n + 1]), len(marker))
        return marker[begun] if is_inside or begun == shared else "", is_inside


class FakeCompiler:
    def __init__(self, vocab: int) -> None:
        self.vocab = vocab

    def limit(self, thinking: Thinking, grammar: FakeMatcher | None) -> ThinkingMatcher:
        tokens = [text_of([t]).encode() for t in range(self.vocab)]
        inner: Any = Anything(self.vocab) if grammar is None else grammar
        return ThinkingMatcher(thinking, tokens, lambda text: [ord(c) - FIRST_CHAR for c in text.decode()], inner)

    def is_known(self, grammar: Grammar) -> bool:
        return True

    def compile(self, grammar: Grammar, ignore_eos: bool) -> FakeMatcher:
        if grammar.text == "bad":
            raise RequestError("no grammar", param=grammar.param)
        return FakeMatcher(grammar.text, self.vocab, not ignore_eos)

    def compute_masks(self, matchers: Sequence[FakeMatcher]) -> None:
        """Matchers of this kind have theirs at once."""


class LateExecutor(Executor):
    """Runs a job when told to: no thread, no clock."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[Any], Any, tuple[Any, ...]]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs.append((future, fn, args))
        return future

    def work(self) -> None:
        """Run the oldest job, if there is one."""
        if self.jobs:
            future, fn, args = self.jobs.pop(0)
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(fn(*args))
                except Exception as e:
                    future.set_exception(e)


class AtOnce(LateExecutor):
    """Runs a job when it is submitted."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        self.work()
        return future
