"""Creates the weights of layers, and records for the loader which checkpoint tensors fill them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from minisgl.distributed.communicator import Communicator, SoloCommunicator
from minisgl.distributed.info import ALONE
from minisgl.kvcache.store import LayerState
from minisgl.layers.adapters import Adapted
from minisgl.layers.parameter import Init, Parameter, Source
from minisgl.ops.quantized import Format, Quantized

if TYPE_CHECKING:
    from minisgl.core.specs import Mixer, State
    from minisgl.ops.table import OpTable


@dataclass(frozen=True, slots=True)
class Shard:
    """This rank's elements [start, stop) of a dimension that has `size` elements in the checkpoint.

    Rows may be in a parameter in several `copies`, one after the other.
    """

    size: int
    start: int
    stop: int
    copies: int = 1

    @property
    def count(self) -> int:
        return self.stop - self.start

    def times(self, unit: int) -> Shard:
        """Return the shard if each of its elements is `unit` of them."""
        return Shard(self.size * unit, self.start * unit, self.stop * unit, self.copies)


Size = int | Shard
"""A dimension; an int means that every rank holds all of it."""
Rows = Size | Sequence[Size]
"""The first dimension of a tensor; a sequence for a fused one, whose parts are stacked (q, k, v in `qkv_proj`)."""


class Builder:
    """Creates the weights of a model's layers, and gives the layers their ops, dtype, device and ranks.

    `format_of` returns the format of the matrix with this checkpoint name; None means the model's dtype. `parameters`
    lists the created weights in order, `states` what the layers keep, `mixers` how they mix tokens, `adapted` the
    projections that adapters may change if it `has_adapters`; `recurrences` are the layers with a recurrent state, by
    mixer.
    """

    def __init__(
        self,
        ops: OpTable,
        dtype: torch.dtype,
        device: torch.device,
        comm: Communicator | None = None,
        format_of: Callable[[str], Format | None] = lambda name: None,
        *,
        has_adapters: bool = False,
    ) -> None:
        self.ops = ops
        self.dtype = dtype
        self.device = device
        self.comm = comm or SoloCommunicator(ALONE, device)
        self.info = self.comm.info
        self.format_of = format_of
        self.parameters: list[Parameter] = []
        self.states: list[LayerState] = []
        self.mixers: list[Mixer] = []
        self.has_adapters = has_adapters
        self.adapted: list[Adapted] = []
        self.recurrences: dict[int, list[Any]] = {}

    def shard(self, count: int, what: str, *, unit: int = 1) -> Shard:
        """Return this rank's equal shard of `count` units of `unit` elements each.

        Raises `ConfigError` if the units do not divide evenly; `what` names them.
        """
        return _shard(count, self.info.shard(count, what), unit)

    def shard_or_replicate(self, count: int, what: str, *, unit: int = 1) -> Shard:
        """Return what `shard` does; if there are fewer units than ranks, adjacent ranks have the same unit."""
        return _shard(count, self.info.shard_or_replicate(count, what), unit)

    def balanced_shard(self, count: int) -> Shard:
        """Return this rank's shard of `count` elements that need not divide evenly."""
        return _shard(count, self.info.balanced_shard(count), 1)

    def parameter(
        self,
        parts: Mapping[str, Rows],
        *shape: Size,
        init: Init = Init.NORMAL,
        dtype: torch.dtype | None = None,
        offset: float = 0.0,
        scale: float = 1.0,
        order: Sequence[int] | None = None,
    ) -> Tensor:
        """Create an uninitialised weight [sum of parts, *shape]. `parts` maps checkpoint names to rows, in order.

        The weight has this rank's shard of each dimension. `dtype` defaults to the model's. `offset`, `scale` and
        `order` are as in `Parameter`.
        """
        columns = [_whole(size) for size in shape]
        sources, rows = _sources(parts, columns)
        tensor = torch.empty(rows, *(d.count for d in columns), dtype=dtype or self.dtype, device=self.device)
        self.parameters.append(Parameter(tensor, sources, init, offset, scale, order))
        return tensor

    def matrix(
        self, parts: Mapping[str, Rows], in_features: Size, order: Sequence[int] | None = None
    ) -> Tensor | Quantized:
        """Create a weight [sum of parts, in_features] of a GEMM, quantized if `format_of` has a format for all parts.

        It is not quantized in MXFP4, or if this rank's shard does not consist of whole groups of a scale. `order` is as
        in `Parameter`.
        """
        return self._matrix(parts, in_features, lambda kind: kind.name != "mxfp4", order)

    def experts(self, parts: Mapping[str, Rows], in_features: Size, count: int) -> Tensor | Quantized:
        """Create a weight [count, N, in_features] of experts with equally many parts, as `matrix` does.

        Formats with an order of columns are not supported.
        """
        weight = self._matrix(parts, in_features, lambda kind: not kind.order)
        return weight.experts(count) if isinstance(weight, Quantized) else weight.view(count, -1, weight.shape[1])

    def adapt(self, parts: Mapping[str, Rows], in_features: Size, order: Sequence[int] | None) -> Adapted | None:
        """Return what adapters change of a projection; arguments as of `matrix`, with the names of modules."""
        if not self.has_adapters:
            return None
        columns = _whole(in_features)
        sources, _ = _sources({f"{name}.weight": rows for name, rows in parts.items()}, [columns])
        self.adapted.append(Adapted(sources, order, columns.count == columns.size or self.info.rank == 0))
        return self.adapted[-1]

    def state(self, spec: State) -> LayerState:
        """Declare what a layer keeps."""
        self.states.append(LayerState(spec))
        return self.states[-1]

    def mixer(self, spec: Mixer) -> int:
        """Declare how a layer mixes tokens; return its index in `Context.mixers`, which equal layers share."""
        if spec not in self.mixers:
            self.mixers.append(spec)
        return self.mixers.index(spec)

    def _matrix(
        self,
        parts: Mapping[str, Rows],
        in_features: Size,
        supports_format: Callable[[Format], bool],
        order: Sequence[int] | None = None,
    ) -> Tensor | Quantized:
        columns = _whole(in_features)
        sources, rows = _sources(parts, [columns])
        kinds = {self.format_of(name) for name in parts}
        kind = kinds.pop() if len(kinds) == 1 else None
        if kind is None or not supports_format(kind) or rows % 16 or not _fit(kind, sources):
            return self.parameter(parts, in_features, order=order)
        weight = kind.empty(rows, columns.count, self.device)
        self.parameters.append(Parameter(weight, sources, Init.NORMAL, order=order))
        return weight


def _sources(parts: Mapping[str, Rows], columns: list[Shard]) -> tuple[tuple[Source, ...], int]:
    """Return the checkpoint tensors of stacked parts, and this rank's number of rows."""
    sources, start = [], 0
    for name, rows in parts.items():
        fused = [_whole(size) for size in (rows if isinstance(rows, Sequence) else [rows])]
        stored_shape, first = (sum(d.size for d in fused), *(d.size for d in columns)), 0
        for part in fused:
            bounds = [slice(first + part.start, first + part.stop), *(slice(d.start, d.stop) for d in columns)]
            for _ in range(part.copies if part.count else 0):
                sources.append(Source(name, stored_shape, tuple(bounds), start))
                start += part.count
            first += part.size
    return tuple(sources), start


def _fit(kind: Format, sources: Sequence[Source]) -> bool:
    """Return whether parts begin and end where scales do. The last may end where its tensor does, within a block."""
    for source in sources:
        rows, columns = source.slices
        is_end = source is sources[-1] and rows.stop == source.shape[0]
        ends = source.start, rows.start, 0 if is_end else rows.stop
        if any(end % kind.rows for end in ends) or columns.start % kind.columns or columns.stop % kind.columns:
            return False
    return True


def _shard(count: int, own: range, unit: int) -> Shard:
    return Shard(count * unit, own.start * unit, own.stop * unit)


def _whole(size: Size) -> Shard:
    return size if isinstance(size, Shard) else Shard(size, 0, size)
