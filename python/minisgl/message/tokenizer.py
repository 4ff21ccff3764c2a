"""Messages to the tokenizer and detokenizer workers."""

from __future__ import annotations

from typing import Any

import msgspec

from minisgl.core import FinishReason
from minisgl.message.failure import Failure
from minisgl.message.view import EngineView
from minisgl.params import SamplingParams


class TokenizeMsg(msgspec.Struct, tag="tokenize", frozen=True, kw_only=True, omit_defaults=True):
    """A validated request on its way to the engine. Exactly one of `text`, `messages`, `input_ids` is set."""

    uid: int
    sampling_params: SamplingParams
    text: str | None = None
    messages: list[dict[str, Any]] | None = None  # for the chat template
    input_ids: bytes | None = None  # int32
    add_special_tokens: bool = True  # to `text`, as the tokenizer does
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: dict[str, str | int | float | bool | None] = {}


class EncodeMsg(msgspec.Struct, tag="encode", frozen=True):
    """Say which tokens `prompt` has (its text or messages); nothing is generated. Answered by a `ConversionReply`."""

    uid: int
    prompt: TokenizeMsg
    add_special_tokens: bool | None = None  # None: as for a request, yes for a text and no for a chat template


class DecodeMsg(msgspec.Struct, tag="decode", frozen=True):
    """Say which text the tokens are; `input_ids` are int32 bytes. Answered by a `ConversionReply`."""

    uid: int
    input_ids: bytes
    skip_special_tokens: bool = False


class AbortMsg(msgspec.Struct, tag="abort", frozen=True):
    """The client is gone (or a stop string was found): stop working on `uid`."""

    uid: int


class TokenScores(msgspec.Struct, array_like=True, frozen=True):
    """The log-probabilities of some tokens [K] of request `uid`, each with its `top` likeliest alternatives.

    `logprobs` are float32 bytes [K]; `top_ids` int32 and `top_logprobs` float32 bytes [K, top], likeliest first.
    """

    uid: int
    top: int
    logprobs: bytes
    top_ids: bytes
    top_logprobs: bytes


class Started(msgspec.Struct, array_like=True, frozen=True):
    """What the detokenizer must know about a request before its first token, and how it came to that.

    `queue_seconds` is the time from its acceptance to the first step that computes a part of its prompt,
    `prefill_chunks` the number of such parts. `prompt_ids` (int32 bytes) is the prompt if its text (`echo`) or its
    log-probabilities are wanted; `prompt_scores` are those of its tokens but the first. `is_silent`: none of its
    tokens is to be shown. `embedding` (float32 bytes) is what an embedding model has made of it. `shows_stop`: the stop
    string that ends it is shown.
    """

    uid: int
    prompt_tokens: int
    cached_tokens: int
    stop: tuple[str, ...]
    skip_special_tokens: bool
    queue_seconds: float = 0.0
    prefill_chunks: int = 0
    prompt_ids: bytes = b""
    prompt_scores: TokenScores | None = None
    is_silent: bool = False
    embedding: bytes = b""
    echo: bool = False
    shows_stop: bool = False


class Finished(msgspec.Struct, array_like=True, frozen=True):
    """A request's terminal word. `has_text` is false when its last token must not be shown (an EOS or stop token)."""

    uid: int
    reason: FinishReason
    has_text: bool = True
    stop_token: int | None = None  # the stop token id that ended it, if one did
    failure: Failure | None = None  # of one that ended with an error


class DetokenizeMsg(msgspec.Struct, tag="detokenize", frozen=True):
    """Everything one step has to say: one per step, packed.

    `uids` (int64) and `tokens` (int32) are parallel arrays: one new token for each request in the step. `started`
    holds the requests whose first token is among them. `finished` holds the requests that end with this step; one that
    ends without a new token (abort, error) is only there. `scores` are of those tokens that want them.
    """

    uids: bytes
    tokens: bytes
    started: list[Started]
    finished: list[Finished]
    scores: list[TokenScores] = []


TokenizerMsg = TokenizeMsg | EncodeMsg | DecodeMsg | AbortMsg | DetokenizeMsg | EngineView
