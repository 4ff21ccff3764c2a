"""SeqLayout from host integers: lengths and offsets of a mixed batch, computed once for all backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from minisgl.core import SeqLayout

if TYPE_CHECKING:
    from torch import Tensor

    from minisgl.core import Ints


def build_layout(rows: Ints, query_lens: Ints, kv_lens: Ints, upload: Callable[..., list[Tensor]]) -> SeqLayout:
    """The layout of B sequences; all arrays are int32 [B], 1 <= query_lens <= kv_lens.

    `upload` copies int32 arrays to the device.
    """
    rows, query_lens, kv_lens = (np.ascontiguousarray(a, np.int32) for a in (rows, query_lens, kv_lens))
    cu_query_lens = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(query_lens, out=cu_query_lens[1:])
    return SeqLayout(rows, query_lens, kv_lens, *upload(rows, kv_lens, cu_query_lens))
