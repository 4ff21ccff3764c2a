"""The API process's end of the message channels: sends requests, and delivers replies to the HTTP requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from minisgl.api.dispatch import POLL_S, Dispatcher
from minisgl.api.metrics import Metrics
from minisgl.api.protocol import Timing, Usage
from minisgl.api.requests import ServedAdapter
from minisgl.core.errors import RequestError
from minisgl.core.message import (
    AbortMsg,
    ConversionReply,
    DecodeMsg,
    DetokenizerStatsMsg,
    EncodeMsg,
    EngineView,
    Failure,
    FlushCacheMsg,
    FrontendMsg,
    LostMsg,
    PrefixesMsg,
    StatsMsg,
    TokenizeMsg,
    TokenizerMsg,
    UserReply,
    ViewMsg,
    ids_from_bytes,
)
from minisgl.core.params import Limits
from minisgl.core.plan import FinishReason
from minisgl.process.queues import Codec, ZmqAsyncPullQueue, ZmqPushQueue
from minisgl.settings.options import ServerArgs

UID_BITS: Final = 32  # the lower bits of a uid number the requests of an API process; the others are its incarnation
VIEW_TIMEOUT_S: Final = 5.0
_ENCODE_ERRORS: Final = (OverflowError, UnicodeError, TypeError, RecursionError)  # of the codec, for odd values


class ClientGoneError(Exception):
    """The client closed the connection before its response was complete."""


def joined(replies: Sequence[UserReply]) -> UserReply:
    """Join successive `replies` to one request into one reply."""
    if len(replies) == 1:
        return replies[0]
    return msgspec.structs.replace(
        replies[-1],
        text="".join(r.text for r in replies),
        logprobs=[logprob for r in replies for logprob in r.logprobs],
        output_ids=b"".join(r.output_ids for r in replies),
    )


@dataclass(slots=True)
class Generation:
    """One generation of a submission: its newest reply, and the times of its tokens by the monotonic clock."""

    index: int
    reply: UserReply
    first: UserReply | None = None  # the reply to the first token
    first_at: float = 0.0
    last_at: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """The times of one HTTP request, by the monotonic clock. Of several generations, the longest wait counts."""

    created: float
    first: float | None = None  # the first token of any generation
    last: float = 0.0
    queue_seconds: float = 0.0
    prefill_chunks: int = 0
    num_started: int = 0

    def phases(self) -> dict[str, tuple[float, float]]:
        """Return begin and end of the phases that were reached: queue, prefill (with tokenization), and decode."""
        if self.first is None:
            return {"queue": (self.created, max(self.created, self.last))}
        queued = min(self.created + self.queue_seconds, self.first)
        return {"queue": (self.created, queued), "prefill": (queued, self.first), "decode": (self.first, self.last)}

    def timing(self, usage: Usage) -> Timing:
        """Return the timing for the client. The rate excludes first tokens; it is None if there are no others."""
        decoded = usage.completion_tokens - self.num_started
        seconds = 0.0 if self.first is None else self.last - self.first
        return Timing(
            queue_ms=round(1e3 * self.queue_seconds, 3),
            ttft_ms=None if self.first is None else round(1e3 * (self.first - self.created), 3),
            cached_tokens=usage.prompt_tokens_details.cached_tokens,
            prefill_chunks=self.prefill_chunks,
            tokens_per_s=round(decoded / seconds, 2) if decoded > 0 and seconds > 0 else None,
        )


class Submission:
    """The generations of one HTTP request, by index.

    Of several choices for one prompt, only the first is sent at once. The others (`_held`, by the uid of the first)
    follow when the first has a token: then the prompt is in the prefix cache, and need not be computed again.
    """

    def __init__(
        self, frontend: FrontendManager, messages: Sequence[TokenizeMsg], n: int, served: ServedAdapter | None
    ) -> None:
        """Take `messages` that have uids. Each `n` adjacent ones are choices for one prompt. `served`: an adapter."""
        self.created = time.monotonic()
        self.uids = tuple(m.uid for m in messages)
        self.n = n
        self.level = messages[0].level
        self.unfinished = set(self.uids)
        self._frontend = frontend
        self._served = served
        self._generations = {uid: Generation(i, UserReply(uid=uid)) for i, uid in enumerate(self.uids)}
        self._pending: dict[int, UserReply] = {}
        self._waiter: asyncio.Future[None] | None = None  # set while `next_replies` waits
        self._held = {self.uids[i]: messages[i + 1 : i + n] for i in range(0, len(messages), n) if n > 1}
        self._is_abandoned = False

    @property
    def last_replies(self) -> list[UserReply]:
        """The newest reply to each generation, by index; an empty reply if there is none."""
        return [generation.reply for generation in self._generations.values()]

    @property
    def timeline(self) -> Timeline:
        """The times so far."""
        started = [(g, g.first) for g in self._generations.values() if g.first is not None]
        return Timeline(
            self.created,
            min((g.first_at for g, _ in started), default=None),
            max(g.last_at for g in self._generations.values()),
            max((first.queue_seconds for _, first in started), default=0.0),
            sum(first.prefill_chunks for _, first in started),
            len(started),
        )

    @property
    def is_done(self) -> bool:
        """Whether all generations have ended and `next_replies` has returned their ends."""
        return not self.unfinished and not self._pending

    def push(self, reply: UserReply) -> None:
        """Add a reply to a generation. Replies after the terminal one are ignored.

        Replies that a slow client has not read are joined, so its backlog is one reply per generation.
        """
        uid = reply.uid
        if uid not in self.unfinished:
            return
        if reply.finish_reason is not None:
            self.unfinished.discard(uid)
        self._measure(reply)
        old = self._pending.get(uid)
        self._pending[uid] = reply if old is None else joined((old, reply))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _measure(self, reply: UserReply) -> None:
        now = time.monotonic()
        metrics = self._frontend.metrics
        generation = self._generations[reply.uid]
        if generation.first is not None:
            metrics.inter_token_latency[self.level].observe(now - generation.last_at)
        elif reply.completion_tokens:
            metrics.time_to_first_token[self.level].observe(now - self.created)
            metrics.queue_time[self.level].observe(reply.queue_seconds)
            generation.first, generation.first_at = reply, now
        generation.last_at, generation.reply = now, reply
        if reply.finish_reason is not None:
            self.count(reply.uid)
            metrics.observe_end(reply.finish_reason, self._figures(generation), self.level)

    def count(self, uid: int) -> None:
        """Count a generation that has ended, or is aborted, for its adapter."""
        if self._served is not None:
            self._served.count(self._generations[uid].reply)

    def _figures(self, generation: Generation) -> dict[str, float]:
        """Return tokens and times of a generation that has ended, for `Metrics.observe_end`."""
        reply, queued = generation.reply, (generation.first or generation.reply).queue_seconds
        total = generation.last_at - self.created
        decode = 0.0 if generation.first is None else generation.last_at - generation.first_at
        figures = {
            "e2e_request_latency_seconds": total,
            "request_prompt_tokens": reply.prompt_tokens,
            "request_generation_tokens": reply.completion_tokens,
            "request_prefill_time_seconds": max(0.0, total - decode - queued),
            "request_decode_time_seconds": decode,
            "request_inference_time_seconds": max(0.0, total - queued),
        }
        if reply.completion_tokens > 1:
            figures["request_time_per_output_token_seconds"] = decode / (reply.completion_tokens - 1)
        return figures

    def abandon(self) -> None:
        """Record that the client is gone: `next_replies` then raises `ClientGoneError`."""
        self._is_abandoned = True
        self._wake()

    async def next_replies(self) -> list[tuple[int, UserReply]]:
        """Wait for replies. Return (index, everything since the last call) of the generations that have any.

        Raises `ClientGoneError` after `abandon`.
        """
        if not self._pending and not self._is_abandoned:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._is_abandoned:
            raise ClientGoneError
        pending, self._pending = self._pending, {}
        if self._held:
            started = [uid for uid, reply in pending.items() if reply.failure is None]
            await self._frontend.send([m for uid in started for m in self._held.pop(uid, ())])
        return [(self._generations[uid].index, reply) for uid, reply in pending.items()]


class FrontendManager:
    """Owns the sockets of the API process and all open submissions. Runs on one event loop."""

    def __init__(self, args: ServerArgs, limits: Limits, metrics: Metrics) -> None:
        self.limits = limits
        self.metrics = metrics
        self.detokenizer_entries = 0
        self._dropped = 0  # messages that tokenizers and detokenizer have dropped
        self.failure = ""  # why requests can no longer be served
        self.stalled = ""  # the process without heartbeats
        self.is_draining = False
        self.write_timeout = args.write_timeout
        self._args = args
        self._uids = itertools.count((args.incarnation << UID_BITS) + 1)
        self._submissions: dict[int, Submission] = {}
        # Open queries to other processes (/tokenize, /detokenize, /engine_view), by the uid of their reply.
        self._queries: dict[int, asyncio.Future[ConversionReply | EngineView]] = {}
        self._inbox: ZmqAsyncPullQueue[FrontendMsg] = ZmqAsyncPullQueue(args.zmq_frontend_addr, Codec(FrontendMsg))
        self._tokenizers: list[ZmqPushQueue[TokenizerMsg]] = [
            ZmqPushQueue(addr, Codec(TokenizerMsg)) for addr in args.zmq_tokenizer_addrs
        ]
        self.dispatcher = Dispatcher(args)
        self._receiver = asyncio.create_task(self._receive(), name="replies")

    @property
    def entries(self) -> int:
        """The number of open requests and queries. It must be 0 when the server is idle."""
        return len(self._submissions) + len(self._queries)

    @property
    def stats(self) -> StatsMsg:
        """The last heartbeat; the sum over all replicas if there are several."""
        return self.dispatcher.router.stats

    def render_metrics(self, accept: str) -> tuple[bytes, str]:
        """Return the body of `/metrics` and its media type, for a header `accept`."""
        router = self.dispatcher.router
        return self.metrics.render(router, self.entries, self.detokenizer_entries, self._dropped, accept)

    @property
    def health_problem(self) -> str:
        """Why the server is unhealthy; "" if it is healthy."""
        if self.failure:
            return self.failure
        silence = self.dispatcher.silence.values()
        if not silence:
            return "no replica is running"
        if min(silence) > self._args.heartbeat_timeout:
            return f"no heartbeat from the scheduler for {min(silence):.0f} s"
        return self.stalled

    @contextlib.asynccontextmanager
    async def submit(
        self, messages: Sequence[TokenizeMsg], n: int = 1, served: ServedAdapter | None = None, level: int = 0
    ) -> AsyncIterator[Submission]:
        """Assign uids, send the requests, and yield their submission. At the end, abort unfinished generations.

        The adapter in `served`, if any, computes them all. `level` is the class of the client.

        Each `n` adjacent messages are choices for one prompt. The submission sends all but the first of them later.
        Raises `RequestError`: 503 if the server drains or has failed, 429 if too many requests are open.
        """
        self._require_capacity(len(messages), level)
        replace = msgspec.structs.replace
        if served is not None:
            adapted = (replace(m.sampling_params, adapter=served.adapter) for m in messages)
            messages = [replace(m, sampling_params=p) for m, p in zip(messages, adapted, strict=True)]
        numbered = [replace(m, uid=next(self._uids), child_index=i, level=level) for i, m in enumerate(messages)]
        submission = Submission(self, numbered, n, served)
        self._submissions.update({m.uid: submission for m in numbered})
        try:
            await self.send(numbered[::n])
            yield submission
        finally:
            await self.forget(submission)

    async def forget(self, submission: Submission) -> None:
        """Remove a submission, and abort its unfinished generations."""
        for uid in list(submission.unfinished):
            await self._tokenize(AbortMsg(uid=uid))
            submission.count(uid)
            self.metrics.observe_end(FinishReason.ABORT, {}, submission.level)
        for uid in submission.uids:
            self._submissions.pop(uid, None)

    async def send(self, messages: Sequence[TokenizeMsg]) -> None:
        """Send requests of an open submission to the tokenizers."""
        for m in messages:
            await self._tokenize(m)

    async def _tokenize(self, msg: TokenizeMsg | EncodeMsg | DecodeMsg | AbortMsg) -> None:
        """Send a message to the tokenizer of its uid. Raises `RequestError` for a value that cannot be represented."""
        try:
            self._tokenizers[msg.uid % len(self._tokenizers)].put([msg])
        except _ENCODE_ERRORS as e:
            raise RequestError(f"the request contains a value that cannot be represented: {e}") from e

    async def convert(self, msg: EncodeMsg | DecodeMsg) -> ConversionReply:
        """Assign a uid and ask a tokenizer. Raises `RequestError` like `submit`, or with the tokenizer's failure."""
        self._require_capacity(1)
        uid = next(self._uids)
        try:
            reply = await self._ask(uid, self._tokenize(msgspec.structs.replace(msg, uid=uid)))
        except RequestError as e:
            raise e.named({"prompt": msg.prompt.param} if isinstance(msg, EncodeMsg) else {}) from e
        assert isinstance(reply, ConversionReply), f"a {type(reply).__name__} is not a conversion"
        return reply

    async def _ask(self, uid: int, sending: Awaitable[None]) -> ConversionReply | EngineView:
        """Send a query and wait for the reply with its `uid`. Raises `RequestError` for a failure."""
        self._queries[uid] = asyncio.get_running_loop().create_future()
        try:
            await sending
            reply = await self._queries[uid]
        finally:
            del self._queries[uid]
        if isinstance(reply, ConversionReply) and reply.failure is not None:
            raise reply.failure.error()
        return reply

    def _answer(self, reply: ConversionReply | EngineView) -> None:
        """Deliver the reply to a query. A reply to a closed query is dropped."""
        future = self._queries.get(reply.uid)
        if future is not None and not future.done():
            future.set_result(reply)

    async def prompt_ids(self, message: TokenizeMsg) -> list[int]:
        """Return the token ids of a prompt; ask a tokenizer if needed. Raises `RequestError` like `convert`."""
        packed = message.input_ids
        if packed is None:
            add_special = message.add_special_tokens if message.messages is None else None
            packed = (await self.convert(EncodeMsg(uid=0, prompt=message, add_special_tokens=add_special))).input_ids
        ids: list[int] = ids_from_bytes(packed).tolist()
        return ids

    async def engine_view(self, index: int = 0) -> EngineView:
        """Ask the scheduler of replica number `index` for a view of the engine.

        Raises `RequestError`: 404 for an unknown replica, 503 if no reply arrives in time.
        """
        self.require_ready()
        uid = next(self._uids)
        try:
            async with asyncio.timeout(VIEW_TIMEOUT_S):
                reply = await self._ask(uid, self.dispatcher.put(ViewMsg(uid=uid), index))
        except TimeoutError:
            raise RequestError("the engine is too busy to send a view; try again", code="no_view", status=503) from None
        assert isinstance(reply, EngineView), f"a {type(reply).__name__} is not a view"
        return reply

    def _require_capacity(self, n: int, level: int = 0) -> None:
        self.require_ready()
        counted = len(self._queries) + sum(open.level <= level for open in self._submissions.values())
        replicas = max(self._args.dp, len(self.dispatcher.router.replicas))
        scheduler = self._args.scheduler
        if counted + n > replicas * (scheduler.max_queued_requests + scheduler.engine.max_running_requests):
            raise RequestError("too many requests; try again later", code="queue_full", status=429)

    def require_ready(self) -> None:
        """Raise `RequestError` (503) if the server accepts no new requests."""
        if self.failure:
            raise RequestError(self.failure, code="server_failed", status=503)
        if self.health_problem:
            raise RequestError(self.health_problem, code="not_healthy", status=503)
        if self.is_draining:
            raise RequestError("the server is shutting down", code="shutting_down", status=503)

    async def flush_cache(self) -> None:
        """Ask all replicas to drop all cached prefixes that no request uses."""
        self.require_ready()
        await self.dispatcher.put(FlushCacheMsg())

    async def drain(self, timeout: float) -> None:
        """Accept no new requests, and wait for open ones; end the rest with an error after `timeout` seconds."""
        self.is_draining = True
        if not await self.wait_idle(timeout):
            self.fail(f"the server is shutting down; the request did not finish within {timeout:g} s")

    def fail(self, cause: str) -> None:
        """End all open requests with an error, and accept no new ones."""
        self.failure = self.failure or cause
        failure = Failure(message=cause, code="server_failed", status=503)
        for uid in self._queries:
            self._answer(ConversionReply(uid=uid, failure=failure))
        for uid, submission in self._submissions.items():
            submission.push(UserReply(uid=uid, finish_reason=FinishReason.ERROR, failure=failure))

    async def wait_idle(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds until no submission or query is open. Return whether none is."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.entries:
                    await asyncio.sleep(POLL_S)
        return not self.entries

    async def close(self) -> None:
        """Close the sockets."""
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        self._inbox.close()
        await self.dispatcher.close()
        for tokenizer in self._tokenizers:
            tokenizer.close()

    async def _receive(self) -> None:
        while True:
            for msg in await self._inbox.get():
                if isinstance(msg, UserReply):  # first and without a coroutine: there is one for each token
                    self.dispatcher.router.note_reply(msg)
                    if (submission := self._submissions.get(msg.uid)) is not None:
                        submission.push(msg)
                elif isinstance(msg, ConversionReply | EngineView):
                    self._answer(msg)
                elif isinstance(msg, StatsMsg | PrefixesMsg | LostMsg):
                    await self.dispatcher.note(msg)
                    if isinstance(msg, StatsMsg):
                        self.metrics.log_throughput(self.stats)
                elif isinstance(msg, DetokenizerStatsMsg):
                    self.detokenizer_entries += msg.entries
                    self._dropped += msg.dropped
            await asyncio.sleep(0)  # let the writers run, even in a flood of replies
