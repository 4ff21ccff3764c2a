"""Reading a request's body, bounded in bytes and time, and what every body may name: the model."""

from __future__ import annotations

import asyncio
from typing import Final, TypeVar

import msgspec
from fastapi import Request

from minisgl.api.protocol import OpenAIFields, parse_body
from minisgl.errors import RequestError

T = TypeVar("T", bound=msgspec.Struct)

BODY_TIMEOUT_S: Final = 60.0


async def read_request(request: Request, kind: type[T], max_body: int) -> T:
    """The body as a `kind`; raises `RequestError` (400, 408, 413, 415)."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":  # what a page of another site cannot send without being asked
        raise RequestError("the content type must be application/json", code="unsupported_media_type", status=415)
    too_large = RequestError(f"the body has more than {max_body} bytes", code="body_too_large", status=413)
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_body:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_body:
                    raise too_large
    except TimeoutError:
        raise RequestError("the body did not arrive in time", code="timeout", status=408) from None
    return parse_body(bytes(body), kind)


def wants_timing(request: Request, body: OpenAIFields) -> bool:
    """Whether the receipt is asked for: `return_timing` in the body, or a header for clients that cannot set it."""
    return bool(body.return_timing) or request.headers.get("x-minisgl-timing") == "1"


def require_model(asked: str | None, served: str) -> None:
    """Raises `RequestError` (404) when the request names another model than the one that is served."""
    if asked is not None and asked != served:
        raise RequestError(
            f"model {asked[:100]!r} is not served here, only {served!r}",
            param="model",
            code="model_not_found",
            status=404,
        )
