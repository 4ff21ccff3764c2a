"""Reads a draft model's config.json and checks that it fits the target model. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from minisgl.checkpoint import hf
from minisgl.checkpoint.embedder import read_embedder
from minisgl.core.errors import ConfigError
from minisgl.models.model_config import ModelConfig

HEAD_ARCHITECTURE: Final = "LlamaForCausalLMEagle3"
HEAD_FOLDER: Final = "head"  # in a model's folder: an EAGLE-3 head that ships with the model


@dataclass(frozen=True, slots=True)
class DraftSource:
    """A draft model or head: its `kind` ("draft" or "eagle3"), the folder with its weights, and its configuration.

    A head's `model` describes its one layer, with the draft vocabulary. `layers` are the target's layers whose outputs
    the head reads.
    """

    kind: str
    folder: Path
    model: ModelConfig
    layers: tuple[int, ...] = ()


def has_head(folder: Path) -> bool:
    """Whether the model in `folder` ships with a head."""
    path = folder / HEAD_FOLDER
    if not (path / "config.json").is_file() or next(path.glob("*.safetensors"), None) is None:
        return False
    return hf.load_config(path).get("architectures") == [HEAD_ARCHITECTURE]


def read_source(asked: str, target: ModelConfig) -> DraftSource | None:
    """Read the model that `--speculate KIND:PATH` names; None for a drafter without a model.

    Raise `ConfigError` if PATH is not a model folder, or does not fit the model `target`.
    """
    kind, _, path = asked.partition(":")
    if not path:
        return None
    try:
        folder = Path(path).expanduser()
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{path} is not a folder with a config.json")
        source = _READERS[kind](folder, hf.load_config(folder), target)
    except ConfigError as e:
        raise ConfigError(f"--speculate {kind}: {e}") from None
    # A shorter context is accepted: RoPE has no largest position, so drafts only become worse beyond it.
    longest = max(source.model.max_position_embeddings, target.max_position_embeddings)
    return replace(source, model=replace(source.model, max_position_embeddings=longest))


def _read_model(folder: Path, raw: dict[str, Any], target: ModelConfig) -> DraftSource:
    if read_embedder(folder) is not None:
        raise ConfigError(f"the model in {folder} makes embeddings, and generates no text")
    if raw.get("architectures") == [HEAD_ARCHITECTURE]:
        raise ConfigError(f"{folder} has an EAGLE-3 head; give --speculate eagle3:{folder}")
    model = ModelConfig.from_hf(raw)
    _require_equal("vocabulary", model.vocab_size, target.vocab_size)
    return DraftSource("draft", folder, model)


def _read_head(folder: Path, raw: dict[str, Any], target: ModelConfig) -> DraftSource:
    if raw.get("architectures") != [HEAD_ARCHITECTURE]:
        raise ConfigError(f"{folder} has architectures={raw.get('architectures')!r:.60}, not {HEAD_ARCHITECTURE}")
    model = ModelConfig.from_hf(raw | {"architectures": ["LlamaForCausalLM"]})
    _require_equal("hidden size", model.hidden_size, target.hidden_size)
    _require_equal("vocabulary", model.vocab_size, target.vocab_size)
    if model.num_layers != 1:
        raise ConfigError(f"the head has {model.num_layers} layers, and only heads of one layer are supported")
    count = raw.get("draft_vocab_size") or model.vocab_size
    if not isinstance(count, int) or not 0 < count <= model.vocab_size:
        raise ConfigError(f"draft_vocab_size is {count!r:.60}, not a part of the vocabulary of {model.vocab_size}")
    return DraftSource("eagle3", folder, replace(model, vocab_size=count), _layers(raw, target.num_layers))


def _layers(raw: dict[str, Any], count: int) -> tuple[int, ...]:
    """Return the three layers; by default a low, a middle and a high one."""
    config = raw.get("eagle_config")
    given = config.get("eagle_aux_hidden_state_layer_ids") if isinstance(config, dict) else None
    layers = [1, count // 2 - 1, count - 4] if given is None else given
    inner = range(count - 1)  # the last layer computes only the tokens that are sampled
    if not isinstance(layers, list) or len(layers) != 3 or not all(type(i) is int and i in inner for i in layers):
        raise ConfigError(f"the head reads layers {layers!r:.60}; there must be three, from 0 to {count - 2}")
    return tuple(layers)


def _require_equal(what: str, own: int, wanted: int) -> None:
    if own != wanted:
        raise ConfigError(f"the drafter has a {what} of {own:,}, and the model one of {wanted:,}")


_READERS: Final = {"draft": _read_model, "eagle3": _read_head}
