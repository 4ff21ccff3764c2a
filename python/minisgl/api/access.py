"""Who may come in: the API key, and the request id that goes back with the answer."""

from __future__ import annotations

import hmac
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.api.render import error_body, json_response

MAX_REQUEST_ID: Final = 128
# Paths that need no key: a probe that says "alive" or not, and the page, a static file without a secret. A browser
# cannot send a key with the address that somebody types, so the page asks for it and sends it with its requests.
OPEN_PATHS: Final = frozenset({"/health", "/"})
# In the scope: `send` as it is before the framework wraps it, several layers deep, for whoever sends a lot.
RAW_SEND: Final = "minisgl.send"


class Gate:
    """Lets a request in: the key, and the `x-request-id` that goes back with the answer."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._expected = None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if request_id and len(request_id) <= MAX_REQUEST_ID and request_id.isprintable() and request_id.isascii():
            send = self._with_id(send, request_id)
        if self._expected is not None and scope["path"] not in OPEN_PATHS:
            given = headers.get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self._expected):
                body = error_body("a valid key is needed: `Authorization: Bearer KEY`", 401, code="invalid_api_key")
                await json_response(body, 401, {"www-authenticate": "Bearer"})(scope, receive, send)
                return
        scope[RAW_SEND] = send
        await self._app(scope, receive, send)

    @staticmethod
    def _with_id(send: Send, request_id: str) -> Send:
        async def wrapped(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        return wrapped
