"""Reads adapters in PEFT's layout (adapter_config.json and safetensors) for a model's projections."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING

from minisgl.layers.adapters import LowRank
from minisgl.models.weight import open_all

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from minisgl.layers.adapters import Adapted


def open_adapter(folder: Path, adapted: Sequence[Adapted], rank: int) -> Mapping[str, LowRank]:
    """Return what the adapter in `folder` adds to each module."""
    config = json.loads((folder / "adapter_config.json").read_text())
    with ExitStack() as stack:
        stored = open_all([folder / "adapter_model.safetensors"], stack)
        whole = {name.removeprefix("base_model.model."): tensor.whole() for name, tensor in stored.items()}
    names = [name.removesuffix(".lora_A.weight") for name in whole if name.endswith(".lora_A.weight")]
    scale = config["lora_alpha"] / config["r"]
    return {n: LowRank(whole[f"{n}.lora_A.weight"], whole[f"{n}.lora_B.weight"], scale) for n in names}
