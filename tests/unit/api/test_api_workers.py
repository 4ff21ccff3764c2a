"""Several API processes on one port: every request finds back, and all of them end together."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from e2e.harness import (
    HELD,
    PATIENCE_S,
    ServerProcess,
    eventually,
    is_running,
    release,
    require_no_leak,
    stopped,
)
from minisgl.core import FinishReason
from minisgl.message import Codec, ConversionReply, FrontendMsg, StatsMsg, UserReply
from minisgl.message.frontends import Frontends, uids_of, worker_of
from minisgl.process.queues import ZmqPullQueue

FLAGS = ("--api-workers", "3", "--num-tokenizer", "2")
API = ("minisgl-api", "minisgl-api-1", "minisgl-api-2")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*FLAGS, stub=True, env={"STUB_DELAY": "0.002"}) as server:
        yield server


def api_pids(server: ServerProcess, workers: int = 3) -> dict[str, int]:
    """Known to every process once each has had a heartbeat."""
    names = API[:workers]
    seen: dict[str, int] = {}  # of several answers: one may come from a process that does not know all yet
    assert eventually(lambda: bool(seen.update(server.info()["processes"])) or set(names) <= seen.keys())
    return {name: seen[name] for name in names}


def others_of(name: str, pids: dict[str, int]) -> list[int]:
    return [pid for other, pid in pids.items() if other != name]


def test_replies_go_to_who_asked_and_news_to_all(tmp_path: Path) -> None:
    addrs = [f"ipc://{tmp_path}/{i}" for i in range(3)]
    inboxes: list[ZmqPullQueue[FrontendMsg]] = [ZmqPullQueue(addr, Codec(FrontendMsg)) for addr in addrs]
    frontends = Frontends(addrs)
    uids = [uid for worker in range(3) for uid, _ in zip(uids_of(worker, 3), range(4), strict=False)]
    assert len(set(uids)) == 12 and 0 not in uids
    end = UserReply(uids[5], finish_reason=FinishReason.STOP)
    frontends.put([UserReply(u, str(u)) for u in uids] + [StatsMsg(step=7), ConversionReply(uids[5]), end])
    for worker, inbox in enumerate(inboxes):
        got = inbox.get(PATIENCE_S)
        own = [m for m in got if isinstance(m, UserReply | ConversionReply)]
        assert all(worker_of(m.uid, 3) == worker for m in own)
        assert [m for m in got if isinstance(m, StatsMsg)] == [StatsMsg(step=7)]
        assert len(own) == (6 if worker == worker_of(uids[5], 3) else 4)
        inbox.close()
    frontends.close()


def test_whichever_is_free_takes_the_next_connection(server: ServerProcess) -> None:
    pids = api_pids(server)
    assert len(set(pids.values())) == 3
    for name in pids:
        with stopped(*others_of(name, pids)), server.client() as client:
            assert client.get("/health").status_code == 200


def test_every_request_is_answered_and_counted(server: ServerProcess) -> None:
    def ask(i: int) -> None:
        text = f"number {i} of many, says 你好 {i * 977}"
        with server.client() as client:
            if i % 3 == 0:
                ids = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
                assert client.post("/detokenize", json={"tokens": ids}).json()["prompt"] == text
            elif i % 3 == 1:
                body = {"prompt": text, "stream": True}
                with client.stream("POST", "/v1/completions", json=body) as response:
                    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
                assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == text
            else:
                answer = client.post("/v1/completions", json={"prompt": text, "n": 2}).json()
                assert [c["text"] for c in answer["choices"]] == [text, text]

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(ask, range(60)))

    def counts() -> set[tuple[float, float]]:
        """What several processes say, each of them for all."""
        found = set()
        for _ in range(12):
            with server.client() as client:  # a connection of its own
                text = client.get("/metrics").text
            ends = sum(map(float, re.findall(r"request_success_total\{.*\} (\S+)", text)))
            first = float(re.findall(r"time_to_first_token_seconds_count\{.*\} (\S+)", text)[0])
            found.add((ends, first))
        return found

    assert eventually(lambda: counts() == {(60.0, 60.0)}), counts()
    require_no_leak(server)


def test_who_leaves_is_aborted(server: ServerProcess) -> None:
    for _ in range(12):
        with server.client() as client, client.stream("POST", "/v1/completions", json=HELD) as response:
            next(response.iter_lines())
    require_no_leak(server)
    with server.client() as client:
        assert client.get("/health").status_code == 200
        assert client.post("/flush_cache").status_code == 200


Stream = tuple[httpx.Client, httpx.Response, Iterator[str]]


def open_stream(server: ServerProcess) -> Stream:
    """One that has begun and does not end by itself, with a connection of its own."""
    client = server.client()
    response = client.send(client.build_request("POST", "/v1/completions", json=HELD), stream=True)
    lines = response.iter_lines()
    next(lines)
    return client, response, lines


def open_streams(server: ServerProcess, pids: dict[str, int]) -> dict[str, list[Stream]]:
    """Three with each API process."""
    opened = {}
    for name in pids:
        with stopped(*others_of(name, pids)):
            opened[name] = [open_stream(server) for _ in range(3)]
    return opened


def test_all_streams_are_drained() -> None:
    with ServerProcess("--api-workers", "2", "--drain-timeout", "600", stub=True) as server:
        opened = open_streams(server, api_pids(server, 2))
        pids = server.info()["processes"]
        os.killpg(server.process.pid, signal.SIGTERM)
        assert eventually(lambda: "finishing " in server.log)
        release(server)
        for client, _, lines in itertools.chain(*opened.values()):
            rest = [line for line in lines if line]
            assert '"finish_reason":"length"' in rest[-2], rest[-2]
            client.close()
        assert server.wait() == 0
        assert "Traceback" not in server.log
        assert not any(is_running(pid) for pid in pids.values())


def test_killed_worker_ends_the_server(server: ServerProcess) -> None:  # the last test that needs it
    pids = api_pids(server)
    opened = open_streams(server, pids)
    processes = server.info()["processes"]
    victim = API[1]
    os.kill(pids[victim], signal.SIGKILL)
    for name, streams in opened.items():
        for client, _, lines in streams:
            if name == victim:
                with pytest.raises(httpx.RemoteProtocolError):
                    list(lines)
            else:
                rest = [line for line in lines if line]
                assert f"{victim} was killed by signal 9" in rest[-2] and rest[-1] == "data: [DONE]"
            client.close()
    assert server.wait() == 1
    assert not any(is_running(pid) for pid in processes.values())
    assert server.run_dirs == []
