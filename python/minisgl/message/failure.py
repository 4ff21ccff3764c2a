"""Why a request cannot be served, on its way from one process to another."""

from __future__ import annotations

import msgspec

from minisgl.errors import RequestError


class Failure(msgspec.Struct, array_like=True, frozen=True):
    """What a `RequestError` says; where there was none, it is our fault (500)."""

    message: str
    param: str | None = None
    code: str | None = None
    status: int = 500

    @classmethod
    def of(cls, error: RequestError) -> Failure:
        return cls(error.message, error.param, error.code, error.status)

    def error(self) -> RequestError:
        """The inverse of `of`."""
        return RequestError(self.message, param=self.param, code=self.code, status=self.status)
