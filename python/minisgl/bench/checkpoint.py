"""Checkpoints with the shape of a well-known model and random weights, and the shards that ranks keep of one."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from minisgl.bench.shapes import SHAPES, TOKENIZER_FILES
from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minisgl.layers.builder import Parameter, Source

FILE_BYTES: Final = 4 << 30  # of one file at most, about what hubs have
NOISE_VALUES: Final = 32 << 20
INDEX: Final = "model.safetensors.index.json"
ROW_PARALLEL: Final = ("o_proj.weight", "down_proj.weight", "w2.weight")


def wanted_parameters(config: dict[str, Any]) -> Sequence[Parameter]:
    """The parameters of the model of a config.json, without memory (torch's meta device)."""
    import torch

    from minisgl.layers.builder import Builder
    from minisgl.models.families import MODELS
    from minisgl.models.model_config import ModelConfig
    from minisgl.ops.table import load_ops

    model = ModelConfig.from_hf(config)
    builder = Builder(load_ops("reference"), torch.bfloat16, torch.device("meta"))
    return MODELS.load(model.architecture)(builder, model).parameters


def write_checkpoint(shape: str, base: Path) -> Path:
    """The folder `base`/`shape` with config.json and bfloat16 weights in files as hubs have them; kept if it is there.

    Raises `ConfigError` for an unknown shape or a folder that cannot be written.
    """
    if shape not in SHAPES:
        raise ConfigError(f"there is no shape {shape!r}; known: {', '.join(SHAPES)}")
    folder = base / shape
    if (folder / INDEX).is_file():
        return folder
    wanted = wanted_parameters(SHAPES[shape])
    sources = [source for parameter in wanted for source in parameter.sources]
    files: list[list[Source]] = [[]]
    size = 0
    for source in sources:
        if size and size + _bytes(source) > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(source)
        size += _bytes(source)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(SHAPES[shape], indent=2))
        for name in TOKENIZER_FILES:
            shutil.copy(BUILTIN_MODEL / name, folder / name)
        weight_map: dict[str, str] = {}
        for i, part in enumerate(files, 1):
            name = f"model-{i:05}-of-{len(files):05}.safetensors"
            _write_file(folder / name, part)
            weight_map |= {source.name: name for source in part}
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    except OSError as e:
        raise ConfigError(f"cannot write a checkpoint to {folder}: {e.strerror}") from e
    return folder


def _bytes(source: Source) -> int:
    return math.prod(source.shape) * 2


def _write_file(path: Path, sources: list[Source]) -> None:
    import torch

    from minisgl.models.weight import DUMMY_STD

    header, end = {}, 0
    for source in sources:
        begin, end = end, end + _bytes(source)
        header[source.name] = {"dtype": "BF16", "shape": source.shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    values = torch.randn(NOISE_VALUES, generator=torch.Generator().manual_seed(0)) * DUMMY_STD
    noise = values.bfloat16().view(torch.uint8).numpy().data
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for source in sources:
            size = _bytes(source)
            if len(source.shape) == 1:  # norms, and biases that no shape has
                f.write(torch.ones(source.shape, dtype=torch.bfloat16).view(torch.uint8).numpy().data)
            else:
                for start in range(0, size, len(noise)):
                    f.write(noise[: size - start])


def shard(parameters: Sequence[Parameter], rank: int, ranks: int, dtype: Any, device: Any) -> tuple[Parameter, ...]:
    """What `rank` keeps of `parameters`, in new memory: columns of what a row-parallel product multiplies by, rows of
    the rest, norms whole. Raises `ConfigError` for sizes that do not divide.
    """
    import torch

    from minisgl.layers.builder import Init, Source

    def cut(source: Source, dim: int) -> Source:
        if source.shape[dim] % ranks:
            raise ConfigError(f"{source.name} {list(source.shape)} cannot be divided among {ranks} ranks")
        size = source.shape[dim] // ranks
        take = list(source.take)
        take[dim] = slice(rank * size, (rank + 1) * size)
        return Source(source.name, source.shape, tuple(take), source.start // ranks if dim == 0 else source.start)

    shards = []
    for parameter in parameters:
        sources, shape = parameter.sources, list(parameter.tensor.shape)
        if parameter.init is not Init.ONES:
            dim = 1 if sources[0].name.endswith(ROW_PARALLEL) else 0
            sources = tuple(cut(source, dim) for source in sources)
            shape[dim] //= ranks
        shards.append(replace(parameter, tensor=torch.empty(shape, dtype=dtype, device=device), sources=sources))
    return tuple(shards)
