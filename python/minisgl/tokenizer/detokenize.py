"""Token ids -> text, one step at a time. No ZeroMQ here: the worker process and the offline `LLM` share it.

The increments of a request, put together, equal the decoding of all its tokens: half a character is held back until
the rest of it comes or the request ends, and the beginning of a possible stop string until it is decided.
"""

from __future__ import annotations

import logging

import msgspec
import numpy as np
from tokenizers import Tokenizer

from minisgl.core import FinishReason
from minisgl.message import (
    DetokenizeMsg,
    Failure,
    Finished,
    LogprobColumns,
    Started,
    TokenLogprob,
    UserReply,
    ids_from_bytes,
)
from minisgl.tokenizer.stop import StopMatcher
from minisgl.tokenizer.text import TextDecoders

logger = logging.getLogger(__name__)


class _Output:
    """One request's text so far, as far as it is still needed."""

    def __init__(self, started: Started, decoders: TextDecoders, special_ids: frozenset[int]) -> None:
        self.completion_tokens = 0
        self._started = started
        self._decoder = decoders.new()
        self._bytes_of = decoders.bytes_of
        self._offset = 0  # characters of what `_decoder` has given out
        self._hidden = special_ids if started.skip_special_tokens else frozenset()
        self._stops = StopMatcher(started.stop, started.shows_stop) if started.stop else None
        self._prompt, self._prompt_logprobs = self._echo(started)

    def _echo(self, started: Started) -> tuple[str, list[TokenLogprob]]:
        """The prompt's text, and how likely its tokens are, as far as either is wanted."""
        ids, scores = ids_from_bytes(started.prompt_ids).tolist(), started.prompt_logprobs
        text, offsets = "", []
        for token in ids:
            offsets.append(self._offset)
            if started.echo:
                text += self._decode(token)
        if scores is None:
            return text, []
        first = TokenLogprob(id=ids[0], data=self._bytes_of[ids[0]], logprob=None, offset=0, top=[])
        return text, [first, *self._logprobs(ids[1:], offsets[1:], scores)]

    def logprobs(self, token: int, scores: LogprobColumns | None) -> list[TokenLogprob]:
        """How likely the next token to feed is, if somebody wants to know."""
        return [] if scores is None else self._logprobs([token], [self._offset], scores)

    def _logprobs(self, tokens: list[int], offsets: list[int], scores: LogprobColumns) -> list[TokenLogprob]:
        logprobs = np.frombuffer(scores.logprobs, "<f4").tolist()
        ids = ids_from_bytes(scores.top_ids).reshape(len(tokens), scores.top).tolist()
        values = np.frombuffer(scores.top_logprobs, "<f4").reshape(len(tokens), scores.top).tolist()
        tops = [[(i, self._bytes_of[i], v) for i, v in zip(*x, strict=True)] for x in zip(ids, values, strict=True)]
        return [
            TokenLogprob(id=token, data=self._bytes_of[token], logprob=logprob, offset=offset, top=top)
            for token, logprob, offset, top in zip(tokens, logprobs, offsets, tops, strict=True)
        ]

    def _decode(self, token: int) -> str:
        text = "" if token in self._hidden else self._decoder.feed(token)
        self._offset += len(text)
        return text

    def _watch(self, text: str) -> tuple[str, str | None]:
        """What of `text` may be shown, and the stop string that ends the request if there is one."""
        return (text, None) if self._stops is None else self._stops.feed(text)

    def advance(self, token: int, end: Finished | None) -> UserReply:
        """The reply to one more token; terminal when `end` says so, a stop string is found, or the token breaks us."""
        self.completion_tokens += 1
        try:
            text, stop = ("", None) if end is not None and not end.has_text else self._watch(self._decode(token))
        except Exception as e:  # one request's trouble must not take the others' text with it
            logger.exception("could not decode token %d of request %d", token, self._started.uid)
            return self._reply("", FinishReason.ERROR, failure=Failure(message=f"could not decode token {token}: {e}"))
        if stop is not None:
            return self._reply(text, FinishReason.STOP, stop)
        return self._reply(text) if end is None else self.end(end, text)

    def end(self, end: Finished, text: str = "") -> UserReply:
        """The terminal reply that `end` calls for: `text`, and what was held back."""
        rest, stop = self._watch(self._decoder.flush())
        if stop is not None:
            return self._reply(text + rest, FinishReason.STOP, stop)
        held = "" if self._stops is None else self._stops.flush()
        return self._reply(text + rest + held, end.reason, end.stop_token, end.failure)

    def _reply(
        self,
        text: str,
        reason: FinishReason | None = None,
        stop: str | int | None = None,
        failure: Failure | None = None,
    ) -> UserReply:
        s = self._started
        return UserReply(
            uid=s.uid,
            text=text,
            completion_tokens=self.completion_tokens,
            prompt_tokens=s.prompt_tokens,
            cached_tokens=s.cached_tokens,
            finish_reason=reason,
            stop_reason=stop,
            failure=failure,
        )

    def first(self, reply: UserReply) -> UserReply:
        """`reply` to the first token, with all that only this one says."""
        started = self._started
        if started.is_silent and reply.failure is None:
            reply = UserReply(
                uid=reply.uid,
                prompt_tokens=reply.prompt_tokens,
                cached_tokens=reply.cached_tokens,
                finish_reason=FinishReason.LENGTH,
            )
        return msgspec.structs.replace(
            reply,
            text=self._prompt + reply.text,
            queue_seconds=started.queue_seconds,
            prefill_chunks=started.prefill_chunks,
            logprobs=self._prompt_logprobs + reply.logprobs,
            embedding=started.embedding,
        )


class DetokenizeManager:
    """The text state of every request that is producing tokens.

    Invariant: a request gets exactly one terminal reply; one that a stop string ended stays in `_stopped` until the
    scheduler's own last word on it has come (and been dropped).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decoders = TextDecoders(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._outputs: dict[int, _Output] = {}
        self._stopped: set[int] = set()

    @property
    def entries(self) -> int:
        """Requests that are remembered; 0 when idle, or something leaks."""
        return len(self._outputs) + len(self._stopped)

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        """The text of all tokens of a request at once: what its increments, put together, would be."""
        hidden = self._special_ids if skip_special_tokens else frozenset()
        shown = tokens if hidden.isdisjoint(tokens) else [t for t in tokens if t not in hidden]
        return self._decoders.decode(shown)

    def detokenize(self, msg: DetokenizeMsg) -> tuple[list[UserReply], list[int]]:
        """One reply for each request of the step, and the uids whose generation must be aborted (stop strings)."""
        for started in msg.started:
            self._outputs[started.uid] = _Output(started, self._decoders, self._special_ids)
        scores = {s.uid: s for s in msg.logprobs}
        ends = {f.uid: f for f in msg.finished}
        replies: list[UserReply] = []
        aborts: list[int] = []
        uids = np.frombuffer(msg.uids, dtype="<i8").tolist()
        for i, (uid, token) in enumerate(zip(uids, ids_from_bytes(msg.tokens).tolist(), strict=True)):
            output = self._outputs.get(uid)
            if output is None:
                if uid not in self._stopped:
                    logger.error("a token of request %d, which never started", uid)
                continue
            end = ends.get(uid)
            logprobs = output.logprobs(token, scores.get(uid))
            reply = msgspec.structs.replace(
                output.advance(token, end), logprobs=logprobs, output_ids=msg.tokens[4 * i : 4 * i + 4]
            )
            if output.completion_tokens == 1:
                reply = output.first(reply)
            replies.append(reply)
            if reply.finish_reason is not None:
                del self._outputs[uid]
                self._stopped.add(uid)
                if end is None:
                    aborts.append(uid)
        for uid, end in ends.items():
            if uid in self._stopped:
                self._stopped.remove(uid)
            elif (output := self._outputs.pop(uid, None)) is not None:
                replies.append(output.end(end))
            else:  # it has no token
                replies.append(
                    UserReply(uid=uid, finish_reason=end.reason, stop_reason=end.stop_token, failure=end.failure)
                )
        return replies, aborts
