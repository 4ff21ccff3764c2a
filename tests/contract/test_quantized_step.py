"""Weights of 8 and 4 bits: logits of the same model with rounded linear layers, close to those of the model itself."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig

from contract.checkpoints import COMMON, Checkpoint, configurations, save
from contract.harness import Span
from contract.native_engine import NativeEngine
from contract.test_native import SHAPES, A, B, C, assert_close, wide
from minisgl import LLM, SamplingParams
from minisgl.core.errors import ConfigError
from minisgl.engine.engine import Engine
from minisgl.engine.resolve import resolve
from minisgl.models.quantize import quantize
from minisgl.ops.quantized import INT8, TARGET_FORMATS, Format, Quantized, round_int4
from minisgl.settings.options import EngineConfig
from minisgl.tokenizer.folder import load_tokenizer
from support.embedding_models import save_embedding_model

GROUP = 32


NAMES = (
    *("llama-gqa-llama3-untied", "llama-linear-biases", "qwen3-tied-wide-heads", "wide-heads-odd-vocabulary"),
    *("gemma2", "glm4", "phi"),
)
MODELS: dict[str, dict[str, Any]] = {
    "int8": {name: (configurations() | SHAPES)[name] for name in NAMES},
    "int4": {name: wide((configurations() | SHAPES)[name]) for name in NAMES},
}


def rounded(weight: torch.Tensor, kind: Format) -> torch.Tensor:
    rows, columns = weight.shape
    matrix = kind.empty(rows, columns, weight.device)
    matrix.round_from(weight)
    return matrix.dense(weight.dtype)


def rounded_input(_: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
    """x [..., K] to 8 bits, with a scale for every 32 of a row."""
    groups = inputs[0].float().unflatten(-1, (-1, GROUP))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (((groups / scale).round() * scale).flatten(-2).to(inputs[0].dtype),)


def rounded_model(model: Any, quantization: str) -> Any:
    """A copy with every linear layer rounded, and the embedding if it is the head, too; the head has 8 bits."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear):
                kind = INT8 if name == "lm_head" else TARGET_FORMATS["cpu"][quantization]
                module.weight.copy_(rounded(module.weight, kind))
                module.register_forward_pre_hook(rounded_input)
    return model


@dataclass(frozen=True)
class Case:
    """A model, and the same rounded."""

    quantization: str
    whole: Checkpoint
    few: Checkpoint


@pytest.fixture(scope="module", params=[(kind, name) for kind in MODELS for name in NAMES], ids="-".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    kind, name = request.param
    whole = save(tmp_path_factory.mktemp(name), MODELS[kind][name])
    return Case(kind, whole, Checkpoint(whole.folder, rounded_model(whole.model, kind)))


def test_logits_are_those_of_the_rounded_model(case: Case, isa: str):
    """Single tokens, a prompt, decoding, a mixed step. A sum in another order may round an input the other way: that
    shows from then on, by less than what rounding does. (The library's self-test has the products one by one.)"""
    want = case.few.logits(A)
    engine = NativeEngine.load(case.whole.folder, quantization=case.quantization)
    alone = torch.cat([case.few.logits([token]) for token in A[:4]])
    errors = (engine.step([Span(4 + i, 0, [A[i]]) for i in range(4)]) - alone).abs().amax(1) / alone.abs().amax(1)
    assert errors.sort().values[1] < 1e-5
    assert_close(engine.step([Span(0, 0, A[:80])]), want[79:80], 0.04)
    for i in range(80, 90):
        assert_close(engine.step([Span(0, i, [A[i]])]), want[i : i + 1], 0.04)
    ours = engine.step([Span(1, 0, B), Span(2, 0, A[:30], samples=False), Span(3, 0, C)])
    assert_close(ours, torch.cat([case.few.logits(ids)[-1:] for ids in (B, C)]), 0.04)
    assert (want - case.whole.logits(A)).abs().max() > 0.015 * want.abs().max(), "rounding shows, or this tests nothing"


def test_bfloat16_is_as_close_to_it_as_transformers(case: Case, isa: str):
    want = case.few.logits(A)
    with torch.inference_mode():
        theirs = rounded_model(case.whole.model.bfloat16(), case.quantization)(torch.tensor([A])).logits[0].float()
    case.whole.model.float()
    engine = NativeEngine.load(case.whole.folder, dtype="bfloat16", quantization=case.quantization)
    lengths = range(60, 91, 3)
    last = torch.tensor(lengths) - 1
    ours = torch.cat([engine.step([Span(row, 0, A[:n])]) for row, n in enumerate(lengths)])

    def error(logits: torch.Tensor) -> float:
        return float(((logits - want[last]).abs().amax(-1) / want[last].abs().amax(-1)).mean())

    assert error(ours) <= 1.1 * error(theirs[last]) <= 0.2


def test_a_checkpoint_in_four_bits_is_multiplied_as_it_is(tmp_path: Path, isa: str):
    """In groups of 128 and of 32, beside a matrix that is too narrow and a head in 32 bits, which stay as they are."""
    for group, matrices in ((128, 21), (32, 18)):
        config = wide(configurations()["llama-gqa-llama3-untied"])
        if group == 32:
            config.intermediate_size = 96
        whole = save(tmp_path / f"whole-{group}", config)
        quantize(str(whole.folder), tmp_path / f"in-{group}", "int4")
        engine = NativeEngine.load(tmp_path / f"in-{group}")
        assert engine.engine.describe()["quantization"] == f"int4 with scales for groups of {group}"
        parameters = engine.engine.parts.model.parameters
        assert sum(len(p.sources) for p in parameters if isinstance(p.tensor, Quantized)) == matrices
        few = copy.deepcopy(whole.model)
        for name, module in few.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                q, scale = round_int4(module.weight.detach(), group, torch.float32)
                if module.in_features % 128 == 0:
                    scale = scale.bfloat16()
                    module.register_forward_pre_hook(rounded_input)
                numbers = q.float().view(len(q), -1, group) - 8
                module.weight.data.copy_((numbers * scale.float().unsqueeze(2)).flatten(1))
        want = Checkpoint(whole.folder, few).logits(A)
        assert_close(engine.step([Span(0, 0, A)]), want[-1:], 0.04)


@pytest.mark.parametrize("quantization", MODELS)
def test_a_number_that_is_not_finite_is_told(tmp_path: Path, isa: str, quantization: str):
    """In a page of K/V, or in a weight."""
    checkpoint = save(tmp_path / "a", MODELS["int4"]["qwen3-tied-wide-heads"])
    engine = NativeEngine.load(checkpoint.folder, quantization=quantization)
    engine.step([Span(0, 0, A), Span(1, 0, B)])
    engine.engine.parts.store.poison([engine.mapped[0][-1]])
    engine.step([Span(0, 90, [1]), Span(1, 37, [1])])
    assert engine.ok.tolist() == [0, 1]
    with torch.no_grad():
        checkpoint.model.model.layers[1].mlp.down_proj.weight[3, 40] = math.nan
    checkpoint.model.save_pretrained(tmp_path / "b")
    engine = NativeEngine.load(tmp_path / "b", quantization=quantization)
    engine.step([Span(0, 0, A)])
    assert engine.ok.tolist() == [0]


@pytest.mark.usefixtures("built", "fixed_costs")
@pytest.mark.parametrize(("quantization", "most", "same"), [("int8", 1e-3, 0.99), ("int4", 0.1, 0.95)])
def test_the_built_in_model_says_nearly_the_same(quantization: str, most: float, same: float):
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

    exact, ours = log_probabilities(None), log_probabilities(quantization)
    divergence = (exact.exp() * (exact - ours)).sum(-1)
    assert divergence.mean() < most
    best = exact.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > 0.1  # sums in another order may turn a near tie, and so the text after it
    assert (exact.argmax(-1) == ours.argmax(-1))[is_clear].float().mean() > same


@pytest.mark.usefixtures("built", "fixed_costs")
@pytest.mark.parametrize(("quantization", "bits"), [("int8", 8.5), ("int4", 4.5)])
def test_weights_take_half_a_bit_more(quantization: str, bits: float):
    """Of a projection. The head has 8.5 bits, and a norm 32."""
    engine = NativeEngine.load(Path(resolve(EngineConfig(), "cpu").folder), quantization=quantization).engine
    model = engine.parts.model
    head = model.config.vocab_size * model.config.hidden_size
    held = engine.memory.weight_bytes - head * 8.5 / 8
    assert bits < 8 * held / (model.num_parameters - head) < bits + 0.05


def refusal_of(**options: Any) -> str:
    with pytest.raises(ConfigError, match=r"--quantization int8 needs the C\+\+ step of a CPU: ") as error:
        Engine(resolve(EngineConfig(quantization="int8", **options), "cpu"), SimpleNamespace(type="cpu"))
    return str(error.value)


def test_what_cannot_have_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Before any weight is read: no folder here has any, and the device cannot hold one."""
    narrow = copy.deepcopy(configurations()["llama-gqa-llama3-untied"])
    narrow.intermediate_size = 80
    save(tmp_path / "narrow", narrow)
    assert "intermediate_size 80 is not a multiple of 32" in refusal_of(model=str(tmp_path / "narrow"))
    save_embedding_model(tmp_path / "embedder", configurations()["qwen3-tied-wide-heads"], "last")
    assert "embeddings" in refusal_of(model=str(tmp_path / "embedder"))
    assert "float16" in refusal_of(dtype="float16")
    assert "attention backend cpu" in refusal_of(attention_backend="cpu")
    monkeypatch.setenv("MINISGL_CPU_ISA", "none")
    assert "MINISGL_CPU_ISA" in refusal_of()
    with pytest.raises(ConfigError, match="several ranks"):
        LLM(quantization="int8", tp=2)
    with pytest.raises(ConfigError, match="fp8 is not for cpu, where it can be int8 or int4"):
        LLM(quantization="fp8")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_experts_are_rounded_as_other_weights(quantization: str, tmp_path: Path, isa: str) -> None:
    """Logits are those of a model with rounded experts, but for the 8 bits of their inputs, about 2 %.

    All experts are chosen, so that rounding changes no choice.
    """
    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128, "head_dim": 32}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    checkpoint = save(tmp_path, Qwen3MoeConfig(**COMMON | sizes | heads, num_experts=3, num_experts_per_tok=3))
    model = rounded_model(checkpoint.model, quantization)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".experts." in name:
                matrix = rounded(weight.flatten(0, 1), TARGET_FORMATS["cpu"][quantization])
                weight.copy_(matrix.view_as(weight))
    engine = NativeEngine.load(tmp_path, quantization=quantization)
    got = engine.step([Span(0, 0, A), Span(1, 0, B), Span(2, 0, C)])
    want = torch.cat([Checkpoint(tmp_path, model).logits(ids)[-1:] for ids in (A, B, C)])
    assert float((got - want).norm() / want.norm()) < 0.03
