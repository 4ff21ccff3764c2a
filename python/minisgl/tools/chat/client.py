"""A small client of the chat API, for the terminal chat and the examples. Needs only the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
import sys
import threading
from collections.abc import Generator, Iterator
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from minisgl.core.errors import ConfigError, MinisglError, StartupError

TIMEOUT_S: Final = 600.0
NOTICE_S: Final = 2.0  # of silence, after which a message says that the client waits


class ServerError(MinisglError):
    """The server refused the request, or ended its answer early. The message is the server's."""


class Delta(NamedTuple):
    """A piece of an answer, or of the reasoning before it."""

    text: str
    is_reasoning: bool = False


class ServerAddress(NamedTuple):
    """The address of a server. `authority` is the host and port as in the URL, `prefix` the path before /v1."""

    host: str
    port: int
    is_tls: bool
    authority: str
    prefix: str

    @classmethod
    def parse(cls, url: str) -> ServerAddress:
        """Parse http://host:port, with or without http:// and /v1. Raises `ConfigError` for an invalid address."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            raise ConfigError(f"{url} has no valid port") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url} is not an address like http://127.0.0.1:1919")
        is_tls = parts.scheme == "https"
        authority, prefix = parts.netloc.rpartition("@")[2], parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, authority, prefix)


class ChatClient:
    """Talks to one server. `account` has the usage and timing of the last answer, if the server reports them."""

    def __init__(self, url: str, api_key: str | None = None, timeout: float = TIMEOUT_S) -> None:
        """`timeout` is in seconds, for each operation of a connection."""
        self.account: dict[str, Any] = {}
        self.url = url
        self._timeout = timeout
        self._address = ServerAddress.parse(url)
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def stream_chat(self, messages: list[dict[str, Any]], **fields: Any) -> Generator[Delta, None, None]:
        """Yield the pieces of the answer as they arrive, then set `account`.

        Closing the iterator early stops the answer. Raises `ServerError` or `OSError`.
        """
        self.account = {}
        options = {"stream": True, "stream_options": {"include_usage": True}, "return_timing": True}
        body = json.dumps({"messages": messages, **options, **fields})
        with self._request("POST", "/v1/chat/completions", body) as response:
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    return
                if data:
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise ServerError(chunk["error"]["message"])
                    self.account |= {name: chunk[name] for name in ("usage", "timing") if chunk.get(name)}
                    for choice in chunk["choices"]:
                        for field in ("reasoning_content", "content"):
                            if text := choice["delta"].get(field):
                                yield Delta(text, field == "reasoning_content")

    def get(self, path: str) -> dict[str, Any]:
        """Return the JSON object at `path`; print a notice if that takes long. Raises `ServerError` or `OSError`."""
        text = f"minisgl: waiting for {self.url}, which may still be loading its model (Ctrl-C stops)"
        notice = threading.Timer(NOTICE_S, lambda: print(text, file=sys.stderr))
        notice.start()
        try:
            with self._request("GET", path) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except ValueError as e:
            raise ServerError(f"{path} is not JSON: {e}") from e
        finally:
            notice.cancel()

    def model(self) -> str:
        """Return the first model that the server lists. Raises `StartupError` if none answers, or `ServerError`."""
        try:
            return str(self.get("/v1/models")["data"][0]["id"])
        except OSError as e:
            raise StartupError(f"no server answers at {self.url} ({e})") from e
        except (LookupError, TypeError):
            raise ServerError("the server does not list its models at /v1/models") from None

    @contextlib.contextmanager
    def _request(self, method: str, path: str, body: str | None = None) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._address.is_tls else http.client.HTTPConnection
        connection = kind(self._address.host, self._address.port, timeout=self._timeout)
        try:
            connection.request(method, self._address.prefix + path, body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ServerError(error_message(response.read(), f"HTTP {response.status} {response.reason}"))
            yield response
        except http.client.HTTPException as e:
            raise ServerError(f"the connection broke: {e!r}") from e
        finally:
            connection.close()


def running_server(host: str, port: int, model: str, api_key: str | None, patience: float) -> str | None:
    """Return the URL of a minisgl server at this address that serves `model` (a name or folder; "" for any), or None.

    A starting server listens before it answers, so wait up to `patience` seconds. If another server is there, print why
    it cannot be used. Raises `ConfigError` for an invalid address.
    """
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    try:
        info = ChatClient(url, api_key, patience).get("/model_info")
        if model in ("", info.get("model"), info.get("model_path")):
            return url
        why = f"serves {info.get('model')}"
    except ServerError as e:
        why = f"refuses ({e})"
    except OSError:
        return None
    print(f"minisgl: the server at {url} {why}; starting another one", file=sys.stderr)
    return None


def error_message(body: bytes, otherwise: str = "") -> str:
    """Return the message in the `body` of an error; without one, `otherwise`, or the beginning of the body."""
    try:
        value = json.loads(body)
        return str(value.get("error", value)["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return otherwise or body[:200].decode(errors="replace")
