"""Text of tokens as they arrive, without partial characters; and stop strings in streamed text."""

from __future__ import annotations

import codecs
import itertools
import re
from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer

from minisgl.core.errors import ConfigError

SPACE: Final = "\u2581"  # SentencePiece's mark for a space
_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTINUATIONS: Final = frozenset(bytes([b]) for b in range(0x80, 0xC0))  # bytes inside a character


def _byte_of_char() -> dict[str, int]:
    """Return the inverse of GPT-2's byte alphabet: printable Latin-1 is itself, other bytes are U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


class TokenBytes(dict[int, bytes]):
    """The bytes of each token, computed on first use. `strips_space`: a text begins without its first token's space."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises `ConfigError` for a tokenizer that is neither byte-level nor SentencePiece's kind."""
        decoder = repr(tokenizer.decoder)
        self._is_byte_level = "ByteLevel(" in decoder
        if not self._is_byte_level and SPACE not in decoder:
            raise ConfigError(
                f"tokenizer.json has the decoder {decoder:.60}, neither a byte-level one nor SentencePiece's"
            )
        self._tokenizer = tokenizer
        self._alphabet = _byte_of_char()
        spaced = next(
            (i for text, i in tokenizer.get_vocab().items() if text[:1] == SPACE and text[1:].isalpha()), None
        )
        self.strips_space = spaced is not None and not tokenizer.decode([spaced]).startswith(" ")

    def __missing__(self, token: int) -> bytes:
        """Return b"" for an id that the tokenizer does not have, since models pad their vocabulary."""
        text = self._tokenizer.id_to_token(token) or ""
        data = self[token] = self._byte_level(text) if self._is_byte_level else self._sentence_piece(text)
        return data

    def _byte_level(self, text: str) -> bytes:
        try:
            return bytes([self._alphabet[c] for c in text])
        except KeyError:
            return text.encode()  # an added token, which is not spelled in the byte alphabet

    @staticmethod
    def _sentence_piece(text: str) -> bytes:
        if (byte := _BYTE_PIECE.fullmatch(text)) is not None:
            return bytes([int(byte[1], 16)])
        return text.replace(SPACE, " ").encode()


class TextDecoder:
    """Decodes one request's tokens after those of `context`, with an incremental UTF-8 decoder.

    Each token takes constant time. Text that is not UTF-8 is U+FFFD.
    """

    def __init__(self, token_bytes: TokenBytes, context: Sequence[int] = ()) -> None:
        self._bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._strips = token_bytes.strips_space
        self._decode(context)

    def feed(self, token: int) -> str:
        """Return the text that `token` completes."""
        text = self._utf8.decode(self._bytes[token])
        return self._stripped(text) if self._strips else text

    def finish(self, tokens: Sequence[int] = ()) -> str:
        """Return the text held back and the text of the last `tokens`. Called once, at the end."""
        return self._decode(tokens, final=True)

    def own_length(self, token: int, text: str) -> int:
        """Return how many characters at the end of `text`, which `token` has completed, are those of `token`."""
        data = self._bytes[token]
        if not text.startswith("\ufffd") or data[:1] in _CONTINUATIONS:
            return len(text)
        return min(len(text), len(codecs.getincrementaldecoder("utf-8")("replace").decode(data)))

    def _decode(self, tokens: Sequence[int], final: bool = False) -> str:
        return self._stripped(self._utf8.decode(b"".join(map(self._bytes.__getitem__, tokens)), final))

    def _stripped(self, text: str) -> str:
        if self._strips and text:
            self._strips = False
            return text.removeprefix(" ")
        return text


class StopMatcher:
    """Finds the first of several stop strings in text that arrives in pieces.

    It is the Shift-And automaton (Baeza-Yates & Gonnet 1992) of all strings in a row: bit i of the state is set if the
    text ends with what a string has up to its character at i. So a character of text costs two operations on integers.
    Only the longest partial match is held back.
    """

    def __init__(self, stops: Sequence[str], include_stop: bool = False) -> None:
        self._include_stop = include_stop
        self._offsets = dict(zip(stops, itertools.accumulate(map(len, stops), initial=0), strict=False))
        self._first = sum(1 << offset for offset in {*self._offsets.values()})
        self._last = sum(1 << offset + len(stop) - 1 for stop, offset in self._offsets.items())
        self._bits: dict[str, int] = {}
        for i, char in enumerate("".join(stops)):
            self._bits[char] = self._bits.get(char, 0) | 1 << i
        self._state = 0
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text to show now, and the stop string if one is complete.

        Text after the stop string is never shown, and the stop string itself only with `include_stop`.
        """
        for end, char in enumerate(text, start=1):
            self._state = (self._state << 1 | self._first) & self._bits.get(char, 0)
            if self._state & self._last:
                seen, self._held = self._held + text[:end], ""
                stop = max(filter(seen.endswith, self._offsets), key=len)
                return seen if self._include_stop else seen.removesuffix(stop), stop
        seen, partial = self._held + text, 0
        if self._state:
            bits = [self._state >> offset & (1 << len(stop)) - 1 for stop, offset in self._offsets.items()]
            partial = max(bits).bit_length()
        self._held = seen[len(seen) - partial :]
        return seen[: len(seen) - partial], None

    def flush(self) -> str:
        """Return the text held back, at the end of the text."""
        return self._held
