"""Several ranks from a user's script, however the script is run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import PATIENCE_S

SCRIPT = """
print("imported")
from minisgl import LLM, SamplingParams
with LLM(tp=2, threads=1, num_pages=64, max_running_requests=2, device="cpu") as llm:
    print(llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=4))[0].text)
"""


@pytest.mark.parametrize("way", ["file", pytest.param("standard input", marks=pytest.mark.slow)])
def test_ranks_start_without_a_guard(way: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-" if way == "standard input" else str(tmp_path / "script.py")]
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(
        command,
        input=SCRIPT,
        text=True,
        capture_output=True,
        timeout=PATIENCE_S,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["imported", ", a funny turtle"]
