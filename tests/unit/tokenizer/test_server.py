"""The tokenizer worker's handling of messages, without sockets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from minisgl.core.message import (
    AbortMsg,
    DetokenizeMsg,
    DetokenizerStatsMsg,
    EngineView,
    Finished,
    LogprobColumns,
    NodeView,
    Started,
    TokenizeMsg,
    UserMsg,
    UserReply,
    ids_to_bytes,
)
from minisgl.core.params import SamplingParams
from minisgl.core.plan import FinishReason
from minisgl.tokenizer.server import Worker
from minisgl.tokenizer.tokenize import TokenizeManager


@pytest.fixture
def worker(folder: Path) -> Worker:
    return Worker(TokenizeManager(folder))


def request(uid: int, text: str = "hello") -> TokenizeMsg:
    return TokenizeMsg(uid=uid, sampling_params=SamplingParams(), text=text)


def test_requests_and_aborts_keep_their_order(worker: Worker) -> None:
    to_backend, to_frontend = worker.handle([request(1), AbortMsg(9), request(2)])
    assert [type(m) for m in to_backend] == [UserMsg, AbortMsg, UserMsg]
    assert to_frontend == []


def test_an_abort_in_the_same_batch_skips_the_request(worker: Worker) -> None:
    to_backend, to_frontend = worker.handle([request(1), request(2), AbortMsg(1)])
    assert [m.uid for m in to_backend if isinstance(m, UserMsg)] == [2]
    assert len(to_backend) == 1
    assert to_frontend == [UserReply(uid=1, finish_reason=FinishReason.ABORT)]


def test_an_invalid_request_affects_no_other(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = TokenizeMsg(uid=1, sampling_params=SamplingParams(), input_ids=ids_to_bytes([600]))
    to_backend, to_frontend = worker.handle([bad, request(2)])
    assert [m.uid for m in to_backend] == [2]
    reply = to_frontend[0]
    assert isinstance(reply, UserReply) and reply.failure is not None
    assert (reply.failure.status, reply.failure.param, reply.finish_reason) == (400, "prompt", FinishReason.ERROR)
    monkeypatch.setattr(worker._tokenize, "tokenize", lambda msg: 1 / 0)
    reply = worker.handle([request(3)])[1][0]
    assert isinstance(reply, UserReply) and reply.failure is not None
    assert (reply.failure.status, reply.finish_reason) == (500, FinishReason.ERROR)


def step(uids: list[int], tokens: list[int], **fields: Any) -> DetokenizeMsg:
    fields = {"started": [], "finished": [], **fields}
    return DetokenizeMsg(uids=np.array(uids, "<i8").tobytes(), tokens=ids_to_bytes(tokens), **fields)


def began(uid: int, **fields: Any) -> Started:
    fields = {"sampling_params": SamplingParams(), **fields}
    return Started(uid=uid, prompt_tokens=2, cached_tokens=0, **fields)


def columns(uid: int, **fields: Any) -> LogprobColumns:
    fields = {"top": 1, "logprobs": bytes(4), "top_ids": ids_to_bytes([65]), "top_logprobs": bytes(4), **fields}
    return LogprobColumns(uid=uid, **fields)


def view(head: bytes) -> EngineView:
    node = NodeView(parent=-1, tokens=1, pages=1, ref_count=0, idle_steps=0, hidden=0, head=head)
    numbers = dict.fromkeys([f for f in EngineView.__struct_fields__ if f not in ("requests", "nodes")], 0)
    return EngineView(requests=[], nodes=[node], **numbers)


DROPPED = {
    "fewer tokens than requests": step([1, 2], [65]),
    "half a token": DetokenizeMsg(uids=bytes(8), tokens=b"\0", started=[], finished=[]),
    "half a uid": DetokenizeMsg(uids=b"\0", tokens=bytes(4), started=[], finished=[]),
    "a request with two tokens": step([1, 1], [65, 66]),
    "a token of an unknown request": step([99], [65]),
    "a request that begins twice": step([1], [66], started=[began(1)]),
    "half a token in the view": view(b"\0"),
    "a token below 0 in the view": view(ids_to_bytes([-1])),
}


@pytest.mark.parametrize("name", DROPPED)
def test_a_message_that_contradicts_itself_is_dropped_and_counted(
    worker: Worker, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert worker.handle([step([1], [65], started=[began(1)])])[1][0].text  # type: ignore[union-attr]
    worker.handle([])
    to_backend, to_frontend = worker.handle([DROPPED[name], request(3)])
    assert [m.uid for m in to_backend if isinstance(m, UserMsg)] == [3]
    assert DetokenizerStatsMsg(0, 1) in [*to_frontend, *worker.handle([])[1]]
    assert "dropped" in caplog.text
    (reply, *_) = worker.handle([step([1], [66], finished=[Finished(uid=1, reason=FinishReason.LENGTH)])])[1]
    assert isinstance(reply, UserReply)
    assert (reply.uid, reply.finish_reason, reply.failure) == (1, FinishReason.LENGTH, None)
    assert worker.entries == 0


BAD_LOGPROBS = [{"logprobs": bytes(8)}, {"logprobs": b"1"}, {"top": 2}, {"top_ids": ids_to_bytes([-1])}]
BAD_STARTS = [
    {"prompt_ids": b"1"},
    {"prompt_ids": ids_to_bytes([-1]), "sampling_params": SamplingParams(echo=True)},
    {"prompt_logprobs": columns(2)},  # without a prompt
    {"prompt_logprobs": columns(2), "prompt_ids": ids_to_bytes([65, 66, 67])},
    {"sampling_params": msgspec.structs.replace(SamplingParams(), stop=("",))},
]


@pytest.mark.parametrize(
    "bad",
    [
        *(step([1, 2], [66, 65], started=[began(2)], logprobs=[columns(2, **c)]) for c in BAD_LOGPROBS),
        *(step([1, 2], [66, 65], started=[began(2, **b)]) for b in BAD_STARTS),
        step([1, 2], [66, -5], started=[began(2)]),
    ],
)
def test_fields_of_one_request_that_contradict_each_other_end_this_request_only(
    worker: Worker, bad: DetokenizeMsg
) -> None:
    worker.handle([step([1], [65], started=[began(1)])])
    to_backend, to_frontend = worker.handle([bad])
    fine, failed = to_frontend[:2]
    assert isinstance(fine, UserReply) and isinstance(failed, UserReply)
    assert (fine.uid, fine.finish_reason) == (1, None) and fine.text
    assert (failed.uid, failed.finish_reason) == (2, FinishReason.ERROR)
    assert to_backend == [AbortMsg(2)]
    worker.handle([step([], [], finished=[Finished(uid=u, reason=FinishReason.ABORT) for u in (1, 2)])])
    assert worker.entries == 0
