"""Adapters on the disk, in PEFT's layout: what is known of them before their weights are read. No torch.

The reference of fields and names is PEFT 0.21 (`LoraConfig`, `get_pattern_key`, `check_target_module_exists`). Whoever
writes these files may be less trusted than whoever serves them: nothing here runs code of a file, allocates what only a
header claims, or searches with a regular expression that could take long.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec

from minisgl.checkpoint.hf import add_pieces, read_json, require_complete
from minisgl.core.errors import ConfigError
from minisgl.core.params import Adapter

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
MAX_CONFIG_BYTES: Final = 4 << 20
MAX_REPEATS: Final = 3  # in a pattern: the time of a search grows with the length of a name to this power
NAME: Final = re.compile(r"[^\s,:=]{1,200}")
INITS: Final = (True, False, None, "gaussian", "eva", "orthogonal", "mica")  # without a change of the base
# Fields without which a trained adapter computes the same. A `bias` shows in the file's tensors.
HARMLESS: Final = re.compile(
    "auto_mapping|base_model_name_or_path|bias|(corda|eva|loftq|lora_ga|runtime|velora)_config|inference_mode|layers_pattern|"
    "lora_(dropout|dtype)|lorap_(emb_lr|lr_ratio)|megatron_core|peft_version|qalora_group_size|revision|task_type"
)
MERGED: Final = "merge it into the base with PEFT's merge_and_unload, and serve that model"
# Other fields -> what they mean, and the way forward.
OTHER: Final = "it may change the result, and is not supported here"
REFUSED: Final = {
    "use_dora": f"DoRA also scales what the base computes, which adapters share: {MERGED}",
    "layer_replication": f"it adds layers to the base: {MERGED}",
    "modules_to_save": f"it replaces whole modules of the base: {MERGED}",
    "trainable_token_indices": f"it replaces embeddings of tokens: {MERGED}",
    "target_parameters": f"experts cannot be changed by an adapter here: {MERGED}",
    "fan_in_fan_out": "its matrices are transposed, as for GPT-2's layers, which no model here has",
    "alora_invocation_tokens": "it begins at some token (aLoRA), which is not supported here",
}

Rank = Annotated[int, msgspec.Meta(ge=1, le=1024)]  # as of --max-lora-rank
Number = TypeVar("Number", int, float)


class LoraConfig(msgspec.Struct, frozen=True):
    """The fields of adapter_config.json that change what an adapter computes, with PEFT's defaults.

    Patterns map regular expressions, which match the end of PEFT's name of a module, to values for these modules. Which
    modules there are is in the file of weights: PEFT stores those that it has found, whatever fields have led to them.
    """

    r: Rank = 8
    lora_alpha: float = 8
    use_rslora: bool | None = False
    lora_bias: bool | None = False
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, float] | None = None
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    layers_to_transform: int | list[int] | None = None

    @property
    def largest_rank(self) -> int:
        """The rank of a slot that the adapter needs: a bias takes one."""
        return max(self.r, *(self.rank_pattern or {}).values(), 0) + bool(self.lora_bias)

    @property
    def targets(self) -> list[str] | None:
        """The ends of the names of all modules that the adapter has; None if only the file of weights tells."""
        is_all = not self.exclude_modules and self.layers_to_transform in (None, [])
        return self.target_modules if is_all and isinstance(self.target_modules, list) else None

    def rank_of(self, module: str) -> int:
        """Return the rank for a module, by PEFT's name."""
        return _matched(self.rank_pattern or {}, module, self.r)

    def scale_of(self, module: str) -> float:
        """Return what multiplies the product for a module: with rank stabilisation, see arXiv:2312.03732."""
        rank, alpha = self.rank_of(module), _matched(self.alpha_pattern or {}, module, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def _matched(patterns: dict[str, Number], module: str, default: Number) -> Number:
    """Return the value of the first pattern that matches a module."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def adapters_of(asked: str | None) -> list[Adapter]:
    """Return the adapters of `--lora`, separated by commas: NAME=PATH, an adapter's folder, or a folder of such.

    Raises `ConfigError` for one that is damaged, and for a name that two have.
    """
    found: list[Adapter] = []
    for part in filter(None, map(str.strip, (asked or "").split(","))):
        name, is_named, path = part.partition("=")
        if is_named:
            found.append(make_adapter(name, Path(path)))
            continue
        folder = Path(part).expanduser().absolute()
        with refusal(folder):
            is_one = (folder / CONFIG).exists()
            folders = [folder] if is_one else sorted(file.parent for file in folder.glob(f"*/{CONFIG}"))
        if not folders:
            raise ConfigError(f"--lora {part} is not NAME=PATH, and neither it nor a folder in it has {CONFIG}")
        found += [make_adapter(folder.name, folder) for folder in folders]
    names = [adapter.name for adapter in found]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"--lora has several adapters named {min(repeated)}; give each a name: NAME=PATH")
    return found


def make_adapter(name: str, folder: Path) -> Adapter:
    """Return the adapter in `folder`. Raises `ConfigError` for a kind that cannot be served, and for damaged files."""
    if NAME.fullmatch(name) is None:
        raise ConfigError(f"{name!r:.80} cannot name an adapter: names have no spaces, commas, colons or equals signs")
    folder = folder.expanduser().absolute()
    with refusal(folder):
        read_config(folder)
        return Adapter(name, str(folder), contents_key(folder))


def allowed_folder(root: str, path: str) -> Path:
    """Return the real folder of an adapter below `root`, to which `path` may be relative.

    Raises `ConfigError` if it, or a file in it that would be read, is elsewhere: symbolic links are followed.
    """
    try:
        top = Path(root).expanduser().resolve()
        folder = (top / path).resolve()
        if all(file.resolve().is_relative_to(top) for file in (folder, folder / CONFIG, folder / WEIGHTS)):
            return folder
    except (OSError, ValueError, RuntimeError):  # a name that no file can have, links in a circle
        pass
    raise ConfigError(f"{path!r:.200} is not below {root}, the only folder from which adapters may be loaded")


@contextmanager
def refusal(folder: Path) -> Iterator[None]:
    """Name the folder in errors of an adapter."""
    try:
        yield
    except OSError as e:
        raise ConfigError(f"the adapter in {folder} cannot be read: {e.filename or WEIGHTS}: {e.strerror}") from e
    except ConfigError as e:
        raise ConfigError(f"the adapter in {folder} cannot be served: {e}") from e


def contents_key(folder: Path) -> str:
    """Return a digest of the files, which other contents have not: of config, header, and a piece of each tensor.

    It has no times, so that it is the same on the hosts of several ranks, which have copies.
    """
    digest = blake2b((folder / CONFIG).read_bytes(), digest_size=8)
    require_complete(weights_of(folder))
    add_pieces(digest, folder / WEIGHTS)
    return digest.hexdigest()


def weights_of(folder: Path) -> Path:
    """Return the file of weights. Raises `ConfigError` if there is none in safetensors."""
    if not (folder / WEIGHTS).is_file():
        is_pickled = (folder / "adapter_model.bin").exists()
        pickle = ", only adapter_model.bin, a pickle, which may run code: save it as safetensors" * is_pickled
        raise ConfigError(f"it has no {WEIGHTS}{pickle}")
    return folder / WEIGHTS


def read_config(folder: Path) -> LoraConfig:
    """Read adapter_config.json. Raises `ConfigError` for what changes the result and cannot be served."""
    path = folder / CONFIG
    if not path.is_file():
        raise ConfigError(f"it has no {CONFIG}" if folder.is_dir() else "it is not a folder")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise ConfigError(f"{CONFIG} has more than {MAX_CONFIG_BYTES >> 20} MB")
    fields = read_json(path)
    if (kind := fields.pop("peft_type", None)) != "LORA":
        raise ConfigError(f"its peft_type is {kind!r:.40}, and only LORA is supported")
    if (init := fields.pop("init_lora_weights", True)) not in INITS:
        raise ConfigError(
            f"init_lora_weights {init!r:.40} changed the base's weights, which adapters share: save it with PEFT's "
            "path_initial_model_for_weight_conversion, which makes it plain LoRA"
        )
    for name, value in fields.items():
        if value and name not in LoraConfig.__struct_fields__ and HARMLESS.fullmatch(name) is None:
            raise ConfigError(f"its {name!r:.60} is set: {REFUSED.get(name, OTHER)}")
    try:
        config = msgspec.convert(fields, LoraConfig)
    except (msgspec.ValidationError, OverflowError) as e:
        raise ConfigError(f"{CONFIG} has a wrong value: {e}") from None
    for pattern in (*(config.rank_pattern or {}), *(config.alpha_pattern or {})):
        _check_pattern(pattern)
    return config


def _check_pattern(text: str) -> None:
    """Raise `ConfigError` unless `text` is a regular expression whose search is short."""
    try:
        re.compile(rf"(.*\.)?({text})$")
    except (re.error, OverflowError, RecursionError):
        raise ConfigError(f"the pattern {text!r:.60} is not a regular expression") from None
    if re.search(r"\)[*+{]", text) or len(re.findall(r"(?<!\()[*+?{]", text)) > MAX_REPEATS:
        raise ConfigError(f"the pattern {text!r:.60} repeats more than {MAX_REPEATS} parts, or a group; list the names")
