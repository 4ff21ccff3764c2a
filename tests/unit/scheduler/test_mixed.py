"""`--no-mixed-batches`: prompts and running requests never share a step, and the outputs are the same."""

from __future__ import annotations

import pytest

from minisgl.core.layout import Flag
from minisgl.core.plan import BatchPlan
from support.fake_engine import FakeEngine, expected_output
from support.traces import Harness


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("is_mixed", [True, False])
def test_steps_mix_prompts_and_decoding_only_if_enabled(depth: int, is_mixed: bool) -> None:
    engine = FakeEngine(rows=8, num_pages=64, page_size=4, vocab=5003)
    h = Harness(engine, depth, max_prefill_length=12, mixed_batches=is_mixed)
    kinds: list[set[bool]] = []
    launch = engine.launch

    def recorded(plan: BatchPlan):
        kinds.append(set(((plan.sequences["flags"] & Flag.FROM_DEVICE) != 0).tolist()))
        return launch(plan)

    engine.launch = recorded  # type: ignore[method-assign]
    for start in range(0, 40, 10):
        h.add(range(start + 1, start + 20), max_tokens=12)
        for _ in range(3):
            h.step()
    while h.scheduler.is_busy or h.io.inbox:
        h.step()
    assert any(len(kind) == 2 for kind in kinds) == is_mixed
    for uid, (prompt, sampling) in h.requests.items():
        assert h.outputs[uid] == expected_output(prompt, sampling.max_tokens, 5003)
