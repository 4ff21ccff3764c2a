"""Plays the scheduler for a real engine with the native step: spans in, logits out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from contract.harness import Span
from minisgl.core.layout import (
    COPY,
    FOLD,
    FOLD_TOKENS,
    FULL,
    NO_MASKS,
    NO_ROW_STATES,
    PAGE_WRITE,
    SEQUENCE,
    SLOT_ID,
    STATE,
    STATE_LEN,
    Flag,
)
from minisgl.core.plan import BatchPlan
from minisgl.distributed.group import Group
from minisgl.distributed.info import ALONE
from minisgl.engine.engine import Engine
from minisgl.native.runner import NativeRunner
from minisgl.settings.options import EngineConfig

ROWS, PAGES, SHARED = 16, 4096, 64


@dataclass
class NativeEngine:
    """Pages are poisoned at the start and mapped in random order when first needed.

    If the model recurs, the state of row 0 is captured at SHARED tokens, single tokens decode, and folds come every
    FOLD_TOKENS, or before a chunk.
    """

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
        self.recurs = len(self.free) > STATE
        self.state_len, self.captured = [0] * ROWS, -1

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
        **options: Any,
    ) -> NativeEngine:
        recurs = "linear_num_value_heads" in (folder / "config.json").read_text()
        config = EngineConfig(
            model=str(folder),
            device="cpu",
            dtype=dtype,
            page_size=page_size,
            num_pages=PAGES // page_size * (16 if recurs else 1),  # a slot of a state is as large as many pages
            max_running_requests=ROWS,
            threads=threads,
            dummy_weight=dummy,
            quantization=quantization,
            kv_cache_dtype=cache,
            speculate="off",
            **options,
        )
        return cls(Engine.from_config(config, 8192, Group(ALONE)))

    def share_prefix(self, source: int, target: int, tokens: int) -> None:
        """Let row `target` begin with the pages that hold the first `tokens` (whole pages) of row `source`."""
        assert tokens % self.size == 0 and not self.mapped[target]
        if self.recurs:
            assert (source, tokens) == (0, SHARED)
            self.maps[STATE][target], self.state_len[target] = [self.free[STATE].pop()], tokens
            self.engine.parts.state.page_tables[STATE, target, SLOT_ID] = self.maps[STATE][target][0]
            copy = np.array([self.captured]), np.array(self.maps[STATE][target])
            self.engine.parts.store.copy(*copy)
        for mapped, table in zip(self.maps[:STATE], self.engine.parts.state.page_tables[:STATE], strict=True):
            mapped[target] = mapped[source][: tokens // self.size]
            table[target, : len(mapped[target])] = torch.tensor(mapped[target], dtype=torch.int32)

    def step(
        self, spans: list[Span], flags: int = 0, rows: np.ndarray | None = None, masks: np.ndarray = NO_MASKS
    ) -> torch.Tensor:
        """One step -> logits [sampling spans, V] float32; its tokens and flags are `self.tokens`, `self.ok`."""
        pages = []
        for span in spans:
            while len(self.mapped[span.row]) * self.size < span.stop:
                for group, (mapped, free) in enumerate(zip(self.maps[:STATE], self.free, strict=False)):
                    if not free:
                        continue
                    pages.append((group, span.row, len(mapped[span.row]), free[-1]))
                    mapped[span.row].append(free.pop())
        sequences = [(s.row, s.start, s.stop, (Flag.SAMPLES | flags) if s.samples else 0) for s in spans]
        captures, folds = [], []
        for i, span in enumerate(spans if self.recurs else []):
            decodes = span.start > 0 and len(span.ids) == 1
            self._move_state(span, decodes, pages, captures, folds)
            if decodes:
                sequences[i] = (*sequences[i][:3], sequences[i][3] | Flag.FROM_DEVICE)
                self.engine.parts.state.last_token[span.row] = span.ids[0]
        from_host = [s.ids for s, sequence in zip(spans, sequences, strict=True) if not sequence[3] & Flag.FROM_DEVICE]
        self.plan = BatchPlan(
            0,
            np.array(sequences, SEQUENCE),
            np.concatenate([np.array(ids, np.int32) for ids in [[], *from_host]]).astype(np.int32),
            np.array(pages, PAGE_WRITE),
            NO_ROW_STATES if rows is None else rows,
            masks=masks,
            captures=np.array(captures, COPY),
            folds=np.array(folds, FOLD),
        )
        result = self.engine.launch(self.plan).wait()
        self.tokens, self.ok = result.tokens, result.finite
        return self.runner.logits(sum(s.samples for s in spans)).clone()

    def _move_state(
        self,
        span: Span,
        decodes: bool,
        pages: list[tuple[int, ...]],
        captures: list[tuple[int, ...]],
        folds: list[tuple[int, ...]],
    ) -> None:
        """Plan what the recurrent state of a row needs before and in a step."""
        row, mapped = span.row, self.maps[STATE][span.row]
        if not mapped:
            mapped.append(self.free[STATE].pop())
            pages.append((STATE, row, SLOT_ID, mapped[0]))
        if span.start > 0 and span.start - self.state_len[row] >= (FOLD_TOKENS if decodes else 1):
            folds.append((mapped[0], self.state_len[row], span.start))
            self.state_len[row] = span.start
        if not decodes:
            self.state_len[row] = span.stop
        pages.append((STATE, row, STATE_LEN, self.state_len[row]))
        if row == 0 and span.start < SHARED <= span.stop:
            self.captured = self.free[STATE].pop()
            captures.append((mapped[0], self.captured, row, SHARED))
