"""`--log-requests`: a line for each request, and none for what machines ask for every few seconds."""

from __future__ import annotations

import json
from typing import Any

import httpx

from e2e.harness import HELD, ServerProcess, eventually

TEXT = {"prompt": "a few words", "max_tokens": 3}


def lines_of(server: ServerProcess, count: int) -> list[dict[str, Any]]:
    """The JSON lines of the log that tell of requests, once there are so many."""

    def found() -> list[dict[str, Any]]:
        lines = (json.loads(line) for line in server.log.splitlines() if line.startswith("{"))
        return [line for line in lines if "path" in line]

    assert eventually(lambda: len(found()) >= count), server.log
    return found()


def test_each_request_has_a_line_with_its_tokens_and_times() -> None:
    flags = ("--log-requests", "--log-format", "json", "--api-key", "k")
    with ServerProcess(*flags, stub=True) as server, server.client(headers={"authorization": "Bearer k"}) as client:
        for quiet in ("/health", "/ready", "/metrics", "/health_generate", "/", "/docs", "/engine_view"):
            client.get(quiet)
        whole = client.post("/v1/completions", json=TEXT, headers={"x-request-id": "mine-1"})
        client.post("/v1/completions", json=TEXT | {"n": 2, "stream": True})
        client.post("/v1/completions", json=TEXT | {"temperature": -1})
        client.get("/v1/models", headers={"authorization": ""})
        client.get("/a%0Ab")
        with client.stream("POST", "/v1/completions", json=HELD) as held:
            next(held.iter_lines())
        client.post("/v1/completions", json={"prompt": "a few words !raise"})
        first, second, bad, refused, odd, left, *rest = lines_of(server, 7)
    assert first["request_id"] == "mine-1" == whole.headers["x-request-id"]
    assert (first["method"], first["path"], first["status"]) == ("POST", "/v1/completions", 200)
    usage = whole.json()["usage"]
    assert (first["prompt_tokens"], first["output_tokens"]) == (usage["prompt_tokens"], usage["completion_tokens"])
    assert first["finish_reason"] == "length" and first["total_ms"] >= first["ttft_ms"] > 0 <= first["queue_ms"]
    assert second["output_tokens"] == 2 * first["output_tokens"]  # of both choices, which share a prompt
    assert second["prompt_tokens"] == first["prompt_tokens"] and len(second["request_id"]) == 32
    assert bad["status"] == 400 and "output_tokens" not in bad
    assert refused["status"] == 401 and odd["status"] == 404 and odd["path"] == "/a%0Ab"
    assert left["finish_reason"] == "abort" and left["output_tokens"] == 1
    assert "a few words" not in server.log
    assert len(rest) <= 1


def test_text_lines_and_no_request_log_without_the_option() -> None:
    with ServerProcess("--log-requests", stub=True) as server:
        httpx.post(f"{server.url}/v1/completions", json=TEXT)
        assert eventually(lambda: " INFO minisgl-api: POST /v1/completions 200 request_id=" in server.log)
    with ServerProcess(stub=True) as server:
        httpx.post(f"{server.url}/v1/completions", json=TEXT)
        httpx.get(f"{server.url}/metrics")
    assert "/v1/completions 200" not in server.log
