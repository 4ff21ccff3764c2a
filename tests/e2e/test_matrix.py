"""The same greedy text whatever is switched on (overlap, cache, page and chunk size), asked by the openai client."""

from __future__ import annotations

import itertools
import json
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from e2e.harness import ServerProcess, require_no_leak

ALL = list(itertools.product((True, False), ("radix", "naive"), (1, 16), (64, 8192)))
DEFAULTS = (False, "radix", 16, 8192)
# With the defaults all combinations of any two settings occur; `make soak` runs the rest.
PAIRS = [c for c in ALL if sum(a != b for a, b in zip(c, DEFAULTS, strict=True)) == 3]

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the current weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
NEEDLE = FILLER * 25 + "The secret code of the castle is 7305982. " + FILLER * 25


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


# name -> (messages, extra parameters, what the answer must contain)
QUESTIONS: dict[str, tuple[list[dict[str, str]], dict[str, object], str]] = {
    "arithmetic": ([user("What is 12 + 30?")], {}, "42"),
    "recall": (
        [user("My name is Ada."), {"role": "assistant", "content": "Nice to meet you, Ada!"}, user("What is my name?")],
        {},
        "Ada",
    ),
    "copy": ([user("Repeat exactly: crème brûlée 東京 🚀 x9")], {}, "crème brûlée 東京 🚀 x9"),
    "tool": ([user("What is the weather in Paris?")], {"tools": TOOLS}, '"get_weather"'),
    "needle": ([user(f"{NEEDLE}\n\nWhat is the secret code of the castle?")], {}, "7305982"),
    "stop": ([user(f"{NEEDLE}\n\nWhat is the secret code of the castle?")], {"stop": ["zzz", "5982"]}, "730"),
    "story": ([user("Tell me a story about a fox named Lily.")], {"max_tokens": 80}, "Lily"),
}


def shown(content: str | None, calls: list[tuple[str, str]]) -> str:
    """The answer as one text: what was said, then (name, arguments) of what was called."""
    return (content or "") + (json.dumps(calls) if calls else "")


def ask(client: openai.OpenAI, name: str, stream: bool) -> tuple[str, int, str | None]:
    """(what was said or called, prompt tokens, finish reason)"""
    messages, extra, _ = QUESTIONS[name]
    common = {"model": "minisgl-demo", "messages": messages, "temperature": 0.0, "max_tokens": 100, **extra}
    if not stream:
        answer = client.chat.completions.create(**common)  # type: ignore[call-overload]
        choice = answer.choices[0]
        calls = [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or ()]
        return shown(choice.message.content, calls), answer.usage.prompt_tokens, choice.finish_reason
    text, tokens, reason = "", 0, None
    names: dict[int, str] = {}
    arguments: dict[int, str] = {}
    for chunk in client.chat.completions.create(**common, stream=True, stream_options={"include_usage": True}):  # type: ignore[call-overload]
        if chunk.usage:
            tokens = chunk.usage.prompt_tokens
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for call in choice.delta.tool_calls or ():
                names[call.index] = names.get(call.index, "") + (call.function.name or "")
                arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    return shown(text, [(names[i], arguments[i]) for i in sorted(names)]), tokens, reason


def answers(client: openai.OpenAI) -> dict[str, tuple[str, int, str | None]]:
    """Every question, all of them at once, streamed."""
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        return dict(zip(QUESTIONS, pool.map(lambda name: ask(client, name, stream=True), QUESTIONS), strict=True))


@pytest.fixture(scope="module")
def expected(server: ServerProcess) -> dict[str, tuple[str, int, str | None]]:
    """The answers of a server with default settings."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        alone = {name: ask(client, name, stream=False) for name in QUESTIONS}
        assert answers(client) == alone
    return alone


@pytest.mark.parametrize("name", QUESTIONS)
def test_the_answers_are_right(expected: dict[str, tuple[str, int, str | None]], name: str) -> None:
    text, prompt_tokens, reason = expected[name]
    assert QUESTIONS[name][2] in text
    assert reason == {"story": "length", "tool": "tool_calls"}.get(name, "stop")
    if name in ("needle", "stop"):
        assert prompt_tokens > 1200  # many chunks of 64
    if name == "stop":
        assert text.endswith("730")
    if name == "tool":
        ((function, arguments),) = json.loads(text)  # a call and nothing said besides
        assert (function, json.loads(arguments)) == ("get_weather", {"city": "Paris"})


@pytest.mark.parametrize("quantization", [pytest.param(kind, marks=pytest.mark.slow) for kind in ("int8", "int4")])
def test_weights_in_few_bits_answer_right(quantization: str) -> None:
    with ServerProcess("--quantization", quantization) as server:
        assert quantization in server.info()["engine"]["runners"]
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            texts = {name: text for name, (text, _, _) in answers(client).items()}
    assert [name for name, text in texts.items() if QUESTIONS[name][2] not in text] == []


@pytest.mark.parametrize(
    ("overlap", "cache", "page_size", "chunk"),
    [pytest.param(*c, marks=() if c in PAIRS[::6] else pytest.mark.slow) for c in ALL if c != DEFAULTS],
)
def test_settings_do_not_change_the_text(
    expected: dict[str, tuple[str, int, str | None]], overlap: bool, cache: str, page_size: int, chunk: int
) -> None:
    flags = ["--overlap" if overlap else "--no-overlap", "--cache", cache]
    flags += ["--page-size", str(page_size), "--max-prefill-length", str(chunk)]
    with ServerProcess(*flags) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        assert server.info()["engine"]["overlap"] == int(overlap)
        assert answers(client) == expected
        require_no_leak(server)
