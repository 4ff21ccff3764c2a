"""Request bodies as the server reads them."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from minisgl.api.fields import read_body

T = TypeVar("T", bound=msgspec.Struct)


def parse_body(body: bytes, kind: type[T]) -> T:
    """The request alone."""
    return read_body(body, kind).request
