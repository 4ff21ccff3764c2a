"""Reads the weights of adapters in PEFT's layout. Every tensor of a file is used, or the adapter is refused."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import torch

from minisgl.checkpoint.adapter import CONFIG, WEIGHTS, contents_key, open_weights, read_config, refusal
from minisgl.core.errors import ConfigError
from minisgl.core.params import folder_of
from minisgl.layers.adapters import LowRank
from minisgl.models.weight import full_name, listed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import BinaryIO

    from torch import Tensor

    from minisgl.checkpoint.adapter import LoraConfig, Stored
    from minisgl.layers.adapters import Adapted

DTYPES: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# A name that PEFT gives a tensor: the module, the part, and perhaps the name of the adapter.
TENSOR: Final = re.compile(r"(.{1,200})\.lora_(A|B)(?:\.[^.]+)?\.(weight|bias)")
A, B, BIAS = "lora_A.weight", "lora_B.weight", "lora_B.bias"


class _Module(NamedTuple):
    """What a file has of a module: PEFT's name of the module, and the tensors by part."""

    name: str
    parts: dict[str, Stored]


def open_adapter(source: str, adapted: Sequence[Adapted], rank: int, dtype: torch.dtype) -> Mapping[str, LowRank]:
    """Return what an adapter (`params.Adapter.source`) adds to each module.

    Nothing is read before all names and shapes have been found right. Raises `ConfigError` for an adapter that does not
    fit the model or slots of `rank` and `dtype`, or whose files are not those of `source` any more.
    """
    folder = folder_of(source)
    shapes = {name: shape for projection in adapted for name, shape in projection.modules.items()}
    with refusal(folder):
        config = read_config(folder)
        with open_weights(folder) as (file, header, tensors):
            modules = _modules(tensors)
            _check_targets(config, modules, shapes)
            for name, module in modules.items():
                _check(name, module, config, shapes[name], rank)
            found = {}
            for name, module in modules.items():
                read = {part: _read(file, 8 + len(header), stored) for part, stored in module.parts.items()}
                low = LowRank(read[A], read[B], config.scale_of(module.name), read.get(BIAS))
                if not all((t * low.scale).to(dtype).isfinite().all() for t in (*low[:2], *read.values())):
                    raise ConfigError(f"{name} has values that are not finite in {str(dtype).removeprefix('torch.')}")
                found[name] = low
        if contents_key(folder) != source.partition(":")[0]:
            raise ConfigError("its files have changed since it was loaded; load it again")
    return found


def _modules(tensors: Mapping[str, Stored]) -> dict[str, _Module]:
    """Return the modules by our name."""
    modules: dict[str, _Module] = {}
    unknown = [name for name in tensors if TENSOR.fullmatch(name) is None]
    for name, stored in tensors.items():
        if (match := TENSOR.fullmatch(name)) is None:
            continue
        key, half, kind = match.groups()
        parts = modules.setdefault(full_name(key), _Module(key.removeprefix("base_model.model."), {})).parts
        if (part := f"lora_{half}.{kind}") in parts:
            raise ConfigError(f"{WEIGHTS} has {part} of {full_name(key)} twice, as of several adapters")
        if part not in (A, B, BIAS):
            unknown.append(name)
        parts[part] = stored
    _refuse(unknown, "cannot be changed by an adapter here")
    if not modules:
        raise ConfigError(f"{WEIGHTS} has no tensors")
    return modules


def _refuse(names: list[str], what: str) -> None:
    if names:
        raise ConfigError(f"{listed(names)} {what}")


def _check_targets(config: LoraConfig, modules: dict[str, _Module], shapes: Mapping[str, tuple[int, int]]) -> None:
    """Raise `ConfigError` unless the file has the modules that the configuration names, and these are in `shapes`."""
    _refuse(
        [name for name in modules if name not in shapes],
        "cannot be changed by an adapter here: of this model, only projections of attention and of dense MLPs and the "
        "head can; is it for this base?",
    )
    _refuse(
        [name for name, module in modules.items() if config.targets(module.name) is False],
        f"are in {WEIGHTS}, and the target_modules of {CONFIG} leave them out",
    )
    if isinstance(config.target_modules, list):
        config = msgspec.structs.replace(config, target_modules=[full_name(name) for name in config.target_modules])
    _refuse(
        [name for name in shapes if name not in modules and config.targets(name)],
        f"are among the target_modules of {CONFIG}, and {WEIGHTS} has nothing of them",
    )


def _check(name: str, module: _Module, config: LoraConfig, shape: tuple[int, int], slot_rank: int) -> None:
    """Raise `ConfigError` unless the tensors of a module fit each other, the configuration, the model and the slots."""
    parts = module.parts
    if lacking := [part for part in (A, B, *[BIAS] * bool(config.lora_bias)) if part not in parts]:
        raise ConfigError(f"{name} lacks {' and '.join(lacking)}")
    if BIAS in parts and not config.lora_bias:
        raise ConfigError(f"{name} has {BIAS}, and {CONFIG} has no lora_bias")
    rank, wanted = (parts[A].shape or (0,))[0], config.rank_of(module.name)
    sizes = {A: (rank, shape[1]), B: (shape[0], rank), BIAS: (shape[0],)}
    for part, stored in parts.items():
        if stored.shape != sizes[part]:
            raise ConfigError(
                f"{part} of {name} is {[*stored.shape]}, and a rank of {rank} and the model's weight {[*shape]} need "
                f"{[*sizes[part]]}; is it for this base?"
            )
        if stored.dtype not in DTYPES:
            raise ConfigError(f"{part} of {name} is {stored.dtype:.20}, not one of {', '.join(DTYPES)}")
        if stored.bytes != math.prod(stored.shape) * DTYPES[stored.dtype].itemsize:
            raise ConfigError(f"{part} of {name} has {stored.bytes} bytes, which is not what its shape needs")
    if rank != wanted:
        raise ConfigError(f"{name} has rank {rank}, and {CONFIG} says {wanted}")
    if rank + (BIAS in parts) > slot_rank:
        needed = f"give --max-lora-rank {config.largest_rank}, or more"
        raise ConfigError(f"its rank of {config.largest_rank} is above the {slot_rank} of the slots: {needed}")


def _read(file: BinaryIO, start: int, stored: Stored) -> Tensor:
    """Read a tensor of a file whose data begin at `start`."""
    file.seek(start + stored.data_offsets[0])
    if len(data := bytearray(file.read(stored.bytes))) != stored.bytes:
        raise ConfigError(f"{WEIGHTS} has become shorter while it was read")
    return torch.frombuffer(data, dtype=DTYPES[stored.dtype]).view(stored.shape)
