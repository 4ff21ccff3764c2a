"""What travels between the processes, and what may not."""

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

from minisgl.core import FinishReason
from minisgl.message import (
    AbortBackendMsg,
    AbortMsg,
    BackendMsg,
    Codec,
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
from minisgl.params import SamplingParams

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
                b"\0" * 8,
                ids_to_bytes([5]),
                [Started(0, 3, 1, ("s",), False), Started(1, 3, 1, (), True, 0.25, 2)],
                [Finished(0, FinishReason.STOP, False, stop_token=5)],
            ),
        ],
    ),
    (BackendMsg, [UserMsg(1, b"1234", PARAMS), AbortBackendMsg(1), FlushCacheMsg(), ExitMsg()]),
    (
        FrontendMsg,
        [
            UserReply(1, "text", 2, 3, 1),
            UserReply(1, "t", 1, 3, queue_seconds=0.25, prefill_chunks=2),
            UserReply(1, finish_reason=FinishReason.STOP, stop_reason="x"),
            UserReply(2, finish_reason=FinishReason.ERROR, failure=Failure("e", "p", "c", 429)),
            StatsMsg(step=3, running=2),
            DetokenizerStatsMsg(4),
        ],
    ),
]


@pytest.mark.parametrize(("union", "messages"), CHANNELS)
def test_round_trip(union: Any, messages: list[Any]) -> None:
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
def test_ids(ids: list[int]) -> None:
    data = ids_to_bytes(ids)
    assert len(data) == 4 * len(ids)
    assert ids_from_bytes(data).tolist() == ids
    assert ids_from_bytes(ids_to_bytes(np.array(ids, np.int32))).tolist() == ids


def test_ids_of_odd_length() -> None:
    with pytest.raises(ValueError, match="multiple"):
        ids_from_bytes(b"12345")


LIGHT = {
    "api": "minisgl.__main__, minisgl.launch.launch, minisgl.api.api_server, minisgl.launch.http_server",
    "tokenizer": "minisgl.tokenizer.server, minisgl.process.child, minisgl.launch.launch",
    "messages": "minisgl.message, minisgl.core, minisgl.settings.options",
    "chat": "minisgl.chat.shell, minisgl.chat.client",
}


@pytest.mark.parametrize("kind", LIGHT)
def test_light_processes_do_not_import_heavy_packages(kind: str) -> None:
    code = f"import sys, {LIGHT[kind]}; print([m for m in ('torch', 'transformers', 'scipy') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
