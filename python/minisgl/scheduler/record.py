"""Writes down what a scheduler was told and what it planned, for `minisgl replay` (`replay.py`).

A file is a `Header` and an `Entry` for each step, as msgpack frames. Plans follow from messages, results and the time
alone, so a plan is kept as a checksum. The scheduler's loop only puts references in a queue; a thread encodes them.

Token ids are kept only with `--record-texts`. Otherwise each is replaced by a keyed hash of all tokens up to it, so
prompts share a prefix in the record where they did in truth, and nothing else can be read from it. EOS and stop tokens
stay as they are, since requests end there. Grammars and stop strings are left out, salts are hashed.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from minisgl.core import StepCosts
from minisgl.errors import ConfigError, RequestError
from minisgl.kvcache.arena import Blocks
from minisgl.kvcache.snapshots import Bounded
from minisgl.kvcache.tiers import TierSpec
from minisgl.layout import as_words
from minisgl.message import BackendMsg, Failure, UserMsg, ids_from_bytes, ids_to_bytes
from minisgl.params import Limits
from minisgl.scheduler.scheduler import Scheduler
from minisgl.settings.options import EngineConfig, SchedulerConfig

if TYPE_CHECKING:
    from minisgl.core import BatchPlan, Ints, StepResult
    from minisgl.scheduler.plan import Launched, Step
    from minisgl.scheduler.req import Req
    from minisgl.scheduler.rows import Index

logger = logging.getLogger(__name__)


class Header(msgspec.Struct, kw_only=True):
    """What the scheduler knew of its settings and its engine when it started."""

    config: SchedulerConfig
    has_texts: bool
    blocks: Blocks
    page_size: int
    max_running_requests: int
    limits: Limits
    eos_token_ids: frozenset[int]
    is_async: bool
    costs: StepCosts | None
    tiers: list[TierSpec]
    bounded: Sequence[Bounded] = ()


class Result(msgspec.Struct, array_like=True):
    """What one launched step returned. `finite` is empty where all logits were."""

    tokens: bytes  # int32 [S]
    finite: bytes = b""  # int32 [S]
    confirmed: bytes = b""  # int32 [S], as is `ready`; both are empty where no slot has DRAFTS
    ready: bytes = b""


class Entry(msgspec.Struct, array_like=True, omit_defaults=True):
    """One step: its time, its inputs in order, and the checksum of its plan (0: none).

    Steps that had no input and no plan have no entry.
    """

    step: int = 0
    now: float = 0.0
    messages: list[BackendMsg] = []
    compiled: list[tuple[int, Failure | None]] = []  # uids whose grammar is ready, or why it never is
    results: list[Result] = []
    ended: list[list[tuple[int, Failure | None]]] = []  # for each result: the index and how its grammar ended
    drafts: list[tuple[int, bool]] = []  # what `_constrain` returned: the number of drafts, and whether they are forced
    plan: int = 0


def checksum(plan: BatchPlan) -> int:
    """Identify the sequences, positions, flags and pages of `plan`."""
    pages = as_words(plan.page_writes)[:, 1:].tobytes()  # without their groups, as in older records
    copies = plan.restores.tobytes() + plan.captures.tobytes()
    return zlib.crc32(pages + copies, zlib.crc32(plan.slots.tobytes())) or 1


class RecordingScheduler(Scheduler):
    """A scheduler that writes the file `config.record`."""

    def __init__(self, config: SchedulerConfig, *args: Any) -> None:
        super().__init__(config, *args)
        self._entry = Entry()
        self._uids: list[Ints] = []  # for each of the entry's results: whose tokens they are
        engine = self.engine
        asked = config.engine
        engine_config = EngineConfig(speculate=asked.speculate, num_draft_tokens=asked.num_draft_tokens)
        header = Header(
            config=replace(config, engine=engine_config, record=None, overlap=bool(self.depth)),
            has_texts=config.record_texts,
            blocks=engine.blocks,
            page_size=engine.page_size,
            max_running_requests=engine.max_running_requests,
            limits=engine.limits,
            eos_token_ids=engine.eos_token_ids,
            is_async=engine.is_async,
            costs=engine.step_costs(),
            tiers=[replace(tier, folder="") for tier in engine.tiers],
            bounded=engine.bounded,
        )
        assert config.record is not None, "no file to write"
        writer = Writer(config.record, header)
        self._put = writer.entries.put
        self._close = weakref.finalize(self, writer.close)

    def step(self, timeout: float = 0.0) -> None:
        before = len(self.live)
        super().step(timeout)
        entry = self._entry
        if entry.messages or entry.compiled or entry.results or entry.plan or len(self.live) != before:
            entry.step, entry.now = self.step_number, self.now
            self._put((entry, self._uids))
            self._entry, self._uids = Entry(), []

    def run_forever(self) -> None:
        try:
            super().run_forever()
        finally:
            self._close()

    def handle(self, msg: BackendMsg) -> None:
        self._entry.messages.append(msg)
        super().handle(msg)

    def launch(self, step: Step) -> None:
        super().launch(step)
        self._entry.plan = checksum(self.launched[-1].plan)

    def _queue_compiled(self, req: Req, error: RequestError | None) -> None:
        self._entry.compiled.append((req.uid, None if error is None else Failure.of(error)))
        super()._queue_compiled(req, error)

    def _take(self, step: Launched, result: StepResult) -> None:
        finite = b"" if result.finite.all() else result.finite.tobytes()
        drafts = [b"" if line is None else line.tobytes() for line in (result.confirmed, result.ready)]
        self._entry.results.append(Result(result.tokens.tobytes(), finite, *drafts))
        self._uids.append(np.repeat(self.rows.uid[step.sampled], step.plan.widths))
        super()._take(step, result)

    def _follow(self, sampled: Index, tokens: Ints) -> Index:
        ended = super()._follow(sampled, tokens)
        errors = [req.matcher.error if req.matcher else None for req in self.rows.holders(sampled[ended])]
        failures = [None if error is None else Failure.of(error) for error in errors]
        self._entry.ended.append(list(zip(ended.tolist(), failures, strict=True)))
        return ended

    def _constrain(self, req: Req, guess: Ints) -> tuple[Ints, bool]:
        drafts, is_forced = super()._constrain(req, guess)
        self._entry.drafts.append((len(drafts), is_forced))
        return drafts, is_forced


class Writer:
    """Encodes `entries` and writes them, in a thread of its own."""

    def __init__(self, path: str, header: Header) -> None:
        try:
            self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb")
        except OSError as e:
            raise ConfigError(f"--record {path} cannot be written: {e.strerror}") from e
        self._path = path
        self._veil = None if header.has_texts else Veil(header.limits.vocab_size, header.eos_token_ids)
        self.entries: SimpleQueue[tuple[Entry, list[Ints]] | None] = SimpleQueue()
        self._write(header)
        self._thread = threading.Thread(target=self._run, name="record", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what is left."""
        self.entries.put(None)
        self._thread.join()

    def _run(self) -> None:
        item = None
        try:
            with self._file:
                while (item := self.entries.get()) is not None:
                    entry, uids = item
                    if self._veil is not None:
                        self._veil.hide(entry, uids)
                    self._write(entry)
                    if self.entries.empty():
                        self._file.flush()
        except Exception as e:  # a full disk, or a bug of ours, costs the record and not the server
            logger.error("the record %s ends here: %s", self._path, e)
            while item is not None:
                item = self.entries.get()

    def _write(self, item: Header | Entry) -> None:
        data = msgspec.msgpack.encode(item)
        self._file.write(len(data).to_bytes(4, "little") + data)


class Veil:
    """Replaces token ids by keyed hashes of all tokens up to them, which are no valid ids.

    The hash of a prefix is the sum over its tokens of a mix of key, token and position, so that a whole prompt, or one
    token of each running request, takes a handful of array operations.
    """

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._key = np.frombuffer(secrets.token_bytes(16), "<u8") | 1
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._stops: dict[int, tuple[int, ...]] = {}  # by uid, of those requests that have some
        self._index: dict[int, int] = {}  # of a uid in the arrays
        self._sums = np.zeros(1024, np.uint64)
        self._lengths = np.zeros(1024, np.uint64)

    def hide(self, entry: Entry, uids: list[Ints]) -> None:
        """Replace the tokens and texts in `entry`; `uids`: whose tokens each result holds."""
        entry.messages = [self._hide_prompt(msg) if isinstance(msg, UserMsg) else msg for msg in entry.messages]
        for result, owners in zip(entry.results, uids, strict=True):
            ids = ids_from_bytes(result.tokens)
            confirmed = np.flatnonzero(ids_from_bytes(result.confirmed)) if result.confirmed else np.arange(len(ids))
            hidden = np.full_like(ids, self._vocab_size)  # rejected tokens stay that
            # The hash of a token depends on those before, so one of each request at a time.
            is_first = np.diff(owners[confirmed], prepend=-1) != 0
            index = np.arange(len(confirmed))
            offsets = index - np.maximum.accumulate(np.where(is_first, index, 0))
            for offset in range(int(offsets.max(initial=-1)) + 1):
                at = confirmed[offsets == offset]
                hidden[at] = self._hide_sampled(owners[at].tolist(), ids[at])
            result.tokens = ids_to_bytes(hidden)

    def _hide_prompt(self, msg: UserMsg) -> UserMsg:
        ids, params = ids_from_bytes(msg.input_ids), msg.sampling_params
        index = self._index.setdefault(msg.uid, len(self._index))
        if index == len(self._sums):
            self._sums, self._lengths = np.tile(self._sums, 2), np.tile(self._lengths, 2)
        sums = np.cumsum(self._mix(ids, np.arange(len(ids), dtype=np.uint64)))
        self._sums[index], self._lengths[index] = sums[-1], len(ids)
        if params.stop_token_ids:
            self._stops[msg.uid] = params.stop_token_ids
        salt = str(zlib.crc32(params.cache_salt.encode(), int(self._key[0]) >> 32)) if params.cache_salt else ""
        grammar = None if params.grammar is None else msgspec.structs.replace(params.grammar, text="", after="")
        params = msgspec.structs.replace(params, stop=(), cache_salt=salt, grammar=grammar)
        return msgspec.structs.replace(msg, input_ids=ids_to_bytes(self._hidden(ids, sums)), sampling_params=params)

    def _hide_sampled(self, uids: list[int], ids: Ints) -> Ints:
        index = np.fromiter(map(self._index.__getitem__, uids), np.intp, len(uids))
        self._sums[index] += self._mix(ids, self._lengths[index])
        self._lengths[index] += np.uint64(1)
        hidden = self._hidden(ids, self._sums[index])
        for i in [i for i, uid in enumerate(uids) if uid in self._stops]:
            if ids[i] in self._stops[uids[i]]:
                hidden[i] = ids[i]
        return hidden

    def _mix(self, ids: Ints, positions: Any) -> Any:
        return _scatter((ids.astype(np.uint64) * self._key[0]) ^ _scatter(positions * self._key[1]))

    def _hidden(self, ids: Ints, sums: Any) -> Ints:
        above = np.uint64(2**31 - self._vocab_size)
        hidden = (_scatter(sums ^ self._key[1]) % above).astype(np.int64) + self._vocab_size
        return np.where(np.isin(ids, self._eos), ids, hidden).astype(np.int32)


def _scatter(x: Any) -> Any:
    """The finalizer of splitmix64 (Steele, Lea & Flood, OOPSLA 2014) for uint64 arrays."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
