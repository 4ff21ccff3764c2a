"""What all routes share: reading a body, JSON responses and errors."""

from __future__ import annotations

import asyncio
from typing import Any, Final, TypeVar

import msgspec
from fastapi import Request, Response

from minisgl.api.fields import ignored_fields
from minisgl.api.protocol import AnthropicError, AnthropicErrorResponse, ErrorDetail, ErrorResponse, parse_body
from minisgl.errors import RequestError
from minisgl.settings.options import ServerArgs, split_list

T = TypeVar("T", bound=msgspec.Struct)

BODY_TIMEOUT_S: Final = 60.0
# Scope key of the `send` that the framework has not wrapped: several layers cheaper for each event of a stream.
RAW_SEND: Final = "minisgl.send"
# Scope key of a call that ends the connection at once, with everything in its buffers.
DROP: Final = "minisgl.drop"

# Scope key of a list of headers, (name, value) in bytes, that the response gets besides its own.
HEADERS: Final = "minisgl.headers"
# Scope keys of what the request log tells: the name of the request, and its `Submission` once it has one.
REQUEST_ID: Final = "minisgl.request_id"
SUBMISSION: Final = "minisgl.submission"

# The served model, whatever its name: in SGLang, and as sglang-router writes it into a request that names none.
ANY_MODEL: Final = ("default", "unknown")
ANTHROPIC: Final = "/v1/messages"  # paths that begin so have Anthropic's errors

to_json: Final = msgspec.json.Encoder().encode


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`value` as a JSON response."""
    return Response(to_json(value), status, headers, media_type="application/json")


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> ErrorResponse:
    """OpenAI's error object."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return ErrorResponse(error=ErrorDetail(message=message, type=kind, param=param, code=code))


def error_response(path: str, error: RequestError, headers: dict[str, str] | None = None) -> Response:
    """The `error` in the shape of the API that `path` belongs to."""
    body: Any = error_body(error.message, error.status, error.param, error.code)
    if path.startswith(ANTHROPIC):
        body = anthropic_error(error)
    return json_response(body, error.status, headers)


def anthropic_error(error: RequestError) -> AnthropicErrorResponse:
    """Anthropic's error object."""
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large"}
    kinds |= {429: "rate_limit_error", 503: "overloaded_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return AnthropicErrorResponse(AnthropicError(kind, error.message))


def require_json(request: Request) -> None:
    """Raises `RequestError` (415). A page of another site cannot send this type without a preflight request."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise RequestError("the content type must be application/json", code="unsupported_media_type", status=415)


async def read_request(request: Request, kind: type[T], args: ServerArgs, served: str) -> T:
    """Read the body as a `kind`. Raises `RequestError` (400, 404 for another model than `served`, 408, 413, 415)."""
    require_json(request)
    max_body = args.max_body
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
    parsed = parse_body(bytes(body), kind)
    requested: str | None = getattr(parsed, "model", None)
    if requested is not None and requested not in (served, *ANY_MODEL, *split_list(args.served_model_name)):
        message = f"model {requested[:100]!r} is not served here, only {served!r}"
        raise RequestError(message, param="model", code="model_not_found", status=404)
    tell_ignored(request, ignored_fields(bytes(body), kind, args.unknown_fields == "refuse"))
    return parsed


def tell_ignored(request: Request, names: list[str]) -> None:
    """Name fields without an effect in the header of the answer."""
    if names:
        request.scope[HEADERS].append((b"x-ignored-fields", ", ".join(names).encode()))
