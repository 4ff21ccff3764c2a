"""Reads embedding checkpoints from sentence-transformers' files. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from minisgl.checkpoint import hf
from minisgl.core.errors import ConfigError, RequestError

Pooling = Literal["last", "mean"]
Vector = npt.NDArray[np.float32]

MODULES: Final = (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"])
POOLINGS: Final[dict[str, Pooling]] = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean"}


@dataclass(frozen=True, slots=True)
class Embedder:
    """How to compute an embedding [H] from the final hidden states [n, H] of a text of n tokens.

    The embedding is the last state or the mean, divided by its norm if `normalises`. `dimensions` are the lengths to
    which an embedding may be cut (Kusupati et al. 2022, arXiv:2205.13147): only H, unless config.json has
    `is_matryoshka` or `matryoshka_dimensions`.
    """

    pooling: Pooling
    normalises: bool
    dimensions: Sequence[int]

    def length(self, wanted: int | None) -> int:
        """Return the length of a request's embeddings, H by default. Raises `RequestError` for an invalid length."""
        known = self.dimensions
        if wanted is None or wanted in known:
            return wanted or known[-1]
        allowed = f"{known[0]} to {known[-1]}" if isinstance(known, range) else ", ".join(map(str, known))
        raise RequestError(
            f"dimensions {wanted} is not one of the lengths that this model's files allow: {allowed}",
            param="dimensions",
        )

    def vector(self, pooled: bytes, length: int) -> Vector:
        """Return the embedding [length] from the engine's pooled states, float32 bytes [H]."""
        vector = np.frombuffer(pooled, "<f4")[:length]
        norm = np.linalg.norm(vector)
        return vector / norm if self.normalises and norm > 0 else vector


def read_embedder(folder: Path) -> Embedder | None:
    """Read modules.json of `folder`. Return None without one: then the checkpoint generates text.

    Raises `ConfigError` for unsupported modules and poolings.
    """
    path = folder / "modules.json"
    if not path.is_file():
        return None
    modules = hf.read_json_value(path)
    if not isinstance(modules, list) or not all(isinstance(m, dict) for m in modules):
        raise ConfigError(f"{path} is not a list of modules")
    kinds = [str(m.get("type")).rpartition(".")[2] for m in modules]
    if kinds not in MODULES:
        known = " or ".join(", ".join(m) for m in MODULES)
        raise ConfigError(f"{path} has the modules {', '.join(kinds)}; supported: {known}")
    pooling = _pooling(folder / str(modules[1].get("path", "")) / "config.json")
    return Embedder(pooling, len(kinds) > 2, _dimensions(hf.load_config(folder)))


def decoder_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return an embedding checkpoint's config.json with the architecture of the corresponding text generator.

    Embedding checkpoints may name only the decoder (`Qwen3Model`). A head is not used.
    """
    names = config.get("architectures")
    if isinstance(names, list):
        names = [f"{n.removesuffix('Model')}ForCausalLM" if str(n).endswith("Model") else n for n in names]
    return {**config, "architectures": names, "tie_word_embeddings": True}


def _pooling(path: Path) -> Pooling:
    """Read the pooling. Old files have a boolean for each pooling, new ones a name."""
    config = hf.read_json(path)
    prefix = "pooling_mode_"
    switches = [
        name.removeprefix(prefix) for name, value in config.items() if name.startswith(prefix) and value is True
    ]
    named = config.get("pooling_mode", switches)
    modes = [named] if isinstance(named, str) else named
    if not isinstance(modes, list) or len(modes) != 1 or (pooling := POOLINGS.get(str(modes[0]))) is None:
        raise ConfigError(f"{path} asks for pooling by {modes}; supported: one of {', '.join(POOLINGS)}")
    return pooling


def _dimensions(config: dict[str, Any]) -> Sequence[int]:
    size, chosen = config.get("hidden_size"), config.get("matryoshka_dimensions")
    if not isinstance(size, int):
        raise ConfigError(f"config.json has hidden_size={size!r}")
    if chosen is None:
        return range(1 if config.get("is_matryoshka") else size, size + 1)
    if not isinstance(chosen, list) or not all(type(d) is int and 1 <= d <= size for d in chosen):
        raise ConfigError(f"config.json has matryoshka_dimensions={chosen!r}, not a list of numbers from 1 to {size}")
    return sorted({*chosen, size})
