"""Generated text -> content, reasoning and tool calls, wherever the increments are cut."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minisgl.api.frontend import Timeline, joined
from minisgl.api.openai import OpenAIRenderer
from minisgl.api.parsers.channels import ChannelParser
from minisgl.api.parsers.forms import TOOL_FORMS
from minisgl.api.parsers.output import OutputForms, OutputParser
from minisgl.api.parsers.pieces import Content, ParsedCall, Piece, Reasoning
from minisgl.api.parsers.reasoning import REASONING_FORMS, ReasoningParser
from minisgl.api.parsers.tools import ToolParser
from minisgl.api.protocol import ChatCompletionRequest, StreamOptions
from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.core.message import TokenizeMsg, UserReply
from minisgl.core.params import Grammar, SamplingParams
from minisgl.core.plan import FinishReason
from minisgl.launch.launch import banner, check_model
from minisgl.settings.options import ServerArgs, options_of
from minisgl.settings.sources import parse_args
from minisgl.tokenizer.template import ChatTemplate

Result = tuple[str, str, list[tuple[str, str]]]
TOOLS: dict[str, Any] = {
    "f": {
        "properties": {
            "x": {"type": "integer"},
            "on": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "text": {"type": "string"},
            "either": {"type": ["string", "null"]},
            "unit": {"$ref": "#/$defs/Unit"},
            "ratio": {"type": "number"},
            "list": {"type": "array"},
            "cycle": {"$ref": "#/properties/cycle"},
        },
        "$defs": {"Unit": {"enum": ["1", "2"]}},
    },
    "get_weather": None,
}
WEATHER = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
TRICKY = '{"name": "f", "arguments": {"a": "}</tool_call>{\\"[", "ü": [{"x": "\\\\"}, 1.50]}}'
TRICKY_ARGUMENTS = '{"a": "}</tool_call>{\\"[", "ü": [{"x": "\\\\"}, 1.50]}'
PARAMETERS = WEATHER.replace("arguments", "parameters")


def new_parser(
    form: str | None, reasoning: bool = False, opened: bool = False, only_first: bool = False
) -> OutputParser:
    if form == "harmony":
        return OutputParser(ChannelParser(TOOLS, only_first))
    return OutputParser(
        ReasoningParser(REASONING_FORMS["think"], opened, TOOL_FORMS[form] if form else None) if reasoning else None,
        ToolParser(TOOL_FORMS[form], TOOLS, only_first) if form else None,
    )


def result(pieces: Iterable[Piece]) -> Result:
    """(content, reasoning, calls), put together."""
    pieces = list(pieces)
    return (
        "".join(p.text for p in pieces if isinstance(p, Content)),
        "".join(p.text for p in pieces if isinstance(p, Reasoning)),
        [(p.name, p.arguments) for p in pieces if isinstance(p, ParsedCall)],
    )


def parse(parser: OutputParser, parts: Iterable[str]) -> Result:
    pieces = [piece for part in parts for piece in parser.feed(part)]
    return result(pieces + parser.feed("", is_last=True))


def cut(text: str, random: Random) -> list[str]:
    parts = []
    while text:
        n = random.choice((1, 2, 3, 7, 30))
        parts.append(text[:n])
        text = text[n:]
    return parts


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def xml(name: str, **arguments: str) -> str:
    parts = "".join(f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parts}</function>\n</tool_call>"


def glm(name: str, **arguments: str) -> str:
    parts = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n" for k, v in arguments.items())
    return f"<tool_call>{name}\n{parts}</tool_call>"


R1 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>\n"
V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"


def deepseek(form: str, *names: str) -> str:
    return f"<｜tool▁calls▁begin｜>{''.join(form.format(n, PARIS[1]) for n in names)}<｜tool▁calls▁end｜>"


def invoke(*calls: tuple[str, dict[str, str]], open: str = "<minimax:tool_call>") -> str:
    texts = "".join(
        f'<invoke name="{name}">\n'
        + "".join(f'<parameter name="{k}">{v}</parameter>\n' for k, v in given.items())
        + "</invoke>\n"
        for name, given in calls
    )
    return f"{open}\n{texts}{open.replace('<', '</')}"


def kimi(*calls: tuple[str, str]) -> str:
    texts = (f"<|tool_call_begin|>{i}<|tool_call_argument_begin|>{given}<|tool_call_end|>" for i, given in calls)
    return f"<|tool_calls_section_begin|>{''.join(texts)}<|tool_calls_section_end|>"


def gemma(name: str, given: str) -> str:
    return f"<|tool_call>call:{name}{given}<tool_call|>"


def channel(header: str, text: str, end: str = "<|end|><|start|>assistant") -> str:
    return f"<|channel|>{header}<|message|>{text}{end}"


TO_F = "commentary to=functions.f <|constrain|>json"
COMMANDS = '[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": {"city": "Paris"}}'
LONG = json.dumps({"a": "x" * 700})
PARIS = ("get_weather", '{"city": "Paris"}')
CASES: list[tuple[str | None, str, str, list[tuple[str, str]]]] = [
    # Hermes
    ("hermes", f"<tool_call>\n{WEATHER}\n</tool_call>", "", [PARIS]),
    ("hermes", f"<tool_call>{WEATHER}", "", [PARIS]),  # a stop string took the closing tag
    ("hermes", f"<tool_call>{WEATHER}\n</tool_", "", [PARIS]),
    ("hermes", f"Let me see.\n<tool_call>{WEATHER}</tool_call>\n", "Let me see.", [PARIS]),
    ("hermes", f"\n<tool_call>{WEATHER}</tool_call>\nDone. ", "Done.", [PARIS]),
    ("hermes", f"A <tool_call>{WEATHER}</tool_call> B", "A  B", [PARIS]),
    ("hermes", f"<tool_call>{TRICKY}</tool_call>", "", [("f", TRICKY_ARGUMENTS)]),
    ("hermes", f"{call('f', '{}')}\n{call('get_weather', PARIS[1])}", "", [("f", "{}"), PARIS]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    ("hermes", call("other", "{}"), "", [("other", "{}")]),
    ("hermes", call("f", LONG), "", [("f", LONG)]),
    # Mistral
    ("mistral", f"[TOOL_CALLS]f[ARGS]{LONG}", "", [("f", LONG)]),
    ("mistral", f"[TOOL_CALLS] [{WEATHER}, {TRICKY}]", "", [PARIS, ("f", TRICKY_ARGUMENTS)]),
    ("mistral", f"Sure.\n[TOOL_CALLS][{WEATHER}]", "Sure.", [PARIS]),
    ("mistral", '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]f{}', "", [PARIS, ("f", "{}")]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"a": {}}', "", [("f", '{"a": {}}')]),
    ("mistral", f"[TOOL_CALLS] no, [TOOL_CALLS][{WEATHER}]", "[TOOL_CALLS] no,", [PARIS]),
    ("mistral", f"[TOOL_CALLS]{WEATHER}", "", [PARIS]),
    # Llama 3
    ("llama3", PARAMETERS, "", [PARIS]),
    ("llama3", f"\n{PARAMETERS}; {PARAMETERS}\n", "", [PARIS, PARIS]),
    ("llama3", f"{PARAMETERS}, {PARAMETERS}", "", [PARIS, PARIS]),
    ("llama3", f"[{PARAMETERS}, {WEATHER}]", "", [PARIS, PARIS]),
    ("llama3", f"{PARAMETERS}\n{PARAMETERS}", "", [PARIS, PARIS]),
    ("llama3", f"```json\n{PARAMETERS}\n```", "", [PARIS]),
    ("llama3", f"<|python_tag|>{PARAMETERS}", "", [PARIS]),
    ("llama3", f"<|python_tag|>{PARAMETERS};<|python_tag|>{PARAMETERS}", "", [PARIS, PARIS]),
    ("llama3", f"Well: <|python_tag|>{PARAMETERS}", "Well:", [PARIS]),
    ("llama3", '<|python_tag|>{"name": "other", "parameters": {}}', "", [("other", "{}")]),
    (
        "llama3",
        '{"type": "function", "name": "f", "parameters": {"a": "' + "x" * 400 + '"}}',
        "",
        [("f", '{"a": "' + "x" * 400 + '"}')],
    ),
    # arguments: null, empty, missing, text; or under the other name
    *(
        ("hermes", f'<tool_call>{{"name": "f"{rest}}}</tool_call>', "", [("f", arguments)])
        for rest, arguments in (
            (', "arguments": null', "{}"),
            (', "arguments": ""', "{}"),
            (', "arguments": " null "', "{}"),
            (', "parameters": {"a": 1}', '{"a": 1}'),
            (', "arguments": null, "parameters": {"a": 1}', '{"a": 1}'),
            (', "arguments": {"a": 123456789012345678901234567890}', '{"a": 123456789012345678901234567890}'),
        )
    ),
    # closing tags that are missing, too many, or after text; several calls between two tags
    ("hermes", f"<tool_call>\n{WEATHER}\n<tool_call>\n{WEATHER}", "", [PARIS, PARIS]),
    ("hermes", f"<tool_call>{WEATHER}\n{WEATHER}</tool_call>", "", [PARIS, PARIS]),
    ("hermes", f"<tool_call>[{WEATHER}, {WEATHER}]</tool_call>", "", [PARIS, PARIS]),
    ("hermes", f"<tool_call>\n```json\n{WEATHER}\n```\n</tool_call>", "", [PARIS]),
    ("hermes", f"<tool_call>{WEATHER}}}</tool_call>", "", [PARIS]),
    ("hermes", f"<tool_call>{WEATHER} and more</tool_call>", "and more</tool_call>", [PARIS]),
    ("hermes", f"<tool_call>get_weather\n{PARIS[1]}</tool_call>", "", [PARIS]),
    # Qwen3-Coder: arguments have the types of the schema
    ("hermes", xml("f", x="5", text="5", ratio="2", unit="1"), "", [("f", '{"x":5,"text":"5","ratio":2,"unit":"1"}')]),
    ("hermes", xml("f", on="True", either="null", x="1e2"), "", [("f", '{"on":true,"either":null,"x":1e2}')]),
    (
        "hermes",
        xml("f", on="null", either="none", list='["a", {}]'),
        "",
        [("f", '{"on":null,"either":"none","list":["a", {}]}')],
    ),
    ("hermes", xml("f", text='\n <b>{"ü\n'), "", [("f", '{"text":"\\n <b>{\\"ü\\n"}')]),
    ("hermes", xml("f", x="many", cycle="7", other="[1]"), "", [("f", '{"x":"many","cycle":7,"other":[1]}')]),
    ("hermes", xml("get_weather", city="Paris"), "", [("get_weather", '{"city":"Paris"}')]),
    (
        "hermes",
        f"Look:\n{xml('f')}\n{xml('get_weather')} Done.",
        "Look:\n\n Done.",
        [("f", "{}"), ("get_weather", "{}")],
    ),
    ("hermes", xml("f", x="1").removeprefix("<tool_call>\n").removesuffix("</tool_call>"), "", [("f", '{"x":1}')]),
    ("hermes", xml("f", x="1", text="a").replace("\n</parameter>", ""), "", [("f", '{"x":1,"text":"a"}')]),
    # GLM
    ("hermes", glm("f", x="5", text="5", other="é"), "", [("f", '{"x":5,"text":"5","other":"é"}')]),
    ("hermes", glm("get_weather"), "", [("get_weather", "{}")]),
    ("hermes", glm("f", x="5").replace("\n", ""), "", [("f", '{"x":5}')]),  # GLM-4.7
    # DeepSeek V3 and R1, then V3.1
    ("deepseek", f"Hm.{deepseek(R1, 'f', 'get_weather')}", "Hm.", [("f", PARIS[1]), PARIS]),
    ("deepseek", deepseek(V31, "f", "get_weather"), "", [("f", PARIS[1]), PARIS]),
    ("deepseek", deepseek(V31, "get_weather").removesuffix("<｜tool▁calls▁end｜>"), "", [PARIS]),
    # lists after a marker
    ("phi4", f"functools[{WEATHER}, {WEATHER}]", "", [PARIS, PARIS]),
    ("phi4", f"<|tool_call|>[{WEATHER}]<|/tool_call|>", "", [PARIS]),
    ("granite", f"<|tool_call|>[{WEATHER}]", "", [PARIS]),
    ("granite", f"<|tool_call|> {WEATHER}", "", [PARIS]),
    ("lfm2", '<|tool_call_start|>[get_weather(city="Paris")]<|tool_call_end|>Wait.', "Wait.", [PARIS]),
    # Python
    ("pythonic", "[get_weather(city='Paris'), f()]", "", [PARIS, ("f", "{}")]),
    (
        "pythonic",
        "[f(a=[1, -2.5], b={'c': None}, d=true, e='it\\'s \\d [', f=\"ü)\")]",
        "",
        [("f", '{"a": [1, -2.5], "b": {"c": null}, "d": true, "e": "it\'s \\\\d [", "f": "ü)"}')],
    ),
    ("pythonic", f"[{WEATHER}]", "", [PARIS]),  # xLAM
    # names that are words of Python, or none of its names
    (
        "pythonic",
        "<|python_start|>[get-weather(from='a, b', class={'x': [1,]}, a-b=(1, 2),), mcp:x.y()]",
        "",
        [
            ("get-weather", '{"from": "a, b", "class": {"x": [1]}, "a-b": [1, 2]}'),
            ("mcp:x.y", "{}"),
        ],
    ),
    ("pythonic", "<|python_start|>[f(a='x')]<|python_end|>", "", [("f", '{"a": "x"}')]),
    # XML: JSON instead of the parameters, values in Python, a line break that belongs to the value
    ("qwen3_coder", '<tool_call>\n<function=f>\n{"x": 1}\n</function>\n</tool_call>', "", [("f", '{"x": 1}')]),
    (
        "qwen3_coder",
        xml("f", list="['a', None, {'b': True}]", x=" 7 "),
        "",
        [("f", '{"list":["a", null, {"b": true}],"x":7}')],
    ),
    (
        "qwen3_coder",
        f"I look.\n{xml('f', x='1')}\n{xml('f', text='2')}",
        "I look.",
        [("f", '{"x":1}'), ("f", '{"text":"2"}')],
    ),
    (
        "seed_oss",
        xml("f", x="1", text="\n").replace("tool_call>", "seed:tool_call>"),
        "",
        [("f", '{"x":1,"text":"\\n"}')],
    ),
    # GLM
    (
        "glm45",
        f"Hm.\n{glm('f', x='5', text='a')}\n{glm('get_weather')}",
        "Hm.",
        [("f", '{"x":5,"text":"a"}'), ("get_weather", "{}")],
    ),
    ("glm47", glm("f", x="5", on="true", text=" a ").replace("\n", ""), "", [("f", '{"x":5,"on":true,"text":" a "}')]),
    # MiniMax
    (
        "minimax_m2",
        invoke(("f", {"x": "5", "text": "\n5\n", "list": "[1]"})),
        "",
        [("f", '{"x":5,"text":"\\n5\\n","list":[1]}')],
    ),
    (
        "minimax_m2",
        f"Look:\n{invoke(('f', {}), ('get_weather', {'city': 'Paris'}))}\n",
        "Look:",
        [("f", "{}"), ("get_weather", '{"city":"Paris"}')],
    ),
    (
        "minimax_m2",
        f"{invoke(('f', {'x': '1'}))} and {invoke(('f', {'on': 'null'}))}",
        "and",
        [("f", '{"x":1}'), ("f", '{"on":null}')],
    ),
    (
        "minimax_m2",
        "<minimax:tool_call><invoke name='f'><parameter name=x>1</parameter></invoke>",
        "",
        [("f", '{"x":1}')],
    ),
    # Gemma
    (
        "gemma4",
        gemma("f", '{text:<|"|>a "b" {c}, d:e<|"|>,x:-4.5,on:true,list:[<|"|>a<|"|>,{k:null}]}'),
        "",
        [("f", '{"text":"a \\"b\\" {c}, d:e","x":-4.5,"on":true,"list":["a",{"k":null}]}')],
    ),
    (
        "gemma4",
        gemma("f", "{}") + gemma("get_weather", '{city:<|"|>Paris<|"|>}'),
        "",
        [("f", "{}"), ("get_weather", '{"city":"Paris"}')],
    ),
    (
        "gemma4",
        gemma("f", '{"a": [1], <|"|>b<|"|>: c d , e : None}') + "Wait.",
        "Wait.",
        [("f", '{"a": [1], "b": "c d", "e": null}')],
    ),
    ("gemma4", gemma("f", "{a:1}").removesuffix("<tool_call|>"), "", [("f", '{"a":1}')]),
    ("functiongemma", "<start_function_call>call:f{a:<escape>1<escape>}<end_function_call>", "", [("f", '{"a":"1"}')]),
    # Kimi
    (
        "kimi_k2",
        "I look." + kimi(("functions.f:0", "{}"), ("functions.get_weather:1", PARIS[1])),
        "I look.",
        [("f", "{}"), PARIS],
    ),
    ("kimi_k2", kimi(("get_weather:0", PARIS[1])).replace("calls_section", "call_section"), "", [PARIS]),
    (
        "kimi_k2",
        kimi(("functions.a.b:12", f" {LONG} ")).removesuffix("<|tool_calls_section_end|>"),
        "",
        [("a.b", LONG)],
    ),
    # DeepSeek V3.1, Mistral from v11, Command, OLMo 3, Hunyuan, Granite
    ("deepseek_v31", f"Hm.{deepseek(V31, 'f', 'get_weather')}", "Hm.", [("f", PARIS[1]), PARIS]),
    (
        "mistral_v11",
        f"Hm.[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{PARIS[1]}[TOOL_CALLS]f[ARGS]{{}}",
        "Hm.",
        [PARIS, ("f", "{}")],
    ),
    ("command", f"<|START_ACTION|>{COMMANDS}\n]<|END_ACTION|>", "", [PARIS]),
    (
        "command",
        f'<|START_ACTION|>{COMMANDS}, {{"tool_call_id": "1", "tool_name": "f", "parameters": {{}}}}]<|END_ACTION|>',
        "",
        [PARIS, ("f", "{}")],
    ),
    (
        "olmo3",
        "Hm. <function_calls>get_weather(city='Paris')\nf(on=null, text='a)\\n</function_calls>')\n</function_calls>",
        "Hm.",
        [PARIS, ("f", '{"on": null, "text": "a)\\n</function_calls>"}')],
    ),
    (
        "olmo3",
        "<function_calls>f(x=1)</function_calls>get_weather (see f(x))",
        "get_weather (see f(x))",
        [("f", '{"x": 1}')],
    ),
    ("olmo3", "<function_calls>f(x=1)\nDone", "Done", [("f", '{"x": 1}')]),
    ("hunyuan", f"<tool_calls>[{WEATHER}, {WEATHER}]</tool_calls>", "", [PARIS, PARIS]),
    ("granite", f"<function_call> {WEATHER}", "", [PARIS]),
    ("lfm2", "<|tool_call_start|>f(x=1)\nf()<|tool_call_end|>", "", [("f", '{"x": 1}'), ("f", "{}")]),
    ("harmony", "<|message|>Hi.<|end|>", "Hi.", []),
    ("lfm2", "A<|tool_call_start|>[f(), get_weather(city='Paris')]<|tool_call_end|>B", "AB", [("f", "{}"), PARIS]),
    # gpt-oss
    ("harmony", channel("final", "Hi. ", "<|return|>"), "Hi. ", []),
    ("harmony", channel(TO_F, '{"x": 1}', "<|call|>"), "", [("f", '{"x": 1}')]),
    ("harmony", channel(TO_F, '{"x": 1}', ""), "", [("f", '{"x": 1}')]),  # the last token is not shown
    (
        "harmony",
        channel("commentary", "I look.") + channel(TO_F, "{}") + channel("commentary to=get_weather json", PARIS[1]),
        "I look.",
        [("f", "{}"), PARIS],
    ),
    ("harmony", " to=functions.f<|channel|>commentary json<|message|>{}<|call|>", "", [("f", "{}")]),
    (
        "harmony",
        f"<|start|>assistant{channel(TO_F, '{}')}{channel('final', 'A')}\n {channel('final', 'B', '')}",
        "A\nB",
        [("f", "{}")],
    ),
    ("harmony", channel("final", "A<|start|>assistant<|channel|>", ""), "A", []),  # cut off
]
CONTENT: list[tuple[str | None, str]] = [
    (None, call("f", "{}")),
    ("hermes", ""),
    ("hermes", " \n "),
    ("hermes", "  plain < text <tool_call and </tool_call>\n"),
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call>\n not JSON </tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "unfin'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call> sorry'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": 7, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": ' + "[" * 5000 + "]" * 5000 + "}</tool_call>"),
    ("mistral", "[TOOL_CALLS] [] and so on"),
    ("mistral", "[TOOL_CALLS] two words{}"),
    ("mistral", "[TOOL_CALLS] " + "x" * 300 + "{}"),
    ("mistral", f"[TOOL_CALLS] [{WEATHER}, 3]"),
    ("llama3", '{"name": "other", "parameters": {}}'),  # an answer in JSON, not a call
    ("llama3", '{"answer": 42}\n'),
    ("llama3", f"Here: {PARAMETERS}"),
    ("llama3", f'{{"answer": 42}} {PARAMETERS}'),
    ("llama3", "<|python_tag|>print(1)"),
    ("llama3", "```python\nprint({})\n```"),
    ("llama3", "[1, 2]"),
    ("llama3", '{"name": "other", "parameters": {"a": "' + "x" * 300),
    ("hermes", xml("f", x="1")[:-25]),
    ("hermes", glm("f", x="1")[:-12]),
    ("hermes", "<tool_call>f and g</tool_call> or"),
    ("deepseek", deepseek(R1, "f")[:60]),
    ("phi4", "import functools\n\n@functools.cache\ndef f(): return []"),
    ("qwen3_coder", "<tool_call>\n<function=f>\nhello\n</function>\n</tool_call>"),
    ("minimax_m2", invoke(("f", {"x": "1"}))[:-40]),
    ("minimax_m2", "<minimax:tool_call> or not"),
    ("minimax_m2", "<minimax:tool_call><invoke name=what is it</invoke></minimax:tool_call>"),
    ("gemma4", gemma("f", "{a:1")),
    ("gemma4", gemma("f", "{a:1,")[:-12]),
    ("gemma4", gemma("f", "{a:1:2}")),
    ("gemma4", "<|tool_call>call me<tool_call|>"),
    ("kimi_k2", kimi(("functions.f:0", '{"a": '))[:-30]),
    ("kimi_k2", kimi(("functions.f", "{}"))),
    ("command", f"<|START_ACTION|>{COMMANDS}"),
    ("command", '<|START_ACTION|>[{"tool_name": "", "parameters": {}}]<|END_ACTION|>'),
    ("olmo3", "<function_calls>\nf(x=\n"),
    ("olmo3", "<function_calls>\nsee f (x)</function_calls>"),
    ("harmony", channel(TO_F, '{"x": ', "")),
    ("harmony", channel(TO_F, "", "")),
    ("harmony", "to=functions.f"),
    ("harmony", " to sum it up: to=x " + "y" * 400),
    ("harmony", "<|channel|>final " + "y" * 400),
    ("pythonic", "[f(1)]"),
    ("pythonic", "[f(x=y)]"),
    ("pythonic", "[f(x=1e999)]"),
    ("pythonic", "[f(x='\\ud800')]"),
    ("pythonic", "[f(x=b'')]"),
    ("pythonic", "[f(**{'a': 1})]"),
    ("pythonic", "[Note] f(x=1)"),
    ("pythonic", "[f(x=" + "-" * 9000 + "1)]"),
    ("pythonic", "[f(x=" + "(" * 5000 + ")" * 5000 + ")]"),
]
ALL = CASES + [(form, text, text, []) for form, text in CONTENT]


@pytest.mark.parametrize(("form", "text", "content", "calls"), ALL)
def test_tool_call_forms(form: str | None, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    random = Random(text)
    for parts in ([text], list(text), *(cut(text, random) for _ in range(20))):
        assert parse(new_parser(form), parts) == (content, "", calls)
    for _, arguments in calls:
        assert isinstance(json.loads(arguments), dict)


FRAGMENTS = st.sampled_from(
    [
        *("<|channel|>", "analysis", TO_F, "<|message|>", "<|end|>", "<|start|>assistant", " to=functions.f"),
        *("<function=f>", "<parameter=x>", "</parameter>", "</function>", "<arg_key>", "<arg_value>", "</arg_value>"),
        *(
            "<minimax:tool_call>",
            '<invoke name="f">',
            '<parameter name="x">',
            "</invoke>",
            "<|tool_call>call:f{",
            '<|"|>',
        ),
        *("<tool_call|>", "<|tool_calls_section_begin|>", "functions.f:0", "<|tool_call_argument_begin|>", "[f(x='"),
        *(
            "<function_calls>",
            "f(x=1)",
            "</function_calls>",
            "<|START_ACTION|>",
            "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}",
        ),
        *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", WEATHER),
        *(
            PARAMETERS,
            f"[{WEATHER}]",
            TRICKY,
            "{",
            "}",
            "[",
            "]",
            '"',
            "\\",
            " ",
            "\n",
            ";",
            "f",
            "é🙂",
            "<",
            "</",
            "x" * 200,
        ),
    ]
)


@given(
    st.lists(FRAGMENTS | st.text(max_size=5), max_size=30).map("".join),
    st.sampled_from([None, *TOOL_FORMS]),
    st.booleans(),
    st.booleans(),
    st.randoms(use_true_random=False),
)
@example("[TOOL_CALLS]" + "x" * 250 + "[TOOL_CALLS]f{}", "mistral", False, False, Random(1))
def test_result_does_not_depend_on_the_cuts(
    text: str, form: str | None, reasoning: bool, opened: bool, random: Random
) -> None:
    opened = opened or "</think>" in text  # else it depends on the first cut
    whole = parse(new_parser(form, reasoning, opened), [text])
    assert parse(new_parser(form, reasoning, opened), cut(text, random)) == whole
    assert parse(new_parser(form, reasoning, opened), text) == whole
    if not whole[2] and not reasoning and form != "harmony":
        assert whole[0] == text  # nothing is lost


@pytest.mark.parametrize(
    ("form", "text"), [(form, text) for form, text, _, calls in CASES if calls and len(text) < 300]
)
def test_every_cut_gives_the_whole(form: str, text: str) -> None:
    """Cut at each place, also inside markers, and with a text before and after."""
    text = f"See 1 < 2.\n{text}\nAnd?" if form not in ("llama3", "pythonic", "harmony") else text
    whole = parse(new_parser(form), [text])
    for i in range(1, len(text)):
        assert parse(new_parser(form), [text[:i], text[i:]]) == whole, text[:i]


@pytest.mark.parametrize(
    ("text", "opened", "content", "reasoning"),
    [
        ("<think>\nhm, 3 < 4\n</think>\n\nYes.\n", False, "Yes.\n", "hm, 3 < 4"),
        ("hm\n\nwell\n</think>\n\nYes.", True, "Yes.", "hm\n\nwell"),
        ("\n<think>\nhm</think>Yes.", True, "Yes.", "hm"),
        ("<think>\n\n</think>\n\nYes.", False, "Yes.", ""),
        ("<think>unfinished </thi", False, "", "unfinished </thi"),
        ("hm", True, "", "hm"),
        ("Yes: <think>no</think>", False, "Yes: <think>no</think>", ""),
        (" \n<thin", False, " \n<thin", ""),
        ("\n ", True, "", ""),
        ("a</think>b</think>", True, "b</think>", "a"),
    ],
)
def test_reasoning(text: str, opened: bool, content: str, reasoning: str) -> None:
    for parts in ([text], list(text)):
        assert parse(new_parser(None, True, opened), parts) == (content, reasoning, [])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("seed_oss", "<seed:think>\nhm, 3 < 4</seed:think>Yes."),
        ("mistral", "[THINK]hm, 3 < 4[/THINK]Yes."),
        ("gemma4", "<|channel>thought\nhm, 3 < 4\n<channel|>Yes."),
        ("command", "<|START_THINKING|>hm, 3 < 4<|END_THINKING|>Yes."),
        ("kimi", "◁think▷hm, 3 < 4◁/think▷Yes."),
        ("granite", "Here is my thought process: hm, 3 < 4 Here is my response: Yes."),
        ("harmony", channel("analysis", "hm, 3 < 4") + channel("final", "Yes.", "<|return|>")),
        ("harmony", channel("analysis", "hm,") + channel("analysis", "3 < 4") + channel("final", "Yes.")),
    ],
)
def test_reasoning_forms(name: str, text: str) -> None:
    form = REASONING_FORMS[name]
    new = (lambda: ChannelParser(None)) if form.lead else (lambda: ReasoningParser(form, False))
    for i in range(len(text)):
        content, reasoning, calls = parse(OutputParser(new()), [text[:i], text[i:]])
        assert (content, reasoning.replace("\n", " "), calls) == ("Yes.", "hm, 3 < 4", [])


def test_ids_that_the_model_writes_are_kept() -> None:
    text = kimi(("functions.f:3", "{}"), ("functions.f:3", "{}"), ("f:4", "{}"))
    pieces = new_parser("kimi_k2").feed(text)
    ids = [piece.id for piece in pieces if isinstance(piece, ParsedCall)]
    assert (ids[0], ids[2], len({*ids})) == ("functions.f:3", "f:4", 3)
    (piece,) = new_parser("mistral").feed("[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{}")
    assert isinstance(piece, ParsedCall) and piece.id == "abcdefghi"


def test_channels_without_offered_tools_and_only_the_first_call() -> None:
    text = (
        channel("analysis to=python code", "1+1", "<|end|>") + channel(TO_F, "{}", "<|call|>") + channel("final", "A")
    )
    assert parse(OutputParser(ChannelParser(None)), [text]) == (
        f"<|channel|>{TO_F}<|message|>{{}}\nA",
        "<|channel|>analysis to=python code<|message|>1+1",
        [],
    )
    assert parse(new_parser("harmony", only_first=True), text + channel(TO_F, "{}"))[2] == [("f", "{}")]


@pytest.mark.parametrize("form", ["think", "deepseek_r1"])
@pytest.mark.parametrize("text", ["hm\n</think>\nYes.", "\nhm</think>Yes."])
def test_closing_tag_without_an_opening_one(form: str, text: str) -> None:
    """A body has the reasoning. A stream has sent it already, unless the parser is told to expect it."""
    opened = REASONING_FORMS[form].is_open("prompt")
    parser = lambda: OutputParser(ReasoningParser(REASONING_FORMS[form], opened), None)  # noqa: E731
    assert parse(parser(), [text]) == ("Yes.", "hm", [])
    assert parse(parser(), [f'["{text}"]'])[:2] == (f'["{text}"]', "") or form == "deepseek_r1"
    assert parse(parser(), text) == (("Yes.", "hm", []) if form == "deepseek_r1" else (text, "", []))
    assert opened == (form == "deepseek_r1") and not REASONING_FORMS[form].is_open("<think></think>")


@pytest.mark.parametrize(
    ("text", "content", "reasoning", "calls"),
    [
        # considered in the reasoning, which goes on
        (f"I could {call('f', '{}')}</think>\n{WEATHER}", WEATHER, f"I could {call('f', '{}')}", []),
        (
            f"I could {call('f', '{}')} or </think>\n{call('f', '{}')}",
            "",
            f"I could {call('f', '{}')} or",
            [("f", "{}")],
        ),
        # made in the reasoning, which the model forgot to close
        (f"I call\n{call('get_weather', PARIS[1])}", "", "I call", [PARIS]),
        (f"{call('get_weather', PARIS[1])}\n", "", "", [PARIS]),
        # cut off
        (f"I call {call('f', '{}')[:-4]}", "", f"I call {call('f', '{}')[:-4]}", []),
        ("I call <tool_", "", "I call <tool_", []),
    ],
)
def test_calls_inside_the_reasoning(text: str, content: str, reasoning: str, calls: list[tuple[str, str]]) -> None:
    for opened in (False, True):
        given = text if opened else f"<think>{text}"
        for parts in ([given], list(given), cut(given, Random(text))):
            assert parse(new_parser("hermes", True, opened), parts) == (content, reasoning, calls)


def test_only_first_drops_later_calls() -> None:
    text = f"{call('f', '{}')}\n{call('get_weather', PARIS[1])}"
    assert parse(new_parser("hermes", only_first=True), text) == ("", "", [("f", "{}")])
    assert parse(new_parser("mistral", only_first=True), [f"[TOOL_CALLS][{WEATHER}, {WEATHER}]"]) == ("", "", [PARIS])


def test_text_is_not_held_back_for_long() -> None:
    parser = new_parser("hermes")
    assert result(parser.feed("Hello there, 1 < 2"))[0] == "Hello there, 1 < 2"
    assert result(parser.feed("<tool"))[0] == ""
    assert result(parser.feed("box"))[0] == "<toolbox"


UNITS = [
    *(
        "<tool_call>",
        "<tool_call>{",
        '<tool_call>{"',
        "<tool_call>{}",
        "[TOOL_CALLS]",
        "[TOOL_CALLS]f",
        "[TOOL_CALLS][]",
    ),
    *(
        "<function_calls>f(x=1)\n",
        "<function_calls>f(x='",
        "<|tool_call>call:f{",
        '<|tool_call>call:f{a:<|"|>',
        '\\"',
    ),
    *(
        "<|tool_calls_section_begin|>f:0",
        '<invoke name="f">',
        "<function=f>",
        "<tool_call>f<arg_key>",
        "<|channel|>",
    ),
    *(
        "<|channel|>final<|message|>",
        "<|channel|>commentary to=f<|message|>{",
        "<|start|>",
        "to=",
        "<|end|>  ",
        "[f(x='",
    ),
    *("<|python_tag|>{", "<|python_tag|>{}", "<think>", "\n", "{", '{"name": ', "\\", "</think>", "; "),
]
GENERAL = ("llama3", "hermes")


@pytest.mark.parametrize(
    ("form", "unit"),
    [(name, u) for name, form in TOOL_FORMS.items() for u in UNITS if name in GENERAL or u.startswith(form.open)]
    + [("harmony", unit) for unit in UNITS if "|" in unit]
    + [("qwen3_coder", "<function=f><parameter=x>"), ("pythonic", "[f(x='")],
)
def test_work_is_linear(form: str, unit: str) -> None:
    """Texts that a naive parser would read again and again, whole and in small increments."""
    text = unit * (200_000 // len(unit))
    for parts in ([text], (text[i : i + 16] for i in range(0, len(text), 16))):
        started = time.process_time()
        parse(new_parser(form, True, False), parts)
        assert time.process_time() - started < 2.0


def reply(text: str, reason: FinishReason | None = None) -> UserReply:
    return UserReply(uid=1, text=text, completion_tokens=3, prompt_tokens=5, finish_reason=reason)


def render(new: Callable[[], OutputParser], parts: list[str], reason: FinishReason) -> tuple[Any, list[Any]]:
    """(the choice of the body, the choices of the stream)"""
    replies = [*(reply(p) for p in parts[:-1]), reply(parts[-1], reason)]
    body = OpenAIRenderer("m", True, StreamOptions(), new).body([joined(replies)], Timeline(0.0))
    whole = json.loads(body)["choices"][0]
    stream = OpenAIRenderer("m", True, StreamOptions(), new)
    events = [e for r in replies for e in stream.events(0, r)]
    assert all(e.startswith(b"data: {") and e.endswith(b"}\n\n") for e in events)
    return whole, [json.loads(e[6:])["choices"][0] for e in events]


def test_body_and_stream_have_the_same_calls() -> None:
    text = f"<think>hm</think>Look: {call('f', '{}')}\n{call('get_weather', PARIS[1])}"
    whole, chunks = render(lambda: new_parser("hermes", True), cut(text, Random(1)), FinishReason.STOP)
    message = whole["message"]
    assert (whole["finish_reason"], message["content"], message["reasoning_content"]) == ("tool_calls", "Look:", "hm")
    assert [c["function"] for c in message["tool_calls"]] == [
        {"name": "f", "arguments": "{}"},
        {"name": "get_weather", "arguments": PARIS[1]},
    ]
    assert all(c["id"].startswith("call_") and c["type"] == "function" for c in message["tool_calls"])
    assert len({c["id"] for c in message["tool_calls"]}) == 2
    deltas = [c["delta"] for c in chunks]
    assert "".join(d.get("content", "") for d in deltas) == "Look:"
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "hm"
    calls = [c for d in deltas for c in d.get("tool_calls", [])]
    assert [c["index"] for c in calls] == [0, 0, 1, 1]
    assert [c["function"] for c in calls[2:]] == [{"name": "get_weather", "arguments": ""}, {"arguments": PARIS[1]}]
    assert [c["finish_reason"] for c in chunks if c["finish_reason"]] == ["tool_calls"]


def test_finish_reason_is_tool_calls_only_after_a_complete_call() -> None:
    new = lambda: new_parser("hermes")  # noqa: E731
    complete, unfinished = call("f", "{}"), call("f", "{}")[:-20]
    for text, reason, expected in [
        (complete, FinishReason.LENGTH, "length"),
        (unfinished, FinishReason.LENGTH, "length"),
        (unfinished, FinishReason.STOP, "stop"),
        ("hello", FinishReason.STOP, "stop"),
    ]:
        whole, chunks = render(new, [text], reason)
        assert (whole["finish_reason"], chunks[-1]["finish_reason"]) == (expected, expected)
        assert whole["message"]["content"] == (None if text == complete else text)
        assert ("tool_calls" in whole["message"]) == (text == complete)
    whole, chunks = render(new, ["", ""], FinishReason.STOP)
    assert whole["message"] == {"role": "assistant", "content": ""}
    assert [c["delta"] for c in chunks] == [{"content": ""}, {}]


def folder_with(template: str, path: Path) -> Path:
    (path / "chat_template.jinja").write_text(template)
    return path


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ messages }}", None, None),
        ("<tool_call> </think>", "hermes", "think"),
        ("'<|start|>assistant<|channel|>analysis<|message|>'", "harmony", "harmony"),
        ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key> </think>", "glm45", "think"),
        ("<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>", "glm47", None),
        ("<minimax:tool_call>\n<invoke name=</think>", "minimax_m2", "think"),
        ("<seed:tool_call>\n<function=</seed:think>", "seed_oss", "seed_oss"),
        ("'<|tool_call>call:' + name '<|channel>thought<channel|>'", "gemma4", "gemma4"),
        ("<|tool_calls_section_begin|><think></think>", "kimi_k2", "think"),
        ("[TOOL_CALLS] + name + [ARGS] [/THINK]", "mistral_v11", "mistral"),
        ("'<｜tool▁call▁begin｜>'+ tool['function']['name'] + '<｜tool▁sep｜>'", "deepseek_v31", None),
        ("write <|START_THINKING|> <|END_THINKING|> <|START_ACTION|>", "command", "command"),
        ("wrapped in <function_calls></function_calls> XML tags", "olmo3", None),
        ("'<|tool_call_start|>[' + calls", "lfm2", None),
        ("<tool_calls>[]</tool_calls></think>", "hunyuan", "think"),
        ("[TOOL_CALLS]", "mistral", None),
        ("Environment: ipython", "llama3", None),
        ("<tool_call>\n<function=example>\n<parameter=x>", "qwen3_coder", None),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'", "deepseek", None),
        ("'<|tool|>' + message['tools'] + '<|/tool|>'", "phi4", None),
        ("write <|tool_call|> followed by a JSON list", "granite", None),
        ("List of tools: <|tool_list_start|>", "lfm2", None),
        ("in the format of [func_name1(params_name1=params_value1...), func_name2(params)]", "pythonic", None),
    ],
)
def test_forms_are_read_off_the_template(
    tmp_path: Path, template: str, tools: str | None, reasoning: str | None
) -> None:
    folder = folder_with(template, tmp_path)
    forms = OutputForms.of_model(ChatTemplate.of_folder(folder), "auto", "auto")
    assert forms.tools is (tools and TOOL_FORMS[tools])
    assert forms.reasoning is (reasoning and REASONING_FORMS[reasoning])
    assert OutputForms.of_model(ChatTemplate.of_folder(folder), "none", "none") == OutputForms()
    named = "mistral_v11" if tools == "mistral_v11" else "mistral"  # the variant of the template
    assert OutputForms.of_model(ChatTemplate.of_folder(folder), "mistral", "none").tools is TOOL_FORMS[named]


@pytest.mark.parametrize(
    ("template", "flag", "parsers", "warnings"),
    [
        ("{{ messages }}{{ tools }}", "auto", ("none", "none"), 1),
        ("{{ messages }}{{ tools }}", "none", ("none", "none"), 0),
        ("{{ messages }}{{ tools }}", "llama3", ("llama3", "none"), 0),
        ("{{ messages }}{{ tools }}<tool_call></think>", "auto", ("hermes", "think"), 0),
        ("{{ messages }}", "auto", ("none", "none"), 0),
    ],
)
def test_the_start_names_the_parsers_or_warns_once(
    template: str, flag: str, parsers: tuple[str, str], warnings: int, caplog: pytest.LogCaptureFixture
) -> None:
    args = parse_args(["--chat-template", template, "--tool-call-parser", flag])
    checked = check_model(args)
    assert checked.parsers == parsers
    assert len(caplog.records) == warnings and all("--tool-call-parser" in r.message for r in caplog.records)
    shown = banner(args, checked, {}, "http://localhost")
    assert [f"tool calls {parsers[0]}" in shown, f"reasoning {parsers[1]}" in shown] == [p != "none" for p in parsers]


def test_flags_name_every_form() -> None:
    options = options_of(ServerArgs)
    assert options["tool_call_parser"].choices == ("auto", "none", *TOOL_FORMS)
    assert options["reasoning_parser"].choices == ("auto", "none", *REASONING_FORMS)


def test_forms_of_the_built_in_model() -> None:
    assert OutputForms.of_model(ChatTemplate.of_folder(BUILTIN_MODEL), "auto", "auto") == OutputForms(
        TOOL_FORMS["hermes"]
    )


def message(**fields: Any) -> TokenizeMsg:
    return TokenizeMsg(uid=0, sampling_params=SamplingParams(), messages=[{"role": "user", "content": "x"}], **fields)


REQUEST = ChatCompletionRequest(messages=[])
SWITCHED = """{%- if add_generation_prompt -%}
assistant: {% if enable_thinking is defined and enable_thinking is false -%}
<think></think>{%- else -%}<think>{%- endif -%}{%- endif -%}"""


def test_thinking_switch_decides_whether_the_prompt_opens_the_reasoning(tmp_path: Path) -> None:
    forms = OutputForms.of_model(ChatTemplate.of_folder(folder_with(SWITCHED, tmp_path)), "auto", "auto")
    for fields, expected in [
        ({}, ("b", "a")),
        ({"template_kwargs": {"enable_thinking": False}}, ("a</think>b", "")),
        ({"template_kwargs": {"enable_thinking": True}}, ("b", "a")),
        ({"add_generation_prompt": False}, ("a</think>b", "")),
        ({"continue_final_message": True, "add_generation_prompt": False}, ("a</think>b", "")),
    ]:
        _, new = forms.prepare(REQUEST, message(**fields))
        assert new is not None
        assert parse(new(), "a</think>b")[:2] == expected


def test_grammar_applies_after_an_opened_reasoning(tmp_path: Path) -> None:
    forms = OutputForms.of_model(ChatTemplate.of_folder(folder_with(SWITCHED, tmp_path)), "auto", "auto")
    grammar = Grammar("regex", "[0-9]+")
    for opens, kwargs in ((True, {}), (False, {"enable_thinking": False})):
        asked = msgspec.structs.replace(
            message(template_kwargs=kwargs), sampling_params=SamplingParams(grammar=grammar)
        )
        shown, _ = forms.prepare(REQUEST, asked)
        assert shown.sampling_params.grammar == msgspec.structs.replace(grammar, after="</think>" if opens else "")


def test_only_offered_tools_are_parsed(tmp_path: Path) -> None:
    forms = OutputForms.of_model(ChatTemplate.of_folder(folder_with("[TOOL_CALLS]", tmp_path)), "auto", "auto")
    plain = message()
    assert forms.prepare(REQUEST, plain)[0] == plain
    shown, new = forms.prepare(REQUEST, message(tools=[{"type": "function", "function": {"name": "f"}}]))
    assert new is not None
    assert shown.sampling_params.skip_special_tokens and shown.sampling_params.shown_tokens == (
        *("[ARGS]", "[CALL_ID]", "[TOOL_CALLS]"),
    )
    (piece,) = new().feed("[TOOL_CALLS]f{}")
    assert isinstance(piece, ParsedCall)
    assert len(piece.id) == 9 and piece.id.isalnum()  # as its template wants it back
