"""A model with layers alike can have few of them for a while; another keeps all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minisgl.checkpoint.hf import BUILTIN_MODEL, load_config
from minisgl.device.device import CpuDevice
from minisgl.models.llama import FEW_LAYERS
from minisgl.models.model_config import ModelConfig
from minisgl.models.weight import load_model
from minisgl.ops.table import load_ops


@pytest.mark.parametrize("window", [None, 8])
def test_only_a_model_with_layers_alike_is_shortened(window: int | None) -> None:
    config = ModelConfig.from_hf(load_config(Path(BUILTIN_MODEL)))
    config = replace(config, windows=(window, *config.windows[1:]))
    model = load_model(Path(), config, torch.float32, CpuDevice(1), load_ops("reference"), dummy=True)
    layers = model.model.layers
    with model.shortened():
        assert len(model.model.layers) == (FEW_LAYERS if window is None else len(layers))
    assert model.model.layers is layers and len(layers) > FEW_LAYERS
