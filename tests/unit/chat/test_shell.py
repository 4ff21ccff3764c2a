"""The terminal chat with a fake server: conversation, commands and input of several lines."""

from __future__ import annotations

import json
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from minisgl.chat.client import ChatClient, Delta, ServerError
from minisgl.chat.shell import Shell, tree_lines
from minisgl.errors import ConfigError


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


def test_conversation_keeps_answers_until_reset(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_reasoning_is_shown_and_forgotten(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient()
    lines = iter(["think", "one", "/quit"])
    Shell(client, {}).run(lambda _: next(lines))
    assert capsys.readouterr().out == "let me see\nanswer 1\nanswer 3\n"
    assert [m["content"] for m in client.seen[-1]] == ["think", "answer 1", "one"]


def test_end_of_input_ends_the_session() -> None:
    def read(_: str) -> str:
        raise EOFError

    Shell(FakeClient(), {}).run(read)


def test_commands_and_messages_of_several_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
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


def test_prefix_tree_as_text() -> None:
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
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        ChatClient(url)
