"""Loads and unloads adapters (LoRA) while the server runs, in vLLM's shape and in SGLang's.

A request that has chosen an adapter keeps it, whatever happens to the name.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Annotated, Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from minisgl.api import protocol as p
from minisgl.api.http import ANY_MODEL, json_response
from minisgl.api.operations import try_token
from minisgl.api.requests import ServedAdapter
from minisgl.api.routes import Routes
from minisgl.checkpoint.adapter import allowed_folder, make_adapter
from minisgl.core.errors import ConfigError, RequestError
from minisgl.settings.options import split_list

logger = logging.getLogger(__name__)

TRIAL_S: Final = 120.0
_FIXED: Final = "this server has the adapters of --lora only; start it with --lora-dynamic FOLDER to load others"


def add_adapter_routes(routes: Routes) -> None:
    """Add POST /v1/load_lora_adapter and /v1/unload_lora_adapter, and SGLang's paths without /v1."""
    model, root = routes.model, routes.args.scheduler.engine.lora_dynamic
    bases = (model.name, *ANY_MODEL, *split_list(routes.args.served_model_name))
    loading = asyncio.Lock()

    def changed(request: Request, name: str, done: str) -> Response:
        """Report a change that was made, in the shape of the path."""
        logger.info("adapter %r %s", name, done)
        if "/v1/" in request.url.path:
            return PlainTextResponse(f"Success: LoRA adapter '{name}' {done} successfully.")
        folders = {other: served.adapter.folder for other, served in model.adapters.items()}
        return json_response(p.AdaptersResponse(success=True, loaded_adapters=folders))

    @routes.add("POST /v1/load_lora_adapter", "/load_lora_adapter")
    async def load_adapter(
        request: Request, body: p.LoadAdapterRequest
    ) -> Annotated[Response, p.AdaptersResponse, "text/plain"]:
        """Load an adapter, with which the engine must compute a token"""
        if root is None:
            raise RequestError(_FIXED, code="adapters_are_fixed", status=403)
        name = body.lora_name
        if name in bases:
            raise RequestError(f"lora_name {name!r} is the base's", param="lora_name")
        async with loading:
            if name in model.adapters and not body.load_inplace:
                error = f"the adapter {name!r} is loaded already; load_inplace: true replaces it"
                raise RequestError(error, param="lora_name")
            try:
                adapter = await asyncio.to_thread(make_adapter, name, allowed_folder(root, body.lora_path))
                await try_token(request.app.state.frontend, TRIAL_S, adapter)
            except (ConfigError, RequestError) as e:
                if isinstance(e, RequestError) and e.status in (429, 503):
                    raise
                error = f"the adapter {name[:100]!r} is not loaded: {e}"
                raise RequestError(error, param="lora_path", code="invalid_adapter") from e
            model.adapters.setdefault(name, ServedAdapter(adapter, int(time.time()))).adapter = adapter
        return changed(request, name, "added")

    @routes.add("POST /v1/unload_lora_adapter", "/unload_lora_adapter")
    async def unload_adapter(
        request: Request, body: p.UnloadAdapterRequest
    ) -> Annotated[Response, p.AdaptersResponse, "text/plain"]:
        """Serve an adapter no more; requests that have chosen it go on"""
        if root is None:
            raise RequestError(_FIXED, code="adapters_are_fixed", status=403)
        if model.adapters.pop(body.lora_name, None) is None:
            error = f"there is no adapter {body.lora_name[:100]!r}"
            raise RequestError(error, param="lora_name", code="model_not_found", status=404)
        return changed(request, body.lora_name, "removed")
