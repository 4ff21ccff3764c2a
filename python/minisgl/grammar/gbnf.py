"""Translates GBNF, the notation of llama.cpp and XGrammar (`root ::= ...`), to Lark's, as llguidance reads it.

llguidance splits a text into lexemes, each as long as possible, before it parses. GBNF has no lexemes: its rules are
about characters. So what is not recursive becomes a single lexeme, in which nothing is split. A grammar without
recursion is one lexeme, and so exact. In others, and in grammars beyond `MAX_LEXEME`, what stands between two such
rules matches as much as it can.
"""

from __future__ import annotations

import json
import re
from collections import deque
from itertools import groupby
from math import inf
from typing import Final

from minisgl.grammar.characters import CHAR, Choice, Item, class_of, decode, parse_choice, ranges

MAX_LEXEME: Final = 2000  # characters, counts written out: each is a state of the lexer
_TOKEN: Final = re.compile(
    rf"""(?P<space>\s+|\#[^\n]*)|(?P<head>[\w-]+)\s*::=|(?P<name>[\w-]+)|"(?P<text>(?:(?!")(?:{CHAR}))*)"
    |(?P<set>\[\^?(?:(?!\])(?:{CHAR}))+\])|(?P<any>\.)
    |(?P<count>[*+?]|\{{[\d,\s]*\}})|(?P<mark>[|()])|(?P<unknown>.)""",
    re.VERBOSE | re.DOTALL,
)


def is_gbnf(text: str) -> bool:
    """Return whether `text` begins with a rule of GBNF. Lark has no `::=`, so no text is valid in both."""
    return re.match(r"(?:\s|#[^\n]*\n)*[\w-]+\s*::=", text) is not None


def gbnf_to_lark(text: str) -> str:
    """Return the grammar `text` in Lark's notation. Raises `ValueError` for what cannot be read."""
    return "\n".join(_Writer(_parse(text)).lines)


def _tokens(text: str) -> deque[tuple[str, str]]:
    """Return kinds and values; those of characters are in Lark's notation."""
    tokens: deque[tuple[str, str]] = deque()
    for found in _TOKEN.finditer(text):
        kind, part = found.lastgroup or "", found.groupdict("")
        match kind:
            case "space":
                continue
            case "unknown":
                line, rest = text.count("\n", 0, found.start()) + 1, text[found.start() :][:20]
                raise ValueError(f"line {line} is not GBNF that can be read: {rest!r}")
            case "text":
                chars = re.findall(CHAR, part["text"], re.S)
                tokens.append(("terminal", json.dumps("".join(map(decode, chars)), ensure_ascii=False)))
            case "set":
                tokens.append(("terminal", f"/{class_of(ranges(part['set']))}/"))
            case "any":
                tokens.append(("terminal", "/(?s:.)/"))
            case "count":
                tokens.append((kind, "".join(part[kind].split()).replace("{,", "{0,")))
            case _:
                tokens.append((kind, part[kind]))
    return tokens


def _parse(text: str) -> dict[str, Choice]:
    tokens, rules = _tokens(text), {}
    while tokens:
        kind, name = tokens.popleft()
        if kind != "head" or name in rules:
            raise ValueError(f"rule {name} is defined twice" if kind == "head" else f"{name} stands outside a rule")
        rules[name] = parse_choice(tokens)
    return rules


class _Writer:
    """Writes rules as `lines` of Lark: those that make a lexeme, and runs of what does, in upper case."""

    def __init__(self, rules: dict[str, Choice]) -> None:
        self._rules = rules
        self._sizes: dict[str, float] = {}  # infinity for rules that lead to a recursive one, and while it is unknown
        self._names = {name: f"{'R' if self._size_of(name) <= MAX_LEXEME else 'r'}{i}" for i, name in enumerate(rules)}
        self._size_of("root")
        self.lines = [f"start: {self._names['root']}"]
        for name, choice in rules.items():
            self.lines.append(f"{self._names[name]}: {self._write(choice, self._sizes[name] <= MAX_LEXEME)}")

    def _size_of(self, name: str) -> float:
        if name not in self._rules:
            raise ValueError(f"rule {name} is not defined")
        if name not in self._sizes:
            self._sizes[name] = inf
            self._sizes[name] = self._size(self._rules[name])
        return self._sizes[name]

    def _size(self, choice: Choice) -> float:
        """Return how many characters `choice` has when its counts are written out."""
        size = 0.0
        for item in (item for sequence in choice for item in sequence):
            if isinstance(item.value, list):
                one = self._size(item.value)
            elif item.kind == "terminal":
                one = len(item.value) if item.value[0] == '"' else 1
            else:
                one = self._size_of(item.value)
            size += one * max([1, *map(int, re.findall(r"\d+", item.count))])
        return size

    def _write(self, choice: Choice, is_lexeme: bool) -> str:
        return " | ".join(self._write_sequence(sequence, is_lexeme) or '""' for sequence in choice)

    def _write_sequence(self, sequence: list[Item], is_lexeme: bool) -> str:
        parts = []
        for is_small, run in groupby(sequence, lambda item: self._size([[item]]) <= MAX_LEXEME):
            items = " ".join(self._write_item(item, is_lexeme or is_small) for item in run)
            if is_small and not is_lexeme:
                name = f"L{len(self.lines)}"
                self.lines.append(f"{name}: {items}")
                items = name
            parts.append(items)
        return " ".join(parts)

    def _write_item(self, item: Item, is_lexeme: bool) -> str:
        if isinstance(item.value, list):
            return f"({self._write(item.value, is_lexeme)}){item.count}"
        return self._names.get(item.value, item.value) + item.count if item.kind == "name" else item.value + item.count
