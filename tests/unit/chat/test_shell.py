"""The terminal chat with a fake server: conversation, commands and input of several lines."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from minisgl.core.errors import ConfigError, StartupError
from minisgl.tools.chat.client import ChatClient, Delta, ServerError, running_server
from minisgl.tools.chat.shell import Shell, chat_with_url, tree_lines
from minisgl.tools.chat.terminal import WordWrap


class FakeClient(ChatClient):
    """Answers with the number of messages; "break" and "stop" misbehave."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:1")
        self.seen: list[list[dict[str, Any]]] = []
        self.fields: list[dict[str, Any]] = []
        self.info: dict[str, Any] = {}  # /model_info

    def get(self, path: str) -> dict[str, Any]:
        if not self.info:
            raise ServerError("not found")
        return self.info

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


INFO = {
    "max_model_len": 4096,
    "vocab_size": 500,
    "default_sampling_params": {"temperature": 0.6, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0},
}


@pytest.mark.parametrize(
    ("pair", "words"),
    [
        ("temprature=1", "temprature is not a field; did you mean temperature?"),
        ("wibble=1", "wibble is not a field of a chat request"),
        ("temperature=warm", "Expected `float | null`, got `str` at `temperature`"),
        ("temperature=-1", "temperature=-1.0: Expected `float` >= 0.0"),
        ("temperature=101", "temperature=101.0: Expected `float` <= 100.0"),
        ("top_p=1.5", "top_p=1.5: Expected `float` <= 1.0"),
        ("top_k=-7", "top_k=-7: Expected `int` >= 0"),
        ("max_tokens=0", "max_tokens must be 1"),
        ('logit_bias={"500":1}', "logit_bias token ids must be 0 to 499"),
        ("stop=true", "Expected `str | array | null`, got `bool` at `stop`"),
        ('stop=[""]', "Expected `str` of length >= 1"),
        ("top_logprobs=3", "top_logprobs needs logprobs=true"),
        ("guided_choice=[]", "guided_choice must be a list of non-empty strings"),
        ("continue_final_message=true add_generation_prompt=true", "exclude each other"),
        ("repeat_last_n=-1.5e", None),
        ("messages=[]", "messages is set by the chat itself"),
        ("n=2", "n is set by the chat itself"),
        ("nonsense", "nonsense is not NAME=VALUE"),
    ],
)
def test_a_parameter_is_refused_when_it_is_set(
    pair: str, words: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    client = FakeClient()
    client.info = INFO
    lines = iter([f"/params seed=7 {pair}", "a", "/exit"])
    Shell(client, {"seed": 5}).run(lambda _: next(lines))
    assert (words or "repeat_last_n") in capsys.readouterr().err
    assert client.fields == [{"seed": 5}], "none of a refused line is set"


def test_parameters_are_shown_with_their_origin(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient()
    client.info = INFO
    lines = iter(["/params", "/params top_p=0.9 stop=x max_tokens=null", "/params top_p=", "a", "/bye"])
    shell = Shell(client, {"seed": 7})
    shell.run(lambda _: next(lines))
    assert client.fields == [{"seed": 7, "stop": "x", "max_tokens": None}]
    rows = [line.split(maxsplit=2) for line in capsys.readouterr().out.splitlines()[:-1]]
    assert rows[:6] == [
        ["temperature", "0.6", "the model's generation_config"],
        ["top_p", "1.0", "default"],
        ["top_k", "0", "default"],
        ["min_p", "0.0", "default"],
        ["repetition_penalty", "1.0", "default"],
        ["seed", "7", "set by you"],
    ]
    assert ["top_p", "0.9", "set by you"] in rows[6:14] and ["stop", '"x"', "set by you"] in rows[6:14]
    assert ["top_p", "1.0", "default"] in rows[14:]
    assert {"/help", "/quit", "/exit", "/bye", "/params stop="} <= {*shell.completions()}
    assert "/params messages=" not in shell.completions()


def test_another_server_checks_its_parameters_itself(capsys: pytest.CaptureFixture[str]) -> None:
    client = FakeClient()
    lines = iter(["/params mirostat=2", "a", "/quit"])
    Shell(client, {}).run(lambda _: next(lines))
    assert client.fields == [{"mirostat": 2}]
    assert capsys.readouterr().out.splitlines()[0].split(maxsplit=2) == ["mirostat", "2", "set by you"]


WRAPPED = {
    "words": (
        "The quick brown fox jumps\nover    the lazydogwithalongname and 狐狸跳过懒狗。 ends\n\n  code",
        "The quick \nbrown fox \njumps\nover    the\nlazydogwithalongname \nand 狐狸跳\n过懒狗。 \nends\n\n  code",
    ),
    "code": (
        "See:\n```python\nx = some_function(1, 2, 3)\n```\nand then some more",
        "See:\n```python\nx = some_function(1, 2, 3)\n```\nand then \nsome more",
    ),
    "tildes in a list": ("- a\n  ~~~\n  a long line of it\n  ~~~\nx yy zzz wwwww", None),
    "code within a line": ("use ```a b c``` or so now", "use ```a b \nc``` or so \nnow"),
    "address": ("at https://example.org/a/b-c?d=e#f it is", "at \nhttps://example.org/a/b-c?d=e#f it \nis"),
    "no break before closing marks": ("狐狸跳过懒、狗", "狐狸跳过\n懒、狗"),
    "Korean": ("여우가 강아지를 넘는다", "여우가 \n강아지를 \n넘는다"),
    "emoji": ("abcd efg 👩‍👩‍👧 👍🏽 x", "abcd efg \n👩‍👩‍👧 👍🏽\nx"),
    "marks": ("cafe\u0301 abcdef x", "cafe\u0301 abcdef\nx"),
}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_words_wrap_however_the_text_arrives(name: str, size: int) -> None:
    text, want = WRAPPED[name]
    wrap = WordWrap(lambda: 12)
    shown = "".join(wrap.feed(text[i : i + size]) for i in range(0, len(text), size)) + wrap.flush()
    assert shown == (want or text.replace("zzz ", "zzz \n"))
    assert WordWrap(lambda: 0).feed(text) == text


def test_a_resized_terminal_wraps_at_its_new_width() -> None:
    widths = [100]
    wrap = WordWrap(lambda: widths[-1])
    first = wrap.feed("one two three\n")
    widths.append(9)
    assert first + wrap.feed("one two three\n") + wrap.flush() == "one two three\none two \nthree\n"


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
    monkeypatch.setattr("minisgl.tools.chat.client.NOTICE_S", 0.01)
    with HTTPServer(("127.0.0.1", 0), ModelInfo) as server:  # listens, but does not answer yet
        url = f"http://127.0.0.1:{server.server_port}"
        begins = threading.Timer(0.5, server.handle_request)
        begins.start()
        assert running_server("127.0.0.1", server.server_port, "demo", None, 60.0) == url
        begins.join()
        assert capsys.readouterr().err.count(f"waiting for {url}") == 1
        assert running_server("127.0.0.1", server.server_port, "demo", None, 0.05) is None
