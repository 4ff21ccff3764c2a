"""The mixer of layers with a recurrent state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from torch import Tensor

from minisgl.core.layout import SLOT_ID, STATE, STATE_LEN, Flag
from minisgl.ops.gated_delta import DeltaState, DeltaStep, DeltaWeights

if TYPE_CHECKING:
    from minisgl.attention.backend import MixerSpec
    from minisgl.core.plan import Batch
    from minisgl.core.specs import GatedDelta
    from minisgl.ops.table import OpTable


class DeltaLayer(Protocol):
    """A layer that mixes tokens so."""

    @property
    def state(self) -> DeltaState:
        """What it keeps."""


class GatedDeltaMixer:
    """The `engine.runner.Mixer` of gated DeltaNet."""

    name, group, captures_decodes, captures_prompts = "gated delta", STATE, True, True

    def __init__(self, spec: MixerSpec[GatedDelta], ops: OpTable) -> None:
        self._ops = ops

    def prepare(self, batch: Batch, page_table: Tensor, out_loc: Tensor) -> DeltaMixing:
        """Find the slots of a step's rows; the first sequences decode."""
        layout, shape, captures = batch.layout, batch.shape, batch.captures
        assert captures is not None, "a step of a recurrent model has a table of captures"
        slots = page_table[layout.rows.long(), : STATE_LEN + 1].t().contiguous()
        decodes = shape.decodes
        if len(batch.sequences):  # else the step is captured, and each chunk counts as one
            decodes = int(np.count_nonzero(batch.sequences["flags"] & Flag.FROM_DEVICE))
        step = DeltaStep(
            decodes,
            shape,
            slots[SLOT_ID],
            slots[STATE_LEN],
            layout.rows,
            layout.cu_query_lens,
            batch.positions,
            captures,
        )
        return DeltaMixing(self._ops, step)

    def fold(self, layers: Sequence[DeltaLayer], folds: Tensor) -> None:
        """Move the states of these layers on; folds [N, 3] int32 as FOLD."""
        self._ops.fold([layer.state for layer in layers], folds)


@dataclass(frozen=True, slots=True)
class DeltaMixing:
    """What the layers of a step call."""

    ops: OpTable
    step: DeltaStep

    def mix(self, qkvz: Tensor, ba: Tensor, weights: DeltaWeights, state: DeltaState) -> Tensor:
        """Mix the tokens of the step, as `ops/gated_delta.py: gated_delta`."""
        return self.ops.gated_delta(qkvz, ba, weights, state, self.step)
