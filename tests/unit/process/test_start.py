"""What a start says first, and what it has imported by then."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import minisgl

HEAVY = "torch numpy zmq msgspec tokenizers jinja2 llguidance starlette uvicorn safetensors triton"
IMPORTED = f"sorted(set(sys.modules) & set({HEAVY.split()}))"


def run_on_terminal(code: str) -> tuple[str, str]:
    """Run Python `code`, with a terminal as stderr. Return what it wrote to stdout and stderr."""
    ours, its = os.openpty()
    try:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=its, text=True, check=True)
    finally:
        os.close(its)
    try:
        return done.stdout, os.read(ours, 1 << 16).decode().replace("\r\n", "\n")
    except OSError:  # nothing was written
        return done.stdout, ""
    finally:
        os.close(ours)


@pytest.mark.parametrize(
    "words", [["serve"], ["--port", "0"], ["chat"], ["generate", "x"], ["bench", "offline"], ["verify"], ["doctor"]]
)
def test_a_command_speaks_before_anything_heavy_is_imported(words: list[str]) -> None:
    name = "serve" if words[0] == "--port" else words[0]
    code = f"""
import sys
from minisgl import __main__ as cli
cli.COMMANDS[{name!r}] = lambda options: print({IMPORTED}) or 0
cli.main({words!r})"""
    assert run_on_terminal(code) == ("[]\n", f"minisgl: {name} is starting\n")


def test_the_engine_speaks_before_torch_is_imported() -> None:
    code = f"""
import sys
import minisgl
sys.modules["minisgl.llm"] = None  # importing it fails
try:
    minisgl.LLM
except ImportError:
    print({IMPORTED})"""
    assert run_on_terminal(code) == ("[]\n", "minisgl: importing torch\n")


def test_importing_the_package_imports_nothing_else_and_shows_no_helpers() -> None:
    code = f"import sys, minisgl; print({IMPORTED}, [m for m in sys.modules if m.startswith('minisgl')])"
    assert run_on_terminal(code) == ("[] ['minisgl']\n", "")
    public = {name for name in dir(minisgl) if not name.startswith("__")}
    assert public == {"LLM", "AsyncLLM", "SamplingParams", "Completion", "Grammar", "Piece", "Thinking"}
    assert all(hasattr(minisgl, name) for name in dir(minisgl))
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        minisgl.LMM  # noqa: B018
