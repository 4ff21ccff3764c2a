"""How the scheduler hears and speaks: over ZeroMQ in the server, through lists in the offline `LLM`."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from minisgl.message import BackendMsg, DetokenizeMsg, EngineView, FrontendMsg, StatsMsg, TokenizerMsg
from minisgl.process.queues import Codec, ZmqPullQueue, ZmqPushQueue


class SchedulerIO(Protocol):
    """The scheduler's door to whoever asks."""

    def receive(self, timeout: float) -> list[BackendMsg]:
        """What has arrived; waits at most `timeout` seconds for the first message."""

    def send(self, msg: DetokenizeMsg) -> None:
        """One step's tokens and endings."""

    def send_stats(self, msg: StatsMsg) -> None:
        """The heartbeat."""

    def send_view(self, view: EngineView) -> None:
        """To whoever looks; by way of the detokenizer, which knows what tokens say."""


class ZmqIO:
    """The server's channels: pulls from the tokenizers, pushes to the detokenizer and (heartbeats) to the API."""

    def __init__(self, backend_addr: str, detokenizer_addr: str, frontend_addr: str) -> None:
        self._inbox: ZmqPullQueue[BackendMsg] = ZmqPullQueue(backend_addr, Codec(BackendMsg))
        self._tokens: ZmqPushQueue[TokenizerMsg] = ZmqPushQueue(detokenizer_addr, Codec(TokenizerMsg))
        self._frontend: ZmqPushQueue[FrontendMsg] = ZmqPushQueue(frontend_addr, Codec(FrontendMsg))

    def receive(self, timeout: float) -> list[BackendMsg]:
        return self._inbox.get(timeout)

    def send(self, msg: DetokenizeMsg) -> None:
        self._tokens.put([msg])

    def send_stats(self, msg: StatsMsg) -> None:
        self._frontend.put([msg])

    def send_view(self, view: EngineView) -> None:
        self._tokens.put([view])


class OfflineIO:
    """Lists in one process: fill `inbox`, step the scheduler, empty `outbox`."""

    def __init__(self) -> None:
        self.inbox: deque[BackendMsg] = deque()
        self.outbox: deque[DetokenizeMsg] = deque()

    def receive(self, timeout: float) -> list[BackendMsg]:
        messages = list(self.inbox)
        self.inbox.clear()
        return messages

    def send(self, msg: DetokenizeMsg) -> None:
        self.outbox.append(msg)

    def send_stats(self, msg: StatsMsg) -> None:
        pass  # nobody watches

    def send_view(self, view: EngineView) -> None:
        pass
