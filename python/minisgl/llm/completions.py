"""Collects the scheduler's messages about the open requests of a call, or of an `AsyncLLM`, into completions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from minisgl.core import FinishReason
from minisgl.errors import MinisglError
from minisgl.message import CONTEXT_TOKENS, DetokenizeMsg, TokenLogprob, UserMsg, UserReply, ids_from_bytes
from minisgl.tokenizer.detokenize import DetokenizeManager

SHOWN_CHARS: Final = 60  # of a completion's text in its repr


@dataclass(slots=True)
class Completion:
    """One finished request. `text` has no stop string and no special tokens; `token_ids` has all generated tokens.

    With `echo`, `text` and `logprobs` begin with the prompt's. `embedding` (float32 bytes) is for `LLM.embed`. A
    completion can also be read like vLLM's (`result.outputs[0].text`) and SGLang's (`result["text"]`), except for
    `logprobs`.
    """

    prompt_tokens: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    accepted_tokens: int = 0  # output tokens that were accepted drafts
    logprobs: list[TokenLogprob] = field(default_factory=list)
    embedding: bytes = b""
    stop_reason: str | int | None = None  # the stop string or stop token that ended the request
    prompt: str | None = None  # if it was given as text
    prompt_ids: bytes = b""  # int32
    request_id: str = ""
    index: int = 0  # of the choice of its prompt
    others: list[Completion] = field(default_factory=list, repr=False)  # the other choices, of choice 0

    def __repr__(self) -> str:
        text = self.text[:SHOWN_CHARS] + "…" * (len(self.text) > SHOWN_CHARS)
        counts = f"prompt_tokens={self.prompt_tokens}, completion_tokens={len(self.token_ids)}"
        return f"Completion({text!r}, finish_reason={self.finish_reason}, {counts}, choices={len(self.outputs)})"

    @property
    def outputs(self) -> list[Completion]:
        """All choices of the prompt (`SamplingParams.n`)."""
        return [self, *self.others]

    @property
    def prompt_token_ids(self) -> list[int]:
        ids: list[int] = ids_from_bytes(self.prompt_ids).tolist()
        return ids

    @property
    def num_cached_tokens(self) -> int:
        return self.cached_tokens

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def __getitem__(self, name: str) -> Any:
        """Return SGLang's `text`, `output_ids` or `meta_info`."""
        if name == "meta_info":
            reason = None if self.finish_reason is None else {"type": str(self.finish_reason)}
            if reason is not None and self.stop_reason is not None:
                reason["matched"] = self.stop_reason  # type: ignore[assignment]
            counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": len(self.token_ids)}
            return {"id": self.request_id, "finish_reason": reason, **counts, "cached_tokens": self.cached_tokens}
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


class Completions:
    """The open requests. Send what is `waiting` to the scheduler, `take` each of its messages, then call `finish`.

    Choices after the first wait until the first has a token; then the prompt is in the cache. Tokens are decoded as
    they arrive if there is a listener, a stop string, or more than text to return. Otherwise they are decoded at the
    end, so that a step costs next to nothing.
    """

    def __init__(
        self,
        detokenizer: DetokenizeManager,
        requests: Sequence[Request] = (),
        on_token: Callable[[int, str], None] | None = None,
    ) -> None:
        """Open the `requests` of a call. An `AsyncLLM` opens none here and calls `add`."""
        users = [user for request in requests for user in request.users]
        self.pending = 0
        self.waiting: deque[UserMsg] = deque()
        self._held: dict[int, list[UserMsg]] = {}  # by the uid of the first choice
        self._detokenizer = detokenizer
        self._completions: dict[int, Completion] = {}
        self._listeners: dict[int, Listener] = {}
        self._on_token = on_token
        self._first = users[0].uid if users else 0  # the first uid of a call; the others follow
        self._params = [u.sampling_params for u in users]
        self._streams = (
            on_token is not None
            or not users
            or any(p.stop or p.echo or p.embed or p.logprobs is not None for p in self._params)
        )
        # The index at which to cut the tokens that have text; None = nowhere.
        self._text_stop: list[int | None] = [None] * len(users)
        self._uids: list[bytes] = []
        self._tokens: list[bytes] = []
        for request in requests:
            self.add(request)

    def add(self, request: Request, listener: Listener | None = None) -> None:
        """Open a request. `listener` is called for each token of all its choices, and for failures."""
        first, *others = request.users
        for index, user in enumerate(request.users):
            self._completions[user.uid] = Completion(
                len(user.input_ids) // 4,
                prompt=request.prompt,
                prompt_ids=user.input_ids,
                request_id=str(first.uid),
                index=index,
            )
            if listener is not None:
                self._listeners[user.uid] = listener
        self.waiting.append(first)
        if others:
            self._held[first.uid] = others
        self.pending += len(request.users)

    def forget(self, uids: Sequence[int]) -> None:
        """Drop requests. Their ends may still arrive, or the scheduler does not know them yet."""
        unsent = {u.uid for u in self.waiting} | {u.uid for users in self._held.values() for u in users}
        self.waiting = deque(u for u in self.waiting if u.uid not in uids)
        for uid in uids:
            self._held.pop(uid, None)
            self._listeners.pop(uid, None)
            if self._completions.pop(uid, None) is not None and uid in unsent:
                self.pending -= 1

    def fail(self, error: MinisglError) -> None:
        """End all open requests: call their listeners with `error`."""
        for uid, listener in self._listeners.items():
            done = self._completions[uid]
            listener(Piece(done.index, "", [], FinishReason.ERROR, done, error))

    def take(self, msg: DetokenizeMsg) -> list[int]:
        """Add the tokens of a step; return the uids that a stop string has ended. Raises `RequestError` on failure."""
        if self._held:
            for uid in (*(s.uid for s in msg.started), *(f.uid for f in msg.finished)):
                self.waiting.extend(self._held.pop(uid, ()))
        if self._streams:
            replies, stopped = self._detokenizer.detokenize(msg)
            for reply in replies:
                self._add(reply)
            return stopped
        self._uids.append(msg.uids)
        self._tokens.append(msg.tokens)
        if msg.are_drafts:
            for uid in np.frombuffer(msg.uids, "<i8").tolist():
                self._completions[uid].accepted_tokens += 1
        for started in msg.started:
            self._completions[started.uid].cached_tokens = started.cached_tokens
        for end in msg.finished:
            if end.failure is not None:
                raise end.failure.error()
            done = self._completions[end.uid]
            done.finish_reason, done.stop_reason = end.reason, end.stop_reason
            self._text_stop[end.uid - self._first] = None if end.has_text else -1
        self.pending -= len(msg.finished)
        return []

    def _add(self, reply: UserReply) -> None:
        self.pending -= reply.finish_reason is not None
        if (done := self._completions.get(reply.uid)) is None:
            return  # forgotten
        ids = ids_from_bytes(reply.output_ids).tolist()
        done.cached_tokens = reply.cached_tokens or done.cached_tokens
        done.accepted_tokens = reply.accepted_tokens
        done.logprobs += reply.logprobs
        done.embedding += reply.embedding
        done.text += reply.text
        done.token_ids += ids
        done.finish_reason, done.stop_reason = reply.finish_reason, reply.stop_reason
        failure = None if reply.failure is None else reply.failure.error()
        if (listener := self._listeners.get(reply.uid)) is not None:
            if reply.finish_reason is not None:
                del self._completions[reply.uid], self._listeners[reply.uid]
            listener(Piece(done.index, reply.text, ids, reply.finish_reason, done, failure))
            return
        if self._on_token is not None and reply.text:
            self._on_token(reply.uid - self._first, reply.text)
        if failure is not None:
            raise failure

    def drop(self, msg: DetokenizeMsg) -> None:
        """Ignore a message that arrives after the call has returned or failed."""
        if self._streams:
            self._detokenizer.detokenize(msg)

    def finish(self) -> list[Completion]:
        """Return the completions in the order of the requests."""
        completions = [*self._completions.values()]
        if self._streams:
            return completions
        index = np.frombuffer(b"".join(self._uids), "<i8") - self._first
        order = np.argsort(index, kind="stable")
        ends = np.cumsum(np.bincount(index, minlength=len(completions)))
        tokens = ids_from_bytes(b"".join(self._tokens))[order]
        for done, ids, params, stop in zip(
            completions, np.split(tokens, ends[:-1]), self._params, self._text_stop, strict=False
        ):
            done.token_ids = ids.tolist()
            context = ids_from_bytes(done.prompt_ids)[-CONTEXT_TOKENS:].tolist()
            done.text = self._detokenizer.decode(done.token_ids[:stop], params, context)
        return completions
