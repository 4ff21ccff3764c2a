"""The data that rooms pass to each other: no behaviour beyond derived properties, and no torch.

Data flows down and results flow up, and each hop makes a new frozen value. Only `scheduler.req.Req` mutates.

    BatchPlan        one step as host integers: what is uploaded and what other ranks replay
    StepResult       the result of a step, as host integers
    Batch            the same step as tensors on the device
    Context          what a forward pass needs besides its inputs
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from minisgl.core.layout import (
    NO_COPIES,
    NO_FOLDS,
    NO_INTS,
    NO_MASKS,
    NO_MOVES,
    NO_PAGE_WRITES,
    NO_PROPOSALS,
    NO_ROW_STATES,
    PLAN_ARRAYS,
    PLAN_HEAD,
    WORD,
    Flag,
    words,
)
from minisgl.core.params import MAX_LOGPROBS

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    from minisgl.core.layout import Ints as Ints
    from minisgl.core.layout import Records as Records


# Rows of a GEMM tile on a GPU. Half a tile takes as long as a whole one, so steps with prompts have whole tiles.
TILE_TOKENS: Final = 128
DRAFT_CONTEXT: Final = 128  # tokens of K/V of each row in the steps that `StepCosts` times for drafts


class FinishReason(enum.StrEnum):
    """Why a request ended. The first two values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True)
class BatchPlan:
    """One step as host integers; packs into one int32 buffer. `minisgl.core.layout` has the records and flags.

    sequences          SEQUENCE [B]    the sequences of the step
    tokens             int32 [T]       input tokens of the sequences without FROM_DEVICE, in sequence order
    page_writes        PAGE_WRITE [P]  page-table entries to write first
    row_states         ROW_STATE [R]   fields of newly filled rows
    penalties          int32 [A]       penalty records of newly filled rows, concatenated
    masks              int32 [M, W]    the tokens that MASKED sequences may sample, in their order: bit i of word w is
                                       token 32 w + i; empty if the masks come later (`StepOutput.sample`)
    prompt_logprob_ids int32 [N]       the token after each token of the sequences with PROMPT_LOGPROBS, in order, but
                                       not after tokens whose logits are sampled
    histories          int32 [H]       history records of rows that begin to draft, concatenated
    proposals          PROPOSAL [D]    drafts from the host
    moves              MOVE [N]        units to copy to and from tiers, in this order, before anything else
    restores           COPY [K]        STATE to copy from snapshots to rows, after earlier steps and before this one; a
                                       row's first sequence may be in a later plan
    captures           COPY [C]        STATE to copy from rows to snapshots within the step, when the row's chunk has
                                       come to `position`
    folds              FOLD [F]        slots whose state moves on, after earlier steps and before the restores
    adapters           int32 [L]       records that load adapters for steps of later plans, concatenated
    """

    step: int
    sequences: Records
    tokens: Ints = field(default_factory=lambda: NO_INTS)
    page_writes: Records = field(default_factory=lambda: NO_PAGE_WRITES)
    row_states: Records = field(default_factory=lambda: NO_ROW_STATES)
    penalties: Ints = field(default_factory=lambda: NO_INTS)
    masks: Ints = field(default_factory=lambda: NO_MASKS)
    prompt_logprob_ids: Ints = field(default_factory=lambda: NO_INTS)
    histories: Ints = field(default_factory=lambda: NO_INTS)
    proposals: Records = field(default_factory=lambda: NO_PROPOSALS)
    moves: Records = field(default_factory=lambda: NO_MOVES)
    restores: Records = field(default_factory=lambda: NO_COPIES)
    captures: Records = field(default_factory=lambda: NO_COPIES)
    folds: Records = field(default_factory=lambda: NO_FOLDS)
    adapters: Ints = field(default_factory=lambda: NO_INTS)

    @cached_property
    def has_drafts(self) -> bool:
        """Whether a sequence has DRAFTS; the result of such a sequence has several columns."""
        return bool((self.sequences["flags"] & Flag.DRAFTS).any())

    @cached_property
    def has_adapters(self) -> bool:
        """Whether a sequence has an adapter."""
        return bool((self.sequences["flags"] & Flag.ADAPTED).any())

    @cached_property
    def widths(self) -> Ints:
        """The number of tokens that each sampling sequence samples: 1 without DRAFTS."""
        sequences = self.sequences[(self.sequences["flags"] & Flag.SAMPLES) != 0]
        return np.where((sequences["flags"] & Flag.DRAFTS) != 0, sequences["stop"] - sequences["start"], 1).astype(
            np.int32
        )

    @cached_property
    def sampled_flags(self) -> Ints:
        """The flags [S] of each sampled token, in sequence order."""
        flags: Ints = self.sequences["flags"]
        sampled: Ints = flags[(flags & Flag.SAMPLES) != 0]
        return np.repeat(sampled, self.widths) if self.has_drafts else sampled

    @property
    def awaits_masks(self) -> bool:
        """Whether sampling must wait for masks that the plan does not have."""
        return not len(self.masks) and bool((self.sampled_flags & Flag.MASKED).any())

    def pack(self) -> Ints:
        """Return the plan as one buffer: a PLAN_HEAD, then PLAN_ARRAYS."""
        head = np.zeros(1, PLAN_HEAD)
        head["step"], head["mask_words"] = self.step, self.masks.shape[1]
        arrays = []
        for name, _ in PLAN_ARRAYS:
            array = getattr(self, name)
            head[name] = len(array)
            arrays.append(array.reshape(-1).view(WORD))
        return np.concatenate([head.view(WORD), *arrays])

    @staticmethod
    def unpack(buffer: Ints) -> BatchPlan:
        """Return the plan that was packed into `buffer`. Its arrays are views of the buffer."""
        offset = words(PLAN_HEAD)
        head = buffer[:offset].view(PLAN_HEAD)[0]
        mask_words = int(head["mask_words"])
        arrays: dict[str, Any] = {}
        for name, dtype in PLAN_ARRAYS:
            size = int(head[name]) * (mask_words if name == "masks" else words(dtype))
            arrays[name] = buffer[offset : offset + size].view(dtype)
            offset += size
        assert offset == len(buffer), f"plan of {len(buffer)} words, expected {offset}"
        arrays["masks"] = arrays["masks"].reshape(int(head["masks"]), mask_words)
        return BatchPlan(int(head["step"]), **arrays)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step, as int32 arrays on the host.

    tokens      [S]             the sampled tokens, in sequence order
    finite      [S]             1 if the logits were finite
    logprobs    [WIDTH, S + N]  for the sampled tokens, then for the plan's `prompt_logprob_ids`: the token's
                                log-probability (float bits; undefined unless requested), then the ids of the TOP most
                                likely tokens, then their log-probabilities (float bits). None if the plan requests none
    embeddings  [H, S]          of an embedding model: the pooled hidden states (float bits). Then tokens are undefined,
                                and `finite` is about the embeddings. None for other models
    confirmed   [S]             1 if all drafts before were accepted, so that the token belongs to the answer; None if
                                no sequence has DRAFTS
    ready       [S]             in a sequence's first column: its number of drafts for the next step; None likewise
    """

    tokens: Ints
    finite: Ints
    logprobs: Ints | None = None
    embeddings: Ints | None = None
    confirmed: Ints | None = None
    ready: Ints | None = None

    TOP: ClassVar[int] = MAX_LOGPROBS
    WIDTH: ClassVar[int] = 1 + 2 * TOP

    def embedding(self, column: int) -> bytes:
        """Return the embedding of the sequence that samples in `column`, float32 bytes [H]; b"" for other models."""
        return b"" if self.embeddings is None else self.embeddings[:, column].tobytes()


Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Predicts the time of a step in seconds, with coefficients that the engine measures at the start."""

    base: float  # per step
    per_token: float  # per computed token, of prompts or decoding requests
    per_context: float = 0.0  # per token of K/V that decoding requests read
    per_pair: float = 0.0  # per pair of a prompt token and a token that it attends to
    # If steps with drafts are timed: (rows, seconds) of steps that only decode, and for each of these numbers of rows
    # (tokens, seconds) with drafts. If a model makes the drafts, `proposed` are the times with drafts from the host.
    plain: Points = ()
    drafted: tuple[Points, ...] = ()
    proposed: tuple[Points, ...] = ()

    def decode_seconds(self, num_rows: int, context: int) -> float:
        """Return the seconds of a step in which `num_rows` requests decode, with `context` tokens of K/V in total."""
        return self.base + self.per_token * num_rows + self.per_context * context

    def draft_seconds(
        self, num_rows: int, drafts: npt.NDArray[np.intp], *, are_proposed: bool = False
    ) -> npt.NDArray[np.float64]:
        """Return the seconds [N] of steps in which `num_rows` requests decode with `drafts` [N] in total.

        `are_proposed` means that the drafts are from the host. `draft_context_seconds` are not included.
        """
        if not self.drafted:
            return np.asarray(self.decode_seconds(num_rows, 0) + self.per_token * drafts)
        width = 1 + drafts / num_rows
        curves = self.proposed if are_proposed and self.proposed else self.drafted
        timed = []
        for (rows, plain), curve in zip(self.plain, curves, strict=True):
            tokens, seconds = np.array(curve).T
            found = np.interp(rows * width, tokens, seconds) + self.per_token * np.maximum(0, rows * width - tokens[-1])
            timed.append(np.where(drafts > 0, np.maximum(plain, found), plain))
        counts = [rows for rows, _ in self.plain]
        index = float(np.interp(num_rows, counts, range(len(counts))))
        below, above = timed[int(index)], timed[math.ceil(index)]
        extra = self.per_token * width * max(0, num_rows - counts[-1])
        return np.asarray(below + index % 1 * (above - below) + extra)

    def draft_context_seconds(self, num_rows: int, context: int) -> float:
        """Seconds that `context` tokens of K/V in all add to `draft_seconds`; the timed steps have some."""
        return self.per_context * max(0, context - num_rows * DRAFT_CONTEXT * bool(self.drafted))

    def chunk_seconds(self, start: int, count: int) -> float:
        """Seconds that `count` tokens of a prompt, from position `start` on, add to a step."""
        return self.per_token * count + self.per_pair * count * (start + count / 2)

    def chunk_tokens(self, start: int, seconds: float, limit: int) -> int:
        """Return the largest chunk from position `start` on, of at most `limit` tokens, that takes at most `seconds`.

        This is the larger root of pair/2 n^2 + (token + pair start) n = seconds, in a form that is exact for pair = 0.
        """
        seconds = max(seconds, 0.0)
        linear = self.per_token + self.per_pair * start
        root = math.sqrt(linear * linear + 2 * self.per_pair * seconds)
        count = int(min(2 * seconds / (linear + root), limit)) if linear + root > 0 else limit
        return count - (self.chunk_seconds(start, count) > seconds)  # rounding may have added one


@dataclass(frozen=True, slots=True)
class StepShape:
    """The size of a step, as upper bounds that a kernel may rely on; a captured step keeps them, whatever it runs.

    Sequences that decode come first, and any other with one token; then chunks of prompts.
    """

    decodes: int
    queries: int  # tokens of each of these
    chunks: int = 0
    chunk_tokens: int = 0  # of all chunks
    context: int = 0  # tokens of K/V of a chunk


@dataclass(frozen=True, slots=True)
class SeqLayout:
    """B sequences with T tokens in all, grouped by sequence; on the device."""

    rows: torch.Tensor  # [B] int32, row of each sequence
    kv_lens: torch.Tensor  # [B] int32, tokens in the cache once the step's tokens are stored
    cu_query_lens: torch.Tensor  # [B + 1] int32, offsets of each sequence's tokens


@dataclass(frozen=True, slots=True)
class Sampling:
    """The S tokens that a step samples, as device tensors. A sequence with DRAFTS samples several, in order."""

    rows: torch.Tensor  # [S] int64, row of each
    positions: torch.Tensor  # [S] int32, position that the sampled token will have
    row_flags: torch.Tensor  # [S] int32, `Flag`s of each
    mask_index: torch.Tensor  # [S] int32, index into the step's masks; undefined if the sequence is not MASKED
    flags: int  # the union of all flags; in a captured step, of all that are allowed
    drafted: torch.Tensor | None = None  # [S] int32, in a step with DRAFTS: drafts before each, see `DraftColumns`
    inputs: torch.Tensor | None = None  # [S] int32, likewise: the token before each


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The N prompt tokens whose log-probabilities a step computes, and the hidden states that they need.

    The model keeps the hidden states of `kept` [K] int64, ascending indices into T. Among these, `sampled_at` [S] int64
    are sampled, and `logprobs_at` [N] int64 give the log-probabilities of `token_ids` [N] int32.
    """

    kept: torch.Tensor
    sampled_at: torch.Tensor
    logprobs_at: torch.Tensor
    token_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class DraftColumns:
    """The D sequences of a step that have DRAFTS, and their columns of the result."""

    draft_index: torch.Tensor  # [T] int32: 0 for the newest token of a row that drafts, i for draft i; or NOT_DRAFTED
    rows: torch.Tensor  # [D] int64
    counts: torch.Tensor  # [D] int32, numbers of drafts
    columns: torch.Tensor  # [D, 1 + max drafts] int64, indices into S; those of sequences with fewer repeat their last
    longest: int  # the largest possible length of a row after this step


@dataclass(frozen=True, slots=True)
class Batch:
    """One step as device tensors, derived only from a `BatchPlan`."""

    shape: StepShape
    sequences: Records  # SEQUENCE [B] as in the plan, for kernels that plan on the host; empty in a captured step
    layout: SeqLayout
    input_ids: torch.Tensor  # [T] int32; NEWEST where only the device knows the token, a draft or the row's newest
    positions: torch.Tensor  # [T] int32
    token_rows: torch.Tensor  # [T] int32, row of each token
    logit_tokens: torch.Tensor  # [S] int64, indices into T whose logits are sampled
    sampling: Sampling
    page_writes: torch.Tensor  # [P, 4] int32, columns of PAGE_WRITE
    row_states: torch.Tensor  # [R, words of ROW_STATE] int32
    prompt_logprobs: PromptLogprobs | None = None
    drafts: DraftColumns | None = None
    has_adapters: bool = False  # whether a sequence has one; in a captured step, may have one
    captures: torch.Tensor | None = None  # [N, 3] int32, in models with recurrent state: row, position, target slot

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class Context:
    """What a forward pass needs besides its inputs. It is an argument, never a global.

    `mixers` has what each of the model's mixers has prepared. The model stores the outputs [T, H] of the layers that
    are keys of `taps`; those of the last layer are normalised. `adapters` are as in `layers.linear.Stream`.
    """

    batch: Batch
    mixers: tuple[Any, ...]
    taps: dict[int, Any] = field(default_factory=dict)
    adapters: Any = None
