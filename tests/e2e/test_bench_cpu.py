"""benchmark/cpu/compare.py with the engines that are installed, on the smallest shape."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

SCRIPTS = Path(__file__).parents[2] / "benchmark"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the scripts importable."""
    for folder in (SCRIPTS, SCRIPTS / "cpu"):
        monkeypatch.syspath_prepend(str(folder))


def run(path: Path, *argv: str) -> dict[str, Any]:
    import compare

    compare.main([*argv, "--json", str(path)])
    report: dict[str, Any] = json.loads(path.read_text())
    return report


@pytest.mark.slow
def test_beside_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--repeat", "1", "--steps", "2", "--cases", "decode,prefill", "--against", "minisgl,transformers")
    argv += ("--quantization", "int8", "--threads", "1")
    report = run(tmp_path / "cpu.json", *argv)
    assert [r["case"] for r in report["results"]] == ["decode, batch 1", "decode, batch 16", "prefill, 512 tokens"]
    for r in report["results"]:
        assert list(r["figures"]) == ["minisgl int8", "minisgl bfloat16", "transformers"]
        assert all(figure["median"] > 0 for figure in r["figures"].values())
    assert report["machine"]["cpu"] and report["machine"]["torch"] == torch.__version__
    assert "ratio" in capsys.readouterr().out


@pytest.mark.slow
def test_everything_that_is_installed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(tmp_path / "cpu.json", "--repeat", "1", "--steps", "2")
    assert report["results"][-1]["case"] == "HTTP, 16 streams"
    text = capsys.readouterr().out
    for name in ("continuous", "serve", "llama.cpp"):
        assert (name in report["skipped"]) == (f"skipped {name}: " in text)
        assert name in report["skipped"] or any(name in beside for r in report["results"] for beside in r["figures"])


@pytest.mark.parametrize(("kind", "tolerance"), [("F32", 1e-3), ("BF16", 1e-2), ("Q8_0", 5e-2), ("Q4_0", 0.5)])
def test_llama_cpp_computes_the_same_model(tmp_path: Path, kind: str, tolerance: float) -> None:
    pytest.importorskip("gguf")
    pytest.importorskip("llama_cpp")
    from checkpoint import write_checkpoint
    from llama import LlamaCpp, write_gguf

    folder = write_checkpoint("qwen3-10m", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [np.random.default_rng(i).integers(5, 4000, 20 + i).tolist() for i in range(20)]
    llama = LlamaCpp(write_gguf(folder, kind), 1)
    llama.run(prompts, list(range(1, 21)))
    llama.run(prompts[:1], [1])
    with torch.inference_mode():
        want = model(torch.tensor(prompts[:1])).logits[0, -1].numpy()
    assert np.abs(llama.logits(len(prompts[0]) - 1) - want).max() < tolerance * np.abs(want).max()
