"""Weight matrices in 8 or 4 bits and K/V pages in 8, as ops read them, and the rounding to such numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

from minisgl.core.rounding import ceil_div

E4M3: Final = torch.float8_e4m3fn
E8M0: Final = torch.float8_e8m0fnu
E4M3_MAX: Final = 448.0
E2M1: Final = torch.tensor([sign * n for sign in (1.0, -1.0) for n in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)])
BLOCK: Final = 128
# Each group tries scales that are smaller by 0, 1, 2, ... of these steps: that may gain more than it costs.
SHRINKS: Final = 16
SHRINK: Final = 0.02


@dataclass(frozen=True, slots=True)
class Format:
    """How a matrix [N, K] is stored: w = (q - zero) scale.

    fp8    q is float8_e4m3fn, without zeros; a scale belongs to a row (`group` 0) or to a block of `group` by `group`.
    int8   q is -128 to 127, without zeros; a scale belongs to a row (`group` 0) or to `group` columns of a row.
    int4   q is 0 to 15; a scale, and a zero if there are any (else it is 8), belong to `group` columns of a row.
    mxfp4  q is a number of `E2M1`, without zeros; a scale in E8M0 belongs to 32 columns of a row.

    `order` holds the columns in the order in which they are stored, as int32, if groups are not neighbours.
    """

    bits: int
    group: int
    has_zeros: bool = False
    scale_dtype: torch.dtype = torch.float32
    is_integer: bool = False  # of 8 bits
    order: bytes = b""

    @property
    def name(self) -> str:
        if self.bits == 4:
            return "mxfp4" if self.scale_dtype is E8M0 else "int4"
        return "int8" if self.is_integer else "fp8"

    @property
    def chunk(self) -> int:
        """The number of columns whose 4-bit numbers are packed together; 2,880 inputs of gpt-oss are 45 times 64."""
        return 64 if self.name == "mxfp4" else 128

    @property
    def rows(self) -> int:
        """The number of rows that share a scale."""
        return self.group if self.name == "fp8" and self.group else 1

    @property
    def columns(self) -> int:
        """What a number of columns must be a multiple of."""
        if self.order:
            return len(self.order) // 4
        if self.bits == 4:
            return self.chunk
        return self.group or 16

    def __str__(self) -> str:
        shared = f"{'blocks' if self.name == 'fp8' else 'groups'} of {self.group}" if self.group else "rows"
        return f"{self.name} with scales for {shared}{' in an order of their own' if self.order else ''}"

    def empty(self, rows: int, columns: int, device: torch.device) -> Quantized:
        """Allocate a matrix [rows, columns]."""
        width, dtype = columns * self.bits // 8, {"fp8": E4M3, "int8": torch.int8}.get(self.name, torch.uint8)
        data = torch.empty(rows, width, dtype=dtype, device=device)
        groups = ceil_div(columns, self.group) if self.group else 1
        scale = torch.empty(ceil_div(rows, self.rows), groups, dtype=self.scale_dtype, device=device)
        order = torch.frombuffer(bytearray(self.order), dtype=torch.int32).to(device) if self.order else None
        return Quantized(self, data, scale, torch.empty_like(scale) if self.has_zeros else None, order)


INT8: Final = Format(8, 32, scale_dtype=torch.bfloat16, is_integer=True)
MXFP4: Final = Format(4, 32, scale_dtype=E8M0)
# The format to which `--quantization` rounds a checkpoint in 16 bits, by kind of device and scheme.
TARGET_FORMATS: Final[dict[str, dict[str, Format]]] = {
    "cpu": {"int8": INT8, "int4": Format(4, 32, scale_dtype=torch.bfloat16)},
    "cuda": {
        "fp8": Format(8, 0),
        "int8": Format(8, 0, is_integer=True),
        "int4": Format(4, 128, scale_dtype=torch.bfloat16),
    },
}

MAX_NARROW: Final = 512  # the hidden size of models that get small groups


def target_format(device: str, scheme: str, hidden_size: int) -> Format | None:
    """Return the format to which `--quantization` rounds a model's matrices, or None without a scheme.

    4-bit matrices of narrow models have groups of 32: the built-in model's KL divergence is 0.037 instead of 0.057.
    """
    kind = TARGET_FORMATS[device].get(scheme)
    return replace(kind, group=32) if kind and kind.bits == 4 and hidden_size <= MAX_NARROW else kind


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix [N, K], or some of its rows. `data` [N, K], or packed [N, K / 2]; `scale`, `zeros` [N / rows, groups].

    Byte i of a chunk of C columns holds column i in its low half and column C / 2 + i in its high one. `order` is that
    of the format. Of `experts`, all tensors have a dimension more, in front, and an index selects one expert's matrix.
    """

    format: Format
    data: Tensor
    scale: Tensor
    zeros: Tensor | None = None
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        *rows, width = self.data.shape
        return *rows, width * (2 if self.format.bits == 4 else 1)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, expert: int) -> Quantized:
        return self._each(lambda t: t[expert])

    def experts(self, count: int) -> Quantized:
        """The matrix as those of `count` experts [count, N, K], which begin and end where scales do."""
        return self._each(lambda t: t.view(count, -1, t.shape[1]))

    def _each(self, view: Callable[[Tensor], Tensor]) -> Quantized:
        zeros = None if self.zeros is None else view(self.zeros)
        return Quantized(self.format, view(self.data), view(self.scale), zeros)

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in (self.data, self.scale, self.zeros, self.order) if t is not None]

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    def part(self, start: int, stop: int) -> Quantized:
        """The rows [start, stop), which begin and end where scales do."""
        size = self.format.rows
        scales = slice(start // size, ceil_div(stop, size))
        zeros = None if self.zeros is None else self.zeros[scales]
        return Quantized(self.format, self.data[start:stop], self.scale[scales], zeros, self.order)

    def reorder(self, order: Tensor) -> bool:
        """Put row order[i] in place i; return false if a row would leave the group that shares its scale."""
        size = self.format.rows
        if size > 1 and (order // size != torch.arange(len(order), device=order.device) // size).any():
            return False
        for tensor in self.tensors[: 3 if size == 1 else 1]:
            if tensor is not self.order:
                tensor.copy_(tensor[order])
        return True

    def round_from(self, values: Tensor, rounding: Rounding | None = None) -> None:
        """Fill the matrix with the floats `values` [N, K], rounded."""
        assert not self.format.order, "a format with an order can only be filled with stored numbers"
        self.fill(*(rounding or rounded)(values, self.format))

    def fill(self, q: Tensor, scale: Tensor, zeros: Tensor | None = None) -> None:
        """Fill the matrix with numbers [N, K], scales and zeros as the format says."""
        self.data.copy_(pack(q, self.format.chunk) if self.format.bits == 4 else q)
        self.scale.copy_(scale.expand_as(self.scale))
        if self.zeros is not None and zeros is not None:
            self.zeros.copy_(zeros)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The matrix in floats [N, K]."""
        rows, columns = self.shape
        if self.format.name == "fp8":
            scale = self.scale
            if self.format.group:
                scale = _spread(_spread(scale, 0, self.format.group, rows), 1, self.format.group, columns)
            return (self.data.float() * scale).to(dtype)
        q = unpack(self.data, self.format.chunk) if self.format.bits == 4 else self.data
        q = E2M1.to(q.device)[q.int()] if self.format.name == "mxfp4" else q.float()
        zeros = 8.0 * (self.format.name == "int4") if self.zeros is None else self.zeros.float().unsqueeze(2)
        groups = q.view(rows, self.scale.shape[1], -1)
        w = ((groups - zeros) * self.scale.float().unsqueeze(2)).view(rows, columns).to(dtype)
        return w if self.order is None else w[:, self.order.argsort()]


@dataclass(frozen=True, slots=True)
class QuantizedPages:
    """K/V pages [P, 2, Hk, page, D] in float8_e4m3fn, with a float32 scale for each token and head [P, 2, Hk, page]."""

    data: Tensor
    scale: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.data.shape

    def store(self, x: Tensor, which: int, page: Tensor, offset: Tensor) -> None:
        """Round keys (`which` 0) or values (1) x [T, Hk, D] into the slots of pages and offsets [T]."""
        q, scale = round_fp8(x.flatten(0, 1), 0)
        self.data.view(torch.uint8)[page, which, :, offset] = q.view(torch.uint8).view(x.shape)
        self.scale[page, which, :, offset] = scale.view(x.shape[:2])

    def dense(self, ids: Tensor) -> Tensor:
        """The pages `ids` [n] in float32 [n, 2, Hk, page, D]."""
        return self.data.view(torch.uint8)[ids].view(E4M3).float() * self.scale[ids].unsqueeze(-1)


Pages = Tensor | QuantizedPages


def data_and_scale(pages: Pages) -> tuple[Tensor, Tensor]:
    """Return what kernels take: the pages, and the scales of quantized ones (or anything)."""
    return (pages.data, pages.scale) if isinstance(pages, QuantizedPages) else (pages, pages)


def page_strides(pages: Pages) -> tuple[int, int]:
    """Return the elements from page to page, and from the scales of a page to those of the next."""
    data, scale = data_and_scale(pages)
    return data.stride(0), scale.stride(0)


def _spread(scale: Tensor, dim: int, size: int, length: int) -> Tensor:
    return scale.repeat_interleave(size, dim).narrow(dim, 0, length)


def pack(q: Tensor, chunk: int) -> Tensor:
    """Numbers 0 to 15 [N, K] -> bytes [N, K / 2]."""
    low, high = q.to(torch.uint8).view(len(q), -1, 2, chunk // 2).unbind(2)
    return (low | high << 4).flatten(1)


def unpack(data: Tensor, chunk: int) -> Tensor:
    """Bytes [N, K / 2] -> numbers 0 to 15 [N, K] uint8."""
    halves = data.view(len(data), -1, chunk // 2)
    return torch.stack([halves & 15, halves >> 4], 2).flatten(1)


def round_fp8(weight: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Round [N, K] -> (float8_e4m3fn [N, K], scales float32 of each row [N, 1], or of each block)."""
    if not block:
        scale = positive(weight.float().abs().amax(1, keepdim=True) / E4M3_MAX)
        return (weight.float() / scale).clamp_(-E4M3_MAX, E4M3_MAX).to(E4M3), scale
    rows, columns = weight.shape
    down, across = ceil_div(rows, block), ceil_div(columns, block)
    padded = F.pad(weight.float(), (0, across * block - columns, 0, down * block - rows))
    blocks = padded.view(down, block, across, block)
    scale = positive(blocks.abs().amax((1, 3)) / E4M3_MAX)
    q = (blocks / scale[:, None, :, None]).clamp_(-E4M3_MAX, E4M3_MAX).view(padded.shape)[:rows, :columns]
    return q.to(E4M3), scale


def round_int8(weight: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round [N, K] -> (numbers [N, K] int8, scales in `dtype` [N, K / group], or [N, 1] for a `group` of 0)."""
    w = weight.float().view(len(weight), -1, group or weight.shape[1])
    scale = (w.abs().amax(2, keepdim=True) / 127).to(dtype)
    return (w / positive(scale.float())).round_().clamp_(-127, 127).to(torch.int8).flatten(1), scale.squeeze(2)


def round_int4(weight: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round [N, K] -> (numbers 0 to 15 [N, K] uint8 with a zero of 8, scales [N, K / group] in `dtype`).

    Of each group the scale with the least squared error is taken.
    """
    rows, columns = weight.shape
    w = weight.float().view(rows, -1, group)
    largest = w.abs().amax(2, keepdim=True) / 7
    best, least_error = largest, torch.full_like(largest, torch.inf)
    for i in range(SHRINKS):
        scale = positive((largest * (1.0 - SHRINK * i)).to(dtype).float())
        error = ((w / scale).round_().clamp_(-8, 7).mul_(scale) - w).square_().sum(2, keepdim=True)
        best, least_error = torch.where(error < least_error, scale, best), torch.minimum(error, least_error)
    q = (w / best).round_().clamp_(-8, 7).add_(8).to(torch.uint8).view(rows, columns)
    return q, best.squeeze(2).to(dtype)


def round_mxfp4(weight: Tensor, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round [N, K] -> (indices of `E2M1` [N, K] uint8, scales [N, K / group]); a group's largest number is 3 to 6."""
    w = weight.float().view(len(weight), -1, group)
    scale = torch.exp2(torch.log2(positive(w.abs().amax(2, keepdim=True)) / E2M1[7]).ceil())
    middles = ((E2M1[:7] + E2M1[1:8]) / 2).to(w.device)
    q = torch.bucketize(w.abs() / scale, middles) + 8 * (w < 0)
    return q.to(torch.uint8).flatten(1), scale.squeeze(2).to(dtype)


ROUND: Final[dict[str, Callable[[Tensor, int, torch.dtype], tuple[Tensor, Tensor]]]] = {
    "fp8": lambda weight, group, _: round_fp8(weight, group),
    "int8": round_int8,
    "int4": round_int4,
    "mxfp4": round_mxfp4,
}


Rounding = Callable[[Tensor, Format], tuple[Tensor, Tensor]]
"""Rounds floats [N, K] to what `Quantized.fill` takes."""


def rounded(weight: Tensor, kind: Format) -> tuple[Tensor, Tensor]:
    """A `Rounding` by PyTorch's ops."""
    return ROUND[kind.name](weight, kind.group, kind.scale_dtype)


def positive(scale: Tensor) -> Tensor:
    """1 for the scale of numbers that are all 0."""
    return torch.where(scale > 0, scale, 1.0)
