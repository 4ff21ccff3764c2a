"""Adapters in the device's memory: slots that plans fill, and copies of adapters in host memory."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING

import torch

from minisgl.core.errors import ConfigError
from minisgl.core.layout import adapter_loads
from minisgl.core.params import folder_and_key
from minisgl.models.adapters import open_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from minisgl.core.plan import Ints
    from minisgl.device.device import Copying, Device
    from minisgl.layers.adapters import Adapted, AdapterSizes
    from minisgl.ops.adapters import AdapterWeights

_log = logging.getLogger("minisgl.engine")


class AdapterPool:
    """The slots of one rank, which hold all projections of an adapter side by side: a load is one copy."""

    def __init__(
        self,
        adapted: Sequence[Adapted],
        sizes: AdapterSizes,
        dtype: torch.dtype,
        device: Device,
        pack: Callable[[AdapterWeights], None],
    ) -> None:
        """Allocate the slots, and give each projection its part of them.

        `pack` brings the projection of an adapter in host memory into the layout that the runners read.
        """
        self.sizes, self._adapted, self._device, self._pack = sizes, adapted, device, pack
        self._starts, total = [], 0
        for projection in adapted:
            self._starts.append(total)
            total += projection.elements(sizes.rank)
        self.memory = torch.zeros(sizes.slots, total, dtype=dtype, device=device.torch_device)
        device.use_large_pages(self.memory)
        for projection, start in zip(adapted, self._starts, strict=True):
            projection.weights = projection.view(self.memory, start, sizes.rank)
        self._hosted: OrderedDict[str, Tensor] = OrderedDict()  # by source
        self._lock = threading.Lock()
        self._loading: list[Copying] = []

    def describe(self) -> str:
        """Return the size of the slots, for the banner and /server_info."""
        return f"{self.sizes.slots} slots of rank {self.sizes.rank}, {self.memory.nbytes / 2**30:.2f} GiB"

    def read(self, source: str) -> Tensor:
        """Return an adapter (`params.Adapter.source`) in host memory [1, elements of a slot]; read it if it is not.

        Any thread may call this. Raises `ConfigError` if its files are damaged or do not fit the model.
        """
        with self._lock:
            if source in self._hosted:
                self._hosted.move_to_end(source)
                return self._hosted[source]
        adapter = open_adapter(*folder_and_key(source), self._adapted, self.sizes.rank, self.memory.dtype)
        is_pinned = self._device.type == "cuda"
        copy = torch.zeros(1, self.memory.shape[1], dtype=self.memory.dtype, pin_memory=is_pinned)
        for projection, start in zip(self._adapted, self._starts, strict=True):
            weights = projection.view(copy, start, self.sizes.rank)
            projection.fill(weights, adapter)
            self._pack(weights)
        with self._lock:
            self._hosted[source] = copy
            while len(self._hosted) > self.sizes.hosted:
                self._hosted.popitem(last=False)
        return copy

    def start(self, loads: Ints) -> None:
        """Start the loads of a plan, which steps of later plans wait for.

        An adapter whose files have been damaged since they were checked becomes NaN, which ends its requests.
        """
        self._device.join(self._loading)
        self._loading = []
        for slot, source in adapter_loads(loads):
            try:
                data = self.read(source)[0]
            except ConfigError as e:
                _log.warning("%s", e)
                data = torch.full((1,), torch.nan, dtype=self.memory.dtype)
            self._loading.append(self._device.copy(partial(self._copy, slot, data), is_load=True, after=()))

    def _copy(self, slot: int, data: Tensor) -> None:
        self.memory[slot - 1].copy_(data, non_blocking=True)
