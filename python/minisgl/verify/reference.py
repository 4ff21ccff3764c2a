"""transformers' logits of a checkpoint: what ours are compared with."""

from __future__ import annotations

import gc
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from minisgl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from torch import Tensor


def has_transformers() -> bool:
    return find_spec("transformers") is not None


@dataclass(frozen=True, slots=True)
class Reference:
    """Logits [length, V] float32 on the host of some sequences, each computed as one prompt."""

    sequences: list[list[int]]
    logits: list[Tensor]

    def after(self, prefix: list[int]) -> Tensor:
        """[V] float32: the logits after `prefix`, with which one of the sequences must begin."""
        index = next(i for i, s in enumerate(self.sequences) if s[: len(prefix)] == prefix)
        return self.logits[index][len(prefix) - 1]


@torch.inference_mode()
def reference(folder: Path, sequences: list[list[int]], dtype: torch.dtype, device: torch.device) -> Reference:
    """transformers' `Reference` with weights and computation in `dtype`; its model is freed before this returns.

    Raises `ConfigError` when transformers cannot load the checkpoint.
    """
    with _quiet():
        model = _load(folder, dtype).to(device).eval()
    logits = [model(torch.tensor([ids], device=device)).logits[0].float().cpu() for ids in sequences]
    del model
    gc.collect()
    torch.cuda.empty_cache()  # nothing on a CPU
    return Reference(sequences, logits)


def _load(folder: Path, dtype: torch.dtype) -> Any:
    """In `dtype` from the start: a model converted later would have rounded rotary frequencies too."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", local_files_only=True, use_safetensors=True
        )
    except Exception as e:  # of many kinds: an unknown architecture, a missing package, a broken file
        cause = str(e).strip().partition("\n")[0]
        raise ConfigError(f"transformers cannot load {folder} ({type(e).__name__}: {cause})") from e


@contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and advice."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
