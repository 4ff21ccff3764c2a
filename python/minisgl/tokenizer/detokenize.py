"""Token ids -> text, one step at a time. No ZeroMQ here: the worker process and the offline `LLM` share it.

The increments of a request, put together, equal the decoding of all its tokens: half a character is held back until
the rest of it comes or the request ends, and the beginning of a possible stop string until it is decided.
"""

from __future__ import annotations

import codecs
import logging
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np
from tokenizers import Tokenizer, decoders

from minisgl.core import FinishReason
from minisgl.message import DetokenizeMsg, Finished, Started, UserReply, ids_from_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

MAX_WINDOW: Final = 32  # tokens that `WindowDecoder` may hold back before it shows the broken characters


class TextDecoder(Protocol):
    """Incremental decoding of one request's tokens."""

    def feed(self, token: int) -> str:
        """The text that `token` completes."""

    def flush(self) -> str:
        """What is still held back; call once, at the end."""


def _byte_of_char() -> dict[str, int]:
    """GPT-2's byte alphabet inverted: printable Latin-1 stands for itself, the other bytes for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


class TokenBytes:
    """The bytes of each token of a byte-level BPE, looked up on first use."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._alphabet = _byte_of_char()
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token: int) -> bytes:
        """Empty for an id that the tokenizer does not have (models pad their vocabulary)."""
        if (data := self._known.get(token)) is None:
            text = self._tokenizer.id_to_token(token) or ""
            try:
                data = bytes([self._alphabet[c] for c in text])
            except KeyError:
                data = text.encode()  # an added token, which is not spelled in the byte alphabet
            self._known[token] = data
        return data


class ByteDecoder:
    """For byte-level BPE (GPT-2, Llama 3, Qwen): bytes through an incremental UTF-8 decoder, constant work a token."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        return self._utf8.decode(self._bytes[token])

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For any other tokenizer: decode a small window of tokens with and without the new ones and show the difference.

    The window starts at a token that has been shown, so that decoders which treat the first token differently (a
    stripped space) do so on both sides. Text that ends in U+FFFD may be half a character and is held back.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = 0  # how many tokens of the window have been shown
        self._is_start = True

    def feed(self, token: int) -> str:
        self._window.append(token)
        text = self._new_text()
        if not text or (text.endswith("\ufffd") and len(self._window) - self._shown < MAX_WINDOW):
            return ""
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return text

    def flush(self) -> str:
        return self._new_text()

    def _new_text(self) -> str:
        shown = self._tokenizer.decode(self._window[: self._shown], skip_special_tokens=False)
        return self._tokenizer.decode(self._window, skip_special_tokens=False)[len(shown) :]


class StopMatcher:
    """Finds the first of several stop strings in text that arrives in pieces.

    One matcher per string (Knuth, Morris & Pratt 1977), so a character costs the same however long the strings are.
    Held back are just the characters that may still become a stop string: the longest current partial match.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [(s, _failure(s)) for s in stops]
        self._matched = [0] * len(stops)
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string if one is complete (it and what follows is not shown)."""
        for end, char in enumerate(text, start=1):
            complete: str | None = None
            for i, (stop, failure) in enumerate(self._stops):
                n = self._matched[i]
                while n and stop[n] != char:
                    n = failure[n - 1]
                n += stop[n] == char
                if n == len(stop):
                    if complete is None or n > len(complete):
                        complete = stop
                    n = failure[n - 1]
                self._matched[i] = n
            if complete is not None:
                seen = self._held + text[:end]
                self._held = ""
                return seen[: len(seen) - len(complete)], complete
        seen = self._held + text
        cut = len(seen) - max(self._matched)
        self._held = seen[cut:]
        return seen[:cut], None

    def flush(self) -> str:
        """The text held back, when no more will come."""
        return self._held


def _failure(pattern: str) -> list[int]:
    """`failure[i]`: length of the longest proper prefix of pattern[:i+1] that is also its suffix."""
    failure = [0] * len(pattern)
    n = 0
    for i in range(1, len(pattern)):
        while n and pattern[i] != pattern[n]:
            n = failure[n - 1]
        n += pattern[i] == pattern[n]
        failure[i] = n
    return failure


class _Output:
    """One request's text so far, as far as it is still needed."""

    def __init__(self, started: Started, decoder: TextDecoder, special_ids: frozenset[int]) -> None:
        self.prompt_tokens = started.prompt_tokens
        self.cached_tokens = started.cached_tokens
        self.completion_tokens = 0
        self._decoder = decoder
        self._hidden = special_ids if started.skip_special_tokens else frozenset()
        self._stops = StopMatcher(started.stop) if started.stop else None

    def feed(self, token: int) -> tuple[str, str | None]:
        """Text to show, and the stop string that ends the request if there is one."""
        return self._watch("" if token in self._hidden else self._decoder.feed(token))

    def flush(self) -> tuple[str, str | None]:
        text, stop = self._watch(self._decoder.flush())
        if stop is None and self._stops is not None:
            text += self._stops.flush()
        return text, stop

    def _watch(self, text: str) -> tuple[str, str | None]:
        return (text, None) if self._stops is None else self._stops.feed(text)


class DetokenizeManager:
    """The text state of every request that is producing tokens.

    Invariant: a request gets exactly one terminal reply; one that a stop string ended stays in `_stopped` until the
    scheduler's own last word on it has come (and been dropped).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_bytes = TokenBytes(tokenizer) if isinstance(tokenizer.decoder, decoders.ByteLevel) else None
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._outputs: dict[int, _Output] = {}
        self._stopped: set[int] = set()

    @property
    def entries(self) -> int:
        """Requests that are remembered; 0 when idle, or something leaks."""
        return len(self._outputs) + len(self._stopped)

    def detokenize(self, msg: DetokenizeMsg) -> tuple[list[UserReply], list[int]]:
        """One reply for each request of the step, and the uids whose generation must be aborted (stop strings)."""
        for started in msg.started:
            self._outputs[started.uid] = _Output(started, self._new_decoder(), self._special_ids)
        ends = {f.uid: f for f in msg.finished}
        replies: list[UserReply] = []
        aborts: list[int] = []
        uids = np.frombuffer(msg.uids, dtype="<i8").tolist()
        for uid, token in zip(uids, ids_from_bytes(msg.tokens).tolist(), strict=True):
            output = self._outputs.get(uid)
            if output is None:
                if uid not in self._stopped:
                    logger.error("a token of request %d, which never started", uid)
                continue
            end = ends.get(uid)
            output.completion_tokens += 1
            reply = self._advance(uid, output, token, end)
            replies.append(reply)
            if reply.finish_reason is not None:
                del self._outputs[uid]
                self._stopped.add(uid)
                if end is None:
                    aborts.append(uid)
        for uid, end in ends.items():
            if uid in self._stopped:
                self._stopped.remove(uid)
            else:
                replies.append(self._end(uid, self._outputs.pop(uid, None), end, ""))
        return replies, aborts

    def _new_decoder(self) -> TextDecoder:
        return WindowDecoder(self._tokenizer) if self._token_bytes is None else ByteDecoder(self._token_bytes)

    def _advance(self, uid: int, output: _Output, token: int, end: Finished | None) -> UserReply:
        """The reply to one more token; terminal when `end` says so, a stop string is found, or the token breaks us."""
        try:
            text, stop = ("", None) if end is not None and not end.has_text else output.feed(token)
        except Exception as e:  # one request's trouble must not take the others' text with it
            logger.exception("could not decode token %d of request %d", token, uid)
            return self._reply(
                uid, output, "", FinishReason.ERROR, error=f"could not decode token {token}: {e}", status=500
            )
        if stop is not None:
            return self._reply(uid, output, text, FinishReason.STOP, stop_reason=stop)
        if end is not None:
            return self._end(uid, output, end, text)
        return UserReply(uid, text, output.completion_tokens, output.prompt_tokens, output.cached_tokens)

    def _end(self, uid: int, output: _Output | None, end: Finished, text: str) -> UserReply:
        """The terminal reply that the scheduler's `end` calls for, with what was held back."""
        if output is not None:
            rest, stop = output.flush()
            text += rest
            if stop is not None:
                return self._reply(uid, output, text, FinishReason.STOP, stop_reason=stop)
        if end.reason is FinishReason.ERROR:
            return self._reply(uid, output, text, end.reason, error=end.error, code=end.code or None, status=end.status)
        return self._reply(uid, output, text, end.reason, stop_reason=end.stop_token)

    @staticmethod
    def _reply(
        uid: int,
        output: _Output | None,
        text: str,
        reason: FinishReason,
        *,
        stop_reason: str | int | None = None,
        error: str = "",
        code: str | None = None,
        status: int = 200,
    ) -> UserReply:
        completion, prompt, cached = (
            (output.completion_tokens, output.prompt_tokens, output.cached_tokens) if output is not None else (0, 0, 0)
        )
        return UserReply(
            uid,
            text,
            completion,
            prompt,
            cached,
            reason,
            stop_reason=stop_reason,
            error=error,
            code=code,
            status=status,
        )
