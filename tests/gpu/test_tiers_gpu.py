"""Pages in pinned memory and on a disk, and the streams that copy them: the same answers."""

from __future__ import annotations

import gc
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.kvcache.tiers import Tier
from minisgl.scheduler import cache

FACT = "The secret code of the castle is {}. "
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "


def prompts() -> list[str]:
    rng = random.Random(3)
    heads = [FILLER * 12 + FACT.format(rng.randrange(10**6, 10**7)) + FILLER * 8 for _ in range(6)]
    return [head + f"\n\nWhat is the secret code of the castle? ({i})" for i in range(3) for head in heads]


def answers(**options: Any) -> tuple[list[list[int]], Any]:
    """The tokens of each prompt, asked in turn and then all at once, and the tier."""
    params = SamplingParams(temperature=0, max_tokens=24)
    with LLM(device="cuda", num_pages=70, page_size=16, max_prefill_length=256, **options) as llm:
        told = [llm.generate(prompt, params, use_tqdm=False)[0].token_ids for prompt in prompts()]
        told += [done.token_ids for done in llm.generate(prompts(), params, use_tqdm=False)]
        tiers = llm.scheduler.cache.prefix.tiers
    gc.collect()
    torch.cuda.empty_cache()
    return told, tiers


@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}], ids=str)
def test_pages_come_back_from_host_and_disk_as_they_were(
    tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def all_tiers(specs: Any, page_size: int, costs: Any, *, is_fresh: bool) -> list[Tier]:
        """This model computes its pages faster than they can be loaded."""
        return [Tier(spec, number, page_size, is_fresh) for number, spec in enumerate(specs)]

    monkeypatch.setattr(cache, "worthwhile_tiers", all_tiers)
    want, _ = answers(**options)
    for given in ({"host_kv": 600 << 20}, {"disk_kv": f"{tmp_path}/kv:600M"}):
        told, (tier,) = answers(**options, **given)
        assert sum(a == b for a, b in zip(told, want, strict=True)) >= (36 if "float32" in options.values() else 33)
        assert tier.stored_pages > 80 and tier.loaded_pages > 80 and tier.lost_pages == 0
