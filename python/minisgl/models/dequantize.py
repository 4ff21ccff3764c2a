"""Reads the matrices of a quantized checkpoint, w = (q - zero) * scale: in float32, or in a format for a device.

Any part of a matrix can be read in float32: shards need not begin where groups do.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from minisgl.checkpoint.quantization import Quantization
from minisgl.core.errors import ConfigError
from minisgl.core.rounding import ceil_div
from minisgl.models.families import ExpertFlags
from minisgl.ops.quantized import BLOCK, E2M1, E8M0, MXFP4, Format


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of an open file. Indexing `data` with slices reads a part of the mapped file."""

    path: Path
    data: Any
    shape: tuple[int, ...]
    dtype: str  # the file format's name

    def whole(self) -> Tensor:
        """Read the whole tensor."""
        tensor: Tensor = self.data[tuple(slice(0, n) for n in self.shape) or ...]
        return tensor


Upload = Callable[[Tensor], Tensor]
"""Copies a host tensor to the device."""


class Matrix(ABC):
    """A quantized matrix [rows, columns]. All slices have explicit bounds."""

    format: Format | None  # in which a device can hold the matrix without loss; None if there is none

    @abstractmethod
    def __getitem__(self, slices: tuple[slice, slice]) -> Tensor:
        """Return the part `slices` in float32."""

    @abstractmethod
    def numbers(self, slices: tuple[slice, slice], upload: Upload) -> tuple[Tensor, ...]:
        """Return the part `slices`, whole groups of `format`, as the arguments of `Quantized.fill`."""


Matrices = dict[str, tuple[Matrix, tuple[int, int]]]
"""Module name in the unquantized model -> (matrix, its shape)."""


class _Parts:
    """The tensors of one module, whose names begin with `prefix`. `pop` removes a tensor from `stored`."""

    def __init__(self, stored: dict[str, Stored], prefix: str) -> None:
        self._stored = stored
        self.prefix = prefix

    @property
    def module(self) -> str:
        return self.prefix[:-1]

    def has(self, name: str) -> bool:
        return f"{self.prefix}{name}" in self._stored

    def pop(self, name: str) -> Stored | None:
        return self._stored.pop(f"{self.prefix}{name}", None)

    def need(self, name: str, dtype: str = "") -> Stored:
        """Pop a tensor. Raises `ConfigError` if there is none, or if it does not have the `dtype` that is given."""
        found = self.pop(name)
        if found is None:
            raise ConfigError(f"the checkpoint has quantized weights {self.module} but no {self.prefix}{name}")
        if dtype and found.dtype != dtype:
            raise ConfigError(f"tensor {self.prefix}{name} in {found.path} is {found.dtype} instead of {dtype}")
        return found

    def scale(self, name: str) -> Stored:
        """Pop a tensor of scales. Raises `ConfigError` if there is none, or if a scale is 0 or not finite."""
        found = self.need(name)
        stored = found.whole()
        sizes = (stored.view(E8M0) if stored.dtype is torch.uint8 else stored).float().abs()  # bytes are powers of two
        if not sizes.numel() or not all(0 < float(n) < torch.inf for n in sizes.aminmax()):  # NaN if any is
            raise ConfigError(f"tensor {self.prefix}{name} in {found.path} has scales that are 0 or not finite")
        return found

    def require(self, part: Stored, name: str, *shapes: tuple[int, ...]) -> None:
        """Raise `ConfigError` unless `part` has one of the shapes."""
        if part.shape not in shapes:
            allowed = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
            raise ConfigError(
                f"tensor {self.prefix}{name} in {part.path} has shape {list(part.shape)} instead of {allowed}"
            )


def dequantized(stored: dict[str, Stored], quantization: Quantization) -> dict[str, Stored]:
    """Replace the tensors of each quantized matrix by one `Stored` whose `data` is a `Matrix`, read as float32.

    Raises `ConfigError` with the name of a tensor that is missing, has the wrong shape, or has impossible scales.
    """
    mark, read = LAYOUTS[quantization.layout]
    rest = dict(stored)
    result: dict[str, Stored] = {}
    for name, tensor in list(rest.items()):
        is_plain = mark == ".weight" and tensor.dtype not in SCALED_DTYPES
        if name not in rest or not name.endswith(mark) or is_plain:
            continue
        parts = _Parts(rest, name.removesuffix(mark) + mark[0])
        for module, (matrix, shape) in read(parts, quantization).items():
            result[f"{module}.weight"] = Stored(tensor.path, matrix, shape, "F32")
    if repeated := rest.keys() & result.keys():
        raise ConfigError(f"the checkpoint has {min(repeated)} twice: quantized and not")
    return rest | result


# -- 8 bits, one element each


SCALED_DTYPES: Final = ("F8_E4M3", "I8")


@dataclass(frozen=True, slots=True)
class _Scaled(Matrix):
    """`weight` [N, K] in 8 bits, and `scale` with one number for each `block` of (rows, columns)."""

    weight: Any
    scale: Tensor
    block: tuple[int, int]
    format: Format | None

    def __getitem__(self, slices: tuple[slice, slice]) -> Tensor:
        rows, columns = (torch.arange(s.start, s.stop) // size for s, size in zip(slices, self.block, strict=True))
        w: Tensor = self.weight[slices].float()
        return w.mul_(self.scale.index_select(0, rows).index_select(1, columns))

    def numbers(self, slices: tuple[slice, slice], upload: Upload) -> tuple[Tensor, ...]:
        rows, columns = (slice(s.start // n, ceil_div(s.stop, n)) for s, n in zip(slices, self.block, strict=True))
        return upload(self.weight[slices]), upload(self.scale[rows, columns].contiguous())


def _scaled(parts: _Parts, quantization: Quantization) -> Matrices:
    weight = parts.need("weight")
    if len(weight.shape) != 2:
        raise ConfigError(f"tensor {parts.prefix}weight in {weight.path} is {weight.dtype} but not a matrix")
    rows, columns = weight.shape
    name = "weight_scale_inv" if parts.has("weight_scale_inv") else "weight_scale"
    scale = parts.scale(name)
    zeros = parts.pop("weight_zero_point")
    if zeros is not None and zeros.whole().float().count_nonzero():
        raise ConfigError(f"tensor {parts.prefix}weight has zero points, which are not supported for 8-bit weights")
    block = quantization.block or (1, columns)
    blocks = ceil_div(rows, block[0]), ceil_div(columns, block[1])
    parts.require(scale, name, (), (1,), (rows,), (rows, 1), blocks)
    if len(scale.shape) < 2 or scale.shape == (rows, 1):
        blocks, block = ((rows, 1), (1, columns)) if rows in scale.shape else ((1, 1), (rows, columns))
    kind = None
    if weight.dtype == "F8_E4M3" and block == (BLOCK, BLOCK):
        kind = Format(8, BLOCK)
    elif block in ((1, columns), (rows, columns)):
        kind = Format(8, 0, is_integer=weight.dtype == "I8")
    return {parts.module: (_Scaled(weight.data, scale.whole().float().view(blocks), block, kind), (rows, columns))}


# -- 4 or 8 bits, packed into words of 32


class _Packing(NamedTuple):
    """Numbers of `bits` in words of `per`; `order` is the position of each in its word, if they are not in order."""

    bits: int
    per: int
    order: tuple[int, ...] = ()

    def unpack(self, words: Tensor) -> Tensor:
        """Words [N, W], integers of any size -> [N, W * per] uint8."""
        q = words.contiguous().view(torch.uint8)
        if self.bits == 4:
            q = torch.stack([q & 15, q >> 4], -1).flatten(1)
        return q.view(len(q), -1, self.per)[..., self.order].flatten(1) if self.order else q


def _packing(words: int, count: int) -> _Packing:
    """Return the packing of `count` numbers in `words`: the matrices of a checkpoint may differ."""
    return _Packing(8, 4) if words == ceil_div(count, 4) else _Packing(4, 8)


@dataclass(frozen=True, slots=True)
class _Packed(Matrix):
    """Integers packed into words, with scales and zero points for each group of columns.

    words   reads the integers of (rows, columns), uint8 [rows, columns]
    scales  reads the scales of rows, [rows, G]
    zeros   reads the zero points of rows, [rows, G], or a scalar for all
    groups  [K] the group of each column
    """

    words: Callable[[slice, slice, Upload], Tensor]
    scales: Callable[[slice], Tensor]
    zeros: Callable[[slice], Tensor]
    groups: Tensor
    format: Format | None

    def __getitem__(self, slices: tuple[slice, slice]) -> Tensor:
        rows, columns = slices
        groups = self.groups[columns]
        q = self.words(rows, columns, lambda host: host)
        w = E2M1[q.int()] if self.format == MXFP4 else q.float()
        zeros = self.zeros(rows)
        w -= zeros.float().index_select(1, groups) if zeros.dim() else zeros
        return w.mul_(self.scales(rows).float().index_select(1, groups))

    def numbers(self, slices: tuple[slice, slice], upload: Upload) -> tuple[Tensor, ...]:
        assert self.format is not None, "no device can hold this matrix as it is stored"
        rows, columns = slices
        groups = slice(columns.start // self.format.group, columns.stop // self.format.group)
        q = self.words(rows, columns, upload)
        if self.format.order:
            q = q[:, upload(torch.frombuffer(bytearray(self.format.order), dtype=torch.int32))]
        found = q, upload(self.scales(rows)[:, groups].contiguous())
        return (*found, upload(self.zeros(rows)[:, groups].contiguous())) if self.format.has_zeros else found


def _slice(
    data: Any, dim: int, along: slice, other: slice, packing: _Packing, upload: Upload = lambda host: host
) -> Tensor:
    """Unpack a part of a matrix that is packed along `dim`, with `dim` last: [other, along].

    `along` selects elements along `dim`, and `other` along the other dimension.
    """
    words = slice(along.start // packing.per, ceil_div(along.stop, packing.per))
    part = upload(data[other, words] if dim else data[words, other])
    start = along.start - words.start * packing.per
    return packing.unpack(part if dim else part.t())[:, start : start + along.stop - along.start]


@cache
def _equal_groups(columns: int, size: int) -> Tensor:
    """Return the group of each column [K], which must not be changed."""
    return torch.arange(columns) // size


def _format(bits: int, columns: int, scales: Stored, groups: Tensor, num_groups: int, has_zeros: bool) -> Format | None:
    """Return the format of packed numbers; None if no GEMM supports their groups."""
    group = columns // num_groups
    order = groups.argsort(stable=True)
    if bits != 4 or group not in (32, 64, 128) or not torch.equal(groups[order], _equal_groups(columns, group)):
        return None
    is_plain = torch.equal(groups[order], groups)
    return Format(4, group, has_zeros, scales.whole().dtype, order=b"" if is_plain else order.int().numpy().tobytes())


def _column_groups(parts: _Parts, columns: int, num_groups: int, order: Stored | None) -> Tensor:
    """Return the group of each column [K]: `order` if it is stored, else groups of equal length."""
    if order is not None:
        parts.require(order, "g_idx", (columns,))
        groups = order.whole().long()
        if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
            raise ConfigError(f"tensor {parts.prefix}g_idx in {order.path} names groups that do not exist")
        return groups
    if columns % num_groups:
        raise ConfigError(
            f"the {columns} columns of quantized weights {parts.module} are in {num_groups} unequal groups"
        )
    return _equal_groups(columns, columns // num_groups)


def _compressed(parts: _Parts, quantization: Quantization) -> Matrices:
    """compressed-tensors: words [N, K / per], scales [N, G], zero points [N / per, G].

    Integers and zero points are stored with the same offset, which cancels.
    """
    words, shape = parts.need("weight_packed", "I32"), parts.need("weight_shape")
    scales, zeros = parts.scale("weight_scale"), parts.pop("weight_zero_point")
    order = (parts.need if quantization.needs_order else parts.pop)("weight_g_idx")
    if order is not None and -1 in order.whole():  # never set: the columns of a group are neighbours
        order = None
    rows, columns = (int(n) for n in shape.whole())
    packing = _packing(words.shape[-1], columns)
    num_groups = scales.shape[-1]
    parts.require(words, "weight_packed", (rows, ceil_div(columns, packing.per)))
    parts.require(scales, "weight_scale", (rows, num_groups))
    if zeros is not None:
        parts.require(zeros, "weight_zero_point", (ceil_div(rows, packing.per), num_groups))
    middle = torch.tensor(1 << packing.bits - 1)
    groups = slice(0, num_groups)
    matrix = _Packed(
        lambda r, c, upload: _slice(words.data, 1, c, r, packing, upload),
        lambda r: scales.data[r],
        lambda r: middle if zeros is None else _slice(zeros.data, 0, r, groups, packing).t(),
        group_of := _column_groups(parts, columns, num_groups, order),
        _format(packing.bits, columns, scales, group_of, num_groups, zeros is not None),
    )
    return {parts.module: (matrix, (rows, columns))}


AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # the position in a word of each of eight neighbours


def _awq(parts: _Parts, quantization: Quantization) -> Matrices:
    """AutoAWQ's "gemm": words [K, N / 8] in AWQ_ORDER, scales [G, N], zero points [G, N / 8]."""
    words, scales, zeros = parts.need("qweight", "I32"), parts.scale("scales"), parts.need("qzeros", "I32")
    packing = _Packing(4, 8, AWQ_ORDER)
    columns, (num_groups, rows) = words.shape[0], scales.shape
    parts.require(words, "qweight", (columns, ceil_div(rows, packing.per)))
    parts.require(zeros, "qzeros", (num_groups, ceil_div(rows, packing.per)))
    groups = slice(0, num_groups)
    matrix = _Packed(
        lambda r, c, upload: _slice(words.data, 1, r, c, packing, upload).t(),
        lambda r: scales.data[groups, r].t(),
        lambda r: _slice(zeros.data, 1, r, groups, packing).t(),
        group_of := _column_groups(parts, columns, num_groups, None),
        _format(packing.bits, columns, scales, group_of, num_groups, True),
    )
    return {parts.module: (matrix, (rows, columns))}


def _gptq(parts: _Parts, quantization: Quantization) -> Matrices:
    """AutoGPTQ: words [K / per, N], scales [G, N], zero points [G, N / per] less `zero_offset`, groups [K]."""
    words, scales, zeros = parts.need("qweight", "I32"), parts.scale("scales"), parts.need("qzeros", "I32")
    order = (parts.need if quantization.needs_order else parts.pop)("g_idx")
    num_groups, rows = scales.shape
    packing = _packing(zeros.shape[-1], rows)
    columns = words.shape[0] * packing.per
    parts.require(words, "qweight", (ceil_div(columns, packing.per), rows))
    parts.require(zeros, "qzeros", (num_groups, ceil_div(rows, packing.per)))
    groups = slice(0, num_groups)

    # GPTQModel subtracts the offset from whole words, so that a zero point of 0 borrows from its neighbour.
    offset = quantization.zero_offset * (0xFFFFFFFF // ((1 << packing.bits) - 1))

    def zeros_of(r: slice) -> Tensor:
        return _slice(zeros.data, 1, r, groups, packing, lambda stored: stored + offset).t()

    is_symmetric = bool((zeros_of(slice(0, rows)) == 1 << packing.bits - 1).all())
    matrix = _Packed(
        lambda r, c, upload: _slice(words.data, 0, c, r, packing, upload),
        lambda r: scales.data[groups, r].t(),
        zeros_of,
        group_of := _column_groups(parts, columns, num_groups, order),
        _format(packing.bits, columns, scales, group_of, num_groups, not is_symmetric),
    )
    return {parts.module: (matrix, (rows, columns))}


# -- MXFP4 (OCP Microscaling Formats 1.0): E2M1 with an exponent of two for each 32 columns


def _mxfp4(words: Any, scales: Any, columns: int) -> Matrix:
    """Return the matrix of bytes [N, K / 2], with even columns in the low halves, and scales [N, K / 32]."""
    groups, packing = slice(0, columns // 32), _Packing(4, 2)
    return _Packed(
        lambda r, c, upload: _slice(words, 1, c, r, packing, upload),
        lambda r: scales[r, groups].view(E8M0),
        lambda r: torch.tensor(0),
        _equal_groups(columns, 32),
        MXFP4,
    )


def _compressed_mxfp4(parts: _Parts, quantization: Quantization) -> Matrices:
    """compressed-tensors: bytes [N, K / 2], scales [N, K / 32]."""
    words, scales = parts.need("weight_packed"), parts.scale("weight_scale")
    rows, columns = scales.shape[0], scales.shape[-1] * 32
    parts.require(scales, "weight_scale", (rows, columns // 32))
    parts.require(words, "weight_packed", (rows, columns // 2))
    return {parts.module: (_mxfp4(words.data, scales.data, columns), (rows, columns))}


def _blocked_mxfp4(parts: _Parts, quantization: Quantization) -> Matrices:
    """gpt-oss: blocks [N, K / 32, 16] and scales [N, K / 32] of each expert."""
    blocks, scales = parts.need("blocks"), parts.scale("scales")
    rows, groups = scales.shape if len(scales.shape) == 2 else (0, 0)
    parts.require(scales, "scales", (rows, groups))
    parts.require(blocks, "blocks", (rows, groups, 16))
    return {parts.module: (_mxfp4(_Flat(blocks.data), scales.data, groups * 32), (rows, groups * 32))}


@dataclass(frozen=True, slots=True)
class _Flat:
    """Rows of `data` [N, G, B] as [N, G B]."""

    data: Any

    def __getitem__(self, slices: tuple[slice, slice]) -> Tensor:
        rows, columns = slices
        part: Tensor = self.data[rows, :, :]
        return part.flatten(1)[:, columns]


# -- Experts in one tensor


@dataclass(frozen=True, slots=True)
class OfExpert:
    """Rows `first`, `first + step`, ... of one expert of `data` [E, R, ...], or [E, C, R] if it `is_transposed`."""

    data: Any
    expert: int
    first: int
    step: int
    is_transposed: bool

    def __getitem__(self, slices: tuple[slice, ...]) -> Tensor:
        rows, *columns = slices
        taken = slice(self.first + rows.start * self.step, self.first + (rows.stop - 1) * self.step + 1)
        part: Tensor
        if self.is_transposed:
            part = self.data[self.expert, *columns, taken].t()
        else:
            part = self.data[self.expert, taken, *columns]
        return part[:: self.step].contiguous()


PACKED_SUFFIXES: Final = {"": "weight", ".weight": "weight", "_bias": "bias", "_blocks": "blocks", "_scales": "scales"}


def unpacked(stored: dict[str, Stored], flags: ExpertFlags) -> dict[str, Stored]:
    """Replace the tensors that have all experts of a layer (`flags.packed`) by those of each expert's projections."""
    packed = flags.packed
    if packed is None:
        return stored
    found: dict[str, Stored] = {}
    gate, up, down = flags.parts
    suffixes = "|".join(map(re.escape, PACKED_SUFFIXES))
    module = f"{flags.module}." if flags.module else ""
    names = re.compile(rf"(.*\.{module})({packed.gate_up}|{packed.down})({suffixes})")
    for name, tensor in stored.items():
        match = names.fullmatch(name)
        if match is None or len(tensor.shape) < 2:
            found[name] = tensor
            continue
        block, which, suffix = match.groups()
        parts = (down,) if which == packed.down else (gate, up)
        is_transposed = _is_transposed(*(stored.get(f"{block}{name}{suffix}") for name in packed[:2]))
        count, rows, *columns = tensor.shape[:1] + tensor.shape[:0:-1] if is_transposed else tensor.shape
        rows //= len(parts)
        step = len(parts) if packed.is_interleaved else 1
        for expert, (i, part) in product(range(count), enumerate(parts)):
            data = OfExpert(tensor.data, expert, i if packed.is_interleaved else i * rows, step, is_transposed)
            full = f"{block}experts.{expert}.{part}.{PACKED_SUFFIXES[suffix]}"
            found[full] = Stored(tensor.path, data, (rows, *columns), tensor.dtype)
    return found


def _is_transposed(up: Stored | None, down: Stored | None) -> bool:
    """Return whether tensors are [E, H, 2I] and [E, I, H]: the sizes of [E, 2I, H] and [E, H, I] cannot agree so."""
    return up is not None and down is not None and len(up.shape) == 3 and up.shape[2] == 2 * down.shape[1]


_Read = Callable[[_Parts, Quantization], Matrices]

# Layout -> (the suffix of a tensor name that marks a quantized matrix, the function that reads its module).
LAYOUTS: Final[Mapping[str, tuple[str, _Read]]] = {
    "scaled": (".weight", _scaled),
    "packed": (".weight_packed", _compressed),
    "awq": (".qweight", _awq),
    "gptq": (".qweight", _gptq),
    "packed mxfp4": (".weight_packed", _compressed_mxfp4),
    "blocked mxfp4": (".blocks", _blocked_mxfp4),
}
