"""How many KV pages: from the memory that is left once the weights are loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minisgl.kvcache.mha_pool import MHAKVPool
from minisgl.utils.errors import ConfigError

if TYPE_CHECKING:
    from minisgl.engine.config import EngineSpec
    from minisgl.utils.device import Device


def plan_num_pages(spec: EngineSpec, device: Device) -> int:
    """Pages of the pool: what was asked for, else what fits, but no more than all rows could ever fill.

    Raises `ConfigError` when not even one request of one page fits.
    """
    if spec.num_pages is not None:
        return spec.num_pages
    m = spec.model
    page_bytes = MHAKVPool.bytes_per_page(m.num_layers, m.num_kv_heads, spec.page_size, m.head_dim, spec.dtype)
    free = device.free_memory()
    pages = min(int(free * spec.memory_ratio) // page_bytes, spec.max_running_requests * spec.pages_per_row)
    if pages < 1:
        raise ConfigError(
            f"no memory for the KV cache: {free >> 20} MiB are free and one page takes {page_bytes} bytes; "
            "raise --memory-ratio, or use a smaller --page-size or model"
        )
    return pages
