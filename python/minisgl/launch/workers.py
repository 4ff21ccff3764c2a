"""`--api-workers N`: N - 1 further processes that serve HTTP on the main process's listening socket.

Whichever of them is free takes the next connection. Each is a whole API server with an inbox of its own. The main
process tells them when to end; their part of the metrics they tell each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

from minisgl.api.api_server import create_app
from minisgl.api.frontend import worker_name
from minisgl.api.served import ServedModel
from minisgl.launch.http_server import Service, run_service
from minisgl.message import StopMsg
from minisgl.process.child import Ready
from minisgl.process.processes import Child, Processes
from minisgl.settings.args import ServerArgs


@contextlib.contextmanager
def running_workers(args: ServerArgs, model: ServedModel, sock: socket.socket) -> Iterator[Processes]:
    """The API processes besides this one, ready; none is left afterwards."""
    workers = Processes(
        [
            Child(worker_name(i), _run_worker, (args, model, i, sock), {}, leaves_when_told=True)
            for i in range(1, args.api_workers)
        ]
    )
    try:
        workers.start(args.ready_timeout)
        yield workers
    finally:
        workers.stop()


def _run_worker(args: ServerArgs, model: ServedModel, worker: int, sock: socket.socket, ready: Ready) -> None:
    """The whole life of one of them."""
    service = Service(create_app(args, model, worker))
    stopping: list[asyncio.Task[None]] = []

    async def end(msg: StopMsg) -> None:
        await service.drain(msg)
        service.exit()

    def stop(msg: StopMsg) -> None:
        for task in stopping:
            task.cancel()
        stopping.append(asyncio.create_task(end(msg)))

    def on_ready() -> None:
        service.frontend.on_stop = stop
        ready({})

    run_service(service.run(sock, on_ready))
