"""Rounding up, for ints and integer arrays."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")


def ceil_div(n: T, d: int) -> T:
    """The smallest integer >= n / d."""
    return -(-n // d)  # type: ignore[operator, no-any-return]


def round_up(n: T, multiple: int) -> T:
    """The smallest multiple of `multiple` that is >= n."""
    return ceil_div(n, multiple) * multiple  # type: ignore[operator, return-value]
