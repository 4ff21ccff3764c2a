"""Formats of calls through the official client: written by a scripted scheduler, and forced on the built-in model."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from e2e.harness import ServerProcess

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "New York"]}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}]
PARIS = ("get_weather", {"city": "Paris", "days": 2})
COMMON: dict[str, Any] = {"model": "minisgl-demo", "tools": TOOLS, "temperature": 0}


def both(url: str, content: str, **fields: Any) -> list[Any]:
    """(text, reasoning, calls) of each choice of the body, and of the stream."""
    messages: Any = [{"role": "user", "content": content}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        body = client.chat.completions.create(messages=messages, n=2, **COMMON, **fields)
        with client.chat.completions.stream(messages=messages, n=2, **COMMON, **fields) as stream:
            for _ in stream:
                pass
            streamed = stream.get_final_completion()
    return [
        (
            choice.message.content or "",
            getattr(choice.message, "reasoning_content", None) or "",
            [(c.function.name, json.loads(c.function.arguments)) for c in choice.message.tool_calls or ()],
        )
        for answer in (body, streamed)
        for choice in answer.choices
    ]


@pytest.mark.parametrize(
    ("sign", "text"),
    [
        (
            "<|channel|>analysis",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Look:<|end|>"
            "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
            '{"city": "Paris", "days": 2}',
        ),
        (
            "<minimax:tool_call> </think>",
            '<think>Hm.</think>Look:\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris'
            '</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
        ),
        (
            "<|tool_calls_section_begin|> </think>",
            "<think>Hm.</think>Look:<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
            '<|tool_call_argument_begin|>{"city": "Paris", "days": 2}<|tool_call_end|><|tool_calls_section_end|>',
        ),
    ],
)
def test_streams_equal_bodies(sign: str, text: str) -> None:
    """The format is read off the template, and the scripted scheduler answers with the prompt."""
    with ServerProcess("--chat-template", f"{{{{ messages[-1].content }}}}{{# {sign} #}}", stub=True) as server:
        assert both(server.url, f"{text} STOP", stop=" STOP") == [("Look:", "Hm.", [PARIS])] * 4


@pytest.mark.parametrize("form", ["qwen3_coder", "gemma4"])
def test_forced_calls_are_in_the_format(form: str) -> None:
    with ServerProcess("--tool-call-parser", form) as server:
        named = {"type": "function", "function": {"name": "get_weather"}}
        for content, _, calls in both(server.url, "The weather in Paris?", tool_choice=named, max_tokens=200):
            assert content == "" and [name for name, _ in calls] == ["get_weather"]
            assert calls[0][1]["city"] in PARAMETERS["properties"]["city"]["enum"]  # type: ignore[index]
