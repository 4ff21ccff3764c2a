"""What all routes share: the API key, request ids, reading a body, JSON responses and errors."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any, Final, TypeVar

import msgspec
from fastapi import Request, Response
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.api.protocol import ErrorDetail, ErrorResponse, parse_body
from minisgl.errors import RequestError

T = TypeVar("T", bound=msgspec.Struct)

BODY_TIMEOUT_S: Final = 60.0
MAX_REQUEST_ID: Final = 128
# Paths that need no key: the liveness probe, and the page, which is static and holds no secret. A browser cannot send a
# key with an address that a user types, so the page asks for the key and sends it with its requests.
OPEN_PATHS: Final = frozenset({"/health", "/"})
# Scope key of the `send` that the framework has not wrapped: several layers cheaper for each event of a stream.
RAW_SEND: Final = "minisgl.send"
# Scope key of a call that ends the connection at once, with everything in its buffers.
DROP: Final = "minisgl.drop"

to_json: Final = msgspec.json.Encoder().encode


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`value` as a JSON response."""
    return Response(to_json(value), status, headers, media_type="application/json")


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> ErrorResponse:
    """OpenAI's error object."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return ErrorResponse(error=ErrorDetail(message=message, type=kind, param=param, code=code))


async def read_request(request: Request, kind: type[T], max_body: int) -> T:
    """Read the body as a `kind`. Raises `RequestError` (400, 408, 413, 415)."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":  # a page of another site cannot send this type without a preflight request
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


def require_model(requested: str | None, served: str) -> None:
    """Raises `RequestError` (404) when the request names a model that is not served."""
    if requested is not None and requested != served:
        raise RequestError(
            f"model {requested[:100]!r} is not served here, only {served!r}",
            param="model",
            code="model_not_found",
            status=404,
        )


class Gate:
    """Middleware that checks the API key and echoes `x-request-id`."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if request_id and len(request_id) <= MAX_REQUEST_ID and request_id.isprintable() and request_id.isascii():
            send = self._with_id(send, request_id)
        if self._expected is not None and scope["path"] not in OPEN_PATHS:
            given = headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self._expected):
                body = error_body("a valid key is needed: `Authorization: Bearer KEY`", 401, code="invalid_api_key")
                await json_response(body, 401, {"www-authenticate": "Bearer"})(scope, receive, send)
                return
        scope[RAW_SEND] = send
        await self._app(scope, receive, send)

    @staticmethod
    def _with_id(send: Send, request_id: str) -> Send:
        async def wrapped(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        return wrapped
