"""The request log (`--log-requests`): a line without texts for each request, when its response has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.api.frontend import Submission
from minisgl.api.gate import OPEN_PATHS
from minisgl.api.http import REQUEST_ID, SUBMISSION
from minisgl.api.responses import usage_of

logger = logging.getLogger(__name__)

# Not logged: paths that probes and the page request every few seconds.
QUIET: Final = OPEN_PATHS | {"/metrics", "/health_generate", "/engine_view"}
MAX_PATH: Final = 100
CLIENT_GONE: Final = 499  # nginx's code


Sink = Callable[[Scope, dict[str, Any], float], None]  # (scope, fields, start time)


class RequestEnds:
    """Middleware that calls each sink when a request has ended. It surrounds all others, to include refusals."""

    def __init__(self, app: ASGIApp, root_path: str, sinks: Sequence[Sink]) -> None:
        self._app = app
        self._root_path = root_path
        self._sinks = sinks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].removeprefix(self._root_path) in QUIET:
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        status = CLIENT_GONE  # if there is no response

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        except Exception:
            status = 500  # the outer error handler makes the response
            raise
        finally:
            fields = request_fields(scope, status, time.monotonic() - started)
            for sink in self._sinks:
                sink(scope, fields, started)


def write_line(scope: Scope, fields: dict[str, Any], started: float) -> None:
    """Log a request: the sink of `--log-requests`."""
    logger.info(log_line(fields), extra={"fields": fields})


def request_fields(scope: Scope, status: int, seconds: float) -> dict[str, Any]:
    """Return the fields of a log line; for a generation also tokens, times in milliseconds, and how it ended."""
    fields: dict[str, Any] = {
        "request_id": scope.get(REQUEST_ID, ""),
        "method": scope["method"],
        "path": quote(scope["path"][:MAX_PATH]),
        "status": status,
    }
    submission: Submission | None = scope.get(SUBMISSION)
    if submission is not None:
        replies = submission.last_replies
        usage = usage_of(replies, submission.n)
        timing = submission.timeline.timing(usage)
        fields |= {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": timing.cached_tokens,
            "output_tokens": usage.completion_tokens,
            "queue_ms": timing.queue_ms,
            "ttft_ms": timing.ttft_ms,
            "finish_reason": ",".join(dict.fromkeys(r.finish_reason or "abort" for r in replies)),
        }
    return fields | {"total_ms": round(1e3 * seconds, 3)}


def log_line(fields: dict[str, Any]) -> str:
    """Return the fields as text: method, path and status, then name=value."""
    names = ("method", "path", "status")
    rest = (f"{name}={value}" for name, value in fields.items() if name not in names and value is not None)
    return " ".join([*(str(fields[name]) for name in names), *rest])
