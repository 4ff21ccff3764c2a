"""A small client of the chat API on the standard library alone, for the terminal chat and the examples."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator
from typing import Any, Final
from urllib.parse import urlsplit

from minisgl.utils.errors import ConfigError, MinisglError

TIMEOUT_S: Final = 600.0


class ServerError(MinisglError):
    """The server refused the request or broke off; the message is its own."""


class ChatClient:
    """Streams chat completions from the server at `url` (http://host:port)."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            raise ConfigError(f"{url} has no valid port") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{url} is not an address like http://127.0.0.1:1919")
        self._host, self._port = parts.hostname, port
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def stream_chat(self, messages: list[dict[str, Any]], **fields: Any) -> Generator[str, None, None]:
        """The pieces of the answer as they come. Closing the iterator early makes the server stop.

        Raises `ServerError` or `OSError`.
        """
        connection = self._kind(self._host, self._port, timeout=TIMEOUT_S)
        try:
            body = json.dumps({"messages": messages, "stream": True, **fields})
            connection.request("POST", f"{self._prefix}/v1/chat/completions", body, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                raise ServerError(_message(response.read()) or f"HTTP {response.status} {response.reason}")
            for line in response:
                data = line.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    return
                if data:
                    chunk = json.loads(data)
                    if "error" in chunk:
                        raise ServerError(chunk["error"]["message"])
                    for choice in chunk["choices"]:
                        yield choice["delta"].get("content") or ""
        except http.client.HTTPException as e:
            raise ServerError(f"the connection broke: {e!r}") from e
        finally:
            connection.close()


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
