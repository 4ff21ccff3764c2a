"""Random states, weights and steps of gated DeltaNet, and a comparison of two tables of ops with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from minisgl.core.plan import StepShape
from minisgl.ops import gated_delta as reference
from minisgl.ops.gated_delta import DeltaState, DeltaStep, DeltaWeights


class Sizes(NamedTuple):
    key_heads: int
    heads: int
    dk: int
    dv: int
    entries: int = 20
    width: int = 4

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.dk + self.heads * self.dv


def make_weights(n: Sizes, dtype: torch.dtype, device: str) -> DeltaWeights:
    conv = torch.randn(n.channels, 1, n.width, device=device).to(dtype) / 2
    a_log, dt_bias = (torch.randn(n.heads, device=device) for _ in range(2))
    return DeltaWeights(conv, a_log, dt_bias, torch.rand(n.dv, device=device).to(dtype) + 0.5, 1e-6, n.key_heads)


def make_states(layers: int, slots: int, n: Sizes, dtype: torch.dtype, delta: torch.dtype, device: str):
    """States of layers, each a part of one allocation by slot, as a pool has them."""
    recent = torch.randn(slots, layers, n.entries, n.key_heads * n.dk + n.heads * n.dv, device=device).to(dtype) / 4
    decay = -torch.rand(slots, layers, n.entries, n.heads, device=device) / 2
    s = (torch.randn(slots, layers, n.heads, n.dk, n.dv, device=device) / 4).to(delta)
    conv = torch.randn(slots, layers, n.entries + n.width - 1, n.channels, device=device).to(dtype)
    return [DeltaState(s[:, i], recent[:, i], decay[:, i], conv[:, i]) for i in range(layers)]


@dataclass
class Sequence:
    """`tokens` from position `start` on in `slot`; `state_len` if it decodes; captures are (position, target slot)."""

    slot: int
    start: int
    tokens: int
    state_len: int | None = None
    captures: list[tuple[int, int]] = field(default_factory=list)


def make_step(sequences: list[Sequence], device: str) -> DeltaStep:
    """Return the step of sequences, those that decode first; its last capture is not in use."""
    decodes = [s for s in sequences if s.state_len is not None]
    chunks = [s for s in sequences if s.state_len is None]
    assert sequences == decodes + chunks

    def ints(values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    shape = StepShape(
        len(decodes), max((s.tokens for s in decodes), default=1), len(chunks), sum(s.tokens for s in chunks)
    )
    captures = [(row, position, target) for row, s in enumerate(sequences) for position, target in s.captures]
    return DeltaStep(
        len(decodes),
        shape,
        ints([s.slot for s in sequences]),
        ints([s.state_len or 0 for s in sequences]),
        ints(list(range(len(sequences)))),
        ints([sum(s.tokens for s in sequences[:i]) for i in range(len(sequences) + 1)]),
        ints([s.start + i for s in sequences for i in range(s.tokens)] or [0])[: sum(s.tokens for s in sequences)],
        ints([*captures, (-1, 0, 0)]),
    )


def compare(ops, n: Sizes, sequences: list[Sequence], dtype: torch.dtype, delta: torch.dtype, device: str) -> float:
    """Run a step with strided inputs by `ops` and in float32 by the reference; return the largest relative error.

    Everything is compared that the specification defines: outputs, and all states but inputs before the text.
    """
    weights = make_weights(n, dtype, device)
    slots = 1 + max([s.slot for s in sequences] + [t for s in sequences for _, t in s.captures])
    (state,) = make_states(1, slots, n, dtype, delta, device)
    step, tokens = make_step(sequences, device), sum(s.tokens for s in sequences)
    width = n.channels + n.heads * n.dv
    both = torch.randn(tokens, width + 2 * n.heads + 16, device=device).to(dtype)
    qkvz, ba = both[:, :width], both[:, width : width + 2 * n.heads]
    want_state = DeltaState(*(x.float().clone() for x in state))
    wide = replace_weights(weights)
    want = reference.gated_delta(qkvz.float(), ba.float(), wide, want_state, step)
    got = ops.gated_delta(qkvz, ba, weights, state, step)
    assert got.dtype == dtype
    for s in sequences:  # the reference stores zeros for inputs before the text
        ring = n.entries + n.width - 1
        for slot, end in [(s.slot, s.start + s.tokens), *((target, at) for at, target in s.captures)]:
            for position in range(end - n.width + 1, 0):
                want_state.conv[slot, position % ring] = state.conv[slot, position % ring].float()
    errors = [error(got, want)] + [error(a, b) for a, b in zip(state, want_state, strict=True)]
    return max(errors)


def compare_folds(ops, n: Sizes, folds: list[tuple[int, int, int]], layers: int, dtype, delta, device: str) -> float:
    """Fold by `ops` and by the reference; return the largest relative error of S."""
    states = make_states(layers, 1 + max(slot for slot, _, _ in folds), n, dtype, delta, device)
    want = [DeltaState(*(x.float().clone() for x in state)) for state in states]
    reference.fold(want, torch.tensor([f for f in folds if f[1] < f[2]]))
    ops.fold(states, torch.tensor(folds, dtype=torch.int32, device=device))
    return max(error(a.delta, b.delta) for a, b in zip(states, want, strict=True))


def replace_weights(weights: DeltaWeights) -> DeltaWeights:
    return weights._replace(conv=weights.conv.float(), norm=weights.norm.float())


def error(got: Tensor, want: Tensor) -> float:
    """The largest error of a row, relative to the largest number of all rows."""
    assert bool(got.isfinite().all())
    return ((got.float() - want.float()).abs().max() / want.float().abs().max().clamp(min=1e-6)).item()
