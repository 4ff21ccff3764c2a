"""Suggests what a path that does not exist probably means."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from minisgl.errors import near_miss
from minisgl.settings.foreign import field_names

MAX_SHOWN: Final = 100
# Paths of Ollama, llama.cpp, TGI and older APIs -> ours, where the names are not similar.
ELSEWHERE: Final[dict[str, str]] = field_names()["paths"]


def unknown_path(path: str, paths: Iterable[str]) -> str:
    """Return the error message for `path`, which is not among the served `paths`, with the path that is probably meant.

    That is the one in `ELSEWHERE`, else the longest one that, without /v1, ends `path` (the base URL is wrong), else
    the one that `path` misspells.
    """
    served = [p for p in paths if "{" not in p and p != "/"]
    tails = [p for p in served if path.endswith(p.removeprefix("/v1"))]
    meant = ELSEWHERE.get(path) or max(tails, key=len, default=None) or near_miss(path[:MAX_SHOWN], served)
    hint = f"use {meant}" if meant else "/openapi.json lists the paths"
    return f"there is no path {path[:MAX_SHOWN]} here; {hint}"
