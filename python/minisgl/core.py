"""The data that everything else passes around; no behaviour beyond derived properties, no torch at run time.

Data flows down and results flow up: each hop makes a new frozen value. Only `Req` mutates, and only `scheduler/`
writes it.

    Req              one request while it lives in the scheduler (host)
    BatchPlan        one step as host integers: what is uploaded and what other ranks replay
    Batch            the same step as tensors on the device
    Context          what a forward pass needs besides its inputs
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from minisgl.params import SamplingParams

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    Ints = npt.NDArray[np.int32]


class FinishReason(enum.StrEnum):
    """Why a request ended; the first two are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Status(enum.Enum):
    """Where a request stands. RETRACTING and FINISHED requests are waiting for their last batch in flight."""

    WAITING = 0
    RUNNING = 1
    RETRACTING = 2
    FINISHED = 3


class Req:
    """One request inside the scheduler. Only `scheduler/` writes to it.

    Two kinds of length: *confirmed* (`host_ids`, grown when a batch is collected) and *planned* (`cached_len`,
    `device_len`, advanced when a batch is planned). With overlap the planned ones run ahead by the batches in flight.

    Invariants: 0 <= cached_len <= device_len <= max_device_len; len(host_ids) <= device_len; row and pages are held
    exactly while `table_idx` is not None.
    """

    __slots__ = (
        "_ids",
        "_len",
        "cache_handle",
        "cached_len",
        "device_len",
        "finish_reason",
        "in_flight",
        "is_released",
        "max_device_len",
        "noise_key",
        "order",
        "pages",
        "prefix_hit",
        "prompt_len",
        "sampling_params",
        "sound_len",
        "started",
        "status",
        "table_idx",
        "uid",
    )

    def __init__(
        self, uid: int, input_ids: Ints, sampling_params: SamplingParams, max_tokens: int, order: int, noise_key: int
    ) -> None:
        n = len(input_ids)
        self.uid = uid
        self.order = order  # arrival number: the tie-breaker of every policy
        self.sampling_params = sampling_params
        self.prompt_len = n
        self.max_device_len = n + max_tokens
        self.cached_len = 0  # tokens whose K/V is planned to be in the cache
        self.device_len = n  # tokens of the sequence, counting those being sampled
        self.table_idx: int | None = None
        self.pages: list[int] = []  # page ids by position, those shared with the prefix cache first
        self.cache_handle: Any = None  # the lock on the shared prefix
        self.in_flight = 0  # launched batches that hold this request
        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.noise_key = noise_key  # 64 bits; the sampling noise is a function of (noise_key, position)
        self.prefix_hit = 0  # prompt tokens found in the cache at first admission
        self.sound_len = 0  # tokens whose K/V is in this request's pages and has led to finite logits
        self.started = False  # the first token has been reported
        self.is_released = False  # row and pages are given back for good
        self._ids = np.empty(min(self.max_device_len, n + 256), np.int32)
        self._ids[:n] = input_ids
        self._len = n

    @property
    def host_ids(self) -> Ints:
        """Confirmed tokens, prompt first: a read-only view, int32 [len]."""
        return self._ids[: self._len]

    def append_host(self, token: int) -> None:
        """Confirm one sampled token."""
        if self._len == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
        self._ids[self._len] = token
        self._len += 1

    @property
    def confirmed_len(self) -> int:
        return self._len

    @property
    def extend_len(self) -> int:
        """Tokens still to be computed before the next one can be sampled (1 in steady decode)."""
        return self.device_len - self.cached_len

    @property
    def remain_len(self) -> int:
        """Tokens that may still be planned."""
        return self.max_device_len - self.device_len

    @property
    def can_decode(self) -> bool:
        """Whether another token may be planned for this running request."""
        return self.status is Status.RUNNING and self.device_len < self.max_device_len

    def __repr__(self) -> str:
        return (
            f"Req(uid={self.uid}, {self.status.name}, row={self.table_idx}, cached={self.cached_len}, "
            f"device={self.device_len}/{self.max_device_len}, confirmed={self._len}, in_flight={self.in_flight})"
        )


@dataclass(frozen=True, slots=True)
class SeqSlot:
    """One request's share of a step: positions [start, stop) of the request in `row`.

    `samples` says whether the logits of position stop-1 choose the next token (false for all but the last chunk of a
    prompt). `from_device` says that the single input token is the newest one of the row, known to the device only.
    """

    req: Req
    row: int
    start: int
    stop: int
    samples: bool
    from_device: bool


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """One step as host integers (int32 arrays); packs into one buffer, see `pack`.

    slots      [B, 4]  row, start, stop, flags (see below)
    tokens     [T]     input tokens of the slots without `from_device`, in slot order
    pages      [P, 3]  page-table writes to apply first: row, index in the row, page id
    rows       [R, 7]  sampling state of newly filled rows: row, temperature (float bits), top_k, top_p (float bits),
                       min_p (float bits), noise key low and high 32 bits
    adjusts    [A]     penalties and biases of newly filled rows, records of `scheduler/plan.py: adjust_record`
    """

    step: int
    slots: Ints
    tokens: Ints
    pages: Ints
    rows: Ints
    adjusts: Ints

    SAMPLES: ClassVar[int] = 1  # the logits of the last position choose a token
    FROM_DEVICE: ClassVar[int] = 2  # the one input token is the row's newest, known to the device
    ADJUSTED: ClassVar[int] = 4  # the logits are changed before that (an `adjusts` record came with the row)
    FILTERED: ClassVar[int] = 8  # top-k, top-p or min-p leave out some tokens
    ROW_WIDTH: ClassVar[int] = 7

    def pack(self) -> Ints:
        """One int32 buffer: step, then the five lengths, then the arrays."""
        parts = (self.slots, self.tokens, self.pages, self.rows, self.adjusts)
        head = np.array([self.step, *(len(p) for p in parts)], np.int32)
        return np.concatenate([head, *(p.reshape(-1) for p in parts)])

    @staticmethod
    def unpack(buffer: Ints) -> BatchPlan:
        """The inverse of `pack`; the arrays are views of `buffer`."""
        step, b, t, p, r, a = (int(x) for x in buffer[:6])
        width = BatchPlan.ROW_WIDTH
        cuts = np.cumsum([6, b * 4, t, p * 3, r * width, a])
        assert cuts[-1] == len(buffer), f"plan of {len(buffer)} ints, expected {cuts[-1]}"
        parts = [buffer[lo:hi] for lo, hi in pairwise(cuts)]
        slots, tokens, pages, rows, adjusts = parts
        return BatchPlan(step, slots.reshape(b, 4), tokens, pages.reshape(p, 3), rows.reshape(r, width), adjusts)


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
class Batch:
    """One step as device tensors; derived from a `BatchPlan` alone, so it may be made ahead of its turn."""

    step: int
    layout: SeqLayout
    input_ids: torch.Tensor  # [T] int32; 0 where the token comes from the device
    positions: torch.Tensor  # [T] int32
    token_rows: torch.Tensor  # [T] int32, row of each token
    device_tokens: torch.Tensor  # [D] int64, indices into T whose id is the row's newest token
    logit_tokens: torch.Tensor  # [S] int64, indices into T whose logits are sampled
    sample_rows: torch.Tensor  # [S] int64, rows of the sampled sequences
    sample_positions: torch.Tensor  # [S] int32, position that the sampled token will have
    page_writes: torch.Tensor  # [P, 3] int64
    row_writes: torch.Tensor  # [R, 7] int32
    adjusts: Ints  # the plan's records, on the host
    adjusted: torch.Tensor  # [A] int64, indices into S whose logits are adjusted
    is_filtered: bool  # some sampled row asks for top-k, top-p or min-p

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
