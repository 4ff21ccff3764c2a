"""How ranks meet, and the channel on which plans travel."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from minisgl.core.errors import ConfigError, InvariantError, RankError
from minisgl.core.layout import SEQUENCE, Flag
from minisgl.core.params import Limits
from minisgl.core.plan import BatchPlan, StepResult
from minisgl.distributed.group import Group, meet
from minisgl.distributed.info import DistributedInfo, Rendezvous
from minisgl.scheduler.follower import replay
from minisgl.settings.options import EngineConfig
from support.processes import PATIENCE_S, eventually

NONE = np.empty(0, np.int32)


def rendezvous(size: int, where: Path | tuple[str, int]) -> list[Rendezvous]:
    is_path = isinstance(where, Path)
    infos = [DistributedInfo(rank, size, size) for rank in range(size)]
    return [Rendezvous(i, str(where) if is_path else "", None if is_path else where) for i in infos]


def meet_all(places: list[Rendezvous], settings: list[dict[str, str]]) -> list[Future[Group]]:
    with ThreadPoolExecutor(len(places)) as pool:
        return [pool.submit(meet, place, s, True) for place, s in zip(places, settings, strict=True)]


def plan(step: int) -> BatchPlan:
    sequences = np.array([(0, 0, step, Flag.SAMPLES)], SEQUENCE)
    return BatchPlan(step, sequences, np.arange(step, dtype=np.int32))


def free_address() -> tuple[str, int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.3", 0))
        return sock.getsockname()


@pytest.mark.parametrize("kind", ["path", "address"])
def test_plans_arrive_complete_and_in_order(tmp_path: Path, kind: str) -> None:
    places = rendezvous(3, tmp_path if kind == "path" else free_address())
    first, *others = [done.result() for done in meet_all(places, [{"a": "1"}] * 3)]
    plans = [plan(step) for step in (1, 2, 9, 40_000)]
    receivers = [threading.Thread(target=check_plans, args=(other, plans)) for other in others]
    for receiver in receivers:
        receiver.start()
    for each in plans:
        first.bus.publish(each.pack)
    first.bus.close()
    for receiver in receivers:
        receiver.join(PATIENCE_S)
        assert not receiver.is_alive()
    assert first.host == ("127.0.0.1" if kind == "path" else "127.0.0.3")
    first.store.set("x", "y")
    assert others[0].store.get("x") == b"y"


def check_plans(group: Group, plans: list[BatchPlan]) -> None:
    assert group.feed is not None
    for want in plans:
        frame = group.feed.receive()
        assert frame.plan == want.pack().tobytes()
    assert group.feed.receive().plan is None
    with pytest.raises(RankError):
        group.feed.receive()


def test_different_settings_are_refused_on_both_ranks(tmp_path: Path) -> None:
    for done in meet_all(rendezvous(2, tmp_path), [{"page_size": "16", "b": "2"}, {"page_size": "8", "b": "2"}]):
        with pytest.raises(ConfigError, match="rank 1 has page_size=8, rank 0 has 16"):
            done.result()


def test_unexpected_connections_are_dropped() -> None:
    address = free_address()
    places = rendezvous(2, address)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, places[0], {})
        for words in (b"GET / HTTP/1.0\r\n\r\n", b"\0\0\0\4junk", b""):
            connect(address, words)
        second = pool.submit(meet, places[1], {})
        first.result().bus.publish(plan(3).pack)
        feed = second.result().feed
        assert feed is not None and feed.receive().plan == plan(3).pack().tobytes()
    with pytest.raises(ConnectionRefusedError):  # all ranks have joined, so rank 0 has stopped listening
        socket.create_connection(address, timeout=PATIENCE_S)


def connect(address: tuple[str, int], words: bytes) -> None:
    """Connect and leave as soon as rank 0 listens."""

    def is_said() -> bool:
        try:
            with socket.create_connection(address, timeout=PATIENCE_S) as sock:
                sock.sendall(words)
        except ConnectionRefusedError:
            return False
        return True

    assert eventually(is_said)


def test_failed_rank_ends_the_meeting(tmp_path: Path) -> None:
    def check() -> None:
        raise ConfigError("it has failed")

    with pytest.raises(ConfigError, match="it has failed"):
        meet(rendezvous(2, tmp_path)[0], {}, False, check)


def test_loss_of_a_rank_is_detected(tmp_path: Path) -> None:
    first, second = [done.result() for done in meet_all(rendezvous(2, tmp_path), [{}, {}])]
    lost: list[int] = []
    first.bus.watch(lost.append)
    assert second.feed is not None
    second.feed.close()
    assert eventually(lambda: bool(lost))
    assert lost == [1]
    with pytest.raises(RankError, match="rank 1 is gone"):
        first.bus.publish(plan(1).pack)


class Echo:
    """An engine whose step gives one token: the length of the sequence, plus `error` and what its masks add up to."""

    limits = Limits(max_model_len=9, vocab_size=40)

    def __init__(self, error: int) -> None:
        self.error = error
        self.steps: list[int] = []

    def prepare(self, plan: BatchPlan) -> BatchPlan:
        return plan

    def launch(self, plan: BatchPlan) -> Echo.Output:
        self.steps.append(plan.step)
        return Echo.Output(int(plan.sequences["stop"][0]) + self.error)

    class Output:
        def __init__(self, token: int) -> None:
            self.token = token

        def sample(self, masks: np.ndarray) -> None:
            assert masks.shape == (1, 2)
            self.token += int(masks.sum())

        def wait(self) -> StepResult:
            return StepResult(np.array([self.token], np.int32), np.ones(1, np.int32))


def run_steps(tmp_path: Path, error: int, tamper: Callable[[Group], None] = lambda group: None) -> Echo:
    """Three plans, the results of which rank 0 notes one step late; the follower's tokens are off by `error`."""
    first, second = [done.result() for done in meet_all(rendezvous(2, tmp_path), [{}, {}])]
    engine = Echo(error)
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(replay, engine, second.feed)
        for step in (1, 2, 3):
            first.bus.publish(plan(step).pack)
            first.bus.publish_masks(np.array([[step, 7]], np.int32))
            if step > 1:
                first.bus.note_result(np.array([(step - 1) * 2 + 7], np.int32))
            tamper(first)
        first.bus.close()
        done.result(PATIENCE_S)
    return engine


def test_follower_replays_plans(tmp_path: Path) -> None:
    assert run_steps(tmp_path, error=0).steps == [1, 2, 3]


def test_follower_detects_different_tokens(tmp_path: Path) -> None:
    with pytest.raises(InvariantError, match="up to step 1 this rank has sampled other tokens"):
        run_steps(tmp_path, error=1)


def test_follower_detects_different_plans(tmp_path: Path) -> None:
    with pytest.raises(InvariantError, match="differs from rank 0's"):
        run_steps(tmp_path, 0, lambda group: group.bus._plans.add(b"one that never came"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp": 0}, "--tp 0"),
        ({"tp": 3, "nnodes": 2, "dist_init_addr": "h:1"}, "--tp 3"),
        ({"tp": 2, "nnodes": 2}, "--dist-init-addr"),
        ({"tp": 2, "dist_init_addr": "h:1"}, "--dist-init-addr"),
        ({"tp": 2, "nnodes": 2, "dist_init_addr": "nonsense"}, "is not HOST:PORT"),
        ({"tp": 2, "nnodes": 2, "dist_init_addr": "h:99999"}, "is not HOST:PORT"),
        ({"tp": 2, "nnodes": 2, "dist_init_addr": "h:1", "node_rank": 2}, "--node-rank 2"),
    ],
)
def test_impossible_rank_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rendezvous.of_local_ranks(EngineConfig(**settings), "")


def test_ranks_of_the_second_host() -> None:
    config = EngineConfig(tp=4, nnodes=2, node_rank=1, dist_init_addr="[::1]:77")
    ranks = Rendezvous.of_local_ranks(config, "")
    assert [(r.info.rank, r.info.local_rank) for r in ranks] == [(2, 0), (3, 1)]
    assert ranks[0].address == ("::1", 77)
