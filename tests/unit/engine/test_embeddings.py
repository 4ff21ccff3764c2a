"""Embeddings equal transformers' hidden states pooled by hand: batches, chunks, prefix hits, ranks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3_5TextConfig, Qwen3Config

from contract.harness import MiniEngine, Span
from minisgl import LLM, SamplingParams
from minisgl.checkpoint.embedder import decoder_config
from minisgl.checkpoint.hf import load_config
from minisgl.core.errors import ConfigError, RequestError
from minisgl.core.layout import FULL
from minisgl.core.message import AbortMsg, Finished, Started, UserMsg, ids_to_bytes
from minisgl.core.params import EMBED
from minisgl.core.plan import FinishReason
from minisgl.distributed.communicator import Communicator
from minisgl.engine.pooling import PoolingRunner
from minisgl.engine.resolve import resolve
from minisgl.models.model_config import ModelConfig
from minisgl.settings.options import EngineConfig
from minisgl.tools.verify.steps import span_plan
from support.embedding_models import EmbeddingModel, save_embedding_model
from support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("fixed_costs")

COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.15,
}
HYBRID = Qwen3_5TextConfig(
    **COMMON,
    head_dim=32,
    layer_types=["linear_attention", "full_attention", "linear_attention"],
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
RNG = random.Random(0)
PROMPTS = [[RNG.randrange(4096) for _ in range(n)] for n in (1, 90, 37, 200, 16, 255)]


@pytest.fixture(
    scope="module",
    params=[
        (Qwen3Config(**COMMON, head_dim=32), "last", "Qwen3ForCausalLM"),
        (Qwen2Config(**COMMON), "mean", ""),
        (MistralConfig(**COMMON, sliding_window=23), "last", ""),
        (LlamaConfig(**COMMON), "mean", "LlamaForCausalLM"),
    ],
    ids=lambda p: f"{p[0].model_type}-{p[1]}",
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EmbeddingModel:
    config, pooling, architecture = request.param
    return save_embedding_model(
        tmp_path_factory.mktemp("m"), config, pooling, normalises=False, architecture=architecture
    )


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_models_with_other_state(pooling: str, tmp_path: Path) -> None:
    """A recurrent one; a prompt that goes on from a snapshot gives what it gave."""
    model = save_embedding_model(tmp_path, HYBRID, pooling, normalises=False, architecture="Qwen3_5ForCausalLM")
    with LLM(str(model.folder), threads=1, max_prefill_length=64) as llm:
        answers = Embeddings(llm)
        for _ in range(2):
            assert_equal(answers.of(*PROMPTS[1:4]), model, PROMPTS[1:4])
        assert (llm.scheduler.stats.cached_tokens > 200) == (pooling == "last")


class Embeddings:
    """Asks the scheduler of an `LLM` for embeddings and keeps what it says."""

    def __init__(self, llm: LLM) -> None:
        self._scheduler, self._io = llm.scheduler, llm._io
        self.started: dict[int, Started] = {}
        self.finished: dict[int, Finished] = {}
        self._asked = 0

    def ask(self, *prompts: list[int]) -> list[int]:
        """Their uids."""
        uids = [self._asked + i + 1 for i in range(len(prompts))]
        self._asked += len(prompts)
        for uid, ids in zip(uids, prompts, strict=True):
            self._io.inbox.append(UserMsg(uid=uid, input_ids=ids_to_bytes(ids), sampling_params=EMBED))
        return uids

    def step(self) -> None:
        self._scheduler.step()
        while self._io.replies:
            msg = self._io.replies.popleft()
            self.started |= {s.uid: s for s in msg.started}
            self.finished |= {f.uid: f for f in msg.finished}

    def of(self, *prompts: list[int]) -> list[torch.Tensor]:
        """[H] float32 each."""
        uids = self.ask(*prompts)
        while self._scheduler.is_busy or self._io.inbox:
            self.step()
        return [torch.from_numpy(np.frombuffer(self.started[uid].embedding, "<f4").copy()) for uid in uids]


def assert_equal(ours: Sequence[torch.Tensor], model: EmbeddingModel, prompts: list[list[int]]) -> None:
    for vector, ids in zip(ours, prompts, strict=True):
        want = model.embedding(ids)
        assert vector.dtype is torch.float32 and vector.shape == want.shape
        assert (vector - want).abs().max() <= 1e-4 * want.abs().max(), f"prompt of {len(ids)} tokens"


@pytest.mark.parametrize(("chunk", "chunks"), [(16, 16), (1024, 1)])
def test_batches_and_chunks(model: EmbeddingModel, chunk: int, chunks: int) -> None:
    with LLM(str(model.folder), threads=1, num_pages=64, max_prefill_length=chunk) as llm:
        answers = Embeddings(llm)
        assert_equal(answers.of(*PROMPTS), model, PROMPTS)
        assert {f.reason for f in answers.finished.values()} == {FinishReason.LENGTH}
        assert max(s.prefill_chunks for s in answers.started.values()) >= chunks
        assert llm.scheduler.cache.available == 64


def test_prefixes(model: EmbeddingModel) -> None:
    """The last token's hidden state is found after a cached prefix; a mean needs all of them."""
    first = PROMPTS[1]
    again = [first, first[:64] + PROMPTS[2], first[:50]]
    with LLM(str(model.folder), threads=1, num_pages=64) as llm:
        answers = Embeddings(llm)
        assert_equal(answers.of(first), model, [first])
        assert_equal(answers.of(*again), model, again)
        cached = [answers.started[uid].cached_tokens for uid in sorted(answers.started)]
        assert cached == ([0, 80, 64, 48] if model.pooling == "last" else [0, 0, 0, 0])


def test_rows_are_used_again_after_an_abort(model: EmbeddingModel) -> None:
    """What an aborted prompt has added to its row's sum is not in the next one's mean."""
    with LLM(str(model.folder), threads=1, num_pages=64, max_prefill_length=32, max_running_requests=1) as llm:
        answers = Embeddings(llm)
        (uid,) = answers.ask(PROMPTS[3])
        answers.step()
        answers.step()
        llm._io.inbox.append(AbortMsg(uid))
        assert_equal(answers.of(PROMPTS[1]), model, [PROMPTS[1]])
        assert answers.finished[uid].reason is FinishReason.ABORT and uid not in answers.started


def test_several_ranks(model: EmbeddingModel) -> None:
    """In two chunks, beside a whole prompt; every rank has the whole result."""
    config = decoder_config(load_config(model.folder))
    steps = [[Span(2, 0, PROMPTS[1][:40], samples=False)], [Span(2, 40, PROMPTS[1][40:]), Span(0, 0, PROMPTS[2])]]

    pages = [(FULL, 2, i, i) for i in range(6)] + [(FULL, 0, i, 6 + i) for i in range(3)]

    def rank(comm: Communicator) -> torch.Tensor:
        engine = MiniEngine.load(model.folder, comm=comm, config=ModelConfig.from_hf(config))
        runner = PoolingRunner(engine.parts, model.pooling)
        for spans in steps:
            result = runner.launch(span_plan(spans, pages)).wait()
        assert not result.tokens.any() and result.finite.all() and result.embeddings is not None
        return torch.from_numpy(result.embeddings.T.copy()).view(torch.float32)

    for ours in run_ranks(2, rank):
        assert_equal(ours, model, [PROMPTS[1], PROMPTS[2]])


def test_no_graphs_are_captured(model: EmbeddingModel) -> None:
    assert resolve(EngineConfig(model=str(model.folder)), "cuda").graph_rows == 0
    with pytest.raises(ConfigError, match="not for an embedding model"):
        resolve(EngineConfig(model=str(model.folder), cuda_graph_max_bs=8), "cuda")


def test_it_says_no(model: EmbeddingModel) -> None:
    """Refused: a request for text. An error: hidden states that are not finite."""
    with LLM(str(model.folder), threads=1, num_pages=64) as llm:
        with pytest.raises(RequestError, match="computes embeddings; it does not generate text"):
            llm.generate([PROMPTS[1]])
        llm.scheduler.engine.parts.model.model.norm.weight.fill_(float("nan"))  # type: ignore[attr-defined]
        answers = Embeddings(llm)
        answers.ask(PROMPTS[1])
        while not answers.finished:
            answers.step()
        assert "not a number" in answers.finished[1].failure.message
        answers.step()
        assert llm.scheduler.cache.available == 64


def test_a_generator_embeds_nothing() -> None:
    with LLM(threads=1, num_pages=64) as llm:
        with pytest.raises(RequestError, match="generates text; it does not compute"):
            llm.embed("x")
        with pytest.raises(RequestError, match="generates text; it does not embed"):
            llm.generate("x", EMBED)


def test_vectors_of_an_llm(tmp_path: Path) -> None:
    """Of texts and of token ids, normalised, cut; more of them than the queue takes at once."""
    model = save_embedding_model(tmp_path, Qwen3Config(**COMMON), "last", matryoshka_dimensions=[16])
    with LLM(str(tmp_path), threads=1, num_pages=64, max_queued_requests=2) as llm:
        ours = llm.embed(PROMPTS)
        assert ours.dtype == np.float32 and ours.shape == (6, 64)
        assert_equal(list(torch.from_numpy(ours)), model, PROMPTS)
        assert np.allclose(np.linalg.norm(ours, axis=1), 1)
        want = model.embedding(PROMPTS[1], 16)
        assert (torch.from_numpy(llm.embed(PROMPTS[1], 16))[0] - want).abs().max() < 1e-4
        ids = llm.tokenizer.tokenizer.encode("Good day!").ids
        assert (llm.embed("Good day!") == llm.embed([ids])).all()
        assert llm.embed([]).shape == (0, 64)
        with pytest.raises(RequestError, match=r"dimensions 17 .* 16, 64"):
            llm.embed("x", 17)
        with pytest.raises(RequestError, match="max_tokens must be 0"):
            llm.generate("x", SamplingParams(embed=True))


def test_embedding_models_do_not_draft(model: EmbeddingModel) -> None:
    with pytest.raises(ConfigError, match="--speculate ngram is for models that generate text"):
        resolve(EngineConfig(model=str(model.folder), speculate="ngram"), "cpu")
    assert resolve(EngineConfig(model=str(model.folder), speculate="auto"), "cpu").drafter is None
