"""Drafters: what may follow a row's tokens. They only propose; which drafts are right is decided by sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from minisgl.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from minisgl.ops.table import OpTable


class Drafter(Protocol):
    """Proposes tokens on the device; nothing waits for the host."""

    def propose(self, history: Tensor, rows: Tensor, lengths: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Return drafts [D, MAX_DRAFTS] int32 of what follows, and how many of them are worth computing [D] int32.

        history [R, W] int32 holds the tokens of all rows; lengths [D] int32 says how many each of `rows` [D] int64 has,
        at most `longest`. -1 is a token that is not known. Entries from the length on may hold anything.
        """


DRAFTERS: Final[Registry[Callable[[OpTable], Drafter]]] = Registry("drafter")
DRAFTERS.add("ngram", "minisgl.speculative.ngram:NGramDrafter")
DRAFTERS.add("tree", "minisgl.speculative.tree:TreeDrafter")
