"""What a folder's files say about embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl.checkpoint.embedder import Embedder, decoder_config, read_embedder
from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.core.errors import ConfigError
from support.embedding_models import write_modules


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    write_modules(tmp_path, "lasttoken")
    return tmp_path


def write(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def test_generator_has_no_embedder() -> None:
    assert read_embedder(BUILTIN_MODEL) is None


def test_last_token_and_mean(folder: Path) -> None:
    assert read_embedder(folder) == Embedder("last", True, range(64, 65))
    write_modules(folder, "mean_tokens", normalises=False)
    assert read_embedder(folder) == Embedder("mean", False, range(64, 65))


@pytest.mark.parametrize(("mode", "pooling"), [("lasttoken", "last"), ("mean", "mean"), (["mean"], "mean")])
def test_pooling_by_name(folder: Path, mode: Any, pooling: str) -> None:
    write(folder / "1_Pooling" / "config.json", {"pooling_mode": mode})
    assert (found := read_embedder(folder)) is not None and found.pooling == pooling


@pytest.mark.parametrize(
    ("fields", "dimensions"),
    [
        ({"is_matryoshka": True}, list(range(1, 65))),
        ({"matryoshka_dimensions": [32, 16]}, [16, 32, 64]),
        ({"is_matryoshka": False}, [64]),
    ],
)
def test_dimensions(folder: Path, fields: dict[str, Any], dimensions: list[int]) -> None:
    write(folder / "config.json", {"hidden_size": 64, **fields})
    assert (found := read_embedder(folder)) is not None and list(found.dimensions) == dimensions


def module(name: str, path: str = "") -> dict[str, str]:
    return {"type": f"sentence_transformers.models.{name}", "path": path}


@pytest.mark.parametrize(
    ("file", "value", "message"),
    [
        ("modules.json", {}, "is not a list of modules"),
        ("modules.json", [1], "is not a list of modules"),
        ("modules.json", [], "has the modules"),
        ("modules.json", [module("Transformer"), module("Pooling"), module("Dense")], "Transformer, Pooling, Dense"),
        ("modules.json", [module("Transformer"), module("Pooling", "2_Pooling")], "cannot read"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True}, r"pooling by \['cls_token'\]"),
        ("1_Pooling/config.json", {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, "pooling by"),
        ("1_Pooling/config.json", {}, r"pooling by \[\]"),
        ("1_Pooling/config.json", {"pooling_mode": 3}, "pooling by 3"),
        ("1_Pooling/config.json", {"pooling_mode": [["mean"]]}, "pooling by"),
        ("config.json", {"hidden_size": 64, "matryoshka_dimensions": [65]}, "matryoshka_dimensions"),
        ("config.json", {}, "hidden_size"),
    ],
)
def test_unsupported_modules_are_refused(folder: Path, file: str, value: Any, message: str) -> None:
    write(folder / file, value)
    with pytest.raises(ConfigError, match=message):
        read_embedder(folder)


def test_decoder_config_adds_a_tied_head() -> None:
    config = decoder_config({"architectures": ["Qwen3Model"], "vocab_size": 5})
    assert config == {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 5, "tie_word_embeddings": True}
    assert decoder_config({"architectures": ["Qwen2ForCausalLM"]})["architectures"] == ["Qwen2ForCausalLM"]
    assert decoder_config({})["architectures"] is None
