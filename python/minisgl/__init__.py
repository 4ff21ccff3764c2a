"""minisgl: a small, fast and dependable inference engine for large language models.

>>> from minisgl import LLM, SamplingParams
>>> LLM().generate(["What is 12 + 30?"], SamplingParams(temperature=0))  # doctest: +SKIP
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minisgl.core.params import Grammar, SamplingParams
    from minisgl.llm.async_llm import AsyncLLM
    from minisgl.llm.completions import Completion, Piece
    from minisgl.llm.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "Completion", "Grammar", "Piece", "SamplingParams", "Thinking", "__version__"]


def __getattr__(name: str) -> Any:
    # The engine costs seconds and hundreds of megabytes to import (torch); the API server never needs it.
    if name in ("LLM", "AsyncLLM", "Completion", "Piece"):
        if "torch" not in sys.modules:
            from minisgl.process.log import tell

            tell("importing torch")
        from minisgl.llm import async_llm

        return getattr(async_llm, name)
    if name in ("Grammar", "SamplingParams", "Thinking"):
        from minisgl.core import params

        return getattr(params, name)
    raise AttributeError(f"module 'minisgl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
