"""`/health_generate`: one token through every process, for whoever wants to know that the engine computes."""

from __future__ import annotations

import asyncio
from typing import Final

from fastapi import FastAPI, Response

from minisgl.message import TokenizeMsg, ids_to_bytes
from minisgl.params import SamplingParams
from minisgl.server.frontend import FrontendManager
from minisgl.server.render import json_response
from minisgl.utils.errors import RequestError

PROBE_TIMEOUT_S: Final = 20.0


async def probe(frontend: FrontendManager, timeout: float = PROBE_TIMEOUT_S) -> str:
    """Why no token came; empty when one did."""
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


def add_probe_route(app: FastAPI) -> None:
    """GET /health_generate: 200, or 503 with the cause."""

    @app.get("/health_generate")
    async def health_generate() -> Response:
        problem = await probe(app.state.frontend)
        if problem:
            return json_response({"status": "unhealthy", "cause": problem}, 503)
        return json_response({"status": "ok"})
