"""What operators and probes ask of the server: whether it works, what it is, what it has measured."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict
from typing import Final

import msgspec
from fastapi import FastAPI, Response

import minisgl
from minisgl.api.frontend import FrontendManager
from minisgl.api.render import json_response
from minisgl.api.served import ServedModel
from minisgl.errors import RequestError
from minisgl.message import TokenizeMsg, ids_to_bytes
from minisgl.params import SamplingParams
from minisgl.settings.options import ServerArgs

PROBE_TIMEOUT_S: Final = 20.0


async def probe(frontend: FrontendManager, timeout: float = PROBE_TIMEOUT_S) -> str:
    """One token through every process: why none came; empty when one did."""
    embeds = frontend.limits.embeds
    params = SamplingParams(max_tokens=0 if embeds else 1, temperature=0.0, ignore_eos=True, embed=embeds)
    message = TokenizeMsg(uid=0, sampling_params=params, input_ids=ids_to_bytes([0]))
    try:
        async with asyncio.timeout(timeout), await frontend.submit([message]) as call:
            while not call.is_done:
                for _, reply in await call.take():
                    if reply.failure is not None:
                        return reply.failure.message
    except RequestError as e:
        return e.message
    except TimeoutError:
        return f"no token within {timeout:g} s"
    return ""


def _verdict(problem: str) -> Response:
    """200 without a `problem`, else 503 with it."""
    if problem:
        return json_response({"status": "unhealthy", "cause": problem}, 503)
    return json_response({"status": "ok"})


def add_operation_routes(app: FastAPI, args: ServerArgs, model: ServedModel) -> None:
    """Is it alive, ready, computing; what is it, what has it measured; and forget the cache."""

    @app.get("/health")
    async def health() -> Response:
        return _verdict(app.state.frontend.health_problem)

    @app.get("/health_generate")
    async def health_generate() -> Response:
        return _verdict(await probe(app.state.frontend))

    @app.get("/ready")
    async def ready() -> Response:
        app.state.frontend.require_ready()
        return json_response({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(app.state.frontend.render_metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/server_info")
    @app.get("/get_server_info", include_in_schema=False)
    async def server_info() -> Response:
        frontend: FrontendManager = app.state.frontend
        info = {
            "version": minisgl.__version__,
            "model": model.name,
            "max_model_len": model.limits.max_model_len,
            "engine": model.facts,
            "processes": model.pids | {"minisgl-api": os.getpid()},
            "num_tokenizer": args.num_tokenizer,
            "stats": msgspec.structs.asdict(frontend.stats),
            "frontend_entries": frontend.entries,
            "detokenizer_entries": frontend.detokenizer_entries,
        }
        return json_response(info)

    @app.get("/model_info")
    @app.get("/get_model_info", include_in_schema=False)
    async def model_info() -> Response:
        info = {
            "model": model.name,
            "model_path": args.scheduler.engine.model or model.name,
            "max_model_len": model.limits.max_model_len,
            "vocab_size": model.limits.vocab_size,
            "is_generation": model.embedder is None,
            "default_sampling_params": asdict(model.defaults),
        }
        return json_response(info)

    @app.post("/flush_cache")
    @app.post("/reset_prefix_cache", include_in_schema=False)
    async def flush_cache() -> Response:
        await app.state.frontend.flush_cache()
        return json_response({"status": "ok"})

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": minisgl.__version__})
