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

from minisgl.ops.deferred import finished
from minisgl.ops.reference import gate_and_mul

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from minisgl.ops.deferred import Result
    from minisgl.ops.quantized import Quantized


class ModuleRows(NamedTuple):
    """The rows [start, stop) of a projection, which are module `module`'s."""

    start: int
    stop: int
    module: int


class TokenSlots(NamedTuple):
    """The slots of the adapters of T tokens, of `num_slots` in all. A slot of 0 means none.

    Kernels compute the tokens of a slot side by side: order[bounds[s] : bounds[s + 1]] are those in slot s. Both are
    made once a step, by five small kernels that a CUDA graph captures; one token needs none.
    """

    slots: Tensor  # [T] int32
    num_slots: int
    order: Tensor | None = None  # [T] int64
    bounds: Tensor | None = None  # [num_slots + 2] int32

    @classmethod
    def of(cls, slots: Tensor, num_slots: int) -> TokenSlots:
        if len(slots) < 2:
            return cls(slots, num_slots)
        ordered, order = slots.sort(stable=True)
        each = torch.arange(num_slots + 2, dtype=torch.int32, device=slots.device)
        return cls(slots, num_slots, order, torch.searchsorted(ordered, each, out_int32=True))

    def at(self, tokens: Tensor) -> TokenSlots:
        """Return those of some of the tokens, int64 [S]."""
        return TokenSlots.of(self.slots.index_select(0, tokens), self.num_slots)


@dataclass(slots=True)
class AdapterWeights:
    """What the slots hold of a projection: views of one memory (`engine/adapters.py`), which has a slot's all together.

    Unused ranks are 0, and all of b is finite: what makes an adapter NaN is NaN in `a` or `shift`. All rows [0, N) are
    in `rows`, in order.
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


def add_adapters(y: Tensor, x: Tensor, tokens: TokenSlots, weights: AdapterWeights, gate: str = "") -> Tensor:
    """Add to the projections y [T, N] of x [T, K] what the adapters of the tokens do, and return the sum.

    With `gate`, `gate_and_mul` follows. May overwrite y.
    """
    rank = weights.rank
    for slot in {*tokens.slots.tolist()} - {0}:
        at = (tokens.slots == slot).nonzero()[:, 0]
        a, shift, b = (tensor[slot - 1] for tensor in (weights.a, weights.shift, weights.b))
        inner = F.linear(x[at], a, shift)
        parts = [F.linear(inner[:, p * rank : (p + 1) * rank], b[start:stop]) for start, stop, p in weights.rows]
        y[at] += torch.cat(parts, 1)
    return gate_and_mul(y, gate) if gate else y


def adapted_linear(
    linear: Callable[..., Result],
    x: Result,
    weight: Tensor | Quantized,
    bias: Tensor | None,
    gate: str,
    tokens: TokenSlots,
    weights: AdapterWeights,
) -> Tensor:
    """Return `reference.linear` of x [T, K] with what the adapters add; `linear` is the table's own op for it."""
    x = finished(x)
    return add_adapters(finished(linear(x, weight, bias)), x, tokens, weights, gate)
