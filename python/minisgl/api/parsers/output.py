"""The parsers of one answer in a row, and what they find in the shapes of OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from minisgl.api.parsers.pieces import Content, Parser, Piece, Reasoning, ToolCall
from minisgl.api.parsers.reasoning import ReasoningParser
from minisgl.api.parsers.tools import ToolParser
from minisgl.core import FinishReason

TOOL_CALLS: Final = "tool_calls"  # the finish reason

_to_json: Final = msgspec.json.Encoder().encode


class OutputParser:
    """One answer: its reasoning first, then tool calls in what is left. Either parser may be missing."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._parsers: list[Parser] = [p for p in (reasoning, tools) if p is not None]
        self._calls = 0

    def feed(self, text: str) -> list[Piece]:
        pieces: list[Piece] = [Content(text)] if text else []
        for parser in self._parsers:
            pieces = _through(parser, pieces)
        return self._count(pieces)

    def flush(self) -> list[Piece]:
        pieces: list[Piece] = []
        for parser in self._parsers:
            pieces = _through(parser, pieces) + parser.flush()
        return self._count(pieces)

    def finish_reason(self, reason: FinishReason) -> str:
        """What the client is told: a model that ended by itself with a call waits for the result."""
        return TOOL_CALLS if reason is FinishReason.STOP and self._calls else reason

    def message(self, text: str) -> dict[str, Any]:
        """The assistant's message for the whole `text` of an answer; ends the parser."""
        pieces = [*self.feed(text), *self.flush()]
        content = "".join(p.text for p in pieces if isinstance(p, Content))
        reasoning = "".join(p.text for p in pieces if isinstance(p, Reasoning))
        calls = [_call(p, p.arguments) for p in pieces if isinstance(p, ToolCall)]
        message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls or reasoning else "")}
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def deltas(self, text: str, is_last: bool) -> Iterator[bytes]:
        """What `text`, and the end after it, adds to a stream. A call is two: its name, then its arguments."""
        index = self._calls
        pieces = self.feed(text) + (self.flush() if is_last else [])
        for piece in _merged(pieces):
            match piece:
                case Content(shown):
                    yield b'{"content":' + _to_json(shown) + b"}"
                case Reasoning(shown):
                    yield b'{"reasoning_content":' + _to_json(shown) + b"}"
                case ToolCall():
                    head = {"index": index, **_call(piece, "")}
                    rest = {"index": index, "function": {"arguments": piece.arguments}}
                    yield b'{"tool_calls":[' + _to_json(head) + b"]}"
                    yield b'{"tool_calls":[' + _to_json(rest) + b"]}"
                    index += 1

    def _count(self, pieces: list[Piece]) -> list[Piece]:
        self._calls += sum(isinstance(p, ToolCall) for p in pieces)
        return pieces


def _through(parser: Parser, pieces: Iterable[Piece]) -> list[Piece]:
    result: list[Piece] = []
    for piece in pieces:
        result += parser.feed(piece.text) if isinstance(piece, Content) else [piece]
    return result


def _merged(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """Neighbours of one kind as one, so that the number of events does not depend on how a parser works."""
    texts: list[str] = []
    kind: type[Content] | type[Reasoning] = Content
    for piece in pieces:
        if texts and not isinstance(piece, kind):
            yield kind("".join(texts))
            texts = []
        if isinstance(piece, ToolCall):
            yield piece
        else:
            kind = type(piece)
            texts.append(piece.text)
    if texts:
        yield kind("".join(texts))


def _call(call: ToolCall, arguments: str) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
