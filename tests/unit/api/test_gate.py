"""Who may send a request, with the application behind the gate replaced by an answer of 204."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from minisgl.api.app import create_app
from minisgl.api.gate import Access, Gate
from minisgl.api.requests import SamplingDefaults, ServedModel
from minisgl.errors import ConfigError
from minisgl.params import Limits
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


def test_posts_must_be_json() -> None:
    app = create_app(ServerArgs(), ServedModel("m", Limits(max_model_len=64, vocab_size=100), SamplingDefaults()))
    client = TestClient(app, "http://localhost:1919")
    for route in app.routes:
        if "POST" in getattr(route, "methods", ()):
            assert client.post(route.path).status_code == 415, route  # type: ignore[attr-defined]
            assert client.post(route.path, content="{}", headers={"content-type": "text/plain"}).status_code == 415  # type: ignore[attr-defined]
