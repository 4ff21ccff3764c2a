"""Fields that are in no type: refused, told or harmless."""

from __future__ import annotations

import json
import logging
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as TextParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParams

from minisgl.api import fields
from minisgl.api.fields import (
    ABSENT,
    ALIASES,
    FOREIGN,
    HARMLESS,
    INSTEAD,
    ignored_fields,
    read_body,
    rename_aliases,
    told,
    unread_kwargs,
)
from minisgl.api.generate import generate_messages
from minisgl.api.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerateRequest,
    GenerateSampling,
    MessagesRequest,
    ResponsesRequest,
)
from minisgl.api.requests import SamplingDefaults
from minisgl.core.errors import RequestError
from minisgl.core.params import Limits
from support.bodies import parse_body

PAGE = Path(__file__).parents[3] / "docs" / "api.md"
CHAT, TEXT, RESPONSES, MESSAGES = ChatCompletionRequest, CompletionRequest, ResponsesRequest, MessagesRequest
GENERATE, EMBED = GenerateRequest, EmbeddingRequest
KINDS: list[Any] = [CHAT, TEXT, RESPONSES, MESSAGES, GENERATE, EMBED]


def ignored(kind: Any = ChatCompletionRequest, refuses: bool = False, **given: Any) -> list[str]:
    return ignored_fields(given, kind, refuses)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(name for name in FOREIGN if "." not in name))
def test_fields_that_change_the_answer_elsewhere_are_refused_by_name(kind: Any, name: str) -> None:
    if name in kind.__struct_fields__:
        pytest.skip("a field here")
    with pytest.raises(RequestError, match="is not supported"):
        ignored(kind, **{name: ["odd"] * 100})
    with pytest.raises(RequestError, match="is not supported") as e:
        ignored(kind, **{name: "odd"})
    assert (e.value.status, e.value.param, e.value.code) == (400, name, "unsupported_value")
    assert all(ignored(kind, **{name: value}) == [] for value in (None, *FOREIGN[name]))
    if kind is GenerateRequest:
        with pytest.raises(RequestError, match=f"sampling_params.{name} is not supported"):
            ignored(kind, sampling_params={name: "odd"})


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in ABSENT.items() for name in sorted(names)])
def test_fields_that_another_form_of_a_chat_does_not_have_are_refused(kind: Any, name: str) -> None:
    for value in ("?", 7, True, ["?"], {"type": "?"}):
        with pytest.raises(RequestError, match=f"^{name}=.* is not supported") as e:
            ignored(kind, **{name: value})
        assert (e.value.status, e.value.param, e.value.code) == (400, name, "unsupported_value")
    assert all(ignored(kind, **{name: value}) == [] for value in fields.ELSEWHERE[name])
    assert f"`{name}`" in PAGE.read_text().partition("## What Responses and Messages do not have")[2].partition("##")[0]


@pytest.mark.parametrize("kind", KINDS)
def test_harmless_fields_are_accepted_and_told(kind: Any) -> None:
    names = sorted(HARMLESS - {*kind.__struct_fields__} - ABSENT.get(kind, set()))
    assert ignored(kind, refuses=True, **dict.fromkeys(names, "x")) == names


def test_names_have_one_meaning_and_advice_leads_to_a_field() -> None:
    groups = [set(FOREIGN), set(ALIASES), set(HARMLESS)]
    assert sum(map(len, groups)) == len(set.union(*groups))
    known = {field for kind in (*KINDS, GenerateSampling) for field in kind.__struct_fields__}
    assert {use for use in INSTEAD.values() if use.isidentifier()} <= known
    assert INSTEAD.keys() <= known | set(FOREIGN) | set(ALIASES)


@pytest.mark.parametrize(
    ("kind", "given", "ours"),
    [
        (CHAT, {"grammar": 'root ::= "a"'}, {"guided_grammar": 'root ::= "a"'}),
        (CHAT, {"num_predict": -1, "n": 1}, {"max_tokens": -1, "n": 1}),
        (TEXT, {"n_predict": 3, "random_seed": 4}, {"max_tokens": 3, "seed": 4}),
        (TEXT, {"stop_words": ["x"], "stop": None}, {"stop": ["x"]}),
        (MESSAGES, {"stop_sequences": ["x"], "sampling_seed": 5}, {"stop_sequences": ["x"], "seed": 5}),
        (RESPONSES, {"stop_sequences": ["x"], "min_new_tokens": 2}, {"stop": ["x"], "min_tokens": 2}),
        (TEXT, {"n_predict": 3, "max_tokens": 3}, {"max_tokens": 3}),
        (GENERATE, {"max_new_tokens": 3}, {"max_tokens": 3}),
        (CHAT, {"n_predict": None}, {"n_predict": None}),
        (EMBED, {"n_predict": 3}, {"n_predict": 3}),
    ],
)
def test_other_names_of_the_same_field_are_honoured(kind: Any, given: dict[str, Any], ours: dict[str, Any]) -> None:
    sent = set(given)
    names = rename_aliases(given, kind)
    assert given == ours
    assert names == {ours: name for name, ours in ALIASES.items() if name in sent - given.keys()}


@pytest.mark.parametrize("given", [{"n_predict": 3, "max_tokens": 4}, {"max_new_tokens": 3, "n_predict": 4}])
def test_a_field_with_two_values_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="exclude each other") as e:
        rename_aliases(given, CHAT)
    assert e.value.param == "n_predict"


def test_other_names_are_honoured_in_sampling_params() -> None:
    given = {"text": "x", "sampling_params": {"regex": "a", "n_predict": 3}}
    request, names, ignored = read_body(json.dumps(given).encode(), GENERATE)
    assert (request.sampling_params.guided_regex, request.sampling_params.max_tokens, ignored) == ("a", 3, [])
    assert names == {"guided_regex": "sampling_params.regex", "max_tokens": "sampling_params.n_predict"}


PART = {"type": "text", "text": "x"}


@pytest.mark.parametrize(
    ("kind", "given", "names"),
    [
        (CHAT, {"stream_options": {"foo": 1}}, "stream_options.foo"),
        (CHAT, {"messages": [{}, {"foo": 1}, {"foo": 1}]}, "messages.foo"),
        (CHAT, {"messages": [{"content": [PART | {"cache_control": 1}]}]}, "messages.content.cache_control"),
        (CHAT, {"messages": [{"tool_calls": [{"index": 0}]}]}, "messages.tool_calls.index"),
        (CHAT, {"messages": [{"tool_calls": [{"function": {"x": 0}}]}]}, "messages.tool_calls.function.x"),
        (CHAT, {"tools": [{"function": {"name": "f", "strict": True}}]}, "tools.function.strict"),
        (CHAT, {"tool_choice": {"function": {"name": "f", "x": 1}}}, "tool_choice.function.x"),
        (CHAT, {"response_format": {"json_schema": {"strict": True, "x": 1}}}, "response_format.json_schema.x"),
        (TEXT, {"structured_outputs": {"regex": "a", "x": 1}}, "structured_outputs.x"),
        (RESPONSES, {"input": [{"status": "x", "content": [PART | {"x": 1}]}]}, "input.content.x input.status"),
        (RESPONSES, {"text": {"format": {"strict": True, "x": 1}}, "reasoning": {"x": 1}}, "reasoning.x text.format.x"),
        (MESSAGES, {"system": [PART | {"cache_control": 1}], "speed": "fast"}, "speed system.cache_control"),
        (MESSAGES, {"messages": [{"content": [{"content": [PART | {"x": 1}]}]}]}, "messages.content.content.x"),
        (MESSAGES, {"thinking": {"x": 1}, "output_config": {"format": {"x": 1}}}, "output_config.format.x thinking.x"),
        (GENERATE, {"sampling_params": {"zzz": 1, "user": "x"}}, "sampling_params.user sampling_params.zzz"),
        (EMBED, {"input": ["x"], "temperature": 1}, "temperature"),
        (CHAT, {"metadata": {"temprature": 1}, "logit_bias": {"x": 1}, "models": []}, "metadata models"),
    ],
)  # fmt: skip
def test_unknown_names_inside_objects_are_told(kind: Any, given: dict[str, Any], names: str) -> None:
    assert ignored(kind, **given) == names.split()


@pytest.mark.parametrize(
    ("kind", "given", "says"),
    [
        (CHAT, {"stream_options": {"include_usag": True}}, "stream_options.include_usag .*mean include_usage"),
        (CHAT, {"messages": [{}, {"contnt": "x"}]}, r"messages\[1\].contnt .*mean content"),
        (CHAT, {"tools": [{"function": {"paramaters": 1}}]}, r"tools\[0\].function.paramaters .*mean parameters"),
        (CHAT, {"response_format": {"json_schema": {"shema": 1}}}, "json_schema.shema .*mean schema"),
        (CHAT, {"response_format": {"schema": {}}}, "use response_format.json_schema.schema"),
        (CHAT, {"messages": [{"images": ["x"]}]}, r"messages\[0\].images is not supported"),
        (CHAT, {"messages": [{"prefix": True}]}, r"messages\[0\].prefix .*use continue_final_message"),
        (CHAT, {"structured_outputs": {"whitespace_pattern": "x"}}, "structured_outputs.whitespace_pattern is"),
        (CHAT, {"options": {"seed": 1}}, "options .*use its fields at the top level"),
        (CHAT, {"repeat_last_n": 64}, "use repetition_penalty"),
        (CHAT, {"format": "json"}, "use response_format"),
        (CHAT, {"max_output_tokens": 5}, "use max_tokens"),
        (CHAT, {"instructions": "x"}, "use a message with the role system"),
        (CHAT, {"topP": 0.5}, "did you mean top_p"),
        (CHAT, {"stopSequences": ["x"]}, "did you mean stop_sequences"),
        (CHAT, {"max-tokens": 5}, "did you mean max_tokens"),
        (TEXT, {"tools": [{}]}, "tools is not a field of this endpoint; use /v1/chat/completions"),
        (RESPONSES, {"text": {"formt": {}}}, "text.formt .*mean format"),
        (RESPONSES, {"max_length": 5}, "use max_output_tokens"),
        (MESSAGES, {"messages": [{"content": [{"txt": "x"}]}]}, r"messages\[0\].content\[0\].txt .*mean text"),
        (GENERATE, {"sampling_params": {"max_new_token": 1}}, "did you mean max_new_tokens"),
        (GENERATE, {"sampling_params": {"n_predict": 1}}, "sampling_params.n_predict .*use max_tokens"),
        (RESPONSES, {"max_completion_tokens": 5}, "use max_output_tokens"),
        (RESPONSES, {"num_predict": 5}, "num_predict .*use max_output_tokens"),
        (RESPONSES, {"max_tokens": 5}, "max_tokens=5 .*use max_output_tokens"),
        (RESPONSES, {"format": "json"}, "use text.format or output_config.format"),
        (RESPONSES, {"prompt": {"id": "x"}}, "prompt is not a field of this endpoint"),
        (RESPONSES, {"conversation": "x"}, "use previous_response_id"),
        (TEXT, {"functions": [{}]}, "functions is not supported$"),
        (GENERATE, {"return_token_ids": True}, "return_token_ids is not a field of this endpoint"),
        (GENERATE, {"temperature": 0}, "temperature belongs in sampling_params"),
    ],
)  # fmt: skip
def test_names_that_mean_something_are_refused_with_the_right_one(kind: Any, given: dict[str, Any], says: str) -> None:
    with pytest.raises(RequestError, match=says) as e:
        ignored(kind, **given)
    assert e.value.message.startswith(e.value.param or "?")


def test_fields_of_other_endpoints_with_a_neutral_value_change_nothing() -> None:
    given = {"truncation": "disabled", "instructions": "", "return_logprob": False, "suffix": ""}
    assert ignored(**given, function_call="auto", messages=[]) == []
    assert read_body(b'{"input": "x", "modalities": [ "text" ], "options": { }, "n": 1.0}', RESPONSES).ignored == []


@pytest.mark.parametrize(
    "place", ["%s", '{"messages": [], %s}', '{"messages": [{"role": "user", %s}]}', '{"tools": [{%s}]}']
)
@pytest.mark.parametrize("name", ["made_up", "images", "n_predict", "content", "\\ud800"])
def test_any_json_in_an_unknown_field_is_told_or_refused(place: str, name: str) -> None:
    deep = "[" * 2000 + "]" * 2000
    for value in ("1e400", "1" + "0" * 400, '"\\ud800"', deep, "[1e400]", f"[{'1' * 400}]", '{"\\ud800": [1e400]}'):
        body = (place % f'"{name}": {value}').encode()
        with suppress(RequestError):
            told(read_body(body, CHAT).ignored)


def test_names_are_counted_and_compared_once() -> None:
    messages = [{"role": "user", "temprature": None, "x": 1, "y": 2}] * 20_000
    assert ignored(messages=messages) == ["messages.x", "messages.y"]
    with pytest.raises(RequestError, match="more than 128 names"):
        ignored(**{f"zz{i}" * 9: 1 for i in range(130)})


@pytest.mark.parametrize(
    ("kind", "name", "meant"),
    [
        (ChatCompletionRequest, "temprature", "temperature"),
        (ChatCompletionRequest, "Temperature", "temperature"),
        (ChatCompletionRequest, "max_token", "max_tokens"),
        (ChatCompletionRequest, "max_completions_tokens", "max_completion_tokens"),
        (ChatCompletionRequest, "respose_format", "response_format"),
        (CompletionRequest, "promt", "prompt"),
        (CompletionRequest, "repitition_penalty", "repetition_penalty"),
        (GenerateRequest, "sampling_param", "sampling_params"),
        (ChatCompletionRequest, "num_predicts", "num_predict"),
        (EmbeddingRequest, "dimension", "dimensions"),
    ],
)
def test_misspelt_fields_are_refused_with_the_right_name(kind: Any, name: str, meant: str) -> None:
    with pytest.raises(RequestError, match=f"did you mean {meant}"):
        ignored(kind, **{name: 1})


def test_other_fields_are_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "_logged", set())
    with caplog.at_level(logging.INFO, "minisgl"):
        for _ in range(2):
            assert told(ignored(some_future_field=1, another="x", n=1)) == ["another", "some_future_field"]
    assert len(caplog.messages) == 2
    with pytest.raises(RequestError, match="some_future_field is not a field"):
        ignored(refuses=True, some_future_field=1)


def test_told_names_are_safe_in_a_header() -> None:
    names = told(ignored(**{"a\r\nset-cookie: x": 1, "é" * 500: 1, **{f"zz{i}" * 9: 1 for i in range(50)}}))
    assert len(names) == fields.MAX_REPORTED
    assert all(name.isascii() and name.isprintable() and len(name) <= fields.MAX_NAME for name in names)


@pytest.mark.parametrize(
    ("params", "kind"),
    [(ChatParams, ChatCompletionRequest), (TextParams, CompletionRequest), (ResponseParams, ResponsesRequest)],
)
def test_every_field_of_openai_is_known(params: Any, kind: Any) -> None:
    assert get_type_hints(params).keys() <= {*kind.__struct_fields__, *FOREIGN, *HARMLESS, *fields.ELSEWHERE}


def test_the_page_lists_the_fields() -> None:
    page = PAGE.read_text(encoding="utf-8").partition("## Fields of other servers")[2]
    aliases, refused, neutral, harmless = (part.partition(".\n")[0] for part in re.split(r"\*\*.*?:\n", page)[1:])
    found = re.findall(r"`([\w.]+)`:\s([^,\n]+)", neutral)
    values = {name: [json.loads(value) for value in given.split(" or ")] for name, given in found}
    assert dict(re.findall(r"`(\w+)`:\s`(\w+)`", aliases)) == ALIASES
    assert dict.fromkeys(re.findall(r"`([\w.]+)`", refused), ()) | values == FOREIGN
    assert set(re.findall(r"`([\w.]+)`", harmless)) == HARMLESS


def test_generate_takes_the_body_of_mini_sglang() -> None:
    limits = Limits(max_model_len=100, vocab_size=50)

    def params(**given: Any) -> Any:
        body = json.dumps({"prompt": "x", **given}).encode()
        (message,) = generate_messages(parse_body(body, GenerateRequest), SamplingDefaults(), limits)
        return message.sampling_params

    assert params(max_tokens=8).max_tokens == 8
    assert params(max_tokens=8, ignore_eos=True).ignore_eos
    assert params(sampling_params={"min_new_tokens": 3}).min_tokens == 3
    with pytest.raises(RequestError, match="max_tokens and sampling_params exclude each other"):
        params(max_tokens=8, sampling_params={"max_new_tokens": 9})


def test_names_that_the_template_does_not_read_are_told_or_refused() -> None:
    variables = frozenset({"enable_thinking", "bos_token"})
    assert unread_kwargs(None, variables, True) == unread_kwargs({"enable_thinking": True}, variables, True) == []
    told = [f"chat_template_kwargs.{name}" for name in ("other", "self", "sp?t")]
    assert unread_kwargs({"self": 1, "other": 2, "sp\u00e4t": 3}, variables, False) == told
    for kwargs, refuses, says in (
        ({"enable_thinkin": 1}, False, "mean enable_thinking"),
        ({"self": 1}, True, "refuse"),
    ):
        with pytest.raises(RequestError, match=f"is not a variable of the chat template.*{says}") as e:
            unread_kwargs(kwargs, variables, refuses)
        assert (e.value.status, e.value.param) == (400, "chat_template_kwargs")
