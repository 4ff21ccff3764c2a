"""Several API processes on one port: every request finds back, and all of them end together."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from e2e.harness import ServerProcess, eventually, is_running, require_no_leak
from minisgl.core import FinishReason
from minisgl.message import Codec, ConversionReply, FrontendMsg, StatsMsg, UserReply
from minisgl.message.frontends import Frontends, uids_of, worker_of
from minisgl.utils.mp import ZmqPullQueue

FLAGS = ("--api-workers", "3", "--num-tokenizer", "2")
API = ("minisgl-api", "minisgl-api-1", "minisgl-api-2")


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*FLAGS, stub=True, env={"STUB_DELAY": "0.002"}) as server:
        yield server


def connections_of(pid: int) -> int:
    links = []
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            links.append(os.readlink(fd))
        except OSError:  # closed meanwhile
            continue
    established = {
        line.split()[9] for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:] if line.split()[3] == "01"
    }
    return sum(link.removeprefix("socket:[").removesuffix("]") in established for link in links)


def api_pids(server: ServerProcess) -> dict[str, int]:
    """Known to every process once each has had a heartbeat."""
    seen: dict[str, int] = {}  # of several answers: one may come from a process that does not know all yet
    assert eventually(lambda: bool(seen.update(server.info()["processes"])) or set(API) <= seen.keys(), 3)
    return {name: seen[name] for name in API}


def test_replies_go_to_who_asked_and_news_to_all(tmp_path: Path) -> None:
    addrs = [f"ipc://{tmp_path}/{i}" for i in range(3)]
    inboxes: list[ZmqPullQueue[FrontendMsg]] = [ZmqPullQueue(addr, Codec(FrontendMsg)) for addr in addrs]
    frontends = Frontends(addrs)
    uids = [uid for worker in range(3) for uid, _ in zip(uids_of(worker, 3), range(4), strict=False)]
    assert len(set(uids)) == 12 and 0 not in uids
    end = UserReply(uids[5], finish_reason=FinishReason.STOP)
    frontends.put([UserReply(u, str(u)) for u in uids] + [StatsMsg(step=7), ConversionReply(uids[5]), end])
    for worker, inbox in enumerate(inboxes):
        got = inbox.get(5)
        own = [m for m in got if isinstance(m, UserReply | ConversionReply)]
        assert all(worker_of(m.uid, 3) == worker for m in own)
        assert [m for m in got if isinstance(m, StatsMsg)] == [StatsMsg(step=7)]
        assert len(own) == (6 if worker == worker_of(uids[5], 3) else 4)
        inbox.close()
    frontends.close()


def test_every_request_is_answered_and_counted(server: ServerProcess) -> None:
    pids = api_pids(server)
    assert len(set(pids.values())) == 3
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    held = [socket.create_connection(address) for _ in range(48)]
    assert eventually(lambda: sum(connections_of(pid) for pid in pids.values()) >= 48, 5)
    shares = [connections_of(pid) for pid in pids.values()]
    for s in held:
        s.close()
    assert max(shares) < 48, f"one process took all connections: {shares}"

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

    assert eventually(lambda: counts() == {(60.0, 60.0)}, 5), counts()
    require_no_leak(server)


def test_who_leaves_is_aborted(server: ServerProcess) -> None:
    body = {"prompt": "word " * 1500, "stream": True}
    for _ in range(12):
        with server.client() as client, client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_lines())
    require_no_leak(server)
    with server.client() as client:
        assert client.get("/health").status_code == 200
        assert client.post("/flush_cache").status_code == 200


def streams(server: ServerProcess, n: int) -> list[tuple[httpx.Client, httpx.Response, Iterator[str]]]:
    """`n` streams that have begun, with connections of their own."""
    opened = []
    for i in range(n):
        client = server.client()
        request = client.build_request("POST", "/v1/completions", json={"prompt": f"{i} " * 300, "stream": True})
        response = client.send(request, stream=True)
        lines = response.iter_lines()
        next(lines)
        opened.append((client, response, lines))
    return opened


def test_all_streams_are_drained() -> None:
    with ServerProcess("--api-workers", "2", stub=True, env={"STUB_DELAY": "0.003"}) as server:
        pids = server.info()["processes"]
        opened = streams(server, 9)
        os.killpg(server.process.pid, signal.SIGTERM)
        for client, _, lines in opened:
            rest = [line for line in lines if line]
            assert '"finish_reason":"length"' in rest[-2], rest[-2]
            client.close()
        assert server.wait(8) == 0
        assert "Traceback" not in server.log
        assert not any(is_running(pid) for pid in pids.values())


def test_killed_worker_ends_the_server(server: ServerProcess) -> None:  # the last test that needs it
    pids = api_pids(server)
    opened = streams(server, 9)
    victim = next(name for name in API[1:] if connections_of(pids[name]))
    others = server.info()["processes"]
    os.kill(pids[victim], signal.SIGKILL)
    told = broken = 0
    for client, _, lines in opened:
        try:
            rest = [line for line in lines if line]
            assert f"{victim} was killed by signal 9" in rest[-2] and rest[-1] == "data: [DONE]"
            told += 1
        except httpx.RemoteProtocolError:  # it was the victim's
            broken += 1
        client.close()
    assert told and broken
    assert server.wait(8) == 1
    assert not any(is_running(pid) for pid in others.values())
    assert server.run_dirs == []
