"""Models with a recurrent state, and latents, through the whole engine: texts as transformers', hits, options."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from contract.checkpoints import Checkpoint, configurations, save
from minisgl import LLM, SamplingParams
from minisgl.checkpoint import hf
from minisgl.core.params import Grammar


@pytest.fixture(scope="module", params=["qwen3-next", "qwen3.5", "qwen3.5-moe"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    torch.manual_seed(1)
    config = configurations()[request.param]
    config.vocab_size, config.eos_token_id = hf.read_json(hf.BUILTIN_MODEL / "config.json")["vocab_size"], None
    checkpoint = save(tmp_path_factory.mktemp(request.param), config)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(hf.BUILTIN_MODEL / name, checkpoint.folder)
    return checkpoint


def greedy(checkpoint: Checkpoint, prompt: list[int], count: int) -> list[int]:
    """What transformers generates."""
    with torch.inference_mode():
        out = checkpoint.model.generate(
            torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return out[0, len(prompt) :].tolist()


def load(folder: Path, **options: object) -> LLM:
    return LLM(str(folder), dtype="float32", page_size=16, **options)


def test_a_chat_of_ten_turns(hybrid: Checkpoint) -> None:
    """Each turn finds the one before, answer included, but for the tokens since the last fold; texts are as without."""
    llm, text, found = load(hybrid.folder), list(range(1, 31)), []
    params = SamplingParams(temperature=0, max_tokens=11, ignore_eos=True)
    for turn in range(10):
        result = llm.generate([text], params)[0]
        assert result.token_ids == greedy(hybrid, text, 11), f"turn {turn}"
        found.append((result.num_cached_tokens, len(text)))
        text = [*text, *result.token_ids, 40 + turn, 41, 42, 43, 44]
    assert all(now >= (before - 5) // 16 * 16 for (now, _), (_, before) in zip(found[1:], found, strict=False)), found
    llm.close()


@pytest.mark.parametrize("hybrid", ["qwen3.5-moe", "deepseek-v3"], indirect=True)
def test_options_change_no_text(hybrid: Checkpoint) -> None:
    """Choices, logprobs, penalties, a grammar, drafts and a small memory, together in steps."""
    prompts = [[7 * i + j for j in range(1, 20 + 9 * i)] for i in range(3)]
    prompts = [[token % 150 + 1 for token in prompt] for prompt in prompts]
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True, n=2, logprobs=2, echo=True)
    settings = [replace(params, presence_penalty=0.5 * (i % 2), temperature=0.8 * (i % 3 > 0)) for i in range(3)]
    settings[2] = replace(settings[2], grammar=Grammar("regex", "[a-z ]{40,90}"), ignore_eos=False)
    texts, logprobs = [], []
    for options in ({"cache_type": "naive"}, {"speculate": "ngram"}, {"max_prefill_length": 32, "num_pages": 64}):
        llm = load(hybrid.folder, max_running_requests=8, **options)
        choices = [choice for result in llm.generate(prompts, settings) for choice in result.outputs]
        texts.append([choice.token_ids for choice in choices])
        logprobs.append([t.logprob or 0.0 for c in choices for t in (*c.prompt_logprobs, *c.logprobs)])
        llm.close()
    assert texts[1] == texts[0] and texts[2] == texts[0]
    assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-3) and logprobs[2] == pytest.approx(logprobs[0], abs=1e-3)
    want = [hybrid.logits(prompt).log_softmax(-1)[range(len(prompt) - 1), prompt[1:]] for prompt in prompts[:1]]
    assert logprobs[0][1 : len(prompts[0])] == pytest.approx(want[0].tolist(), abs=1e-3)
