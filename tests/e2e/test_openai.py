"""The official client against a real server with the built-in model."""

from __future__ import annotations

import time
from typing import Any

import httpx
import openai
import pytest

from e2e.harness import ServerProcess, require_no_leak

MODEL = "minisgl-demo"
QUESTIONS = [
    "What is 12 + 30?",
    "Who are you?",
    "Repeat exactly: grün 🙂 你好",
    "Tell me a story about a cat named Tom.",
]


def ask(client: openai.OpenAI, messages: list[dict[str, str]], **fields: Any) -> str:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=messages,  # type: ignore[arg-type]
        temperature=0,
        **fields,
    )
    assert answer.choices[0].finish_reason == "stop"
    return answer.choices[0].message.content or ""


@pytest.mark.parametrize("question", QUESTIONS)
def test_stream_equals_the_body(client: openai.OpenAI, question: str) -> None:
    messages: Any = [{"role": "user", "content": question}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert text
    usage = chunks[-1].usage
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason


def test_answer_is_right(client: openai.OpenAI) -> None:
    assert "42" in ask(client, [{"role": "user", "content": "What is 12 + 30?"}])


def test_two_turn_recall(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "My name is Anna."}]
    messages.append({"role": "assistant", "content": ask(client, messages)})
    messages.append({"role": "user", "content": "What is my name?"})
    assert "Anna" in ask(client, messages)


def test_completions_and_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == [MODEL]
    answer = client.completions.create(model=MODEL, prompt=["Once upon a time", "The"], max_tokens=5, temperature=0)
    assert [c.index for c in answer.choices] == [0, 1]
    assert answer.usage is not None and answer.usage.completion_tokens <= 10


def test_seed_determines_the_text(client: openai.OpenAI) -> None:
    def draw(seed: int) -> str:
        answer = client.completions.create(model=MODEL, prompt="The", max_tokens=30, temperature=1.5, seed=seed)
        return answer.choices[0].text

    assert draw(1) == draw(1)
    assert len({draw(seed) for seed in range(4)}) > 1


def test_finish_reasons_stop_and_length(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What is 12 + 30?"}]
    stopped = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, stop=["30"]).choices[0]
    assert stopped.finish_reason == "stop"
    assert stopped.message.content is not None and "30" not in stopped.message.content
    short = client.chat.completions.create(model=MODEL, messages=messages, temperature=0, max_tokens=2)
    assert short.choices[0].finish_reason == "length"
    assert short.usage is not None and short.usage.completion_tokens == 2


def test_prefix_is_reused(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Here is a long text. " * 40 + "What is 1 + 1?"}]
    for _ in range(2):
        answer = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens_details.cached_tokens or 0) > 100


def test_errors_have_the_client_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="best_of is only supported equal to n"):
        client.completions.create(model=MODEL, prompt="x", n=2, best_of=3)
    with pytest.raises(openai.BadRequestError) as e:
        client.completions.create(model=MODEL, prompt="word " * 8000)
    assert e.value.code == "context_length_exceeded"


def test_context_boundary(http: httpx.Client, server: ServerProcess) -> None:
    """The longest prompt that fits, and each that does not is told both lengths (T12)."""
    limit = server.info()["max_model_len"]
    for length, max_tokens, status in [
        (limit - 1, 1, 200),
        (limit - 1, None, 200),
        (limit, 1, 400),
        (limit, None, 400),
        (limit + 1, 1, 400),
        (limit - 10, 11, 200),
        (limit * 10, 1, 400),
    ]:
        response = http.post("/v1/completions", json={"prompt": [100] * length, "max_tokens": max_tokens})
        assert response.status_code == status
        if status == 400:
            error = response.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert str(limit) in error["message"]
            assert str(length) in error["message"]
        else:
            assert response.json()["choices"][0]["finish_reason"] in ("length", "stop")


def test_refusals_are_quick(http: httpx.Client) -> None:
    """Take the best of several: a single one measures how busy the machine is."""

    def seconds() -> float:
        started = time.monotonic()
        assert http.post("/v1/completions", json={"prompt": "x", "temperature": -1}).status_code == 400
        return time.monotonic() - started

    assert min(seconds() for _ in range(10)) < 0.2


def test_nothing_leaks(server: ServerProcess) -> None:
    require_no_leak(server)


def test_memory_of_the_light_processes(server: ServerProcess) -> None:
    for name, pid in server.info()["processes"].items():
        if "scheduler" not in name:
            with open(f"/proc/{pid}/status") as status:
                resident = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
            assert resident < 200_000, f"{name} has {resident} kB"
            with open(f"/proc/{pid}/maps") as maps:
                assert "libtorch" not in maps.read()


def test_penalties_and_bias_reach_the_engine(client: openai.OpenAI) -> None:
    """A forbidden first token gives another answer; a penalty that nothing can exceed changes the text."""
    messages = [{"role": "user", "content": "Tell me a story about a cat named Tom."}]
    usual = ask(client, messages)
    assert ask(client, messages, presence_penalty=0.0, logit_bias={}) == usual
    assert ask(client, messages, frequency_penalty=2.0, extra_body={"repetition_penalty": 1.5}) != usual
    longer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        temperature=0,
        max_tokens=60,
        extra_body={"min_tokens": 50},
    )
    assert longer.usage is not None and longer.usage.completion_tokens >= 50
