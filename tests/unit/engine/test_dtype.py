"""What `--dtype auto` is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.core.errors import NativeError
from minisgl.distributed.info import ALONE
from minisgl.engine.resolve import resolve
from minisgl.native.library import load_native
from minisgl.settings.options import EngineConfig
from minisgl.tools.bench.shapes import SHAPES

LARGE = SHAPES["qwen3-0.6b"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    try:
        load_native()
    except NativeError as e:
        pytest.skip(str(e))
    return tmp_path


def auto(folder: Path, shape: dict[str, Any], device: str = "cpu", **options: Any) -> torch.dtype:
    (folder / "config.json").write_text(json.dumps(shape))
    return resolve(EngineConfig(model=str(folder), dummy_weight=True, **options), device).dtype


def test_large_bfloat16_models_stay_so_where_the_native_step_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert auto(folder, LARGE) is torch.bfloat16
    assert auto(folder, LARGE, dtype="float32") is torch.float32
    assert auto(folder, LARGE, attention_backend="cpu") is torch.float32
    ranks = replace(ALONE, size=2)
    assert resolve(EngineConfig(model=str(folder), dummy_weight=True), "cpu", info=ranks).dtype is torch.float32
    monkeypatch.setenv("MINISGL_CPU_ISA", "none")
    assert auto(folder, LARGE) is torch.float32


@pytest.mark.parametrize("stored", ["float32", "float16", "float64"])
def test_other_types_are_float32(folder: Path, stored: str) -> None:
    assert auto(folder, LARGE | {"torch_dtype": stored}) is torch.float32


def test_other_models_are_float32(folder: Path) -> None:
    assert auto(folder, SHAPES["qwen3-30b-a3b"]) is torch.bfloat16
    assert auto(folder, SHAPES["gemma-4-12b"]) is torch.bfloat16
    assert auto(folder, LARGE | {"head_dim": 40}) is torch.float32
    assert auto(folder, SHAPES["qwen3-10m"]) is torch.float32
    assert resolve(EngineConfig(), "cpu").dtype is torch.float32


def test_on_a_gpu_it_is_the_checkpoints(folder: Path) -> None:
    assert auto(folder, SHAPES["qwen3-10m"], "cuda") is torch.bfloat16
    assert auto(folder, LARGE | {"torch_dtype": "float16"}, "cuda") is torch.float16
