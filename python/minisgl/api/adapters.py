"""Loads and unloads adapters (LoRA) while the server runs, in vLLM's shape and in SGLang's.

A request that has chosen an adapter keeps it, whatever happens to the name.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Annotated, Final

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from minisgl.api import protocol as p
from minisgl.api.http import ANY_MODEL, json_response
from minisgl.api.operations import try_token
from minisgl.api.requests import ServedAdapter
from minisgl.api.routes import Routes
from minisgl.checkpoint.adapter import make_adapter
from minisgl.core.errors import ConfigError, RequestError
from minisgl.core.params import Adapter
from minisgl.settings.options import split_list

logger = logging.getLogger(__name__)

TRIAL_S: Final = 120.0
MAX_NAME: Final = 128
_OFF: Final = "the adapters of this server are those of --lora; start it with --lora-dynamic FOLDER to change them"


def adapter_below(root: Path, name: str, path: str) -> Adapter:
    """Return the adapter `name` in the folder `path`, which is absolute or relative to `root`.

    Raises `RequestError` unless the folder exists (404) and all its files are below `root`, also if they are links.
    """
    top = Path(os.path.realpath(root))
    try:
        folder = top if "\0" in path else Path(os.path.realpath(root / path))
        if folder == top or not folder.is_relative_to(top):
            raise RequestError("lora_path is not a folder below the one of --lora-dynamic", param="lora_path")
        if not folder.is_dir():
            raise RequestError(f"lora_path {path[:100]!r} is not a folder", param="lora_path", status=404)
        for file in folder.iterdir():
            if not Path(os.path.realpath(file)).is_relative_to(top):
                raise RequestError(f"lora_path: {file.name} is a link out of --lora-dynamic", param="lora_path")
        return make_adapter(name, folder)
    except (ConfigError, OSError) as e:
        raise RequestError(str(e), param="lora_path", code="invalid_adapter") from None


def add_adapter_routes(routes: Routes) -> None:
    """Add POST /v1/load_lora_adapter and /v1/unload_lora_adapter, and SGLang's routes without /v1."""
    model, folder = routes.model, routes.args.scheduler.engine.lora_dynamic
    bases = (model.name, *ANY_MODEL, *split_list(routes.args.served_model_name))
    loading = asyncio.Lock()

    def require_dynamic() -> Path:
        if folder is None:
            raise RequestError(_OFF, code="adapters_are_fixed", status=403)
        return Path(folder).expanduser()

    async def load(request: Request, body: p.LoadAdapterRequest) -> None:
        """Serve an adapter with which the engine has computed a token. Raises `RequestError`."""
        root, name = require_dynamic(), body.lora_name
        if not 0 < len(name) <= MAX_NAME or not name.isprintable() or name in bases:
            raise RequestError(f"lora_name {name[:100]!r} is the base's, or not a name", param="lora_name")
        async with loading:
            if name in model.adapters and not body.load_inplace:
                error = f"the adapter {name!r} is loaded already; load_inplace: true replaces it"
                raise RequestError(error, param="lora_name")
            adapter = await asyncio.to_thread(adapter_below, root, name, body.lora_path)
            try:
                await try_token(request.app.state.frontend, TRIAL_S, adapter)
            except RequestError as e:
                if e.status == 503:
                    raise
                message = f"the adapter {name!r} cannot be served: {e.message}"
                raise RequestError(message, param="lora_path", code="invalid_adapter") from e
            served = model.adapters.setdefault(name, ServedAdapter(adapter, int(time.time())))
            served.adapter = adapter
        logger.info("adapter %r is loaded from %s", name, adapter.folder)

    async def unload(body: p.UnloadAdapterRequest) -> None:
        """Serve an adapter no more; requests that have chosen it go on. Raises `RequestError` (404)."""
        require_dynamic()
        if model.adapters.pop(body.lora_name, None) is None:
            message = f"there is no adapter {body.lora_name[:100]!r}"
            raise RequestError(message, param="lora_name", code="model_not_found", status=404)
        logger.info("adapter %r is unloaded", body.lora_name)

    async def in_other_shape(change: Awaitable[None]) -> Response:
        """Make a change, and answer as SGLang does."""
        error = None
        try:
            await change
        except RequestError as e:
            error = e
        folders = {name: served.adapter.folder for name, served in model.adapters.items()}
        message = None if error is None else error.message
        body = p.AdaptersResponse(success=error is None, error_message=message, loaded_adapters=folders)
        return json_response(body, 200 if error is None else error.status)

    @routes.add("POST /v1/load_lora_adapter")
    async def load_adapter(request: Request, body: p.LoadAdapterRequest) -> Annotated[Response, None, "text/plain"]:
        """Load an adapter"""
        await load(request, body)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @routes.add("POST /v1/unload_lora_adapter")
    async def unload_adapter(_: Request, body: p.UnloadAdapterRequest) -> Annotated[Response, None, "text/plain"]:
        """Unload an adapter"""
        await unload(body)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    @routes.add("POST /load_lora_adapter")
    async def sglang_load(request: Request, body: p.LoadAdapterRequest) -> Annotated[Response, p.AdaptersResponse]:
        """Load an adapter, in SGLang's shape"""
        return await in_other_shape(load(request, body))

    @routes.add("POST /unload_lora_adapter")
    async def sglang_unload(_: Request, body: p.UnloadAdapterRequest) -> Annotated[Response, p.AdaptersResponse]:
        """Unload an adapter, in SGLang's shape"""
        return await in_other_shape(unload(body))
