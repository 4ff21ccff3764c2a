"""Weights of tests."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from minisgl.checkpoint.quantization import Quantization
from minisgl.layers.parameter import Parameter
from minisgl.models.weight import fill, open_checkpoint


def load_weights(
    files: list[Path],
    parameters: tuple[Parameter, ...],
    *rest: Any,
    quantization: Quantization | None = None,
    **options: Any,
) -> None:
    """As `fill`, from the files of a checkpoint."""
    with ExitStack() as stack:
        fill(open_checkpoint(files, stack, quantization), parameters, *rest, **options)
