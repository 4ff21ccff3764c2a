"""Typed routes: the annotations of a handler say what it reads and writes, also for /openapi.json."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar, get_type_hints

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from minisgl.api.http import json_response, read_request
from minisgl.api.requests import ServedModel
from minisgl.settings.options import ServerArgs

SSE: Final = "text/event-stream"
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
                body = [] if kind is None else [await read_request(request, kind, self.args, self.model.name)]
                result = await handler(request, *body)
                return result if isinstance(result, Response) else json_response(result)

            self.endpoints.append(Endpoint(method, path, handler, kind, response, media))
            self.routes += [Route(p, respond, methods=[method]) for p in (path, *aliases)]
            return handler

        return add
