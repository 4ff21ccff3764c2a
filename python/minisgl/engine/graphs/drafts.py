"""Captures the passes of a draft model as CUDA graphs: one launch makes all drafts of a step."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from minisgl.engine.draft_model import SAMPLED_ALIKE, drafted_rows

if TYPE_CHECKING:
    from minisgl.core.plan import BatchPlan, Ints
    from minisgl.device.cuda import CudaDevice
    from minisgl.engine.draft_model import DraftModel
    from minisgl.engine.drafting import Drafting
    from minisgl.engine.graphs.capture import Capture
    from minisgl.engine.runner import Parts

ROW_SIZES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class DraftGraphs:
    """The passes before a step, captured for some numbers of rows; the dummy row (the last one) pads them."""

    def __init__(self, parts: Parts, drafting: Drafting, model: DraftModel, capture: Capture, max_rows: int) -> None:
        self._device: CudaDevice = parts.device  # type: ignore[assignment]
        self._dummy_row = len(parts.state.last_token) - 1
        self._sizes = sorted({max_rows, *(size for size in ROW_SIZES if size < max_rows)})
        self._inputs = torch.zeros(3 * max_rows, dtype=torch.int32, device=parts.device.torch_device)
        self._graphs = {}
        for size, flags in product(self._sizes, (0, SAMPLED_ALIKE)):
            inputs = self._inputs[: 3 * size].view(3, size)
            self._graphs[size, flags] = capture(
                partial(model.draft_rows, inputs, model.spec.max_queries - 1, flags, drafting)
            )[0]

    def draft(self, plan: BatchPlan) -> None:
        """Make the drafts of a plan that has some, except those that the host proposes."""
        rows = drafted_rows(plan)
        size = next(size for size in self._sizes if size >= rows.shape[1])
        inputs: Ints = np.zeros((3, size), np.int32)
        inputs[0], inputs[:, : rows.shape[1]] = self._dummy_row, rows
        self._device.upload_into(self._inputs[: 3 * size], inputs.ravel())
        self._graphs[size, SAMPLED_ALIKE if rows[2].any() else 0].replay()
