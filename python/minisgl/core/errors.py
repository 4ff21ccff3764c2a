"""The exception tree, and the hint at a misspelt name. The type of an exception says who can fix its cause.

    MinisglError
      ConfigError      the start-up settings are wrong: one sentence of advice, exit code 2
      StartupError     a child process could not start: carries the cause, exit code 1
      RankError        another rank of the same model is gone: this one ends too, exit code 1
      NativeError      no C++ step on this machine: steps run op by op, and a warning says why
      RequestError     one request is wrong: becomes a 4xx reply, costs nothing else
      InvariantError   our own bug, found by the invariant mode

Asserts with a message mean "our bug" too; nothing a client sends may reach one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches


def near_miss(name: str, known: Iterable[str], similarity: float = 0.7) -> str | None:
    """Return the name in `known` that `name` probably misspells; `similarity` is `difflib`'s ratio, 0 to 1."""
    return next(iter(get_close_matches(name, known, 1, similarity)), None)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name: a question, or nothing."""
    close = near_miss(name, known)
    return f"; did you mean {close}?" if close else ""


def is_unicode(text: str) -> bool:
    """Return whether `text` has no lone surrogate, as it has where the bytes of an argument are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class MinisglError(Exception):
    """Base of everything this package raises on purpose."""


class ConfigError(MinisglError):
    """The settings cannot work; the message says what to change."""


class StartupError(MinisglError):
    """A process of the server failed, hung or died while it was starting."""


class RankError(MinisglError):
    """Another rank of the same model is gone or cannot be reached, so this one cannot go on."""


class NativeError(MinisglError):
    """The C++ step cannot be compiled, loaded or used on this machine; the message says why."""


class RequestError(MinisglError, ValueError):
    """A request that cannot be served. In Python it is a `ValueError`.

    `param` names the offending field, `code` is the machine-readable OpenAI error code (that of a 400 is
    "invalid_value" if nothing better is known) and `status` the HTTP status.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or ("invalid_value" if status == 400 else None)
        self.status = status

    def named(self, names: Mapping[str, str]) -> RequestError:
        """Return the error under the client's name of the field; `names` maps our names to the client's.

        Its message mentions that name in any case. An index in our form of a request means nothing to the client.
        """
        if self.param is None:
            return self
        field, inner = re.split(r"\[\d+\]\.?|\.|$", self.param, maxsplit=1)
        name, message = names.get(field, self.param), self.message
        if name != self.param and message.startswith(self.param):
            message = (f"{name}: {inner}" if inner else name) + message.removeprefix(self.param)
        elif re.search(rf"\b{re.escape(name)}(?!\w)", message) is None:
            message = f"{name}: {message}"
        return RequestError(message, param=name, code=self.code, status=self.status)


def unsupported(message: str, param: str) -> RequestError:
    """The refusal of a value that has a meaning elsewhere and none here."""
    return RequestError(message, param=param, code="unsupported_value")


class InvariantError(MinisglError):
    """The engine's bookkeeping contradicts itself (a bug of ours); the message names the request or page."""
