"""Embeddings on a GPU match those of transformers."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from transformers import Qwen3Config

from contract.checkpoints import COMMON
from minisgl import LLM
from support.embedding_models import save_embedding_model

RNG = random.Random(0)
PROMPTS = [[RNG.randrange(160) for _ in range(n)] for n in (1, 90, 37, 200, 16, 250)]


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.06)])
def test_embeddings_match_transformers_in_batches_and_chunks(
    tmp_path: Path, pooling: str, dtype: str, tolerance: float
) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    model = save_embedding_model(tmp_path, Qwen3Config(**COMMON, **heads), pooling)
    want = np.stack([model.embedding(ids).numpy() for ids in PROMPTS])
    for chunk in (64, 1024):
        with LLM(str(tmp_path), device="cuda", dtype=dtype, num_pages=64, max_prefill_length=chunk) as llm:
            for _ in range(2):  # the second run finds cached prefixes, if the pooling allows them
                assert np.abs(llm.embed(PROMPTS) - want).max() < tolerance
