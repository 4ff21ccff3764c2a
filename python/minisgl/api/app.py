"""The HTTP application: its routes, middleware and error handlers, and OpenAI's two generation endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from minisgl.api.adapters import add_adapter_routes
from minisgl.api.anthropic import add_messages_routes
from minisgl.api.embeddings import add_embeddings_routes
from minisgl.api.frontend import FrontendManager
from minisgl.api.gate import ANY, Access, Gate
from minisgl.api.generate import add_generate_route
from minisgl.api.http import NAMES, error_response, json_response
from minisgl.api.items import add_responses_routes
from minisgl.api.metrics import Metrics
from minisgl.api.openai import add_openai_routes
from minisgl.api.operations import add_information_routes, add_status_routes, add_tokenizer_routes, add_view_route
from minisgl.api.page import page_routes
from minisgl.api.request_log import RequestEnds, write_line
from minisgl.api.requests import ServedModel
from minisgl.api.routes import Routes, openapi_schema, unknown_path
from minisgl.api.tracing import Traces, is_traced
from minisgl.core.errors import RequestError
from minisgl.settings.options import ServerArgs, split_list

ADDERS: Final = (
    *(add_openai_routes, add_responses_routes, add_messages_routes, add_generate_route, add_embeddings_routes),
    *(add_status_routes, add_information_routes, add_tokenizer_routes, add_adapter_routes),
)


def create_app(args: ServerArgs, model: ServedModel) -> Starlette:
    """Create the application. Its lifespan owns the `FrontendManager` at `app.state.frontend`."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        metrics = Metrics(model.name, model.adapters, split_list(args.classes))
        frontend = FrontendManager(args, model.limits, metrics)
        app.state.frontend = frontend
        try:
            yield
        finally:
            await frontend.close()
            if traces is not None:
                await asyncio.get_running_loop().run_in_executor(None, traces.close)

    traces = Traces(args) if is_traced(args) else None
    access = Access.of(args)
    middleware = [Middleware(Gate, access=access)]
    if access.origins:
        allowed: dict[str, Any] = {"allow_methods": ["GET", "POST", "DELETE"], "allow_headers": ["*"]}
        allowed |= {"allow_origin_regex": ".*"} if ANY in access.origins else {"allow_origins": access.origins}
        cors = Middleware(CORSMiddleware, **allowed, allow_private_network=True, expose_headers=["*"])
        middleware.insert(0, cors)
    sinks = [*([write_line] if args.log_requests else []), *([] if traces is None else [traces.record])]
    if sinks:
        middleware.insert(0, Middleware(RequestEnds, root_path=access.root_path, sinks=sinks))
    routes = served_routes(args, model)
    document = openapi_schema(routes.endpoints)

    async def openapi(_: Request) -> Response:
        return json_response(document)

    all_routes = [*routes.routes, *(page_routes() if args.ui else ()), Route("/openapi.json", openapi)]
    return Starlette(
        routes=all_routes, middleware=middleware, exception_handlers=_error_handlers(all_routes), lifespan=lifespan
    )


def served_routes(args: ServerArgs, model: ServedModel) -> Routes:
    """Return the routes of the API."""
    routes = Routes(args, model)
    for add in ADDERS:
        add(routes)
    if args.ui:
        add_view_route(routes)
    return routes


def _error_handlers(routes: list[Route]) -> dict[Any, Callable[[Request, Any], Awaitable[Response]]]:
    async def request_error(request: Request, e: RequestError) -> Response:
        return error_response(request.url.path, e.named(request.scope.get(NAMES, {})))

    async def http_error(request: Request, e: HTTPException) -> Response:
        path = request.url.path
        message = unknown_path(path, [route.path for route in routes]) if e.status_code == 404 else e.detail
        return error_response(path, RequestError(message, status=e.status_code), e.headers)

    async def client_gone(_: Request, e: ClientDisconnect) -> Response:
        return Response(status_code=499)  # nginx's code for a closed connection; no client reads it

    async def internal_error(request: Request, e: Exception) -> Response:
        return error_response(request.url.path, RequestError("internal error; see the server's log", status=500))

    return {
        RequestError: request_error,
        HTTPException: http_error,
        ClientDisconnect: client_gone,
        Exception: internal_error,
    }
