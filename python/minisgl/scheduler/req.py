"""One request while it lives in the scheduler, and its admission to the queue."""

from __future__ import annotations

import enum
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from minisgl.core.errors import RequestError
from minisgl.core.message import UserMsg, ids_from_bytes
from minisgl.core.params import validate_prompt, validate_sampling

if TYPE_CHECKING:
    from collections.abc import Callable

    from minisgl.core.params import Limits, SamplingParams
    from minisgl.core.plan import Ints
    from minisgl.grammar.compiler import TokenMatcher
    from minisgl.grammar.thinking import ThinkingMatcher
    from minisgl.kvcache.snapshots import Reason, Snapshot
    from minisgl.settings.options import SchedulerConfig


Rank = tuple[int, int]


class Status(enum.Enum):
    """The state of a request. COMPILING: its grammar or adapter is not ready, so it is in no queue yet. PREEMPTED and
    FINISHED requests wait until no batch in flight holds them."""

    COMPILING = -1
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


class Req:
    """One request inside the scheduler; no other package sees it.

    These fields stay the same while the request decodes. What changes with every step is in the arrays of
    `scheduler/rows.py`, at index `row`, while the request holds a row. `ids` are the tokens to compute on admission:
    the prompt and, after a preemption, the tokens generated before.

    Invariant: row, pages and the lock on the prefix cache are held together, exactly while `table_idx` is not None.
    """

    def __init__(
        self,
        uid: int,
        input_ids: Ints,
        sampling_params: SamplingParams,
        max_tokens: int,
        order: int,
        noise_key: int,
        child_index: int = 0,
        system_tokens: int = 0,
        level: int = 0,
    ) -> None:
        self.uid = uid
        self.order = order  # arrival number: the tie-breaker of every policy
        self.new_tokens = 0  # of the prompt on arrival, without those in the prefix cache; see `scheduler/prefill.py`
        self.child_index = child_index  # among the prompts and choices of one client's request
        self.deadline = 0  # in prompt tokens admitted since the start
        self.rank = level, sampling_params.priority  # of the client's class and of the request; lower goes first
        self.patience = 0  # tokens that may still be admitted while it waits, until it goes before all ranks
        self.overdue_at = 0  # the same as a deadline, while it waits
        self.sampling_params = sampling_params
        self.prompt_len = len(input_ids)
        self.max_len = len(input_ids) + max_tokens
        self.noise_key = noise_key  # 64 bits; the sampling noise is a function of (noise_key, position)
        self.ids = input_ids
        self.status = Status.WAITING
        self.accepted_at = time.monotonic()
        self.queue_seconds = 0.0  # from acceptance to the first step that computes a part of the prompt
        self.prefill_chunks = 0  # steps that computed a part of the prompt
        self.prefix_hit = 0  # prompt tokens found in the cache on admission
        self.table_idx: int | None = None
        self.pages: list[int] = []  # page ids by position, those shared with the prefix cache first
        self.cache_handle: Any = None  # the lock on the shared prefix
        self.system_tokens = system_tokens  # of the prompt: others may begin with them
        self.capture_at: dict[int, Reason] = {}  # numbers of tokens to capture, and why
        self.captures: list[tuple[int, Snapshot]] = []  # those that were made, until the result is finite
        self.target: Any = None  # the lock on all of the prefix that is loaded, in a model with bounded state
        self.is_loading = False  # a part of its cached prefix is still to be loaded from a tier
        self.adapter_slot = 0  # of the device's memory, while the request has a row; 0 without an adapter
        # What masks are made from; None without a grammar and a limit of the reasoning. While the request is masked, it
        # has advanced over all confirmed tokens.
        self.matcher: TokenMatcher | ThinkingMatcher | None = None
        self.is_masked = False  # its next steps are
        # Log-probabilities of the prompt so far, columns of the step results; None once sent, or if not asked for.
        self.prompt_logprobs: list[Ints] | None = [] if sampling_params.wants_prompt_logprobs else None

    @property
    def queue_tokens(self) -> int:
        """The length that orders the queue: k times the tokens of the k-th prompt or choice of an HTTP request."""
        return self.new_tokens * (1 + self.child_index)

    @property
    def row(self) -> int:
        """The row that this request holds; there must be one."""
        assert self.table_idx is not None, f"the request has no row: {self}"
        return self.table_idx

    def note_chunk(self, now: float) -> None:
        """Record that the step planned `now` (monotonic clock, seconds) computes a part of the prompt."""
        if self.prefill_chunks == 0:
            self.queue_seconds = now - self.accepted_at
        self.prefill_chunks += 1

    def append_sampled(self, tokens: Ints | int) -> None:
        """Append sampled tokens to `ids`: one, or int32 [n]."""
        self.ids = np.append(self.ids, tokens).astype(np.int32)

    def __repr__(self) -> str:
        return (
            f"Req(uid={self.uid}, {self.status.name}, row={self.table_idx}, {len(self.pages)} pages, "
            f"{len(self.ids)} of {self.max_len} tokens at admission)"
        )


class Admission:
    """Turns messages into requests, in order of arrival, or refuses them.

    Sampling parameters and prompts were validated before, and are again, since the engine must never see others
    (`core/params.py`). Two limits are known here only: the queue's, and `pool_tokens`, the capacity of the whole KV
    pool, which a single request must not exceed.
    """

    def __init__(self, config: SchedulerConfig, limits: Limits, pool_tokens: int) -> None:
        self.max_queued = config.max_queued_requests
        self._max_queued_tokens = config.max_queued_tokens
        self._sampling_seed = config.sampling_seed
        self._limits = limits
        # Of a request, prompt and output together. The last token needs no K/V.
        self.max_tokens = min(limits.max_model_len, pool_tokens + 1)
        self._arrivals = 0

    def output_budget(self, prompt_len: int, params: SamplingParams) -> int:
        """Return how many tokens a request may generate: what it asks for, at most what context and KV pool have left.

        Raises `RequestError` if that is nothing.
        """
        if prompt_len >= self.max_tokens:
            raise RequestError(
                f"the prompt is too long: it has {prompt_len} tokens, and the KV cache holds {self.max_tokens} with "
                "the answer",
                param="prompt",
                code="context_length_exceeded",
            )
        rest = self.max_tokens - prompt_len
        # A request for no tokens generates one and does not show it.
        return rest if params.max_tokens is None else min(rest, params.max_tokens or 1)

    def admit(self, msg: UserMsg, num_queued: int, is_full: Callable[[int, int, Rank], bool]) -> Req:
        """Make the request that `msg` asks for.

        `is_full(queue_tokens, limit, rank)`: whether such a request would wait for more than `limit` prompt tokens.
        Raises `RequestError` if it is invalid, can never fit, or the queue is full, and `ValueError` for half a token
        or for more output than it may have.
        """
        prompt, limit = ids_from_bytes(msg.input_ids), self._max_queued_tokens
        is_new = msg.output_ids is None  # else another replica has accepted it
        validate_sampling(msg.sampling_params, self._limits)
        validate_prompt(prompt, self._limits)
        max_tokens = self.output_budget(len(prompt), msg.sampling_params)
        rank = msg.level, msg.sampling_params.priority
        if is_new and is_full(len(prompt) * (1 + msg.child_index), limit, rank):
            message = f"more than {limit} prompt tokens are waiting before this request; try again later"
            raise RequestError(message, code="queue_full", status=429)
        if is_new and num_queued >= self.max_queued:
            raise RequestError(
                f"{self.max_queued} requests are waiting already; try again later", code="queue_full", status=429
            )
        self._arrivals += 1
        key = noise_key(msg.sampling_params.seed, self._sampling_seed, msg.uid)
        req = Req(
            *(msg.uid, prompt, msg.sampling_params, max_tokens, self._arrivals, key),
            *(msg.child_index, msg.system_tokens, msg.level),
        )
        if msg.output_ids:  # as after a preemption
            req.append_sampled(ids_from_bytes(msg.output_ids))
            if len(req.ids) >= req.max_len or not 0 <= req.ids.min() <= req.ids.max() < self._limits.vocab_size:
                raise ValueError(f"request {msg.uid} cannot go on after {len(req.ids) - req.prompt_len} tokens")
            req.prompt_logprobs = None
        return req


def noise_key(seed: int | None, base_seed: int, uid: int) -> int:
    """The 64-bit key of a request's sampling noise: a function of its own seed if it has one, else of (base_seed, uid).

    splitmix64's finalizer (Steele, Lea & Flood, OOPSLA 2014) spreads neighbouring seeds.
    """
    mask = 2**64 - 1

    def mix(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    key = mix(seed & mask) if seed is not None else mix(mix(base_seed & mask) ^ (uid & mask))
    return key - 2**64 if key >= 2**63 else key
