"""Messages that are well formed and contradict themselves, or what is known, cost the scheduler nothing else."""

from __future__ import annotations

import logging
import math

import msgspec
import pytest

from minisgl.core.message import AbortMsg, BackendMsg, UserMsg, ids_to_bytes
from minisgl.core.params import Grammar, SamplingParams
from minisgl.core.plan import FinishReason
from minisgl.process.queues import Codec
from support.fake_engine import FakeEngine
from support.traces import Harness

PROMPT = ids_to_bytes([1, 2, 3])


def user(uid: int, input_ids: bytes = PROMPT, **params: object) -> UserMsg:
    sampling = msgspec.structs.replace(SamplingParams(), **params)  # as from a process that checks nothing
    return UserMsg(uid=uid, input_ids=input_ids, sampling_params=sampling)


@pytest.mark.parametrize("steps", [0, 1, 3])
@pytest.mark.parametrize("bad", [user(0), user(7, b"123"), user(0, b"")], ids=["known", "half a token", "known, empty"])
def test_a_message_that_contradicts_is_dropped_and_counted(
    bad: UserMsg, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    h = Harness(FakeEngine(vocab=5003), 1)
    h.add([5] * 9, 6, ignore_eos=True)
    for _ in range(steps):
        h.step()
    with caplog.at_level(logging.ERROR):
        h.io.inbox.append(bad)
        h.step()
    assert h.scheduler.stats.dropped == 1
    assert "dropped a UserMsg" in caplog.text
    h.finish_all()
    h.check_outputs()
    assert h.endings == {0: FinishReason.LENGTH}


@pytest.mark.parametrize(
    ("bad", "param"),
    [
        (user(1, b""), "prompt"),
        (user(1, ids_to_bytes([1, -1])), "prompt"),
        (user(1, ids_to_bytes([1, 5003])), "prompt"),
        (user(1, ids_to_bytes([1] * 65)), "prompt"),
        (user(1, max_tokens=-1), "max_tokens"),
        (user(1, temperature=math.nan), "temperature"),
        (user(1, top_k=-2), "top_k"),
        (user(1, logit_bias=((5003, 1.0),)), "logit_bias"),
        (user(1, stop_token_ids=(-1,)), "stop_token_ids"),
        (user(1, logprobs=21), "logprobs"),
        (user(1, seed=2**63), "seed"),
        (user(1, grammar=Grammar("regex", "x" * 100_000)), "grammar"),
        (user(1, embed=True), "model"),
    ],
)
def test_an_invalid_request_is_refused_before_the_engine_sees_it(bad: UserMsg, param: str) -> None:
    h = Harness(FakeEngine(vocab=5003), 1)
    h.add([5] * 9, 6, ignore_eos=True)
    h.requests[1] = ([], bad.sampling_params)
    h.outputs[1] = []
    h.io.inbox.append(bad)
    h.finish_all()
    h.check_outputs()
    assert h.endings == {0: FinishReason.LENGTH, 1: FinishReason.ERROR}
    assert h.params[1] == param


def test_aborts_of_unknown_requests_are_ignored() -> None:
    h = Harness(FakeEngine(vocab=5003), 1)
    h.io.inbox.extend([AbortMsg(5), AbortMsg(-1), AbortMsg(2**63)])
    h.add([5] * 9, 6, ignore_eos=True)
    h.finish_all()
    assert h.endings == {0: FinishReason.LENGTH}


@pytest.mark.parametrize("uid", [-1, 2**63])
def test_a_uid_is_an_index_of_64_bits(uid: int) -> None:
    codec: Codec[BackendMsg] = Codec(BackendMsg)
    with pytest.raises(msgspec.ValidationError):
        codec.decode(codec.encode([user(uid)]))
