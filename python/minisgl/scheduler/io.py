"""The scheduler's messages: their channels (ZeroMQ in the server, lists in the offline `LLM`), and one reply a step."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
import numpy as np

from minisgl.core.layout import NO_INTS, Flag
from minisgl.core.message import (
    CONTEXT_TOKENS,
    BackendMsg,
    DetokenizeMsg,
    EngineView,
    Finished,
    FrontendMsg,
    LogprobColumns,
    PrefixesMsg,
    Started,
    StatsMsg,
    TokenizerMsg,
    ids_to_bytes,
)
from minisgl.core.params import MAX_LOGPROBS
from minisgl.process.queues import Codec, ZmqPullQueue, ZmqPushQueue

if TYPE_CHECKING:
    import numpy.typing as npt

    from minisgl.core.plan import Ints, Records
    from minisgl.scheduler.req import Req
    from minisgl.scheduler.rows import Rows

NO_UIDS: Final = np.empty(0, "<i8")


class SchedulerIO(Protocol):
    """The scheduler's channels to the other processes."""

    def receive(self, timeout: float) -> list[BackendMsg]:
        """Return the messages that have arrived; wait at most `timeout` seconds for the first one."""

    def send(self, msg: DetokenizeMsg) -> None:
        """Send the tokens and endings of one step."""

    def send_stats(self, msg: StatsMsg) -> None:
        """Send the heartbeat."""

    def send_view(self, view: EngineView) -> None:
        """Answer a `ViewMsg`, by way of the detokenizer, which adds the text of tokens."""

    def send_prefixes(self, msg: PrefixesMsg) -> None:
        """Send what has changed in the prefix cache."""


class ZmqIO:
    """The server's channels: pulls from the tokenizers, pushes to the detokenizer and (heartbeats) to the API.

    Messages of an `incarnation` other than 0 carry its number.
    """

    def __init__(self, backend_addr: str, detokenizer_addr: str, frontend_addr: str, incarnation: int = 0) -> None:
        self._incarnation = incarnation
        self._inbox: ZmqPullQueue[BackendMsg] = ZmqPullQueue(backend_addr, Codec(BackendMsg))
        self._tokens: ZmqPushQueue[TokenizerMsg] = ZmqPushQueue(detokenizer_addr, Codec(TokenizerMsg))
        self._frontend: ZmqPushQueue[FrontendMsg] = ZmqPushQueue(frontend_addr, Codec(FrontendMsg))

    def receive(self, timeout: float) -> list[BackendMsg]:
        return self._inbox.get(timeout)

    def send(self, msg: DetokenizeMsg) -> None:
        self._tokens.put([msgspec.structs.replace(msg, incarnation=self._incarnation) if self._incarnation else msg])

    def send_stats(self, msg: StatsMsg) -> None:
        self._frontend.put([msgspec.structs.replace(msg, incarnation=self._incarnation)])

    def send_view(self, view: EngineView) -> None:
        self._tokens.put([view])

    def send_prefixes(self, msg: PrefixesMsg) -> None:
        self._frontend.put([msgspec.structs.replace(msg, incarnation=self._incarnation)])


class OfflineIO:
    """Lists in one process: fill `inbox`, step the scheduler, empty `replies`."""

    def __init__(self) -> None:
        self.inbox: deque[BackendMsg] = deque()
        self.replies: deque[DetokenizeMsg] = deque()

    def receive(self, timeout: float) -> list[BackendMsg]:
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    def send(self, msg: DetokenizeMsg) -> None:
        self.replies.append(msg)

    def send_stats(self, msg: StatsMsg) -> None:
        pass

    def send_view(self, view: EngineView) -> None:
        pass

    def send_prefixes(self, msg: PrefixesMsg) -> None:
        pass


class Replies:
    """Gathers beginnings and endings until the step's tokens are sent, or `flush` sends them alone."""

    def __init__(self, io: SchedulerIO) -> None:
        self._io = io
        self._started: list[Started] = []
        self._finished: list[Finished] = []
        self._logprobs: list[LogprobColumns] = []
        self._drafted: list[tuple[int, int]] = []

    def start(self, req: Req, embedding: bytes) -> None:
        """Announce a request whose first token, or embedding, is in the next message."""
        p = req.sampling_params
        needed = req.prompt_len if p.echo or p.wants_prompt_logprobs else min(req.prompt_len, CONTEXT_TOKENS)
        prompt_logprobs = req.prompt_logprobs
        self._started.append(
            Started(
                uid=req.uid,
                prompt_tokens=req.prompt_len,
                cached_tokens=req.prefix_hit,
                sampling_params=p,
                queue_seconds=req.queue_seconds,
                prefill_chunks=req.prefill_chunks,
                prompt_ids=ids_to_bytes(req.ids[req.prompt_len - needed : req.prompt_len]),
                prompt_logprobs=None if prompt_logprobs is None else _logprobs(req, np.hstack(prompt_logprobs)),
                embedding=embedding,
            )
        )
        req.prompt_logprobs = None

    def finish(self, end: Finished) -> None:
        """Announce the end of a request."""
        self._finished.append(end)

    def drafted(self, sequences: Records, rows: Rows) -> None:
        """Announce how many drafts the `sequences` of a step had; their tokens are sent next."""
        drafts = np.where((sequences["flags"] & Flag.DRAFTS) != 0, sequences["stop"] - sequences["start"] - 1, 0)
        at = np.flatnonzero(drafts)
        self._drafted = list(zip(rows.uid[sequences["row"][at]].tolist(), drafts[at].tolist(), strict=True))

    def add_logprobs(self, columns: Ints, reqs: list[Req]) -> None:
        """Keep the log-probabilities [WIDTH, n] of the new tokens of `reqs` [n]."""
        for i, req in enumerate(reqs):
            if req.sampling_params.logprobs is not None:
                self._logprobs.append(_logprobs(req, columns[:, i : i + 1]))

    def add_prompt_logprobs(self, columns: Ints, prompts: list[tuple[Req, int]]) -> None:
        """Keep the log-probabilities of prompts [WIDTH, N], as many for each request as `prompts` says."""
        start = 0
        for req, count in prompts:
            if req.prompt_logprobs is not None:
                req.prompt_logprobs.append(columns[:, start : start + count])
            start += count

    def send(self, uids: npt.NDArray[np.int64], tokens: Ints, are_drafts: bool = False) -> None:
        """Send one token [n] to each of `uids` [n], with all that has begun and ended."""
        msg = DetokenizeMsg(
            uids=uids.tobytes(),
            tokens=ids_to_bytes(tokens),
            started=self._started,
            finished=self._finished,
            logprobs=self._logprobs,
            drafted=self._drafted,
            are_drafts=are_drafts,
        )
        self._drafted = []
        self._started = []
        self._finished = []
        self._logprobs = []
        self._io.send(msg)

    def flush(self) -> None:
        """Send the endings that came without tokens."""
        if self._finished:
            self.send(NO_UIDS, NO_INTS)


def _logprobs(req: Req, columns: Ints) -> LogprobColumns:
    """The part of `columns` [WIDTH, K] of a step result that `req` asks for."""
    top = req.sampling_params.logprobs
    assert top is not None, f"the request did not ask for log-probabilities: {req}"
    ids, logprobs = columns[1 : 1 + top], columns[1 + MAX_LOGPROBS : 1 + MAX_LOGPROBS + top]
    return LogprobColumns(
        uid=req.uid,
        top=top,
        logprobs=columns[0].tobytes(),
        top_ids=ids.T.tobytes(),
        top_logprobs=logprobs.T.tobytes(),
    )
