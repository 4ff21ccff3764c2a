"""The messages between processes: typed msgpack, with a closed set of types per channel. No torch, no pickle.

    API server --TokenizerMsg--> tokenizer --BackendMsg--> scheduler --DetokenizeMsg--> detokenizer --FrontendMsg--> API

With several replicas of the scheduler, the tokenizers' messages go through the API server, which chooses the replica.
An *incarnation* is one run of a replica's processes; its number is in messages and is never used again.

A frame on the wire is a *list* of messages of one channel (`process/queues.py: Codec`), so all messages can be batched.
A request and its abort take the same path, so an abort never overtakes its request.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
import numpy as np

from minisgl.core.errors import RequestError
from minisgl.core.params import SamplingParams
from minisgl.core.plan import FinishReason

CONTEXT_TOKENS: Final = 16  # the last tokens of a prompt: enough context to decode the text that follows

if TYPE_CHECKING:
    from minisgl.core.plan import Ints


def ids_to_bytes(ids: Ints | Sequence[int]) -> bytes:
    """Pack token ids as little-endian int32 bytes: 4 bytes a token, no parsing.

    Raises `struct.error` if an item of a list is not an int32, and `TypeError` for an array of other than integers.
    (`struct` packs a list in half the time of numpy.)
    """
    if isinstance(ids, np.ndarray):
        return ids.astype("<i4", casting="same_kind", copy=False).tobytes()
    return struct.pack(f"<{len(ids)}i", *ids)


def ids_from_bytes(data: bytes) -> Ints:
    """Return a read-only int32 view of packed ids. Raises `ValueError` if the length is not a multiple of 4."""
    return np.frombuffer(data, dtype="<i4")


class Failure(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Why a request failed: the content of a `RequestError`, or status 500 for our own error."""

    message: str
    param: str | None = None
    code: str | None = None
    status: int = 500

    @classmethod
    def of(cls, error: RequestError) -> Failure:
        return cls(message=error.message, param=error.param, code=error.code, status=error.status)

    def error(self) -> RequestError:
        """Return the `RequestError` with this content, the inverse of `of`."""
        return RequestError(self.message, param=self.param, code=self.code, status=self.status)


# -- the state of the engine as a user sees it, made by the scheduler on request


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """A running request. Its tokens are `prefix_tokens` from the cache, the rest of the prompt, and the output."""

    uid: int
    is_prefill: bool  # a part of the prompt is not computed yet
    prompt_tokens: int
    prefix_tokens: int
    computed_tokens: int  # of prompt and output: K/V in the pool or in flight
    output_tokens: int
    accepted_tokens: int  # output tokens that were accepted drafts, since the request has its row
    pages: int
    node: int  # index of the deepest tree node that the request locks, -1 if that node is not shown


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the radix tree, with the edge of one or more pages that leads to it."""

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
    rows: int  # that decoded, without those whose prompt was completed
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
    lost: int  # pages dropped because a copy was damaged


class EngineView(msgspec.Struct, tag="view", frozen=True, kw_only=True):
    """The running batch, the pages by owner, and a part of the radix tree: the answer to the `ViewMsg` of `uid`.

    Each page is in one of the four counts, which add up to `pages_total`.
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

    `child_index` counts the prompts and choices of one HTTP request: higher ones wait longer. `level` is the class of
    its client, 0 for the most urgent. `param` is the field that has the prompt, for errors.
    """

    uid: int
    child_index: int = 0
    level: int = 0
    sampling_params: SamplingParams
    text: str | None = None
    messages: list[dict[str, Any]] | None = None  # for the chat template
    input_ids: bytes | None = None  # int32
    add_special_tokens: bool = True  # to `text`, as the tokenizer does by default
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, str | int | float | bool | None] = {}
    param: str = "prompt"


class EncodeMsg(msgspec.Struct, tag="encode", frozen=True, kw_only=True):
    """Ask to tokenize the text or messages of `prompt`. The answer is a `ConversionReply`."""

    uid: int
    prompt: TokenizeMsg
    add_special_tokens: bool | None = None  # None: as for a request, yes for a text and no for a chat template


class DecodeMsg(msgspec.Struct, tag="decode", frozen=True, kw_only=True):
    """Ask for the text of `input_ids` (int32 bytes). The answer is a `ConversionReply`."""

    uid: int
    input_ids: bytes
    skip_special_tokens: bool = False


class AbortMsg(msgspec.Struct, tag="abort", frozen=True):
    """End request `uid`: the client is gone, or a stop string was found.

    The tokenizer forwards this to the scheduler. An unknown uid is ignored, since that request has ended already.
    """

    uid: int


class LogprobColumns(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The log-probabilities of K tokens of request `uid`, each with its `top` most likely alternatives.

    `logprobs` are float32 bytes [K]; `top_ids` int32 and `top_logprobs` float32 bytes [K, top], most likely first.
    """

    uid: int
    top: int
    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes


class Started(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The facts about a request that the detokenizer needs for the first token.

    `queue_seconds` is the time from acceptance to the first step that computes a part of the prompt, `prefill_chunks`
    the number of such parts. `prompt_ids` (int32 bytes) is the prompt if its text (`echo`) or its log-probabilities are
    requested, else its last CONTEXT_TOKENS. `prompt_logprobs` are those of the prompt's tokens except the first.
    `embedding` (float32 bytes) is the result of an embedding model.
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
    """The end of a request. `has_text` is false if the last token must not be shown (an EOS or stop token)."""

    uid: int
    reason: FinishReason
    has_text: bool = True
    stop_reason: str | int | None = None  # the stop string or stop token id that ended the request
    failure: Failure | None = None  # the error that ended the request


class DetokenizeMsg(msgspec.Struct, tag="detokenize", frozen=True, kw_only=True):
    """The results of one step, packed.

    `uids` (int64) and `tokens` (int32) are parallel arrays: one new token for each request in the step. `started` has
    the requests whose first token is among `tokens`. `finished` has the requests that end with this step; a request
    that ends without a new token (abort, error) is only there. `logprobs` are the requested log-probabilities.
    `drafted` has (uid, number of drafts) of the requests that drafted in the step. A step with accepted drafts has
    several messages, and `are_drafts` is true from the second on. `incarnation` is that of the sender.
    """

    uids: bytes
    tokens: bytes
    started: list[Started]
    finished: list[Finished]
    logprobs: list[LogprobColumns] = []
    drafted: list[tuple[int, int]] = []
    are_drafts: bool = False
    incarnation: int = 0


class LostMsg(msgspec.Struct, tag="lost", frozen=True):
    """A replica's `incarnation` is over. The detokenizer drops its further messages, and sends this message back.

    After the answer, no reply of that incarnation can arrive, so its open requests can move to other replicas.
    """

    incarnation: int


TokenizerMsg = TokenizeMsg | EncodeMsg | DecodeMsg | AbortMsg | DetokenizeMsg | EngineView | LostMsg


# -- to the scheduler


class UserMsg(msgspec.Struct, tag="user", frozen=True, kw_only=True, omit_defaults=True):
    """A tokenized request; `input_ids` are int32 bytes.

    `output_ids` (int32 bytes) are the tokens that another replica has generated for it, after which it continues. None
    means that the request is new. The first `system_tokens` of the prompt are one that others may share.
    """

    uid: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    input_ids: bytes
    sampling_params: SamplingParams
    # As of `TokenizeMsg`; records have the old name.
    child_index: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = msgspec.field(default=0, name="place")
    level: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0
    output_ids: bytes | None = None
    system_tokens: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] = 0


class FlushCacheMsg(msgspec.Struct, tag="flush", frozen=True):
    """Drop all cached prefixes that no running request locks."""


class TellPrefixesMsg(msgspec.Struct, tag="tell", frozen=True):
    """Ask for a `PrefixesMsg` with all cached prefixes, and for messages with all later changes."""


class ViewMsg(msgspec.Struct, tag="view", frozen=True):
    """Ask for an `EngineView` with the same `uid`."""

    uid: int


class ExitMsg(msgspec.Struct, tag="exit", frozen=True):
    """End the scheduler. Requests that are still running get an error reply."""


BackendMsg = UserMsg | AbortMsg | FlushCacheMsg | TellPrefixesMsg | ViewMsg | ExitMsg


# -- to the API server


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """A token and its log-probability before temperature, penalties and filters.

    `data` are the token's bytes, perhaps a partial character. `offset` is its position in the text, in characters.
    `logprob` is None for the first token of a prompt. `top` has (id, bytes, logprob) of the most likely tokens, in
    order.
    """

    id: int
    data: bytes
    logprob: float | None
    offset: int
    top: list[tuple[int, bytes, float]]


class UserReply(msgspec.Struct, tag="reply", frozen=True, kw_only=True, omit_defaults=True):
    """An increment of one request's text. Exactly one reply per uid has `finish_reason`: the last one.

    `text` is only the new text, and may be empty (for a partial character or a possible stop string).
    `completion_tokens` counts all tokens so far. `stop_reason` is the stop string or stop token id that ended the
    request, `failure` the error that did. Only the reply to the first token has `queue_seconds` and `prefill_chunks`
    (see `Started`). `logprobs` are those of the new tokens, if requested. The first reply begins with the prompt's text
    if `echo` was requested, and with its tokens if their `logprobs` were. `output_ids` (int32 bytes) are all new
    tokens, including hidden ones. `embedding` (float32 bytes) is in the only reply to a request for an embedding.
    `drafted_tokens` counts all drafts so far, `accepted_tokens` the accepted ones, `reasoning_tokens` those between the
    markers of reasoning.
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
    reasoning_tokens: int = 0


class ConversionReply(msgspec.Struct, tag="conversion", frozen=True, kw_only=True, omit_defaults=True):
    """The answer to an `EncodeMsg` (`input_ids`, int32 bytes) or a `DecodeMsg` (`text`), or the `failure`."""

    uid: int
    input_ids: bytes = b""
    text: str = ""
    failure: Failure | None = None


class StatsMsg(msgspec.Struct, tag="stats", frozen=True, kw_only=True):
    """The scheduler's heartbeat, about twice a second, even when idle. Token counts are totals since the start."""

    incarnation: int = msgspec.field(default=0, name="life")
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
    dropped: int = 0  # inconsistent messages
    tiers: list[TierView] = []


class PrefixesMsg(msgspec.Struct, tag="prefixes", frozen=True, kw_only=True):
    """Changes of the prefixes of whole pages in a scheduler's cache since its last message.

    `hashes` are uint64 bytes (`kvcache/prefixes.py`). `locations` has a byte for each: 0 for the device, more for a
    tier, -1 if it is gone. `costs` has the cost of loading a page from each location, in pages to compute.
    """

    page_size: int
    costs: list[float]
    hashes: bytes
    locations: bytes
    incarnation: int = 0


class DetokenizerStatsMsg(msgspec.Struct, tag="detokenizer", frozen=True):
    """The changes of a detokenizer's or tokenizer's counts: tracked requests, and dropped messages."""

    entries: int
    dropped: int = 0


FrontendMsg = UserReply | ConversionReply | EngineView | StatsMsg | PrefixesMsg | LostMsg | DetokenizerStatsMsg
