"""BatchPlan -> Batch: the host integers of a step as device tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minisgl.core.layout import NEWEST, NO_INTS, NOT_DRAFTED, Flag, as_words
from minisgl.core.plan import Batch, BatchPlan, DraftColumns, PromptLogprobs, Sampling, SeqLayout, StepShape

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from minisgl.core.layout import Records
    from minisgl.core.plan import Ints
    from minisgl.device.device import Device


@dataclass(frozen=True, slots=True)
class Expanded:
    """A plan expanded to tokens T, sequences B and sampled sequences S; all int32. Fields are those of `Batch`."""

    cu_query_lens: Ints  # [B + 1]
    input_ids: Ints  # [T]
    draft_index: Ints  # [T], see `DraftColumns`
    positions: Ints  # [T]
    token_rows: Ints  # [T]
    logit_tokens: Ints  # [S]
    sample_rows: Ints  # [S]
    sample_positions: Ints  # [S]
    sample_flags: Ints  # [S]
    mask_index: Ints  # [S]
    logprob_tokens: Ints  # [N] indices into T of the tokens whose successors are `BatchPlan.prompt_logprob_ids`

    @property
    def flags(self) -> int:
        """The union of the flags of the sampled sequences."""
        return int(np.bitwise_or.reduce(self.sample_flags, initial=0))


def expand(plan: BatchPlan) -> Expanded:
    """Expand sequences to tokens. Reads only the plan."""
    row, start, stop, flags = (plan.sequences[name] for name in ("row", "start", "stop", "flags"))
    lens = stop - start
    ends = np.cumsum(lens, dtype=np.int32)
    # Position of token t of a sequence that begins at offset o: t - o + start.
    positions = np.arange(lens.sum(), dtype=np.int32) + np.repeat(start - (ends - lens), lens)
    is_host_token = np.repeat((flags & Flag.FROM_DEVICE) == 0, lens)
    input_ids = np.full(len(positions), NEWEST, np.int32)
    draft_index = np.full(len(positions), NOT_DRAFTED, np.int32)
    input_ids[is_host_token] = plan.tokens
    samples = (flags & Flag.SAMPLES) != 0
    token_rows = np.repeat(row, lens)
    logit_tokens = (ends - 1)[samples]
    if plan.has_drafts:
        is_drafted = np.repeat((flags & Flag.DRAFTS) != 0, lens)
        draft_index = np.where(is_drafted, positions - np.repeat(start, lens), draft_index)
        is_sampled = is_drafted.copy()
        is_sampled[logit_tokens] = True
        logit_tokens = np.flatnonzero(is_sampled).astype(np.int32)
    sample_flags = plan.sampled_flags
    return Expanded(
        cu_query_lens=np.concatenate([np.zeros(1, np.int32), ends]),
        input_ids=input_ids,
        draft_index=draft_index,
        positions=positions,
        token_rows=token_rows,
        logit_tokens=logit_tokens,
        sample_rows=token_rows[logit_tokens],
        sample_positions=positions[logit_tokens] + 1,
        sample_flags=sample_flags,
        mask_index=mask_index(sample_flags),
        logprob_tokens=_logprob_tokens(flags, lens, ends) if len(plan.prompt_logprob_ids) else NO_INTS,
    )


def mask_index(flags: Ints) -> Ints:
    """Return each sequence's index into a plan's masks, from the flags [S] of the sequences that sample."""
    index: Ints = np.cumsum((flags & Flag.MASKED) != 0, dtype=np.int32) - 1
    return index


def _logprob_tokens(flags: Ints, lens: Ints, ends: Ints) -> Ints:
    """Return the tokens of the PROMPT_LOGPROBS sequences except those that are sampled from."""
    is_wanted = np.repeat((flags & Flag.PROMPT_LOGPROBS) != 0, lens)
    is_wanted[(ends - 1)[(flags & Flag.SAMPLES) != 0]] = False
    return np.flatnonzero(is_wanted).astype(np.int32)


def step_shape(sequences: Records) -> StepShape:
    """Return the shape of a step that computes `sequences`."""
    lens = sequences["stop"] - sequences["start"]
    is_chunk = ((sequences["flags"] & Flag.FROM_DEVICE) == 0) & (lens > 1)
    decodes = int(is_chunk.argmax()) if is_chunk.any() else len(sequences)
    return StepShape(
        decodes=decodes,
        queries=int(lens[:decodes].max(initial=1)),
        chunks=len(sequences) - decodes,
        chunk_tokens=int(lens[decodes:].sum()),
        context=int(sequences["stop"][decodes:].max(initial=0)),
    )


def make_batch(plan: BatchPlan, device: Device) -> Batch:
    """Expand a plan and upload it."""
    x = expand(plan)
    copies = plan.captures
    rows, kv_lens, ends, ids, positions, token_rows, logit_tokens, page_writes, row_states, captures, *sampling = (
        device.upload(
            plan.sequences["row"],
            plan.sequences["stop"],
            x.cu_query_lens,
            x.input_ids,
            x.positions,
            x.token_rows,
            x.logit_tokens,
            as_words(plan.page_writes),
            as_words(plan.row_states),
            np.stack([copies["row"], copies["position"], copies["target"]], 1),
            x.sample_rows,
            x.sample_positions,
            x.sample_flags,
            x.mask_index,
        )
    )
    drafts = draft_columns(plan, x.draft_index, device) if plan.has_drafts else None
    return Batch(
        shape=step_shape(plan.sequences),
        sequences=plan.sequences,
        captures=captures,
        layout=SeqLayout(rows, kv_lens, ends),
        input_ids=ids,
        positions=positions,
        token_rows=token_rows,
        logit_tokens=logit_tokens.long(),
        sampling=_sampling(sampling, x.flags, None if drafts is None else drafts.draft_index[logit_tokens.long()]),
        page_writes=page_writes,
        row_states=row_states,
        prompt_logprobs=_prompt_logprobs(x, plan.prompt_logprob_ids, device) if len(plan.prompt_logprob_ids) else None,
        drafts=drafts,
        has_adapters=plan.has_adapters,
    )


def draft_columns(plan: BatchPlan, draft_index: Ints, device: Device) -> DraftColumns:
    """Return the sequences with DRAFTS of a plan that has some; `draft_index` is that of its expansion."""
    sequences = plan.sequences[(plan.sequences["flags"] & Flag.SAMPLES) != 0]
    is_drafted = (sequences["flags"] & Flag.DRAFTS) != 0
    first = (np.cumsum(plan.widths, dtype=np.int32) - plan.widths)[is_drafted]
    sequences, counts = sequences[is_drafted], plan.widths[is_drafted] - 1
    index = np.minimum(np.arange(counts.max() + 1, dtype=np.int32), counts[:, None])
    draft_index_, rows, counts_, columns = device.upload(draft_index, sequences["row"], counts, first[:, None] + index)
    return DraftColumns(draft_index_, rows.long(), counts_, columns.long(), int(sequences["stop"].max()) + 1)


def make_sampling(plan: BatchPlan, index: npt.NDArray[np.intp], device: Device) -> Sampling:
    """Upload the sampling inputs of the sequences `index`, counted among those of a plan that sample."""
    sequences = plan.sequences[(plan.sequences["flags"] & Flag.SAMPLES) != 0]
    mask_indices = mask_index(sequences["flags"])
    sequences = sequences[index]
    arrays = device.upload(sequences["row"], sequences["stop"], sequences["flags"], mask_indices[index])
    return _sampling(arrays, int(np.bitwise_or.reduce(sequences["flags"], initial=0)), None)


def _sampling(arrays: list[torch.Tensor], flags: int, drafted: torch.Tensor | None) -> Sampling:
    rows, positions, row_flags, mask_index = arrays
    return Sampling(rows.long(), positions, row_flags, mask_index, flags, drafted)


def _prompt_logprobs(x: Expanded, token_ids: Ints, device: Device) -> PromptLogprobs:
    kept = np.union1d(x.logit_tokens, x.logprob_tokens).astype(np.int32)
    sampled_at, logprobs_at = (np.searchsorted(kept, t).astype(np.int32) for t in (x.logit_tokens, x.logprob_tokens))
    kept_tokens, sampled, wanted, ids = device.upload(kept, sampled_at, logprobs_at, token_ids)
    return PromptLogprobs(kept_tokens.long(), sampled.long(), wanted.long(), ids)
