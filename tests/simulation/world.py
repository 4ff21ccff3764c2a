"""Simulated time, channels and processes: one event loop, whose clock jumps from one event to the next.

Nothing here waits, opens a socket or starts a thread, so a history depends on its seed alone.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any

from minisgl.process.queues import Codec

START_S = 1000.0  # what the clock shows at first
MOST_S = 1000.0  # for a history


class Killed(BaseException):
    """Ends a simulated process at once, as SIGKILL does."""


class StuckError(Exception):
    """Nothing is left that could happen, but somebody still waits."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """An event loop without files: where others sleep, its clock jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = START_S
        self.readers: dict[int, Callable[[], None]] = {}
        self.signals: dict[int, Callable[[], None]] = {}
        self._selector = self
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self.now

    def select(self, timeout: float | None) -> list[Any]:
        if timeout is None or self.now > START_S + MOST_S:
            raise StuckError("nothing is left to happen, or nothing comes to an end")
        self.now += timeout
        return []

    def _process_events(self, event_list: list[Any]) -> None:
        pass

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        self.readers[fd] = lambda: callback(*args)

    def remove_reader(self, fd: Any) -> bool:
        return self.readers.pop(fd, None) is not None

    def add_signal_handler(self, sig: int, callback: Callable[..., Any], *args: Any) -> None:
        self.signals[sig] = lambda: callback(*args)

    def run_in_executor(self, executor: Executor | None, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()
        future.set_result(func(*args))
        return future


class World:
    """What the parts of one history share: the loop with its clock, the seed's random numbers, and the channels."""

    def __init__(self, loop: SimulatedLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.max_delay = rng.choice((1e-4, 2e-3, 0.05))  # of a frame
        self.inboxes: dict[str, Inbox] = {}
        self.watchers: list[Callable[[Any], None]] = []  # each sees every message when it is sent

    def delay(self) -> float:
        """Draw the time that a frame is on its way: often none, sometimes the longest."""
        kind = self.rng.random()
        return 0.0 if kind < 0.3 else self.max_delay if kind > 0.9 else self.rng.random() * self.max_delay

    def inbox(self, addr: str) -> Inbox:
        if addr not in self.inboxes:
            self.inboxes[addr] = Inbox(self)
        return self.inboxes[addr]


class Inbox:
    """The frames that have arrived at one address, in order of arrival."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._frames: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._frames)

    def deliver(self, frame: bytes) -> None:
        self._frames.append(frame)
        self._wake()

    def pop(self) -> list[bytes]:
        frames, self._frames = list(self._frames), deque()
        return frames

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self, seconds: float | None) -> None:
        """Wait for a frame, at most so long."""
        if self._frames:
            return
        self._waiter = self._world.loop.create_future()
        timer = None if seconds is None else self._world.loop.call_later(seconds, self._wake)
        await self._waiter
        if timer is not None:
            timer.cancel()


class Channel:
    """What one sender has sent to one address. Its frames keep their order; those of other senders may pass them."""

    def __init__(self, world: World, addr: str) -> None:
        self._world = world
        self._inbox = world.inbox(addr)
        self._frames: deque[bytes] = deque()
        self._last = 0.0

    def send(self, frame: bytes, not_before: float = 0.0) -> None:
        loop = self._world.loop
        self._last = max(self._last, max(loop.now, not_before) + self._world.delay())
        self._frames.append(frame)
        loop.call_at(self._last, self._deliver)

    def _deliver(self) -> None:
        if self._frames:
            self._inbox.deliver(self._frames.popleft())

    def lose(self) -> None:
        """Lose the last frames on their way, any number: their sender has died."""
        for _ in range(self._world.rng.randrange(len(self._frames) + 1)):
            self._frames.pop()


class Push:
    """Stands for `ZmqPushQueue` in the simulated `process`."""

    def __init__(self, world: World, process: Process | None, addr: str, codec: Codec[Any]) -> None:
        self._world = world
        self._process = process
        self._codec = codec
        self._channel = Channel(world, addr)
        if process is not None:
            process.channels.append(self._channel)

    def put(self, messages: Sequence[Any]) -> None:
        frame = self._codec.encode(messages)
        if self._process is not None:
            self._process.pass_point()
        for msg in messages:
            for watch in self._world.watchers:
                watch(msg)
        self._channel.send(frame, 0.0 if self._process is None else self._process.resumes_at)

    def close(self) -> None:
        pass


class Pull:
    """Stands for `ZmqPullQueue`, without waiting."""

    def __init__(self, world: World, addr: str, codec: Codec[Any]) -> None:
        self.inbox = world.inbox(addr)
        self._codec = codec

    def get(self, timeout: float | None = None) -> list[Any]:
        return [msg for frame in self.inbox.pop() for msg in self._codec.decode(frame)]

    def close(self) -> None:
        pass


class AsyncPull(Pull):
    """Stands for `ZmqAsyncPullQueue`."""

    async def get(self) -> list[Any]:  # type: ignore[override]
        await self.inbox.wait(None)
        return super().get()


class Process:
    """A simulated process: a task that can be killed or stopped at each of its awaits and sends.

    `fault_at` counts these points. The fault there is a death, or, with `stop_seconds`, a stop for so long.
    """

    def __init__(self, world: World, name: str, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.name = name
        self.channels: list[Channel] = []
        self.fault_at: int | None = None
        self.stop_seconds: float | None = None
        self.stopped_at = 0.0
        self.resumes_at = 0.0
        self.ended_at: float | None = None
        self.crash: BaseException | None = None
        self.on_end: Callable[[], None] = lambda: None
        self.sentinel = 0
        self.is_ready = True
        self._world = world
        self._main = main
        self._points = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = self._world.loop.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self._main()
        except (Killed, asyncio.CancelledError):
            for channel in self.channels:
                channel.lose()
        except BaseException as e:
            self.crash = e
        self.ended_at = self._world.loop.now
        self._world.loop.call_later(self._world.rng.random() * 0.05, self.on_end)

    def pass_point(self) -> None:
        """Count a point where the process may be killed or stopped."""
        self._points += 1
        if self._points == self.fault_at:
            if self.stop_seconds is None:
                raise Killed
            self.stopped_at = self._world.loop.now
            self.resumes_at = self.stopped_at + self.stop_seconds

    async def point(self) -> None:
        """`pass_point` at an await; returns when the process runs again."""
        self.pass_point()
        if (rest := self.resumes_at - self._world.loop.now) > 0:
            await asyncio.sleep(rest)

    def kill(self) -> None:
        if self._task is not None:
            self._task.cancel()

    @property
    def silence(self) -> float:
        """The seconds since the last heartbeat."""
        now = self._world.loop.now
        since = self.ended_at if self.ended_at is not None else self.stopped_at if now < self.resumes_at else now
        return now - since
