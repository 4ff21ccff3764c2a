"""Replicas behind one address: each answers, one that dies loses no request, and signals renew, add and end them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from e2e.harness import PATIENCE_S, ServerProcess, eventually, require_no_leak
from e2e.test_matrix import TOOLS
from e2e.test_processes import run_cli

STORY: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 500, "ignore_eos": True, "temperature": 0}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 200}
TEXT, CHATS = "/v1/completions", "/v1/chat/completions"
NAMES = {"type": "array", "items": {"type": "string", "maxLength": 8}, "minItems": 24, "maxItems": 24}
# One of each kind of request whose state must go on in another replica.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (TEXT, STORY),
    "seed": (TEXT, STORY | {"temperature": 1.0, "seed": 7}),
    "filters": (TEXT, STORY | {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": 8}),
    "penalties": (TEXT, STORY | {"presence_penalty": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.1}),
    "bias": (TEXT, STORY | {"logit_bias": {"300": 1.5}, "temperature": 0.8, "seed": 9}),
    "min_tokens": (TEXT, STORY | {"ignore_eos": False, "min_tokens": 150}),
    "stop": (TEXT, STORY | {"stop": ["never to be found", "\n\n\n"]}),
    "stop found": (TEXT, STORY | {"stop": ["garden", "forest", "said"], "min_tokens": 60}),
    "logprobs": (TEXT, STORY | {"logprobs": 3}),
    "echo": (TEXT, STORY | {"logprobs": 2, "echo": True}),
    "two": (TEXT, STORY | {"n": 2, "temperature": 1.0, "seed": 10}),
    "ids": (TEXT, STORY | {"return_token_ids": True}),
    "chat": (CHATS, CHAT | {"temperature": 0.9, "seed": 11}),
    "chat logprobs": (CHATS, CHAT | {"logprobs": True, "top_logprobs": 2, "temperature": 0}),
    "regex": (TEXT, STORY | {"guided_regex": "([a-z]{3} ){60}"}),
    "json": (CHATS, CHAT | {"guided_json": NAMES, "temperature": 1.0, "seed": 12}),
    "tools": (CHATS, CHAT | {"tools": TOOLS, "tool_choice": "required", "temperature": 1.0, "seed": 13}),
    "salt": (TEXT, STORY | {"cache_salt": "mine"}),
}


@pytest.fixture(scope="module")
def pair() -> Iterator[ServerProcess]:
    with ServerProcess("--dp", "2", "--num-pages", "2048", "--drain-timeout", "600") as server:
        yield server


def merged(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a stream says, however it is cut into events."""
    said: dict[str, Any] = {}
    for event in events:
        assert "error" not in event, event
        for choice in event["choices"]:
            mine = said.setdefault(f"choice {choice['index']}", {"text": "", "logprobs": {}, "ids": [], "tools": ""})
            delta = choice.get("delta", {})
            mine["text"] += choice.get("text") or delta.get("content") or ""
            for call in delta.get("tool_calls") or []:
                mine["tools"] += (call["function"].get("name") or "") + (call["function"].get("arguments") or "")
            for name, values in (choice.get("logprobs") or {}).items():
                mine["logprobs"].setdefault(name, []).extend(values or [])
            mine["ids"] += choice.get("token_ids") or []
            if choice.get("finish_reason"):
                assert "end" not in mine, f"a second end: {event}"
                mine["end"] = choice["finish_reason"], choice.get("stop_reason")
        if event.get("usage"):
            said["usage"] = {k: v for k, v in event["usage"].items() if isinstance(v, int)}
    return said


class Streams:
    """Concurrent streams of requests; `begun` counts those that have their first text."""

    def __init__(self, url: str) -> None:
        limits = httpx.Limits(max_connections=200)
        self.client = httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False, limits=limits)
        self.begun = 0

    async def one(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        events = []
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        async with self.client.stream("POST", path, json=asked) as response:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                events.append(json.loads(line.removeprefix("data: ")))
                self.begun += len(events) == 1
        return merged(events)

    async def all(self, requests: list[tuple[str, dict[str, Any]]]) -> list[asyncio.Task[dict[str, Any]]]:
        tasks = [asyncio.create_task(self.one(*request)) for request in requests]
        while self.begun < len(tasks):
            await asyncio.wait(tasks, timeout=0.005, return_when="FIRST_EXCEPTION")
        assert not all(task.done() for task in tasks)
        return tasks


def schedulers(server: ServerProcess) -> dict[str, int]:
    return {name: pid for name, pid in server.info()["processes"].items() if "scheduler" in name}


def is_whole(server: ServerProcess, count: int = 2) -> bool:
    return len(server.info()["replicas"]) == count


def test_streams_of_every_kind_survive_the_death_of_a_replica(pair: ServerProcess) -> None:
    requests = [*KINDS.values()] * 2

    async def run(victim: int | None) -> list[dict[str, Any]]:
        streams = Streams(pair.url)
        async with streams.client:
            tasks = await streams.all(requests)
            if victim is not None:
                os.kill(victim, signal.SIGKILL)
            return [await task for task in tasks]

    expected = asyncio.run(run(None))  # first, so that no stream ends while a replica tries the grammars of others
    before = schedulers(pair)
    answers = asyncio.run(run(before["minisgl-DP0-TP0-scheduler"]))
    assert eventually(lambda: is_whole(pair))
    after = schedulers(pair)
    assert [name for name in before if after[name] != before[name]] == ["minisgl-DP0-TP0-scheduler"]
    for (path, body), answer, solo in zip(requests, answers, expected, strict=True):
        assert answer == solo, f"{path} {body}"
    assert pair.metrics()["moved_requests_total"] > len(requests) // 4
    require_no_leak(pair)


def test_each_replica_can_be_seen(pair: ServerProcess) -> None:
    with pair.client() as client:
        assert [client.get(f"/engine_view?replica={index}").status_code for index in (0, 1, 7)] == [200, 200, 404]
        assert 'minisgl:replica_requests{model_name="minisgl-demo",replica="1"}' in client.get("/metrics").text


def test_signals_renew_add_and_end_replicas_under_traffic() -> None:
    """No request fails meanwhile, and those that a draining replica keeps too long go on elsewhere."""
    with ServerProcess("--dp", "2", "--num-pages", "2048", "--drain-timeout", "0.3") as server:

        async def change(number: signal.Signals, is_done: Callable[[], bool]) -> None:
            requests = [KINDS[kind] for kind in ("greedy", "seed", "json", "logprobs")]
            streams = Streams(server.url)
            async with streams.client:
                tasks = await streams.all(requests)
                server.process.send_signal(number)
                answers = [await task for task in tasks]
                assert await asyncio.to_thread(eventually, is_done)
                expected = await asyncio.gather(*(streams.one(*request) for request in requests))
            assert answers == list(expected)

        before = schedulers(server)
        asyncio.run(change(signal.SIGUSR2, lambda: not {*before.values()} & {*schedulers(server).values()}))
        assert eventually(lambda: is_whole(server))
        assert [*before] == [*schedulers(server)]
        asyncio.run(change(signal.SIGTTIN, lambda: is_whole(server, 3)))
        asyncio.run(change(signal.SIGTTOU, lambda: is_whole(server, 2)))
        assert eventually(lambda: len(schedulers(server)) == 2)
        require_no_leak(server)
        assert server.metrics()["lost_replicas_total"] == 0
    assert "Traceback" not in server.log


def test_without_a_replica_requests_are_refused_at_once_and_served_again_later() -> None:
    with ServerProcess("--dp", "2", "--num-pages", "512") as server, server.client() as client:
        with client.stream("POST", TEXT, json=STORY | {"max_tokens": 1500, "stream": True}) as response:
            lines = response.iter_lines()
            next(lines)
            for pid in schedulers(server).values():
                os.kill(pid, signal.SIGKILL)
            began = time.monotonic()
            assert eventually(lambda: client.get("/health").status_code == 503)
            refused = client.post(TEXT, json=STORY)
            assert (refused.status_code, time.monotonic() - began < 1.0) == (503, True)
            assert "replica" in refused.json()["error"]["message"]
            rest = [line for line in lines if line]
            assert "error" in json.loads(rest[-2].removeprefix("data: "))
        assert eventually(lambda: is_whole(server))
        assert client.post(TEXT, json=STORY).status_code == 200
        require_no_leak(server)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--dp", "64"), "--dp 64 --tp 1 is too much for a machine"),
        (("--dp", "2", "--nnodes", "2", "--tp", "2"), "--dp works on one host only"),
        (("--dp", "2", "--record", "file"), "--record works with one replica only"),
        (("--dp", "0"), "--dp 0 must be at least 1"),
    ],
)
def test_impossible_replicas_end_the_start_with_a_sentence(flags: tuple[str, ...], sentence: str) -> None:
    result = run_cli("--port", "0", *flags)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert len(result.stderr.splitlines()) == 1
