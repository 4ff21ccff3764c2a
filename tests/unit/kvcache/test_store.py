"""The store of pages: what is declared alike is one tensor, and a page is the sum of its tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl.kvcache.store import LayerState, StateStore
from minisgl.ops.quantized import E4M3, QuantizedPages
from minisgl.specs import Paged
from support.store import kv_store


def test_equal_states_are_one_tensor():
    store, (first, second) = kv_store(2, 3, 2, 4, 8, torch.float32)
    (data,) = store.tensors
    assert data.shape == (2, 3, 2, 2, 4, 8) and store.page_bytes == data[:, 0].numel() * 4
    data.zero_()
    second.pages[2] = 5
    assert data[1, 2].eq(5).all() and first.pages.eq(0).all()
    store.poison([1, 0])
    assert data[:, :2].isnan().all() and not data[:, 2].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3])
def test_a_page_is_the_sum_of_all_states(dtype: torch.dtype):
    """Two layers of a model, one of a drafter with fewer heads, and latents without heads."""
    store = StateStore(4, dtype, torch.device("cpu"))
    specs = Paged("kv", (2, 2, 8)), Paged("kv", (2, 2, 8)), Paged("kv", (2, 1, 16)), Paged("latent", (24,))
    states = [LayerState(spec) for spec in specs]
    store.add(states[:2]), store.add(states[2:])
    store.allocate(1)
    store.allocate(5)
    assert [tuple(state.pages.shape) for state in states] == [(5, *spec.page_shape(4)) for spec in specs]
    assert sum(tensor[:, 0].nbytes for tensor in store.tensors) == store.page_bytes
    for tensor in store.tensors:
        tensor.view(torch.uint8).random_(0, 64)
    pages, before = store.index(np.array([4, 1], np.int32)), [tensor.clone() for tensor in store.tensors]
    content = store.read(pages)
    assert content.shape == (2, store.page_bytes) and content.dtype is torch.uint8
    store.poison([4, 1])
    for state in states:
        values = state.pages.scale if isinstance(state.pages, QuantizedPages) else state.pages
        assert values[[1, 4]].isnan().all() and not values[[0, 2, 3]].isnan().any()
    store.write(pages, content)
    assert all(map(torch.equal, store.tensors, before))
