"""Tiny random embedding checkpoints as sentence-transformers saves them, and transformers' embeddings."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel

from minisgl.checkpoint.hf import BUILTIN_MODEL


@dataclass(frozen=True)
class EmbeddingModel:
    folder: Path
    model: Any
    pooling: str
    normalises: bool

    @torch.inference_mode()
    def embedding(self, ids: list[int], dimensions: int | None = None) -> torch.Tensor:
        """[H] float32: transformers' final hidden states, pooled by hand."""
        hidden = self.model(torch.tensor([ids])).last_hidden_state[0]
        pooled = (hidden[-1] if self.pooling == "last" else hidden.mean(0))[:dimensions]
        return pooled / pooled.norm() if self.normalises else pooled


def save_embedding_model(
    folder: Path, config: Any, pooling: str, *, normalises: bool = True, architecture: str = "", **extra: Any
) -> EmbeddingModel:
    """A random decoder of `config`, without a head, with the built-in model's tokenizer.

    `architecture` stands in config.json in the place of the decoder's own name; `extra` are more of its fields.
    """
    torch.manual_seed(0)
    model = AutoModel.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    raw = json.loads((folder / "config.json").read_text()) | extra
    if architecture:
        raw["architectures"] = [architecture]
    (folder / "config.json").write_text(json.dumps(raw))
    write_modules(folder, {"last": "lasttoken", "mean": "mean_tokens"}[pooling], normalises=normalises)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUILTIN_MODEL / name, folder)
    return EmbeddingModel(folder, model, pooling, normalises)


def write_modules(folder: Path, mode: str, *, normalises: bool = True, **more: Any) -> None:
    """modules.json and the pooling's file, in which the switch `mode` is on."""
    names = ["Transformer", "Pooling", *(["Normalize"] if normalises else [])]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{n}" if i else "", "type": f"sentence_transformers.models.{n}"}
        for i, n in enumerate(names)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    switches = {f"pooling_mode_{m}": m == mode for m in modes}
    pooling = {"word_embedding_dimension": 64, **switches, "include_prompt": True, **more}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
