"""Which adapter is in which slot of the device's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minisgl.core.layout import NO_INTS, adapter_load

if TYPE_CHECKING:
    from minisgl.core.params import Adapter
    from minisgl.core.plan import Ints
    from minisgl.scheduler.req import Req


@dataclass(slots=True)
class _Slot:
    """A slot of the device's memory: its adapter, the rows that use it, and when it was last wanted."""

    source: str = ""
    holders: int = 0
    is_loading: bool = False  # in the next plan
    wanted_at: int = -1  # a step


class Adapters:
    """The slots. A request gets a row only when its adapter has been loaded by an earlier plan.

    A slot that no row uses, and no request that goes first has wanted in this step, may get another adapter: of these,
    that which was not wanted for longest.
    """

    def __init__(self, slots: int) -> None:
        self._slots = [_Slot() for _ in range(slots)]
        self._loads: list[Ints] = []

    @property
    def has_loads(self) -> bool:
        """Whether the next plan must load adapters."""
        return bool(self._loads)

    def is_ready(self, req: Req, step: int) -> bool:
        """Return whether the adapter of `req`, if any, is in a slot. If not, load it, if there is a slot for it."""
        if (adapter := req.sampling_params.adapter) is None:
            return True
        if (slot := self._find(adapter)) is None:
            free = [slot for slot in self._slots if not slot.holders and slot.wanted_at < step]
            if not free:
                return False
            slot = min(free, key=lambda slot: slot.wanted_at)
            slot.source, slot.is_loading = adapter.source, True
            self._loads.append(adapter_load(1 + self._slots.index(slot), adapter.source))
        slot.wanted_at = step
        return not slot.is_loading

    def has_slot(self, req: Req) -> bool:
        """Return whether the adapter of `req`, if any, is in a slot, or is being loaded into one."""
        return (adapter := req.sampling_params.adapter) is None or self._find(adapter) is not None

    def hold(self, req: Req) -> None:
        """Note that `req` gets a row; its adapter is ready."""
        if (adapter := req.sampling_params.adapter) is not None:
            slot = self._find(adapter)
            assert slot is not None and not slot.is_loading, f"the adapter of a request is not ready: {req}"
            slot.holders += 1
            req.adapter_slot = 1 + self._slots.index(slot)

    def release(self, req: Req) -> None:
        """Note that no step uses the adapter of `req` any more."""
        if req.adapter_slot:
            self._slots[req.adapter_slot - 1].holders -= 1
            req.adapter_slot = 0

    def pop_loads(self) -> Ints:
        """Return the records of the next plan; steps after it may use these adapters."""
        loads, self._loads = self._loads, []
        for slot in self._slots:
            slot.is_loading = False
        return np.concatenate(loads) if loads else NO_INTS

    def _find(self, adapter: Adapter) -> _Slot | None:
        return next((slot for slot in self._slots if slot.source == adapter.source), None)
