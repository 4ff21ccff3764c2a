"""The memory of state: pages of all groups are views of the same blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl.core.layout import FULL, STATE, WINDOW
from minisgl.core.specs import Paged, PerRow
from minisgl.kvcache.arena import ALIGNMENT, MAX_WASTE, Blocks, divide
from minisgl.kvcache.store import LayerState, StateStore
from minisgl.ops.quantized import E4M3, QuantizedPages
from support.store import kv_store


def test_a_page_has_all_layers() -> None:
    store, (first, second) = kv_store(2, 3, 2, 4, 8, torch.float32)
    assert first.pages.shape[1:] == (2, 2, 4, 8) and store.page_bytes == (2 * first.pages[0].numel() * 4,)
    store.memory.zero_()
    second.pages[2] = 5
    assert store.rows(FULL)[2].view(torch.float32).view(2, -1)[1].eq(5).all() and first.pages.eq(0).all()
    store.poison([1, 0])
    for state in (first, second):
        assert state.pages[:2].isnan().all() and not state.pages[2].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3])
def test_pages_are_read_and_written_whole(dtype: torch.dtype) -> None:
    """Two layers of a model, one of a drafter with fewer heads, and latents without heads."""
    store = StateStore(4, dtype, torch.device("cpu"))
    specs = Paged("kv", (2, 2, 8)), Paged("kv", (2, 2, 8)), Paged("kv", (2, 1, 16)), Paged("latent", (24,))
    states = [LayerState(spec) for spec in specs]
    store.add(states[:2]), store.add(states[2:])
    store.allocate(1)
    store.allocate(5)
    assert [tuple(state.pages.shape[1:]) for state in states] == [spec.page_shape(4) for spec in specs]
    store.memory.random_(0, 64)
    pages, before = store.index(np.array([4, 1], np.int32)), store.memory.clone()
    content = store.read(pages)
    assert content.shape == (2, store.strides[FULL]) and content.dtype is torch.uint8
    store.poison([4, 1])
    for state in states:
        values = state.pages.scale if isinstance(state.pages, QuantizedPages) else state.pages
        assert values[[1, 4]].isnan().all() and not values[[0, 2, 3]].isnan().any()
    store.write(pages, content)
    assert torch.equal(store.memory, before)


@pytest.mark.parametrize("dtype", [torch.float32, E4M3])
def test_states_of_all_groups_have_memory_of_their_own(dtype: torch.dtype) -> None:
    """Where their pages do not share a block. Each state is filled, one after the other, and none changes another."""
    store = StateStore(4, dtype, torch.device("cpu"))
    shapes = [(FULL, (2, 2, 8)), (WINDOW, (2, 1, 8)), (WINDOW, (2, 1, 8)), (FULL, (24,))]
    states = [LayerState(Paged("kv", shape, group)) for group, shape in shapes]
    states += [LayerState(PerRow("sum", (3, 5))), LayerState(PerRow("recent", (40,)))]
    store.add(states)
    store.allocate(7)
    ids = store.blocks.spread()
    assert all(map(len, ids)) and store.blocks.pages[STATE] > 1
    parts = [(part, store.blocks, state.spec.group) for state in states for part in tensors(state)]
    for value, (part, _, group) in enumerate(parts):
        part.view(torch.uint8)[[*ids[group], store.dummy(group)]] = value
    for value, (part, _, group) in enumerate(parts):
        assert part.view(torch.uint8)[[*ids[group], store.dummy(group)]].eq(value).all()


def test_two_blocks_are_a_page_and_a_slot() -> None:
    assert Blocks(2, (5, 1, 3)).spread()[::2] == [range(5), range(3, 6)]


def tensors(state: LayerState) -> list[torch.Tensor]:
    pages = state.pages
    return [pages.data, pages.scale] if isinstance(pages, QuantizedPages) else [pages]


def test_copies_are_of_whole_slots() -> None:
    store = StateStore(4, torch.float32, torch.device("cpu"))
    specs = Paged("kv", (2, 2, 8)), *(PerRow(f"state {i}", (2, 8, 8)) for i in range(3))
    store.add([LayerState(spec) for spec in specs])
    store.allocate(12)
    store.memory.random_(0, 64)
    before = store.rows(STATE).clone()
    source, target = (np.array(x, np.int32) for x in ([1, 2, 3, 1], [8, 7, 6, 9]))
    store.copy(source, target)
    assert torch.equal(store.rows(STATE)[target], before[source])
    before[target] = before[source]
    assert torch.equal(store.rows(STATE), before)


@pytest.mark.parametrize(
    ("page_bytes", "pages"),
    [
        ((1000,), (1,)),
        ((10 << 16, 52 << 16), (5, 1)),
        ((8 << 16, 40 << 16), (5, 1)),
        ((5 << 16, 29 << 16), (17, 3)),
        ((5 << 16, 0, 63 << 20), (201, 1, 1)),
        ((5 << 16, 27 << 16, 63 << 20), (201, 37, 1)),
    ],
)
def test_blocks_are_nearly_all_used(page_bytes: tuple[int, ...], pages: tuple[int, ...]) -> None:
    size, found = divide(page_bytes)
    assert found == pages
    for count, each in zip(found, page_bytes, strict=True) if min(page_bytes) > 1000 else ():
        assert size % count == 0 and (size // count) % ALIGNMENT == 0 and each <= size // count
        assert 1 - count * each / size <= MAX_WASTE
