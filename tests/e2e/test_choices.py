"""`n` and the receipt through the official client and raw HTTP, against a real server with the built-in model."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from e2e.harness import ServerProcess, eventually, require_no_leak
from minisgl.checkpoint.hf import BUILTIN_MODEL

MODEL = "minisgl-demo"
USER: Any = [{"role": "user", "content": "Tell me a story about a cat named Tom."}]
STOPS = ["e", "the"]


def post_events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[Any]:
    """The events of a stream without its [DONE]."""
    with http.stream("POST", path, json=body | {"stream": True}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_seeded_choices_do_not_depend_on_other_requests(client: openai.OpenAI) -> None:
    def draw(**fields: Any) -> list[str]:
        answer = client.chat.completions.create(
            model=MODEL, messages=USER, temperature=1.5, max_tokens=16, seed=7, **fields
        )
        assert [c.index for c in answer.choices] == list(range(fields.get("n", 1)))
        return [c.message.content or "" for c in answer.choices]

    four = draw(n=4)
    assert draw(n=4) == four
    assert draw(n=2) == four[:2]
    assert draw() == four[:1]
    assert len(set(four)) > 1


def test_greedy_choices_are_equal(client: openai.OpenAI) -> None:
    one = client.chat.completions.create(model=MODEL, messages=USER, temperature=0, max_tokens=20)
    answer = client.chat.completions.create(model=MODEL, messages=USER, temperature=0, max_tokens=20, n=5)
    assert {c.message.content for c in answer.choices} == {one.choices[0].message.content}
    assert answer.usage is not None and one.usage is not None
    assert answer.usage.prompt_tokens == one.usage.prompt_tokens
    assert answer.usage.completion_tokens == 5 * one.usage.completion_tokens
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_stop_string_is_shown_on_request(http: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 40, "stop": STOPS}
    hidden = http.post("/v1/completions", json=body).json()["choices"][0]
    body["include_stop_str_in_output"] = True
    shown = http.post("/v1/completions", json=body).json()["choices"][0]
    assert shown == hidden | {"text": hidden["text"] + hidden["stop_reason"]}
    assert "".join(e["choices"][0]["text"] for e in post_events(http, "/v1/completions", body)) == shown["text"]


def test_requests_with_another_salt_share_no_prefix(client: openai.OpenAI) -> None:
    def cached(**fields: Any) -> int:
        story: Any = [
            {"role": "user", "content": "Tell me a story about a fox named Salina, who lived by the salt lake."}
        ]
        answer = client.chat.completions.create(model=MODEL, messages=story, max_tokens=1, extra_body=fields)
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert cached(cache_salt="anna") == 0
    assert cached() == cached(cache_salt="ben") == 0
    assert cached(cache_salt="anna") == cached() == cached(cache_salt="ben") > 0


@pytest.mark.parametrize("stop", [None, STOPS])
def test_streamed_choices_equal_the_body(client: openai.OpenAI, stop: list[str] | None) -> None:
    fields: dict[str, Any] = {"temperature": 1.2, "seed": 3, "n": 4, "stop": stop, "max_tokens": 40}
    whole = client.chat.completions.create(model=MODEL, messages=USER, **fields)
    stream = client.chat.completions.create(
        model=MODEL, messages=USER, stream=True, stream_options={"include_usage": True}, **fields
    )
    texts, reasons = [""] * 4, [""] * 4
    *chunks, last = list(stream)
    for chunk in chunks:
        (choice,) = chunk.choices
        assert not reasons[choice.index]  # nothing follows an end
        texts[choice.index] += choice.delta.content or ""
        reasons[choice.index] = choice.finish_reason or ""
    assert texts == [c.message.content for c in whole.choices]
    assert reasons == [c.finish_reason for c in whole.choices]
    if stop is not None:
        assert "stop" in reasons
        assert not any(s in text for s in STOPS for text in texts)
    assert last.choices == []
    assert last.usage is not None and whole.usage is not None
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens
    assert last.usage.completion_tokens == whole.usage.completion_tokens


def test_choices_of_many_prompts_are_ordered_by_prompt(client: openai.OpenAI, http: httpx.Client) -> None:
    fields: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "seed": 5}
    prompts = ["Once upon a time", "The"]
    both = client.completions.create(model=MODEL, prompt=prompts, n=2, best_of=2, **fields)
    alone = [client.completions.create(model=MODEL, prompt=p, n=2, **fields) for p in prompts]
    assert [c.index for c in both.choices] == [0, 1, 2, 3]
    assert [c.text for c in both.choices] == [c.text for answer in alone for c in answer.choices]
    assert both.usage is not None
    assert both.usage.prompt_tokens == sum(a.usage.prompt_tokens for a in alone if a.usage)
    texts = [""] * 4
    for chunk in post_events(http, "/v1/completions", {"prompt": prompts, "n": 2, **fields}):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == [c.text for c in both.choices]
    results = http.post("/generate", json={"text": "The", "sampling_params": {"n": 3, "temperature": 0}}).json()
    assert len(results) == 3 and len({r["text"] for r in results}) == 1


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("n", [0, -1, 1000, 2**70, "a", 1.5, True, [2]])
@pytest.mark.parametrize("stream", [False, True])
def test_bad_n_is_refused(http: httpx.Client, path: str, n: Any, stream: bool) -> None:
    body = {"prompt": "x"} if path == "/v1/completions" else {"messages": USER}
    response = http.post(path, json=body | {"n": n, "stream": stream})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == "n"
    assert error["code"] in ("invalid_value", "invalid_type")
    assert error["message"]


def test_refused_prompt_refuses_the_request(http: httpx.Client) -> None:
    for stream in (False, True):
        response = http.post("/v1/completions", json={"prompt": "word " * 8000, "n": 4, "stream": stream})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts_every_choice(server: ServerProcess, stream: bool) -> None:
    request = {"prompt": "Once upon a time", "n": 4, "ignore_eos": True, "max_tokens": 3000, "stream": stream}
    body = json.dumps(request).encode()
    before = server.metrics()["generation_tokens_total"]
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        head = ["POST /v1/completions HTTP/1.1", "host: localhost", "content-type: application/json"]
        head += [f"content-length: {len(body)}", "", ""]
        sock.sendall("\r\n".join(head).encode() + body)
        assert eventually(lambda: server.metrics()["num_requests_running"] == 4)
    require_no_leak(server)
    assert server.metrics()["generation_tokens_total"] - before < 4 * 3000


def test_body_has_timing(client: openai.OpenAI, http: httpx.Client) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=USER, temperature=0, max_tokens=20, extra_body={"return_timing": True}
    )
    timing = (answer.model_extra or {})["timing"]
    assert timing.keys() == {"queue_ms", "ttft_ms", "cached_tokens", "prefill_chunks", "tokens_per_s"}
    assert 0 <= timing["queue_ms"] <= timing["ttft_ms"]
    assert timing["prefill_chunks"] >= 1
    assert timing["tokens_per_s"] > 0
    body = {"prompt": "The", "max_tokens": 2}
    assert "timing" not in http.post("/v1/completions", json=body).json()
    asked = http.post("/v1/completions", json=body, headers={"x-minisgl-timing": "1"}).json()
    assert asked["timing"]["prefill_chunks"] == 1
    assert http.post("/v1/completions", json=body | {"return_timing": "x"}).json()["error"]["param"] == "return_timing"


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("with_usage", [False, True])
def test_stream_ends_with_timing(http: httpx.Client, n: int, with_usage: bool) -> None:
    body = {"messages": USER, "max_tokens": 5, "n": n, "return_timing": True}
    chunks = post_events(http, "/v1/chat/completions", body | {"stream_options": {"include_usage": with_usage}})
    assert all("timing" not in chunk for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert ("usage" in chunks[-1]) == with_usage
    assert chunks[-1]["timing"]["prefill_chunks"] >= n
    assert chunks[-1]["timing"]["ttft_ms"] > 0


def test_queue_time_is_measured(server: ServerProcess, http: httpx.Client) -> None:
    before = server.metrics()
    http.post("/v1/completions", json={"prompt": "The", "n": 3, "max_tokens": 2})
    after = server.metrics()
    assert after["request_queue_time_seconds_count"] == before["request_queue_time_seconds_count"] + 3
    assert after["request_queue_time_seconds_sum"] > before["request_queue_time_seconds_sum"]


def test_choices_compute_the_prompt_once(server: ServerProcess, http: httpx.Client) -> None:
    """Also a prompt that is not cached."""
    before = server.metrics()
    response = http.post("/v1/completions", json={"prompt": list(range(100, 700)), "n": 8, "max_tokens": 4})
    assert response.json()["usage"]["prompt_tokens"] == 600

    def computed() -> float:
        return server.metrics()["computed_prompt_tokens_total"] - before["computed_prompt_tokens_total"]

    assert eventually(lambda: computed() >= 600 + 7)
    assert computed() < 1000


def test_nothing_leaks(server: ServerProcess) -> None:
    require_no_leak(server)
    assert "Traceback" not in server.log


@pytest.fixture(scope="module")
def narrow() -> Iterator[ServerProcess]:
    if not (BUILTIN_MODEL / "model.safetensors").is_file():
        pytest.skip("the built-in model is not there yet")
    with ServerProcess("--num-pages", "512", "--max-prefill-length", "64", "--max-running-requests", "1") as server:
        yield server


def test_timing_counts_prefill_chunks_and_queue_time(narrow: ServerProcess) -> None:
    """With one row a request waits for the one before it, which is not long enough to be preempted."""
    body = {"prompt": [100 + i % 50 for i in range(300)], "max_tokens": 5, "ignore_eos": True, "return_timing": True}
    endless = {"prompt": "Once", "ignore_eos": True, "stream": True, "max_tokens": 1200}
    with narrow.client() as http, ThreadPoolExecutor(1) as pool:
        first = http.post("/v1/completions", json=body).json()["timing"]
        second = http.post("/v1/completions", json=body).json()["timing"]
        with http.stream("POST", "/v1/completions", json=endless) as before:
            lines = before.iter_lines()  # dropping this iterator closes the stream
            next(lines)
            third = pool.submit(http.post, "/v1/completions", json=body | {"n": 2})
            assert eventually(lambda: narrow.metrics()["num_requests_waiting"] == 1)
            time.sleep(0.1)
        two = third.result().json()["timing"]
    assert first["prefill_chunks"] >= 5
    assert first["cached_tokens"] == 0
    assert second["prefill_chunks"] == 1
    assert second["cached_tokens"] >= 256
    assert two["queue_ms"] >= 20
    assert two["prefill_chunks"] == 2
    require_no_leak(narrow)
