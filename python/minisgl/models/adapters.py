"""Reads the weights of adapters in PEFT's layout. Every tensor of a file is used, or the adapter is refused."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from minisgl.checkpoint.adapter import CONFIG, WEIGHTS, contents_key, read_config, refusal, weights_of
from minisgl.core.errors import ConfigError
from minisgl.layers.adapters import LowRank
from minisgl.models.weight import full_name, listed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor

    from minisgl.checkpoint.adapter import LoraConfig
    from minisgl.layers.adapters import Adapted

HEADER_BYTES: Final = 32 << 20  # at most
# PEFT's name of a tensor: the module, the part, and perhaps the name of the adapter.
TENSOR: Final = re.compile(r"(.{1,200})\.(lora_[AB])(?:\.[^.]+)?(\.weight|\.bias)")
A, B, BIAS = "lora_A.weight", "lora_B.weight", "lora_B.bias"
FIXED: Final = "cannot be changed by an adapter here"
COPIES: Final = "a copy of the base's embedding or head is left out by PEFT's save_embedding_layers=False"


class _Module(NamedTuple):
    """What a file has of a module: PEFT's name of the module, and the tensors by part."""

    name: str
    parts: dict[str, Tensor]


def open_adapter(
    folder: Path, key: str, adapted: Sequence[Adapted], rank: int, dtype: torch.dtype
) -> Mapping[str, LowRank]:
    """Return what the adapter in `folder` adds to each module.

    Raises `ConfigError` for an adapter that does not fit the model or slots of `rank` and `dtype`, or whose files have
    another `contents_key`.
    """
    found = {}
    shapes = {name: shape for projection in adapted for name, shape in projection.modules.items()}
    with refusal(folder):
        config = read_config(folder)
        if (needed := config.largest_rank) > rank:
            raise ConfigError(f"its rank of {needed} is above the {rank} of the slots: give --max-lora-rank {needed}")
        modules = _modules(_read(folder, 8 * rank * sum(map(sum, shapes.values())) + HEADER_BYTES))
        _check_names(config, modules, shapes)
        for name, (peft_name, parts) in sorted(modules.items()):  # on all ranks the same first error
            _check(name, parts, config.rank_of(peft_name), shapes[name], bool(config.lora_bias))
            low = LowRank(parts[A], parts[B], config.scale_of(peft_name), parts.get(BIAS))
            if not all((t * scale).to(dtype).isfinite().all() for t in parts.values() for scale in (1.0, low.scale)):
                raise ConfigError(f"{name} has values that are not finite in {str(dtype).removeprefix('torch.')}")
            found[name] = low
        if contents_key(folder) != key:
            raise ConfigError("its files have changed since it was loaded; load it again")
    return found


def _read(folder: Path, limit: int) -> dict[str, Tensor]:
    """Return the tensors of a file of at most `limit` bytes.

    The file is not mapped: a read of a mapped file that has become shorter would end the process.
    """
    if (file := weights_of(folder)).stat().st_size > limit:
        raise ConfigError(f"{WEIGHTS} has more than the {limit} bytes of the largest adapter that fits the slots")
    try:
        return load(file.read_bytes())
    except (SafetensorError, KeyError) as e:
        raise ConfigError(f"{WEIGHTS} cannot be read ({e})") from None


def _modules(tensors: Mapping[str, Tensor]) -> dict[str, _Module]:
    """Return the modules by our name."""
    modules: dict[str, _Module] = {}
    unknown = []
    for name, tensor in tensors.items():
        match = TENSOR.fullmatch(name)
        if match is None or (part := match[2] + match[3]) not in (A, B, BIAS):
            unknown.append(name)
            continue
        module = full_name(match[1])
        parts = modules.setdefault(module, _Module(match[1].removeprefix("base_model.model."), {})).parts
        if part in parts:
            raise ConfigError(f"{WEIGHTS} has {part} of {module} twice, as of several adapters")
        parts[part] = tensor
    _refuse(unknown, f"{FIXED}; {COPIES}" if any(".base_layer." in name for name in unknown) else FIXED)
    if not modules:
        raise ConfigError(f"{WEIGHTS} has no tensors")
    return modules


def _refuse(names: Iterable[str], what: str) -> None:
    if names := [*names]:
        raise ConfigError(f"{ascii(listed(names))[1:-1]:.500} {what}")


def _check_names(config: LoraConfig, modules: dict[str, _Module], shapes: Mapping[str, tuple[int, int]]) -> None:
    """Raise `ConfigError` unless the file has the modules that the configuration lists, and these are in `shapes`."""
    can = "only projections of attention and of dense MLPs, and the head, can; is it for this base?"
    _refuse(modules.keys() - shapes.keys(), f"{FIXED}: {can}")
    if config.targets is not None:
        ends = tuple(f".{full_name(target)}" for target in config.targets)
        named = {name for name in shapes if f".{name}".endswith(ends)}
        _refuse(modules.keys() - named, f"are in {WEIGHTS}, and the target_modules of {CONFIG} leave them out")
        _refuse(named - modules.keys(), f"are among the target_modules of {CONFIG}, and {WEIGHTS} has nothing of them")


def _check(name: str, parts: Mapping[str, Tensor], rank: int, shape: tuple[int, int], has_bias: bool) -> None:
    """Raise `ConfigError` unless the tensors of a module have the right shapes and types."""
    sizes = {A: (rank, shape[1]), B: (shape[0], rank)} | ({BIAS: (shape[0],)} if has_bias else {})
    if wrong := sizes.keys() ^ parts.keys():
        raise ConfigError(f"{name} {'lacks' if min(wrong) in sizes else 'has also'} {min(wrong)}")
    for part, tensor in parts.items():
        if tensor.shape != sizes[part]:
            raise ConfigError(
                f"{part} of {name} is {[*tensor.shape]}; its rank of {rank} in {CONFIG} and the model's weight "
                f"{[*shape]} need {[*sizes[part]]}"
            )
        if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
            raise ConfigError(f"{part} of {name} is {tensor.dtype}, not a float of 16 bits or more")
