"""The API server's side of the message channels: requests out, replies back to whoever waits for them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from minisgl.api.call import Call
from minisgl.api.metrics import Metrics
from minisgl.api.questions import Questions
from minisgl.core import FinishReason
from minisgl.errors import RequestError
from minisgl.message import (
    AbortMsg,
    BackendMsg,
    ConversionReply,
    DecodeMsg,
    DetokenizerStatsMsg,
    EncodeMsg,
    EngineView,
    Failure,
    FlushCacheMsg,
    FrontendMsg,
    StatsMsg,
    TokenizeMsg,
    TokenizerMsg,
    UserReply,
    ViewMsg,
)
from minisgl.params import Limits
from minisgl.process.queues import Codec, ZmqAsyncPullQueue, ZmqAsyncPushQueue
from minisgl.settings.options import ServerArgs

logger = logging.getLogger(__name__)

RETRY_AFTER_S: Final = 1
VIEW_TIMEOUT_S: Final = 5.0
_ENCODE_ERRORS: Final = (OverflowError, ValueError, TypeError, RecursionError)  # of the codec, for odd values


def _unrepresentable(e: Exception) -> RequestError:
    return RequestError(f"the request contains a value that cannot be represented: {e}")


class FrontendManager:
    """Owns the sockets and every open call of the API process; lives on its event loop."""

    def __init__(self, args: ServerArgs, limits: Limits, metrics: Metrics) -> None:
        self.limits = limits
        self.metrics = metrics
        self.stats = StatsMsg()
        self.detokenizer_entries = 0
        self.failure = ""  # why no request can be served any more
        self.is_draining = False
        self._max_calls = args.scheduler.max_queued_requests + args.scheduler.engine.max_running_requests
        self._heartbeat_timeout = args.heartbeat_timeout
        self._last_heartbeat = time.monotonic()
        self._uids = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._questions = Questions()
        self._idle = asyncio.Event()
        self._idle.set()
        self._inbox: ZmqAsyncPullQueue[FrontendMsg] = ZmqAsyncPullQueue(args.zmq_frontend_addr, Codec(FrontendMsg))
        self._tokenizers: list[ZmqAsyncPushQueue[TokenizerMsg]] = [
            ZmqAsyncPushQueue(addr, Codec(TokenizerMsg)) for addr in args.zmq_tokenizer_addrs
        ]
        self._backend: ZmqAsyncPushQueue[BackendMsg] = ZmqAsyncPushQueue(args.zmq_backend_addr, Codec(BackendMsg))
        self._receiver = asyncio.create_task(self._receive(), name="replies")

    @property
    def entries(self) -> int:
        """Requests that are remembered; 0 when idle, or something leaks."""
        return len(self._calls) + len(self._questions)

    def render_metrics(self) -> bytes:
        """The metrics of the whole server."""
        return self.metrics.render(self.stats, self.entries, self.detokenizer_entries)

    @property
    def health_problem(self) -> str:
        """Why the server is not healthy; empty when it is."""
        if self.failure:
            return self.failure
        silence = time.monotonic() - self._last_heartbeat
        if silence > self._heartbeat_timeout:
            return f"no sign of life from the scheduler for {silence:.0f} s"
        return ""

    async def submit(self, messages: Sequence[TokenizeMsg], n: int = 1) -> Call:
        """Send requests (their uids are assigned here) and return their common call, to be used with `async with`.

        Each `n` messages in a row are choices for one prompt; the call sends all but the first of them later.
        Raises `RequestError`: 503 when draining or broken, 429 when too many requests are open.
        """
        self._require_room(len(messages))
        numbered = [msgspec.structs.replace(m, uid=next(self._uids)) for m in messages]
        call = Call(self, numbered, n)
        self._idle.clear()
        self._calls.update({m.uid: call for m in numbered})
        try:
            await self.send(numbered[::n])
        except _ENCODE_ERRORS as e:
            await self.forget(call)
            raise _unrepresentable(e) from e
        return call

    async def send(self, messages: Sequence[TokenizeMsg]) -> None:
        """To a tokenizer each; their uids belong to an open call."""
        for m in messages:
            await self._tokenizer(m.uid).put([m])

    async def convert(self, msg: EncodeMsg | DecodeMsg) -> ConversionReply:
        """Ask a tokenizer worker; the uid is assigned here. Raises `RequestError` as `submit` does, or the worker's."""
        self._require_room(1)
        uid = next(self._uids)
        try:
            reply = await self._questions.ask(uid, self._tokenizer(uid).put([msgspec.structs.replace(msg, uid=uid)]))
        except _ENCODE_ERRORS as e:
            raise _unrepresentable(e) from e
        assert isinstance(reply, ConversionReply), f"{type(reply).__name__} is no conversion"
        return reply

    async def engine_view(self) -> EngineView:
        """Ask the scheduler what it is doing; raises `RequestError` (503) when it cannot say."""
        self.require_ready()
        uid = next(self._uids)
        try:
            async with asyncio.timeout(VIEW_TIMEOUT_S):
                reply = await self._questions.ask(uid, self._backend.put([ViewMsg(uid)]))
        except TimeoutError:
            raise RequestError("the engine is too busy to show itself", code="no_view", status=503) from None
        assert isinstance(reply, EngineView), f"{type(reply).__name__} is no view"
        return reply

    def _require_room(self, n: int) -> None:
        self.require_ready()
        if self.entries + n > self._max_calls:
            raise RequestError("too many requests; try again later", code="queue_full", status=429)

    def require_ready(self) -> None:
        """Raises `RequestError` (503) when new work cannot be taken."""
        if self.failure:
            raise RequestError(self.failure, code="server_failed", status=503)
        if self.is_draining:
            raise RequestError("the server is shutting down", code="shutting_down", status=503)

    async def forget(self, call: Call) -> None:
        """Drop a call; its unfinished generations are aborted."""
        for uid in call.unfinished:
            await self._tokenizer(uid).put([AbortMsg(uid)])
            self.metrics.observe_end(FinishReason.ABORT, time.monotonic() - call.created)
        for uid in call.uids:
            self._calls.pop(uid, None)
        if not self._calls:
            self._idle.set()

    async def flush_cache(self) -> None:
        """Ask the scheduler to drop its idle prefixes."""
        self.require_ready()
        await self._backend.put([FlushCacheMsg()])

    async def drain(self, timeout: float) -> None:
        """Take no new work and wait for the open calls to end; what is left after `timeout` seconds is failed."""
        self.is_draining = True
        if self._idle.is_set():
            return
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            self.fail(f"the server is shutting down; the request did not finish within {timeout:g} s")

    def fail(self, cause: str) -> None:
        """End every open call with an error; no new one will be accepted."""
        self.failure = self.failure or cause
        failure = Failure(message=cause, code="server_failed", status=503)
        self._questions.fail(failure)
        for uid, call in self._calls.items():
            call.push(UserReply(uid=uid, finish_reason=FinishReason.ERROR, failure=failure))

    async def wait_idle(self, timeout: float) -> None:
        """Wait until every call has been answered, at most `timeout` seconds."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except TimeoutError:
            logger.warning("%d requests are still open", len(self._calls))

    async def close(self) -> None:
        """Close the sockets."""
        self._receiver.cancel()
        await asyncio.gather(self._receiver, return_exceptions=True)
        self._inbox.close()
        self._backend.close()
        for tokenizer in self._tokenizers:
            tokenizer.close()

    def _tokenizer(self, uid: int) -> ZmqAsyncPushQueue[TokenizerMsg]:
        return self._tokenizers[uid % len(self._tokenizers)]

    async def _receive(self) -> None:
        while True:
            for msg in await self._inbox.get():
                if isinstance(msg, UserReply):
                    if (call := self._calls.get(msg.uid)) is not None:
                        call.push(msg)
                elif isinstance(msg, ConversionReply | EngineView):
                    self._questions.answer(msg)
                elif isinstance(msg, StatsMsg):
                    self._last_heartbeat = time.monotonic()
                    self.stats = msg
                    self.metrics.log_throughput(msg)
                elif isinstance(msg, DetokenizerStatsMsg):
                    self.detokenizer_entries = msg.entries
            await asyncio.sleep(0)  # a flood of replies must not keep the writers from writing
