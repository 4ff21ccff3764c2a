"""Any frame between the processes: messages of its channel, or an error of the codec; and any message is survived."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from minisgl.core.message import (
    AbortMsg,
    BackendMsg,
    DetokenizeMsg,
    ExitMsg,
    Finished,
    FrontendMsg,
    LogprobColumns,
    Started,
    TokenizerMsg,
    UserMsg,
    UserReply,
    ids_to_bytes,
)
from minisgl.core.params import SamplingParams
from minisgl.core.plan import FinishReason
from minisgl.process.queues import Codec
from minisgl.tokenizer.server import Worker
from simulation.server import tokenizer
from support.fake_engine import FakeEngine, expected_output
from support.fuzz import fuzz
from support.traces import Harness

CODECS = [Codec[Any](union) for union in (TokenizerMsg, BackendMsg, FrontendMsg)]
UIDS = st.one_of(st.integers(0, 4), st.sampled_from([-1, 2**63 - 1]))
TOKENS = st.one_of(st.integers(0, 40), st.sampled_from([-1, 59, 60, 2**31 - 1]))
PACKED = st.one_of(st.lists(TOKENS, max_size=4).map(ids_to_bytes), st.binary(max_size=9))
FLOATS = st.binary(max_size=12)
PARAMS = st.builds(
    lambda **fields: msgspec.structs.replace(SamplingParams(), **fields),  # as decoded: without a check
    max_tokens=st.sampled_from([None, 0, 1, 5, -1, 10**9]),
    stop=st.lists(st.sampled_from(["a", "", "ab"]), max_size=2).map(tuple),
    stop_token_ids=st.lists(TOKENS, max_size=2).map(tuple),
    logprobs=st.sampled_from([None, None, 0, 1, -1, 99]),
    echo=st.booleans(),
    temperature=st.sampled_from([0.0, 1.0, -1.0, float("nan")]),
)
COLUMNS = st.builds(
    LogprobColumns, uid=UIDS, top=st.integers(-1, 3), logprobs=FLOATS, top_ids=PACKED, top_logprobs=FLOATS
)
STEP = st.builds(
    DetokenizeMsg,
    uids=st.one_of(
        st.lists(UIDS, max_size=4).map(lambda uids: np.array(uids, "<i8").tobytes()), st.binary(max_size=17)
    ),
    tokens=PACKED,
    started=st.lists(
        st.builds(
            Started,
            uid=UIDS,
            prompt_tokens=st.integers(-1, 9),
            cached_tokens=st.integers(-1, 9),
            sampling_params=PARAMS,
            prompt_ids=PACKED,
            prompt_logprobs=st.one_of(st.none(), COLUMNS),
        ),
        max_size=3,
    ),
    finished=st.lists(
        st.builds(Finished, uid=UIDS, reason=st.sampled_from(FinishReason), has_text=st.booleans()), max_size=3
    ),
    logprobs=st.lists(COLUMNS, max_size=2),
)


@fuzz(40)
@given(st.binary(max_size=64))
@example(b"\x91" * 100_000)
def test_any_frame_is_messages_or_an_error_of_the_codec(frame: bytes) -> None:
    for codec in CODECS:
        try:
            messages = codec.decode(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError):  # those that the queues skip
            continue
        assert isinstance(messages, list)


@fuzz(40)
@given(st.lists(STEP, max_size=4))
def test_a_detokenizer_survives_any_steps(steps: list[DetokenizeMsg]) -> None:
    worker = Worker(tokenizer())
    worker.handle(list(steps))
    params = SamplingParams()
    begun = Started(uid=77, prompt_tokens=1, cached_tokens=0, sampling_params=params)
    fine = DetokenizeMsg(
        uids=np.array([77], "<i8").tobytes(),
        tokens=ids_to_bytes([1]),
        started=[begun],
        finished=[Finished(uid=77, reason=FinishReason.LENGTH)],
    )
    replies = [m for m in worker.handle([fine])[1] if isinstance(m, UserReply)]
    assert [(r.text, r.finish_reason) for r in replies] == [("a", FinishReason.LENGTH)]


@fuzz(40)
@given(
    st.lists(
        st.one_of(
            st.builds(UserMsg, uid=st.integers(0, 4), input_ids=PACKED, sampling_params=PARAMS),
            st.builds(AbortMsg, UIDS),
        ),
        max_size=8,
    ),
    st.integers(0, 2),
)
def test_a_scheduler_survives_any_requests(messages: list[BackendMsg], depth: int) -> None:
    assert not any(isinstance(m, ExitMsg) for m in messages)
    h = Harness(FakeEngine(vocab=60), depth)
    ends: list[int] = []
    h.drain_replies = lambda: ends.extend(end.uid for m in h.io.replies for end in m.finished) or h.io.replies.clear()  # type: ignore[method-assign]
    for msg in messages:
        h.io.inbox.append(msg)
        h.step()
    for _ in range(300):
        h.step()
    h.check_no_leak()
    assert not h.scheduler.live
    del h.drain_replies
    h.requests.clear()
    uid = h.add([5] * 9, 6, ignore_eos=True)
    for _ in range(20):
        h.step()
    assert h.outputs[uid] == expected_output([5] * 9, 6, 60, ignore_eos=True)
