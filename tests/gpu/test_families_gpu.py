"""Whole models of all families on a GPU match transformers', with heads that Triton's attention runs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from contract.checkpoints import Checkpoint, configurations, save
from contract.harness import MiniEngine, Span
from minisgl.device.create import create_device

RNG = random.Random(0)
A, B, C = ([RNG.randrange(160) for _ in range(n)] for n in (90, 37, 61))


def wide(config: Any) -> Any:
    """Return the configuration with heads of 64, and of 128 where some layers have others."""
    raw = config.to_dict()
    if raw.get("kv_lora_rank"):
        raw["qk_rope_head_dim"] = 64
    elif raw.get("head_dim") and config.model_type != "helium":  # which has no such field
        raw["head_dim"] = 64
    for own in (raw.get("per_layer_config") or {}).values():
        own["head_dim"] = 128
    return type(config).from_dict(raw)


@pytest.fixture(scope="module", params=configurations())
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return save(tmp_path_factory.mktemp(request.param), wide(configurations()[request.param]))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.3)])
def test_logits_match_transformers(checkpoint: Checkpoint, dtype: torch.dtype, tolerance: float) -> None:
    """A prompt; then one that decodes, a new one, a chunk and a continuation in one step; then more decoding."""
    engine = MiniEngine.load(checkpoint.folder, dtype=dtype, ops="triton", device=create_device("cuda"))
    got = [engine.step([Span(1, 0, A[:50]), Span(7, 0, C[:20], samples=False)])]
    got.append(engine.step([Span(1, 50, [A[50]]), Span(4, 0, B), Span(7, 20, C[20:])]))
    got += [engine.step([Span(1, i, [A[i]])]) for i in range(51, 60)]
    prompts = [A[:50], A[:51], B, C, *(A[: i + 1] for i in range(51, 60))]
    want = torch.cat([checkpoint.logits(ids)[-1:] for ids in prompts])
    errors = (torch.cat(got).float().cpu() - want).norm(dim=1) / want.norm(dim=1)
    # Rounded logits of routers may choose other experts for one token or another.
    assert float(errors.median() if dtype is torch.bfloat16 else errors.max()) < tolerance
