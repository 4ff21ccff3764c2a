"""Collects the scheduler's messages about the open requests of a call, or of an `AsyncLLM`, into completions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from minisgl.core.errors import MinisglError
from minisgl.core.message import CONTEXT_TOKENS, DetokenizeMsg, TokenLogprob, UserMsg, UserReply, ids_from_bytes
from minisgl.core.params import SamplingParams
from minisgl.core.plan import FinishReason
from minisgl.tokenizer.detokenize import DetokenizeManager

SHOWN_CHARS: Final = 60  # of a completion's text in its repr


@dataclass(slots=True)
class Completion:
    """A finished request, or what has arrived of one, with the names of vLLM's `RequestOutput` and `CompletionOutput`.

    `text` has no stop string and no special tokens, and begins with the prompt if `echo` was requested. `token_ids` has
    all generated tokens. `stop_reason` is the stop string or stop token that ended the request. `embedding` (float32
    bytes) is for `LLM.embed`. SGLang's `text`, `output_ids` and `meta_info` are read with brackets.
    """

    prompt_token_ids: list[int]
    prompt: str | None = None  # if it was given as text
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    accepted_tokens: int = 0  # output tokens that were accepted drafts
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    embedding: bytes = b""
    request_id: str = ""
    index: int = 0  # of the choice of its prompt
    others: list[Completion] = field(default_factory=list, repr=False)  # the other choices, of choice 0

    def __repr__(self) -> str:
        text = self.text[:SHOWN_CHARS] + "…" * (len(self.text) > SHOWN_CHARS)
        counts = f"prompt_tokens={len(self.prompt_token_ids)}, completion_tokens={len(self.token_ids)}"
        return f"Completion({text!r}, finish_reason={self.finish_reason}, {counts}, choices={len(self.outputs)})"

    @property
    def outputs(self) -> list[Completion]:
        """All choices of the prompt (`SamplingParams.n`)."""
        return [self, *self.others]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def __getitem__(self, name: str) -> Any:
        """Return SGLang's `text`, `output_ids` or `meta_info`."""
        if name == "meta_info":
            matched = {} if self.stop_reason is None else {"matched": self.stop_reason}
            return {
                "id": self.request_id,
                "finish_reason": {"type": str(self.finish_reason), **matched} if self.finished else None,
                "prompt_tokens": len(self.prompt_token_ids),
                "completion_tokens": len(self.token_ids),
                "cached_tokens": self.num_cached_tokens,
            }
        return {"text": self.text, "output_ids": self.token_ids}[name]


@dataclass(frozen=True, slots=True)
class Piece:
    """The newest text and tokens of choice `index`. `completion` has all so far; only the last has a finish reason.

    A piece can also be read like a result of vLLM's AsyncLLM: `piece.outputs[0].text` is all text so far.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    completion: Completion
    failure: MinisglError | None = None

    @property
    def outputs(self) -> list[Completion]:
        return [self.completion]

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


Listener = Callable[[Piece], None]


@dataclass(frozen=True, slots=True)
class Request:
    """The requests of one prompt: a message for each choice, with consecutive uids."""

    users: list[UserMsg]
    prompt: str | None = None  # if it was given as text


def _needs_pieces(params: SamplingParams) -> bool:
    """Whether a completion cannot be made from the tokens alone, at its end."""
    return bool(params.stop) or params.echo or params.embed or params.logprobs is not None


@dataclass(slots=True)
class _Open:
    """An open request."""

    completion: Completion
    params: SamplingParams
    listener: Listener | None


class Completions:
    """The open requests. Send what is `waiting` to the scheduler, and `process` each of its messages.

    Choices after the first wait until the first has a token; then the prompt is in the cache. Tokens are decoded as
    they arrive if there is a listener, a stop string, or more than text to return. Otherwise the text of a request is
    decoded at its end, so that a step costs next to nothing.
    """

    def __init__(self, detokenizer: DetokenizeManager) -> None:
        self.pending = 0
        self.waiting: deque[UserMsg] = deque()
        self._held: dict[int, list[UserMsg]] = {}  # by the uid of the first choice
        self._detokenizer = detokenizer
        self._open: dict[int, _Open] = {}
        self._streams = False

    def add(self, request: Request, listener: Listener | None = None) -> Completion:
        """Open a request, and return its completion, which grows.

        `listener` is called for each token of all its choices, and for failures. Without it, `process` raises failures.
        """
        first, *others = request.users
        ids = ids_from_bytes(first.input_ids).tolist()
        choices = [Completion(ids, request.prompt, request_id=str(first.uid), index=i) for i in range(1 + len(others))]
        choices[0].others = choices[1:]
        for user, choice in zip(request.users, choices, strict=True):
            self._open[user.uid] = _Open(choice, user.sampling_params, listener)
        self._streams |= listener is not None or _needs_pieces(first.sampling_params)
        self.waiting.append(first)
        if others:
            self._held[first.uid] = others
        self.pending += len(request.users)
        return choices[0]

    def forget(self, uids: Sequence[int]) -> None:
        """Drop requests. Their ends may still arrive, or the scheduler does not know them yet."""
        unsent = {u.uid for u in self.waiting} | {u.uid for users in self._held.values() for u in users}
        self.waiting = deque(u for u in self.waiting if u.uid not in uids)
        for uid in uids:
            self._held.pop(uid, None)
            if self._open.pop(uid, None) is not None and uid in unsent:
                self.pending -= 1

    def fail(self, error: MinisglError) -> None:
        """End all open requests: call their listeners with `error`."""
        for request in self._open.values():
            if request.listener is not None:
                done = request.completion
                request.listener(Piece(done.index, "", [], FinishReason.ERROR, done, error))

    def process(self, msg: DetokenizeMsg) -> list[int]:
        """Add the tokens of a step; return the uids that a stop string has ended. Raises `RequestError` on failure."""
        if self._held:
            for uid in (*(s.uid for s in msg.started), *(f.uid for f in msg.finished)):
                self.waiting.extend(self._held.pop(uid, ()))
        if self._streams:
            replies, stopped = self._detokenizer.detokenize(msg)
            for reply in replies:
                self._add(reply)
            return stopped
        uids, known = np.frombuffer(msg.uids, "<i8").tolist(), self._open
        for uid, token in zip(uids, ids_from_bytes(msg.tokens).tolist(), strict=True):
            known[uid].completion.token_ids.append(token)
        for uid in uids if msg.are_drafts else ():
            self._open[uid].completion.accepted_tokens += 1
        for started in msg.started:
            self._open[started.uid].completion.num_cached_tokens = started.cached_tokens
        for end in msg.finished:
            if end.failure is not None:
                raise end.failure.error()
            request = self._open.pop(end.uid)
            done = request.completion
            done.finish_reason, done.stop_reason = end.reason, end.stop_reason
            ids = done.token_ids if end.has_text else done.token_ids[:-1]
            done.text = self._detokenizer.decode(ids, request.params, done.prompt_token_ids[-CONTEXT_TOKENS:])
            self.pending -= 1
        return []

    def _add(self, reply: UserReply) -> None:
        self.pending -= reply.finish_reason is not None
        if (request := self._open.get(reply.uid)) is None:
            return  # forgotten
        done, ids = request.completion, ids_from_bytes(reply.output_ids).tolist()
        if request.params.wants_prompt_logprobs and not done.prompt_logprobs:  # the first reply begins with them
            done.prompt_logprobs = reply.logprobs[: len(done.prompt_token_ids)]
            done.logprobs = reply.logprobs[len(done.prompt_token_ids) :]
        else:
            done.logprobs += reply.logprobs
        done.num_cached_tokens = reply.cached_tokens or done.num_cached_tokens
        done.accepted_tokens = reply.accepted_tokens
        done.embedding += reply.embedding
        done.text += reply.text
        done.token_ids += ids
        done.finish_reason, done.stop_reason = reply.finish_reason, reply.stop_reason
        if reply.finish_reason is not None:
            del self._open[reply.uid]
        failure = None if reply.failure is None else reply.failure.error()
        if request.listener is not None:
            request.listener(Piece(done.index, reply.text, ids, reply.finish_reason, done, failure))
        elif failure is not None:
            raise failure

    def drop(self, msg: DetokenizeMsg) -> None:
        """Ignore a message that arrives after the call has returned or failed."""
        if self._streams:
            self._detokenizer.detokenize(msg)
