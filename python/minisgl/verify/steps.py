"""Steps of an engine without its scheduler: spans of token ids in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minisgl.core import BatchPlan
from minisgl.engine.engine import Engine
from minisgl.engine.pooling import PoolingRunner
from minisgl.engine.trial import trial_plan
from minisgl.errors import ConfigError
from minisgl.layout import Flag

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.engine.runner import EagerRunner
    from minisgl.llm.llm import LLM
    from minisgl.native.runner import NativeRunner


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


def span_plan(spans: list[Span], page_writes: Sequence[tuple[int, int, int]] = ()) -> BatchPlan:
    """The plan of one step of `spans`; `page_writes` are (row, index in the row, page)."""
    slots = [(s.row, s.start, s.stop, Flag.SAMPLES if s.samples else 0) for s in spans]
    return trial_plan(slots, np.concatenate([np.array(s.ids, np.int32) for s in spans]), page_writes)


class Stepper:
    """Assigns pages in random order when they are first needed, and runs steps with a runner that supports any step.

    While it is in use, all pages and rows belong to it: the engine's scheduler must be idle, with an empty cache.
    """

    def __init__(self, runner: EagerRunner | NativeRunner, num_pages: int) -> None:
        self.runner = runner
        self.page_size = runner.parts.kv_cache.page_size
        self._free: list[int] = np.random.default_rng(0).permutation(num_pages).tolist()
        self._pages: dict[int, list[int]] = {}
        self._writes: list[tuple[int, int, int]] = []

    def share_prefix(self, source: int, target: int, tokens: int) -> None:
        """Start the unused row `target` with the pages of the first `tokens` (whole pages) of row `source`."""
        count = tokens // self.page_size
        assert tokens == count * self.page_size and target not in self._pages, "shares whole pages with a new row"
        for page in self._pages[source][:count]:
            self._map(target, page)

    def _map(self, row: int, page: int) -> None:
        pages = self._pages.setdefault(row, [])
        self._writes.append((row, len(pages), page))
        pages.append(page)

    def step(self, spans: list[Span]) -> Tensor:
        """Run one forward pass; returns logits [sampling spans, V] in the model's dtype, on the device."""
        for span in spans:
            while len(self._pages.get(span.row, ())) * self.page_size < span.stop:
                if not self._free:
                    raise ConfigError(
                        "the KV cache is too small for this; give more --num-pages or a higher --memory-ratio"
                    )
                self._map(span.row, self._free.pop())
        plan = span_plan(spans, self._writes)
        self._writes = []
        return self.runner.logits_of(plan)


def engine_of(llm: LLM) -> Engine:
    """The engine of `llm`, with the attributes that the scheduler does not know."""
    engine = llm.scheduler.engine
    assert isinstance(engine, Engine), "LLM makes real engines"
    return engine


def stepper_of(engine: Engine) -> Stepper:
    """Steps of `engine`."""
    assert not isinstance(engine.general, PoolingRunner), "an embedding model gives no logits"
    return Stepper(engine.general, engine.num_pages)
