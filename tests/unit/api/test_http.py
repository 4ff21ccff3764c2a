"""How the body of a request is read."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from minisgl.api import http
from minisgl.api.requests import SamplingDefaults, ServedModel
from minisgl.core.errors import RequestError
from minisgl.core.params import Limits
from minisgl.settings.options import ServerArgs


class Body(msgspec.Struct):
    prompt: str


MODEL = ServedModel("demo", Limits(max_model_len=9, vocab_size=9), SamplingDefaults())
TEXT = '{"prompt": "grün"}'


@pytest.mark.parametrize(
    ("body", "headers", "message"),
    [
        (TEXT.encode("utf-8-sig"), {}, None),
        (TEXT.encode(), {"content-encoding": " Identity"}, None),
        (TEXT.encode(), {"content-encoding": "", "transfer-encoding": "Chunked"}, None),
        (TEXT.encode(), {"content-type": 'Application/JSON ; charset="utf-16"'}, None),  # RFC 8259 has no charset
        (TEXT.encode("utf-16"), {}, "not UTF-8"),
        (TEXT.encode("utf-16-le"), {}, "not UTF-8"),
        (TEXT.encode("utf-16-be"), {}, "not UTF-8"),
        (TEXT.encode("utf-32"), {}, "not UTF-8"),
        (TEXT.encode("utf-32-be"), {}, "not UTF-8"),
        (TEXT.encode("latin-1"), {}, "not UTF-8"),
        (b"", {}, "not valid JSON"),
        (b"\xef\xbb\xbf", {}, "not valid JSON"),
        (b"", {"content-type": ""}, "must be application/json"),
        (TEXT.encode(), {"content-type": "text/json"}, "must be application/json"),
        (TEXT.encode(), {"transfer-encoding": "gzip, chunked"}, "only chunked"),
    ],
)
def test_a_body_must_be_json_in_utf_8(body: bytes, headers: dict[str, str], message: str | None) -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    fields = {"content-type": "application/json", **headers}
    head = [(name.encode(), value.encode()) for name, value in fields.items()]
    request = Request({"type": "http", "method": "POST", "headers": head}, receive)
    reading = http.read_request(request, Body, ServerArgs(), MODEL)
    if message is None:
        assert asyncio.run(reading) == Body("grün")
        return
    with pytest.raises(RequestError, match=message) as e:
        asyncio.run(reading)
    assert e.value.status in (400, 415, 501)


def test_a_body_that_does_not_come_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_TIMEOUT_S", 0.2)

    async def receive() -> dict[str, Any]:  # a byte now and then does not help
        await asyncio.sleep(0.03)
        return {"type": "http.request", "body": b" ", "more_body": True}

    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", b"application/json")]}
    with pytest.raises(RequestError, match="the body did not arrive in time") as e:
        asyncio.run(http.read_request(Request(scope, receive), Body, ServerArgs(), MODEL))
    assert e.value.status == 408
