"""The page at `/`: access without a key, and its Content-Security-Policy."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import minisgl.api
from e2e.harness import ServerProcess

PAGE = (Path(minisgl.api.__file__).parent / "page.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def locked() -> Iterator[ServerProcess]:
    with ServerProcess("--api-key", "secret", stub=True) as server:
        yield server


@pytest.fixture
def client(locked: ServerProcess) -> Iterator[httpx.Client]:
    with locked.client() as client:
        yield client


def test_page_needs_no_key_and_everything_else_does(client: httpx.Client) -> None:
    assert client.get("/").status_code == 200
    assert client.head("/").status_code == 200
    assert client.get("/docs").text == PAGE and client.get("/openapi.json").status_code == 401
    assert client.post("/", json={}).status_code == 405
    paths = ("//", "/%2e", "/?", "/index.html", "/page.html", "/v1/models", "/server_info", "/health_generate")
    for path in paths:
        response = client.get(httpx.URL(client.base_url, raw_path=path.encode()))
        is_page = response.status_code == 200 and response.text == PAGE
        assert is_page if path in ("//", "/?") else response.status_code == 401, path
    for path in ("/tokenize", "/detokenize", "/reset_prefix_cache"):
        assert client.post(path, json={}).status_code == 401
    assert client.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200


def test_policy_allows_the_page_and_nothing_else(client: httpx.Client) -> None:
    response = client.get("/")
    assert response.text == PAGE
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["x-content-type-options"] == "nosniff"
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'"
    assert "unsafe" not in str(policy)
    for tag in ("style", "script"):
        (inside,) = re.findall(f"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


def test_no_ui() -> None:
    with ServerProcess("--no-ui", stub=True) as server, server.client() as client:
        response = client.get("/")
        assert response.status_code == 404
        assert response.json()["error"]["type"] == "not_found_error"
        assert client.get("/v1/models").status_code == 200
