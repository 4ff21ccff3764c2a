"""Rewrites patterns with look-ahead, which llguidance's regular expressions lack, without it.

A pattern is a set of whole texts. What follows a look-ahead must also match it, or must not: an intersection with its
set, or with the complement. The derivatives of such a set (Brzozowski, 1964) are the states of an automaton, and
removing state after state yields a plain pattern. A look-ahead at the beginning becomes a pattern of its own, since
schemas can ask for several; so most patterns need no automaton.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

from minisgl.grammar.characters import END, class_of, ranges

MAX_STATES: Final = 100
MAX_CHARS: Final = 50_000  # of the plain pattern
_LOOK: Final = re.compile(r"\(\?<?[=!]")
_PART: Final = re.compile(
    r"""(?P<set>\\[ux][0-9a-fA-F]+|\\[^0-9A-Za-z]|\\[dDwWsS0fnrtv]|\[(?:\\[^bcpPkB1-9]|[^\]\\])+\]|[^\\\[(){}|*+?^$])
    |(?P<open>\((?:\?(?:[:=!]|<[=!]|P?<\w+>))?)|(?P<count>[*+?]|\{(?P<least>\d+)(?:(?P<comma>,)(?P<most>\d*))?\})\??
    |(?P<mark>[|)^$])""",
    re.VERBOSE | re.DOTALL,
)
# A set of texts: ("set", symbols), ("cat", a, b), ("star", a), ("or", terms) or ("not", a). A symbol stands for all
# characters that no class of the pattern tells apart.
_Term = tuple[Any, ...]
# A part of a pattern: ("set", text), ("^", _), ("$", _), ("or" | "(?=" | "(?!", choice), ("repeat", node, least, most)
_Node = tuple[Any, ...]
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


def _parse(pattern: str) -> list[list[_Node]]:
    """Return alternatives of sequences."""
    stack: list[tuple[str, list[list[_Node]]]] = [("", [[]])]
    end = 0
    while end < len(pattern):
        part = _PART.match(pattern, end)
        kind = part.lastgroup if part else None
        sequence = stack[-1][1][-1]
        if part is None or (kind == "count" and not sequence) or (part[0].startswith("(?<") and part[0][3] in "=!"):
            raise ValueError(f"{pattern[end : end + 10]!r} in a pattern with look-ahead")
        if kind == "open":
            stack.append((part[0], [[]]))
        elif part[0] == "|":
            stack[-1][1].append([])
        elif part[0] == ")" and len(stack) > 1:
            opening, choice = stack.pop()
            stack[-1][1][-1].append((opening if opening in ("(?=", "(?!") else "or", choice))
        elif kind == "count":
            least = int(part["least"] or part[0][0] == "+")
            most = int(part["most"] or least) if part["most"] or (part["least"] and not part["comma"]) else None
            most = 1 if part[0][0] == "?" else most
            sequence.append(("repeat", sequence.pop(), least, most))
        else:
            sequence.append((kind if kind == "set" else part[0], part[0]))
        end = part.end()
    if len(stack) > 1:
        raise ValueError("a group is not closed")
    return stack[0][1]


def _kinds(node: _Node) -> Iterator[str]:
    """Yield the kinds of `node` and of all nodes in it."""
    yield node[0]
    match node:
        case "repeat", inner, _, _:
            yield from _kinds(inner)
        case _, list(choice):
            for inner in (inner for sequence in choice for inner in sequence):
                yield from _kinds(inner)


class _Automaton:
    """The texts in which `pattern` is found."""

    def __init__(self, pattern: str) -> None:
        self._symbols = _symbols({part["set"] for part in _PART.finditer(pattern) if part["set"]})
        choice = [(sequence, sequence[:1] == [("^", "^")]) for sequence in _parse(pattern)]
        self._texts = _or(_cat(_EMPTY if start else _ALL, self._sequence(s, _ALL, start)) for s, start in choice)

    def _sequence(self, sequence: list[_Node], rest: _Term, is_start: bool) -> _Term:
        """Return the texts that `sequence` begins and `rest` ends. Only at the start there may be a "^"."""
        starts = [is_start and all(item[0][0] in "(^" for item in sequence[:i]) for i in range(len(sequence))]
        for item, start in zip(reversed(sequence), reversed(starts), strict=True):
            rest = self._item(item, rest, start)
        return rest

    def _item(self, item: _Node, rest: _Term, is_start: bool) -> _Term:
        match item:
            case "set", text:
                return _cat(("set", frozenset(i for i, (key, _) in enumerate(self._symbols) if text in key)), rest)
            case "$", _:
                return _EMPTY if _is_nullable(rest) else _NOTHING
            case "^", _ if is_start:
                return rest
            case "or", choice:
                return _or(self._sequence(sequence, rest, is_start) for sequence in choice)
            case "(?=" | "(?!" as kind, choice:
                ahead = _or(self._sequence(sequence, _ALL, is_start) for sequence in choice)
                return _not(_or([_not(rest), ahead if kind == "(?!" else _not(ahead)]))
            case "repeat", inner, least, most if most is not None or not _ZERO_WIDTH & {*_kinds(inner)}:
                if most is None:
                    rest, most = _cat(("star", self._item(inner, _EMPTY, False)), rest), least
                built = rest
                for i in range(most):
                    longer = self._item(inner, built, False)
                    built = longer if i >= most - least else _or([rest, longer])
                return built
        raise ValueError(f"a look-ahead or anchor that repeats, or {item[0]!r} behind the start")

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
