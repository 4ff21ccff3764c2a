"""Checkpoints that `minisgl quantize` writes are served, and a failure leaves nothing behind.

transformers 5 with compressed-tensors 0.20 reads the same numbers from them (compared on 2026-11-23).
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from contract.checkpoints import configurations, save
from contract.harness import MiniEngine, Span
from minisgl import LLM, SamplingParams
from minisgl.__main__ import main
from minisgl.checkpoint.hf import BUILTIN_MODEL, load_config
from minisgl.checkpoint.quantization import read_quantization
from minisgl.core.errors import ConfigError
from minisgl.models import quantize
from minisgl.models.dequantize import dequantized
from minisgl.models.weight import open_all
from minisgl.ops.quantized import BLOCK, Format, Quantized
from support.faults import failing

pytestmark = pytest.mark.usefixtures("fixed_costs")

QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]


@pytest.mark.parametrize(
    ("scheme", "bytes_a_weight", "error"), [("fp8", 1.01, 0.04), ("int8", 1.02, 0.02), ("int4", 0.55, 0.25)]
)
def test_what_is_written_is_served(
    scheme: str, bytes_a_weight: float, error: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["quantize", "", str(out), "--scheme", scheme]) == 0
    assert f"{out}: " in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    for quantization in (None, "int8"):  # as it is, and made anew for the C++ step
        with LLM(str(out), threads=1, num_pages=200, quantization=quantization) as llm:
            assert llm.scheduler.drafts is not None, "the draft head was copied, too"
            assert llm.chat(QUESTION, SamplingParams(max_tokens=20, temperature=0))[0].text == "12 + 30 = 42."
    before, after = load_file(BUILTIN_MODEL / "model.safetensors"), load_file(out / "model.safetensors")
    name = "model.layers.3.mlp.down_proj"
    parts = [t for n, t in after.items() if n.startswith(name)]
    assert sum(t.nbytes for t in parts) < bytes_a_weight * before[f"{name}.weight"].numel()
    made = quantize.SCHEMES[scheme].tensors(before[f"{name}.weight"], 128)
    assert all(torch.equal(t.float(), after[f"{name}.{last}"].float()) for last, t in made.items())
    config = load_config(out)
    with ExitStack() as stack:
        matrix = dequantized(open_all([out / "model.safetensors"], stack), read_quantization(config))[f"{name}.weight"]  # type: ignore[arg-type]
        read = matrix.data[slice(0, matrix.shape[0]), slice(0, matrix.shape[1])]
    true = before[f"{name}.weight"].float()
    assert 0 < (read - true).norm() / true.norm() < error
    settings = config["quantization_config"]
    assert (settings.get("ignore") or settings["modules_to_not_convert"]) == ["lm_head"]


@pytest.mark.parametrize("scheme", quantize.SCHEMES)
def test_parts_of_a_matrix_are_rounded_as_the_whole(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(300, 256).bfloat16()  # two blocks of 128 rows and a rest
    whole = quantize.SCHEMES[scheme].tensors(weight, 128)
    monkeypatch.setattr(quantize, "PART", 1)
    parts = quantize.SCHEMES[scheme].tensors(weight, 128)
    assert all(torch.equal(t.float(), parts[last].float()) for last, t in whole.items())


def test_several_files_keep_their_index(tmp_path: Path) -> None:
    tensors = load_file(BUILTIN_MODEL / "model.safetensors")
    source = tmp_path / "in"
    source.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (source / name).write_bytes((BUILTIN_MODEL / name).read_bytes())
    files = {f"model-{i + 1}-of-2.safetensors": list(tensors)[i::2] for i in range(2)}
    for file, names in files.items():
        save_file({name: tensors[name] for name in names}, source / file)
    index = {"weight_map": {name: file for file, names in files.items() for name in names}}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    quantize.quantize(str(source), tmp_path / "out", "int4")
    places = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    for file in files:
        assert {n for n, place in places.items() if place == file} == load_file(tmp_path / "out" / file).keys()
    with LLM(str(tmp_path / "out"), threads=1, num_pages=100) as llm:
        assert llm.generate(["Once upon a time"], SamplingParams(max_tokens=5))[0].text


def test_what_cannot_be_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    quantize.quantize("", out, "fp8")
    assert main(["quantize", "", str(out), "--scheme", "int8"]) == 2
    assert f"{out} exists already" in capsys.readouterr().err
    assert main(["quantize", str(out), str(tmp_path / "again"), "--scheme", "int8"]) == 2
    assert "is quantized already" in capsys.readouterr().err
    assert main(["verify", str(out), "--num-pages=200", "--threads=1"]) == 2
    assert "this one is quantized" in capsys.readouterr().err
    assert main(["quantize", str(tmp_path / "none"), str(tmp_path / "again"), "--scheme", "int8"]) == 2


def test_the_output_may_be_in_the_folder_of_the_input(tmp_path: Path) -> None:
    shutil.copytree(BUILTIN_MODEL, tmp_path / "in")
    (tmp_path / "in" / "original").mkdir()
    for name in ("weights.pth", "params.json"):
        (tmp_path / "in" / "original" / name).write_text("{}")
    quantize.quantize(str(tmp_path / "in"), tmp_path / "in" / "out", "int8")
    assert [path.name for path in (tmp_path / "in" / "out" / "original").iterdir()] == ["params.json"]
    assert not list((tmp_path / "in").glob(".out*"))


def test_numbers_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    shutil.copytree(BUILTIN_MODEL, tmp_path / "in")
    tensors, name = load_file(BUILTIN_MODEL / "model.safetensors"), "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 4] = torch.nan
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"tensor {name} in .* not finite"):
        quantize.quantize(str(tmp_path / "in"), tmp_path / "out", "int8")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(quantize, "save_file", full)
    assert main(["quantize", "", str(tmp_path / "out"), "--scheme", "int4"]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_each_call_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize, "PROJECTION", re.compile(r"layers\.0\.mlp\.down_proj\.weight$"))  # the rest is quick
    out = tmp_path / "parent" / "out"
    n = failures = 0
    while True:
        n += 1
        try:
            with failing(n) as calls:
                quantize.quantize("", out, "int8")
        except (OSError, ConfigError):
            failures += 1
            assert not list(tmp_path.glob("*/*")), calls.failed
        else:
            assert (out / "config.json").is_file() and (out / "model.safetensors").is_file()
            shutil.rmtree(out)
        if calls.count < n:
            break
    assert failures > 20


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("name", ["glm4", "ernie4.5", "helium", "deepseek-v3"])
def test_quantized_heads_rotate_as_others_do(name: str, kind: str, tmp_path: Path) -> None:
    """The rows of q and k change places when they are loaded, with their scales if they are kept quantized."""
    config = copy.deepcopy(configurations()[name])
    config.hidden_size, config.intermediate_size, config.head_dim = 256, 256, 64
    if name == "deepseek-v3":  # the 192 rows that make latents end within a block
        config.moe_intermediate_size = config.q_lora_rank = config.kv_lora_rank = config.qk_nope_head_dim = 128
        config.qk_rope_head_dim, config.v_head_dim = 64, 128
    whole = save(tmp_path / "whole", config)
    quantize.quantize(str(whole.folder), tmp_path / kind, kind)
    spans = [Span(0, 0, [(7 * i * i + 3 * i) % 150 for i in range(70)])]
    kept = MiniEngine.load(tmp_path / kind, ops="reference", keeps_formats=True)
    assert any(isinstance(p.tensor, Quantized) and p.order is not None for p in kept.model.parameters)
    want = MiniEngine.load(tmp_path / kind, ops="reference").step(spans)
    assert (kept.step(spans) - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.parametrize(
    "kind", [Format(8, 0), Format(8, 0, is_integer=True), Format(8, BLOCK), Format(4, 128)], ids=str
)
def test_rows_change_places_with_their_scales(kind: Format) -> None:
    matrix = kind.empty(512, 256, torch.device("cpu"))
    matrix.round_from(torch.randn(512, 256) * torch.logspace(-2, 2, 512)[:, None])
    before = matrix.dense(torch.float32)
    within = torch.arange(512).view(-1, 2, 32).transpose(1, 2).flatten()
    assert matrix.reorder(within) and torch.equal(matrix.dense(torch.float32), before[within])
    across, before = torch.arange(512).flip(0), matrix.dense(torch.float32)
    assert matrix.reorder(across) == (kind.rows == 1)
    assert torch.equal(matrix.dense(torch.float32), before[across] if kind.rows == 1 else before)
