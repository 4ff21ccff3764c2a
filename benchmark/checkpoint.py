"""Writes a checkpoint with the shape of a well-known model and random weights, for loading and other engines.

PYTHONPATH=python python benchmark/checkpoint.py qwen3-8b /data/shapes    # 16 GB in /data/shapes/qwen3-8b
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from minisgl.distributed.communicator import SoloCommunicator
from minisgl.distributed.info import ALONE, DistributedInfo
from minisgl.layers.builder import Builder
from minisgl.layers.parameter import Parameter, Source
from minisgl.models.llama import LlamaForCausalLM
from minisgl.models.model_config import ModelConfig
from minisgl.models.weight import DUMMY_STD
from minisgl.ops.table import load_ops
from minisgl.tools.bench.shapes import SHAPES, write_config

FILE_BYTES = 4 << 30  # the usual largest file on hubs
INDEX = "model.safetensors.index.json"


def build_parameters(
    config: dict[str, Any],
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "meta",
    info: DistributedInfo = ALONE,
) -> tuple[Parameter, ...]:
    """One rank's parameters of the model of a config.json, uninitialised; by default without memory."""
    model = ModelConfig.from_hf(config)
    at = torch.device(device)
    builder = Builder(load_ops("reference"), dtype, at, SoloCommunicator(info, at))
    parameters: tuple[Parameter, ...] = LlamaForCausalLM(builder, model).parameters
    return parameters


def write_checkpoint(shape: str, base: Path) -> Path:
    """Write config.json, tokenizer and bfloat16 weights to the folder `base`/`shape`, unless they are there."""
    folder = base / shape
    if (folder / INDEX).is_file():
        return folder
    write_config(shape, folder)
    files: list[list[Source]] = [[]]
    size = 0
    for source in (source for parameter in build_parameters(SHAPES[shape]) for source in parameter.sources):
        count = 2 * torch.Size(source.shape).numel()
        if size and size + count > FILE_BYTES:
            files.append([])
            size = 0
        files[-1].append(source)
        size += count
    torch.manual_seed(0)
    weight_map: dict[str, str] = {}
    for i, sources in enumerate(files, 1):
        name = f"model-{i:05}-of-{len(files):05}.safetensors"
        save_file({source.name: _values(source.shape) for source in sources}, folder / name)
        weight_map |= {source.name: name for source in sources}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def _values(shape: tuple[int, ...]) -> torch.Tensor:
    """Ones for norms, noise for matrices."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, DUMMY_STD)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=list(SHAPES))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    print(write_checkpoint(args.shape, args.folder))
