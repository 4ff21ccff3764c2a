"""Encoding of the messages, and the refusal of everything that is not a message of the channel."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from minisgl.core.message import (
    AbortMsg,
    BackendMsg,
    DetokenizeMsg,
    DetokenizerStatsMsg,
    ExitMsg,
    Failure,
    Finished,
    FlushCacheMsg,
    FrontendMsg,
    Started,
    StatsMsg,
    TokenizeMsg,
    TokenizerMsg,
    UserMsg,
    UserReply,
    ids_from_bytes,
    ids_to_bytes,
)
from minisgl.core.params import SamplingParams
from minisgl.core.plan import FinishReason
from minisgl.process.queues import Codec

PARAMS = SamplingParams(max_tokens=5, temperature=0.5, stop=("a", "ü"), stop_token_ids=(1, 2), seed=-(2**63))
CHANNELS: list[tuple[Any, list[Any]]] = [
    (
        TokenizerMsg,
        [
            TokenizeMsg(uid=1, sampling_params=PARAMS, text="x"),
            TokenizeMsg(
                uid=2**62, sampling_params=PARAMS, messages=[{"role": "user", "content": "🙂"}], tools=[{"a": [1]}]
            ),
            TokenizeMsg(
                uid=3, sampling_params=PARAMS, input_ids=ids_to_bytes([1, 2]), template_kwargs={"a": None, "b": 1.5}
            ),
            AbortMsg(4),
            DetokenizeMsg(
                uids=b"\0" * 8,
                tokens=ids_to_bytes([5]),
                started=[
                    Started(uid=0, prompt_tokens=3, cached_tokens=1, sampling_params=PARAMS),
                    Started(
                        uid=1,
                        prompt_tokens=3,
                        cached_tokens=1,
                        sampling_params=SamplingParams(stop=("s",), skip_special_tokens=False),
                        queue_seconds=0.25,
                        prefill_chunks=2,
                    ),
                ],
                finished=[Finished(uid=0, reason=FinishReason.STOP, has_text=False, stop_reason=5)],
            ),
        ],
    ),
    (
        BackendMsg,
        [UserMsg(uid=1, input_ids=b"1234", sampling_params=PARAMS), AbortMsg(1), FlushCacheMsg(), ExitMsg()],
    ),
    (
        FrontendMsg,
        [
            UserReply(uid=1, text="text", completion_tokens=2, prompt_tokens=3, cached_tokens=1),
            UserReply(uid=1, text="t", completion_tokens=1, prompt_tokens=3, queue_seconds=0.25, prefill_chunks=2),
            UserReply(uid=1, finish_reason=FinishReason.STOP, stop_reason="x"),
            UserReply(
                uid=2, finish_reason=FinishReason.ERROR, failure=Failure(message="e", param="p", code="c", status=429)
            ),
            StatsMsg(step=3, running=2),
            DetokenizerStatsMsg(4),
        ],
    ),
]


@pytest.mark.parametrize(("union", "messages"), CHANNELS)
def test_messages_survive_encoding(union: Any, messages: list[Any]) -> None:
    codec: Codec[Any] = Codec(union)
    assert codec.decode(codec.encode(messages)) == messages


@pytest.mark.parametrize(("union", "messages"), CHANNELS)
def test_other_channels_messages_are_refused(union: Any, messages: list[Any]) -> None:
    for other, _ in CHANNELS:
        if other is not union:
            with pytest.raises(msgspec.ValidationError):
                Codec(other).decode(Codec(union).encode(messages))


@given(st.binary(max_size=200))
def test_junk_never_passes_as_a_message(junk: bytes) -> None:
    for union, _ in CHANNELS:
        with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError):
            assert isinstance(Codec(union).decode(junk), list)


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_token_ids_survive_packing(ids: list[int]) -> None:
    data = ids_to_bytes(ids)
    assert len(data) == 4 * len(ids)
    assert ids_from_bytes(data).tolist() == ids
    assert ids_from_bytes(ids_to_bytes(np.array(ids, np.int32))).tolist() == ids


def test_bytes_that_are_not_whole_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple"):
        ids_from_bytes(b"12345")


LIGHT = {
    "api": "minisgl.__main__, minisgl.launch.launch, minisgl.api.app, minisgl.launch.supervisor",
    "tokenizer": "minisgl.tokenizer.server, minisgl.process.processes, minisgl.launch.launch",
    "messages": "minisgl.core.message, minisgl.core.plan, minisgl.settings.options",
    "chat": "minisgl.tools.chat.shell, minisgl.tools.chat.client",
}


@pytest.mark.parametrize("kind", LIGHT)
def test_processes_without_a_model_import_no_torch(kind: str) -> None:
    code = f"import sys, {LIGHT[kind]}; print([m for m in ('torch', 'transformers', 'scipy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
