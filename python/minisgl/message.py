"""The messages between the processes: typed msgpack, a closed table of types for each channel, no torch, no pickle.

    API server --TokenizerMsg--> tokenizer --BackendMsg--> scheduler --DetokenizeMsg--> detokenizer --FrontendMsg--> API

With several replicas of the scheduler, the tokenizers' messages go through the API server, which chooses the replica.
A *life* is one run of a replica's processes; messages carry its number, which is never used again.

A frame on the wire is a *list* of messages of one channel (`process/queues.py: Codec`), so every message has its batch
form. A request and its abort take the same path, so an abort never overtakes its request.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np

from minisgl.core import FinishReason
from minisgl.errors import RequestError
from minisgl.params import SamplingParams

CONTEXT_TOKENS: Final = 16  # of the prompt: enough to decode the text behind them as if behind all of it

if TYPE_CHECKING:
    from minisgl.core import Ints


def ids_to_bytes(ids: Ints | Sequence[int]) -> bytes:
    """Pack token ids as little-endian int32 bytes: 4 bytes a token, no parsing.

    Raises `struct.error` for an item of a list that is not an int32, and `TypeError` for an array that does not hold
    integers. (`struct` packs a list in half the time that numpy takes.)
    """
    if isinstance(ids, np.ndarray):
        return ids.astype("<i4", casting="same_kind", copy=False).tobytes()
    return struct.pack(f"<{len(ids)}i", *ids)


def ids_from_bytes(data: bytes) -> Ints:
    """Read-only int32 view of `ids_to_bytes`' output; raises `ValueError` when the length is not a multiple of 4."""
    return np.frombuffer(data, dtype="<i4")


class Failure(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Why a request failed: the content of a `RequestError`, or status 500 for an error of ours."""

    message: str
    param: str | None = None
    code: str | None = None
    status: int = 500

    @classmethod
    def of(cls, error: RequestError) -> Failure:
        return cls(message=error.message, param=error.param, code=error.code, status=error.status)

    def error(self) -> RequestError:
        """The inverse of `of`."""
        return RequestError(self.message, param=self.param, code=self.code, status=self.status)


# -- the state of the engine as a user sees it, made by the scheduler on request


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """A request in the batch. Its tokens are `prefix_tokens` found in the cache, more of the prompt, and the output."""

    uid: int
    is_prefill: bool  # a part of the prompt is still to be computed
    prompt_tokens: int
    prefix_tokens: int
    computed_tokens: int  # of prompt and output: K/V in the pool or in flight
    output_tokens: int
    accepted_tokens: int  # of the output: drafts that were right, since the request has its row
    pages: int
    node: int  # index of the deepest tree node that the request locks, -1 if that node is not shown


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the radix tree with the edge of one or more pages that leads to the node."""

    parent: int  # index of an earlier node, -1 for the root
    tokens: int
    pages: int
    ref_count: int  # running requests that lock this node or a node below
    idle_steps: int  # steps since the last use
    hidden: int  # children that are not shown
    place: str = "device"  # or the name of the fastest tier that has the pages
    head: bytes = b""  # the first tokens, int32; the detokenizer turns them into `text`; empty without `--view-texts`
    text: str = ""


class StepView(msgspec.Struct, frozen=True):
    """What a step computed, and how long it took."""

    step: int
    ms: float
    rows: int  # that got a token besides those whose prompt was completed
    prompt_tokens: int
    drafted: int
    accepted: int


class TierView(msgspec.Struct, frozen=True, kw_only=True):
    """A tier below the device's pool. `stored`, `loaded` and `lost` are totals since the start."""

    name: str  # host or disk
    pages_total: int
    pages_held: int  # copies of pages of the tree; some of these pages are on the device, too
    stored: int  # pages copied there
    loaded: int  # pages copied back
    lost: int  # pages forgotten because a copy was damaged


class EngineView(msgspec.Struct, tag="view", frozen=True, kw_only=True):
    """The running batch, the pages by owner, and the radix tree as far as it fits. Answers the `ViewMsg` of `uid`.

    Every page is in one of the four counts, so the counts add up to `pages_total`.
    """

    uid: int
    step: int
    page_size: int
    pages_total: int
    pages_free: int  # including fenced pages, which are free when the step in flight is done
    pages_private: int  # owned by one request
    pages_locked: int  # in the tree, used by running requests
    pages_cached: int  # in the tree, unused: evictable
    running: int
    waiting: int
    requests: list[RequestView]  # the oldest, at most `scheduler/stats.py: MAX_VIEW_REQUESTS`
    nodes: list[NodeView]
    nodes_total: int
    nodes_hidden: int  # children of the root that are not shown
    steps: list[StepView] = []  # the last ones, at most `scheduler/stats.py: VIEW_STEPS`, oldest first
    tiers: list[TierView] = []


# -- to the tokenizers and the detokenizer


class TokenizeMsg(msgspec.Struct, tag="tokenize", frozen=True, kw_only=True, omit_defaults=True):
    """A validated request on its way to the engine. Exactly one of `text`, `messages`, `input_ids` is set.

    `shortens`: an answer of `max_tokens` may be more than the context has left. Without it, such a request is refused.
    `place`: its number among the prompts and choices of one HTTP request, which wait longer the higher it is.
    """

    uid: int
    place: int = 0
    sampling_params: SamplingParams
    text: str | None = None
    messages: list[dict[str, Any]] | None = None  # for the chat template
    input_ids: bytes | None = None  # int32
    add_special_tokens: bool = True  # to `text`, as the tokenizer does by default
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, str | int | float | bool | None] = {}
    shortens: bool = False


class EncodeMsg(msgspec.Struct, tag="encode", frozen=True, kw_only=True):
    """Tokenize the text or messages of `prompt` without generating. Answered by a `ConversionReply`."""

    uid: int
    prompt: TokenizeMsg
    add_special_tokens: bool | None = None  # None: as for a request, yes for a text and no for a chat template


class DecodeMsg(msgspec.Struct, tag="decode", frozen=True, kw_only=True):
    """Turn `input_ids` (int32 bytes) into text. Answered by a `ConversionReply`."""

    uid: int
    input_ids: bytes
    skip_special_tokens: bool = False


class AbortMsg(msgspec.Struct, tag="abort", frozen=True):
    """Stop working on `uid`: the client is gone, or a stop string was found.

    The tokenizer passes this on to the scheduler, which ignores an unknown uid: the request has ended already.
    """

    uid: int


class LogprobColumns(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The log-probabilities of some tokens [K] of request `uid`, each with the `top` likeliest alternatives.

    `logprobs` are float32 bytes [K]; `top_ids` int32 and `top_logprobs` float32 bytes [K, top], likeliest first.
    """

    uid: int
    top: int
    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes


class Started(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The facts about a request that the detokenizer needs before the first token.

    `queue_seconds` is the time from acceptance to the first step that computes a part of the prompt, `prefill_chunks`
    the number of such parts. `prompt_ids` (int32 bytes) is the prompt if its text (`echo`) or its log-probabilities are
    wanted, else its last CONTEXT_TOKENS, behind which the text goes on; `prompt_logprobs` are those of the prompt's
    tokens except the first. `embedding` (float32 bytes) is the result of an embedding model.
    """

    uid: int
    prompt_tokens: int
    cached_tokens: int
    sampling_params: SamplingParams
    queue_seconds: float = 0.0
    prefill_chunks: int = 0
    prompt_ids: bytes = b""
    prompt_logprobs: LogprobColumns | None = None
    embedding: bytes = b""


class Finished(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The end of a request. `has_text` is false when the last token must not be shown (an EOS or stop token)."""

    uid: int
    reason: FinishReason
    has_text: bool = True
    stop_reason: str | int | None = None  # the stop string or stop token id that ended the request
    failure: Failure | None = None  # the error that ended the request


class DetokenizeMsg(msgspec.Struct, tag="detokenize", frozen=True, kw_only=True):
    """The results of one step, packed.

    `uids` (int64) and `tokens` (int32) are parallel arrays: one new token for each request in the step. `started` holds
    the requests whose first token is among `tokens`. `finished` holds the requests that end with this step; a request
    that ends without a new token (abort, error) is only in `finished`. `logprobs` are the log-probabilities that were
    asked for. `drafted` holds (uid, number of drafts) of the requests that drafted in the step. A step with right
    drafts has several messages, in which `are_drafts` is true from the second on. `life` is that of the sender.
    """

    uids: bytes
    tokens: bytes
    started: list[Started]
    finished: list[Finished]
    logprobs: list[LogprobColumns] = []
    drafted: list[tuple[int, int]] = []
    are_drafts: bool = False
    life: int = 0


class LostMsg(msgspec.Struct, tag="lost", frozen=True):
    """The replica's `life` is over. The detokenizer drops what may still arrive from it, and sends this message back.

    Behind the answer no reply comes from that life, so its open requests can go on elsewhere.
    """

    life: int


TokenizerMsg = TokenizeMsg | EncodeMsg | DecodeMsg | AbortMsg | DetokenizeMsg | EngineView | LostMsg


# -- to the scheduler


class UserMsg(msgspec.Struct, tag="user", frozen=True, kw_only=True, omit_defaults=True):
    """A tokenized request; `input_ids` are int32 bytes.

    `output_ids` (int32 bytes) are the tokens that another replica has generated for it: the request goes on behind
    them. None: the request is new.
    """

    uid: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    input_ids: bytes
    sampling_params: SamplingParams
    place: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0  # as of `TokenizeMsg`
    output_ids: bytes | None = None


class FlushCacheMsg(msgspec.Struct, tag="flush", frozen=True):
    """Drop every cached prefix that no running request locks."""


class TellPrefixesMsg(msgspec.Struct, tag="tell", frozen=True):
    """Ask for a `PrefixesMsg` with all that is cached, and for the changes from then on."""


class ViewMsg(msgspec.Struct, tag="view", frozen=True):
    """Ask for an `EngineView`, which carries the same `uid`."""

    uid: int


class ExitMsg(msgspec.Struct, tag="exit", frozen=True):
    """Leave the loop; requests that are still running end with an error reply."""


BackendMsg = UserMsg | AbortMsg | FlushCacheMsg | TellPrefixesMsg | ViewMsg | ExitMsg


# -- to the API server


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A token and its log-probability before temperature, penalties and filters.

    `data` are the token's bytes (perhaps half a character), `offset` is its position in the text in characters.
    `logprob` is None for the first token of a prompt. `top` holds (id, bytes, logprob) of the likeliest tokens,
    likeliest first.
    """

    id: int
    data: bytes
    logprob: float | None
    offset: int
    top: list[tuple[int, bytes, float]]


class UserReply(msgspec.Struct, tag="reply", frozen=True, kw_only=True, omit_defaults=True):
    """An increment of one request's text. Exactly one reply per uid has `finish_reason` set: the last one.

    `text` is the new text only and may be empty (half a character, a possible stop string); `completion_tokens` counts
    all tokens so far. `stop_reason` is the stop string or stop token id that ended the request, `failure` the error
    that did. Only the reply to the first token has `queue_seconds` and `prefill_chunks`, see `Started`. `logprobs` are
    those of the new tokens, if asked for; the first reply begins with the prompt's text if `echo` was asked for, and
    with its tokens if their `logprobs` were. `output_ids` (int32 bytes) are the new tokens including hidden ones, as
    many as `completion_tokens` counts. `embedding` (float32 bytes) is in the only reply to a request for an embedding.
    `drafted_tokens` counts all drafts so far, `accepted_tokens` those of them that are tokens of the answer.
    """

    uid: int
    text: str = ""
    completion_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    failure: Failure | None = None
    queue_seconds: float = 0.0
    prefill_chunks: int = 0
    logprobs: list[TokenLogprob] = []
    output_ids: bytes = b""
    embedding: bytes = b""
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class ConversionReply(msgspec.Struct, tag="conversion", frozen=True, kw_only=True, omit_defaults=True):
    """The answer to an `EncodeMsg` (`input_ids`, int32 bytes) or a `DecodeMsg` (`text`), or the `failure`."""

    uid: int
    input_ids: bytes = b""
    text: str = ""
    failure: Failure | None = None


class StatsMsg(msgspec.Struct, tag="stats", frozen=True, kw_only=True):
    """The scheduler's heartbeat, about twice a second, also when idle. Token counts are totals since the start."""

    life: int = 0
    step: int = 0
    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_free: int = 0
    pages_evictable: int = 0
    pages_held: int = 0
    page_size: int = 1
    prompt_tokens: int = 0
    computed_prompt_tokens: int = 0
    looked_up_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    preemptions: int = 0
    dropped: int = 0  # messages that contradict themselves or earlier ones
    tiers: list[TierView] = []


class PrefixesMsg(msgspec.Struct, tag="prefixes", frozen=True, kw_only=True):
    """Where a scheduler's cache has prefixes of whole pages, as changes since its last message.

    `hashes` are uint64 bytes (`routing/prefixes.py`), `places` a byte for each: 0 for the device, more for a tier, -1
    for none. `costs`: of a page in each place, in pages to compute; 0 on the device, as far as a tier's is loaded.
    """

    page_size: int
    costs: list[float]
    hashes: bytes
    places: bytes
    life: int = 0


class DetokenizerStatsMsg(msgspec.Struct, tag="detokenizer", frozen=True):
    """By how much the counts of a detokenizer or tokenizer have changed: tracked requests, and dropped messages."""

    entries: int
    dropped: int = 0


FrontendMsg = UserReply | ConversionReply | EngineView | StatsMsg | PrefixesMsg | LostMsg | DetokenizerStatsMsg
