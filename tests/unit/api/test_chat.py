"""What all APIs of conversations share: reasoning turned on and off under any name, and tools of other types."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from minisgl.api import anthropic, items
from minisgl.api.chat import prepared
from minisgl.api.http import HEADERS, NAMES
from minisgl.api.openai import deltas_of, message_of
from minisgl.api.parsers.output import OutputForms, _with_text
from minisgl.api.parsers.pieces import ParsedCall
from minisgl.api.protocol import ChatCompletionRequest, MessagesRequest, ResponsesRequest
from minisgl.api.requests import SamplingDefaults, ServedModel
from minisgl.core.errors import RequestError
from minisgl.core.params import Limits, Thinking
from minisgl.settings.options import ServerArgs
from minisgl.tokenizer.reading import Reading
from minisgl.tokenizer.template import ChatTemplate
from support.bodies import parse_body

CHAT = [{"role": "user", "content": "x"}]
# The switches of real families -> a template with each, which writes "on" or "off".
TEMPLATES = {
    "Qwen3": "{{ 'off' if enable_thinking is defined and enable_thinking is false else 'on' }}",
    "DeepSeek": "{{ 'on' if thinking else 'off' }}",
    "Command A": "{{ 'off' if reasoning is defined and not reasoning else 'on' }}",
    "MiniMax": "{{ 'off' if thinking_mode == 'disabled' else 'on' }}",
    "chat mode": "{{ 'off' if thinking_mode is defined and thinking_mode == \"chat\" else 'on' }}",
    "Seed": "{{ 'off' if thinking_budget is defined and thinking_budget == 0 else 'on' }}",
    "Mistral": "{% if reasoning_effort is defined and reasoning_effort not in ['none', 'high'] %}"
    "{{ raise_exception('no') }}{% endif %}{{ 'on' if reasoning_effort == 'high' else 'off' }}",
    "Hunyuan": "{{ 'on' if reasoning_effort is defined and reasoning_effort != 'no_think' else 'off' }}",
    "GLM": "{{ 'off' if enable_thinking is false else 'on' }}{{ '' if reasoning_effort is not defined }}",
}
OFF: list[dict[str, Any]] = [
    {"reasoning_effort": "none"},
    {"reasoning": {"effort": "none"}},
    {"reasoning": {"enabled": False}},
    {"reasoning": {"max_tokens": 0}},
    {"thinking": {"type": "disabled"}},
    {"thinking": False},
    {"enable_thinking": False},
    {"think": False},
    {"thinking_budget": 0},
    {"thinking_budget_tokens": 0},
    {"thinking_token_budget": 0},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"chat_template_kwargs": {"thinking": False, "enable_thinking": False}},
    {"enable_thinking": False, "reasoning_effort": "high"},
]
ON: list[dict[str, Any]] = [
    {"reasoning_effort": "high"},
    {"reasoning": {"effort": "high"}},
    {"reasoning": {"enabled": True}},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"thinking": {"type": "adaptive"}},
    {"enable_thinking": True},
    {"think": True},
    {"think": "high"},
    {"chat_template_kwargs": {"enable_thinking": True}},
    {"enable_thinking": True, "thinking_budget": -1},
]
# Field of a chat -> that of Messages, where an effort alone does not turn reasoning on.
EFFORT_OF_MESSAGES = {"reasoning_effort": "high"}, {"reasoning": {"effort": "high"}}, {"think": "high"}


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate({"default": source}, {}, {"default": Reading()}, {})


def model_with(source: str, reasoning_parser: str = "none") -> ServedModel:
    template = template_of(source)
    forms = OutputForms.of_model(template, "hermes", reasoning_parser)
    limits = Limits(max_model_len=100, vocab_size=50)
    return ServedModel("m", limits, SamplingDefaults(), forms, template_variables=template.variables)


def prepare(model: ServedModel, api: str, args: ServerArgs | None = None, **fields: Any) -> tuple[Any, Any, list[str]]:
    """The message for a request to this API, its factory of parsers, and what is told to have no effect."""
    request: Any = SimpleNamespace(scope={HEADERS: [], NAMES: {}})
    args = args or ServerArgs()

    def read(kind: Any, **common: Any) -> Any:
        return parse_body(json.dumps(common | fields).encode(), kind)

    if api == "chat":
        result = prepared(request, read(ChatCompletionRequest, messages=CHAT), args, model)
    elif api == "responses":
        body = read(ResponsesRequest, input=CHAT)
        messages, _ = items.chat_messages(body.input)
        result = prepared(request, items.chat_request(body, model, messages), args, model, items.NAMES)
    else:
        body = read(MessagesRequest, messages=CHAT)
        chat = anthropic.chat_request(body, model, anthropic.chat_messages(body)[0])
        result = prepared(request, chat, args, model, anthropic.NAMES, thinks=False)
    told = [name for _, names in request.scope[HEADERS] for name in names.decode().split(", ")]
    return *result, told


def rendered(source: str, message: Any) -> str:
    return template_of(source).render(message.messages, variables=message.template_kwargs)


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
@pytest.mark.parametrize("family", TEMPLATES)
def test_reasoning_is_turned_off_and_on(family: str, api: str) -> None:
    source = TEMPLATES[family]
    model = model_with(source)
    for fields in OFF:
        assert rendered(source, prepare(model, api, **fields)[0]) == "off", fields
    for fields in ON:
        is_on = api != "messages" or fields not in EFFORT_OF_MESSAGES
        assert rendered(source, prepare(model, api, **fields)[0]) == ("on" if is_on else "off"), fields
    by_default, _, told = prepare(model, api)
    assert told == [] and (api == "messages" or by_default.template_kwargs == {})
    assert api != "messages" or rendered(source, by_default) == "off"
    last_word = prepare(model, api, chat_template_kwargs={next(iter(model.forms.switches)): "x"}, think=False)[0]
    assert "x" in last_word.template_kwargs.values()


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_reasoning_without_a_switch(api: str) -> None:
    """It can only be ended at once, if a budget of 0 asks for that; without any reasoning, it is off."""
    always, never = model_with("</think>", "think"), model_with("x")
    effort_only = model_with("Reasoning: {{ reasoning_effort }} {# is none #}")
    for fields in OFF[:-3]:
        is_budget = any("budget" in name or value == {"max_tokens": 0} for name, value in fields.items())
        if is_budget:
            assert prepare(always, api, **fields)[0].sampling_params.thinking.budget == 0
        for model in (effort_only,) if is_budget else (always, effort_only):
            with pytest.raises(RequestError, match="has no switch for it; leave the field out") as e:
                prepare(model, api, **fields)
            assert e.value.status == 400 and e.value.param is not None
            assert e.value.message.startswith(e.value.param)
        assert prepare(never, api, **fields)[2] == []
    for fields in ON:
        assert not prepare(always, api, **fields)[0].template_kwargs.keys() - {"enable_thinking", "thinking"}
        assert prepare(never, api, **fields)[2], fields
    assert prepare(always, api)[2] == prepare(effort_only, api)[2] == []


def test_effort_reaches_templates_that_read_it() -> None:
    model = model_with("{{ reasoning_effort }}")
    for fields in ({"reasoning_effort": "low"}, {"reasoning": {"effort": "low"}}, {"think": "low"}):
        message, _, told = prepare(model, "chat", **fields)
        assert message.template_kwargs == {"reasoning_effort": "low"} and told == []
    assert prepare(model, "chat", reasoning={"summary": "auto"})[2] == ["reasoning.summary"]
    both = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
    assert prepare(model, "chat", **both)[0].template_kwargs == {"reasoning_effort": "high"}
    message, _, told = prepare(model, "messages", output_config={"effort": "low"})
    assert message.template_kwargs == {"reasoning_effort": "low"} and told == []
    assert prepare(model_with("x"), "messages", output_config={"effort": "low"})[2] == ["output_config.effort"]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"thinking_budget": 1024}, "thinking_budget", "no markers of this model's reasoning are known"),
        ({"reasoning": {"max_tokens": 7}}, "reasoning.max_tokens", "no markers"),
        ({"thinking_token_budget": -2}, "thinking_budget", "must be a number of tokens"),
        ({"reasoning": {"max_tokens": 2**31}}, "reasoning.max_tokens", "up to 2147483647, 0"),
        ({"thinking_budget": 7, "reasoning": {"max_tokens": 0}}, "thinking_budget", "contradicts reasoning.max_tokens"),
        ({"enable_thinking": True, "think": False}, "think", "contradicts enable_thinking"),
        ({"thinking": {"type": "deep"}}, "thinking", "'deep'"),
        ({"thinking": "off"}, "thinking", "thinking"),
        ({"enable_thinking": "no"}, "enable_thinking", "enable_thinking"),
    ],
)
def test_reasoning_fields_that_cannot_be_honoured(fields: dict[str, Any], param: str, says: str) -> None:
    for api in ("chat", "responses", "messages"):
        with pytest.raises(RequestError, match=says) as e:
            prepare(model_with(TEMPLATES["Qwen3"]), api, **fields)
        assert e.value.param == param


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_reasoning_has_a_budget(api: str) -> None:
    model = model_with("<think></think>", "think")
    names = ({"thinking_token_budget": 7}, {"reasoning": {"max_tokens": 7}}, {"thinking_budget": 7, "think": True})
    for fields in (*names, {"thinking": {"type": "enabled", "budget_tokens": 7}}):
        message, _, told = prepare(model, api, **fields)
        assert (message.sampling_params.thinking.budget, told) == (7, [])
    for fields, budget in (({}, 5), ({"thinking_budget": -1}, None), ({"thinking_budget": 9}, 9)):
        limited = prepare(model, api, ServerArgs(thinking_budget=5), **fields)[0].sampling_params.thinking
        assert limited == Thinking("<think>", "</think>", budget=budget)
    switched = model_with("{{ enable_thinking }}<think></think>", "think")
    message, _, _ = prepare(switched, api, ServerArgs(thinking_budget=0))
    assert message.template_kwargs == {"enable_thinking": False}, "a switch is better than the end of what has begun"
    assert prepare(model_with("x"), api, ServerArgs(thinking_budget=5))[0].sampling_params.thinking is None


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_reasoning_can_be_hidden(api: str) -> None:
    model = model_with("<think></think>", "think")
    for fields, shown in (({}, "a"), ({"include_reasoning": False}, ""), ({"reasoning": {"exclude": True}}, "")):
        _, new_parser, _ = prepare(model, api, **fields)
        message = message_of(new_parser().feed("<think>a</think>b", is_last=True))
        assert (message.content, message.reasoning_content) == ("b", shown)
        deltas = [json.loads(d) for d in deltas_of(new_parser(), "<think>a</think>b", True)]
        assert {"content": "b"} in deltas and len(deltas) == 1 + bool(shown)


FUNCTION = {"type": "function", "function": {"name": "f"}}
LARK = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: A"}}
CUSTOM = {"type": "custom", "custom": {"name": "c", "description": "d", "format": LARK}}


def test_custom_tool_is_a_function_of_one_text() -> None:
    message, new_parser, told = prepare(model_with("x"), "chat", tools=[FUNCTION, CUSTOM, {"type": "web_search"}])
    assert told == ["tools.format", "tools.web_search"] and message.tools[0] == FUNCTION and len(message.tools) == 2
    function = message.tools[1]["function"]
    assert function["name"] == "c" and function["description"] == "d\n\nThe input must match this grammar:\nstart: A"
    assert function["parameters"]["properties"] == {"input": {"type": "string"}}
    for arguments, text in (('{"input": "a\\n\\"b"}', 'a\n"b'), ('{"patch": 1}', '{"patch": 1}'), ("{}", "{}")):
        output = f'<tool_call>{{"name": "c", "arguments": {arguments}}}</tool_call>'
        (call,) = message_of(new_parser().feed(output, is_last=True)).tool_calls
        assert (call.custom.name, call.custom.input) == ("c", text)
        first, second = (json.loads(d)["tool_calls"][0] for d in deltas_of(new_parser(), output, True))
        assert first["type"] == "custom" and first["custom"] == {"name": "c", "input": ""} and first["id"]
        assert second == {"index": 0, "custom": {"input": text}}
    (call,) = message_of(
        new_parser().feed('<tool_call>{"name": "f", "arguments": {}}</tool_call>', is_last=True)
    ).tool_calls
    assert call.function.name == "f"


@pytest.mark.parametrize(
    ("written", "text"), [('{"input": "é"}', "é"), ('{"input": 1e400}', None), ('{"x": 18446744073709551617}', None)]
)
def test_a_custom_tool_gets_its_text_or_all_that_was_written(written: str, text: str | None) -> None:
    assert _with_text(ParsedCall("1", "c", written)).arguments == (written if text is None else text)


def test_calls_of_custom_tools_come_back() -> None:
    calls = [
        {"id": "1", "type": "custom", "custom": {"name": "c", "input": "t"}},
        {"id": "2", "type": "function", "function": {"name": "f", "arguments": "{}"}},
        {"id": "3", "type": "search", "search": {}},
    ]
    message, _, told = prepare(model_with("x"), "chat", messages=[*CHAT, {"role": "assistant", "tool_calls": calls}])
    assert [c["function"] for c in message.messages[1]["tool_calls"]] == [
        {"name": "c", "arguments": '{"input":"t"}'},
        {"name": "f", "arguments": "{}"},
    ]
    assert told == ["messages.tool_calls"]


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ("required", "web_search"),
        ({"type": "web_search"}, "web_search"),
        ({"type": "custom", "custom": {"name": "d"}}, "not in tools"),
        ({"type": "custom", "custom": None}, "tool_choice must be"),
        ({"type": "custom"}, "tool_choice must be"),
        ({}, "tool_choice must be"),
    ],
)
def test_choice_of_a_tool_that_is_left_out(choice: Any, says: str) -> None:
    with pytest.raises(RequestError, match=says) as e:
        prepare(model_with("x"), "chat", tools=[{"type": "web_search", "name": 5}], tool_choice=choice)
    assert e.value.param == "tool_choice"


def test_custom_tool_can_be_forced() -> None:
    choice = {"type": "custom", "custom": {"name": "c"}}
    message, _, _ = prepare(model_with("x"), "chat", tools=[FUNCTION, CUSTOM], tool_choice=choice)
    assert (
        '"c' in message.sampling_params.grammar.text.replace("\\", "")
        and '"input"' in message.sampling_params.grammar.text
    )


@pytest.mark.parametrize("tool", [{"type": "custom"}, {"type": "custom", "custom": {}}, {"type": ""}, {"type": 5}, {}])
def test_malformed_tools_are_refused(tool: Any) -> None:
    with pytest.raises(RequestError) as e:
        prepare(model_with("x"), "chat", tools=[{"type": "web_search"}, tool])
    assert e.value.param == "tools[1]"
