"""BatchPlan -> Batch: the host integers of a step as device tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from minisgl.attention.layout import build_layout
from minisgl.core import Batch, BatchPlan

if TYPE_CHECKING:
    from minisgl.utils.device import Device


def prepare_batch(plan: BatchPlan, device: Device) -> Batch:
    """Expand slots to tokens and upload. Reads nothing but the plan, so it may run ahead of the device."""
    row, start, stop, flags = plan.slots.T
    lens = stop - start
    ends = np.cumsum(lens, dtype=np.int32)
    # Position of token t of a slot that begins at offset o: t - o + start.
    positions = np.arange(lens.sum(), dtype=np.int32) + np.repeat(start - (ends - lens), lens)
    from_device = (flags & BatchPlan.FROM_DEVICE) != 0
    is_host_token = np.repeat(~from_device, lens)
    input_ids = np.zeros(len(positions), np.int32)
    input_ids[is_host_token] = plan.tokens
    samples = (flags & BatchPlan.SAMPLES) != 0
    up = device.upload
    return Batch(
        step=plan.step,
        layout=build_layout(row, lens, stop, up),
        input_ids=up(input_ids),
        positions=up(positions),
        token_rows=up(np.repeat(row, lens)),
        device_tokens=up(np.flatnonzero(~is_host_token).astype(np.int32)).long(),
        logit_tokens=up((ends - 1)[samples]).long(),
        sample_rows=up(row[samples]).long(),
        sample_positions=up(stop[samples]),
        page_writes=up(plan.pages).long(),
        row_writes=up(plan.rows),
        adjusts=plan.adjusts,
        adjusted=up(np.flatnonzero((flags & BatchPlan.ADJUSTED)[samples]).astype(np.int32)).long(),
        is_filtered=bool((flags & BatchPlan.FILTERED)[samples].any()),
    )
