"""The small trained model that ships with the package. How it was made and what it can do: ``model/README.md``."""

from __future__ import annotations

from pathlib import Path

__all__ = ["model_path"]


def model_path() -> Path:
    """The folder with the model in Hugging Face's layout (config, weights, tokenizer, chat template)."""
    return Path(__file__).resolve().parent / "model"
