"""The HTTP application: routes, access, errors.

What a request means is in `prepare`, how an answer looks in `render`, how it is sent in `answer`. What operators ask is
in `operations`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

import minisgl
from minisgl.api.access import Gate
from minisgl.api.answer import BodyResponse, StreamResponse
from minisgl.api.body import read_request, require_model, wants_timing
from minisgl.api.choices import num_choices, with_choices
from minisgl.api.convert import add_convert_routes
from minisgl.api.embeddings import add_embeddings_route
from minisgl.api.frontend import RETRY_AFTER_S, FrontendManager
from minisgl.api.generate import GenerateRenderer, LogprobForm, generation_ids
from minisgl.api.metrics import Metrics
from minisgl.api.openapi import openapi_schema
from minisgl.api.operations import add_operation_routes
from minisgl.api.parsers.output import OutputParser
from minisgl.api.prepare import chat_messages, completion_messages, generate_messages, is_batch
from minisgl.api.protocol import ChatCompletionRequest, CompletionRequest, GenerateRequest, GenerateSampling
from minisgl.api.render import OpenAIRenderer, Renderer, error_body, json_response
from minisgl.api.served import ServedModel
from minisgl.api.ui import add_page
from minisgl.api.view import add_view_route
from minisgl.errors import RequestError
from minisgl.message import TokenizeMsg
from minisgl.settings.options import ServerArgs


def create_app(args: ServerArgs, model: ServedModel) -> FastAPI:
    """The application; its lifespan owns the `FrontendManager`, at `app.state.frontend`."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        frontend = FrontendManager(args, model.limits, Metrics(model.name))
        app.state.frontend = frontend
        try:
            yield
        finally:
            await frontend.close()

    app = FastAPI(title="minisgl", version=minisgl.__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.add_middleware(Gate, api_key=args.api_key)
    _add_error_handlers(app)
    _add_generation_routes(app, args, model)
    _add_model_routes(app, model)
    add_operation_routes(app, args, model)
    add_convert_routes(app, args, model)
    add_embeddings_route(app, args, model)
    if args.ui:
        add_page(app)
        add_view_route(app)
    document = openapi_schema(app)
    app.openapi = lambda: document  # type: ignore[method-assign]
    _answer_head(app)
    return app


def _answer_head(app: FastAPI) -> None:
    """HEAD wherever there is GET (RFC 9110, 9.1): probes ask so. The HTTP server leaves the body out."""
    for route in app.routes:
        if isinstance(route, APIRoute) and route.methods and "GET" in route.methods:
            route.methods.add("HEAD")


def _add_error_handlers(app: FastAPI) -> None:
    async def request_error(_: Request, e: Exception) -> Response:
        assert isinstance(e, RequestError)
        headers = {"retry-after": str(RETRY_AFTER_S)} if e.status in (429, 503) else None
        return json_response(error_body(e.message, e.status, e.param, e.code), e.status, headers)

    async def http_error(_: Request, e: Exception) -> Response:
        assert isinstance(e, HTTPException)
        return json_response(error_body(e.detail, e.status_code), e.status_code, dict(e.headers or {}))

    async def client_gone(_: Request, e: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    async def our_bug(_: Request, e: Exception) -> Response:
        return json_response(error_body("internal error; see the server's log", 500), 500)

    app.add_exception_handler(RequestError, request_error)
    app.add_exception_handler(HTTPException, http_error)
    app.add_exception_handler(ClientDisconnect, client_gone)
    app.add_exception_handler(Exception, our_bug)


def _add_generation_routes(app: FastAPI, args: ServerArgs, model: ServedModel) -> None:
    limits, defaults = model.limits, model.defaults

    def respond(messages: list[TokenizeMsg], renderer: Renderer, is_stream: bool | None, n: int) -> Response:
        if is_stream:
            return StreamResponse(app.state.frontend, messages, renderer, n, args.write_timeout)
        return BodyResponse(app.state.frontend, messages, renderer, n)

    def openai_response(
        request: Request,
        body: ChatCompletionRequest | CompletionRequest,
        messages: list[TokenizeMsg],
        new_parser: Callable[[], OutputParser] | None = None,
    ) -> Response:
        """The answer to as many choices as are asked for to each of `messages`."""
        n = num_choices(body)
        renderer = OpenAIRenderer(
            model.name,
            isinstance(body, ChatCompletionRequest),
            body.stream_options,
            new_parser,
            n=n,
            with_timing=wants_timing(request, body),
            with_logprobs=messages[0].sampling_params.logprobs is not None,
        )
        return respond(with_choices(messages, n), renderer, body.stream, n)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await read_request(request, ChatCompletionRequest, args.max_body)
        require_model(body.model, model.name)
        (message,) = chat_messages(body, defaults, limits)
        message, new_parser = model.forms.prepare(body, message)
        return openai_response(request, body, [message], new_parser)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read_request(request, CompletionRequest, args.max_body)
        require_model(body.model, model.name)
        return openai_response(request, body, completion_messages(body, defaults, limits))

    @app.post("/generate")
    async def generate(request: Request) -> Response:
        body = await read_request(request, GenerateRequest, args.max_body)
        n = num_choices(body.sampling_params or GenerateSampling())
        messages = with_choices(generate_messages(body, defaults, limits), n)
        prompt = next(p for p in (body.text, body.prompt, body.input_ids) if p is not None)
        is_list = is_batch(prompt) or n > 1
        renderer = GenerateRenderer(is_list, generation_ids(body.rid, len(messages), n, is_list), LogprobForm.of(body))
        return respond(messages, renderer, body.stream, n)


def _add_model_routes(app: FastAPI, model: ServedModel) -> None:
    card = {
        "id": model.name,
        "object": "model",
        "created": int(time.time()),
        "owned_by": "minisgl",
        "root": model.name,
        "max_model_len": model.limits.max_model_len,
    }

    @app.get("/v1/models")
    async def list_models() -> Response:
        return json_response({"object": "list", "data": [card]})

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        if name != model.name:
            raise RequestError(f"model {name[:100]!r} is not served here", code="model_not_found", status=404)
        return json_response(card)
