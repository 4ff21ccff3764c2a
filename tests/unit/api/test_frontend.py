"""The frontend manager: the backlog of a slow reader, aborts, and the health of the engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minisgl.api import dispatch as dispatch_module
from minisgl.api.frontend import ClientGoneError, FrontendManager, Timeline
from minisgl.api.http import LEVEL, MODEL
from minisgl.api.metrics import Metrics
from minisgl.api.requests import ChosenModel
from minisgl.api.responses import AT_ONCE, GenerationResponse, Renderer
from minisgl.core.errors import RequestError
from minisgl.core.message import (
    AbortMsg,
    ConversionReply,
    DetokenizerStatsMsg,
    EncodeMsg,
    Failure,
    FrontendMsg,
    StatsMsg,
    TokenizeMsg,
    TokenizerMsg,
    UserReply,
    ids_from_bytes,
    ids_to_bytes,
)
from minisgl.core.params import Limits, SamplingParams
from minisgl.core.plan import FinishReason
from minisgl.process.queues import Codec, ZmqPullQueue, ZmqPushQueue
from minisgl.settings.options import ServerArgs
from support.processes import PATIENCE_S

LIMITS = Limits(max_model_len=100, vocab_size=50)


def make_frontend(args: ServerArgs) -> FrontendManager:
    return FrontendManager(args, LIMITS, Metrics("m"))


def request() -> TokenizeMsg:
    return TokenizeMsg(uid=0, sampling_params=SamplingParams(), text="x")


@pytest.fixture
def args(tmp_path: Path) -> ServerArgs:
    return ServerArgs(run_dir=str(tmp_path), num_tokenizer=0)


@pytest.fixture
def tokenizer(args: ServerArgs) -> Iterator[ZmqPullQueue[TokenizerMsg]]:
    queue: ZmqPullQueue[TokenizerMsg] = ZmqPullQueue(args.zmq_detokenizer_addr, Codec(TokenizerMsg))
    yield queue
    queue.close()


def test_unread_replies_are_merged_into_one(args: ServerArgs, tokenizer: ZmqPullQueue[TokenizerMsg]) -> None:
    async def run() -> None:
        frontend = make_frontend(args)
        async with frontend.submit([request()]) as submission:
            (uid,) = submission.uids
            for i in range(1000):
                submission.push(
                    UserReply(uid=uid, text="x", completion_tokens=i + 1, prompt_tokens=5, output_ids=ids_to_bytes([i]))
                )
            ((index, reply),) = await submission.next_replies()
            assert (index, reply.text, reply.completion_tokens) == (0, "x" * 1000, 1000)
            assert ids_from_bytes(reply.output_ids).tolist() == list(range(1000))
            submission.push(
                UserReply(uid=uid, text="end", completion_tokens=1001, prompt_tokens=5, finish_reason=FinishReason.STOP)
            )
            submission.push(
                UserReply(
                    uid=uid, text="never", completion_tokens=1002, prompt_tokens=5, finish_reason=FinishReason.ABORT
                )
            )
            assert [r.text for _, r in await submission.next_replies()] == ["end"]
            assert submission.is_done
        assert frontend.entries == 0
        await frontend.close()

    asyncio.run(run())
    assert [type(m) for m in tokenizer.get(PATIENCE_S)] == [TokenizeMsg]  # finished: no abort


def test_a_large_answer_is_rendered_beside_the_other_requests(
    args: ServerArgs, tokenizer: ZmqPullQueue[TokenizerMsg]
) -> None:
    """The rendering waits for what only the event loop can do meanwhile."""
    loop_ran = threading.Event()

    class Slow(Renderer):
        def body(self, replies: list[UserReply], timeline: Timeline) -> bytes:
            assert loop_ran.wait(PATIENCE_S), "the loop stands still"
            return b"%d" % len(replies)

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        frontend = make_frontend(args)
        messages = [request() for _ in range(AT_ONCE + 1)]
        scope = {"type": "http", MODEL: ChosenModel("m"), LEVEL: 0}
        answer = asyncio.create_task(GenerationResponse(frontend, messages, Slow())(scope, asyncio.Event().wait, send))
        await asyncio.sleep(0)
        while frontend.entries < len(messages):
            await asyncio.sleep(0.01)
        for uid, submission in list(frontend._submissions.items()):
            submission.push(UserReply(uid=uid, finish_reason=FinishReason.STOP))
        asyncio.get_running_loop().call_later(0.2, loop_ran.set)
        await answer
        await frontend.close()

    asyncio.run(run())
    assert sent[-1]["body"] == b"%d" % (AT_ONCE + 1)


def receive(queue: ZmqPullQueue[TokenizerMsg], count: int) -> list[TokenizerMsg]:
    """The next `count` messages."""
    got: list[TokenizerMsg] = []
    while len(got) < count:
        new = queue.get(PATIENCE_S)
        assert new, f"no more than {got}"
        got += new
    assert len(got) == count
    return got


def test_abandoned_submission_aborts_its_requests(args: ServerArgs, tokenizer: ZmqPullQueue[TokenizerMsg]) -> None:
    async def leave(frontend: FrontendManager) -> None:
        async with frontend.submit([request(), request()]) as submission:
            submission.abandon()
            await submission.next_replies()

    async def run() -> None:
        frontend = make_frontend(args)
        with pytest.raises(ClientGoneError):
            await leave(frontend)
        assert frontend.entries == 0
        await frontend.close()

    asyncio.run(run())
    got: list[Any] = receive(tokenizer, 4)
    assert sorted(m.uid for m in got if isinstance(m, AbortMsg)) == sorted(
        m.uid for m in got if isinstance(m, TokenizeMsg)
    )


def test_other_choices_are_sent_when_the_first_has_begun(
    args: ServerArgs, tokenizer: ZmqPullQueue[TokenizerMsg]
) -> None:
    async def sent(kind: type[TokenizerMsg], *uids: int) -> None:
        got = await asyncio.to_thread(receive, tokenizer, len(uids))
        assert [(type(m), m.uid) for m in got] == [(kind, uid) for uid in uids]

    async def run() -> None:
        frontend = make_frontend(args)
        async with frontend.submit([request()] * 6, 3) as submission:
            a, b = submission.uids[0], submission.uids[3]
            await sent(TokenizeMsg, a, b)
            submission.push(
                UserReply(uid=b, text="x", completion_tokens=1, prompt_tokens=5, finish_reason=FinishReason.LENGTH)
            )
            submission.push(UserReply(uid=a, finish_reason=FinishReason.ERROR, failure=Failure(message="e")))
            assert [i for i, _ in await submission.next_replies()] == [3, 0]
            await sent(TokenizeMsg, b + 1, b + 2)
        assert frontend.entries == 0
        got = await asyncio.to_thread(receive, tokenizer, 4)  # nothing else has been sent before
        assert sorted((type(m), m.uid) for m in got) == [(AbortMsg, uid) for uid in (a + 1, a + 2, b + 1, b + 2)]
        await frontend.close()

    asyncio.run(run())


def test_unencodable_request_is_refused(args: ServerArgs) -> None:
    async def run() -> None:
        frontend = make_frontend(args)
        bad = TokenizeMsg(uid=0, sampling_params=SamplingParams(), messages=[{"x": "\ud800"}])
        with pytest.raises(RequestError, match="cannot be represented"):
            await frontend.submit([bad]).__aenter__()
        assert frontend.entries == 0
        frontend.fail("broken")
        with pytest.raises(RequestError, match="broken"):
            await frontend.submit([request()]).__aenter__()
        await frontend.close()

    asyncio.run(run())


def test_drain_waits_for_questions_too(args: ServerArgs, tokenizer: ZmqPullQueue[TokenizerMsg]) -> None:
    async def run() -> None:
        frontend = make_frontend(args)
        replies: ZmqPushQueue[FrontendMsg] = ZmqPushQueue(args.zmq_frontend_addr, Codec(FrontendMsg))
        question = asyncio.create_task(frontend.convert(EncodeMsg(uid=0, prompt=request())))
        (asked,) = await asyncio.to_thread(receive, tokenizer, 1)
        assert isinstance(asked, EncodeMsg)
        assert not await frontend.wait_idle(0.05)
        draining = asyncio.create_task(frontend.drain(PATIENCE_S))
        replies.put([ConversionReply(uid=asked.uid, input_ids=ids_to_bytes([7]))])
        assert ids_from_bytes((await question).input_ids).tolist() == [7]
        await draining
        assert frontend.failure == ""
        replies.close()
        await frontend.close()

    asyncio.run(run())


def test_failure_reaches_every_waiting_query(args: ServerArgs, tokenizer: ZmqPullQueue[TokenizerMsg]) -> None:
    async def run() -> None:
        frontend = make_frontend(args)
        replies: ZmqPushQueue[FrontendMsg] = ZmqPushQueue(args.zmq_frontend_addr, Codec(FrontendMsg))
        first, second = [asyncio.create_task(frontend.convert(EncodeMsg(uid=0, prompt=request()))) for _ in range(2)]
        one, _ = await asyncio.to_thread(receive, tokenizer, 2)
        assert isinstance(one, EncodeMsg)
        replies.put([ConversionReply(uid=7), ConversionReply(uid=one.uid, text="early")])  # no conversion 7 is open
        assert (await first).text == "early"
        frontend.fail("the engine died")
        with pytest.raises(RequestError, match="the engine died") as failed:
            await second
        assert failed.value.status == 503 and frontend.entries == 0
        replies.close()
        await frontend.close()

    asyncio.run(run())


def test_missing_heartbeat_is_unhealthy(args: ServerArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(dispatch_module, "time", SimpleNamespace(monotonic=lambda: now))

    async def run() -> None:
        nonlocal now
        frontend = make_frontend(args)
        scheduler: ZmqPushQueue[FrontendMsg] = ZmqPushQueue(args.zmq_frontend_addr, Codec(FrontendMsg))
        assert frontend.health_problem == ""
        now += args.heartbeat_timeout + 1
        assert "no heartbeat" in frontend.health_problem
        scheduler.put([DetokenizerStatsMsg(5), DetokenizerStatsMsg(-2, 4)])  # of the detokenizer, and of a tokenizer
        scheduler.put([StatsMsg(step=7, dropped=2), UserReply(uid=99, text="of a forgotten request")])
        async with asyncio.timeout(PATIENCE_S):
            while frontend.stats.step != 7:
                await asyncio.sleep(0.001)
        assert (frontend.health_problem, frontend.detokenizer_entries) == ("", 3)
        assert b'minisgl:dropped_messages_total{model_name="m"} 6.0' in frontend.render_metrics("")[0]
        scheduler.close()
        await frontend.close()

    asyncio.run(run())
