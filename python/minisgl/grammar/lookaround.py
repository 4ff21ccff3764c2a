"""Rewrites patterns with look-ahead, which llguidance's regular expressions lack, without it.

A pattern is a set of whole texts. What follows a look-ahead must also match it, or must not: an intersection with its
set, or with the complement. The derivatives of such a set (Brzozowski, 1964) are the states of an automaton, and
removing state after state yields a plain pattern. A look-ahead at the beginning becomes a pattern of its own, since
schemas can ask for several; so most patterns need no automaton.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any, Final

from minisgl.grammar.characters import END, Choice, Item, class_of, parse_choice, ranges

MAX_STATES: Final = 100
MAX_CHARS: Final = 50_000  # of the plain pattern
_LOOK: Final = re.compile(r"\(\?<?[=!]")
_PART: Final = re.compile(
    r"""(?P<set>\\[ux][0-9a-fA-F]+|\\[^0-9A-Za-z]|\\[dDwWsS0fnrtv]|\[(?:\\[^bcpPkB1-9]|[^\]\\])+\]|[^\\[(){}|*+?^$])
    |(?P<count>[*+?]|\{\d+(?:,\d*)?\})\??|(?P<mark>[|)^$]|\((?!\?)|\(\?[=!])|(?P<group>\()\?(?::|P?<\w+>)|(?P<unknown>.)""",
    re.VERBOSE | re.DOTALL,
)
# A set of texts: ("set", symbols), ("cat", a, b), ("star", a), ("or", terms) or ("not", a). A symbol stands for all
# characters that no class of the pattern tells apart.
_Term = tuple[Any, ...]
_ZERO_WIDTH: Final = {"^", "$", "(?=", "(?!"}
_NOTHING: Final[_Term] = ("set", frozenset())
_EMPTY: Final[_Term] = ("star", _NOTHING)
_ALL: Final[_Term] = ("not", _NOTHING)


@lru_cache(256)
def plain_patterns(pattern: str) -> tuple[str, ...]:
    """Return patterns without look-ahead: all of them match where `pattern` does. Raises `ValueError` if it cannot."""
    patterns: list[str] = []
    while (leading := re.match(r"\^\(\?([=!])", pattern)) and (end := _end_of_group(pattern)):
        inside, pattern = f"^(?:{pattern[leading.end() : end - 1]})", f"^{pattern[end:]}"
        patterns += plain_patterns(inside) if leading[1] == "=" else [_Automaton(inside).pattern(is_complement=True)]
    return *patterns, _Automaton(pattern).pattern() if _LOOK.search(pattern) else pattern


def _end_of_group(pattern: str) -> int:
    """Return where the first group of `pattern` ends; 0 if the pattern has alternatives outside groups."""
    depth = end = 0
    for part in re.finditer(r"\\.|\[(?:\\.|[^\]\\])*\]|[()|]", pattern, re.DOTALL):
        depth += (part[0] == "(") - (part[0] == ")")
        if part[0] == "|" and not depth:
            return 0
        end = end or (0 if depth else part.end())
    return end


def _cat(a: _Term, b: _Term) -> _Term:
    if _NOTHING in (a, b):
        return _NOTHING
    if _EMPTY in (a, b):
        return b if a == _EMPTY else a
    return _cat(a[1], _cat(a[2], b)) if a[0] == "cat" else ("cat", a, b)


def _or(terms: Iterable[_Term]) -> _Term:
    flat = frozenset(one for term in terms for one in (term[1] if term[0] == "or" else [term])) - {_NOTHING}
    if _ALL in flat or not flat:
        return _ALL if flat else _NOTHING
    return ("or", flat) if len(flat) > 1 else next(iter(flat))


def _not(term: _Term) -> _Term:
    return term[1] if term[0] == "not" else ("not", term)


def _is_nullable(term: _Term) -> bool:
    """Return whether the empty text is in `term`."""
    match term:
        case "cat", a, b:
            return _is_nullable(a) and _is_nullable(b)
        case "or", terms:
            return any(map(_is_nullable, terms))
        case "not", a:
            return not _is_nullable(a)
    return bool(term[0] == "star")


@lru_cache(4096)
def _derive(term: _Term, symbol: int) -> _Term:
    """Return what may follow `symbol` in the texts of `term`."""
    match term:
        case "set", symbols:
            return _EMPTY if symbol in symbols else _NOTHING
        case "cat", a, b:
            longer = _cat(_derive(a, symbol), b)
            return _or([longer, _derive(b, symbol)]) if _is_nullable(a) else longer
        case "star", a:
            return _cat(_derive(a, symbol), term)
        case "or", terms:
            return _or(_derive(one, symbol) for one in terms)
    return _not(_derive(term[1], symbol))


def _parse(pattern: str) -> Choice:
    """Return alternatives of items, whose kinds are "set" and `_ZERO_WIDTH`, and "(" for groups."""
    tokens: deque[tuple[str, str]] = deque()
    for part in _PART.finditer(pattern):
        kind = part.lastgroup or ""
        if kind == "unknown":
            raise ValueError(f"{pattern[part.start() :][:10]!r} in a pattern with look-ahead")
        tokens.append((kind if kind in ("set", "count") else part[kind], part[kind]))
    choice = parse_choice(tokens)
    if tokens:
        raise ValueError("a parenthesis is not opened")
    return choice


def _is_plain(item: Item) -> bool:
    """Return whether `item` has no anchors and no look-ahead."""
    parts = item.value if isinstance(item.value, list) else []
    return item.kind not in _ZERO_WIDTH and all(map(_is_plain, chain(*parts)))


class _Automaton:
    """The texts in which `pattern` is found."""

    def __init__(self, pattern: str) -> None:
        self._symbols = _symbols({part["set"] for part in _PART.finditer(pattern) if part["set"]})
        choice = [(sequence, sequence[:1] == [Item("^", "^")]) for sequence in _parse(pattern)]
        self._texts = _or(_cat(_EMPTY if start else _ALL, self._sequence(s, _ALL, start)) for s, start in choice)

    def _sequence(self, sequence: list[Item], rest: _Term, is_start: bool) -> _Term:
        """Return the texts that `sequence` begins and `rest` ends. Only at the start there may be a "^"."""
        starts = [is_start and all(item.kind in _ZERO_WIDTH for item in sequence[:i]) for i in range(len(sequence))]
        for item, start in zip(reversed(sequence), reversed(starts), strict=True):
            rest = self._repeat(item, rest) if item.count else self._item(item, rest, start)
        return rest

    def _repeat(self, item: Item, rest: _Term) -> _Term:
        numbers = {"*": "0,", "+": "1,", "?": "0,1"}.get(item.count, item.count.strip("{}")).split(",")
        minimum = maximum = int(numbers[0])
        if numbers[-1]:
            maximum = int(numbers[-1])
        elif _is_plain(item):
            rest = _cat(("star", self._item(item, _EMPTY, False)), rest)
        else:
            raise ValueError("a look-ahead or anchor that repeats")
        built = rest
        for i in range(maximum):
            longer = self._item(item, built, False)
            built = longer if i >= maximum - minimum else _or([rest, longer])
        return built

    def _item(self, item: Item, rest: _Term, is_start: bool) -> _Term:
        """Return the texts that `item`, whatever its count, begins and `rest` ends."""
        match item.kind, item.value:
            case "set", text:
                return _cat(("set", frozenset(i for i, (key, _) in enumerate(self._symbols) if text in key)), rest)
            case "$", _:
                return _EMPTY if _is_nullable(rest) else _NOTHING
            case "^", _ if is_start:
                return rest
            case "(", list(choice):
                return _or(self._sequence(sequence, rest, is_start) for sequence in choice)
            case "(?=" | "(?!" as kind, list(choice):
                ahead = _or(self._sequence(sequence, _ALL, is_start) for sequence in choice)
                return _not(_or([_not(rest), ahead if kind == "(?!" else _not(ahead)]))
        raise ValueError(f"{item.kind!r} after the start")

    def pattern(self, is_complement: bool = False) -> str:
        """Return a plain pattern of these texts, or of all others."""
        states = [_not(self._texts) if is_complement else self._texts]
        edges = {(-1, 0): ""}  # from before the first state, to after all that may be the last one
        for state, texts in enumerate(states):  # which grow
            if _is_nullable(texts):
                edges[state, -2] = ""
            symbols: dict[_Term, list[int]] = {}
            for symbol in range(len(self._symbols)):
                symbols.setdefault(_derive(texts, symbol), []).append(symbol)
            states += [following for following in symbols if following not in states]
            for following, group in symbols.items():
                spans = [span for symbol in group for span in self._symbols[symbol][1]]
                edges[state, states.index(following)] = class_of(spans)
            if len(states) > MAX_STATES:
                raise ValueError(f"a look-ahead needs more than {MAX_STATES} states")
        remaining = set(range(len(states)))
        while remaining:
            before = {s: [(i, text) for (i, j), text in edges.items() if j == s != i] for s in remaining}
            after = {s: [(j, text) for (i, j), text in edges.items() if i == s != j] for s in remaining}
            state = min(remaining, key=lambda s: len(before[s]) * len(after[s]))
            remaining.remove(state)
            loop = f"(?:{edges[state, state]})*" if (state, state) in edges else ""
            edges = {pair: text for pair, text in edges.items() if state not in pair}
            for i, first in before[state]:
                for j, second in after[state]:
                    path = f"(?:{first}){loop}(?:{second})"
                    edges[i, j] = f"{edges[i, j]}|{path}" if (i, j) in edges else path
            if sum(map(len, edges.values())) > MAX_CHARS:
                raise ValueError("a look-ahead is too complex")
        if not edges:
            raise ValueError("it matches nothing")
        return f"^(?:{edges[-1, -2]})$"


def _symbols(classes: set[str]) -> list[tuple[frozenset[str], list[tuple[int, int]]]]:
    """Return sets of classes, with the ranges of the characters that are in these classes and in no others."""
    found = {text: ranges(r"[^\n]" if text == "." else text) for text in classes}
    cuts = {0, END}.union(*({first, last + 1} for spans in found.values() for first, last in spans))
    symbols: dict[frozenset[str], list[tuple[int, int]]] = {}
    for start, end in pairwise(sorted(cuts)):
        key = frozenset(text for text in classes if any(first <= start <= last for first, last in found[text]))
        symbols.setdefault(key, []).append((start, end - 1))
    return list(symbols.items())
