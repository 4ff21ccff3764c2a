"""Reads GGUF files: the metadata, and the tensors as they are stored. Imports no torch.

The format is described in https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The package `gguf` has a reader,
too, which takes half a minute for a vocabulary of 262,144 tokens.
"""

from __future__ import annotations

import math
import struct
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from minisgl.core.errors import ConfigError
from minisgl.core.rounding import round_up

if TYPE_CHECKING:
    import numpy as np

SCALARS: Final = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}  # the number of a type -> its struct format
TEXT, ARRAY = 8, 9
VERSIONS: Final = (2, 3)


class GgufTensor(NamedTuple):
    """A tensor of elements of `kind`, a `gguf.GGMLQuantizationType`. `data` are its bytes, with a row in each row."""

    kind: Any
    shape: tuple[int, ...]
    data: np.ndarray[Any, np.dtype[np.uint8]]


def gguf_package() -> Any:
    """Import the package `gguf`. Raises `ConfigError` if it is not installed."""
    try:
        return import_module("gguf")
    except ImportError:
        raise ConfigError("GGUF files are read with the package gguf: `pip install 'minisgl[gguf]'`") from None


class _Header:
    """A position in the mapped file, where values are read."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.position = 0

    def numbers(self, kinds: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{kinds}", self._data, self.position)
        self.position += struct.calcsize(f"<{kinds}")
        return values

    def text(self) -> str:
        (size,) = self.numbers("Q")
        self.position += size
        return str(self._data[self.position - size : self.position], "utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind != ARRAY:
            return self.numbers(SCALARS[kind])[0]
        item, count = self.numbers("IQ")
        if item in SCALARS:
            return [*self.numbers(f"{count}{SCALARS[item]}")]
        return [self.value(item) for _ in range(count)]


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    """Return the metadata and the mapped tensors of a file. Raises `ConfigError` if it cannot be read."""
    import numpy as np  # not before a command speaks

    package = gguf_package()
    try:
        data = np.memmap(path, np.uint8, "r").data
        header = _Header(data)
        magic, version, num_tensors, num_fields = header.numbers("4sIQQ")
        if magic != b"GGUF" or version not in VERSIONS:
            raise ConfigError(f"{path} is not a little-endian GGUF file of version 2 or 3")
        metadata = {header.text(): header.value(*header.numbers("I")) for _ in range(num_fields)}
        infos = []
        for _ in range(num_tensors):
            name, (rank,) = header.text(), header.numbers("I")
            infos.append((name, header.numbers(f"{rank}Q")[::-1], *header.numbers("IQ")))
        start = round_up(header.position, metadata.get("general.alignment", 32))
        tensors = {}
        for name, shape, number, offset in infos:
            kind = package.GGMLQuantizationType(number)
            block, block_bytes = package.GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise ValueError(f"tensor {name} has rows of {shape[-1]} elements in {kind.name}")
            rows = (*shape[:-1], shape[-1] // block * block_bytes)
            found = np.frombuffer(data, np.uint8, math.prod(rows), start + offset)
            tensors[name] = GgufTensor(kind, shape, found.reshape(rows))
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, struct.error, RecursionError) as e:
        raise ConfigError(f"{path} cannot be read as GGUF ({e}); is the download complete?") from None
    return metadata, tensors
