"""Settings and values for tests with hypothesis: a fixed number of the same cases, or many new ones.

With the variable MINISGL_FUZZ a test runs so many random cases. A case that fails is kept as an `@example`.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

CASES = int(os.environ.get("MINISGL_FUZZ", "0"))

ODD_NUMBERS = st.sampled_from([-1, 0, 1, 2, 7, 2**31, 2**63 - 1, 2**63, 2**64, 10**30, 0.5, -0.0, 1e308, 1e-300])
ODD_TEXTS = ["", "\0", "{{", "{% raw %}", "<|im_end|>", "\ud7ff", "🙂", "x" * 2000, "__class__"]
TEXTS = st.one_of(st.text(max_size=20), st.sampled_from(ODD_TEXTS))
SCALARS = st.one_of(st.none(), st.booleans(), ODD_NUMBERS, st.integers(), st.floats(allow_nan=False), TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)),
    max_leaves=8,
)


def fuzz(cases: int) -> Any:
    """Run so many cases, always the same ones; or, with MINISGL_FUZZ, that many new ones."""
    return settings(
        max_examples=CASES or cases,
        derandomize=not CASES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
