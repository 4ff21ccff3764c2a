"""`minisgl verify` with the built-in model: right numbers pass, wrong ones do not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minisgl.__main__ import main
from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.tools.verify import command

FEW_PAGES = ("--num-pages=200", "--threads=1", "--length=96")


def run(path: Path, *argv: str) -> tuple[int, dict[str, dict[str, Any]]]:
    code = main(["verify", *FEW_PAGES, "--json", str(path), *argv])
    return code, {check["name"]: check for check in json.loads(path.read_text())["checks"]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_builtin_model_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str) -> None:
    code, checks = run(tmp_path / "table.json", "--dtype", dtype, "--speculate", "ngram")
    assert code == 0
    ways = ("prefill", "chunked prefill", "decode", "prefix hit", "mixed batch")
    texts = ("tokens", "text", "chats")
    assert list(checks) == [f"{what} = transformers" for what in (*texts, *ways)] + [
        "cached = cold",
        "overlap on = off",
        "drafts = none",
        "graph = eager",
    ]
    assert all(check["passed"] for name, check in checks.items() if name != "graph = eager")
    assert checks["graph = eager"]["passed"] is None, "a CPU has no graphs"
    out = capsys.readouterr().out
    assert out.count("pass") == 11 and "skipped" in out


def test_two_ranks_are_compared_without_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    code, checks = run(tmp_path / "table.json", "--tp", "2", "--max-running-requests", "16")
    assert code == 0 and checks["tp 2 = tp 1"]["figure"] == "6 identical"
    without = checks["decode = transformers"]
    assert without["passed"] is None and "minisgl[verify]" in without["figure"] and checks["cached = cold"]["passed"]


def test_one_wrong_matrix_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As if one projection in one of the six layers had been loaded 1 % too small."""
    shutil.copytree(BUILTIN_MODEL, tmp_path / "other")
    tensors = load_file(tmp_path / "other" / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"] *= 1.01
    save_file(tensors, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    real = command.reference

    def of_other(
        folder: Path, sequences: list[list[int]], dtype: torch.dtype, device: torch.device
    ) -> command.Reference:
        return real(tmp_path / "other", sequences, dtype, device)

    monkeypatch.setattr(command, "reference", of_other)
    code, checks = run(tmp_path / "table.json")
    assert code == 1 and not any(check["passed"] for check in checks.values() if "logits" in check["compared"])
    assert capsys.readouterr().out.count("FAIL") == 5


def test_fewer_bits_are_compared_with_the_same_engine_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{way} ~ unrounded" for way in (*command.WAYS, "reading", "perplexity")]
    code, checks = run(tmp_path / "table.json", "--quantization", "int8")
    assert code == 0 and list(checks)[:7] == names and all(checks[name]["passed"] for name in names)
    monkeypatch.setattr(command, "EIGHT_BITS", (1e-9, -0.5))
    code, checks = run(tmp_path / "table.json", "--kv-cache-dtype", "fp8")
    assert code == 1 and not any(checks[name]["passed"] for name in names)
    assert 1e-9 < float(checks["reading ~ unrounded"]["figure"].removeprefix("KL ")) < 0.01


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--dummy-weight",), "no checkpoint to verify"),
        (("--max-running-requests", "2"), "--max-running-requests of 16"),
        (("--length", "10"), "too short"),
        (("--tp", "2", "--nnodes", "2"), "works on one host"),
        (("/no/such/model",), "does not exist"),
    ],
)
def test_bad_settings(argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", *argv]) == 2
    assert message in capsys.readouterr().err
