"""Runs the application under uvicorn, and ends it in order: what runs may finish, what cannot is told why."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Generator
from typing import Any, Final

import httptools
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from minisgl.api.frontend import FrontendManager
from minisgl.errors import StartupError

MAX_HEAD_BYTES: Final = 64 * 1024
LAST_WORDS_S: Final = 1.0  # for error events to reach their clients before the connections are closed


class BoundedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP parser, which by itself takes a request line and headers of any length."""

    _head_bytes = 0
    _is_head = True

    def data_received(self, data: bytes) -> None:
        if self._is_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._is_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's headers are too large.")

    def on_message_begin(self) -> None:
        self._is_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEAD_BYTES:
            raise httptools.HttpParserError("headers too large")
        self._is_head, self._head_bytes = False, 0
        super().on_headers_complete()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leave the signals to the `Supervisor`, which drains before it stops."""
        yield


class Service:
    """The HTTP server. The `Supervisor` decides when it ends."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        config = uvicorn.Config(
            app,
            http=BoundedHttpProtocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
            timeout_keep_alive=30,
        )
        self._server = _Server(config)

    @property
    def frontend(self) -> FrontendManager:
        """The application's, once it runs."""
        frontend: FrontendManager = self._app.state.frontend
        return frontend

    @property
    def is_exiting(self) -> bool:
        return self._server.should_exit

    async def run(self, sock: socket.socket, on_ready: Callable[[], None]) -> None:
        """Serve until `exit`; `on_ready` is called when requests are taken."""
        serving = asyncio.create_task(self._server.serve(sockets=[sock]))
        while not self._server.started:
            if serving.done():
                raise StartupError(f"the HTTP server could not start: {serving.exception()}")
            await asyncio.sleep(0.005)
        on_ready()
        await serving

    async def drain(self, timeout: float) -> None:
        """Take no new work; wait up to `timeout` seconds for open requests and end the remaining ones with an error."""
        await self.frontend.drain(timeout)
        await self.frontend.wait_idle(LAST_WORDS_S)

    async def fail(self, cause: str) -> None:
        """End every open request with the error `cause`."""
        self.frontend.fail(cause)
        await asyncio.sleep(LAST_WORDS_S)  # for the error events, and for /health to show the cause to a probe

    def exit(self) -> None:
        self._server.should_exit = True


def run_service(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` in this thread, on uvloop."""
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)
