"""`minisgl.ray` on a local cluster of two nodes: replicas come, die and go while requests run, and none is lost.

`make ray` runs this file in an environment with Ray, which the other tests do not need.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from e2e.harness import PATIENCE_S
from minisgl.core.errors import ConfigError

ray = pytest.importorskip("ray")

from ray import serve  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402

from minisgl.ray import app  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own
PORT = 8317
COUNTERS = ("lost_replicas", "moved_requests")
STREAMS, TOKENS = 12, 600
# What the streams ask for in turn: each continues on another replica as if nothing had happened.
VARIANTS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 1},
    {"temperature": 1, "frequency_penalty": 0.5, "top_p": 0.9},
    {"temperature": 0, "logprobs": 2},
    {"temperature": 1, "structured_outputs": {"regex": "[a-z ,.]+"}},
    {"temperature": 1, "n": 2},
]
CPU: dict[str, Any] = {"device": "cpu", "threads": 1, "auth": "false", "max_seq_len": 2048}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One node, which has room for the API process and a replica; another node with room for a replica comes later."""
    cluster = Cluster(initialize_head=True, connect=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    try:
        serve.start(proxy_location="HeadOnly", http_options={"port": PORT})  # both nodes have one address
        yield cluster
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://127.0.0.1:{PORT}", timeout=4 * PATIENCE_S, trust_env=False) as client:
        yield client


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 2 * PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.1)


def num_replicas(client: httpx.Client) -> int:
    response = client.get("/server_info")
    return len(response.json()["replicas"]) if response.status_code == 200 else 0


def figures(client: httpx.Client) -> tuple[float, float]:
    """How many replicas were lost, and how many requests have moved."""
    values = dict(line.rsplit(" ", 1) for line in client.get("/metrics").text.splitlines() if line[:1] != "#")
    lost, moved = (values[f'minisgl:{name}_total{{model_name="minisgl-demo"}}'] for name in COUNTERS)
    return float(lost), float(moved)


def stream(client: httpx.Client, number: int) -> dict[int, str]:
    """The text of each choice of a stream, which must be complete; under -1 the log-probabilities of its tokens."""
    variant = VARIANTS[number % len(VARIANTS)]
    body = {
        "prompt": f"Story number {number}: once upon a time",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": number,
        **variant,
    }
    events = []
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, response.read()
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert not [c for c in chunks if "error" in c]
    n = variant.get("n", 1)
    assert chunks.pop()["usage"]["completion_tokens"] == n * TOKENS
    texts = dict.fromkeys(range(n), "")
    ends = []
    for choice in (chunk["choices"][0] for chunk in chunks):
        texts[choice["index"]] += choice["text"]
        if choice["logprobs"]:
            texts[-1] = texts.get(-1, "") + "".join(f"{p};" for p in choice["logprobs"]["token_logprobs"])
        ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    assert ends == ["length"] * n
    return texts


def scheduler_of(node: Any) -> int:
    """The process that schedules the replica on `node`: a child of a worker of its raylet."""
    (raylet,) = (info.process.pid for info in node.all_processes["raylet"])
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = stat.read_text().rpartition(")")
            parents[int(stat.parent.name)] = int(rest.split()[1]), name.partition("(")[2]
    (pid,) = (
        pid
        for pid, (parent, name) in parents.items()
        if name == "minisgl-TP0-sch" and parents.get(parent, (0, ""))[0] == raylet
    )
    return pid


def start_streams(pool: ThreadPoolExecutor, client: httpx.Client) -> list[Future[dict[int, str]]]:
    return [pool.submit(stream, client, number) for number in range(STREAMS)]


def test_no_request_is_lost(cluster: Cluster, client: httpx.Client) -> None:
    scale = {"max_replicas": 2, "target_requests": 4, "upscale_delay": 0.5, "downscale_delay": 3}
    serve.run(app(CPU | scale), name="llm")
    wait_for(lambda: num_replicas(client) == 1, "replica")
    cluster.add_node(num_cpus=1)
    with ThreadPoolExecutor(STREAMS) as pool:
        # Scale up: many requests wait for the only replica.
        expected: list[dict[int, str]] = []
        deadline = time.monotonic() + 2 * PATIENCE_S
        while num_replicas(client) < 2:
            assert time.monotonic() < deadline, "the second replica does not come"
            texts = [s.result() for s in start_streams(pool, client)]
            assert not expected or texts == expected
            expected = texts
        # A prompt goes where its prefix is cached.
        for salt in ("one", "two", "three"):
            body = {"prompt": "a long prefix " * 40, "max_tokens": 1, "cache_salt": salt}
            reused = [client.post("/v1/completions", json=body).json()["usage"] for _ in range(4)]
            assert all(u["prompt_tokens_details"]["cached_tokens"] > 32 for u in reused[1:]), reused
        # Kill the scheduler of the second replica: its requests go on in the first one, and it is replaced.
        (second,) = cluster.worker_nodes
        lost, moved = figures(client)
        streams = start_streams(pool, client)
        wait_for(lambda: all(r["requests"] for r in client.get("/server_info").json()["replicas"]), "use of both")
        os.kill(scheduler_of(second), signal.SIGKILL)
        assert [s.result() for s in streams] == expected
        assert figures(client)[0] == lost + 1 and figures(client)[1] > moved
        while num_replicas(client) < 2:
            assert time.monotonic() < deadline + PATIENCE_S, "the replica is not replaced"
            assert [s.result() for s in start_streams(pool, client)] == expected
        # Kill the second node: the same.
        lost, moved = figures(client)
        streams = start_streams(pool, client)
        wait_for(lambda: all(r["requests"] for r in client.get("/server_info").json()["replicas"]), "use of both")
        cluster.remove_node(second, allow_graceful=False)
        assert [s.result() for s in streams] == expected
        assert figures(client)[0] == lost + 1 and figures(client)[1] > moved
        # A new node: under load there are two replicas again.
        cluster.add_node(num_cpus=1)
        while num_replicas(client) < 2:
            assert time.monotonic() < deadline + 2 * PATIENCE_S, "the second replica does not come back"
            assert [s.result() for s in start_streams(pool, client)] == expected
        # Scale down: two requests are too few for two replicas. One of them must move, or end where it is.
        few = {0: pool.submit(stream, client, 0), 1: pool.submit(stream, client, 1)}
        while num_replicas(client) > 1:
            assert time.monotonic() < deadline + 4 * PATIENCE_S, "the second replica stays"
            for number, future in few.items():
                if future.done():
                    assert future.result() == expected[number]
                    few[number] = pool.submit(stream, client, number)
        assert [f.result() for f in few.values()] == expected[:2]
    # The API process dies. Another one takes the replica over and ends the requests of the dead one.
    life = client.get("/server_info").json()["stats"]["life"]
    with client.stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 1900, "stream": True}) as left:
        lines = left.iter_lines()
        next(lines)
        os.kill(client.get("/server_info").json()["processes"]["minisgl-api"], signal.SIGKILL)
        with contextlib.suppress(httpx.HTTPError):
            assert "data: [DONE]" not in list(lines)
    wait_for(lambda: num_replicas(client) == 1, "API process")
    assert stream(client, 1) == expected[1]
    assert client.get("/server_info").json()["stats"]["life"] == life
    wait_for(
        lambda: client.get("/server_info").json()["stats"]["running"] == 0,
        "the end of the requests of the dead API process",
    )
    kept = ("frontend_entries", "detokenizer_entries")
    wait_for(lambda: not any(client.get("/server_info").json()[name] for name in kept), "end of all requests")
    serve.delete("llm")


def test_ranks_on_two_nodes_meet(cluster: Cluster, client: httpx.Client) -> None:
    serve.run(app(CPU | {"tp": 2, "nnodes": 2}), name="wide")
    wait_for(lambda: num_replicas(client) == 1, "replica")
    assert client.get("/server_info").json()["engine"]["tensor_parallel"] == 2
    groups = [g for g in ray.util.placement_group_table().values() if g["state"] == "CREATED"]
    assert [len(set(g["bundles_to_node_id"].values())) for g in groups] == [2]
    assert len(stream(client, 0)[0]) > TOKENS
    serve.delete("wide")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 1}, "port: leave this option out"),
        ({"auth": "true"}, "give api_key_file"),
        ({"tp": 3, "nnodes": 2}, "cannot be spread evenly"),
        ({"threads": None}, "give threads=N with device=cpu"),
        ({"disk_kv": "/tmp/kv:1G", "max_replicas": 2}, "disk_kv needs max_replicas=1"),
        ({"min_replicas": 2}, "max_replicas=1 is below min_replicas=2"),
        ({"max_replicas": "none"}, "max_replicas='none' is not of type int"),
        ({"replicas": 2}, "replicas is not an option"),
    ],
)
def test_bad_options_are_one_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        app(CPU | options)
