"""One seeded history: random clients and faults against the simulated server, and the rules that it must keep.

Every request ends exactly once, with the text of its solo run or a prefix of it; an error needs a reason; work for a
client that has left stops; afterwards nothing is left of any request, and the server has ended as it should.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import logging
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starlette.types import Message

from minisgl.api.frontend import Submission, Timeline
from minisgl.api.http import DROP, HEADERS, LEVEL, MODEL, RAW_SEND
from minisgl.api.requests import ChosenModel
from minisgl.api.responses import failure_event, response_to
from minisgl.core.errors import InvariantError, RequestError
from minisgl.core.message import (
    AbortMsg,
    DetokenizeMsg,
    EncodeMsg,
    TokenizeMsg,
    UserMsg,
    UserReply,
    ids_from_bytes,
)
from minisgl.core.params import Grammar, SamplingParams
from minisgl.core.plan import FinishReason
from minisgl.kvcache.tiers import TierSpec
from minisgl.scheduler.check import check_idle
from minisgl.settings.options import EngineConfig
from simulation.server import (
    BYTES,
    CLASSES,
    EOS,
    LETTERS,
    STEP_S,
    TURN_S,
    SimulatedServer,
    server_args,
    simulated_time,
    vary,
)
from simulation.world import SimulatedLoop, World
from support.fake_engine import FakeEngine, expected_output
from support.fake_grammar import FakeMatcher
from support.traces import random_bounded

TIERS = TierSpec("host", 20, 1e-6), TierSpec("disk", 40, 1e-6, lasts=True)
BUSY_S = 2.0  # in which the clients come
SETTLE_S = 2.0  # after which nothing may be left
MAX_LEN = 40
WRITE_TIMEOUT_S = 3.0
HANG_S = 9.0  # --heartbeat-timeout
ENDINGS = ("idle", "idle", "idle", "drain", "short drain", "stop now", "death", "stop", "stop", "hang")
SIGNALS = (signal.SIGUSR2, signal.SIGTTIN, signal.SIGTTOU)  # to renew, add and end replicas
EXPECTED_ERRORS = (  # of the log
    "; the server stops",
    " hangs for ",
    "; other replicas take over its requests",
    " is not ended: ",
)


class ViolationError(AssertionError):
    """A rule is broken."""


@dataclass
class Client:
    """One client: what it asks for, how it behaves, and what it has got."""

    number: int
    at: float
    kind: str  # body | stream | encode | view | flush
    prompt: list[int]
    params: SamplingParams
    n: int = 1
    leaves_after: float | None = None
    is_cancelled: bool = False  # leaves by the end of its task, not of its connection
    write_seconds: float = 0.0  # for each write
    uids: tuple[int, ...] = ()
    texts: dict[int, str] = field(default_factory=dict)
    ids: dict[int, list[int]] = field(default_factory=dict)
    ends: dict[int, UserReply] = field(default_factory=dict)
    error: RequestError | None = None  # instead of an answer
    stream_error: str = ""
    is_complete: bool = False  # the last byte is sent
    is_dropped: bool = False  # it did not read
    is_cut: bool = False  # by the server's end
    left_at: float | None = None
    done_at: float | None = None

    @property
    def text(self) -> str:
        return "".join(LETTERS[i - 1] for i in self.prompt)

    @property
    def disconnects_at(self) -> float:
        return 1e9 if self.leaves_after is None or self.is_cancelled else self.at + self.leaves_after

    # -- the renderer of its response

    def add(self, index: int, reply: UserReply) -> None:
        if index in self.ends:
            raise ViolationError(f"client {self.number} gets a reply after the end of choice {index}: {reply}")
        self.texts[index] = self.texts.get(index, "") + reply.text
        self.ids.setdefault(index, []).extend(ids_from_bytes(reply.output_ids).tolist())
        if reply.completion_tokens != len(self.ids[index]):
            raise ViolationError(f"client {self.number} got {self.ids[index]}, not {reply.completion_tokens} tokens")
        if reply.finish_reason is not None:
            self.ends[index] = reply

    def body(self, replies: list[UserReply], timeline: Timeline) -> bytes:
        for index, reply in enumerate(replies):
            self.add(index, reply)
        return b"{}"

    def first_events(self, n: int) -> Iterator[bytes]:
        yield b"data: begin\n\n"

    def events(self, index: int, reply: UserReply) -> Iterator[bytes]:
        self.add(index, reply)
        yield b"data: more\n\n"

    def last_events(self, replies: list[UserReply], timeline: Timeline) -> Iterator[bytes]:
        yield b"data: end\n\n"

    def failure(self, error: RequestError) -> bytes:
        return failure_event(error)


class History:
    """A server, its clients and one fault, all drawn from a seed."""

    def __init__(self, seed: int, loop: SimulatedLoop) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        self.loop = loop
        self.world = world = World(loop, rng)
        self.ending = rng.choice(ENDINGS)
        page_size = rng.choice((1, 2, 4, 8))
        pages = -(-MAX_LEN // page_size)
        self.vocab = rng.choice((7, len(BYTES)))  # the smaller, the sooner an EOS
        tiers = [tier for tier in TIERS if rng.random() < 0.3]
        kinds = ("", "window", "state", "window state")[seed // 5 % 4]  # of bounded state
        is_damaged = bool(tiers) and rng.random() < 0.5
        new_engine = partial(
            FakeEngine,
            rows=rng.choice((1, 2, 4, 7)),
            num_pages=pages + rng.randrange(4) if rng.random() < 0.7 else 4 * pages,
            page_size=page_size,
            max_model_len=MAX_LEN,
            vocab=self.vocab,
            late=rng.choice((1, 3)),
            tiers=tiers,
            **random_bounded(kinds, seed, page_size),
        )

        def make_engine() -> FakeEngine:
            engine = new_engine()
            if is_damaged:
                engine.damaged = {(0, slot) for slot in range(tiers[0].num_slots)}  # each at its first load
            return engine

        dp = rng.choice((1, 1, 2, 3))
        self.has_changes = dp > 1 and rng.random() < 0.5  # of the replicas, by a signal
        self.args = vary(
            server_args(dp),
            num_tokenizer=rng.choice((0, 1, 1, 2)),
            max_queued_requests=rng.choice((2, 100)),
            max_queue_time=rng.choice((0.2, 300.0, 300.0, 300.0)),
            max_prefill_length=rng.choice((3, 8, 200)),
            cache_type=rng.choice(("radix", "radix", "naive")),
            schedule_policy=rng.choice((("shortest", "fcfs")[seed % 3 == 2], "lpm")),
            drain_timeout=0.3 if self.ending == "short drain" else 0.02 if self.has_changes else 60.0,
            write_timeout=WRITE_TIMEOUT_S,
            heartbeat_timeout=HANG_S,
            engine=EngineConfig(
                speculate=("off", "auto", "ngram", "tree")[seed % 4], num_draft_tokens=1 + seed // 4 % 8
            ),
        )
        world.watchers.append(self._see)
        self.server = SimulatedServer(world, self.args, make_engine, depth=rng.choice((0, 1, 2)))
        self.server.checks_steps = rng.random() < 0.1
        if not self.server.checks_steps:
            for scheduler in self.server.schedulers.values():
                scheduler._check = None
        self.sent: dict[int, float] = {}  # uid -> when the request went to a tokenizer
        self.accepted: set[int] = set()  # by the scheduler
        self.ends: set[tuple[int, int]] = set()  # uid and incarnation
        self.scheduler_ended: dict[int, float] = {}
        self.ended: dict[int, float] = {}  # uid -> when its terminal reply was sent to the API
        self.aborted: dict[int, float] = {}
        self.problems: list[str] = []
        self.digest = hashlib.sha256()  # of all messages
        prefixes = [[self._token() for _ in range(rng.choice((4, 9, 20)))] for _ in range(2)]
        self.busy_seconds = rng.choice((0.1, BUSY_S))
        self.clients = [self._draw_client(i, prefixes) for i in range(rng.choice((1, 2, 4, 6, 9)))]
        self.began = loop.now
        self.fault_at = self.ended_at = 0.0

    def _token(self) -> int:
        return self.rng.randrange(1, min(self.vocab, len(LETTERS) + 1))

    def _draw_client(self, number: int, prefixes: list[list[int]]) -> Client:
        rng = self.rng
        head = rng.choice(prefixes)[: rng.randrange(1, 21)] if rng.random() < 0.7 else []
        tail = [self._token() for _ in range(rng.choice((0, 1, 2, 8)))]
        may_not_fit = rng.random() < 0.05
        max_tokens = rng.choice((1, 8, 16, 24, None))
        prompt = (head + tail or [1])[: None if may_not_fit else MAX_LEN - (max_tokens or 1)]
        if may_not_fit:
            prompt = prompt * 4
        grammar = None
        if rng.random() < 0.1:
            text = "bad" if rng.random() < 0.2 else f"{rng.randrange(9)} {rng.choice((1, 3, 12, 99))}"
            grammar = Grammar("regex", text)
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=rng.random() < 0.6,
            stop_token_ids=(rng.randrange(self.vocab),) if rng.random() < 0.05 else (),
            stop=tuple(LETTERS[self._token() - 1] for _ in range(rng.choice((0, 0, 0, 1, 2)))),
            cache_salt="a" if rng.random() < 0.1 else "",
            speculate=number % 8 < 7,
            priority=number % 5 - 2,
            grammar=grammar,
        )
        kind = rng.choice(("stream",) * 6 + ("body",) * 4 + ("encode", "view", "flush"))
        client = Client(number, self.loop.now + rng.random() * self.busy_seconds, kind, prompt, params)
        if kind in ("stream", "body"):
            client.n = rng.choice((1, 1, 1, 1, 2, 3))
        if rng.random() < 0.3:
            client.leaves_after = rng.random() * rng.choice((0.01, 0.3, 2.0))
            client.is_cancelled = rng.random() < 0.3
        if rng.random() < 0.1:
            client.write_seconds = rng.choice((0.01, 0.5, 2 * WRITE_TIMEOUT_S))
        return client

    # -- what passes over the channels

    def _see(self, msg: Any) -> None:
        now = self.loop.now
        self.digest.update(repr((now, msg)).encode())
        if isinstance(msg, TokenizeMsg):
            self._once(msg.uid not in self.sent, f"request {msg.uid} is sent twice")
            self.sent[msg.uid] = now
        elif isinstance(msg, UserMsg):
            self.accepted.add(msg.uid)
        elif isinstance(msg, AbortMsg):
            self.aborted.setdefault(msg.uid, now)
        elif isinstance(msg, DetokenizeMsg):
            for end in msg.finished:
                self._once((end.uid, msg.incarnation) not in self.ends, f"the scheduler ends request {end.uid} twice")
                self.ends.add((end.uid, msg.incarnation))
                self.scheduler_ended[end.uid] = now
        elif isinstance(msg, UserReply):
            self._once(msg.uid not in self.ended, f"a reply to request {msg.uid} after its end: {msg}")
            self._once(msg.uid in self.sent, f"a reply to request {msg.uid}, which was never sent: {msg}")
            if msg.finish_reason is not None:
                self.ended[msg.uid] = now

    def _once(self, condition: bool, problem: str) -> None:
        if not condition:
            self.problems.append(problem)

    # -- the clients

    async def _live(self, client: Client) -> None:
        await asyncio.sleep(client.at - self.loop.now)
        if self.server.uvicorn.should_exit:
            return  # the server does not listen
        task = self.loop.create_task(self._ask(client))
        self.server.uvicorn.requests.add(task)
        task.add_done_callback(self.server.uvicorn.requests.discard)
        if client.leaves_after is not None and client.is_cancelled:
            self.loop.call_later(client.leaves_after, self._cut, client, task)
        try:
            await task
        except RequestError as e:
            client.error = e
        except asyncio.CancelledError:
            client.is_cut = client.left_at is None
        client.done_at = self.loop.now

    def _cut(self, client: Client, task: asyncio.Task[None]) -> None:
        if not task.done():
            client.left_at = self.loop.now
            task.cancel()

    async def _ask(self, client: Client) -> None:
        CURRENT.set(client)
        frontend = self.server.frontend
        prompt = TokenizeMsg(uid=0, sampling_params=client.params, text=client.text)
        if client.kind == "encode":
            reply = await frontend.convert(EncodeMsg(uid=0, prompt=prompt))
            if ids_from_bytes(reply.input_ids).tolist() != client.prompt:
                raise ViolationError(f"{client.text!r} is encoded as {reply}")
        elif client.kind == "view":
            v = await frontend.engine_view()
            if v.pages_free + v.pages_private + v.pages_locked + v.pages_cached != v.pages_total:
                raise ViolationError(f"pages do not add up in {v}")
        elif client.kind == "flush":
            await frontend.flush_cache()
        else:
            scope = {"type": "http", HEADERS: [], RAW_SEND: self._send(client), DROP: lambda: self._drop(client)}
            scope |= {MODEL: ChosenModel("m"), LEVEL: client.number % len(CLASSES)}
            response = response_to(frontend, [prompt] * client.n, client, client.kind == "stream", client.n)
            await response(scope, self._receive(client), self._send(client))

    def _receive(self, client: Client) -> Any:
        async def receive() -> Message:
            await asyncio.sleep(max(0.0, client.disconnects_at - self.loop.now))
            client.left_at = self.loop.now
            return {"type": "http.disconnect"}

        return receive

    def _send(self, client: Client) -> Any:
        async def send(message: Message) -> None:
            if client.is_complete:
                raise ViolationError(f"client {client.number} gets {message} after the last byte")
            if client.write_seconds:  # a write ends with the connection
                await asyncio.sleep(min(client.write_seconds, max(0.0, client.disconnects_at - self.loop.now)))
            body: bytes = message.get("body", b"")
            if b'"error"' in body:
                client.stream_error = body.decode()
            client.is_complete = message["type"] == "http.response.body" and not message.get("more_body")

        return send

    def _drop(self, client: Client) -> None:
        client.is_dropped = True
        client.left_at = self.loop.now

    # -- the course of the history

    async def run(self) -> None:
        server = self.server
        submit = server.frontend.submit

        @asynccontextmanager
        async def recorded(*args: Any) -> AsyncIterator[Submission]:
            async with submit(*args) as submission:
                CURRENT.get().uids = submission.uids
                yield submission

        server.frontend.submit = recorded  # type: ignore[method-assign]
        replicas = [name for name in server.schedulers if self.args.dp > 1 and self.rng.random() < 0.5]
        victim = server.processes[self.rng.choice(replicas or list(server.processes))]
        if self.ending in ("death", "stop", "hang"):
            victim.fault_at = self.rng.randrange(1, 60)
            victim.stop_seconds = {"death": None, "stop": self.rng.random() * 7, "hang": 1e9}[self.ending]
        if self.has_changes:
            self.loop.call_later(self.rng.random() * BUSY_S, self._signal, self.rng.choice(SIGNALS))
        serving = self.loop.create_task(server.serve(), name="the server")
        clients = [self.loop.create_task(self._live(c), name=f"client {c.number}") for c in self.clients]
        if self.ending in ("drain", "short drain", "stop now"):
            await asyncio.sleep(self.rng.random() * BUSY_S)
            self.fault_at = self.loop.now
            self.loop.signals[signal.SIGTERM]()
            if self.ending == "stop now":
                await asyncio.sleep(self.rng.random() * 0.2)
                self.loop.signals[signal.SIGINT]()
        elif self.ending in ("death", "hang"):
            is_replica = victim.name.startswith("minisgl-DP")
            await asyncio.wait([serving], timeout=2 * BUSY_S)
            if is_replica and victim.stopped_at:
                await asyncio.wait(clients)
                await asyncio.sleep(HANG_S + SETTLE_S)
            if not serving.done() and (is_replica or not victim.stopped_at):  # or it was too quiet to reach its fault
                victim.fault_at = None
                self.loop.signals[signal.SIGTERM]()
        else:
            await asyncio.wait(clients)
            await asyncio.sleep(SETTLE_S + (0 if victim.stop_seconds is None else victim.stop_seconds))
            self._check_idle()
            self.loop.signals[signal.SIGTERM]()
        await asyncio.wait([serving, *clients], timeout=100.0)
        self.ended_at = self.loop.now
        for task in (serving, *clients):
            if not task.done():
                raise ViolationError(f"never ended: {task.get_name()}")
            task.result()
        self._check(victim.stopped_at if self.ending in ("stop", "hang") else 0.0)

    def _signal(self, number: int) -> None:
        if not self.server.uvicorn.should_exit:
            self.loop.signals[number]()

    # -- the rules

    def _check_idle(self) -> None:
        server = self.server
        replicas = server.http.replicas
        for name in [replica.names[0] for replica in replicas.values()] or server.schedulers:
            s = server.schedulers[name]
            self._once(not s.is_busy, f"left in the scheduler: {list(s.live.values())}")
            try:
                check_idle(s)
            except InvariantError as e:
                self.problems.append(str(e))
        left = [len(r.requests) for r in server.frontend.dispatcher.router.replicas.values()]
        self._once(not any(left), f"requests are left in the router: {left}")
        for name, entries in [*((n, w.entries) for n, w in server.workers.items()), ("API", server.frontend.entries)]:
            self._once(entries == 0, f"{entries} entries are left in {name}")
        self._once(server.frontend.detokenizer_entries == 0, "the detokenizer's entries are not reported")
        used = set(self.world.inboxes)
        if replicas:
            addrs = {
                replace(server.args, incarnation=replica.incarnation).zmq_scheduler_addr
                for replica in replicas.values()
            }
            used -= {addr for addr in used if "/backend-" in addr and addr not in addrs}
        for addr, inbox in ((addr, self.world.inboxes[addr]) for addr in sorted(used)):
            self._once(not inbox, f"{len(inbox)} frames are left at {addr}")
        for uid in self.sent:
            self._once(uid in self.ended, f"request {uid} has no terminal reply")

    def _check(self, stopped_at: float) -> None:
        for process in (*self.server.processes.values(), *self.server.ended):
            if process.crash is not None:
                raise process.crash
            self._once(process.ended_at is not None, f"{process.name} is not ended")
        died = self.ending in ("death", "hang") and self.server.http.exit_code == 1
        self._once(self.server.frontend.entries == 0, f"{self.server.frontend.entries} entries are left in the API")
        if self.ending not in ("death", "hang"):
            self._once(self.server.http.exit_code == 0, f"exit code {self.server.http.exit_code}")
        if self.ending == "hang" and stopped_at:
            is_replaced = self.server.frontend.dispatcher.router.deaths > 0 or self.has_changes
            self._once(died or is_replaced, "a process that hangs did not end the server, and is not replaced")
        if not stopped_at and not died and not self.server.ended:
            self._check_aborts()
        for client in self.clients:
            self._once(not client.is_cut or client.write_seconds > 0, f"the end cuts client {client.number}")
            if client.kind in ("stream", "body"):
                self._check_client(client, died, stopped_at)
        if self.problems:
            raise ViolationError("; ".join(self.problems))

    def _check_aborts(self) -> None:
        """Work stops soon after the client has left or its answer has ended."""
        over = max(self.server.processes[name].ended_at or self.ended_at for name in self.server.schedulers)
        bound = 2 * (self.world.max_delay + TURN_S) + 3 * STEP_S
        gone = {uid: c.left_at for c in self.clients if c.left_at is not None and not c.is_complete for uid in c.uids}
        for uid, at in [*self.ended.items(), *gone.items(), *self.aborted.items()]:
            if uid in self.accepted and (end := self.scheduler_ended.get(uid, over)) > at + bound:
                seconds = f"{at - self.began:.3f} to {end - self.began:.3f} s"
                self.problems.append(f"request {uid} is computed for nobody from {seconds}")

    def _check_client(self, client: Client, died: bool, stopped_at: float) -> None:
        where = f"client {client.number} with requests {client.uids}"
        tokens, text, reason = self._expected(client)
        for index, got in client.texts.items():
            end = client.ends.get(index)
            ids = client.ids[index]
            is_whole = end is not None and end.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
            if (is_whole and got != text) or not text.startswith(got.rstrip("\ufffd")) or ids != tokens[: len(ids)]:
                self.problems.append(f"{where}: choice {index} is {got!r}, {ids}; it should be {text!r}, {tokens}")
            if is_whole:
                assert end is not None
                self._once(end.finish_reason == reason, f"{where}: ended by {end.finish_reason}, not {reason}")
            elif end is not None:
                self._once(end.failure is not None, f"{where}: {end} gives no reason")
        if client.left_at is not None or client.done_at is None:
            return
        is_answered = client.is_complete and not client.stream_error
        if client.error is not None:
            self._check_refusal(client, client.error, died, stopped_at)
        elif is_answered:
            self._once(len(client.ends) == client.n, f"{where}: {len(client.ends)} of {client.n} choices have ended")
        elif client.stream_error:
            is_expected = died or "shutting down" in client.stream_error or "has waited for" in client.stream_error
            is_expected |= "requests are waiting" in client.stream_error and client.n > 1
            is_expected |= self._may_lack_replicas(client.stream_error)
            self._once(is_expected, f"{where}: {client.stream_error}")
        elif not client.is_cut:
            self.problems.append(f"{where}: no answer")

    def _check_refusal(self, client: Client, error: RequestError, died: bool, stopped_at: float) -> None:
        is_expected = {
            400: self._is_invalid(client),
            429: self.args.scheduler.max_queued_requests < 100,
            503: (
                died
                or "shutting down" in error.message
                or ("has waited" in error.message and self.args.scheduler.max_queue_time < 1)
                or (bool(stopped_at) and "no heartbeat" in error.message)
                or self._may_lack_replicas(error.message)
            ),
        }
        if not is_expected.get(error.status):
            self.problems.append(f"client {client.number} is refused with {error.status}: {error}")

    def _may_lack_replicas(self, message: str) -> bool:
        """Whether the last of two replicas may have died after the other had been told to end."""
        return "no replica is" in message and self.args.dp == 2 and self.has_changes

    def _is_invalid(self, client: Client) -> bool:
        is_bad = client.params.grammar is not None and client.params.grammar.text == "bad"
        return is_bad or len(client.prompt) >= MAX_LEN

    def _expected(self, client: Client) -> tuple[list[int], str, FinishReason]:
        """What the client must get: tokens, text and the reason of its end."""
        params = client.params
        if self._is_invalid(client):
            return [], "", FinishReason.ERROR
        matcher = None
        if params.grammar is not None:
            matcher = FakeMatcher(params.grammar.text, self.vocab, not params.ignore_eos)
        rest = MAX_LEN - len(client.prompt)
        limit = rest if params.max_tokens is None else min(rest, params.max_tokens)
        tokens = expected_output(
            client.prompt, limit, self.vocab, ignore_eos=params.ignore_eos, stops=params.stop_token_ids, matcher=matcher
        )
        shown, reason = tokens, FinishReason.LENGTH
        if (tokens[-1] == EOS and not params.ignore_eos) or tokens[-1] in params.stop_token_ids:
            shown, reason = tokens[:-1], FinishReason.STOP
        elif matcher is not None and matcher.is_complete:
            reason = FinishReason.STOP
        text = b"".join(BYTES[t] for t in shown).decode("utf-8", "replace")
        starts = [at for stop in params.stop if (at := text.find(stop)) >= 0]
        if starts:
            return tokens, text[: min(starts)], FinishReason.STOP
        return tokens, text, reason


CURRENT: contextvars.ContextVar[Client] = contextvars.ContextVar("client")


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))


@contextmanager
def _logged_errors() -> Iterator[list[str]]:
    """Collect what the package logs as an error."""
    package, handler = logging.getLogger("minisgl"), _Errors()
    level, propagate = package.level, package.propagate
    package.addHandler(handler)
    package.setLevel(logging.ERROR)
    package.propagate = False
    try:
        yield handler.messages
    finally:
        package.removeHandler(handler)
        package.setLevel(level)
        package.propagate = propagate


def run_history(seed: int) -> History:
    """Run the history of `seed`; raises `ViolationError`, or what a process has raised, with the seed in a note."""
    loop = SimulatedLoop()
    try:
        with simulated_time(loop.time), _logged_errors() as errors:
            history = loop.run_until_complete(_run(seed, loop))
            unexpected = [e for e in errors if not any(part in e for part in EXPECTED_ERRORS)]
            if unexpected:
                raise ViolationError(f"logged: {unexpected}")
            return history
    except BaseException as e:
        e.add_note(f"replay with: python tests/simulation --seed {seed}")
        raise
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.call_soon(loop.stop)
        loop.run_forever()
        loop.close()


async def _run(seed: int, loop: SimulatedLoop) -> History:
    history = History(seed, loop)
    await history.run()
    return history


def summary(histories: list[History]) -> Counter[str]:
    """What has happened in some histories."""
    counts: Counter[str] = Counter()
    for history in histories:
        counts[f"ending: {history.ending}"] += 1
        counts["servers ended by a fault"] += history.server.http.exit_code
        counts["preemptions"] += sum(s.stats.preemptions for s in history.server.schedulers.values())
        router = history.server.frontend.dispatcher.router
        counts["replicas lost"] += router.deaths
        counts["requests moved"] += router.moved
        counts["aborts"] += len(history.aborted)
        for client in history.clients:
            error = client.error
            counts["left" if client.left_at else f"refused: {error.status}" if error else "answered"] += 1
    return counts
