"""Drafters: they propose tokens that may follow a row's text. Sampling decides which drafts are accepted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from minisgl.core.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from minisgl.ops.table import OpTable


class Drafter(Protocol):
    """Proposes tokens on the device; nothing waits for the host."""

    def propose(self, history: Tensor, rows: Tensor, lengths: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Return drafts [D, MAX_DRAFTS] int32, and how many of them are worth computing [D] int32.

        history [R, W] int32 has the tokens of all rows, -1 where one is not known. lengths [D] int32, at most
        `longest`, are the lengths of `rows` [D] int64; entries beyond them are undefined.
        """


DRAFTERS: Final[Registry[Callable[[OpTable], Drafter]]] = Registry("drafter")
DRAFTERS.add("ngram", "minisgl.speculative.ngram:NGramDrafter")
DRAFTERS.add("tree", "minisgl.speculative.tree:TreeDrafter")
