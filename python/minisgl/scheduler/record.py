"""Writes down what passes a scheduler's ports, for `minisgl replay` (`tools/replay.py`).

The ports are the channels (messages in, replies out), the engine (plans in, results out), the grammars and the clock.
Plans follow from messages, results, grammars and the time alone, so a plan is kept as a checksum. A file is a `Header`
and an `Entry` for each step, as msgpack frames. The scheduler's loop only gathers references; a thread encodes them.

Token ids are kept only with `--record-texts`. Otherwise each is replaced by a keyed hash of all tokens up to it, so
prompts share a prefix in the record where they did in truth, and nothing else can be read from it. EOS and stop tokens
stay as they are, since requests end there. Grammars and stop strings are left out, salts are hashed.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from minisgl.core.errors import ConfigError, RequestError
from minisgl.core.layout import Flag, as_words
from minisgl.core.message import BackendMsg, DetokenizeMsg, ExitMsg, Failure, UserMsg, ids_from_bytes, ids_to_bytes
from minisgl.core.params import Limits
from minisgl.core.plan import StepCosts
from minisgl.kvcache.arena import Blocks
from minisgl.kvcache.snapshots import Bounded
from minisgl.kvcache.tiers import TierSpec
from minisgl.scheduler.grammars import Grammars
from minisgl.scheduler.scheduler import Scheduler
from minisgl.settings.options import EngineConfig, SchedulerConfig

if TYPE_CHECKING:
    from minisgl.core.plan import BatchPlan, Ints, StepResult
    from minisgl.distributed.control import PlanBus
    from minisgl.scheduler.io import SchedulerIO
    from minisgl.scheduler.plan import StepEngine
    from minisgl.scheduler.req import Req
    from minisgl.scheduler.rows import Index, Rows

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
    adapter_slots: int = 0


class Result(msgspec.Struct, array_like=True):
    """What one launched step returned. `finite` is empty where all logits were."""

    tokens: bytes  # int32 [S]
    finite: bytes = b""  # int32 [S]
    confirmed: bytes = b""  # int32 [S], as is `ready`; both are empty where no sequence has DRAFTS
    ready: bytes = b""


class Entry(msgspec.Struct, array_like=True, omit_defaults=True):
    """One step: its time, its inputs in order, and the checksum of its plan (0: none).

    Steps that had no input, no plan and no reply have no entry.
    """

    step: int = 0
    now: float = 0.0
    messages: list[BackendMsg] = []
    compiled: list[tuple[int, Failure | None]] = []  # uids whose grammar is ready, or why it never is
    results: list[Result] = []
    ended: list[list[tuple[int, Failure | None]]] = []  # for each result: the index and how its grammar ended
    drafts: list[tuple[int, bool]] = []  # what `Grammars.constrain` returned: how many, and whether they are forced
    plan: int = 0
    has_reply: bool = False
    toggled: list[int] = []  # what `Grammars.toggled` returned


def checksum(plan: BatchPlan) -> int:
    """Identify the sequences, positions, flags and pages of `plan`."""
    pages = as_words(plan.page_writes)[:, 1:].tobytes()  # without their groups, as in older records
    copies = plan.restores.tobytes() + plan.captures.tobytes() + plan.folds.tobytes()
    return zlib.crc32(pages + copies, zlib.crc32(plan.sequences.tobytes())) or 1


class Recorder:
    """Gathers the entry of each step, and writes the file. A step begins when the scheduler receives messages."""

    def __init__(self, path: str) -> None:
        try:
            self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0)
        except OSError as e:
            raise ConfigError(f"--record {path} cannot be written: {e.strerror}") from e
        self._path = path
        self._thread = ThreadPoolExecutor(1, "record")
        self.entry = Entry()  # of the current step
        self._has_ended = False
        self.owners: list[Ints] = []  # for each of the entry's results: the uids whose tokens they are

    def begin(self, scheduler: Scheduler, config: SchedulerConfig) -> None:
        """Write the header."""
        engine, asked = scheduler.engine, config.engine
        engine_config = EngineConfig(speculate=asked.speculate, num_draft_tokens=asked.num_draft_tokens)
        header = Header(
            config=replace(config, engine=engine_config, record=None, overlap=bool(scheduler.depth)),
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
            adapter_slots=engine.adapter_slots,
        )
        self.uid_of_row = scheduler.rows.uid
        self._hasher = None if config.record_texts else TokenHasher(engine.limits.vocab_size, engine.eos_token_ids)
        self._thread.submit(self._write, header)

    def next_step(self) -> Entry:
        """Write the entry of the last step, and return that of the next."""
        if not self._has_ended and self.entry != Entry(step=self.entry.step, now=self.entry.now):
            self._thread.submit(self._write, self.entry, self.owners)
        self.entry, self.owners = Entry(step=self.entry.step + 1), []
        return self.entry

    def end(self) -> None:
        """Write what is left. What the scheduler does from now on is not recorded."""
        self.next_step()
        self._has_ended = True
        self._thread.shutdown()
        self._file.close()

    def _write(self, item: Header | Entry, owners: Sequence[Ints] = ()) -> None:
        try:
            if isinstance(item, Entry) and self._hasher is not None:
                self._hasher.hide(item, owners)
            data = msgspec.msgpack.encode(item)
            self._file.write(len(data).to_bytes(4, "little") + data)
        except Exception as e:  # a full disk, or a bug of ours, costs the record and not the server
            if not self._file.closed:
                logger.error("the record %s ends here: %s", self._path, e)
                self._file.close()


class _Port:
    """Forwards what is not recorded."""

    def __init__(self, inner: Any, recorder: Recorder) -> None:
        self._inner = inner
        self._recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _RecordedIO(_Port):
    def receive(self, timeout: float) -> list[BackendMsg]:
        messages: list[BackendMsg] = self._inner.receive(timeout)
        if any(isinstance(msg, ExitMsg) for msg in messages):
            self._recorder.end()
        self._recorder.next_step().messages = messages
        return messages

    def send(self, msg: DetokenizeMsg) -> None:
        self._recorder.entry.has_reply = True
        self._inner.send(msg)


class _RecordedEngine(_Port):
    def launch(self, plan: BatchPlan) -> _RecordedOutput:
        if plan.step > self._recorder.entry.step:  # no step of the loop: pages are saved at the exit
            self._recorder.end()
        self._recorder.entry.plan = checksum(plan)
        owners = self._recorder.uid_of_row[plan.sequences["row"][(plan.sequences["flags"] & Flag.SAMPLES) != 0]]
        return _RecordedOutput(self._inner.launch(plan), self._recorder, np.repeat(owners, plan.widths))

    def shutdown(self) -> None:
        self._recorder.end()
        self._inner.shutdown()


class _RecordedOutput(_Port):
    def __init__(self, inner: Any, recorder: Recorder, owners: Ints) -> None:
        super().__init__(inner, recorder)
        self._owners = owners

    def wait(self) -> StepResult:
        result: StepResult = self._inner.wait()
        finite = b"" if result.finite.all() else result.finite.tobytes()
        drafts = [b"" if line is None else line.tobytes() for line in (result.confirmed, result.ready)]
        self._recorder.entry.results.append(Result(result.tokens.tobytes(), finite, *drafts))
        self._recorder.owners.append(self._owners)
        return result


class _RecordedGrammars(_Port):
    def __len__(self) -> int:
        return len(self._inner)

    def pop_compiled(self) -> Iterator[tuple[Req, RequestError | None]]:
        for req, error in self._inner.pop_compiled():
            self._recorder.entry.compiled.append((req.uid, None if error is None else Failure.of(error)))
            yield req, error

    def advance(self, rows: Rows, sampled: Index, tokens: Ints) -> Index:
        ended: Index = self._inner.advance(rows, sampled, tokens)
        errors = [req.matcher.error if req.matcher else None for req in rows.holders(sampled[ended])]
        failures = [None if error is None else Failure.of(error) for error in errors]
        self._recorder.entry.ended.append(list(zip(ended.tolist(), failures, strict=True)))
        return ended

    def toggled(self, rows: Rows, running: Index, most: int) -> list[int]:
        found: list[int] = self._inner.toggled(rows, running, most)
        self._recorder.entry.toggled = found
        return found

    def constrain(self, req: Req, guess: Ints) -> tuple[Ints, bool]:
        drafts, is_forced = self._inner.constrain(req, guess)
        self._recorder.entry.drafts.append((len(drafts), is_forced))
        return drafts, is_forced


class TokenHasher:
    """Replaces token ids by keyed hashes of all tokens up to them, which are no valid ids.

    The hash of a prefix is the sum over its tokens of a mix of key, token and position, so that a whole prompt, or the
    tokens of all running requests, take a handful of array operations.
    """

    def __init__(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._key = np.frombuffer(secrets.token_bytes(16), "<u8") | 1
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._stops: dict[int, tuple[int, ...]] = {}  # by uid, of those requests that have some
        self._texts: dict[int, tuple[np.uint64, int]] = {}  # by uid: the hash of its tokens so far, and their number

    def hide(self, entry: Entry, owners: Sequence[Ints]) -> None:
        """Replace the tokens and texts in `entry`; `owners`: the uids whose tokens each result holds."""
        entry.messages = [self._hide_prompt(msg) if isinstance(msg, UserMsg) else msg for msg in entry.messages]
        for result, uids in zip(entry.results, owners, strict=True):
            ids = ids_from_bytes(result.tokens)
            hidden = np.full_like(ids, self._vocab_size)  # rejected tokens stay that
            confirmed = np.flatnonzero(ids_from_bytes(result.confirmed)) if result.confirmed else np.arange(len(ids))
            hidden[confirmed] = self._hide(uids[confirmed], ids[confirmed])
            result.tokens = ids_to_bytes(hidden)

    def _hide_prompt(self, msg: UserMsg) -> UserMsg:
        ids, params = ids_from_bytes(msg.input_ids), msg.sampling_params
        self._texts[msg.uid] = np.uint64(0), 0
        hidden = ids_to_bytes(self._hide(np.full(len(ids), msg.uid), ids))
        if params.stop_token_ids:  # which end the request, but may be anywhere in a prompt
            self._stops[msg.uid] = params.stop_token_ids
        salt = str(zlib.crc32(params.cache_salt.encode(), int(self._key[0]) >> 32)) if params.cache_salt else ""
        grammar = (
            None if params.grammar is None else msgspec.structs.replace(params.grammar, text="", after="", calls="")
        )
        params = msgspec.structs.replace(params, stop=(), cache_salt=salt, grammar=grammar)
        return msgspec.structs.replace(msg, input_ids=hidden, sampling_params=params)

    def _hide(self, uids: Ints, ids: Ints) -> Ints:
        """Return the hashes of `ids`, the next tokens of `uids`; those of one request stand together, in order."""
        first = np.flatnonzero(np.diff(uids, prepend=-1))
        counts, owners = np.diff(first, append=len(uids)), uids[first].tolist()
        texts = [self._texts[uid] for uid in owners]
        positions = np.arange(len(ids)) + np.repeat(np.array([length for _, length in texts], int) - first, counts)
        mixed = _scatter((ids.astype(np.uint64) * self._key[0]) ^ _scatter(positions.astype(np.uint64) * self._key[1]))
        sums = np.cumsum(mixed, dtype=np.uint64)  # over all requests
        before = np.array([text for text, _ in texts], np.uint64) - sums[first] + mixed[first]
        sums += np.repeat(before, counts)
        ends = zip(owners, sums[first + counts - 1], positions[first + counts - 1].tolist(), strict=True)
        self._texts.update((uid, (text, last + 1)) for uid, text, last in ends)
        hidden = (_scatter(sums ^ self._key[1]) % np.uint64(2**31 - self._vocab_size)).astype(
            np.int64
        ) + self._vocab_size
        is_kept = np.isin(ids, self._eos)
        for uid in self._stops.keys() & owners:
            is_kept |= (uids == uid) & np.isin(ids, self._stops[uid])
        return np.where(is_kept, ids, hidden).astype(np.int32)


def _scatter(x: Any) -> Any:
    """The finalizer of splitmix64 (Steele, Lea & Flood, OOPSLA 2014) for uint64 arrays."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def recorded(
    config: SchedulerConfig,
    engine: StepEngine,
    io: SchedulerIO,
    grammars: Grammars,
    bus: PlanBus | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Scheduler:
    """Return a scheduler with these arguments that writes the file `config.record`."""
    assert config.record is not None, "the settings name no file for the record"
    recorder = Recorder(config.record)

    def recorded_clock() -> float:
        now = recorder.entry.now = clock()
        return now

    ports: dict[str, Any] = {
        "engine": _RecordedEngine(engine, recorder),
        "io": _RecordedIO(io, recorder),
        "grammars": _RecordedGrammars(grammars, recorder),
        "clock": recorded_clock,
    }
    scheduler = Scheduler(config, bus=bus, **ports)
    recorder.begin(scheduler, config)
    return scheduler
