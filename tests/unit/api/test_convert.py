"""Queries to the tokenizer: what a message takes, bad messages, failures."""

from __future__ import annotations

from typing import Any

from minisgl.api.operations import encode_message
from minisgl.api.protocol import ChatCompletionRequest, ChatMessage, TokenizeRequest
from minisgl.api.requests import SamplingDefaults, chat_message
from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.core.message import (
    ConversionReply,
    DecodeMsg,
    EncodeMsg,
    TokenizeMsg,
    TokenizerMsg,
    UserMsg,
    ids_from_bytes,
    ids_to_bytes,
)
from minisgl.core.params import Limits, SamplingParams
from minisgl.tokenizer.server import Worker
from minisgl.tokenizer.tokenize import TokenizeManager

LIMITS = Limits(max_model_len=100, vocab_size=50)


def test_tokenize_messages_equal_a_chat_completion() -> None:
    messages = [ChatMessage(role="assistant", content="Hi")]
    tools = [{"type": "function", "function": {"name": "f"}}]
    kwargs: dict[str, str | int | float | bool | None] = {"enable_thinking": False}
    fields = {"messages": messages, "tools": tools, "continue_final_message": True, "chat_template_kwargs": kwargs}
    asked = encode_message(TokenizeRequest(**fields), LIMITS).prompt
    assert asked == chat_message(ChatCompletionRequest(**fields), SamplingDefaults(), LIMITS)
    assert (asked.tools, asked.continue_final_message, asked.template_kwargs) == (tools, True, kwargs)


class TestWorker:
    """One bad message costs only itself."""

    def encode(self, uid: int, **prompt: Any) -> EncodeMsg:
        return EncodeMsg(uid=uid, prompt=TokenizeMsg(uid=0, sampling_params=SamplingParams(), **prompt))

    def test_bad_messages_fail_alone(self) -> None:
        worker = Worker(TokenizeManager(BUILTIN_MODEL))
        batch: list[TokenizerMsg] = [
            self.encode(1, text="one"),
            self.encode(2, messages=[{"role": "user", "content": "x"}] * 5000),
            DecodeMsg(uid=3, input_ids=b"abc"),  # not a multiple of four bytes
            DecodeMsg(uid=4, input_ids=ids_to_bytes([-5])),
            TokenizeMsg(uid=5, sampling_params=SamplingParams(), text="a request"),
            DecodeMsg(uid=6, input_ids=ids_to_bytes([70, 71])),
        ]
        to_backend, replies = worker.handle(batch)
        assert [type(m) for m in to_backend] == [UserMsg]
        by_uid = {r.uid: r for r in replies if isinstance(r, ConversionReply)}
        assert sorted(by_uid) == [1, 2, 3, 4, 6]
        assert len(ids_from_bytes(by_uid[1].input_ids)) > 0
        failures = {uid: (r.failure.status, r.failure.param) for uid, r in by_uid.items() if r.failure is not None}
        assert failures == {2: (400, "messages"), 3: (500, None), 4: (500, None)}
        assert by_uid[6].text

    def test_too_long_input_is_refused(self) -> None:
        worker = Worker(TokenizeManager(BUILTIN_MODEL, Limits(max_model_len=8, vocab_size=4096)))
        _, (reply,) = worker.handle([DecodeMsg(uid=1, input_ids=ids_to_bytes([5] * 9))])
        assert isinstance(reply, ConversionReply) and reply.failure is not None
        assert reply.failure.status == 400
        _, (reply,) = worker.handle([self.encode(2, text="far too long " * 1000)])
        assert isinstance(reply, ConversionReply) and reply.failure is not None
        assert reply.failure.code == "context_length_exceeded"
