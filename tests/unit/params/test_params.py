"""What `SamplingParams` makes of the values that Python callers give."""

from __future__ import annotations

import math
import re
from typing import Any

import msgspec
import numpy as np
import pytest

from minisgl.core import params
from minisgl.core.errors import RequestError
from minisgl.core.params import Grammar, SamplingParams


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"stop": "hat"}, ("hat",)),
        ({"stop": ["a", "b"]}, ("a", "b")),
        ({"stop": []}, ()),
        ({"stop_token_ids": 5}, (5,)),
        ({"stop_token_ids": np.array([5, 6])}, (5, 6)),
        ({"logit_bias": {5: 1}}, ((5, 1.0),)),
        ({"logit_bias": [(5, 1.5)]}, ((5, 1.5),)),
        ({"top_k": -1}, 0),
        ({"top_k": np.int64(3)}, 3),
        ({"temperature": 1}, 1.0),
        ({"temperature": np.float32(0.5)}, 0.5),
        ({"grammar": Grammar("regex", "a")}, Grammar("regex", "a")),
        ({"seed": None}, None),
        ({"stop": None}, ()),  # as null over HTTP
        ({"temperature": None}, 1.0),
    ],
)
def test_values_are_converted(given: dict[str, Any], kept: Any) -> None:
    params = SamplingParams(**given)
    (name,) = given
    assert getattr(params, name) == kept
    assert type(getattr(params, name)) is type(kept)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert msgspec.structs.replace(params, max_tokens=3).max_tokens == 3


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": "0.5"}, "temperature='0.5': Expected `float`, got `str`"),
        ({"temperature": True}, "temperature=True: Expected `float`, got `bool`"),
        ({"max_tokens": 1.5}, "max_tokens=1.5: Expected `int | null`, got `float`"),
        ({"max_tokens": True}, "max_tokens=True: Expected `int | null`, got `bool`"),
        ({"stop": 5}, r"stop=.*: Expected `str`, got `int`"),
        ({"stop": ["a", 5]}, r"stop=.*: Expected `str`, got `int`$"),
        ({"ignore_eos": "no"}, "ignore_eos='no': Expected `bool`, got `str`"),
        ({"grammar": "a|b"}, "grammar='a|b': Expected `object | null`"),
        ({"stop_token_ids": "5"}, "stop_token_ids=.*: Expected `int`, got `str`"),
        ({"logit_bias": {"5": 1}}, "logit_bias=.*: Expected `int`, got `str`"),
    ],
)
def test_wrong_types_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message.replace("|", r"\|")) as e:
        SamplingParams(**given)
    assert [e.value.param] == [*given]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -1}, "temperature=-1: Expected `float` >= 0.0"),
        ({"temperature": math.nan}, "temperature=nan: Expected `float` >= 0.0"),
        ({"temperature": math.inf}, "temperature=inf: Expected `float` <= 100.0"),
        ({"top_p": -0.1}, "top_p=-0.1: Expected `float` >= 0.0"),
        ({"top_k": -2}, "top_k=-2: Expected `int` >= 0"),
        ({"min_p": 1.5}, "min_p=1.5: Expected `float` <= 1.0"),
        ({"max_tokens": -1}, "max_tokens=-1: Expected `int` >= 0"),
        ({"max_tokens": 10**30}, "max_tokens=10+: Expected `int` <= 2147483647"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must not exceed max_tokens"),
        ({"presence_penalty": 3}, "presence_penalty=3: Expected `float` <= 2.0"),
        ({"repetition_penalty": 0}, "repetition_penalty=0: Expected `float` > 0.0"),
        ({"stop": ""}, "stop=.*: Expected `str` of length >= 1"),
        ({"stop": ["a", ""]}, "stop=.*: Expected `str` of length >= 1"),
        ({"stop": ["a"] * 17}, "stop=.*: Expected `array` of length <= 16"),
        ({"stop_token_ids": -1}, "stop_token_ids=.*: Expected `int` >= 0"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias=.*: Expected `int` >= 0"),
        ({"logit_bias": {1: math.nan}}, "logit_bias=.*: Expected `float` >= -100.0"),
        ({"seed": 2**63}, "seed=9223372036854775808: Expected `int` <= 9223372036854775807"),
        ({"logprobs": 21}, "logprobs=21: Expected `int` <= 20"),
        ({"n": 0}, "n=0: Expected `int` >= 1"),
        ({"cache_salt": "x" * 257}, "cache_salt=.*: Expected `str` of length <= 256"),
        ({"embed": True}, "max_tokens must be 0 for an embedding"),
        ({"grammar": Grammar("regex", "a" * 17000)}, "grammar has 17000 characters"),
    ],
)
def test_a_value_that_no_model_can_serve_is_refused_when_it_is_given(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as e:
        SamplingParams(**given)
    assert isinstance(e.value, ValueError)
    assert e.value.param == re.split(r"\W", message)[0]


def test_decoding_does_not_check_again(monkeypatch: pytest.MonkeyPatch) -> None:
    data = msgspec.msgpack.encode(SamplingParams(temperature=0.5, stop="a"))
    monkeypatch.setattr(params, "validate_sampling", None)
    monkeypatch.setattr(params, "_adapted", None)
    assert msgspec.msgpack.decode(data, type=SamplingParams).stop == ("a",)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("temprature", "; did you mean temperature?"),
        ("wibble", ""),
        ("max_new_tokens", "; write max_tokens"),
        ("num_predict", "; write max_tokens"),
        ("stop_strings", "; write stop"),
        ("random_seed", "; write seed"),
        ("repeat_penalty", "; write repetition_penalty"),
        ("guided_choice", """; write grammar=Grammar("choice", '["yes", "no"]')"""),
        ("guided_json", '; write grammar=Grammar("json_schema", json.dumps(schema))'),
        ("response_format", '; write grammar=Grammar("json_schema", json.dumps(schema))'),
        ("structured_outputs", "; write grammar=Grammar(kind, text)"),
        ("best_of", "; there is no beam search; n=4 samples four answers"),
        ("use_beam_search", "; there is no beam search; n=4 samples four answers"),
    ],
)
def test_an_unknown_name_leads_to_ours(name: str, advice: str) -> None:
    with pytest.raises(TypeError) as e:
        SamplingParams(**{name: 1})
    assert str(e.value) == f"SamplingParams has no field {name!r}{advice}"


def test_a_value_without_a_name_is_refused() -> None:
    with pytest.raises(TypeError, match=r"such as SamplingParams\(temperature=0\)"):
        SamplingParams(0.5)  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("lark", "x", r"Grammar\('lark', 'x'\): kind must be one of json_schema, regex, choice, ebnf, calls, and"),
        (None, "x", r"Grammar\(None, 'x'\): kind must be one of"),
        ("json_schema", {}, r"Grammar\('json_schema', {}\): .* and text a string, such as from json.dumps"),
        ("choice", ["a"], r"Grammar\('choice', \['a'\]\): .* text a string"),
    ],
)
def test_a_wrong_grammar_is_refused_when_it_is_made(kind: Any, text: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        Grammar(kind, text)
