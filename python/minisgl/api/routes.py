"""Typed routes: the annotations of a handler say what it reads and writes, also for /openapi.json.

Descriptions come from docs/api.md; `make rooms` writes them into texts.json.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeVar, get_type_hints

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import minisgl
from minisgl.api import protocol as p
from minisgl.api.http import ANTHROPIC, json_response, read_request
from minisgl.api.requests import ServedModel
from minisgl.core.errors import near_miss
from minisgl.settings.foreign import field_names
from minisgl.settings.options import ServerArgs

SSE: Final = "text/event-stream"
_COMMON: Final = (401, 403, 500, 503)  # of every endpoint; 503: starting, draining or failed
_WITH_BODY: Final = (400, 404, 408, 413, 415, 429)
SAMPLE_URL: Final = "http://localhost:1919"  # in docs/api.md; the page shows its own
_REF: Final = "#/components/schemas/{name}"
MAX_SHOWN: Final = 100
# Paths of Ollama, llama.cpp, TGI and older APIs -> ours, where the names are not similar.
ELSEWHERE: Final[dict[str, str]] = field_names()["paths"]

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


@dataclass(frozen=True)
class Endpoint:
    """A documented route. `request` and `response` are the types of the bodies, `media` is an alternative to JSON."""

    method: str
    path: str
    handler: Callable[..., Awaitable[Any]]
    request: Any
    response: Any
    media: str

    @property
    def key(self) -> str:
        """The method, and the path as OpenAPI writes it."""
        return f"{self.method} {self.path.replace(':path}', '}')}"


class Routes:
    """The routes, and what their handlers share.

    A handler is a coroutine function of the HTTP request and, if it has a parameter `body`, of that body. It returns a
    value that is sent as JSON, or `Annotated[Response, type of the JSON, other media type...]`. The first line of its
    docstring is the summary of the endpoint.
    """

    def __init__(self, args: ServerArgs, model: ServedModel) -> None:
        self.args = args
        self.model = model
        self.endpoints: list[Endpoint] = []
        self.routes: list[Route] = []

    def add(self, key: str, *aliases: str) -> Callable[[Handler], Handler]:
        """Return a decorator for the handler of `key`, a method and a path; `aliases` are other paths to it."""
        method, path = key.split()

        def add(handler: Handler) -> Handler:
            types = get_type_hints(handler, include_extras=True)
            response, media = (*getattr(types["return"], "__metadata__", (types["return"],)), "")[:2]
            kind = types.get("body")

            async def respond(request: Request) -> Response:
                body = [] if kind is None else [await read_request(request, kind, self.args, self.model)]
                result = await handler(request, *body)
                return result if isinstance(result, Response) else json_response(result)

            self.endpoints.append(Endpoint(method, path, handler, kind, response, media))
            self.routes += [Route(served, respond, methods=[method]) for served in (path, *aliases)]
            return handler

        return add


def openapi_schema(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the document that describes `endpoints`."""
    # The descriptions in docs/api.md of "GET /path" and "Type.field".
    texts: dict[str, str] = json.loads(Path(__file__).with_name("texts.json").read_text(encoding="utf-8"))
    types = [t for e in endpoints for t in (e.request, e.response) if t is not None]
    all_types = [*types, p.AnthropicErrorResponse, p.ErrorResponse]
    schemas, components = msgspec.json.schema_components(all_types, ref_template=_REF)
    of_type = dict(zip(map(repr, types), schemas, strict=False))
    for name, schema in components.items():
        for field, shape in schema.get("properties", {}).items():
            keys = (f"{base.__name__}.{field}" for base in getattr(p, name, object).__mro__)
            if (text := next((texts[key] for key in keys if key in texts), None)) is not None:
                shape["description"] = text
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        method, path = endpoint.key.split()
        key = f"{method} {endpoint.path}"
        operation: dict[str, Any] = {"operationId": endpoint.handler.__name__, "description": texts.get(key, "")}
        operation |= _operation(path, endpoint, of_type, schemas[-2 if path.startswith(ANTHROPIC) else -1])
        sample = texts.get(f"curl {key}", f"curl {SAMPLE_URL}{path}")
        operation["x-codeSamples"] = [{"lang": "shell", "source": sample}]
        paths.setdefault(path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "minisgl", "version": minisgl.__version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(path: str, endpoint: Endpoint, of_type: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    contents: dict[str, Any] = {}
    if endpoint.response is not None:
        contents["application/json"] = {"schema": of_type[repr(endpoint.response)]}
    if endpoint.media:
        # Of events a schema would describe each one.
        contents[endpoint.media] = {} if endpoint.media == SSE else {"schema": {"type": "string"}}
    responses: dict[str, Any] = {"200": {"description": "OK", "content": contents}} if contents else {}
    further = _WITH_BODY if endpoint.request else (404,) * ("{name}" in path) + (415,) * (endpoint.method == "POST")
    for status in sorted({*_COMMON, *further}):
        is_status = status == 503 and endpoint.response is p.StatusResponse  # a failed probe is not an error object
        schema = {"anyOf": [of_type[repr(endpoint.response)], error]} if is_status else error
        responses[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {"application/json": {"schema": schema}},
        }
    operation: dict[str, Any] = {"summary": (endpoint.handler.__doc__ or "").partition("\n")[0], "responses": responses}
    if endpoint.request is not None:
        body = {"application/json": {"schema": of_type[repr(endpoint.request)]}}
        operation["requestBody"] = {"required": True, "content": body}
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation


def unknown_path(path: str, paths: Iterable[str]) -> str:
    """Return the error message for `path`, which is not among the served `paths`, with the path that is probably meant.

    That is the one in `ELSEWHERE`, else the longest one that, without /v1, ends `path` (the base URL is wrong), else
    the one that `path` misspells.
    """
    served = [one for one in paths if "{" not in one and one != "/"]
    tails = [one for one in served if path.endswith(one.removeprefix("/v1"))]
    meant = ELSEWHERE.get(path) or max(tails, key=len, default=None) or near_miss(path[:MAX_SHOWN], served)
    hint = f"use {meant}" if meant else "/openapi.json lists the paths"
    return f"there is no path {path[:MAX_SHOWN]} here; {hint}"
