"""`/engine_view`: the live view of the page and of the terminal chat. Nothing is computed while nobody asks."""

from __future__ import annotations

import asyncio
import time
from typing import Final

from fastapi import FastAPI, Response

from minisgl.api.frontend import FrontendManager
from minisgl.api.render import json_response
from minisgl.message import EngineView

FRESH_S: Final = 0.25  # however many look, the scheduler is asked no more often


class EngineWatch:
    """Asks the engine for a view, once for all who want one at the same time."""

    def __init__(self) -> None:
        self._asking = asyncio.Lock()
        self._view: EngineView | None = None
        self._taken = 0.0

    async def look(self, frontend: FrontendManager) -> EngineView:
        """A view at most `FRESH_S` old; raises `RequestError` (503) when the engine does not answer."""
        async with self._asking:
            if self._view is None or time.monotonic() - self._taken > FRESH_S:
                self._view = await frontend.engine_view()
                self._taken = time.monotonic()
            return self._view


def add_view_route(app: FastAPI) -> None:
    """GET /engine_view: batch, pages and radix tree, with the beginnings of prompts in it; and the last heartbeat."""
    watch = EngineWatch()

    @app.get("/engine_view")
    async def engine_view() -> Response:
        frontend: FrontendManager = app.state.frontend
        view = await watch.look(frontend)
        return json_response({"view": view, "stats": frontend.stats})
