"""Routes that generate nothing: health, information, models, metrics, the engine view, the cache, and tokenization."""

from __future__ import annotations

import asyncio
import gzip
import os
import time
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

import minisgl
from minisgl.api import protocol as p
from minisgl.api.chat import shared_fields, with_functions
from minisgl.api.fields import unread_kwargs
from minisgl.api.frontend import FrontendManager
from minisgl.api.http import json_response, report_ignored, require_json
from minisgl.api.requests import SamplingDefaults, chat_message, packed_ids
from minisgl.api.routes import Routes
from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.core.errors import RequestError
from minisgl.core.message import DecodeMsg, EncodeMsg, EngineView, TokenizeMsg, ids_from_bytes, ids_to_bytes
from minisgl.core.params import Adapter, Limits, SamplingParams
from minisgl.settings.options import split_list

PROBE_TIMEOUT_S: Final = 20.0
VIEW_AGE_S: Final = 0.25  # the least time between two requests for a view, however many clients watch


async def try_token(frontend: FrontendManager, seconds: float, adapter: Adapter | None = None) -> None:
    """Send one token through every process, computed with `adapter`. Raises `RequestError` if none comes back."""
    embeds = frontend.limits.embeds
    params = SamplingParams(
        max_tokens=0 if embeds else 1, temperature=0.0, ignore_eos=True, embed=embeds, adapter=adapter
    )
    message = TokenizeMsg(uid=0, sampling_params=params, input_ids=ids_to_bytes([0]))
    try:
        async with asyncio.timeout(seconds), frontend.submit([message]) as submission:
            while not submission.is_done:
                for _, reply in await submission.next_replies():
                    if reply.failure is not None:
                        raise reply.failure.error()
    except TimeoutError:
        raise RequestError(f"no token within {seconds:g} s", status=503) from None


def _status(problem: str = "") -> Response:
    """Return 200 without a `problem`, 503 with one."""
    if problem:
        return json_response(p.StatusResponse("unhealthy", problem), 503)
    return json_response(p.StatusResponse("ok"))


def add_status_routes(routes: Routes) -> None:
    """Add the routes for liveness, readiness, metrics, version, and flushing the cache."""

    @routes.add("GET /health")
    async def health(request: Request) -> Annotated[Response, p.StatusResponse]:
        """Whether all processes are alive"""
        return _status(request.app.state.frontend.health_problem)

    @routes.add("GET /health_generate")
    async def health_generate(request: Request) -> Annotated[Response, p.StatusResponse]:
        """One token through every process"""
        try:
            await try_token(request.app.state.frontend, PROBE_TIMEOUT_S)
        except RequestError as e:
            return _status(e.message)
        return _status()

    @routes.add("GET /ready")
    async def ready(request: Request) -> p.StatusResponse:
        """Whether requests are accepted"""
        request.app.state.frontend.require_ready()
        return p.StatusResponse("ready")

    @routes.add("GET /metrics")
    async def metrics(request: Request) -> Annotated[Response, None, "text/plain"]:
        """Prometheus metrics"""
        body, media = request.app.state.frontend.render_metrics(request.headers.get("accept", ""))
        headers = {"content-type": media, "vary": "accept, accept-encoding"}
        if "gzip" in map(str.strip, request.headers.get("accept-encoding", "").split(",")):  # and not gzip;q=0
            body = gzip.compress(body, 5)
            headers["content-encoding"] = "gzip"
        return Response(body, headers=headers)

    @routes.add("POST /flush_cache", "/reset_prefix_cache")
    async def flush_cache(request: Request) -> p.StatusResponse:
        """Drop all cached prefixes that no request uses"""
        require_json(request)
        await request.app.state.frontend.flush_cache()
        return p.StatusResponse("ok")

    @routes.add("GET /version")
    async def version(_: Request) -> p.VersionResponse:
        """Version of the server"""
        return p.VersionResponse(minisgl.__version__)


def add_information_routes(routes: Routes) -> None:
    """Add the routes that describe the server, and the model under OpenAI's and SGLang's paths."""
    args, model = routes.args, routes.model
    limits = model.limits
    bases, created = split_list(args.served_model_name) or [model.name], int(time.time())

    def cards() -> dict[str, p.ModelCard]:
        """Return the card of each model by its name in a path; an adapter's is as in vLLM."""
        card = partial(p.ModelCard, owned_by="minisgl", max_model_len=limits.max_model_len)
        found = [card(id=name, created=created, root=model.name) for name in bases]
        for name, served in model.adapters.items():
            found.append(card(id=name, created=served.created, root=served.adapter.folder, parent=model.name))
        return {one.id.strip("/"): one for one in found}

    path = args.scheduler.engine.model or str(BUILTIN_MODEL)
    # The names that sglang-router reads.
    names = {"served_model_name": model.name, "model_path": path, "tokenizer_path": path}

    @routes.add("GET /v1/models")
    async def list_models(_: Request) -> p.ModelListResponse:
        """The served model and its adapters"""
        return p.ModelListResponse([*cards().values()])

    @routes.add("GET /v1/models/{name:path}")
    async def get_model(request: Request) -> p.ModelCard:
        """One model"""
        name = request.path_params["name"]
        if (card := cards().get(name)) is None:
            raise RequestError(f"model {name[:100]!r} is not served here", code="model_not_found", status=404)
        return card

    @routes.add("GET /server_info", "/get_server_info")
    async def server_info(request: Request) -> dict[str, Any]:
        """Settings and figures"""
        frontend: FrontendManager = request.app.state.frontend
        stats = msgspec.structs.asdict(frontend.stats)
        stats["life"] = stats.pop("incarnation")  # as in the other paths
        return {
            "version": minisgl.__version__,
            "model": model.name,
            **names,
            "max_model_len": limits.max_model_len,
            "engine": model.facts,
            "adapters": {name: served.adapter.folder for name, served in model.adapters.items()},
            "processes": model.pids() | {"minisgl-api": os.getpid()},
            "num_tokenizer": args.num_tokenizer,
            "stats": stats,
            "replicas": frontend.dispatcher.describe(),
            "frontend_entries": frontend.entries,
            "detokenizer_entries": frontend.detokenizer_entries,
        }

    @routes.add("GET /model_info", "/get_model_info")
    async def model_info(_: Request) -> p.ModelInfoResponse:
        """The model"""
        return p.ModelInfoResponse(
            model=model.name,
            **names,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            is_generation=model.embedder is None,
            default_sampling_params=asdict(model.defaults),
        )


class EngineWatch:
    """Asks schedulers for views of the engine, once for all clients that ask at the same time."""

    def __init__(self) -> None:
        self._asking = asyncio.Lock()
        self._views: dict[int, tuple[float, EngineView]] = {}  # by replica: the time of the view, and the view

    async def view(self, frontend: FrontendManager, replica: int) -> EngineView:
        """Return a view that is at most `VIEW_AGE_S` old. Raises `RequestError` (503, 404) without a reply."""
        async with self._asking:
            taken, view = self._views.get(replica, (0.0, None))
            if view is None or time.monotonic() - taken > VIEW_AGE_S:
                view = await frontend.engine_view(replica)
                self._views[replica] = time.monotonic(), view
            return view


def add_view_route(routes: Routes) -> None:
    """Add GET /engine_view: batch, pages, tiers and radix tree of a replica, and the last heartbeats of all replicas.

    The engine works for it only when a client asks.
    """
    watch = EngineWatch()

    @routes.add("GET /engine_view")
    async def engine_view(request: Request) -> p.EngineViewResponse:
        """Batch, pages, radix tree and last steps"""
        frontend: FrontendManager = request.app.state.frontend
        replicas = frontend.dispatcher.describe()
        given = request.query_params.get("replica")
        if given is None:  # the first one that answers
            best = sorted(replicas, key=lambda r: r.state == "silent")
            replica = best[0].replica if best else 0
        elif given.isdecimal():
            replica = int(given[:9])
        else:
            raise RequestError("replica must be a number", param="replica")
        return p.EngineViewResponse(
            replica=replica,
            view=await watch.view(frontend, replica),
            stats=frontend.stats,
            replicas=frontend.dispatcher.describe(),
            starting=sorted(frontend.dispatcher.starting),
        )


def encode_message(request: p.TokenizeRequest, limits: Limits) -> EncodeMsg:
    """Return the message to a tokenizer, without a uid. Raises `RequestError` for an invalid request."""
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give exactly one of prompt and messages", param="prompt")
    if request.messages is None:
        prompt = TokenizeMsg(uid=0, sampling_params=SamplingParams(), text=request.prompt)
    else:
        chat, *_ = with_functions(p.ChatCompletionRequest(**shared_fields(request)))
        prompt = chat_message(chat, SamplingDefaults(), limits)
    return EncodeMsg(uid=0, prompt=prompt, add_special_tokens=request.add_special_tokens)


def add_tokenizer_routes(routes: Routes) -> None:
    """Add POST /tokenize and /detokenize. Both ask a tokenizer process, since this process has no tokenizer."""
    model, refuses = routes.model, routes.args.unknown_fields == "refuse"

    @routes.add("POST /tokenize")
    async def tokenize(request: Request, body: p.TokenizeRequest) -> p.TokenizeResponse:
        """Text to tokens"""
        report_ignored(request, unread_kwargs(body.chat_template_kwargs, model.template_variables, refuses))
        reply = await request.app.state.frontend.convert(encode_message(body, model.limits))
        tokens = ids_from_bytes(reply.input_ids).tolist()
        return p.TokenizeResponse(tokens, len(tokens), model.limits.max_model_len)

    @routes.add("POST /detokenize")
    async def detokenize(request: Request, body: p.DetokenizeRequest) -> p.DetokenizeResponse:
        """Tokens to text"""
        ids = packed_ids(body.tokens, "tokens", model.limits)
        msg = DecodeMsg(uid=0, input_ids=ids, skip_special_tokens=bool(body.skip_special_tokens))
        reply = await request.app.state.frontend.convert(msg)
        return p.DetokenizeResponse(reply.text)
