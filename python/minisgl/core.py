"""The data that everything else passes around; no behaviour beyond derived properties, no torch at run time.

Data flows down and results flow up: each hop makes a new frozen value. (What mutates is `scheduler.req.Req`.)

    BatchPlan        one step as host integers: what is uploaded and what other ranks replay
    StepResult       what it computed, as host integers
    Batch            the same step as tensors on the device
    Context          what a forward pass needs besides its inputs
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from minisgl.params import MAX_LOGPROBS

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    Ints = npt.NDArray[np.int32]

NOTHING = np.empty(0, np.int32)
NO_MASKS = np.empty((0, 0), np.int32)


class FinishReason(enum.StrEnum):
    """Why a request ended; the first two are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step as host integers (int32 arrays); packs into one buffer, see `pack`.

    slots      [B, 4]  row, start, stop, flags (see below)
    tokens     [T]     input tokens of the slots without `from_device`, in slot order
    pages      [P, 3]  page-table writes to apply first: row, index in the row, page id
    rows       [R, 7]  sampling state of newly filled rows: row, temperature (float bits), top_k, top_p (float bits),
                       min_p (float bits), noise key low and high 32 bits
    adjusts    [A]     penalties and biases of newly filled rows, records of `scheduler/plan.py: adjust_record`
    masks      [M, W]  tokens allowed to the MASKED slots that sample, in slot order: bit i of word w is token 32 w + i;
                       none where they come later (`StepOutput.choose`)
    targets    [N]     what follows each token of the SCORED slots, in slot order; not for the token whose logits sample
    """

    step: int
    slots: Ints
    tokens: Ints
    pages: Ints
    rows: Ints
    adjusts: Ints
    masks: Ints = field(default_factory=lambda: NO_MASKS)
    targets: Ints = field(default_factory=lambda: NOTHING)

    SAMPLES: ClassVar[int] = 1  # the logits of the last position choose a token
    FROM_DEVICE: ClassVar[int] = 2  # the one input token is the row's newest, known to the device
    ADJUSTED: ClassVar[int] = 4  # the logits are changed before that (an `adjusts` record came with the row)
    FILTERED: ClassVar[int] = 8  # top-k, top-p or min-p leave out some tokens
    LOGPROBS: ClassVar[int] = 16  # the log-probability of the sampled token is wanted
    MASKED: ClassVar[int] = 64  # only some tokens may be sampled, as `masks` says
    SCORED: ClassVar[int] = 32  # those of the input tokens' successors are wanted, which are in `targets`
    ROW_WIDTH: ClassVar[int] = 7

    def pack(self) -> Ints:
        """One int32 buffer: step, the seven lengths, the width of the masks, then the arrays."""
        parts = (self.slots, self.tokens, self.pages, self.rows, self.adjusts, self.masks, self.targets)
        head = np.array([self.step, *(len(p) for p in parts), self.masks.shape[1]], np.int32)
        return np.concatenate([head, *(p.reshape(-1) for p in parts)])

    @staticmethod
    def unpack(buffer: Ints) -> BatchPlan:
        """The inverse of `pack`; the arrays are views of `buffer`."""
        step, b, t, p, r, a, m, n, words = (int(x) for x in buffer[:9])
        width = BatchPlan.ROW_WIDTH
        cuts = np.cumsum([9, b * 4, t, p * 3, r * width, a, m * words, n])
        assert cuts[-1] == len(buffer), f"plan of {len(buffer)} ints, expected {cuts[-1]}"
        parts = [buffer[lo:hi] for lo, hi in pairwise(cuts)]
        slots, tokens, pages, rows, adjusts, masks, targets = parts
        return BatchPlan(
            step,
            slots.reshape(b, 4),
            tokens,
            pages.reshape(p, 3),
            rows.reshape(r, width),
            adjusts,
            masks.reshape(m, words),
            targets,
        )


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed, on the host: int32 arrays.

    tokens  [S]              the sampled tokens, in slot order
    sound   [S]              1 where the logits were finite
    scores  [WIDTH, S + N]   for the sampled tokens, then for the plan's `targets`: the token's log-probability (float
                             bits; nothing where it is not wanted), then the ids of the TOP likeliest tokens,
                             then their log-probabilities (float bits). None if the plan wants none at all
    embeddings [H, S]        of an embedding model: the pooled hidden states (float bits), where the tokens mean nothing
                             and `sound` is about these; else None
    """

    tokens: Ints
    sound: Ints
    scores: Ints | None = None
    embeddings: Ints | None = None

    TOP: ClassVar[int] = MAX_LOGPROBS
    WIDTH: ClassVar[int] = 1 + 2 * TOP

    def embedding(self, column: int) -> bytes:
        """That of the sequence which sampled `column`, float32 [H]; empty if there are none."""
        return b"" if self.embeddings is None else self.embeddings[:, column].tobytes()


@dataclass(frozen=True, slots=True)
class StepCosts:
    """A model of how long a step takes, in seconds, with coefficients that the engine measured when it started."""

    base: float  # of any step
    per_token: float  # for each token computed, of prompts or of decoding requests
    per_context: float = 0.0  # for each token of K/V that decoding requests read
    per_pair: float = 0.0  # for each pair of a prompt token and one that it attends to

    def decode_seconds(self, num_rows: int, context: int) -> float:
        """A step in which `num_rows` requests decode, whose K/V is `context` tokens together."""
        return self.base + self.per_token * num_rows + self.per_context * context

    def chunk_seconds(self, start: int, count: int) -> float:
        """What `count` tokens of a prompt from position `start` on add to a step."""
        return self.per_token * count + self.per_pair * count * (start + count / 2)


@dataclass(frozen=True, slots=True)
class SeqLayout:
    """Shape of a mixed batch, once for all attention backends. B sequences, T tokens in total, grouped by sequence.

    The host copies are plain numpy so that a backend can plan without asking the device.
    """

    rows_host: Ints  # [B] row of each sequence
    query_lens_host: Ints  # [B] tokens computed in this step
    kv_lens_host: Ints  # [B] tokens in the cache once this step's are stored
    rows: torch.Tensor  # [B] int32, as above on the device
    kv_lens: torch.Tensor  # [B] int32
    cu_query_lens: torch.Tensor  # [B + 1] int32, offsets of each sequence's tokens

    @property
    def is_decode(self) -> bool:
        """Every sequence computes exactly one token."""
        return bool((self.query_lens_host == 1).all())


@dataclass(frozen=True, slots=True)
class Scored:
    """Tokens of prompts whose log-probabilities a step finds out, and where in the hidden states to look for them.

    With it, the model keeps the hidden states of the tokens `logit_tokens` [K] int64, ascending indices into T; of
    these `sampled_at` [S] int64 choose tokens, and `scored_at` [N] int64 say how likely `targets` [N] int32 are.
    """

    logit_tokens: torch.Tensor
    sampled_at: torch.Tensor
    scored_at: torch.Tensor
    targets: torch.Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One step as device tensors; derived from a `BatchPlan` alone, so it may be made ahead of its turn."""

    step: int
    layout: SeqLayout
    input_ids: torch.Tensor  # [T] int32; -1 for the newest token of its row, which the device knows
    positions: torch.Tensor  # [T] int32
    token_rows: torch.Tensor  # [T] int32, row of each token
    logit_tokens: torch.Tensor  # [S] int64, indices into T whose logits are sampled
    sample_rows: torch.Tensor  # [S] int64, rows of the sampled sequences
    sample_positions: torch.Tensor  # [S] int32, position that the sampled token will have
    page_writes: torch.Tensor  # [P, 3] int64
    row_writes: torch.Tensor  # [R, 7] int32
    adjusts: Ints  # the plan's records, on the host
    masks: Ints  # the plan's masks, on the host
    flags: int  # all flags of `BatchPlan` that a sampled sequence has or, in a captured step, may have
    sample_flags: torch.Tensor  # [S] int32, the flags of each
    mask_places: torch.Tensor  # [S] int32, index into `masks`; of no meaning where it is not MASKED
    scored: Scored | None  # tokens of prompts whose log-probability is wanted

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class Context:
    """What a forward pass needs besides its inputs; an argument, never a global.

    `kv_cache.layer(i)` gives layer i's pages; `attn_metadata` is what `attention.prepare` made of this batch; `out_loc`
    [T] int64 is the slot (page * page_size + offset) where each token's K/V goes; `page_table` is [rows, pages per row]
    int32.
    """

    batch: Batch
    page_table: torch.Tensor
    kv_cache: Any
    attention: Any
    attn_metadata: Any
    out_loc: torch.Tensor
