"""transformers' logits of a checkpoint, with which ours are compared."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from minisgl.errors import ConfigError

if TYPE_CHECKING:
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
        """Logits [V] float32 after `prefix`, with which one of the sequences must begin."""
        index = next(i for i, s in enumerate(self.sequences) if s[: len(prefix)] == prefix)
        return self.logits[index][len(prefix) - 1]


@torch.inference_mode()
def reference(folder: Path, sequences: list[list[int]], dtype: torch.dtype, device: torch.device) -> Reference:
    """Compute the logits with transformers, weights and computation in `dtype`; the model is freed afterwards.

    Raises `ConfigError` when transformers cannot load the checkpoint.
    """
    model = _load(folder, dtype).to(device).eval()
    logits = [model(torch.tensor([ids], device=device)).logits[0].float().cpu() for ids in sequences]
    del model
    gc.collect()
    torch.cuda.empty_cache()  # without effect on a CPU
    return Reference(sequences, logits)


def _load(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # In `dtype` from the start: converting the model later would round its rotary frequencies, too.
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", local_files_only=True, use_safetensors=True
        )
    except Exception as e:  # of many kinds: an unknown architecture, a missing package, a broken file
        cause = str(e).strip().partition("\n")[0]
        raise ConfigError(f"transformers cannot load {folder} ({type(e).__name__}: {cause})") from e
