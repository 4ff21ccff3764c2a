"""Weights of 8 bits: the logits of the same model with rounded linear layers, close to those of the model itself."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from contract.checkpoints import Checkpoint, configurations, save
from contract.harness import Span
from contract.native_engine import NativeEngine
from contract.test_native import SHAPES, A, B, C, assert_close
from minisgl import LLM, SamplingParams
from minisgl.engine.config import resolve
from minisgl.engine.engine import Engine
from minisgl.errors import ConfigError
from minisgl.settings.options import EngineConfig
from minisgl.tokenizer.folder import load_tokenizer
from support.embedding_models import save_embedding_model

MODELS: dict[str, Any] = {
    name: config
    for name, config in (configurations() | SHAPES).items()
    if name in ("llama-gqa-llama3-untied", "llama-linear-biases", "qwen3-tied-wide-heads", "wide-heads-odd-vocabulary")
}
GROUP = 32


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """[N, K] -> the same to 8 bits, with a bfloat16 scale for every 32 columns, rounded up."""
    groups = weight.view(len(weight), -1, GROUP)
    most = groups.abs().amax(-1, keepdim=True) / 127
    scale = most.bfloat16().float()
    scale = torch.where(scale < most, (most * (1 + 2**-8)).bfloat16().float(), scale)
    return ((groups / scale).round().clamp(-127, 127) * scale).view_as(weight)


def rounded_input(_: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """x [..., K] to 8 bits, with a scale for every 32 of a row."""
    groups = inputs[0].float().unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (((groups / scale).round() * scale).flatten(-2).to(inputs[0].dtype),)


def rounded_model(model: Any) -> Any:
    """A copy with every linear layer rounded, and the embedding if it is the head, too."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                module.weight.copy_(rounded(module.weight))
                module.register_forward_pre_hook(rounded_input)
    return model


@pytest.fixture(scope="module", params=MODELS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, Checkpoint]:
    """A model, and the same rounded."""
    whole = save(tmp_path_factory.mktemp(request.param), MODELS[request.param])
    return whole, Checkpoint(whole.folder, rounded_model(whole.model))


def test_logits_are_those_of_the_rounded_model(models: tuple[Checkpoint, Checkpoint], isa: str):
    """A prompt, decoding, and a mixed step. A sum in another order may round an input the other way: that shows from
    then on, by less than what rounding does. (The library's self-test has the products one by one.)"""
    whole, eight = models
    want = eight.logits(A)
    engine = NativeEngine.load(whole.folder, quantization="int8")
    assert_close(engine.step([Span(0, 0, A[:1])]), want[:1], 1e-5)
    assert_close(engine.step([Span(0, 1, A[1:80])]), want[79:80], 0.04)
    for i in range(80, 90):
        assert_close(engine.step([Span(0, i, [A[i]])]), want[i : i + 1], 0.04)
    ours = engine.step([Span(1, 0, B), Span(2, 0, A[:30], samples=False), Span(3, 0, C)])
    assert_close(ours, torch.cat([eight.logits(ids)[-1:] for ids in (B, C)]), 0.04)
    assert (want - whole.logits(A)).abs().max() > 0.05 * want.abs().max(), "rounding shows, or this tests nothing"


def test_bfloat16_is_as_close_to_it_as_transformers(models: tuple[Checkpoint, Checkpoint], isa: str):
    whole, eight = models
    want = eight.logits(A)
    with torch.inference_mode():
        theirs = rounded_model(whole.model.bfloat16())(torch.tensor([A])).logits[0].float()
    whole.model.float()
    engine = NativeEngine.load(whole.folder, dtype="bfloat16", quantization="int8")
    lengths = range(60, 91, 3)
    last = torch.tensor(lengths) - 1
    ours = torch.cat([engine.step([Span(row, 0, A[:n])]) for row, n in enumerate(lengths)])

    def error(logits: torch.Tensor) -> float:
        return float(((logits - want[last]).abs().amax(-1) / want[last].abs().amax(-1)).mean())

    assert error(ours) <= 1.1 * error(theirs[last]) <= 0.2


def test_a_number_that_is_not_finite_is_told(tmp_path: Path, isa: str):
    """In a page of K/V, or in a weight."""
    checkpoint = save(tmp_path / "a", MODELS["qwen3-tied-wide-heads"])
    engine = NativeEngine.load(checkpoint.folder, quantization="int8")
    engine.step([Span(0, 0, A), Span(1, 0, B)])
    engine.engine.parts.kv_cache.poison([engine.mapped[0][-1]])
    engine.step([Span(0, 90, [1]), Span(1, 37, [1])])
    assert engine.ok.tolist() == [0, 1]
    with torch.no_grad():
        checkpoint.model.model.layers[1].mlp.down_proj.weight[3, 40] = math.nan
    checkpoint.model.save_pretrained(tmp_path / "b")
    engine = NativeEngine.load(tmp_path / "b", quantization="int8")
    engine.step([Span(0, 0, A)])
    assert engine.ok.tolist() == [0]


@pytest.mark.usefixtures("built")
def test_the_built_in_model_says_nearly_the_same():
    """Its distributions after each token of a chat and a story of its own, against those with float32 weights."""
    folder = Path(resolve(EngineConfig(), "cpu").folder)
    tokenizer, llm = load_tokenizer(folder), LLM()
    prompts = ["<|im_start|>user\nTell me a story about a fox named Lily.<|im_end|>\n<|im_start|>assistant\n", "Once"]
    texts = [tokenizer.encode(p).ids for p in prompts]
    answers = llm.generate(texts, SamplingParams(temperature=0, max_tokens=100))
    texts = [ids + answer.token_ids for ids, answer in zip(texts, answers, strict=True)]

    def log_probabilities(quantization: str | None) -> torch.Tensor:
        engine = NativeEngine.load(folder, quantization=quantization)
        steps = [engine.step([Span(row, i, [t])]) for row, ids in enumerate(texts) for i, t in enumerate(ids)]
        return torch.cat(steps).log_softmax(-1)

    exact, ours = log_probabilities(None), log_probabilities("int8")
    divergence = (exact.exp() * (exact - ours)).sum(-1)
    assert divergence.mean() < 1e-3
    assert (exact.argmax(-1) == ours.argmax(-1)).float().mean() > 0.97


@pytest.mark.usefixtures("built")
def test_weights_take_eight_and_a_half_bits():
    engine = NativeEngine.load(Path(resolve(EngineConfig(), "cpu").folder), quantization="int8").engine
    assert 1.06 < engine.memory.weight_bytes / engine.parts.model.num_parameters < 1.07


def refusal_of(**options: Any) -> str:
    with pytest.raises(ConfigError, match=r"--quantization int8 needs the C\+\+ step of a CPU: ") as error:
        Engine(resolve(EngineConfig(quantization="int8", **options), "cpu"), SimpleNamespace(type="cpu"))
    return str(error.value)


def test_what_cannot_have_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Before any weight is read: no folder here has any, and the device cannot hold one."""
    for name in ("mixtral", "gemma3"):
        save(tmp_path / name, configurations()[name])
        assert "not Llama-shaped enough" in refusal_of(model=str(tmp_path / name))
    narrow = copy.deepcopy(configurations()["llama-gqa-llama3-untied"])
    narrow.intermediate_size = 80
    save(tmp_path / "narrow", narrow)
    assert "intermediate_size 80 is not a multiple of 32" in refusal_of(model=str(tmp_path / "narrow"))
    save_embedding_model(tmp_path / "embedder", configurations()["qwen3-tied-wide-heads"], "last")
    assert "embeddings" in refusal_of(model=str(tmp_path / "embedder"))
    with pytest.raises(ConfigError, match="int8 is not for cuda"):
        resolve(EngineConfig(quantization="int8"), "cuda")
    assert "float16" in refusal_of(dtype="float16")
    assert "attention backend cpu" in refusal_of(attention_backend="cpu")
    monkeypatch.setenv("MINISGL_CPU_ISA", "none")
    assert "MINISGL_CPU_ISA" in refusal_of()
    with pytest.raises(ConfigError, match="several ranks"):
        LLM(quantization="int8", tp=2)
    with pytest.raises(ConfigError, match="int4 is not for cpu, where it can be int8"):
        LLM(quantization="int4")
