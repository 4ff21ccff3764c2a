"""Who may send a request, with the application behind the gate replaced by an answer of 204."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from minisgl.api.app import create_app
from minisgl.api.gate import Access, Gate
from minisgl.api.requests import SamplingDefaults, ServedModel
from minisgl.core.errors import ConfigError
from minisgl.core.params import Limits
from minisgl.settings.options import ServerArgs


def answer(args: ServerArgs, path: str = "/v1/models", **headers: str) -> int:
    async def everything(_: Request) -> Response:
        return Response(status_code=204)

    app = Starlette(routes=[Route("/{path:path}", everything)])
    app.add_middleware(Gate, access=Access.of(args))
    return TestClient(app, "http://localhost:1919").get(path, headers=headers).status_code


@pytest.mark.parametrize(
    ("options", "host", "status"),
    [
        ({}, "localhost:1919", 204),
        ({}, "LOCALHOST", 204),
        ({}, "127.0.0.1:80", 204),
        ({}, "[::1]:80", 204),
        ({}, "[::1]", 204),
        ({}, "localhost.", 204),
        ({}, "localhost.:80", 204),
        ({}, "localhost:", 204),
        ({}, "localhost:x", 403),
        ({}, "user@localhost", 403),
        ({}, "evil.example:1919", 403),
        ({}, "localhost.evil.example", 403),
        ({"allowed_hosts": "llm.example, other"}, "llm.example:443", 204),
        ({"allowed_hosts": "llm.example, other"}, "localhost", 403),
        ({"allowed_hosts": "*"}, "evil.example", 204),
        ({"host": "0.0.0.0", "api_key": "k", "open_metrics": True}, "10.0.0.7:1919", 401),
    ],
)
def test_only_names_of_this_server_are_served(options: dict[str, Any], host: str, status: int) -> None:
    assert answer(ServerArgs(**options), host=host) == status


@pytest.mark.parametrize(
    ("allowed", "origin", "status"),
    [
        (None, "http://localhost:1919", 204),
        (None, "https://evil.example", 403),
        (None, "null", 403),
        (None, "http://localhost:8080", 403),
        ("https://a.example,https://b.example", "https://b.example", 204),
        ("https://a.example", "https://b.example", 403),
        ("*", "https://evil.example", 204),
    ],
)
def test_pages_of_other_servers_are_refused(allowed: str | None, origin: str, status: int) -> None:
    assert answer(ServerArgs(allowed_origins=allowed), host="localhost:1919", origin=origin) == status


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        ("Bearer secret", 204),
        ("bearer secret", 204),
        ("BEARER  secret", 204),
        ("Bearer Secret", 401),
        ("Basic secret", 401),
        ("secret", 401),
        ("Bearer", 401),
        ("", 401),
    ],
)
def test_key_guards_every_path_but_probes_and_page(authorization: str, status: int) -> None:
    args = ServerArgs(api_key="secret")
    assert answer(args, authorization=authorization) == status
    for path in ("/health", "/ready", "/"):
        assert answer(args, path, authorization=authorization) == 204
    assert answer(args, "/metrics", authorization=authorization) == status
    assert answer(ServerArgs(api_key="secret", open_metrics=True), "/metrics", authorization=authorization) == 204


@pytest.mark.parametrize(("key", "status"), [("secret", 204), ("Secret", 401), ("Bearer secret", 401), ("", 401)])
def test_key_may_be_in_anthropics_header(key: str, status: int) -> None:
    assert answer(ServerArgs(api_key="secret"), "/v1/messages", **{"x-api-key": key}) == status


def test_key_can_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("secret\n")
    assert answer(ServerArgs(host="0.0.0.0", api_key_file=str(file)), authorization="Bearer secret") == 204
    with pytest.raises(ConfigError, match="exclude each other"):
        ServerArgs(api_key="a", api_key_file=str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        ServerArgs(api_key_file=str(tmp_path / "none"))
    file.write_text("")
    with pytest.raises(ConfigError, match="not empty"):
        ServerArgs(api_key_file=str(file))


@pytest.mark.parametrize("origin", ["https://a.example", "https://b.example"])
def test_browsers_may_read_answers_for_allowed_origins_only(origin: str) -> None:
    limits = Limits(max_model_len=64, vocab_size=100)
    app = create_app(ServerArgs(allowed_origins="https://a.example"), ServedModel("m", limits, SamplingDefaults()))
    client = TestClient(app, "http://localhost:1919")
    headers = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    is_allowed = origin == "https://a.example"
    assert (client.options("/v1/completions", headers=headers).status_code == 200) == is_allowed
    response = client.get("/version", headers={"origin": origin})
    assert response.status_code == (200 if is_allowed else 403)
    assert (response.headers.get("access-control-allow-origin") == origin) == is_allowed
    assert client.get("/version", headers={"host": "evil.example"}).json()["error"]["code"] == "host_not_allowed"
    local = client.options("/v1/completions", headers=headers | {"access-control-request-private-network": "true"})
    assert (local.status_code == 200) == is_allowed
    assert not is_allowed or local.headers["access-control-allow-private-network"] == "true"


MODEL = ServedModel("m", Limits(max_model_len=64, vocab_size=100), SamplingDefaults())


@pytest.mark.parametrize("root", ["", "/llm"])
@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/models", 200),
        ("/v1/models/", 200),
        ("/v1//models", 200),
        ("//v1/models//", 200),
        ("/v1%2fmodels%2F", 200),
        ("/v1/models//orgs//one/", 200),
        ("/v1/models/%2Forgs/one", 200),
        ("//docs/", 200),
        ("/", 200),
        ("//", 200),
        ("/v1/x/models", 404),
        ("/v1/model", 404),
    ],
)
def test_slashes_too_many_do_not_matter(root: str, path: str, status: int) -> None:
    app = create_app(ServerArgs(root_path=root, served_model_name="/orgs/one"), MODEL)
    client = TestClient(app, follow_redirects=False)
    for prefix in {root, ""}:
        url = f"http://localhost:1919{prefix}{path}"
        assert client.get(url).status_code == status
        assert client.post(url, json={}).status_code == {200: 405}.get(status, status)
    client = TestClient(create_app(ServerArgs(root_path=root, api_key="k"), MODEL), follow_redirects=False)
    is_open = path.strip("/") in ("", "docs")
    assert client.get(f"http://localhost:1919{root}{path}").status_code == (200 if is_open else 401)


@pytest.mark.parametrize("coding", ["gzip", "X-GZIP", "deflate", "br", "zstd", "gzip, identity", "?"])
def test_a_compressed_body_is_refused_with_what_is_accepted(coding: str) -> None:
    client = TestClient(create_app(ServerArgs(), MODEL), "http://localhost:1919")
    headers = {"content-type": "application/json", "content-encoding": coding}
    for path in ("/v1/completions", "/v1/messages", "/generate", "/flush_cache"):
        response = client.post(path, content=b"\x1f\x8b", headers=headers)
        assert (response.status_code, response.headers["accept-encoding"]) == (415, "identity")
        assert coding.lower() in response.json()["error"]["message"]


def test_posts_must_be_json() -> None:
    app = create_app(ServerArgs(), MODEL)
    client = TestClient(app, "http://localhost:1919")
    for route in app.routes:
        if "POST" in getattr(route, "methods", ()):
            assert "accept-encoding" not in client.post(route.path).headers, "that would mean: not compressed"  # type: ignore[attr-defined]
            assert client.post(route.path).status_code == 415, route  # type: ignore[attr-defined]
            assert client.post(route.path, content="{}", headers={"content-type": "text/plain"}).status_code == 415  # type: ignore[attr-defined]


def test_keys_have_classes(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("interactive=a=1\nbatch=b\nbatch=c\n")
    args = ServerArgs(classes="interactive,batch", api_key_file=str(file))
    levels = [Access.of(args).level(Headers({"x-api-key": key})) for key in ("a=1", "b", "c", "batch=b", "a")]
    assert levels == [0, 1, 1, None, None]
    assert answer(args, authorization="Bearer c") == 204 and answer(args, authorization="Bearer batch=c") == 401
    twice = {"api_key": "batch=a,interactive=a"}, {"api_key": "batch=a", "classes": "batch,batch"}
    for wrong in ({}, {"api_key": "a"}, {"api_key": "batch=a,other=b"}, {"api_key": "batch="}, *twice):
        with pytest.raises(ConfigError, match=r"--classes|not empty") as e:
            ServerArgs(**({"classes": "interactive,batch"} | wrong))
        assert "other" not in str(e.value)
