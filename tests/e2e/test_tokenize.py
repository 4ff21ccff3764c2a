"""/tokenize, /detokenize, /health_generate and the information about the model, around the scripted scheduler."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from e2e.harness import ServerProcess, eventually, require_no_leak, stopped
from minisgl.checkpoint.hf import BUILTIN_MODEL

TEXT = "Größe 你好 🙂🇩🇪 naïve <b>\u200d end"


@pytest.fixture(scope="module", params=["0", "2"])
def server(request: pytest.FixtureRequest) -> Iterator[ServerProcess]:
    with ServerProcess("--num-tokenizer", request.param, stub=True) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def test_text_to_tokens_and_back(server: ServerProcess, client: httpx.Client) -> None:
    for text in (TEXT, "a", "word " * 300):
        answer = client.post("/tokenize", json={"prompt": text}).json()
        assert answer["count"] == len(answer["tokens"]) > 0
        assert answer["max_model_len"] == client.get("/v1/models").json()["data"][0]["max_model_len"]
        assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    assert client.post("/tokenize", json={"prompt": ""}).json()["count"] == 0
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}
    require_no_leak(server)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/chat/completions"])
def test_names_that_the_template_does_not_read_are_told(client: httpx.Client, path: str) -> None:
    kwargs = {"self": 1, "template": 2, "environment": "x"}
    answer = client.post(path, json={"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": kwargs})
    assert answer.status_code == 200
    told = answer.headers["x-ignored-fields"]
    assert told == ", ".join(f"chat_template_kwargs.{name}" for name in sorted(kwargs))


def test_messages_have_the_tokens_of_a_chat(client: httpx.Client) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    counted = client.post("/tokenize", json={"messages": messages}).json()["count"]
    answer = client.post("/v1/chat/completions", json={"messages": messages}).json()
    assert answer["usage"]["prompt_tokens"] == counted
    closed = client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()["count"]
    assert closed < counted


def test_special_tokens(client: httpx.Client) -> None:
    tokens = client.post("/tokenize", json={"messages": [{"role": "user", "content": "Hi"}]}).json()["tokens"]
    shown = client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    hidden = client.post("/detokenize", json={"tokens": tokens, "skip_special_tokens": True}).json()["prompt"]
    assert "Hi" in hidden
    assert len(hidden) < len(shown)
    again = client.post("/tokenize", json={"prompt": shown, "add_special_tokens": False}).json()["tokens"]
    assert again == tokens


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": []}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": [{"role": "narrator", "content": "x"}]}, 400, "messages[0].role"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 3_000_000}]}, 400, "messages"),
        ("/tokenize", {"prompt": 3}, 400, "prompt"),
        ("/tokenize", {"prompt": "x" * 3_000_000}, 400, "prompt"),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, 400, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, 400, "tokens"),
        ("/detokenize", {"tokens": [5] * 100_000}, 400, "tokens"),
    ],
)
def test_refusals_name_the_field(client: httpx.Client, path: str, body: Any, status: int, param: str) -> None:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param
    assert client.post("/tokenize", json={"prompt": "x"}).status_code == 200


def test_model_info_and_aliases(client: httpx.Client) -> None:
    info = client.get("/model_info").json()
    assert info == client.get("/get_model_info").json()
    path = str(BUILTIN_MODEL)
    names = {"served_model_name": "minisgl-demo", "model_path": path, "tokenizer_path": path}
    assert info.items() >= ({"model": "minisgl-demo"} | names).items()
    assert client.get("/server_info").json().items() >= names.items()
    assert info["vocab_size"] > 0
    assert (
        client.post("/reset_prefix_cache", json={}).json()
        == client.post("/flush_cache", json={}).json()
        == {"status": "ok"}
    )


def test_health_generate(server: ServerProcess, client: httpx.Client) -> None:
    response = client.get("/health_generate")
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    require_no_leak(server)


def test_health_generate_when_the_engine_refuses() -> None:
    with ServerProcess(stub=True, env={"STUB_QUEUE": "0"}) as server, server.client() as client:
        response = client.get("/health_generate")
        assert response.status_code == 503
        assert response.json() == {"status": "unhealthy", "cause": "the queue is full"}
        assert client.get("/health").status_code == 200


def test_streams_go_on_while_a_worker_tokenizes(server: ServerProcess, client: httpx.Client) -> None:
    """However long that takes: they do not even run."""
    workers = [pid for name, pid in server.info()["processes"].items() if name.startswith("minisgl-tokenizer")]
    body = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        lines = response.iter_lines()
        next(lines)
        with stopped(*workers):
            assert [line for line in lines if line][-1] == "data: [DONE]"


def test_event_loop_is_free_while_a_worker_tokenizes(server: ServerProcess, client: httpx.Client) -> None:
    """However long that takes: they do not even run."""

    def ask(_: int) -> int:
        with server.client() as other:
            return other.post("/tokenize", json={"prompt": "lorem ipsum " * 1300}).status_code

    workers = [pid for name, pid in server.info()["processes"].items() if "tokenizer" in name]
    with ThreadPoolExecutor(8) as pool:
        with stopped(*workers):
            codes = pool.map(ask, range(8))
            assert eventually(lambda: server.metrics()["frontend_entries"] == 8)
            assert client.get("/health").status_code == 200
        assert list(codes) == [200] * 8
    require_no_leak(server)
