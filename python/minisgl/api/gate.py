"""Access control: the API key, the host names of this server, and the web pages that may use it."""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.api.http import HEADERS, LEVEL, RAW_SEND, REQUEST_ID, error_response
from minisgl.core.errors import RequestError
from minisgl.settings.options import ServerArgs, is_loopback, split_list

MAX_REQUEST_ID: Final = 128
# Paths that need no key: the probes and the page, which is static and has no secrets. A browser sends no key with an
# address that a user types, so the page asks for the key and sends it with its requests.
OPEN_PATHS: Final = frozenset({"/health", "/ready", "/", "/docs"})
ANY: Final = "*"
SLASHES: Final = re.compile("//+")


@dataclass(frozen=True)
class Access:
    """The conditions for a request to be allowed.

    hosts    accepted values of the Host header, without ports; `ANY` for all. This stops DNS rebinding, where a web
             page's own name resolves to this machine
    origins  web pages of other hosts that may use the server, such as https://example.com; `ANY` for all
    """

    api_keys: Mapping[bytes, int] | None  # with the class of each
    hosts: frozenset[str]
    origins: frozenset[str]
    open_paths: frozenset[str] = OPEN_PATHS
    root_path: str = ""  # a prefix that a proxy may leave in paths

    @classmethod
    def of(cls, args: ServerArgs) -> Access:
        """Return the access that the options ask for.

        Without `--allowed-hosts`, a server on a loopback address accepts only the names of this machine.
        """
        hosts = _names(args.allowed_hosts)
        if not hosts:  # web pages cannot reach a unix socket, and the proxy in front of it checks names
            is_local = args.uds is None and is_loopback(args.host)
            hosts = {"localhost", "127.0.0.1", "[::1]", args.host} if is_local else {ANY}
        paths = OPEN_PATHS | {"/metrics"} if args.open_metrics else OPEN_PATHS
        keys = args.load_keys()
        encoded = None if keys is None else {key.encode(): level for key, level in keys.items()}
        return cls(
            encoded, frozenset(hosts), frozenset(_names(args.allowed_origins)), paths, args.root_path.rstrip("/")
        )

    def served_path(self, path: str) -> str:
        """Return `path` without empty segments, as a base URL that ends in a slash makes them."""
        path = SLASHES.sub("/", path)
        return path if path.removeprefix(self.root_path) == "/" else path.rstrip("/")

    def refusal(self, path: str, headers: Headers) -> RequestError | None:
        """Return why a request is not allowed; None if it is."""
        host, origin = headers.get("host", "").lower(), headers.get("origin", "").lower()
        if ANY not in self.hosts and host and _without_port(host) not in self.hosts:
            message = f"host {host[:100]!r} is not served here; see --allowed-hosts"
            return RequestError(message, code="host_not_allowed", status=403)
        is_foreign = bool(origin) and origin.partition("://")[2] != host
        if is_foreign and not self.origins & {ANY, origin}:
            message = f"pages of {origin[:100]!r} may not use this server; see --allowed-origins"
            return RequestError(message, code="origin_not_allowed", status=403)
        if path.removeprefix(self.root_path) in self.open_paths or self.level(headers) is not None:
            return None
        message = "a valid key is needed: `Authorization: Bearer KEY` or `x-api-key: KEY`"
        return RequestError(message, code="invalid_api_key", status=401)

    def level(self, headers: Headers) -> int | None:
        """Return the class of the client, 0 for the most urgent; None without a valid key."""
        if self.api_keys is None:
            return 0
        scheme, _, given = headers.get("authorization", "").partition(" ")
        sent = [headers.get("x-api-key", ""), given.strip() if scheme.lower() == "bearer" else ""]
        # Compare with all keys, in constant time.
        same = {key: sum(hmac.compare_digest(one.encode("latin-1"), key) for one in sent) for key in self.api_keys}
        return next((level for key, level in self.api_keys.items() if same[key]), None)


def _names(text: str | None) -> set[str]:
    return {name.lower() for name in split_list(text)}


def _without_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return (name if colon and (port.isdigit() or not port) else host).removesuffix(".")


class Gate:
    """Middleware that passes allowed requests on, and sets `x-request-id` to the client's id or a new one."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scope["path"] = self._access.served_path(scope["path"])
        scope["root_path"] = self._access.root_path or scope["root_path"]
        name = headers.get("x-request-id", "")
        if not (0 < len(name) <= MAX_REQUEST_ID and name.isprintable() and name.isascii()):
            name = uuid.uuid4().hex
        scope[REQUEST_ID] = name
        extra = [(b"x-request-id", name.encode())]

        async def send_with_extra(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        scope[HEADERS], scope[RAW_SEND], scope[LEVEL] = extra, send, self._access.level(headers) or 0
        error = self._access.refusal(scope["path"], headers)
        app = self._app if error is None else error_response(scope["path"], error)
        await app(scope, receive, send_with_extra)
