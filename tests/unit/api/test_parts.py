"""The run directory, the backlog of a slow reader, the terminal chat."""

from __future__ import annotations

import asyncio
import json
import shutil
import stat
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from e2e.harness import PATIENCE_S
from minisgl.api import frontend as frontend_module
from minisgl.api.call import ClientGoneError
from minisgl.api.frontend import FrontendManager
from minisgl.api.metrics import Metrics
from minisgl.chat.client import ChatClient, Delta, ServerError
from minisgl.chat.shell import Shell, tree_lines
from minisgl.core import FinishReason
from minisgl.errors import ConfigError, RequestError
from minisgl.message import (
    AbortMsg,
    DetokenizerStatsMsg,
    Failure,
    FrontendMsg,
    StatsMsg,
    TokenizeMsg,
    TokenizerMsg,
    UserReply,
    ids_from_bytes,
    ids_to_bytes,
)
from minisgl.params import Limits, SamplingParams
from minisgl.process import rundir
from minisgl.process.queues import Codec, ZmqPullQueue, ZmqPushQueue
from minisgl.process.rundir import RunDir
from minisgl.settings.options import ServerArgs

LIMITS = Limits(max_model_len=100, vocab_size=50)


def test_run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = Path(tempfile.mkdtemp(prefix="mt-", dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    try:
        stale, fresh, foreign = (base / f"minisgl-{n}" for n in ("stale", "fresh", "foreign"))
        for folder in (stale, fresh):
            folder.mkdir()
        (stale / "lock").touch()
        foreign.symlink_to(tmp_path)
        (tmp_path / "lock").touch()
        with RunDir() as one, RunDir() as two:
            assert one.path != two.path
            assert one.path.exists()  # the second has not swept it
            assert stat.S_IMODE(one.path.stat().st_mode) == 0o700
            assert not stale.exists()
            assert fresh.exists()
            assert (tmp_path / "lock").exists()
        assert not one.path.exists()
    finally:
        shutil.rmtree(base)


def test_run_dir_path_is_short_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    monkeypatch.setattr(rundir.tempfile, "gettempdir", lambda: str(long))
    with RunDir() as run_dir:
        assert len(str(run_dir.path)) < 60


def make_frontend(args: ServerArgs) -> FrontendManager:
    return FrontendManager(args, LIMITS, Metrics("m"))


def request() -> TokenizeMsg:
    return TokenizeMsg(uid=0, sampling_params=SamplingParams(), text="x")


@pytest.fixture
def args(tmp_path: Path) -> ServerArgs:
    return ServerArgs(run_dir=str(tmp_path))


@pytest.fixture
def tokenizer(args: ServerArgs) -> Iterator[ZmqPullQueue[TokenizerMsg]]:
    queue: ZmqPullQueue[TokenizerMsg] = ZmqPullQueue(args.zmq_detokenizer_addr, Codec(TokenizerMsg))
    yield queue
    queue.close()


def test_backlog_is_one_reply(args: ServerArgs, tokenizer: ZmqPullQueue[TokenizerMsg]) -> None:
    async def run() -> None:
        frontend = make_frontend(args)
        async with await frontend.submit([request()]) as call:
            (uid,) = call.uids
            for i in range(1000):
                call.push(
                    UserReply(uid=uid, text="x", completion_tokens=i + 1, prompt_tokens=5, output_ids=ids_to_bytes([i]))
                )
            ((index, reply),) = await call.take()
            assert (index, reply.text, reply.completion_tokens) == (0, "x" * 1000, 1000)
            assert ids_from_bytes(reply.output_ids).tolist() == list(range(1000))
            call.push(
                UserReply(uid=uid, text="end", completion_tokens=1001, prompt_tokens=5, finish_reason=FinishReason.STOP)
            )
            call.push(
                UserReply(
                    uid=uid, text="never", completion_tokens=1002, prompt_tokens=5, finish_reason=FinishReason.ABORT
                )
            )
            assert [r.text for _, r in await call.take()] == ["end"]
            assert call.is_done
        assert frontend.entries == 0
        await frontend.close()

    asyncio.run(run())
    assert [type(m) for m in tokenizer.get(PATIENCE_S)] == [TokenizeMsg]  # finished: no abort


def take(queue: ZmqPullQueue[TokenizerMsg], count: int) -> list[TokenizerMsg]:
    """The next `count` messages."""
    got: list[TokenizerMsg] = []
    while len(got) < count:
        new = queue.get(PATIENCE_S)
        assert new, f"no more than {got}"
        got += new
    assert len(got) == count
    return got


def test_leaving_aborts(args: ServerArgs, tokenizer: ZmqPullQueue[TokenizerMsg]) -> None:
    async def run() -> None:
        frontend = make_frontend(args)
        call = await frontend.submit([request(), request()])
        call.abandon()
        with pytest.raises(ClientGoneError):
            async with call:
                await call.take()
        assert frontend.entries == 0
        await frontend.close()

    asyncio.run(run())
    got: list[Any] = take(tokenizer, 4)
    assert sorted(m.uid for m in got if isinstance(m, AbortMsg)) == sorted(
        m.uid for m in got if isinstance(m, TokenizeMsg)
    )


def test_other_choices_are_sent_when_the_first_has_begun(
    args: ServerArgs, tokenizer: ZmqPullQueue[TokenizerMsg]
) -> None:
    async def sent(kind: type[TokenizerMsg], *uids: int) -> None:
        got = await asyncio.to_thread(take, tokenizer, len(uids))
        assert [(type(m), m.uid) for m in got] == [(kind, uid) for uid in uids]

    async def run() -> None:
        frontend = make_frontend(args)
        async with await frontend.submit([request()] * 6, 3) as call:
            a, b = call.uids[0], call.uids[3]
            await sent(TokenizeMsg, a, b)
            call.push(
                UserReply(uid=b, text="x", completion_tokens=1, prompt_tokens=5, finish_reason=FinishReason.LENGTH)
            )
            call.push(UserReply(uid=a, finish_reason=FinishReason.ERROR, failure=Failure(message="e")))
            assert [i for i, _ in await call.take()] == [3, 0]
            await sent(TokenizeMsg, b + 1, b + 2)
        assert frontend.entries == 0
        got = await asyncio.to_thread(take, tokenizer, 4)  # nothing else has been sent before
        assert sorted((type(m), m.uid) for m in got) == [(AbortMsg, uid) for uid in (a + 1, a + 2, b + 1, b + 2)]
        await frontend.close()

    asyncio.run(run())


def test_what_cannot_be_sent_is_refused(args: ServerArgs) -> None:
    async def run() -> None:
        frontend = make_frontend(args)
        bad = TokenizeMsg(uid=0, sampling_params=SamplingParams(), messages=[{"x": 2**70}])
        with pytest.raises(RequestError, match="cannot be represented"):
            await frontend.submit([bad])
        assert frontend.entries == 0
        frontend.fail("broken")
        with pytest.raises(RequestError, match="broken"):
            await frontend.submit([request()])
        await frontend.close()

    asyncio.run(run())


def test_silent_scheduler_is_unhealthy(args: ServerArgs, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(frontend_module, "time", SimpleNamespace(monotonic=lambda: now))

    async def run() -> None:
        nonlocal now
        frontend = make_frontend(args)
        scheduler: ZmqPushQueue[FrontendMsg] = ZmqPushQueue(args.zmq_frontend_addr, Codec(FrontendMsg))
        assert frontend.health_problem == ""
        now += args.heartbeat_timeout + 1
        assert "no sign of life" in frontend.health_problem
        scheduler.put([StatsMsg(step=7), DetokenizerStatsMsg(3), UserReply(uid=99, text="of a forgotten request")])
        async with asyncio.timeout(PATIENCE_S):
            while frontend.detokenizer_entries != 3:
                await asyncio.sleep(0.001)
        assert (frontend.health_problem, frontend.stats.step, frontend.detokenizer_entries) == ("", 7, 3)
        scheduler.close()
        await frontend.close()

    asyncio.run(run())


class FakeClient(ChatClient):
    """Answers with the number of messages; "break" and "stop" misbehave."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.seen: list[list[dict[str, Any]]] = []
        self.fields: list[dict[str, Any]] = []

    def stream_chat(self, messages: list[dict[str, Any]], **fields: Any) -> Generator[Delta, None, None]:
        self.seen.append([dict(m) for m in messages])
        self.fields.append(fields)
        if messages[-1]["content"] == "break":
            raise ServerError("broken")
        if messages[-1]["content"] == "think":
            yield Delta("let me see", is_reasoning=True)
        yield Delta("answer ")
        if messages[-1]["content"] == "stop":
            raise KeyboardInterrupt
        yield Delta(str(len(messages)))


def test_shell(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient()
    lines = iter(["one", "", "/help", "two", "break", "stop", "/what", "/reset", "three", "/quit", "never"])
    Shell(client, {}, "be brief").run(lambda _: next(lines))
    assert [len(messages) for messages in client.seen] == [2, 4, 6, 6, 2]
    assert client.seen[-1] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "three"}]
    out, error = capsys.readouterr()
    assert "answer 4" in out
    assert "(stopped)" in out
    assert "/reset" in out
    assert "(broken)" in error


def test_shell_shows_reasoning_and_forgets_it(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient()
    lines = iter(["think", "one", "/quit"])
    Shell(client, {}).run(lambda _: next(lines))
    assert capsys.readouterr().out == "let me see\nanswer 1\nanswer 3\n"
    assert [m["content"] for m in client.seen[-1]] == ["think", "answer 1", "one"]


def test_shell_ends_with_its_input() -> None:
    def read(_: str) -> str:
        raise EOFError

    Shell(FakeClient(), {}).run(read)


def test_shell_commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    client = FakeClient()
    file = tmp_path / "chat.json"
    script = [
        *("one \\", "two", '"""three', "  four", 'five"""', "/params temperature=0 stop=x seed=", "/params nonsense"),
        *("/system be kind", "six", "/system -", "/system", f"/save {file}", f"/save {file}", "/save"),
    ]
    prompts: list[str] = []
    lines = iter([*script, "/quit"])
    Shell(client, {"seed": 7}).run(lambda prompt: prompts.append(prompt) or next(lines))  # type: ignore[func-returns-value]
    said = [m["content"] for m in client.seen[-1]]
    assert said == ["be kind", "one \ntwo", "answer 1", "three\n  four\nfive", "answer 3", "six"]
    assert client.fields == [{"seed": 7}, {"seed": 7}, {"temperature": 0, "stop": "x"}]
    assert prompts.count("… ") == 3
    saved = json.loads(file.read_text())
    assert [m["content"] for m in saved.pop("messages")] == [*said[1:], "answer 6"]
    assert saved == {"temperature": 0, "stop": "x"}
    out, error = capsys.readouterr()
    assert "system prompt: none" in out
    assert "File exists" in error and "nonsense is not NAME=VALUE" in error and "needs the name" in error


def test_tree_as_text() -> None:
    node = {"tokens": 32, "pages": 2, "ref_count": 2, "idle_steps": 0, "hidden": 0}
    nodes = [
        node | {"parent": -1, "text": "You are\nkind.", "hidden": 5},
        node | {"parent": -1, "text": "Other", "ref_count": 0, "pages": 1},
        node | {"parent": 0, "text": "Who?", "ref_count": 1},
    ]
    pages = {"pages_total": 9, "pages_private": 1, "pages_locked": 4, "pages_cached": 2, "pages_free": 2}
    view = {"nodes": nodes, "nodes_total": 8, "nodes_hidden": 0, "requests": [{"node": 2, "uid": 7}], **pages}
    assert tree_lines(view) == [
        "3 of 8 nodes; 9 pages: 1 private, 4 locked, 2 cached, 2 free",
        "You are↵kind.  [32 tokens, 2 pages, used by 2]",
        "  Who?  [32 tokens, 2 pages, used by 1] #7",
        "  … 5 more",
        "Other  [32 tokens, 1 page]",
    ]


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(ConfigError):
        ChatClient(url)
