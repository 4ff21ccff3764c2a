"""Plays the scheduler for a real engine with the native step: spans in, logits out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from contract.harness import Span
from minisgl.core.layout import FULL, NO_MASKS, NO_ROW_STATES, PAGE_WRITE, SLOT, Flag
from minisgl.core.plan import BatchPlan
from minisgl.distributed.group import Group
from minisgl.distributed.info import ALONE
from minisgl.engine.engine import Engine
from minisgl.native.runner import NativeRunner
from minisgl.settings.options import EngineConfig

ROWS, PAGES = 16, 4096


@dataclass
class NativeEngine:
    """Pages are poisoned at the start and mapped in random order when first needed."""

    engine: Engine
    free: list[list[int]] = field(default_factory=list)  # pages of each group

    def __post_init__(self) -> None:
        (runner,) = self.engine.runners
        assert isinstance(runner, NativeRunner), "the native step is not there"
        self.runner = runner
        store = self.engine.parts.store
        store.memory.fill_(0xFF)  # NaN in every type
        self.size = self.engine.page_size
        rng = np.random.default_rng(0)
        self.free = [rng.permutation(ids).tolist() for ids in store.blocks.spread()]
        self.maps: list[list[list[int]]] = [[[] for _ in range(ROWS)] for _ in self.free]
        self.mapped = self.maps[FULL]

    @classmethod
    def load(
        cls,
        folder: Path,
        dtype: str = "float32",
        page_size: int = 16,
        threads: int = 2,
        dummy: bool = False,
        quantization: str | None = None,
        cache: str = "auto",
    ) -> NativeEngine:
        config = EngineConfig(
            model=str(folder),
            device="cpu",
            dtype=dtype,
            page_size=page_size,
            num_pages=PAGES // page_size,
            max_running_requests=ROWS,
            threads=threads,
            dummy_weight=dummy,
            quantization=quantization,
            kv_cache_dtype=cache,
            speculate="off",
        )
        return cls(Engine.from_config(config, 8192, Group(ALONE)))

    def share_prefix(self, source: int, target: int, tokens: int) -> None:
        """Let row `target` begin with the pages that hold the first `tokens` (whole pages) of row `source`."""
        assert tokens % self.size == 0 and not self.mapped[target]
        for mapped, table in zip(self.maps, self.engine.parts.state.page_tables, strict=True):
            mapped[target] = mapped[source][: tokens // self.size]
            table[target, : len(mapped[target])] = torch.tensor(mapped[target], dtype=torch.int32)

    def step(
        self, spans: list[Span], flags: int = 0, rows: np.ndarray | None = None, masks: np.ndarray = NO_MASKS
    ) -> torch.Tensor:
        """One step -> logits [sampling spans, V] float32; its tokens and flags are `self.tokens`, `self.ok`."""
        pages = []
        for span in spans:
            while len(self.mapped[span.row]) * self.size < span.stop:
                for group, (mapped, free) in enumerate(zip(self.maps, self.free, strict=True)):
                    pages.append((group, span.row, len(mapped[span.row]), free[-1]))
                    mapped[span.row].append(free.pop())
        slots = [(s.row, s.start, s.stop, (Flag.SAMPLES | flags) if s.samples else 0) for s in spans]
        self.plan = BatchPlan(
            0,
            np.array(slots, SLOT),
            np.concatenate([np.array(s.ids, np.int32) for s in spans]),
            np.array(pages, PAGE_WRITE),
            NO_ROW_STATES if rows is None else rows,
            masks=masks,
        )
        result = self.engine.launch(self.plan).wait()
        self.tokens, self.ok = result.tokens, result.finite
        return self.runner.logits(sum(s.samples for s in spans)).clone()
