"""The key comparison of the radix tree agrees with its definition."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.kvcache.tree import COMPARE_BLOCK, common_prefix_len


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65, 200, COMPARE_BLOCK, COMPARE_BLOCK + 1, 2 * COMPARE_BLOCK + 70])
def test_common_prefix_len_finds_the_first_difference(length: int):
    a = np.random.default_rng(length).integers(0, 2**31 - 1, length, dtype=np.int32)
    assert common_prefix_len(a, a.copy()) == length
    assert common_prefix_len(a, a[: length // 2]) == length // 2
    assert common_prefix_len(a, np.append(a, np.int32(1))) == length
    for at in {0, 1, 62, 63, 64, length // 2, length - 1}:
        if 0 <= at < length:
            b = a.copy()
            b[at] ^= 1
            assert common_prefix_len(a, b) == at == common_prefix_len(b, a)


def test_common_prefix_len_takes_strided_and_read_only_arrays():
    a = np.arange(3 * COMPARE_BLOCK, dtype=np.int32)
    b = a[::2].copy()
    b.flags.writeable = False
    assert common_prefix_len(a[::2], b) == len(b)
    assert common_prefix_len(a[::-1], a[::-1].copy()) == len(a)
    assert common_prefix_len(a[::2], a) == 1
