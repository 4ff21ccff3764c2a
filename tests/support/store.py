"""A store of K/V without a model."""

from __future__ import annotations

import torch

from minisgl.core.specs import Paged
from minisgl.kvcache.store import LayerState, StateStore


def kv_store(
    layers: int, pages: int, kv_heads: int, page_size: int, dim: int, dtype: torch.dtype
) -> tuple[StateStore, list[LayerState]]:
    """Return a store on the CPU, and the state of each layer."""
    store = StateStore(page_size, dtype, torch.device("cpu"))
    states = [LayerState(Paged("kv", (2, kv_heads, dim))) for _ in range(layers)]
    store.add(states)
    store.allocate(pages)
    return store, states
