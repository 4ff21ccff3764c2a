"""The server around a scripted scheduler: shapes of answers, refusals, disconnects."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

import minisgl
from e2e.harness import HELD, ServerProcess, eventually, release, require_no_leak


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--num-tokenizer", "2", stub=True, env={"STUB_DELAY": "0.002"}) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def post_head(length: int) -> bytes:
    head = [
        "POST /v1/completions HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        f"content-length: {length}",
    ]
    return "\r\n".join([*head, "", ""]).encode()


def events(response: httpx.Response) -> list[Any]:
    """The parsed events; the last must be [DONE]."""
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_completion_echoes_exactly(client: httpx.Client) -> None:
    text = "Größe 你好 🙂🇩🇪 naïve \u200d end"
    answer = client.post("/v1/completions", json={"prompt": text}).json()
    assert answer["choices"][0]["text"] == text
    assert answer["object"] == "text_completion"
    assert answer["usage"]["prompt_tokens"] == answer["usage"]["completion_tokens"]


def test_stream_equals_body(client: httpx.Client) -> None:
    body = {"prompt": "Ein 長い text with 🙂 emoji", "stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = events(response)
    assert len({c["id"] for c in chunks}) == 1
    assert "".join(c["choices"][0]["text"] for c in chunks[:-1]) == body["prompt"]
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["total_tokens"] > 0
    assert all(c["usage"] is None for c in chunks[:-1])


def test_chat_stream_shape(client: httpx.Client) -> None:
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        chunks = events(response)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in c["choices"][0]["delta"] for c in chunks[1:])
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all(c["object"] == "chat.completion.chunk" for c in chunks)


def test_many_prompts_keep_their_index(client: httpx.Client) -> None:
    prompts = ["one", "two and more", "three"]
    answer = client.post("/v1/completions", json={"prompt": prompts}).json()
    assert [c["text"] for c in answer["choices"]] == prompts
    with client.stream("POST", "/v1/completions", json={"prompt": prompts, "stream": True}) as response:
        texts = {0: "", 1: "", 2: ""}
        for chunk in events(response):
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert list(texts.values()) == prompts


def test_stop_string_ends_and_is_hidden(client: httpx.Client) -> None:
    body = {"prompt": "alpha beta gamma delta " * 20, "stop": ["gamma d", "zzz"]}
    choice = client.post("/v1/completions", json=body).json()["choices"][0]
    assert choice == {
        "index": 0,
        "text": "alpha beta ",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": "gamma d",
    }


def test_generate_is_cumulative(client: httpx.Client) -> None:
    body = {"text": "one two three four", "sampling_params": {"max_new_tokens": 3}, "stream": True}
    with client.stream("POST", "/generate", json=body) as response:
        chunks = events(response)
    texts = [c["text"] for c in chunks]
    assert all(b.startswith(a) for a, b in itertools.pairwise(texts))
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    ids = client.post("/generate", json={"input_ids": [[70, 71], [72]]}).json()
    assert [r["meta_info"]["completion_tokens"] for r in ids] == [2, 1]
    assert [r["output_ids"] for r in ids] == [[70, 71], [72]]  # the stub echoes the prompt
    said = [c["output_ids"] for c in chunks]
    assert all(a == b[: len(a)] for a, b in itertools.pairwise(said))
    assert [len(ids) for ids in said] == [c["meta_info"]["completion_tokens"] for c in chunks]


@pytest.mark.parametrize(
    ("rid", "fields", "ids"),
    [
        ("r", {"input_ids": [70]}, ["r"]),
        ("r", {"input_ids": [[70], [71]]}, ["r_0", "r_1"]),
        ("r", {"input_ids": [70], "sampling_params": {"n": 2}}, ["r_0", "r_1"]),
        (["a"], {"input_ids": [70]}, ["a"]),
        (["a", "b"], {"input_ids": [[70], [71]]}, ["a", "b"]),
        (["a", "b"], {"input_ids": [[70], [71]], "sampling_params": {"n": 2}}, ["a_0", "a_1", "b_0", "b_1"]),
    ],
)
def test_generations_have_the_names_that_the_client_gives(
    client: httpx.Client, rid: str | list[str], fields: dict[str, Any], ids: list[str]
) -> None:
    answer = client.post("/generate", json={"rid": rid, **fields}).json()
    assert [r["meta_info"]["id"] for r in (answer if isinstance(answer, list) else [answer])] == ids
    with client.stream("POST", "/generate", json={"rid": rid, "stream": True, **fields}) as response:
        assert {c["meta_info"]["id"] for c in events(response)} == set(ids)


def test_names_for_other_prompts_than_there_are_are_refused(client: httpx.Client) -> None:
    response = client.post("/generate", json={"rid": ["a", "b"], "input_ids": [[70], [71], [72]]})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "rid")


def test_error_before_first_byte_has_its_status(client: httpx.Client) -> None:
    for stream in (False, True):
        response = client.post("/v1/completions", json={"prompt": "x !error-first", "stream": stream})
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "the stub failed"


def test_error_later_is_an_event(client: httpx.Client) -> None:
    with client.stream("POST", "/v1/completions", json={"prompt": "abc def !error-later", "stream": True}) as response:
        assert response.status_code == 200
        chunks = events(response)
    assert chunks[-1]["error"]["type"] == "server_error"


def test_a_failing_choice_fails_the_request_once(server: ServerProcess, client: httpx.Client) -> None:
    body: dict[str, Any] = {"prompt": ["fine " * 300, "abc def !error-later"], "n": 3}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the stub failed"
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        chunks = events(response)
    assert ["error" in c for c in chunks] == [False] * (len(chunks) - 1) + [True]
    require_no_leak(server)


def test_request_id_and_routes(client: httpx.Client) -> None:
    response = client.get("/v1/models", headers={"x-request-id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    card = response.json()["data"][0]
    assert {"id", "object", "created", "owned_by", "root", "max_model_len"} <= card.keys()
    assert client.get(f"/v1/models/{card['id']}").json()["id"] == card["id"]
    assert client.get("/v1/models/a/b").status_code == 404
    assert client.get("/ready").status_code == 200
    assert client.get("/get_server_info").json()["model"] == card["id"]
    assert client.get("/version").json() == {"version": minisgl.__version__}
    assert client.post("/flush_cache", json={}).status_code == 200
    assert client.get("/missing").json()["error"]["type"] == "not_found_error"
    assert client.get("/generate").status_code == client.head("/generate").status_code == 405
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize("path", ["/", "/health", "/ready", "/v1/models", "/version", "/openapi.json", "/v1/models/x"])
def test_head_is_get_without_the_body(client: httpx.Client, path: str) -> None:
    head, get = client.head(path), client.get(path)
    assert head.status_code == get.status_code
    assert get.content and not head.content
    for name in ("content-type", "content-length"):
        assert head.headers[name] == get.headers[name]
    assert client.get("/version").status_code == 200  # the connection is still in step


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b'{"prompt": "x"}', {"content-type": "text/plain"}, 415),
        (b'{"prompt": "x"}', {}, 415),
        (b'{"prompt": ', {"content-type": "application/json"}, 400),
        (b"[]", {"content-type": "application/json"}, 400),
        (b"[" * 100_000, {"content-type": "application/json"}, 400),
        (b'{"prompt": "\xff"}', {"content-type": "application/json"}, 400),
        (b'{"prompt": "\\ud800"}', {"content-type": "application/json"}, 400),
        (b'{"prompt": "x", "temperature": NaN}', {"content-type": "application/json"}, 400),
        (b'{"prompt": "' + b"x" * 5_000_000 + b'"}', {"content-type": "application/json; charset=utf-8"}, 413),
    ],
)
def test_bad_bodies(client: httpx.Client, content: bytes, headers: dict[str, str], status: int) -> None:
    response = client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == status
    assert response.json()["error"]["message"]


def test_body_without_length_is_limited(client: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 100_000

    response = client.post("/v1/completions", content=chunks(), headers={"content-type": "application/json"})
    assert response.status_code == 413


def test_endless_headers_are_refused(server: ServerProcess) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    for head in (b"x-a: " + b"a" * 200_000, b"x: y\r\n" * 20_000 + b"\r\n", b"a" * 300_000):
        with socket.create_connection((host, int(port)), timeout=10) as sock:
            try:
                sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + head)
                answer = sock.recv(100)
            except ConnectionError:
                continue
            assert answer == b"" or answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts(server: ServerProcess, stream: bool) -> None:
    body = json.dumps(HELD | {"stream": stream}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(post_head(len(body)) + body)
        assert eventually(lambda: server.metrics()["num_requests_running"] == 1)
    require_no_leak(server)


def test_slow_reader_is_given_up() -> None:
    # With the kernel's own buffers, a stream that a slow server coalesces may fit into them and end.
    env = {"STUB_DELAY": "0.0005", "STUB_SNDBUF": "8192"}
    with ServerProcess("--write-timeout", "1", stub=True, env=env) as server:
        host, port = server.url.removeprefix("http://").split(":")
        prompt = {"prompt": ["word " * 1500] * 100, "stream": True, "stream_options": {"continuous_usage_stats": True}}
        body = json.dumps(prompt).encode()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((host, int(port)))
            sock.sendall(post_head(len(body)) + body)
            assert eventually(lambda: server.metrics()["num_requests_running"] > 0 or "did not read for" in server.log)
            with server.client() as other:  # others keep their pace meanwhile
                assert other.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
            require_no_leak(server)
        assert "did not read for" in server.log and "ERROR" not in server.log


def test_an_answer_that_is_not_read_is_given_up() -> None:
    # A busy machine may stop the slow reader for a second; it reads for 3.5 s in all.
    with ServerProcess("--write-timeout", "2", stub=True, env={"STUB_SNDBUF": "8192"}) as server:
        host, port = server.url.removeprefix("http://").split(":")
        body = json.dumps({"prompt": ["word " * 1500] * 100}).encode()
        head = post_head(len(body)).replace(b"host", b"connection: close\r\nhost", 1)
        with socket.socket() as unread, socket.socket() as slow:
            for sock in (unread, slow):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
                sock.connect((host, int(port)))
                sock.sendall(head + body)
            received = 0
            while more := slow.recv(10_000):  # for longer than the limit
                received += len(more)
                time.sleep(0.05)
            assert received > 700_000
            assert eventually(lambda: "did not read for" in server.log)
        require_no_leak(server)


def test_queue_limit_is_429() -> None:
    with ServerProcess(stub=True, env={"STUB_QUEUE": "2"}) as server, server.client() as client:
        body = HELD | {"stream": False}
        with ThreadPoolExecutor(2) as pool:
            taken = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(2)]
            assert eventually(lambda: server.metrics()["num_requests_running"] == 2)
            refused = [client.post("/v1/completions", json=body) for _ in range(3)]
            release(server)
            assert [t.result().status_code for t in taken] == [200, 200]
        assert all(r.status_code == 429 and r.headers["retry-after"] for r in refused)
        assert all(r.json()["error"]["type"] == "rate_limit_error" for r in refused)
        assert client.post("/v1/completions", json=body).status_code == 200
        require_no_leak(server)


def test_api_key() -> None:
    with ServerProcess("--api-key", "secret", stub=True) as server, server.client() as client:
        assert client.get("/health").status_code == 200
        for path in ("/metrics", "/v1/models", "/server_info", "/openapi.json", "/nope"):
            assert client.get(path).status_code == 401
        assert client.get("/v1/models", headers={"authorization": "Bearer Secret"}).status_code == 401
        assert client.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
        assert b"secret" not in client.get("/server_info", headers={"authorization": "Bearer secret"}).content


def test_classes_and_priorities() -> None:
    """With one row, a request waits for none of a later class or of a higher number, whoever came first."""
    flags = ("--classes", "interactive,batch", "--api-key", "interactive=a,batch=b", "--max-running-requests", "1")
    with ServerProcess(*flags) as server, server.client() as client, ThreadPoolExecutor(4) as pool:

        def ask(key: str, priority: int, tokens: int) -> float:
            body = {"prompt": f"{priority} {key}", "max_tokens": tokens, "ignore_eos": True, "priority": priority}
            answer = client.post("/v1/completions", json=body, headers={"x-api-key": key}).json()
            assert answer["usage"]["completion_tokens"] == tokens
            return time.monotonic()

        ends = []
        for key, priority, tokens in (("b", -9, 1500), ("b", 3, 200), ("b", 2, 200), ("a", 7, 5)):
            ends.append(pool.submit(ask, key, priority, tokens))
            time.sleep(0.02)
        first, last, third, urgent = [end.result() for end in ends]
        assert urgent < first < third < last
        client.headers["x-api-key"] = "a"
        refused = client.post("/v1/completions", json={"prompt": "a", "priority": 2**40})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "priority"
        text = client.get("/metrics").text
        for name, counts in (("request_success_total", (1, 3)), ("time_to_first_token_seconds_count", (1, 3))):
            for kind, count in zip(("interactive", "batch"), counts, strict=True):
                lines = [line for line in text.splitlines() if f"minisgl:{name}" in line and f'class="{kind}"' in line]
                assert sum(float(line.rpartition(" ")[2]) for line in lines) == count
