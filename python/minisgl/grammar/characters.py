"""What GBNF and the patterns of JSON Schema (ECMA-262) share: characters, escapes, classes, and groups that repeat."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from typing import Final

CHAR: Final = r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\U[0-9a-fA-F]{8}|\\[^0-9A-Za-z]|\\[0abefnrtv]|[^\\]"
_NAMED: Final = dict(zip("0abefnrtv", "\0\a\b\x1b\f\n\r\t\v", strict=True))
_RANGE: Final = re.compile(f"({CHAR})(?:-({CHAR}))?", re.DOTALL)
END: Final = 0x110000  # after the last code point
_SPACES: Final = "\t-\r \u00a0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"
_CLASSES = {r"\d": "0-9", r"\w": "0-9A-Z_a-z", r"\s": _SPACES}  # what they stand for inside brackets


@dataclass(slots=True)
class Item:
    """A part of a sequence. `value` is its text, or the alternatives of a group, whose `kind` is what opens it."""

    kind: str
    value: str | Choice
    count: str = ""


Choice = list[list[Item]]


def parse_choice(tokens: deque[tuple[str, str]]) -> Choice:
    """Pop alternatives from kinds and values of `tokens`, up to a rule's head or a closing parenthesis."""
    choice: Choice = [[]]
    while tokens and tokens[0][0] != "head" and tokens[0][1] != ")":
        kind, value = tokens.popleft()
        if value == "|":
            choice.append([])
        elif value[0] == "(":
            choice[-1].append(Item(value, parse_choice(tokens)))
            if not tokens or tokens.popleft()[1] != ")":
                raise ValueError("a parenthesis is not closed")
        elif kind != "count":
            choice[-1].append(Item(kind, value))
        elif not choice[-1]:
            raise ValueError(f"{value} has nothing to repeat")
        elif choice[-1][-1].count:
            choice[-1][-1] = Item("(", [[choice[-1][-1]]], value)
        else:
            choice[-1][-1].count = value
    return choice


def decode(char: str) -> str:
    """Return the character that is written as `char`, which may be an escape."""
    if len(char) > 2:
        return chr(int(char[2:], 16))
    return _NAMED.get(char[-1], char[-1]) if len(char) == 2 else char


def ranges(text: str) -> list[tuple[int, int]]:
    """Return the first and last code points of the ranges of a class, or of a character or escape."""
    inside, is_negation = (text[1:-1], text[1] == "^") if text[0] == "[" else (text, False)
    inside = re.sub(r"\\.", lambda escape: _CLASSES.get(escape[0], escape[0]), inside[is_negation:], flags=re.DOTALL)
    spans = sorted((ord(decode(first)), ord(decode(last or first))) for first, last in _RANGE.findall(inside))
    if not is_negation:
        return spans
    gaps, start = [], 0
    for first, last in [*spans, (END, END)]:
        if start < first:
            gaps.append((start, first - 1))
        start = max(start, last + 1)
    return gaps


def class_of(spans: list[tuple[int, int]]) -> str:
    """Return the class of the characters in `spans`, as Rust's regular expressions write it."""
    return "[" + "".join(f"\\u{{{first:x}}}-\\u{{{last:x}}}" for first, last in spans) + "]"


for _name in ("d", "w", "s"):
    _CLASSES[f"\\{_name.upper()}"] = "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges(rf"[^\{_name}]"))
