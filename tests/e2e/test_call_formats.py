"""Formats of calls through the official client: written by a scripted scheduler, and forced on the built-in model."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from e2e.harness import ServerProcess
from minisgl.api.parsers.forms import TOOL_FORMS
from minisgl.api.parsers.reasoning import REASONING_FORMS

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


GIVEN = '{"city": "Paris", "days": 2}'
CALL = f'{{"name": "get_weather", "arguments": {GIVEN}}}'
PYTHON = 'get_weather(city="Paris", days=2)'
XML = (
    "\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n"
)
THINK = "<think>Hm.</think>"
# The parsers of calls and of reasoning, and how they write both.
TEXTS: dict[tuple[str, str], str] = {
    ("harmony", "harmony"): (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Look:<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{GIVEN}"
    ),
    ("hermes", "think"): f"{THINK}Look:\n<tool_call>\n{CALL}\n</tool_call>",
    ("qwen3_coder", "think"): f"{THINK}Look:\n<tool_call>{XML}</tool_call>",
    ("seed_oss", "seed_oss"): f"<seed:think>Hm.</seed:think>Look:<seed:tool_call>{XML}</seed:tool_call>",
    ("glm45", "think"): (
        f"\n{THINK}\nLook:\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"
    ),
    ("glm47", "deepseek_r1"): (
        "Hm.</think>Look:<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call>"
    ),
    ("minimax_m2", "think"): (
        f'{THINK}Look:\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris'
        '</parameter>\n<parameter name="days">2</parameter>\n</invoke>\n</minimax:tool_call>'
    ),
    ("mistral", "mistral"): f"[THINK]Hm.[/THINK]Look:[TOOL_CALLS][{CALL}]",
    ("mistral_v11", "mistral"): f"[THINK]Hm.[/THINK]Look:[TOOL_CALLS]get_weather[ARGS]{GIVEN}",
    ("llama3", "think"): f"{THINK}Look:<|python_tag|>{CALL.replace('arguments', 'parameters')}",
    ("pythonic", "think"): f"{THINK}Look:<|python_start|>[{PYTHON}]<|python_end|>",
    ("lfm2", "think"): f"{THINK}Look:<|tool_call_start|>[{PYTHON}]<|tool_call_end|>",
    ("olmo3", "think"): f"{THINK}Look:<function_calls>\n{PYTHON}\n</function_calls>",
    ("deepseek", "deepseek_r1"): (
        "Hm.</think>Look:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        f"```json\n{GIVEN}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    ("deepseek_v31", "think"): (
        f"{THINK}Look:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{GIVEN}"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    ("kimi_k2", "kimi"): (
        "◁think▷Hm.◁/think▷Look:<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{GIVEN}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    ("gemma4", "gemma4"): (
        '<|channel>thought\nHm.<channel|>Look:<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:2}<tool_call|>'
    ),
    ("functiongemma", "think"): (
        f"{THINK}Look:<start_function_call>call:get_weather{{city:<escape>Paris<escape>,days:2}}<end_function_call>"
    ),
    ("command", "command"): (
        "<|START_THINKING|>Hm.<|END_THINKING|>Look:<|START_ACTION|>[\n"
        f'    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {GIVEN}}}\n]<|END_ACTION|>'
    ),
    ("phi4", "think"): f"{THINK}Look:<|tool_call|>[{CALL}]<|/tool_call|>",
    ("granite", "granite"): (f"Here is my thought process: Hm. Here is my response: Look:<|tool_call|>[{CALL}]"),
    ("hunyuan", "think"): f"{THINK}Look:<tool_calls>[{CALL}]</tool_calls>",
}


def test_every_parser_streams_what_the_body_has() -> None:
    """The scripted scheduler answers with the prompt."""
    assert {calls for calls, _ in TEXTS} == TOOL_FORMS.keys()
    assert {thoughts for _, thoughts in TEXTS} == REASONING_FORMS.keys()
    with ServerProcess("--chat-template", "{{ messages[-1].content }}", stub=True) as server:
        for (calls, thoughts), text in TEXTS.items():
            names = {"chat_template_kwargs": {"calls": calls, "thoughts": thoughts}}
            answers = both(server.url, f"{text} STOP", stop=" STOP", extra_body=names)
            assert answers == [("Look:", "Hm.", [PARIS])] * 4, (calls, thoughts)


def test_the_template_names_the_parsers() -> None:
    template = "{{ messages[-1].content }}{# <|channel|>analysis #}"
    with ServerProcess("--chat-template", template, stub=True) as server:
        text = TEXTS["harmony", "harmony"]
        assert both(server.url, f"{text} STOP", stop=" STOP") == [("Look:", "Hm.", [PARIS])] * 4


@pytest.mark.parametrize("form", ["qwen3_coder", "gemma4"])
def test_forced_calls_are_in_the_format(form: str) -> None:
    with ServerProcess("--tool-call-parser", form) as server:
        named = {"type": "function", "function": {"name": "get_weather"}}
        for content, _, calls in both(server.url, "The weather in Paris?", tool_choice=named, max_tokens=200):
            assert content == "" and [name for name, _ in calls] == ["get_weather"]
            assert calls[0][1]["city"] in PARAMETERS["properties"]["city"]["enum"]  # type: ignore[index]
