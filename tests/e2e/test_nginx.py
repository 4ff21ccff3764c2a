"""nginx in front of two servers, with the file in examples/deploy."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from e2e.harness import PATIENCE_S, ROOT, ServerProcess, eventually

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
CONF = ROOT / "examples" / "deploy" / "nginx-several.conf"

pytestmark = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as s:
        return int(s.getsockname()[1])


@pytest.fixture
def servers() -> Iterator[list[ServerProcess]]:
    with ServerProcess(stub=True) as first, ServerProcess(stub=True) as second:
        yield [first, second]


@pytest.fixture
def url(servers: list[ServerProcess], tmp_path: Path) -> Iterator[str]:
    """The address of an nginx in front of both."""
    port, text = free_port(), CONF.read_text()
    for shown, real in [("listen 8080", f"listen 127.0.0.1:{port}")] + [
        (f"127.0.0.1:{shown}", server.url.removeprefix("http://"))
        for shown, server in zip((1919, 1920), servers, strict=True)
    ]:
        assert shown in text
        text = text.replace(shown, real)
    for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"):
        text += f"{kind}_temp_path {tmp_path}/{kind};\n"
    main = tmp_path / "nginx.conf"
    main.write_text(f"daemon off; pid {tmp_path}/pid; events {{}} http {{ access_log off;\n{text}}}")
    assert NGINX is not None
    process = subprocess.Popen([NGINX, "-e", f"{tmp_path}/log", "-c", str(main)], stderr=subprocess.PIPE)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert b"[emerg]" not in errors, errors


def answer(client: httpx.Client, prompt: str) -> str:
    response = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4})
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["text"]
    return text


def test_both_answer_and_one_is_enough(servers: list[ServerProcess], url: str) -> None:
    with httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:

        def is_up() -> bool:
            try:
                return client.get("/ready").status_code == 200
            except httpx.HTTPError:
                return False

        assert eventually(is_up)
        expected = answer(client, "one two three four")
        for _ in range(5):
            assert answer(client, "one two three four") == expected
        done = [s.metrics()["time_to_first_token_seconds_count"] for s in servers]
        assert all(done), f"one server got nothing: {done}"
        with client.stream("POST", "/v1/completions", json={"prompt": "a b c d", "stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line]
        assert len(lines) > 2 and lines[-1] == "data: [DONE]"
        servers[0].process.send_signal(signal.SIGTERM)
        for _ in range(6):  # while it drains, and after its end
            assert answer(client, "one two three four") == expected
        servers[0].wait()
        assert answer(client, "one two three four") == expected
