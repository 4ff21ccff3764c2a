"""Low-rank adapters (LoRA, arXiv:2106.09685) in plain torch: the specification of their kernels.

An adapter changes the weight of a projection by a product of two small matrices. A step has tokens of several adapters,
each in a slot of the device's memory, and tokens of none:

    y = y + b[s - 1] (a[s - 1] x + shift[s - 1])    for a token with slot s > 0

A projection may stack several modules of the checkpoint (q, k, v), each with an adapter of its own: the ranks of all
are side by side, and a row of the projection reads those of its module. A `shift` of 1 makes a column of b a bias.

Letters in shapes: T tokens, S slots, K inputs, N outputs, P modules, r the largest rank of a module's adapter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional as F

from minisgl.ops.reference import gate_and_mul

if TYPE_CHECKING:
    from torch import Tensor


class ModuleRows(NamedTuple):
    """The rows [start, stop) of a projection, which are module `module`'s."""

    start: int
    stop: int
    module: int


@dataclass(slots=True)
class AdapterWeights:
    """What the slots hold of a projection: views of one memory (`engine/adapters.py`), which has a slot's all together.

    Unused ranks are 0. All rows [0, N) are in `rows`, in order.
    """

    a: Tensor  # [S, P r, K]
    shift: Tensor  # [S, P r]
    b: Tensor  # [S, N, r]; the adapter's scale is in it
    rows: tuple[ModuleRows, ...]
    ranks: Tensor | None = None  # [S, 1]: the ranks of each slot after these are 0

    @property
    def rank(self) -> int:
        """r."""
        return self.b.shape[2]


def add_adapters(y: Tensor, x: Tensor, slots: Tensor, weights: AdapterWeights, gate: str = "") -> Tensor:
    """Add to the projections y [T, N] of x [T, K] what the adapters in `slots` [T] int32 do, and return the sum.

    A slot of 0 means none. With `gate`, `gate_and_mul` follows. May overwrite y.
    """
    rank = weights.rank
    for slot in {*slots.tolist()} - {0}:
        at = (slots == slot).nonzero()[:, 0]
        a, shift, b = (tensor[slot - 1] for tensor in (weights.a, weights.shift, weights.b))
        inner = F.linear(x[at], a, shift)
        parts = [F.linear(inner[:, p * rank : (p + 1) * rank], b[start:stop]) for start, stop, p in weights.rows]
        y[at] += torch.cat(parts, 1)
    return gate_and_mul(y, gate) if gate else y
