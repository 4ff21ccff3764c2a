"""Any JSON in a request, any arguments of a template: a prompt for the engine, or a refusal below 500."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minisgl.api.frontend import _ENCODE_ERRORS
from minisgl.api.generate import generate_messages
from minisgl.api.parsers.output import OutputForms
from minisgl.api.protocol import ChatCompletionRequest, CompletionRequest, GenerateRequest, GenerateSampling
from minisgl.api.requests import SamplingDefaults, chat_message, completion_messages
from minisgl.checkpoint import hf
from minisgl.core.errors import RequestError
from minisgl.core.message import TokenizeMsg, TokenizerMsg, UserMsg, ids_to_bytes
from minisgl.process.queues import Codec
from minisgl.scheduler.req import Admission
from minisgl.settings.options import SchedulerConfig
from minisgl.tokenizer.tokenize import TokenizeManager
from support.bodies import parse_body
from support.fuzz import ODD_NUMBERS, TEXTS, VALUES, fuzz

CODEC: Codec[TokenizerMsg] = Codec(TokenizerMsg)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ROLES = st.sampled_from(["user", "assistant", "system", "tool", "developer", ""])
MESSAGE = st.fixed_dictionaries(
    {"role": ROLES, "content": st.one_of(TEXTS, VALUES)}, optional={"name": VALUES, "tool_calls": VALUES}
)
TOOL = st.fixed_dictionaries({"type": st.just("function"), "function": st.one_of(VALUES, st.just({"name": "f"}))})


@cache
def tokenize() -> TokenizeManager:
    return TokenizeManager(hf.resolve_model(""))


@cache
def forms() -> OutputForms:
    return OutputForms.of_model(tokenize().template, "auto", "auto")


def messages_of(body: Any, kind: Any) -> list[TokenizeMsg]:
    limits = tokenize().limits
    request = parse_body(msgspec.json.encode(body), kind)
    if isinstance(request, ChatCompletionRequest):
        return [forms().prepare(request, chat_message(request, SamplingDefaults(), limits))[0]]
    if isinstance(request, CompletionRequest):
        return completion_messages(request, SamplingDefaults(), limits)
    return generate_messages(request, SamplingDefaults(), limits)


def serve(body: Any, kind: Any) -> bool:
    """Take a body as far as the scheduler's queue; whether it got there. Anything but a refusal is an error."""
    admission = Admission(SchedulerConfig(), tokenize().limits, 10_000)
    try:
        for msg in messages_of(body, kind):
            try:
                frame = CODEC.encode([msg])
            except _ENCODE_ERRORS:
                return False  # refused by `FrontendManager.submit`
            (arrived,) = CODEC.decode(frame)
            assert arrived == msg
            ids = tokenize().tokenize(msg)
            user = UserMsg(uid=1, input_ids=ids_to_bytes(ids), sampling_params=msg.sampling_params)
            admission.admit(user, 0, lambda length, limit, rank: False)
    except RequestError as e:
        refusal = e
    else:
        return True
    assert refusal.status < 500, refusal
    return False


def fields(kind: Any) -> Any:
    values = st.one_of(VALUES, ODD_NUMBERS, st.lists(VALUES, max_size=3))
    return st.dictionaries(st.sampled_from(kind.__struct_fields__), values, max_size=3)


@pytest.mark.parametrize(
    ("kind", "base"),
    [(ChatCompletionRequest, CHAT), (CompletionRequest, {"prompt": "hi"}), (GenerateRequest, {"text": "hi"})],
)
def test_any_values_of_known_fields(kind: Any, base: dict[str, Any]) -> None:
    assert serve(base, kind)

    @fuzz(120)
    @given(fields(kind))
    def run(changed: dict[str, Any]) -> None:
        serve(base | changed, kind)

    run()


@fuzz(60)
@given(fields(GenerateSampling))
def test_any_sampling_parameters_of_generate(changed: dict[str, Any]) -> None:
    serve({"text": "hi", "sampling_params": changed}, GenerateRequest)


@fuzz(120)
@given(
    st.lists(MESSAGE, max_size=4),
    st.one_of(st.none(), st.lists(TOOL, max_size=2)),
    st.dictionaries(st.one_of(TEXTS, st.sampled_from(["self", "messages", "loop", "range"])), VALUES, max_size=2),
    st.booleans(),
)
@example([], None, {}, False)
@example([{"role": "user", "content": "hi"}], None, {"self": 1}, False)
def test_any_arguments_of_the_template(messages: Any, tools: Any, variables: Any, is_continued: bool) -> None:
    body = {"messages": messages, "chat_template_kwargs": variables, "tools": tools}
    if is_continued:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    serve(body, ChatCompletionRequest)


@fuzz(150)
@given(st.one_of(st.binary(max_size=40), st.text(max_size=40).map(str.encode)))
@example(b"[" * 100_000)
@example(b'{"messages": ' + b'{"a":' * 50_000)
def test_any_bytes_of_a_body(body: bytes) -> None:
    with pytest.raises(RequestError) as refused:
        parse_body(body, ChatCompletionRequest)
    assert refused.value.status == 400
