"""Turns the token ids of each step into replies with text. The worker process and the offline `LLM` use it.

The increments of a request add up to the text of all its tokens. A partial character is held back until it is complete
or the request ends, and the beginning of a possible stop string until it is decided.
"""

from __future__ import annotations

import logging

import msgspec
import numpy as np
from tokenizers import Tokenizer

from minisgl.core.message import (
    CONTEXT_TOKENS,
    DetokenizeMsg,
    Failure,
    Finished,
    LogprobColumns,
    Started,
    TokenLogprob,
    UserReply,
    ids_from_bytes,
)
from minisgl.core.params import SamplingParams
from minisgl.core.plan import FinishReason
from minisgl.tokenizer.text import StopMatcher, TextDecoder, TokenBytes
from minisgl.tokenizer.thinking import ThinkingCounter

logger = logging.getLogger(__name__)


def _visible(tokens: list[int], hidden: frozenset[int]) -> list[int]:
    return tokens if hidden.isdisjoint(tokens) else [t for t in tokens if t not in hidden]


def _context(prompt: list[int], hidden: frozenset[int]) -> list[int]:
    """Return the last tokens of `prompt`, which the decoder of a completion needs as context."""
    return _visible(prompt, hidden)[-CONTEXT_TOKENS:]


class _Output:
    """The decoding state of one request."""

    def __init__(self, started: Started, bytes_of: TokenBytes, hidden: frozenset[int]) -> None:
        self._completion_tokens = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self._started = started
        self._bytes_of = bytes_of
        self._offset = 0  # characters that `_decoder` has returned
        self._hidden = hidden
        self._decoder = TextDecoder(bytes_of)
        self._stops: StopMatcher | None = None
        thinking = started.sampling_params.thinking
        self._thinking = None if thinking is None else ThinkingCounter(thinking, bytes_of)

    def _begin(self) -> tuple[str, list[TokenLogprob]]:
        """Start to decode after the prompt.

        Return the prompt's text and the log-probabilities of its tokens; empty if not requested.
        """
        params, columns = self._started.sampling_params, self._started.prompt_logprobs
        ids = ids_from_bytes(self._started.prompt_ids).tolist()
        if params.stop:
            self._stops = StopMatcher(params.stop, params.include_stop_str_in_output)
        prompt = [] if params.echo else ids
        self._decoder = TextDecoder(self._bytes_of, _context(prompt, self._hidden))
        text, offsets = "", []
        for token in ids:
            offset, new = self._decode(token) if params.echo else (0, "")
            offsets.append(offset)
            text += new
        if params.echo and params.max_tokens == 0:
            text += self._decoder.finish()
        if columns is None:
            return text, []
        first = TokenLogprob(id=ids[0], data=self._bytes_of[ids[0]], logprob=None, offset=0, top=[])
        return text, [first, *self._logprobs(ids[1:], offsets[1:], columns)]

    def _logprobs(self, tokens: list[int], offsets: list[int], columns: LogprobColumns) -> list[TokenLogprob]:
        logprobs = np.frombuffer(columns.logprobs, "<f4").tolist()
        ids = ids_from_bytes(columns.top_ids).reshape(len(tokens), columns.top).tolist()
        values = np.frombuffer(columns.top_logprobs, "<f4").reshape(len(tokens), columns.top).tolist()
        tops = [[(i, self._bytes_of[i], v) for i, v in zip(*x, strict=True)] for x in zip(ids, values, strict=True)]
        return [
            TokenLogprob(id=token, data=self._bytes_of[token], logprob=logprob, offset=offset, top=top)
            for token, logprob, offset, top in zip(tokens, logprobs, offsets, tops, strict=True)
        ]

    def _decode(self, token: int) -> tuple[int, str]:
        """Return where the token's own text begins, and the text that it completes.

        The text may begin with a partial character of earlier tokens that this one does not continue.
        """
        text = "" if token in self._hidden else self._decoder.feed(token)
        self._offset += len(text)
        return self._offset - self._decoder.own_length(token, text), text

    def advance(self, token: int, output_ids: bytes, columns: LogprobColumns | None, end: Finished | None) -> UserReply:
        """Return the reply for one more token. `output_ids` are the bytes of `token`.

        It is terminal because of `end`, a stop string, or an error in decoding.
        """
        self._completion_tokens += 1
        if self._thinking is not None:
            self._thinking.feed(token)
        is_first = self._completion_tokens == 1
        started, prompt, text = self._started, "", ""
        logprobs: list[TokenLogprob] = []
        try:
            if is_first:
                prompt, logprobs = self._begin()
            if is_first and started.sampling_params.max_tokens == 0 and (end is None or end.failure is None):
                # The sampled token is not a result.
                self._completion_tokens, output_ids = 0, b""
                end = Finished(uid=started.uid, reason=FinishReason.LENGTH)
            else:
                is_shown = end is None or end.has_text
                offset, text = self._decode(token) if is_shown else (self._offset, "")
                if columns is not None:
                    logprobs = logprobs + self._logprobs([token], [offset], columns)
                text, end = self._show(text, end)
        except Exception as e:  # one request's failure must not affect the others
            logger.exception("could not decode token %d of request %d", token, started.uid)
            failure = Failure(message=f"could not decode token {token}: {e}")
            text, end = "", Finished(uid=started.uid, reason=FinishReason.ERROR, failure=failure)
        reply = self._reply(prompt + text, end, logprobs, output_ids)
        if not is_first:
            return reply
        return msgspec.structs.replace(
            reply,
            queue_seconds=started.queue_seconds,
            prefill_chunks=started.prefill_chunks,
            embedding=started.embedding,
        )

    def end(self, end: Finished) -> UserReply:
        """Return the terminal reply of a request that ends without a new token, with the text held back."""
        text, ended = self._show("", end)
        return self._reply(text, ended, [], b"")

    def _show(self, text: str, end: Finished | None) -> tuple[str, Finished | None]:
        """Return the text to show now, and the end if there is one: `end`, or a stop string in the text.

        At the end, the text held back is shown, too.
        """
        if end is not None:
            text += self._decoder.finish()
        if self._stops is None:
            return text, end
        shown, stop = self._stops.feed(text)
        if stop is not None:
            return shown, Finished(uid=self._started.uid, reason=FinishReason.STOP, stop_reason=stop)
        return (shown if end is None else shown + self._stops.flush()), end

    def _reply(self, text: str, end: Finished | None, logprobs: list[TokenLogprob], output_ids: bytes) -> UserReply:
        started = self._started
        return UserReply(
            uid=started.uid,
            text=text,
            completion_tokens=self._completion_tokens,
            prompt_tokens=started.prompt_tokens,
            cached_tokens=started.cached_tokens,
            finish_reason=None if end is None else end.reason,
            stop_reason=None if end is None else end.stop_reason,
            failure=None if end is None else end.failure,
            logprobs=logprobs,
            output_ids=output_ids,
            drafted_tokens=self.drafted_tokens,
            accepted_tokens=self.accepted_tokens,
            reasoning_tokens=0 if self._thinking is None else self._thinking.count,
        )


class DetokenizeManager:
    """The decoding state of all running requests.

    Invariant: a request gets exactly one terminal reply. A request that a stop string has ended stays in `_stopped`
    until the scheduler's own end of it arrives and is dropped.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = TokenBytes(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = {token.content: i for i, token in added.items() if token.special}
        self._outputs: dict[int, _Output] = {}
        self._stopped: dict[int, int] = {}  # uid -> the incarnation whose end of it is to be dropped
        self._lost: set[int] = set()  # incarnations
        self.dropped = 0  # inconsistent tokens and starts

    @property
    def entries(self) -> int:
        """The number of requests with state here. It must be 0 when idle."""
        return len(self._outputs) + len(self._stopped)

    def decode(self, tokens: list[int], params: SamplingParams, prompt: list[int]) -> str:
        """Return the text of all tokens of a request, to which its increments add up.

        The last CONTEXT_TOKENS of `prompt` are enough.
        """
        hidden = self._hidden(params)
        return TextDecoder(self._bytes_of, _context(prompt, hidden)).finish(_visible(tokens, hidden))

    def _hidden(self, params: SamplingParams) -> frozenset[int]:
        """Return the ids of the tokens that are not part of the text."""
        if not params.skip_special_tokens:
            return frozenset()
        return frozenset(i for text, i in self._special_ids.items() if text not in params.shown_tokens)

    def _drop(self, what: str, uid: int) -> None:
        self.dropped += 1
        logger.error("dropped: " + what, uid)

    def ignore(self, incarnation: int) -> None:
        """Drop all further messages from `incarnation`, which is over. Its requests continue in other incarnations."""
        self._lost.add(incarnation)
        self._stopped = {uid: by for uid, by in self._stopped.items() if by != incarnation}

    def detokenize(self, msg: DetokenizeMsg) -> tuple[list[UserReply], list[int]]:
        """Return a reply for each request of the step, and the uids to abort because of a stop string.

        Raises `ValueError` and changes nothing if the arrays are inconsistent.
        """
        if msg.incarnation in self._lost:
            return [], []
        uids, tokens = np.frombuffer(msg.uids, dtype="<i8").tolist(), ids_from_bytes(msg.tokens).tolist()
        if len(uids) != len(tokens) or len(set(uids)) != len(uids):
            raise ValueError(f"{len(tokens)} tokens for the requests {uids[:8]}")
        for started in msg.started:
            if started.uid in self._outputs or started.uid in self._stopped:
                self._drop("request %d began twice", started.uid)
            else:
                self._outputs[started.uid] = _Output(started, self._bytes_of, self._hidden(started.sampling_params))
        for uid, count in msg.drafted:
            if (drafting := self._outputs.get(uid)) is not None:
                drafting.drafted_tokens += count
        columns = {c.uid: c for c in msg.logprobs}
        ends = {f.uid: f for f in msg.finished}
        replies: list[UserReply] = []
        aborts: list[int] = []
        for i, (uid, token) in enumerate(zip(uids, tokens, strict=True)):
            output = self._outputs.get(uid)
            if output is None:
                if uid not in self._stopped:
                    self._drop("a token of request %d, which never began", uid)
                continue
            end = ends.get(uid)
            output.accepted_tokens += msg.are_drafts
            reply = output.advance(token, msg.tokens[4 * i : 4 * i + 4], columns.get(uid), end)
            replies.append(reply)
            if reply.finish_reason is not None:
                del self._outputs[uid]
                self._stopped[uid] = msg.incarnation
                if end is None:
                    aborts.append(uid)
        for uid, end in ends.items():
            if uid in self._stopped:
                del self._stopped[uid]
            elif (output := self._outputs.pop(uid, None)) is not None:
                replies.append(output.end(end))
            else:  # ended without a token
                replies.append(
                    UserReply(uid=uid, finish_reason=end.reason, stop_reason=end.stop_reason, failure=end.failure)
                )
        return replies, aborts
