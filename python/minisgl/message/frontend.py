"""Messages to the API server."""

from __future__ import annotations

import msgspec

from minisgl.core import FinishReason
from minisgl.message.failure import Failure
from minisgl.message.view import EngineView


class TokenLogprob(msgspec.Struct, array_like=True, frozen=True):
    """A token and how likely the model found it before temperature, penalties and filters.

    `id` is its number, `data` are its bytes, perhaps half a character, and `offset` its place in the text, in
    characters. `logprob` is None for the first token of a prompt. `top` holds (id, bytes, logprob) of the likeliest
    tokens, likeliest first.
    """

    id: int
    data: bytes
    logprob: float | None
    offset: int
    top: list[tuple[int, bytes, float]]


class UserReply(msgspec.Struct, tag="reply", frozen=True, omit_defaults=True):
    """An increment of one request's text. Exactly one reply per uid has `finish_reason` set, and it is the last.

    `completion_tokens` counts all tokens so far; `text` is the new text only and may be empty (half a character, a
    possible stop string). `stop_reason` is the stop string or stop token id that ended it, if one did, and `failure`
    the error, if one did. The reply to the first token alone has `queue_seconds` and `prefill_chunks`, see `Started`.
    `logprobs` are those of the new tokens, if they were asked for; the first reply begins with the prompt's text if it
    was to be echoed, and with its tokens if their `logprobs` were wanted. `output_ids` (int32 bytes) are the new
    tokens themselves, hidden ones too: as many as `completion_tokens` counts. `embedding` (float32 bytes) is in the
    only reply to a request for one.
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


class ConversionReply(msgspec.Struct, tag="conversion", frozen=True, omit_defaults=True):
    """The answer to an `EncodeMsg` (`input_ids`, int32 bytes) or a `DecodeMsg` (`text`), or why there is none."""

    uid: int
    input_ids: bytes = b""
    text: str = ""
    failure: Failure | None = None


class StatsMsg(msgspec.Struct, tag="stats", frozen=True):
    """The scheduler's heartbeat, about twice a second, also when idle. Counters are totals since the start."""

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
    cached_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0


class DetokenizerStatsMsg(msgspec.Struct, tag="detokenizer", frozen=True):
    """How many requests the detokenizer remembers; sent when the number has changed."""

    entries: int


FrontendMsg = UserReply | ConversionReply | EngineView | StatsMsg | DetokenizerStatsMsg
