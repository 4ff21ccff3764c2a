"""The terminal chat with a fake server: conversation, commands and input of several lines."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from minisgl.chat.client import ChatClient, Delta, ServerError, running_server
from minisgl.chat.shell import Shell, chat_with_url, tree_lines
from minisgl.chat.terminal import WordWrap
from minisgl.errors import ConfigError, StartupError


class FakeClient(ChatClient):
    """Answers with the number of messages; "break" and "stop" misbehave."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.seen: list[list[dict[str, Any]]] = []
        self.fields: list[dict[str, Any]] = []
        self.described: dict[str, Any] = {}  # by /openapi.json

    def get(self, path: str) -> dict[str, Any]:
        if not self.described:
            raise ServerError("not found")
        return {"components": {"schemas": {"ChatCompletionRequest": {"properties": self.described}}}}

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
    node = {"tokens": 32, "pages": 2, "ref_count": 2, "idle_steps": 0, "hidden": 0, "place": "device"}
    nodes = [
        node | {"parent": -1, "text": "You are\nkind.", "hidden": 5},
        node | {"parent": -1, "text": "Other", "ref_count": 0, "pages": 1, "place": "disk"},
        node | {"parent": 0, "text": "Who?", "ref_count": 1},
    ]
    pages = {"pages_total": 9, "pages_private": 1, "pages_locked": 4, "pages_cached": 2, "pages_free": 2}
    view = {"nodes": nodes, "nodes_total": 8, "nodes_hidden": 0, "requests": [{"node": 2, "uid": 7}], **pages}
    assert tree_lines(view) == [
        "3 of 8 nodes; 9 pages: 1 private, 4 locked, 2 cached, 2 free",
        "You are↵kind.  [32 tokens, 2 pages, used by 2]",
        "  Who?  [32 tokens, 2 pages, used by 1] #7",
        "  … 5 more",
        "Other  [32 tokens, 1 page, on the disk]",
    ]


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port"])
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError):
        ChatClient(url)


def test_parameters_are_checked_against_the_fields_that_the_server_describes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    client = FakeClient()
    client.described = {
        "temperature": {"anyOf": [{"type": "number"}, {"type": "null"}]},
        "max_tokens": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "stop": {"anyOf": [{"type": "string"}, {"type": "array"}]},
        "tools": {"$ref": "#/x"},
        "messages": {"type": "array"},
    }
    shell = Shell(client, {})
    wrong = ("temprature=1", "temperature=warm", "max_tokens=1.5", "stop=true", "messages=[]", "stream=false")
    script = [
        *(f"/params {pair}" for pair in wrong),
        "/params temperature=1 stop=x max_tokens=null tools={}",
        "a",
        "/quit",
    ]
    lines = iter(script)
    shell.run(lambda _: next(lines))
    assert client.fields == [{"temperature": 1, "stop": "x", "max_tokens": None, "tools": {}}]
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "(temprature is not a field of a chat request; did you mean temperature?)",
        '(temperature takes number, not "warm")',
        "(max_tokens takes integer, not 1.5)",
        "(stop takes string or array, not true)",
        "(messages is set by the chat itself)",
        "(stream is set by the chat itself)",
    ]
    assert {"/help", "/quit", "/params stop="} <= {*shell.completions()}
    assert "/params messages=" not in shell.completions()


@pytest.mark.parametrize("size", [1, 3, 100])
def test_words_wrap_however_the_text_arrives(size: int) -> None:
    text = "The quick brown fox jumps\nover    the lazydogwithalongname and 狐狸跳过懒狗。 ends\n\n  code"
    wrap = WordWrap(12)
    shown = "".join(wrap.feed(text[i : i + size]) for i in range(0, len(text), size)) + wrap.flush()
    assert (
        shown
        == "The quick \nbrown fox \njumps\nover    the\nlazydogwithalongname\nand 狐狸跳\n过懒狗。 \nends\n\n  code"
    )
    assert [word for word in shown.split() if word in text.split()]
    assert WordWrap(0).feed(text) == text


class ModelInfo(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/model_info" else 404)
        self.end_headers()
        self.wfile.write(json.dumps({"model": "demo", "model_path": "/models/demo"}).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_a_running_server_is_found_by_its_model(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("", "demo", "/models/demo", "x")
    with HTTPServer(("127.0.0.1", 0), ModelInfo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_port
        found = {model: running_server("127.0.0.1", port, model, None, 60.0) for model in names}
        server.shutdown()
    url = f"http://127.0.0.1:{port}"
    assert found == {"": url, "demo": url, "/models/demo": url, "x": None}
    assert f"{url} serves demo; starting another one" in capsys.readouterr().err
    assert running_server("127.0.0.1", port, "", None, 60.0) is None  # no server listens any more
    with pytest.raises(StartupError, match=f"no server answers at {url}"):
        chat_with_url(url, None, {}, None)


def test_a_server_that_refuses_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    class Refusal(ModelInfo):
        def do_GET(self) -> None:
            self.send_response(401)
            self.end_headers()
            self.wfile.write(b'{"error": {"message": "a valid key is needed"}}')

    with HTTPServer(("127.0.0.1", 0), Refusal) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert running_server("127.0.0.1", server.server_port, "", None, 60.0) is None
        server.shutdown()
    assert "refuses (a valid key is needed); starting another one" in capsys.readouterr().err


def test_a_server_that_starts_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("minisgl.chat.client.NOTICE_S", 0.01)
    with HTTPServer(("127.0.0.1", 0), ModelInfo) as server:  # listens, but does not answer yet
        url = f"http://127.0.0.1:{server.server_port}"
        begins = threading.Timer(0.5, server.handle_request)
        begins.start()
        assert running_server("127.0.0.1", server.server_port, "demo", None, 60.0) == url
        begins.join()
        assert capsys.readouterr().err.count(f"waiting for {url}") == 1
        assert running_server("127.0.0.1", server.server_port, "demo", None, 0.05) is None
