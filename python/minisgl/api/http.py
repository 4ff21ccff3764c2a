"""Shared by all routes: reading a body, JSON responses, and errors."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from minisgl.api.fields import read_body, told
from minisgl.api.protocol import AnthropicError, AnthropicErrorResponse, ErrorDetail, ErrorResponse
from minisgl.api.requests import ChosenModel, ServedModel
from minisgl.core.errors import RequestError
from minisgl.settings.options import ServerArgs, split_list

T = TypeVar("T", bound=msgspec.Struct)

BODY_TIMEOUT_S: Final = 60.0
# Scope key of the server's own `send`: without the framework's layers, it is much cheaper per event of a stream.
RAW_SEND: Final = "minisgl.send"
# Scope key of a function that resets the connection and discards its buffers.
DROP: Final = "minisgl.drop"

# Scope key of a list of additional response headers, (name, value) in bytes.
HEADERS: Final = "minisgl.headers"
# Scope key of the client's names of our fields, which errors use.
NAMES: Final = "minisgl.names"
# Scope key of the number of the client's class.
LEVEL: Final = "minisgl.level"
# Scope key of the `ChosenModel` of the body.
MODEL: Final = "minisgl.model"
# Scope keys for the request log: the id of the request, and its `Submission` once it has one.
REQUEST_ID: Final = "minisgl.request_id"
SUBMISSION: Final = "minisgl.submission"

# A name that always means the served model: SGLang accepts it, and sglang-router adds it to requests without a name.
ANY_MODEL: Final = ("default", "unknown")
ANTHROPIC: Final = "/v1/messages"  # paths with this prefix have Anthropic's form of errors
# Types of errors, and response headers, by status.
ERRORS: Final = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
ERROR_HEADERS: Final = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": "1"}, 503: {"retry-after": "1"}}

to_json: Final = msgspec.json.Encoder().encode


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return `value` as a JSON response."""
    return Response(to_json(value), status, headers, media_type="application/json")


def error_body(error: RequestError) -> ErrorResponse:
    """Return OpenAI's error object."""
    kind = ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return ErrorResponse(ErrorDetail(message=error.message, type=kind, param=error.param, code=error.code))


def error_response(path: str, error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response for `error`, in the form of the API that `path` belongs to."""
    body = anthropic_error(error) if path.startswith(ANTHROPIC) else error_body(error)
    return json_response(body, error.status, ERROR_HEADERS.get(error.status, {}) | dict(headers or {}))


def anthropic_error(error: RequestError) -> AnthropicErrorResponse:
    """Return Anthropic's error object."""
    kinds = ERRORS | {413: "request_too_large", 503: "overloaded_error"}
    kind = kinds.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return AnthropicErrorResponse(AnthropicError(kind, error.message))


def require_json(request: Request) -> None:
    """Raise `RequestError` (415, 501) unless the body is JSON, and not compressed.

    Pages of other sites cannot send JSON without a preflight.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise RequestError("the content type must be application/json", code="unsupported_media_type", status=415)
    coding = request.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        request.scope[HEADERS].append((b"accept-encoding", b"identity"))
        message = f"content-encoding: {coding[:20]} is not supported; send the body uncompressed"
        raise RequestError(message, code="unsupported_content_coding", status=415)
    if request.headers.get("transfer-encoding", "chunked").strip().lower() != "chunked":
        raise RequestError("transfer-encoding: only chunked is supported", status=501)


async def read_request(request: Request, kind: type[T], args: ServerArgs, model: ServedModel) -> T:
    """Read the body as a `kind`. Raises `RequestError`: 400, 408, 413, 415, or 404 for an unknown model."""
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
    text = bytes(body).removeprefix(codecs.BOM_UTF8)
    try:
        is_utf8 = "\0" not in text.decode()[:2]  # ASCII in UTF-16 is valid UTF-8 with many zeros
    except UnicodeDecodeError:
        is_utf8 = False
    if not is_utf8:
        raise RequestError("the body is not UTF-8 (RFC 8259, 8.1)", code="invalid_json")
    parsed, request.scope[NAMES], ignored = read_body(text, kind, args.unknown_fields == "refuse")
    request.scope[MODEL] = _chosen(parsed, model, split_list(args.served_model_name))
    report_ignored(request, ignored)
    return parsed


def _chosen(body: msgspec.Struct, model: ServedModel, aliases: list[str]) -> ChosenModel:
    """Return the model that `model`, or `lora_path`, which is SGLang's, chooses. Raises `RequestError`."""
    chosen = ChosenModel(model.name)
    for param in ("model", "lora_path") if "model" in body.__struct_fields__ else ():
        if (asked := getattr(body, param, None)) is not None:
            one = model.choose(asked, param, (model.name, *ANY_MODEL, *aliases))
            if chosen.served is not None and chosen.served is not one.served:
                raise RequestError(f"{param} and model choose different adapters: leave one out", param=param)
            chosen = one
    return chosen


def report_ignored(request: Request, names: list[str]) -> None:
    """List what has no effect in a header of the response, and in the log."""
    if names:
        request.scope[HEADERS].append((b"x-ignored-fields", ", ".join(told(names)).encode()))
