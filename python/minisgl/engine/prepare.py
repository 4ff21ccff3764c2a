"""BatchPlan -> Batch: the host integers of a step as device tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minisgl.attention.backend import build_layout
from minisgl.core import NOTHING, Batch, BatchPlan, Scored

if TYPE_CHECKING:
    from minisgl.core import Ints
    from minisgl.device.device import Device


@dataclass(frozen=True, slots=True)
class Expanded:
    """A plan by tokens T, sequences B and sampled sequences S; all int32. The fields are those of `Batch`."""

    rows: Ints  # [B]
    query_lens: Ints  # [B]
    kv_lens: Ints  # [B]
    input_ids: Ints  # [T], -1 where the device knows the token
    positions: Ints  # [T]
    token_rows: Ints  # [T]
    logit_tokens: Ints  # [S]
    sample_rows: Ints  # [S]
    sample_positions: Ints  # [S]
    sample_flags: Ints  # [S]
    mask_places: Ints  # [S]
    scored_tokens: Ints  # [N] indices into T of the tokens whose successors are `BatchPlan.targets`

    @property
    def flags(self) -> int:
        return int(np.bitwise_or.reduce(self.sample_flags))


def expand(plan: BatchPlan) -> Expanded:
    """Slots to tokens; reads nothing but the plan."""
    row, start, stop, flags = plan.slots.T
    lens = stop - start
    ends = np.cumsum(lens, dtype=np.int32)
    # Position of token t of a slot that begins at offset o: t - o + start.
    positions = np.arange(lens.sum(), dtype=np.int32) + np.repeat(start - (ends - lens), lens)
    is_host_token = np.repeat((flags & BatchPlan.FROM_DEVICE) == 0, lens)
    input_ids = np.full(len(positions), -1, np.int32)
    input_ids[is_host_token] = plan.tokens
    samples = (flags & BatchPlan.SAMPLES) != 0
    sampled_flags = flags[samples]
    return Expanded(
        rows=row,
        query_lens=lens,
        kv_lens=stop,
        input_ids=input_ids,
        positions=positions,
        token_rows=np.repeat(row, lens),
        logit_tokens=(ends - 1)[samples],
        sample_rows=row[samples],
        sample_positions=stop[samples],
        sample_flags=sampled_flags,
        mask_places=mask_places(sampled_flags),
        scored_tokens=_scored_tokens(flags, lens, ends) if len(plan.targets) else NOTHING,
    )


def mask_places(flags: Ints) -> Ints:
    """Where in a plan's masks each sequence's is, by the flags [S] of those that sample."""
    places: Ints = np.cumsum((flags & BatchPlan.MASKED) != 0, dtype=np.int32) - 1
    return places


def _scored_tokens(flags: Ints, lens: Ints, ends: Ints) -> Ints:
    """All tokens of the SCORED slots, but for those whose logits choose a token."""
    is_scored = np.repeat((flags & BatchPlan.SCORED) != 0, lens)
    is_scored[(ends - 1)[(flags & BatchPlan.SAMPLES) != 0]] = False
    return np.flatnonzero(is_scored).astype(np.int32)


def prepare_batch(plan: BatchPlan, device: Device) -> Batch:
    """Expand and upload; may run ahead of the device."""
    x = expand(plan)
    (
        ids,
        positions,
        token_rows,
        logit_tokens,
        rows,
        sample_positions,
        pages,
        row_writes,
        flags,
        places,
    ) = device.upload(
        x.input_ids,
        x.positions,
        x.token_rows,
        x.logit_tokens,
        x.sample_rows,
        x.sample_positions,
        plan.pages,
        plan.rows,
        x.sample_flags,
        x.mask_places,
    )
    return Batch(
        step=plan.step,
        layout=build_layout(x.rows, x.query_lens, x.kv_lens, device.upload),
        input_ids=ids,
        positions=positions,
        token_rows=token_rows,
        logit_tokens=logit_tokens.long(),
        sample_rows=rows.long(),
        sample_positions=sample_positions,
        page_writes=pages.long(),
        row_writes=row_writes,
        adjusts=plan.adjusts,
        masks=plan.masks,
        flags=x.flags,
        sample_flags=flags,
        mask_places=places,
        scored=_prepare_scored(x, plan.targets, device) if len(plan.targets) else None,
    )


def _prepare_scored(x: Expanded, targets: Ints, device: Device) -> Scored:
    kept = np.union1d(x.logit_tokens, x.scored_tokens).astype(np.int32)
    places = (np.searchsorted(kept, tokens).astype(np.int32) for tokens in (x.logit_tokens, x.scored_tokens))
    kept_tokens, sampled_at, scored_at, on_device = device.upload(kept, *places, targets)
    return Scored(kept_tokens.long(), sampled_at.long(), scored_at.long(), on_device)
