"""`minisgl bench offline --accept-length` with a drafter that has a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from minisgl.engine.draft_model import HeadModel
from minisgl.native.runner import _Drafter
from minisgl.tools.bench.offline import run_offline
from minisgl.tools.bench.workloads import OfflineArgs
from support.next_tokens import write_glm


@pytest.mark.parametrize("attention", ["auto", "cpu"])
def test_a_layer_of_the_checkpoint_drafts_in_vain(attention: str, tmp_path: Path) -> None:
    """The drafts of a simulation are accepted as asked, and the layer's passes are computed all the same."""
    computed: list[int] = []
    draft_rows, run = HeadModel.draft_rows, _Drafter.run

    def spy(model: HeadModel, inputs: Any, max_drafts: int, flags: int, drafting: Any) -> None:
        computed.extend([max_drafts] * drafting.drafts_always)
        draft_rows(model, inputs, max_drafts, flags, drafting)

    def spy_cpp(drafter: _Drafter, plan: Any) -> None:
        drafts = drafter._drafting.drafts.fill_(-1)
        run(drafter, plan)
        computed.extend([int((drafts >= 0).sum())] * drafter._drafting.drafts_always)

    options = {
        "model": str(write_glm(tmp_path)),
        "dummy_weight": True,
        "device": "cpu",
        "threads": 1,
        "dtype": "float32",
    }
    options |= {"speculate": "mtp", "num_draft_tokens": 3, "attention_backend": attention}
    args = OfflineArgs(num_prompts=1, input_len=20, output_len=40, repeat=1, accept_length=4.0)
    with patch.object(HeadModel, "draft_rows", spy), patch.object(_Drafter, "run", spy_cpp):
        (result,) = run_offline(args, options)["results"]
    summary = result["repeats"][0]
    assert 0.8 * summary["drafted_tokens"] < summary["accepted_tokens"] <= summary["drafted_tokens"]
    assert summary["drafted_tokens"] >= 27 and computed.count(3) >= 9
