"""Fields that are in no type: refused, told or harmless."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as TextParams
from openai.types.responses.response_create_params import ResponseCreateParamsBase as ResponseParams

from minisgl.api import fields
from minisgl.api.fields import FOREIGN, HARMLESS, ignored_fields, told, unread_kwargs
from minisgl.api.generate import generate_messages
from minisgl.api.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    EmbeddingRequest,
    GenerateRequest,
    GenerateSampling,
    MessagesRequest,
    ResponsesRequest,
    parse_body,
)
from minisgl.api.requests import SamplingDefaults
from minisgl.errors import RequestError
from minisgl.params import Limits

PAGE = Path(__file__).parents[3] / "docs" / "api.md"
KINDS = [ChatCompletionRequest, CompletionRequest, ResponsesRequest, MessagesRequest, GenerateRequest, EmbeddingRequest]


def ignored(kind: Any = ChatCompletionRequest, refuses: bool = False, **given: Any) -> list[str]:
    return ignored_fields(json.dumps(given).encode(), kind, refuses)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(FOREIGN))
def test_fields_that_change_the_answer_elsewhere_are_refused_by_name(kind: Any, name: str) -> None:
    if name in kind.__struct_fields__:
        pytest.skip("a field here")
    if kind is GenerateRequest and name in GenerateSampling.__struct_fields__:
        pytest.skip("a field of sampling_params")
    with pytest.raises(RequestError, match="is not supported") as e:
        ignored(kind, **{name: "odd"})
    assert (e.value.status, e.value.param, e.value.code) == (400, name, "unsupported_value")
    assert ignored(kind, **{name: None}) == ignored(kind, **{name: FOREIGN[name]}) == []


@pytest.mark.parametrize("kind", KINDS)
def test_harmless_fields_are_accepted(kind: Any) -> None:
    assert ignored(kind, refuses=True, **dict.fromkeys(HARMLESS, "x")) == []


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
        (EmbeddingRequest, "dimension", "dimensions"),
    ],
)
def test_misspelt_fields_are_refused_with_the_right_name(kind: Any, name: str, meant: str) -> None:
    with pytest.raises(RequestError, match=f"did you mean {meant}"):
        ignored(kind, **{name: 1})


def test_misspelt_sampling_fields_of_generate_are_refused() -> None:
    with pytest.raises(RequestError, match="did you mean max_new_tokens"):
        ignored(GenerateRequest, text="x", sampling_params={"max_new_token": 1})
    with pytest.raises(RequestError, match="temperature belongs in sampling_params"):
        ignored(GenerateRequest, text="x", temperature=0)


def test_other_fields_are_told(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fields, "_logged", set())
    with caplog.at_level(logging.INFO, "minisgl"):
        for _ in range(2):
            assert told(ignored(some_future_field=1, another="x", temperature=1)) == ["another", "some_future_field"]
    assert len(caplog.messages) == 2
    with pytest.raises(RequestError, match="some_future_field is not a field"):
        ignored(refuses=True, some_future_field=1)


def test_told_names_are_safe_in_a_header() -> None:
    names = ignored(**{"a\r\nset-cookie: x": 1, "é" * 500: 1, **{f"zz{i}" * 9: 1 for i in range(100)}})
    assert len(names) == fields.MAX_REPORTED
    assert all(name.isascii() and name.isprintable() and len(name) <= fields.MAX_NAME for name in names)


@pytest.mark.parametrize(
    ("params", "kind"),
    [(ChatParams, ChatCompletionRequest), (TextParams, CompletionRequest), (ResponseParams, ResponsesRequest)],
)
def test_every_field_of_openai_is_known(params: Any, kind: Any) -> None:
    assert get_type_hints(params).keys() <= {*kind.__struct_fields__, *FOREIGN, *HARMLESS}


def test_the_page_lists_the_fields() -> None:
    page = PAGE.read_text(encoding="utf-8").partition("## Fields of other servers")[2]
    refused, neutral, harmless = (part.partition(".\n")[0] for part in re.split(r"\*\*.*?:\n", page)[1:])
    values = {name: json.loads(value) for name, value in re.findall(r"`(\w+)`:\s([^,\n]+)", neutral)}
    assert dict.fromkeys(re.findall(r"`(\w+)`", refused)) | values == FOREIGN
    assert set(re.findall(r"`(\w+)`", harmless)) == HARMLESS


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
