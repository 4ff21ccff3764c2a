"""Explains names and commands of other servers that have another name or another meaning here.

The tables are `foreign.toml` for options and `fields.toml` for fields of requests and paths. An option with the same
meaning is an alias of ours (`options.py`).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Foreign:
    """The values with which an option changes nothing, sentences by patterns of names, in order, and by commands."""

    redundant: Mapping[str, list[str]]
    sentences: Mapping[str, str]
    commands: Mapping[str, str]


@cache
def foreign() -> Foreign:
    """Read the table."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    sentences = {entry["flags"]: entry["sentence"] for entry in table["named"]}
    return Foreign(table["redundant"], sentences, table["commands"])


@cache
def field_names() -> dict[str, Any]:
    """Read the table of fields and paths."""
    return tomllib.loads(Path(__file__).with_name("fields.toml").read_text(encoding="utf-8"))


def sentence_for(name: str) -> str:
    """Return the sentence about the option `name` (with underscores), or about name=value; "" if there is none.

    The names of sampling parameters begin with "sampling.".
    """
    for patterns, sentence in foreign().sentences.items():
        if any(fnmatchcase(name, pattern) for pattern in patterns.split()):
            return sentence
    return ""


def asks_nothing(name: str, value: Any) -> bool:
    """Return whether another engine's option with this `value` asks for what happens anyway."""
    if name in foreign().redundant:
        return value is None or str(value).lower() in foreign().redundant[name]
    return value in (None, False, "") and bool(sentence_for(name))
