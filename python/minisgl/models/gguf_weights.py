"""Opens the tensors of GGUF files, and gives them the names of the parameters that they fill."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from minisgl.checkpoint.gguf_file import GgufTensor, gguf_package, read_gguf
from minisgl.core.rounding import ceil_div
from minisgl.layers.parameter import Parameter
from minisgl.models.dequantize import OfExpert, Stored

# Tensors of which config.json has what counts (`checkpoint/gguf_folder.py`).
_ROPE: Final = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight")


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Reads parts of a tensor of any type in float32."""

    tensor: GgufTensor

    def __getitem__(self, slices: tuple[Any, ...]) -> Tensor:
        *rows, columns = slices
        block, block_bytes = gguf_package().GGML_QUANT_SIZES[self.tensor.kind]
        first, last = columns.start // block, ceil_div(columns.stop, block)
        part = self.tensor.data[(*rows, slice(first * block_bytes, last * block_bytes))]
        values = torch.from_numpy(gguf_package().dequantize(np.array(part), self.tensor.kind))
        return values[..., columns.start - first * block : columns.stop - first * block]


def open_gguf(path: Path) -> dict[str, Stored]:
    """Map a file; return its tensors in file order, under the names that they have in it."""
    tensors = read_gguf(path)[1].items()
    return {name: Stored(path, _Blocks(t), t.shape, "F32") for name, t in tensors if not _ROPE.fullmatch(name)}


def kinds(stored: dict[str, Stored]) -> str:
    """Return the types of the files' tensors."""
    return ", ".join(sorted({tensor.data.tensor.kind.name for tensor in stored.values()}))


def renamed(
    stored: dict[str, Stored], parameters: Sequence[Parameter], architecture: str, num_layers: int
) -> dict[str, Stored]:
    """Return the tensors that fill the parameters, and, under their own names, those that fill none.

    `architecture` is llama.cpp's name. The tensors of all experts are one in the file.
    """
    package = gguf_package()
    kind = next(kind for kind, name in package.MODEL_ARCH_NAMES.items() if name == architecture)
    names = package.get_tensor_name_map(kind, num_layers)
    found, used = {}, set()
    for name in dict.fromkeys(source.name for parameter in parameters for source in parameter.sources):
        module, expert = re.subn(r"\.experts\.\d+\.", ".experts.", name)
        theirs = names.get_name(module, (".weight", ".bias"))
        if theirs in stored:
            used.add(theirs)
            tensor = stored[theirs]
            if expert:
                index = int(name.split(".experts.")[1].split(".")[0])
                tensor = replace(tensor, data=OfExpert(tensor.data, index, 0, 1, False), shape=tensor.shape[1:])
            found[name] = tensor
    return found | {name: tensor for name, tensor in stored.items() if name not in used}
