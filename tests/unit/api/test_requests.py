"""Bodies -> messages for the engine."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import pytest

from minisgl.api.generate import generate_messages
from minisgl.api.protocol import ChatCompletionRequest, CompletionRequest, GenerateRequest
from minisgl.api.requests import SamplingDefaults, chat_message, completion_messages
from minisgl.core.errors import RequestError
from minisgl.core.message import TokenizeMsg
from minisgl.core.params import Limits
from support.bodies import parse_body

LIMITS = Limits(max_model_len=100, vocab_size=50)
DEFAULTS = SamplingDefaults()
USER = [{"role": "user", "content": "x"}]


def chat(defaults: SamplingDefaults = DEFAULTS, **body: Any) -> TokenizeMsg:
    encoded = json.dumps({"messages": USER, **body}).encode()
    request = parse_body(encoded, ChatCompletionRequest)
    return chat_message(request, defaults, LIMITS)


def complete(**body: Any) -> list[TokenizeMsg]:
    return completion_messages(parse_body(json.dumps(body).encode(), CompletionRequest), DEFAULTS, LIMITS)


def generate(**body: Any) -> list[TokenizeMsg]:
    return generate_messages(parse_body(json.dumps(body).encode(), GenerateRequest), DEFAULTS, LIMITS)


def test_null_is_legal_everywhere() -> None:
    for kind in (ChatCompletionRequest, CompletionRequest, GenerateRequest):
        nulls = dict.fromkeys(kind.__struct_fields__)
        if kind is GenerateRequest:
            assert parse_body(json.dumps(nulls).encode(), kind) == GenerateRequest()
    nulls = dict.fromkeys(ChatCompletionRequest.__struct_fields__) | {"messages": USER}
    assert chat(**nulls) == chat()
    nulls = dict.fromkeys(CompletionRequest.__struct_fields__) | {"prompt": "x"}
    assert complete(**nulls) == complete(prompt="x")


def test_defaults_come_from_the_model_unless_given() -> None:
    assert chat().sampling_params.temperature == 1.0
    config = {"temperature": 0.6, "top_k": 20, "top_p": None, "do_sample": True, "min_p": 0.1, "repetition_penalty": 2}
    model = SamplingDefaults.from_generation_config(config)
    assert model == SamplingDefaults(temperature=0.6, top_k=20, min_p=0.1, repetition_penalty=2.0)
    params = chat(model).sampling_params
    assert (params.min_p, params.repetition_penalty) == (0.1, 2)
    own = chat(model, min_p=0, repetition_penalty=1).sampling_params
    assert (own.min_p, own.repetition_penalty) == (0, 1)
    assert chat(model).sampling_params.top_k == 20
    params = chat(model, temperature=0, top_k=-1, stop="s", max_tokens=3, max_completion_tokens=4).sampling_params
    assert (params.temperature, params.top_k, params.stop, params.max_tokens) == (0.0, 0, ("s",), 4)


def test_chat_fields_reach_the_message() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert chat(tools=[tool]).tools == [tool]
    assert chat(tools=[tool], tool_choice="none").tools is None
    continued = chat(continue_final_message=True)
    assert (continued.continue_final_message, continued.add_generation_prompt) == (True, False)
    assert chat(chat_template_kwargs={"enable_thinking": False}).template_kwargs == {"enable_thinking": False}
    assert chat(user="somebody") == chat()


def test_messages_for_the_template() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "n"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "r", "tool_call_id": "c1"},
        {"role": "assistant", "content": "done", "reasoning_content": "hm"},
    ]
    nulls = messages[1].pop("refusal"), messages[1].pop("content")
    assert chat(messages=messages).messages == messages and nulls == (None, None)
    continued = chat(messages=messages[:1], continue_final_message=True).messages
    assert continued == [{"role": "user", "content": "ab", "name": "n"}]
    odd = call | {"id": None, "index": 0, "function": {"name": "f", "arguments": {"n": 2**70}}}
    (sent,) = chat(messages=[{"role": "assistant", "tool_calls": [odd], "mood": [1.5]}]).messages or ()
    function = {"name": "f", "arguments": '{"n":1180591620717411303424}'}
    assert sent["tool_calls"] == [{"type": "function", "index": 0, "function": function}] and sent["mood"] == [1.5]


def test_prompt_forms() -> None:
    assert [m.text for m in complete(prompt="a")] == ["a"]
    assert [m.text for m in complete(prompt=["a", "b"])] == ["a", "b"]
    assert [m.input_ids for m in complete(prompt=[1, 2])] == [b"\1\0\0\0\2\0\0\0"]
    assert len(complete(prompt=[[1], [2, 3]])) == 2
    assert len(complete(prompt=["a", [1]])) == 2


def test_generate_forms() -> None:
    assert generate(text="a")[0].sampling_params.max_tokens == 100  # the context is shorter than the usual 128
    assert generate(prompt="a", sampling_params={"max_tokens": 5})[0].sampling_params.max_tokens == 5
    assert generate(input_ids=[[1], [2]], sampling_params={"sampling_seed": 3})[1].sampling_params.seed == 3
    both = generate(text="a", sampling_params={"sampling_seed": 3, "seed": 4, "max_new_tokens": 5, "max_tokens": 6})
    assert (both[0].sampling_params.seed, both[0].sampling_params.max_tokens) == (3, 5)
    assert generate(text="a", sampling_params={"seed": 4})[0].sampling_params.seed == 4
    with pytest.raises(RequestError, match="exactly one"):
        generate(text="a", prompt="b")


def test_logprob_fields_of_generate() -> None:
    def asked(**fields: Any) -> tuple[int | None, bool]:
        params = generate(text="a", **fields)[0].sampling_params
        return params.logprobs, params.wants_prompt_logprobs

    assert asked() == asked(return_logprob=False, logprob_start_len=0, top_logprobs_num=3) == (None, False)
    assert asked(return_logprob=True) == asked(return_logprob=True, logprob_start_len=-1) == (0, False)
    assert asked(return_logprob=True, logprob_start_len=2, top_logprobs_num=3) == (3, True)


@pytest.mark.parametrize(
    ("ask", "field", "least"),
    [
        (lambda **given: chat(**given), "max_tokens", 1),
        (lambda **given: chat(**given), "max_completion_tokens", 1),
        (lambda **given: complete(prompt="a", **given)[0], "max_tokens", 0),
        (lambda **given: generate(text="a", sampling_params=given)[0], "max_tokens", 0),
        (lambda **given: generate(text="a", sampling_params=given)[0], "max_new_tokens", 0),
    ],
)
def test_max_tokens_is_cut_to_the_context_or_without_a_limit(ask: Any, field: str, least: int) -> None:
    def asked(value: Any) -> Any:
        return ask(**{field: value}).sampling_params.max_tokens

    assert [asked(n) for n in (least, 7.0, 100, 101, 32_000, 1e30, 10**30)] == [least, 7, 100, 100, 100, 100, 100]
    assert asked(-1) is asked(-2) is asked(-1.0) is None
    for value in (-3, -(10**30), 1.5, True, "7"):
        with pytest.raises(RequestError, match=field) as e:
            asked(value)
        assert e.value.param in (field, f"sampling_params.{field}")


def test_add_special_tokens_of_a_completion() -> None:
    assert complete(prompt="a", add_special_tokens=True) == complete(prompt="a")
    assert [m.add_special_tokens for m in complete(prompt=["a", [1]], add_special_tokens=False)] == [False, False]


def test_every_sampling_field_arrives() -> None:
    fields: dict[str, Any] = {
        "min_p": 0.1,
        "presence_penalty": -0.5,
        "frequency_penalty": 1.5,
        "repetition_penalty": 1.2,
        "logit_bias": {"3": 2.5, "4": -100},
        "min_tokens": 2,
        "max_tokens": 9,
    }
    params = chat(**fields).sampling_params
    assert params.logit_bias == ((3, 2.5), (4, -100.0))
    assert {n: getattr(params, n) for n in fields if n != "logit_bias"} == {
        n: v for n, v in fields.items() if n != "logit_bias"
    }
    for name in ("include_stop_str_in_output", "no_stop_trim"):
        assert chat(**{name: True}).sampling_params.include_stop_str_in_output
    assert chat(cache_salt="anna").sampling_params.cache_salt == "anna"
    assert [chat(speculate=wanted).sampling_params.speculate for wanted in (None, True, False)] == [True, True, False]
    assert params.has_penalties and not chat(**dict.fromkeys(fields)).sampling_params.has_penalties


def test_an_integer_may_be_written_as_a_double() -> None:
    """For example by Lua, and by Java libraries that read any number as a double."""
    given: dict[str, Any] = {
        "seed": 42,
        "n": 1,
        "top_k": -1,
        "min_tokens": 2,
        "stop_token_ids": [3, 4],
        "top_logprobs": 2,
    }
    given |= {"logit_bias": [[3, -100]], "logprobs": True, "chat_template_kwargs": {"x": 0.5}}

    def doubled(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: doubled(v) for k, v in value.items()}
        is_number = type(value) is int
        return [doubled(v) for v in value] if isinstance(value, list) else float(value) if is_number else value

    assert chat(**doubled(given)) == chat(**given)
    assert complete(prompt=[[5.0, 6], [7e0]]) == complete(prompt=[[5, 6], [7]])
    assert complete(prompt=[5.0, 6.0], logprobs=3.0) == complete(prompt=[5, 6], logprobs=3)
    body = {"input_ids": [5.0], "return_logprob": True, "top_logprobs_num": 2.0, "logprob_start_len": -1.0}
    assert generate(**body, sampling_params={"seed": 3.0})[0].sampling_params.seed == 3
    for prompt in ([5, 1.5], [True], [5, 1e400], [5.0, "x"]):
        with pytest.raises(RequestError, match="prompt"):
            complete(prompt=prompt) if 1e400 not in prompt else complete(prompt=[5, float(2**70)])


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ({"seed": -1}, {}),
        ({"stop": ""}, {}),
        ({"stop": []}, {}),
        ({"top_k": -1.0}, {}),
        ({"logit_bias": []}, {}),
        ({"logit_bias": [[3, 1.5]]}, {"logit_bias": {"3": 1.5}}),
        ({"functions": [], "function_call": "auto"}, {}),
        ({"function_call": "none", "tools": []}, {}),
        ({"user": 5}, {}),
        ({"user": {"id": "x"}}, {}),
    ],
)
def test_words_that_mean_nothing_are_accepted(given: dict[str, Any], means: dict[str, Any]) -> None:
    assert chat(**given) == chat(**means)


def test_logprobs_of_a_completion_may_be_off() -> None:
    assert complete(prompt="a", logprobs=False) == complete(prompt="a")


def test_top_p_0_is_greedy_and_kept() -> None:
    assert chat(top_p=0).sampling_params.top_p == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "0.7"),
        ("temperature", True),
        ("top_p", -0.1),
        ("stream", "true"),
        ("stop", [None]),
        ("seed", 42.5),
        ("seed", "42"),
        ("logit_bias", [[1.5, 1]]),
        ("logit_bias", [[-1, 1]]),
        ("logit_bias", [[7, 1], [7, 2]]),
        ("functions", [{}]),
        ("function_call", {"name": "f"}),
        ("top_k", -2),
        ("max_tokens", 0),
        ("max_completion_tokens", 0),
        ("stop", [""]),
        ("stop", ["x"] * 17),
        ("stop_token_ids", [50]),
        ("seed", 2**63),
        ("logprobs", 3),
        ("top_logprobs", 3),
        ("response_format", {"type": "json_objects"}),
        ("response_format", {"type": "json_schema"}),
        ("guided_json", "{"),
        ("guided_choice", []),
        ("guided_regex", ""),
        ("structured_outputs", {"json": {}, "regex": "x"}),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"50": 1}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"7": 1, "07": 2}),
        ("min_p", 1.5),
        ("min_tokens", -1),
        ("chat_template", "x"),
        ("chat_template_kwargs", {"tools": 1}),
        ("cache_salt", "x" * 257),
        ("messages", []),
        ("messages", None),
    ],
)
def test_refusals_name_the_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as e:
        chat(**{field: value})
    assert e.value.param == field
    assert e.value.status == 400


CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}, {"function": {}}]}
FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"messages": [*USER, {"role": "narrator"}]}, "messages[1].role"),
        ({"messages": [*USER, {"role": ""}]}, "messages[1].role"),
        ({"messages": [*USER, {}]}, "messages[1].role"),
        ({"messages": [*USER, {"role": "user", "content": 5}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [*USER, CALL]}, "messages[1].tool_calls[1].function.name"),
        ({"messages": ["x"]}, "messages"),
        ({"tools": [FUNCTION, {"type": "x"}]}, "tools[1]"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [FUNCTION, {"type": "function", "function": {"name": ""}}]}, "tools[1].function.name"),
        ({"tools": [{"type": "function", "function": {"name": 5}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stop_token_ids": [1, 1.5]}, "stop_token_ids"),
        ({"chat_template_kwargs": {"x": []}}, "chat_template_kwargs"),
    ],
)
def test_refusals_name_the_path(given: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as e:
        chat(**given)
    error = e.value.named({})
    assert (error.status, error.param) == (400, param)
    assert param in error.message


@pytest.mark.parametrize(
    ("message", "param", "names", "becomes"),
    [
        ("seed must fit", "seed", {"seed": "random_seed"}, ("random_seed must fit", "random_seed")),
        ("messages[2].role is odd", "messages[2].role", {"messages": "input"}, ("input: role is odd", "input")),
        ("the prompt is too long", "prompt", {"prompt": "messages"}, ("messages: the prompt is too long", "messages")),
        ("tools[0] is odd", "tools[0]", {"tools": "x"}, ("x is odd", "x")),
        ("seed is odd", "seed", {}, ("seed is odd", "seed")),
        ("the context is full", "text", {}, ("text: the context is full", "text")),
        ("the prompt is too long", "prompt", {"seed": "x"}, ("the prompt is too long", "prompt")),
        ("not JSON", None, {"prompt": "x"}, ("not JSON", None)),
    ],
)
def test_errors_use_the_names_of_the_client(message: str, param: Any, names: dict[str, str], becomes: Any) -> None:
    error = RequestError(message, param=param, code="c", status=413).named(names)
    assert ((error.message, error.param), error.code, error.status) == (becomes, "c", 413)


@pytest.mark.parametrize("number", ["1e400", "-1e400", "18446744073709551616", "1" + "0" * 400])
def test_numbers_beyond_64_bits_name_their_field_or_are_kept(number: str) -> None:
    for field in ("temperature", "seed", "top_k"):
        with pytest.raises(RequestError) as e:
            chat_message(
                parse_body(
                    f'{{"messages": [{json.dumps(USER[0])}], "{field}": {number}}}'.encode(), ChatCompletionRequest
                ),
                DEFAULTS,
                LIMITS,
            )
        assert e.value.param == field
    tool = f'{{"type": "function", "function": {{"name": "f", "parameters": {{"maximum": {number}}}}}}}'
    body = f'{{"messages": [{json.dumps(USER[0])}], "tools": [{tool}]}}'
    (sent,) = chat_message(parse_body(body.encode(), ChatCompletionRequest), DEFAULTS, LIMITS).tools or ()
    kept = sent["function"]["parameters"]["maximum"]
    assert kept == (int(number) if number.isdigit() else math.copysign(sys.float_info.max, float(number)))


@pytest.mark.parametrize("text", ["NaN", "Infinity", "[1e400, NaN]"])
def test_what_is_not_json_stays_refused(text: str) -> None:
    with pytest.raises(RequestError, match="not valid JSON") as e:
        parse_body(f'{{"messages": [], "tools": {text}}}'.encode(), ChatCompletionRequest)
    assert e.value.code == "invalid_json"


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"temperature": -1}, "temperature=-1 (temperature=-1: Expected `float` >= 0.0)"),
        ({"temperature": "0.7"}, "temperature='0.7'"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"temperature": 1e30}, "temperature=1e+30"),
        ({"top_p": 2.0}, "top_p=2.0"),
        ({"top_k": "50"}, "top_k='50'"),
        ({"top_k": 2**70}, "top_k=1180591620717411303424"),
        ({"top_k": 0.5}, "top_k=0.5"),
        ({"min_p": [0.1]}, "min_p=[0.1]"),
        ({"min_p": True}, "min_p=True"),
        ({"repetition_penalty": 0}, "repetition_penalty=0"),
        ({"repetition_penalty": {}, "temperature": math.inf}, "repetition_penalty={}"),
    ],
)
def test_defaults_that_no_request_may_have_are_told_and_ignored(
    config: dict[str, Any], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = SamplingDefaults.from_generation_config({"top_p": 0.5} | config)
    assert model == SamplingDefaults(top_p=1.0 if "top_p" in config else 0.5)
    assert len(caplog.messages) == 1 and "generation_config.json" in caplog.text and says in caplog.text
    assert all(name in caplog.text for name in config)
    chat(model)


def test_usual_defaults_are_told_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert SamplingDefaults.from_generation_config({"top_k": -1, "temperature": None, "min_p": 0}) == DEFAULTS
    assert SamplingDefaults.from_generation_config({"top_k": 20.0, "temperature": 1}) == SamplingDefaults(top_k=20)
    assert not caplog.messages
