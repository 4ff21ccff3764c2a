"""Two GPUs give the text of one, with NCCL called directly and through torch, in graphs and without."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.core.errors import RankError
from minisgl.core.params import Grammar

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "num_pages": 200}
PROMPTS = [f"Once upon a time, there was a {animal}" for animal in ("fox", "cat", "bird", "king", "cow", "dog")]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=40),
    SamplingParams(temperature=1.0, seed=3, max_tokens=40),
    SamplingParams(temperature=0.9, seed=4, top_p=0.9, top_k=30, max_tokens=40),
    SamplingParams(temperature=0.8, seed=5, presence_penalty=0.5, max_tokens=40),
    SamplingParams(temperature=1.0, seed=6, min_p=0.05, max_tokens=40),
    SamplingParams(temperature=1.0, seed=7, max_tokens=60, grammar=Grammar("regex", "[a-z ]{40}, said the cow[.!]")),
]


def texts(**options: Any) -> list[list[str]]:
    with LLM(**OPTIONS | options) as llm:
        alone = [llm.generate(PROMPTS[0], params)[0].text for params in PARAMS]
        return [alone, [c.text for c in llm.generate(PROMPTS, PARAMS)]]


@pytest.fixture(scope="module")
def on_one_gpu() -> list[list[str]]:
    return texts()


@pytest.mark.parametrize("options", [{}, {"disable_pynccl": True}, {"cuda_graph_max_bs": 0}, {"tp": 4}], ids=str)
def test_text_is_that_of_one_gpu(options: dict[str, Any], on_one_gpu: list[list[str]]) -> None:
    if torch.cuda.device_count() < options.get("tp", 2):
        pytest.skip("needs more GPUs")
    os.environ["MINISGL_CHECK"] = "1"
    assert texts(**{"tp": 2} | options) == on_one_gpu


def test_lost_rank_raises_rank_error_without_hanging() -> None:
    with LLM(**OPTIONS, tp=2) as llm:
        (pid,) = llm.followers.pids.values()
        threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
        begin = time.monotonic()
        with pytest.raises(RankError):
            llm.generate(PROMPTS * 40, SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True))
        assert time.monotonic() - begin < 20


def test_one_process_can_lead_ranks_again() -> None:
    for _ in range(2):
        with LLM(device="cuda", dtype="bfloat16", num_pages=200, tp=2) as llm:
            assert llm.generate(PROMPTS[0], PARAMS[0])[0].token_ids


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_all_reduce_uses_peer_memory(quantization: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, with the invariant mode, in which the ranks compare their tokens."""
    monkeypatch.setenv("MINISGL_CHECK", "1")
    questions = [[{"role": "user", "content": f"What is {a} + 30?"}] for a in range(10, 58)]
    options: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "num_pages": 400, "quantization": quantization}
    with LLM(**options, tp=min(4, torch.cuda.device_count())) as llm:
        assert str(llm.scheduler.engine.describe()["communicator"]).startswith("peers")
        for asked in (questions[:1], questions):
            answers = [c.text for c in llm.chat(asked, SamplingParams(temperature=0, max_tokens=20))]
            right = sum(str(a + 30) in text for a, text in enumerate(answers, 10))
            assert right >= 0.9 * len(asked), answers
