"""sglang-router in front of the server: it learns the model's name, and passes requests and streams on."""

from __future__ import annotations

import atexit
import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

from checks import MODEL, STORY, URL, check, run

PATIENCE_S = 60.0


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


PORT = free_port()
COMMAND = ["--worker-urls", URL, "--policy", "cache_aware", "--port", str(PORT), "--prometheus-port", str(free_port())]
ROUTER = subprocess.Popen([sys.executable, "-m", "sglang_router.launch_router", *COMMAND])
atexit.register(ROUTER.terminate)


def ask(path: str, body: dict[str, Any] | None = None) -> str:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        text: str = response.read().decode()
        return text


def wait_ready() -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            ask("/readiness")
            return
        except (urllib.error.URLError, ConnectionError):
            assert ROUTER.poll() is None, "the router has ended"
            assert time.monotonic() < deadline, "the router is not ready"
            time.sleep(0.2)


@check
def it_knows_the_model() -> None:
    wait_ready()
    assert [card["id"] for card in json.loads(ask("/v1/models"))["data"]] == [MODEL]
    (worker,) = json.loads(ask("/workers"))["workers"]
    assert worker["model_id"] == MODEL and worker["is_healthy"], worker


@check
def completions() -> None:
    body = {"model": MODEL, "prompt": STORY, "max_tokens": 12, "temperature": 0}
    direct = urllib.request.Request(
        f"{URL}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(direct, timeout=PATIENCE_S) as response:
        expected = json.load(response)["choices"][0]["text"]
    assert json.loads(ask("/v1/completions", body))["choices"][0]["text"] == expected


@check
def chat_stream() -> None:
    messages = [{"role": "user", "content": "Hello!"}]
    lines = ask("/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 8, "stream": True})
    events = [line.removeprefix("data: ") for line in lines.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(e)["choices"][0]["delta"].get("content", "") for e in events[:-1])


@check
def chat_without_a_model() -> None:
    messages = [{"role": "user", "content": "What is 12 + 30?"}]
    reply = json.loads(ask("/v1/chat/completions", {"messages": messages, "temperature": 0}))
    assert "42" in reply["choices"][0]["message"]["content"]


@check
def generate() -> None:
    reply = json.loads(ask("/generate", {"text": STORY, "sampling_params": {"max_new_tokens": 8, "temperature": 0}}))
    assert reply["text"] and reply["meta_info"]["completion_tokens"] == 8


if __name__ == "__main__":
    run("sglang-router")
