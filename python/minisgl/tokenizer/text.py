"""Tokens -> text as they come: half a character is held back until the rest of it is there."""

from __future__ import annotations

import codecs
import re
from typing import Final, Protocol

from tokenizers import Tokenizer, decoders

_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
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


class TokenBytes(dict[int, bytes]):
    """The bytes of each token of a byte-level BPE, looked up on first use."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._alphabet = _byte_of_char()

    def __missing__(self, token: int) -> bytes:
        """Empty for an id that the tokenizer does not have (models pad their vocabulary)."""
        text = self._tokenizer.id_to_token(token) or ""
        try:
            data = bytes([self._alphabet[c] for c in text])
        except KeyError:
            data = text.encode()  # an added token, which is not spelled in the byte alphabet
        self[token] = data
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


class PieceBytes:
    """The bytes of each token of any other vocabulary: SentencePiece's spaces and byte tokens, the rest as it is."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __getitem__(self, token: int) -> bytes:
        """Empty for an id that the tokenizer does not have."""
        text = self._tokenizer.id_to_token(token) or ""
        if (byte := _BYTE_PIECE.fullmatch(text)) is not None:
            return bytes([int(byte[1], 16)])
        return text.replace("\u2581", " ").encode()


class TextDecoders:
    """Makes the decoder that suits a tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._token_bytes = TokenBytes(tokenizer) if isinstance(tokenizer.decoder, decoders.ByteLevel) else None
        pieces = PieceBytes(tokenizer) if self._token_bytes is None else self._token_bytes
        self.bytes_of: TokenBytes | PieceBytes = pieces  # of each token by itself

    def new(self) -> TextDecoder:
        """A decoder for one request."""
        return WindowDecoder(self._tokenizer) if self._token_bytes is None else ByteDecoder(self._token_bytes)

    def decode(self, tokens: list[int]) -> str:
        """What a new decoder would give for all of them, one after the other; quicker where they are bytes."""
        if self._token_bytes is not None:
            return b"".join(map(self._token_bytes.__getitem__, tokens)).decode("utf-8", "replace")
        decoder = self.new()
        return "".join(map(decoder.feed, tokens)) + decoder.flush()
