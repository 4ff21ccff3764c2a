"""How long rows decode plainly where drafts are wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from minisgl.scheduler.drafts import MAX_PAUSE, MIN_PAUSE, Drafts


def test_rows_whose_drafts_are_wrong_pause_for_longer_and_ask_in_the_same_steps() -> None:
    nothing: Any = None
    rows: Any = SimpleNamespace(num_rows=6)
    drafts = Drafts(rows, nothing, nothing, nothing, is_async=True, max_drafts=4, kind="auto")
    steps, pauses = np.arange(6) * 7, [[] for _ in range(6)]  # rows begin at different times
    for _ in range(9):
        for row, step in enumerate(steps.tolist()):
            drafts._pause(np.array([row]), step)
            pauses[row].append(int(drafts.pause[row]))
            assert drafts.pause[row] < drafts.resumes_at[row] - step <= 2 * drafts.pause[row]
        steps = drafts.resumes_at[:6].copy()
    assert all(p == [MIN_PAUSE, 8, 16, *[MAX_PAUSE] * 6] for p in pauses)
    assert len(set((steps % MAX_PAUSE).tolist())) == 1
