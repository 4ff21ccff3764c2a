"""/tokenize, /detokenize, /health_generate and the information about the model, around the scripted scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from e2e.harness import ServerProcess, eventually, require_no_leak, stopped
from minisgl.api.frontend import Questions
from minisgl.api.operations import encode_message
from minisgl.api.protocol import ChatCompletionRequest, ChatMessage, TokenizeRequest
from minisgl.api.requests import SamplingDefaults, chat_message
from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.errors import RequestError
from minisgl.message import (
    ConversionReply,
    DecodeMsg,
    EncodeMsg,
    Failure,
    TokenizeMsg,
    TokenizerMsg,
    UserMsg,
    ids_from_bytes,
    ids_to_bytes,
)
from minisgl.params import Limits, SamplingParams
from minisgl.tokenizer.server import Worker
from minisgl.tokenizer.tokenize import TokenizeManager

LIMITS = Limits(max_model_len=100, vocab_size=50)
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


def test_messages_have_the_tokens_of_a_chat(client: httpx.Client) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    counted = client.post("/tokenize", json={"messages": messages}).json()["count"]
    answer = client.post("/v1/chat/completions", json={"messages": messages}).json()
    assert answer["usage"]["prompt_tokens"] == counted
    closed = client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()["count"]
    assert closed < counted


def test_messages_take_what_a_chat_takes() -> None:
    messages = [ChatMessage(role="assistant", content="Hi")]
    tools = [{"type": "function", "function": {"name": "f"}}]
    kwargs: dict[str, str | int | float | bool | None] = {"enable_thinking": False}
    fields = {"messages": messages, "tools": tools, "continue_final_message": True, "chat_template_kwargs": kwargs}
    asked = encode_message(TokenizeRequest(**fields), LIMITS).prompt
    assert asked == chat_message(ChatCompletionRequest(**fields), SamplingDefaults(), LIMITS)
    assert (asked.tools, asked.continue_final_message, asked.template_kwargs) == (tools, True, kwargs)


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
        ("/tokenize", {"messages": [{"role": "nobody", "content": "x"}]}, 400, "messages"),
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
    assert info["model"] == "minisgl-demo"
    assert info["vocab_size"] > 0
    assert client.post("/reset_prefix_cache").json() == client.post("/flush_cache").json() == {"status": "ok"}


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


class TestWorker:
    """One bad message costs only itself."""

    def encode(self, uid: int, **prompt: Any) -> EncodeMsg:
        return EncodeMsg(uid=uid, prompt=TokenizeMsg(uid=0, sampling_params=SamplingParams(), **prompt))

    def test_bad_messages_among_good_ones(self) -> None:
        worker = Worker(TokenizeManager(BUILTIN_MODEL))
        batch: list[TokenizerMsg] = [
            self.encode(1, text="one"),
            self.encode(2, messages=[{"role": "user", "content": "x"}] * 5000),
            DecodeMsg(uid=3, input_ids=b"abc"),  # not a multiple of four bytes
            DecodeMsg(uid=4, input_ids=ids_to_bytes([-5])),
            TokenizeMsg(uid=5, sampling_params=SamplingParams(), text="a request"),
            DecodeMsg(uid=6, input_ids=ids_to_bytes([70, 71])),
        ]
        to_backend, replies = worker.handle(batch)
        assert [type(m) for m in to_backend] == [UserMsg]
        by_uid = {r.uid: r for r in replies if isinstance(r, ConversionReply)}
        assert sorted(by_uid) == [1, 2, 3, 4, 6]
        assert len(ids_from_bytes(by_uid[1].input_ids)) > 0
        failures = {uid: (r.failure.status, r.failure.param) for uid, r in by_uid.items() if r.failure is not None}
        assert failures == {2: (400, "messages"), 3: (500, None), 4: (500, None)}
        assert by_uid[6].text

    def test_length_is_bounded(self) -> None:
        worker = Worker(TokenizeManager(BUILTIN_MODEL, Limits(max_model_len=8, vocab_size=4096)))
        _, (reply,) = worker.handle([DecodeMsg(uid=1, input_ids=ids_to_bytes([5] * 9))])
        assert isinstance(reply, ConversionReply) and reply.failure is not None
        assert reply.failure.status == 400
        _, (reply,) = worker.handle([self.encode(2, text="far too long " * 1000)])
        assert isinstance(reply, ConversionReply) and reply.failure is not None
        assert reply.failure.code == "context_length_exceeded"


def test_failure_reaches_every_waiting_question() -> None:
    async def run() -> None:
        questions = Questions()
        first, second = [asyncio.create_task(questions.ask(uid, asyncio.sleep(0))) for uid in (1, 2)]
        await asyncio.sleep(0)
        questions.answer(ConversionReply(uid=1, text="early"))
        questions.answer(ConversionReply(uid=7))  # nobody asked
        questions.fail(Failure(message="the engine died", status=503))
        assert await first == ConversionReply(uid=1, text="early")
        with pytest.raises(RequestError, match="the engine died") as failed:
            await second
        assert failed.value.status == 503
        assert len(questions) == 0

    asyncio.run(run())


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
