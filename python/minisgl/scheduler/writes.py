"""What plans write to the device's state of rows, and the flags of sequences."""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Final

import numpy as np

from minisgl.core.layout import (
    COPY,
    FOLD,
    NO_COPIES,
    NO_FOLDS,
    NO_INTS,
    NO_PAGE_WRITES,
    NO_ROW_STATES,
    PAGE_WRITE,
    PENALTY_HEAD,
    ROW,
    ROW_FIELDS,
    ROW_STATE,
    Flag,
    fields,
    words,
)

if TYPE_CHECKING:
    from minisgl.core.layout import Records
    from minisgl.core.plan import Ints
    from minisgl.scheduler.req import Req

row_fields: Final = attrgetter(*(field.of for field in ROW_FIELDS))


class RowWrites:
    """Collects page-table entries, fields of rows and penalty records between two plans.

    The host keeps each request's pages in `Req.pages`; the device keeps them in its page table. The two agree once the
    writes that `pop` returns have been applied, in plan order.
    """

    def __init__(self, eos_token_ids: frozenset[int]) -> None:
        self._eos_token_ids = eos_token_ids
        # Keyed by row << 32 | index, so that one plan never writes an entry twice: the device applies a plan's writes
        # in any order.
        self._pages: dict[int, int] = {}
        self._states: dict[int, tuple[float, ...]] = {}
        self._penalties: dict[int, Ints] = {}
        self.bounded: dict[tuple[int, int, int], int] = {}  # (group, row, index) -> id
        self.restores: dict[int, list[tuple[int, ...]]] = {}  # row -> copies
        self.captures: list[tuple[int, ...]] = []
        self.folds: dict[int, tuple[int, int]] = {}  # slot -> (start, stop)

    def fill(self, req: Req) -> None:
        """Write the fields of `req`, which has just got its row."""
        row = req.row
        self._states[row] = row_fields(req)
        self._penalties.pop(row, None)
        if req.sampling_params.has_penalties:
            self._penalties[row] = penalty_record(req, row, self._eos_token_ids)

    def pages(self, row: int, start: int, pages: list[int]) -> None:
        """Write `pages` to the row's entries from index `start` on."""
        for entry, page in enumerate(pages, row << 32 | start):
            self._pages[entry] = page

    def pop_copies(self) -> tuple[Records, Records, Records]:
        """Return the restores, captures and folds since the last call, as in `BatchPlan`."""
        if not (self.restores or self.captures or self.folds):
            return NO_COPIES, NO_COPIES, NO_FOLDS
        restores = np.array([copy for copies in self.restores.values() for copy in copies], COPY)
        folds = np.array([(slot, *ends) for slot, ends in self.folds.items()], FOLD)
        copies = restores, np.array(self.captures, COPY), folds
        self.restores, self.captures, self.folds = {}, [], {}
        return copies

    def pop(self) -> tuple[Records, Records, Ints]:
        """Return the page writes, row states and penalty records since the last call, as in `BatchPlan`."""
        if not (self._pages or self._states or self.bounded):
            return NO_PAGE_WRITES, NO_ROW_STATES, NO_INTS
        entries = np.fromiter(self._pages, np.int64, len(self._pages))
        pages = np.zeros(len(entries), PAGE_WRITE)  # of FULL
        pages["row"] = entries >> 32
        pages["index"] = entries & 0xFFFFFFFF
        pages["page"] = np.fromiter(self._pages.values(), np.int32, len(entries))
        if self.bounded:
            others = np.array([(*entry, i) for entry, i in self.bounded.items()], PAGE_WRITE)
            pages, self.bounded = np.concatenate([pages, others]), {}
        states = np.zeros(len(self._states), ROW_STATE)  # padding of a record, too
        states["row"] = list(self._states)
        for name, column in zip(fields(ROW), zip(*self._states.values(), strict=True), strict=False):
            states["fields"][name] = column
        penalties = np.concatenate([NO_INTS, *self._penalties.values()])
        self._pages = {}
        self._states = {}
        self._penalties = {}
        return pages, states, penalties


def penalty_record(req: Req, row: int, eos_token_ids: frozenset[int]) -> Ints:
    """Return what the engine needs to apply the penalties of a row: a PENALTY_HEAD and its lists, as int32."""
    p = req.sampling_params
    ends = [] if p.min_tokens == 0 else [*p.stop_token_ids, *(() if p.ignore_eos else sorted(eos_token_ids))]
    biases = dict.fromkeys(ends, 0.0)
    for token, bias in p.logit_bias:
        biases[token] = biases.get(token, 0.0) + bias
    bias_ids = np.array([~token if token in ends else token for token in biases], np.int32)
    bias_bits = np.array(list(biases.values()), np.float32).view(np.int32)
    prompt, generated = req.ids[: req.prompt_len], req.ids[req.prompt_len :]
    head = np.zeros(1, PENALTY_HEAD)
    head["words"] = words(PENALTY_HEAD) + 2 * len(biases) + len(req.ids)
    head["row"] = row
    head["presence"] = p.presence_penalty
    head["frequency"] = p.frequency_penalty
    head["repetition"] = p.repetition_penalty
    head["first_end"] = req.prompt_len + p.min_tokens
    head["num_biases"] = len(biases)
    head["num_prompt"] = len(prompt)
    head["num_generated"] = len(generated)
    return np.concatenate([head.view(np.int32), bias_ids, bias_bits, prompt, generated])


def decode_flags(req: Req) -> int:
    """Return the flags of a decoding sequence of `req` in a plan."""
    return Flag.SAMPLES | Flag.FROM_DEVICE | sampling_flags(req)


def sampling_flags(req: Req) -> int:
    """Return the flags that say how `req` samples from its logits."""
    p = req.sampling_params
    flags = Flag.PENALIZED * p.has_penalties | Flag.FILTERED * p.is_filtered
    flags |= Flag.ADAPTED * (req.adapter_slot > 0)
    return flags | Flag.LOGPROBS * (p.logprobs is not None) | Flag.MASKED * req.is_masked
