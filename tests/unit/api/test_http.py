"""How the body of a request is read."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from minisgl.api import http
from minisgl.errors import RequestError
from minisgl.settings.options import ServerArgs


class Body(msgspec.Struct):
    prompt: str


def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_TIMEOUT_S", 0.2)

    async def receive() -> dict[str, Any]:  # a byte now and then does not help
        await asyncio.sleep(0.03)
        return {"type": "http.request", "body": b" ", "more_body": True}

    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}
    with pytest.raises(RequestError, match="the body did not arrive in time") as e:
        asyncio.run(http.read_request(Request(scope, receive), Body, ServerArgs(), "demo"))
    assert e.value.status == 408
