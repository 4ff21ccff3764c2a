"""Bodies -> messages for the engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from minisgl.api.generate import generate_messages
from minisgl.api.protocol import ChatCompletionRequest, CompletionRequest, GenerateRequest, parse_body
from minisgl.api.requests import SamplingDefaults, chat_message, completion_messages
from minisgl.errors import RequestError
from minisgl.message import TokenizeMsg
from minisgl.params import Limits

LIMITS = Limits(max_model_len=100, vocab_size=50)
DEFAULTS = SamplingDefaults()
USER = [{"role": "user", "content": "x"}]


def chat(defaults: SamplingDefaults = DEFAULTS, **body: Any) -> TokenizeMsg:
    request = parse_body(json.dumps({"messages": USER, **body}).encode(), ChatCompletionRequest)
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
    assert chat(messages=messages).messages == [
        {"role": "user", "content": "ab", "name": "n"},
        {"role": "assistant", "content": "", "tool_calls": [call | {"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "r", "tool_call_id": "c1"},
        {"role": "assistant", "content": "done", "reasoning_content": "hm"},
    ]


def test_prompt_forms() -> None:
    assert [m.text for m in complete(prompt="a")] == ["a"]
    assert [m.text for m in complete(prompt=["a", "b"])] == ["a", "b"]
    assert [m.input_ids for m in complete(prompt=[1, 2])] == [b"\1\0\0\0\2\0\0\0"]
    assert len(complete(prompt=[[1], [2, 3]])) == 2
    assert len(complete(prompt=["a", [1]])) == 2


def test_generate_forms() -> None:
    assert generate(text="a")[0].sampling_params.max_tokens == 99  # the context is shorter than the usual 128
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


@pytest.mark.parametrize("field", ["max_new_tokens", "max_tokens"])
def test_max_tokens_may_be_zero_but_not_negative(field: str) -> None:
    assert generate(text="a", sampling_params={field: 0})[0].sampling_params.max_tokens == 0
    assert complete(prompt="a", max_tokens=0)[0].sampling_params.max_tokens == 0
    with pytest.raises(RequestError) as e:
        generate(text="a", sampling_params={field: -1})
    assert e.value.param == field


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


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_k", -2),
        ("max_tokens", 0),
        ("max_tokens", 101),
        ("max_completion_tokens", 0),
        ("max_completion_tokens", 101),
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
        ("tools", [{"type": "x"}]),
        ("tools", [{"type": "function", "function": {}}]),
        ("tools", [{"type": "function", "function": {"name": ""}}]),
        ("tools", [{"type": "function", "function": {"name": 5}}]),
        ("tools", [{"type": "function", "function": {"name": "f", "parameters": "x"}}]),
        ("chat_template", "x"),
        ("chat_template_kwargs", {"tools": 1}),
        ("cache_salt", "x" * 257),
        ("messages", []),
        ("messages", None),
    ],
)
def test_refusals_name_the_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as e:
        chat(**{field: value})
    assert e.value.param == field
    assert e.value.status == 400


def test_number_out_of_range_names_its_field() -> None:
    with pytest.raises(RequestError, match="out of range") as e:
        parse_body(b'{"messages": [], "temperature": 1e400}', ChatCompletionRequest)
    assert e.value.param == "temperature"
