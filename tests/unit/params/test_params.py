"""What `SamplingParams` makes of the values that Python callers give."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from minisgl.errors import RequestError
from minisgl.params import Grammar, SamplingParams


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
        ({"temperature": None}, "temperature=None: Expected `float`"),
        ({"max_tokens": 1.5}, "max_tokens=1.5: Expected `int | null`, got `float`"),
        ({"max_tokens": True}, "max_tokens=True: Expected `int | null`, got `bool`"),
        ({"stop": 5}, r"stop=5: Expected `str`, got `int`"),
        ({"stop": ["a", 5]}, r"stop=.*: Expected `str`, got `int` - at `\$\[1\]`"),
        ({"ignore_eos": "no"}, "ignore_eos='no': Expected `bool`, got `str`"),
        ({"grammar": "a|b"}, "grammar='a|b': Expected `object | null`"),
        ({"stop_token_ids": "5"}, "stop_token_ids='5': Expected `int`, got `str`"),
        ({"logit_bias": {"5": 1}}, "logit_bias=.*: Expected `int`, got `str`"),
    ],
)
def test_wrong_types_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message.replace("|", r"\|")) as e:
        SamplingParams(**given)
    assert [e.value.param] == [*given]


def test_a_misspelt_field_is_suggested() -> None:
    with pytest.raises(TypeError, match="has no field 'temprature'; did you mean temperature"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"has no field 'wibble'$"):
        SamplingParams(wibble=1)  # type: ignore[call-arg]
