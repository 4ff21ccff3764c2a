"""The text of a completion continues that of its prompt, with a tokenizer that marks spaces as Llama 2's does."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import LlamaConfig

from contract.checkpoints import COMMON, save
from minisgl import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("fixed_costs")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = Path(__file__).parents[1] / "tokenizer" / "conftest.py"
    spec = importlib.util.spec_from_file_location("tokenizers_for_tests", path)
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = made.byte_fallback()
    save(folder, LlamaConfig(**{**COMMON, "vocab_size": tokenizer.get_vocab_size()}, num_attention_heads=4))
    tokenizer.save(str(folder / "tokenizer.json"))
    with LLM(str(folder), num_pages=64, threads=1) as llm:
        yield llm


@pytest.mark.parametrize("prompt", ["the wall", "größe 🙂 the", "a", "</s> the" * 20])
def test_stream_whole_text_and_echo_agree(llm: LLM, prompt: str) -> None:
    tokenizer = llm.tokenizer.tokenizer
    space = {token for text, token in tokenizer.get_vocab().items() if text.startswith("▁")}
    bias = tuple((token, 50.0) for token in space)  # each token begins with a space
    params = {"max_tokens": 6, "ignore_eos": True, "temperature": 0.0, "logit_bias": bias}
    heard: list[str] = []
    (done,) = llm.generate(prompt, SamplingParams(**params))
    assert done.text.startswith(" ") and {*done.token_ids} <= space
    (streamed,) = llm.generate(prompt, SamplingParams(**params), on_token=lambda _, text: heard.append(text))
    (echoed,) = llm.generate(prompt, SamplingParams(**params, echo=True))
    assert done.text == streamed.text == "".join(heard)
    ids = tokenizer.encode(prompt).ids
    assert echoed.text == tokenizer.decode(ids) + done.text == tokenizer.decode(ids + done.token_ids)
