"""The tokenizer worker's handling of messages, without sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.core import FinishReason
from minisgl.message import AbortMsg, DetokenizeMsg, TokenizeMsg, UserMsg, UserReply, ids_to_bytes
from minisgl.params import SamplingParams
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


def test_a_malformed_step_is_skipped(worker: Worker) -> None:
    broken = DetokenizeMsg(uids=b"\0" * 8, tokens=b"", started=[], finished=[])
    to_backend, to_frontend = worker.handle([broken, request(2)])
    assert len(to_backend) == 1
    assert to_frontend == []
