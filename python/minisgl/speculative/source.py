"""Finds the model or layer that drafts, and checks that it fits the target model. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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
    """A draft model or head: its `kind` ("draft", "eagle3" or "mtp"), the folder with its weights, its configuration.

    A head's `model` describes its one layer, with the draft vocabulary. `layers` are the target's layers whose outputs
    the head reads. `names` are beginnings of names in the checkpoint -> ours, for a layer in the target's own.
    """

    kind: str
    folder: Path
    model: ModelConfig
    layers: tuple[int, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_others(self) -> int:
        """As of a `ModelConfig`; a layer of the checkpoint has no embedding and head of its own."""
        m = self.model
        shared = (1 if m.tie_word_embeddings else 2) * m.vocab_size if self.names else 0
        return m.num_others - shared * m.hidden_size

    @property
    def num_projections(self) -> int:
        """As of a `ModelConfig`, with the projection that joins embedding and hidden state."""
        return self.model.num_projections + (2 * self.model.hidden_size**2 if self.names else 0)


def has_head(folder: Path) -> bool:
    """Whether the model in `folder` ships with a head."""
    path = folder / HEAD_FOLDER
    if not (path / "config.json").is_file() or next(path.glob("*.safetensors"), None) is None:
        return False
    return hf.load_config(path).get("architectures") == [HEAD_ARCHITECTURE]


def next_tokens(folder: Path, target: ModelConfig, *, has_weights: bool) -> DraftSource | str:
    """Return the layer of the checkpoint in `folder` that predicts the token after the next, or why there is none.

    Without weights, config.json says whether the checkpoint has the layer.
    """
    where = target.family.next_tokens
    if where is None or target.is_fallback:
        return f"no layer of {target.architecture:.60} that predicts further tokens is known"
    if not target.num_next_tokens:
        return f"by {where.count_key} in config.json, the checkpoint has no layer that predicts further tokens"
    names = {old.format(target.num_layers): new for old, new in where.names.items()}
    first = next(iter(names))
    files = hf.weight_files(folder) if has_weights else []
    if has_weights and not any(
        first.removeprefix("model.") in full for file in files for full in hf.tensor_names(file)
    ):
        return f"the files in {folder} lack {first}*, so this copy has no layer that predicts further tokens"
    return DraftSource("mtp", folder, target.next_tokens_layer(), (target.num_layers - 1,), names)


def read_source(asked: str, target: ModelConfig, folder: Path, *, has_weights: bool) -> DraftSource | None:
    """Read the model that `--speculate` names for the model `target` in `folder`; None for a drafter without a model.

    Raise `ConfigError` for `mtp` without such a layer, or a PATH that is no model folder or does not fit the target.
    """
    if asked == "mtp":
        found = next_tokens(folder, target, has_weights=has_weights)
        if isinstance(found, str):
            raise ConfigError(f"--speculate mtp: {found}")
        return found
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
    if model.linear_layers:  # a draft model's pages are the target's, and it has no slots
        raise ConfigError(f"{folder} has a recurrent state, and only models without one can be draft models")
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
