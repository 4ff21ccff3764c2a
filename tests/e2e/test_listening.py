"""How clients reach the server: over TLS, a unix socket or a proxy's path, with one of several keys and names."""

from __future__ import annotations

import ssl
import stat
import subprocess
from pathlib import Path

import httpx
import pytest

from e2e.harness import PATIENCE_S, ServerProcess

QUESTION = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return cert, key


def test_https(certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    with ServerProcess("--ssl-certfile", str(cert), "--ssl-keyfile", str(key), stub=True) as server:
        assert server.url.startswith("https://127.0.0.1:")
        with server.client(verify=ssl.create_default_context(cafile=str(cert))) as client:
            assert client.get("/v1/models").status_code == 200
            with client.stream("POST", "/v1/completions", json={"prompt": "a b c", "stream": True}) as answer:
                assert answer.read().endswith(b"data: [DONE]\n\n")
        with pytest.raises(httpx.HTTPError):
            httpx.get(server.url.replace("https", "http") + "/health", trust_env=False)


@pytest.mark.parametrize("files", [("cert", None), ("cert", "cert"), ("none", "key")])
def test_a_certificate_that_cannot_be_used_ends_the_start(
    files: tuple[str, str | None], certificate: tuple[Path, Path]
) -> None:
    folder = certificate[0].parent
    cert, key = (folder / f"{name}.pem" if name else None for name in files)
    server = ServerProcess("--ssl-certfile", str(cert), *(["--ssl-keyfile", str(key)] if key else []), stub=True)
    assert server.wait() == 2
    assert "--ssl-certfile" in server.log.splitlines()[-1]


def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "s"
    flags = ("--uds", str(path), "--api-key", "k")
    with ServerProcess(*flags, stub=True) as server:
        assert server.url == str(path)
        assert stat.S_ISSOCK(path.stat().st_mode)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://llm.example") as client:
            assert client.get("/v1/models").status_code == 401
            assert client.get("/v1/models", headers={"authorization": "bearer k"}).status_code == 200
        second = ServerProcess(*flags, stub=True)
        assert second.wait() == 2
        assert f"cannot listen on --uds {path}" in second.log
        server.kill()
    assert path.exists(), "the first server was killed"
    with ServerProcess(*flags, stub=True) as server:
        assert server.process.poll() is None
    assert not path.exists()


def test_a_proxy_may_leave_its_path_or_strip_it() -> None:
    with ServerProcess("--root-path", "/llm/", "--api-key", "k", stub=True) as server, server.client() as client:
        for prefix in ("", "/llm"):
            assert client.get(f"{prefix}/health").status_code == 200
            assert client.get(f"{prefix}/v1/models").status_code == 401
            assert client.get(f"{prefix}/v1/models", headers={"authorization": "Bearer k"}).status_code == 200
        assert client.get("/other/health").status_code == 401


def test_several_keys_and_names(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("first\n\nsecond\n")
    flags = ("--api-key-file", str(file), "--served-model-name", "one", "org/two")
    with pytest.raises(AssertionError, match="put MODEL org/two first"):
        ServerProcess(*flags, stub=True).wait_ready()
    flags = ("--api-key-file", str(file), "--served-model-name", "one,org/two")
    with ServerProcess(*flags, stub=True) as server, server.client() as client:
        for key, status in (("first", 200), ("second", 200), ("first,second", 401), ("third", 401)):
            headers = {"authorization": f"BEARER {key}"}
            assert client.get("/v1/models", headers=headers).status_code == status
        client.headers["authorization"] = "Bearer second"
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["one", "org/two"]
        assert client.get("/v1/models/org/two").json()["id"] == "org/two"
        names = {"one": 200, "org/two": 200, "default": 200, "unknown": 200, "three": 404}
        for name, status in names.items():
            body = {"model": name, "prompt": "a b", "max_tokens": 2}
            answer = client.post("/v1/completions", json=body)
            assert answer.status_code == status
            assert status != 200 or answer.json()["model"] == "one"


def test_a_chat_template_and_its_variables_by_option(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("{{ tone or 'no tone' }}: {{ messages[0].content }}")
    flags = ("--chat-template", str(file), "--default-chat-template-kwargs", '{"tone": "kind"}')
    with ServerProcess(*flags) as server, server.client() as client:
        for kwargs, tone in ((None, "kind"), ({"tone": "stern"}, "stern")):
            body = {**QUESTION, "chat_template_kwargs": kwargs}
            tokens = client.post("/tokenize", json={"messages": body["messages"], "chat_template_kwargs": kwargs})
            text = client.post("/detokenize", json={"tokens": tokens.json()["tokens"]}).json()["prompt"]
            assert text == f"{tone}: What is 12 + 30?"
            assert client.post("/v1/chat/completions", json={**body, "max_tokens": 3}, timeout=PATIENCE_S).is_success


def test_a_model_is_served_as_vllm_users_write_it() -> None:
    flags = "--max-model-len 256 --max-num-seqs 2 --enforce-eager --seed 7 -tp 1 --dtype float --no-enable-log-requests"
    with ServerProcess(*flags.split(), "--disable-radix-cache", "--load-format", "auto") as server:
        info = server.info()
        assert info["max_model_len"] == 256
        with server.client() as client:
            answer = client.post("/v1/chat/completions", json=QUESTION).json()
    assert "42" in answer["choices"][0]["message"]["content"]
