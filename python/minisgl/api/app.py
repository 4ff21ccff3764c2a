"""The HTTP application: its routes, middleware and error handlers, and OpenAI's two generation endpoints."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

import minisgl
from minisgl.api.anthropic import add_messages_routes
from minisgl.api.chat import prepared
from minisgl.api.embeddings import add_embeddings_routes
from minisgl.api.frontend import FrontendManager
from minisgl.api.gate import ANY, Access, Gate
from minisgl.api.generate import add_generate_route
from minisgl.api.http import NAMES, error_response, read_request
from minisgl.api.items import add_responses_routes
from minisgl.api.metrics import Metrics
from minisgl.api.openapi import openapi_schema
from minisgl.api.operations import add_information_routes, add_status_routes, add_tokenizer_routes, add_view_route
from minisgl.api.page import add_page
from minisgl.api.parsers.output import OutputParser
from minisgl.api.paths import unknown_path
from minisgl.api.protocol import ChatCompletionRequest, CompletionRequest, StreamOptions
from minisgl.api.replies import OpenAIRenderer
from minisgl.api.request_log import RequestEnds, write_line
from minisgl.api.requests import ServedModel, completion_messages, num_choices, with_choices
from minisgl.api.responses import response_to
from minisgl.api.tracing import Traces, is_traced
from minisgl.errors import RequestError
from minisgl.message import TokenizeMsg
from minisgl.settings.options import ServerArgs


def create_app(args: ServerArgs, model: ServedModel) -> FastAPI:
    """Create the application. Its lifespan owns the `FrontendManager` at `app.state.frontend`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        frontend = FrontendManager(args, model.limits, Metrics(model.name))
        app.state.frontend = frontend
        try:
            yield
        finally:
            await frontend.close()
            if traces is not None:
                await asyncio.get_running_loop().run_in_executor(None, traces.close)

    traces = Traces(args, model.name) if is_traced(args) else None
    app = FastAPI(title="minisgl", version=minisgl.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.root_path = args.root_path.rstrip("/")
    access = Access.of(args)
    app.add_middleware(Gate, access=access)
    if access.origins:
        allowed: dict[str, Any] = {"allow_methods": ["GET", "POST", "DELETE"], "allow_headers": ["*"]}
        allowed |= {"allow_origin_regex": ".*"} if ANY in access.origins else {"allow_origins": access.origins}
        app.add_middleware(CORSMiddleware, **allowed, allow_private_network=True, expose_headers=["*"])
    sinks = [*([write_line] if args.log_requests else []), *([] if traces is None else [traces.record])]
    if sinks:
        app.add_middleware(RequestEnds, root_path=app.root_path, sinks=sinks)
    _add_openai_routes(app, args, model)
    add_responses_routes(app, args, model)
    add_messages_routes(app, args, model)
    add_generate_route(app, args, model)
    add_embeddings_routes(app, args, model)
    add_status_routes(app)
    add_information_routes(app, args, model)
    add_tokenizer_routes(app, args, model)
    if args.ui:
        add_page(app)
        add_view_route(app)
    document = openapi_schema(app)
    app.openapi = lambda: document  # type: ignore[method-assign]
    _allow_head(app)
    _add_error_handlers(app)
    return app


def _allow_head(app: FastAPI) -> None:
    """Accept HEAD wherever GET is accepted (RFC 9110, 9.1), since probes use it. The HTTP server omits the body."""
    for route in app.routes:
        if isinstance(route, APIRoute) and route.methods and "GET" in route.methods:
            route.methods.add("HEAD")


def _add_error_handlers(app: FastAPI) -> None:
    async def request_error(request: Request, e: Exception) -> Response:
        assert isinstance(e, RequestError)
        return error_response(request.url.path, e.named(request.scope.get(NAMES, {})))

    async def http_error(request: Request, e: Exception) -> Response:
        assert isinstance(e, HTTPException)
        path = request.url.path
        message = unknown_path(path, paths) if e.status_code == 404 else e.detail
        return error_response(path, RequestError(message, status=e.status_code), e.headers)

    async def client_gone(_: Request, e: Exception) -> Response:
        return Response(status_code=499)  # nginx's code for a closed connection; no client reads it

    async def internal_error(request: Request, e: Exception) -> Response:
        return error_response(request.url.path, RequestError("internal error; see the server's log", status=500))

    paths = [route.path for route in app.routes if isinstance(route, APIRoute)]
    app.add_exception_handler(RequestError, request_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientDisconnect, client_gone)
    app.add_exception_handler(Exception, internal_error)


def _add_openai_routes(app: FastAPI, args: ServerArgs, model: ServedModel) -> None:
    async def respond(
        request: Request,
        body: ChatCompletionRequest | CompletionRequest,
        messages: list[TokenizeMsg],
        new_parser: Callable[[], OutputParser] | None = None,
    ) -> Response:
        n = num_choices(body, args.max_choices)
        renderer = OpenAIRenderer(
            model.name,
            isinstance(body, ChatCompletionRequest),
            body.stream_options or StreamOptions(),
            new_parser,
            n=n,
            # The header is for clients that cannot add fields to the body.
            with_timing=bool(body.return_timing) or request.headers.get("x-minisgl-timing") == "1",
            with_logprobs=messages[0].sampling_params.logprobs is not None,
            with_usage=args.stream_usage,
            prompt_ids=[await app.state.frontend.prompt_ids(m) for m in messages] if body.return_token_ids else None,
        )
        messages = with_choices(messages, n)
        return response_to(app.state.frontend, messages, renderer, body.stream, n)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await read_request(request, ChatCompletionRequest, args, model.name)
        message, new_parser = prepared(request, body, args, model)
        return await respond(request, body, [message], new_parser)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read_request(request, CompletionRequest, args, model.name)
        return await respond(request, body, completion_messages(body, model.defaults, model.limits))
