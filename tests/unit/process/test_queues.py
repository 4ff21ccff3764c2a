"""The queues over real sockets."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl.core.message import AbortMsg, TokenizerMsg
from minisgl.process import queues
from minisgl.process.queues import Codec, ZmqAsyncPullQueue, ZmqPullQueue, ZmqPushQueue
from support.processes import PATIENCE_S

CODEC: Codec[TokenizerMsg] = Codec(TokenizerMsg)


@pytest.fixture
def addr(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/q"


@pytest.fixture
def pull(addr: str) -> Iterator[ZmqPullQueue[TokenizerMsg]]:
    queue = ZmqPullQueue(addr, CODEC)
    yield queue
    queue.close()


@pytest.fixture
def push(addr: str) -> Iterator[ZmqPushQueue[TokenizerMsg]]:
    queue = ZmqPushQueue(addr, CODEC)
    yield queue
    queue.close()


def test_messages_keep_their_order_over_several_frames(
    push: ZmqPushQueue[TokenizerMsg], pull: ZmqPullQueue[TokenizerMsg]
) -> None:
    """The sender may be there first; one `get` takes several frames."""
    for uid in range(0, 100, 2):
        push.put([AbortMsg(uid), AbortMsg(uid + 1)])
    got: list[TokenizerMsg] = []
    while len(got) < 100:
        new = pull.get(timeout=PATIENCE_S)
        assert new
        got += new
    assert got == [AbortMsg(uid) for uid in range(100)]


def test_get_waits_up_to_its_timeout(pull: ZmqPullQueue[TokenizerMsg], push: ZmqPushQueue[TokenizerMsg]) -> None:
    def seconds(timeout: float) -> float:
        """The shortest of several waits, because a single one depends on the load of the machine."""
        times = []
        for _ in range(5):
            started = time.monotonic()
            assert pull.get(timeout=timeout) == []
            times.append(time.monotonic() - started)
        return min(times)

    assert seconds(0) < 0.05
    assert 0.02 < seconds(0.03) < 1
    push.put([AbortMsg(1)])
    assert pull.get() == [AbortMsg(1)]


def test_one_get_takes_a_bounded_number_of_frames(
    push: ZmqPushQueue[TokenizerMsg], pull: ZmqPullQueue[TokenizerMsg], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queues, "MAX_FRAMES", 3)
    for uid in range(1000):
        push.put([AbortMsg(uid)])
    got = 0
    while got < 1000:
        new = pull.get(timeout=PATIENCE_S)
        assert 1 <= len(new) <= 3
        got += len(new)


def test_invalid_frames_are_logged_and_skipped(
    push: ZmqPushQueue[TokenizerMsg], pull: ZmqPullQueue[TokenizerMsg], caplog: pytest.LogCaptureFixture
) -> None:
    nested = b"\x91" * 100_000
    for frame in (b"", b"\xc1", b"\x91\x81\xa4type\xa4exit", b"\x91\x82\xa4type\xa5abort\xa3uid\xa1x", nested):
        push._socket.send(frame)
    push.put([AbortMsg(7)])
    got: list[TokenizerMsg] = []
    with caplog.at_level(logging.ERROR):
        while not got:
            got = pull.get(timeout=PATIENCE_S)
    assert got == [AbortMsg(7)]
    assert len(caplog.records) == 5


def test_put_does_not_block_before_the_receiver_has_bound(push: ZmqPushQueue[TokenizerMsg]) -> None:
    """More messages than ZeroMQ's default limit of 1,000."""
    for uid in range(5000):
        push.put([AbortMsg(uid)])


def test_async_queues_keep_the_order(addr: str) -> None:
    async def run() -> list[TokenizerMsg]:
        pull: ZmqAsyncPullQueue[TokenizerMsg] = ZmqAsyncPullQueue(addr, CODEC)
        push: ZmqPushQueue[TokenizerMsg] = ZmqPushQueue(addr, CODEC)
        got: list[TokenizerMsg] = []

        async def receive() -> None:
            while len(got) < 300:
                got.extend(await pull.get())

        receiver = asyncio.create_task(receive())
        for uid in range(300):
            push.put([AbortMsg(uid)])
            if uid % 50 == 0:
                await asyncio.sleep(0.01)
        await asyncio.wait_for(receiver, PATIENCE_S)
        pull.close()
        push.close()
        return got

    assert asyncio.run(run()) == [AbortMsg(uid) for uid in range(300)]
