"""Files in the safetensors format: what they hold, and any part of it copied into memory.

The format (github.com/huggingface/safetensors): eight bytes, the header's length N as a little-endian integer; N bytes
of JSON, name -> {"dtype", "shape", "data_offsets": [begin, end]} with offsets that count from the header's end; data.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import torch
from torch import Tensor

from minisgl.errors import ConfigError

LENGTH_BYTES: Final = 8
MAX_HEADER: Final = 100 << 20  # the format's own limit
FLOATS: Final = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
Take = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a file, row-major from byte `offset` of it on; `dtype` is a word of the format, such as "BF16"."""

    file: TensorFile
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    def read(self, take: Take, host: Tensor, scratch: Tensor) -> None:
        """Copy the part `take` (slices with explicit bounds) into `host`, contiguous, of that shape and this type.

        Whole rows are read as they are. Columns lie in every page that the rows have, so the rows are read, in pieces
        of about `scratch` [bytes] uint8, and the columns copied from there: that costs as much as whole rows, for all
        but the first of the processes that want columns from the page cache. Reading each row's part by itself took
        1.2 to 1.4 times as long. Copying from a mapping of the file took less where the page cache had large folios
        and as long where it had small ones, but an error of the disk would be a signal and no exception.
        """
        self.file.read(self, take, host, scratch)


class TensorFile:
    """One open file, which any number of threads may read; raises `ConfigError` for one that is not whole."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as e:
            self._refuse(e.strerror or e)
        try:
            self.tensors = self._read_header()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        os.close(self._fd)

    def _refuse(self, cause: object) -> NoReturn:
        raise ConfigError(f"cannot read {self.path} ({cause}); is the download complete?") from None

    def _read_header(self) -> dict[str, Stored]:
        size = os.fstat(self._fd).st_size
        length = int.from_bytes(os.pread(self._fd, LENGTH_BYTES, 0), "little")
        data = LENGTH_BYTES + length
        if size < LENGTH_BYTES or length > MAX_HEADER or data > size:
            self._refuse("it does not begin with a header of the safetensors format")
        raw = bytearray(length)
        self._read_bytes(memoryview(raw), LENGTH_BYTES)
        try:
            header = json.loads(raw, object_pairs_hook=_without_repeats)
            header.pop("__metadata__", None)
            tensors = {name: self._stored(name, entry, data) for name, entry in header.items()}
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            self._refuse(f"invalid header: {type(e).__name__}: {e}")
        end = max((data + entry["data_offsets"][1] for entry in header.values()), default=data)
        if end > size:
            self._refuse(f"its header promises {end} bytes, it has {size}")
        return tensors

    def _stored(self, name: str, entry: dict[str, Any], data: int) -> Stored:
        dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
            raise ValueError(f"{name} has sizes that are no sizes")
        if dtype in FLOATS and end - begin != math.prod(shape) * FLOATS[dtype].itemsize:
            raise ValueError(f"{name} has {end - begin} bytes, which is not {dtype} {list(shape)}")
        return Stored(self, name, dtype, shape, data + begin)

    def read(self, stored: Stored, take: Take, host: Tensor, scratch: Tensor) -> None:
        """See `Stored.read`."""
        dtype = FLOATS[stored.dtype]
        row = math.prod(stored.shape[1:]) * dtype.itemsize
        begin, count = stored.offset + take[0].start * row, take[0].stop - take[0].start
        if all(part == slice(0, n) for part, n in zip(take[1:], stored.shape[1:], strict=True)):
            self._read_bytes(_bytes_of(host), begin)
            return
        if row > len(scratch):
            scratch = torch.empty(row, dtype=torch.uint8)
        # By numpy: torch holds the interpreter for longer than a small copy takes, and all threads want it.
        word = np.dtype(f"u{dtype.itemsize}")
        target = np.frombuffer(_bytes_of(host), word).reshape(host.shape)
        buffer, step = scratch.numpy(), len(scratch) // row
        for first in range(0, count, step):
            rows = buffer[: min(step, count - first) * row]
            self._read_bytes(rows.data, begin + first * row)
            whole = rows.view(word).reshape(-1, *stored.shape[1:])
            target[first : first + len(whole)] = whole[(slice(None), *take[1:])]

    def _read_bytes(self, target: memoryview, offset: int) -> None:
        done = 0
        while done < len(target):
            try:
                count = os.preadv(self._fd, [target[done:]], offset + done)
            except OSError as e:
                self._refuse(e.strerror or e)
            if count == 0:
                self._refuse(f"it ends at byte {offset + done}")
            done += count


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result
