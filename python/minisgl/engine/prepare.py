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
    sampled_flags = flags[samples]
    ids, pos, token_rows, device_tokens, logit_tokens, rows, sample_positions, pages, row_writes, adjusted = (
        device.upload(
            input_ids,
            positions,
            np.repeat(row, lens),
            np.flatnonzero(~is_host_token).astype(np.int32),
            (ends - 1)[samples],
            row[samples],
            stop[samples],
            plan.pages,
            plan.rows,
            np.flatnonzero(sampled_flags & BatchPlan.ADJUSTED).astype(np.int32),
        )
    )
    return Batch(
        step=plan.step,
        layout=build_layout(row, lens, stop, device.upload),
        input_ids=ids,
        positions=pos,
        token_rows=token_rows,
        device_tokens=device_tokens.long(),
        logit_tokens=logit_tokens.long(),
        sample_rows=rows.long(),
        sample_positions=sample_positions,
        page_writes=pages.long(),
        row_writes=row_writes,
        adjusts=plan.adjusts,
        adjusted=adjusted.long(),
        is_filtered=bool((sampled_flags & BatchPlan.FILTERED).any()),
    )
