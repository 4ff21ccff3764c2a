"""Runs steps of an engine without its scheduler: spans of token ids in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from minisgl.core.errors import ConfigError
from minisgl.core.layout import COPY, SLOT_ID, STATE, STATE_LEN, WINDOW, Flag
from minisgl.core.plan import BatchPlan
from minisgl.engine.engine import Engine
from minisgl.engine.pooling import PoolingRunner
from minisgl.engine.trial import trial_plan

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.engine.runner import EagerRunner
    from minisgl.llm.llm import LLM
    from minisgl.native.runner import NativeRunner


MAX_CAPTURED: Final = 8  # states of a span that are kept for `Stepper.share_prefix`
MAX_ROWS: Final = 16  # whose slots captures leave free
TOO_SMALL: Final = "the KV cache is too small to verify; give more --num-pages or a higher --memory-ratio"


@dataclass(frozen=True)
class Span:
    """The tokens `ids` at positions [start, stop) of the sequence in `row`."""

    row: int
    start: int
    ids: list[int]
    samples: bool = True

    @property
    def stop(self) -> int:
        return self.start + len(self.ids)


def span_plan(spans: list[Span], page_writes: Sequence[tuple[int, int, int, int]] = ()) -> BatchPlan:
    """Return the plan of a step that computes `spans`. `page_writes` as PAGE_WRITE."""
    sequences = [(s.row, s.start, s.stop, Flag.SAMPLES if s.samples else 0) for s in spans]
    return trial_plan(sequences, np.concatenate([np.array(s.ids, np.int32) for s in spans]), page_writes)


class Stepper:
    """Runs steps with a runner that supports any step, and allocates pages in random order.

    It uses all pages and rows, so the engine's scheduler must be idle, with an empty cache.
    """

    def __init__(self, runner: EagerRunner | NativeRunner) -> None:
        self.runner = runner
        self.page_size = runner.parts.page_size
        rng = np.random.default_rng(0)
        self._free: list[list[int]] = [rng.permutation(ids).tolist() for ids in runner.parts.store.blocks.spread()]
        self._has_state = len(self._free) > STATE
        self._states = self._free.pop() if self._has_state else []
        if self._has_state and not runner.parts.store.page_bytes[WINDOW]:
            del self._free[WINDOW]
        self._slots: dict[int, int] = {}  # of rows
        self._captured: dict[tuple[int, int], int] = {}  # (row, tokens) -> slot, at the last ends of pages
        self._pages: dict[int, list[list[int]]] = {}  # of a row, one in each group
        self._writes: list[tuple[int, int, int, int]] = []

    def share_prefix(self, source: int, target: int, tokens: int) -> None:
        """Map the pages of the first `tokens` (whole pages) of row `source` to the unused row `target`."""
        count = tokens // self.page_size
        assert tokens == count * self.page_size and target not in self._pages, "share whole pages with a new row"
        for pages in self._pages[source][:count]:
            self._map(target, pages)
        if self._has_state:
            if (source, tokens) not in self._captured:
                raise ConfigError(TOO_SMALL)
            captured = np.array([self._captured[source, tokens]]), np.array([self._slot(target)])
            self.runner.parts.store.copy(*captured)

    def _map(self, row: int, pages: list[int]) -> None:
        mapped = self._pages.setdefault(row, [])
        self._writes += [(group, row, len(mapped), page) for group, page in enumerate(pages)]
        mapped.append(pages)

    def _slot(self, row: int) -> int:
        if row not in self._slots:
            if not self._states:
                raise ConfigError(TOO_SMALL)
            self._slots[row] = self._states.pop()
            self._writes.append((STATE, row, SLOT_ID, self._slots[row]))
        return self._slots[row]

    def _captures(self, span: Span) -> list[tuple[int, ...]]:
        """Return captures at the last ends of pages of a span, as COPY."""
        self._writes.append((STATE, span.row, STATE_LEN, span.stop))
        slot, size = self._slot(span.row), self.page_size
        ends = range(span.start // size * size + size, span.stop + 1, size)[-MAX_CAPTURED:]
        for end in ends[: max(0, len(self._states) - MAX_ROWS)]:
            self._captured[span.row, end] = self._states.pop()
        targets = {end: self._captured[span.row, end] for end in ends if (span.row, end) in self._captured}
        return [(slot, target, span.row, end) for end, target in targets.items()]

    def step(self, spans: list[Span]) -> Tensor:
        """Run one forward pass; return logits [sampling spans, V] in the model's dtype, on the device."""
        for span in spans:
            while len(self._pages.get(span.row, ())) * self.page_size < span.stop:
                if not all(self._free):
                    raise ConfigError(TOO_SMALL)
                self._map(span.row, [free.pop() for free in self._free])
        copies = [copy for span in spans for copy in self._captures(span)] if self._has_state else []
        plan = replace(span_plan(spans, self._writes), captures=np.array(copies, COPY))
        self._writes = []
        return self.runner.logits_of(plan)


def engine_of(llm: LLM) -> Engine:
    """Return the engine of `llm` as an `Engine`: the scheduler knows only its protocol."""
    engine = llm.scheduler.engine
    assert isinstance(engine, Engine), "the engine is not an `Engine`"
    return engine


def stepper_of(llm: LLM) -> Stepper:
    """Return a `Stepper` for the engine of `llm`, which must not be an embedding model."""
    engine = engine_of(llm)
    assert not isinstance(engine.general, PoolingRunner), "an embedding model has no logits"
    return Stepper(engine.general)
