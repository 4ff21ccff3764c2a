"""The scheduler's messages about the requests of one call -> their completions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from minisgl.core import FinishReason
from minisgl.message import CONTEXT_TOKENS, DetokenizeMsg, TokenLogprob, UserMsg, UserReply, ids_from_bytes
from minisgl.tokenizer.detokenize import DetokenizeManager


@dataclass(slots=True)
class Completion:
    """One finished request. `text` has no stop string and no special tokens; `token_ids` has every generated token.

    With `echo`, `text` and `logprobs` begin with the prompt's. `embedding` (float32 bytes) is for `LLM.embed`.
    """

    prompt_tokens: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    embedding: bytes = b""


class Completions:
    """Gathers the completions of one call: `take` each message of the scheduler, then `finish`.

    Tokens are decoded as they arrive if there is a callback, a stop string, or more than text to return. Otherwise they
    are only stored and decoded in the end, so that a step costs next to nothing.
    """

    def __init__(
        self,
        detokenizer: DetokenizeManager,
        users: list[UserMsg],
        on_token: Callable[[int, str], None] | None,
    ) -> None:
        self.pending = len(users)
        self._detokenizer = detokenizer
        self._params = [u.sampling_params for u in users]
        self._first = users[0].uid if users else 0  # the other uids follow
        self._on_token = on_token
        self._streams = on_token is not None or any(
            p.stop or p.echo or p.embed or p.logprobs is not None for p in self._params
        )
        prompts = [ids_from_bytes(u.input_ids) for u in users]
        self._contexts = [ids[-CONTEXT_TOKENS:].tolist() for ids in prompts]
        self._completions = [Completion(len(ids)) for ids in prompts]
        self._texts: list[list[str]] = [[] for _ in users]
        # Where to cut the tokens of each request, and those of them that have text; None = nowhere.
        self._ids_stop: list[int | None] = [None] * len(users)
        self._text_stop: list[int | None] = [None] * len(users)
        self._uids: list[bytes] = []
        self._tokens: list[bytes] = []

    def take(self, msg: DetokenizeMsg) -> list[int]:
        """Take in one step; return the uids that a stop string has ended. Raises `RequestError` if one has failed."""
        self._uids.append(msg.uids)
        self._tokens.append(msg.tokens)
        if self._streams:
            replies, stopped = self._detokenizer.detokenize(msg)
            for reply in replies:
                self._add(reply)
            return stopped
        for started in msg.started:
            self._completions[started.uid - self._first].cached_tokens = started.cached_tokens
        for end in msg.finished:
            if end.failure is not None:
                raise end.failure.error()
            self._completions[end.uid - self._first].finish_reason = end.reason
            self._text_stop[end.uid - self._first] = None if end.has_text else -1
        self.pending -= len(msg.finished)
        return []

    def _add(self, reply: UserReply) -> None:
        index = reply.uid - self._first
        done = self._completions[index]
        done.cached_tokens = reply.cached_tokens or done.cached_tokens
        done.logprobs += reply.logprobs
        done.embedding += reply.embedding
        if reply.text:
            self._texts[index].append(reply.text)
            if self._on_token is not None:
                self._on_token(index, reply.text)
        if reply.failure is not None:
            raise reply.failure.error()
        if reply.finish_reason is not None:
            done.finish_reason = reply.finish_reason
            self._ids_stop[index] = reply.completion_tokens  # without those computed behind a stop string
            self.pending -= 1

    def drop(self, msg: DetokenizeMsg) -> None:
        """Ignore a message that arrives when the call has returned or failed."""
        if self._streams:
            self._detokenizer.detokenize(msg)

    def finish(self) -> list[Completion]:
        """Return the completions in the order of the prompts."""
        index = np.frombuffer(b"".join(self._uids), "<i8") - self._first
        order = np.argsort(index, kind="stable")
        ends = np.cumsum(np.bincount(index, minlength=len(self._completions)))
        tokens = ids_from_bytes(b"".join(self._tokens))[order]
        for i, (done, ids) in enumerate(zip(self._completions, np.split(tokens, ends[:-1]), strict=False)):
            done.token_ids = ids[: self._ids_stop[i]].tolist()
            if not self._streams:
                shown, skip = done.token_ids[: self._text_stop[i]], self._params[i].skip_special_tokens
                self._texts[i].append(self._detokenizer.decode(shown, skip, self._contexts[i]))
            done.text = "".join(self._texts[i])
        return self._completions
