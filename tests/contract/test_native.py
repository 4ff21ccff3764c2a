"""The native CPU step on every instruction set of this machine: transformers' logits, and bits that never change."""

from __future__ import annotations

import copy
import multiprocessing
import random
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, Qwen2Config

from contract.checkpoints import COMMON, Checkpoint, architecture, configurations, save
from contract.harness import Span
from contract.native_engine import PAGES, ROWS, NativeEngine
from minisgl import LLM, SamplingParams
from minisgl.core.layout import ROW_STATE, Flag, adapter_load
from minisgl.core.params import Adapter
from minisgl.core.rounding import round_up
from minisgl.distributed.group import Group
from minisgl.distributed.info import ALONE
from minisgl.engine.engine import Engine
from minisgl.engine.resolve import resolve
from minisgl.engine.runner import EagerRunner
from minisgl.layers.adapters import Adapted, LowRank
from minisgl.models.families import FAMILIES
from minisgl.models.model_config import ModelConfig
from minisgl.models.positions import SLIDING
from minisgl.native import build
from minisgl.native import library as native
from minisgl.native.packing import LANES
from minisgl.native.runner import refusal
from minisgl.ops.quantized import round_fp8
from minisgl.ops.reference import OUTPUT_GATES, HeadTransform
from minisgl.settings.options import EngineConfig

pytestmark = pytest.mark.usefixtures("built", "fixed_costs")
RNG = random.Random(0)
A, B, C = ([RNG.randrange(160) for _ in range(n)] for n in (90, 37, 61))
# Beside those of every architecture: one KV head of 64 for many queries, wide heads, a vocabulary of odd size, windows.
SHAPES = {
    "one-kv-head": LlamaConfig(**COMMON, num_attention_heads=8, num_key_value_heads=1, head_dim=64),
    "wide-heads-odd-vocabulary": LlamaConfig(
        **(COMMON | {"vocab_size": 161}), num_attention_heads=2, num_key_value_heads=2, head_dim=128
    ),
    "windows": Qwen2Config(
        **COMMON,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_sliding_window=True,
        sliding_window=23,
        layer_types=[SLIDING, "full_attention", SLIDING],
    ),
}


EXPERT_SIZES = ("moe_intermediate_size", "shared_expert_intermediate_size")


def wide(config: Any) -> Any:
    """A copy whose matrices all have columns in chunks of 128, as matrices of 4 bits need."""
    config = copy.deepcopy(config)
    config.hidden_size, config.intermediate_size = 128, 256
    for name in EXPERT_SIZES:
        if hasattr(config, name):
            setattr(config, name, 128)
    config.head_dim = max(32, vars(config).get("head_dim") or 0)
    config.initializer_range = 0.1
    return config


def padded(config: Any) -> Any:
    """A copy with sizes that are multiples of 16, which the native step needs."""
    config = copy.deepcopy(config)
    for name in ("head_dim", *EXPERT_SIZES):
        if size := vars(config).get(name):  # transformers refuses to read what may differ between layers
            setattr(config, name, round_up(size, LANES))
    return config


REFUSED = {
    f"{name}ForCausalLM": "latents instead of keys and values"
    for name in ("DeepseekV2", "DeepseekV3", "Glm4MoeLite", "Mistral4")
}


def taken() -> dict[str, Any]:
    """The configurations, with sizes that the native step takes."""
    ours = {name: padded(c) for name, c in configurations().items()}
    narrow = [name for name, c in ours.items() if refusal_of(c) == "head_dim 8 is not a multiple of 16"]
    kept = {name: c for name, c in ours.items() if name not in narrow} | SHAPES
    return {name: c for name, c in kept.items() if architecture(c) not in REFUSED}


def refusal_of(config: Any) -> str | None:
    whole = config.to_dict() | {"architectures": [architecture(config)]}
    return refusal(replace(resolve(EngineConfig(), "cpu"), model=ModelConfig.from_hf(whole)))


@pytest.fixture(scope="module", params=taken())
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return save(tmp_path_factory.mktemp(request.param), taken()[request.param])


def test_every_family_runs_in_the_native_step_or_is_named():
    assert {architecture(c) for c in taken().values()} == FAMILIES.keys() - REFUSED.keys()
    for config in configurations().values():
        if (name := architecture(config)) in REFUSED:
            assert refusal_of(config) == f"{name} has {REFUSED[name]}"


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()


def test_logits_are_those_of_transformers(checkpoint: Checkpoint, isa: str, request: pytest.FixtureRequest):
    """A prompt, decoding, a shared prefix, and a mixed step of decode, prompt, middle chunk and last chunk.

    Each instruction set meets each page size, on every third model.
    """
    turn = list(taken()).index(request.node.callspec.params["checkpoint"]) + native.usable_isas().index(isa)
    engine = NativeEngine.load(checkpoint.folder, page_size=(16, 1, 64)[turn % 3])
    want = checkpoint.logits(A)
    assert_close(engine.step([Span(0, 0, A[:80])]), want[79:80])
    for i in range(80, 90):
        assert_close(engine.step([Span(0, i, [A[i]])]), want[i : i + 1])
    engine.share_prefix(0, 5, 64)
    assert_close(engine.step([Span(5, 64, B)]), checkpoint.logits(A[:64] + B)[-1:])
    engine.step([Span(1, 0, A[:50]), Span(7, 0, C[:20], samples=False)])
    spans = [Span(1, 50, [A[50]]), Span(4, 0, B), Span(2, 0, A[:30], samples=False), Span(7, 20, C[20:])]
    assert_close(engine.step(spans), torch.cat([checkpoint.logits(ids)[-1:] for ids in (A[:51], B, C)]))
    assert_close(engine.step([Span(2, 30, A[30:])]), want[-1:])
    assert engine.step([Span(3, 0, A, samples=False)]).shape == (0, want.shape[1])


def test_bfloat16_is_as_close_as_transformers(checkpoint: Checkpoint, isa: str):
    """At half of the positions or more: rounding makes both choose other experts now and then."""
    want = checkpoint.logits(A)
    with torch.inference_mode():
        theirs = copy.deepcopy(checkpoint.model).bfloat16()(torch.tensor([A])).logits[0].float()
    engine = NativeEngine.load(checkpoint.folder, dtype="bfloat16")
    spans = [Span(0, 0, A[:20]), *(Span(0, i, [A[i]]) for i in range(20, len(A)))]
    ours = torch.cat([engine.step([span]) for span in spans])

    def error(logits: torch.Tensor) -> float:
        return float(((logits - want[19:]).abs().amax(-1) / want[19:].abs().amax(-1)).median())

    factor = 1.1 if engine.engine.parts.model.config.experts is None else 1.25
    assert error(ours) <= factor * error(theirs[19:]) <= 0.2


def ways(engine: NativeEngine) -> Iterator[torch.Tensor]:
    """The same logits after A, computed in different ways; row 0 stays to be used by others."""
    rows = iter(range(ROWS_OF_WAYS))
    yield engine.step([Span(next(rows), 0, A)])
    for chunk in (1, 3, 16, 33, 64):
        row = next(rows)
        for start in range(0, len(A), chunk):
            logits = engine.step([Span(row, start, A[start : start + chunk])])
        yield logits
    row, others = next(rows), [next(rows) for _ in range(4)]
    yield engine.step([Span(others[0], 0, C), Span(row, 0, A), Span(others[1], 0, B), Span(others[2], 0, A[:1])])[1:2]
    engine.share_prefix(0, others[3], 64)
    mates = [Span(others[0], 61, [1]), Span(others[1], 37, B), Span(others[2], 1, A[1:])]
    both = engine.step([mates[0], Span(others[3], 64, A[64:]), *mates[1:]])
    yield both[1:2]
    yield both[3:4]


ROWS_OF_WAYS = 16


@pytest.mark.parametrize("dim", [80, 96, 192, 256, 512])
def test_head_sizes(tmp_path: Path, isa: str, dim: int):
    checkpoint = save(
        tmp_path, LlamaConfig(**COMMON, num_attention_heads=4, num_key_value_heads=2, head_dim=dim, rope_theta=100.0)
    )
    want = checkpoint.logits(A)
    for dtype, page_size, tolerance in (("float32", 16, 1e-4), ("float32", 1, 1e-4), ("bfloat16", 64, 0.05)):
        engine = NativeEngine.load(tmp_path, dtype, page_size)
        assert_close(engine.step([Span(0, 0, A[:80])]), want[79:80], tolerance)
        for i in range(80, 90):
            assert_close(engine.step([Span(0, i, [A[i]])]), want[i : i + 1], tolerance)


def eager_engine(folder: Path, page_size: int, cache: str = "auto", **options: Any) -> Engine:
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        page_size=page_size,
        num_pages=PAGES,
        max_running_requests=ROWS,
        kv_cache_dtype=cache,
        attention_backend="cpu",
        speculate="off",
        **options,
    )
    return Engine.from_config(config, 8192, Group(ALONE))


def eager_runner(folder: Path, page_size: int, cache: str = "auto") -> Any:
    return eager_engine(folder, page_size, cache).general


@pytest.mark.parametrize("option", [(0.7, False, False), (0.0, True, False), (0.0, False, True), (0.3, True, True)])
def test_options_of_scores(tmp_path: Path, isa: str, option: tuple[float, bool, bool], monkeypatch: pytest.MonkeyPatch):
    """A soft cap, sinks of each layer and a scale of q by position give the logits of the eager runner."""
    softcap, has_sinks, has_q_scale = option
    sinks = iter([torch.tensor([-2.0, 6.0, 1.0, 3.0]), torch.tensor([0.5, 0.0, 9.0, -1.0]), torch.zeros(4)] * 4)
    q_scale = 1 + torch.arange(1024) / 40

    def with_options(*args: Any, **kwargs: Any) -> HeadTransform:
        own = {"sinks": next(sinks) if has_sinks else None, "q_scale": q_scale if has_q_scale else None}
        return replace(HeadTransform(*args, **kwargs), **own)

    mixer = ModelConfig.mixer
    config = copy.deepcopy(SHAPES["windows"])
    config.initializer_range = 0.5  # scores that differ
    save(tmp_path, config)
    plain = NativeEngine.load(tmp_path)
    monkeypatch.setattr("minisgl.models.attention.HeadTransform", with_options)
    monkeypatch.setattr(ModelConfig, "mixer", lambda *at: replace(mixer(*at), softcap=softcap, has_sinks=has_sinks))
    engine, eager = NativeEngine.load(tmp_path), eager_runner(tmp_path, 16)
    steps = [[Span(0, 0, A[:75]), Span(1, 0, B)], [Span(1, 37, [1]), Span(0, 75, A[75:80])], [Span(0, 80, [A[80]])]]
    for spans in steps:
        without, ours = plain.step(spans), engine.step(spans)
        assert_close(ours, eager.logits_of(engine.plan))
        assert (ours - without).abs().max() > 0.01 * without.abs().max(), "the option changes nothing"


@pytest.mark.parametrize("function", OUTPUT_GATES)
def test_output_gates(tmp_path: Path, isa: str, function: str, monkeypatch: pytest.MonkeyPatch):
    """Each function of gates, for heads and for elements, gives the logits of the eager runner."""
    name = "LagunaForCausalLM"
    families = {**FAMILIES, name: replace(FAMILIES[name], output_gate=function)}
    monkeypatch.setattr("minisgl.models.model_config.FAMILIES", families)
    logits = {}
    for kind in ("per-head", "per-element"):
        config = copy.deepcopy(taken()["laguna"])
        config.gating, config.initializer_range = kind, 0.5  # gates that differ
        save(tmp_path / kind, config)
        engine, eager = NativeEngine.load(tmp_path / kind), eager_runner(tmp_path / kind, 16)
        logits[kind] = engine.step([Span(0, 0, A[:75]), Span(1, 0, B)])
        assert_close(logits[kind], eager.logits_of(engine.plan))
    assert (logits["per-head"] - logits["per-element"]).abs().max() > 0.1


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_cache_of_8_bits(tmp_path: Path, isa: str, shape: str, page_size: int):
    """Logits are those of the eager runner. The keys and values of the first layer are bit-equal."""
    save(tmp_path, SHAPES[shape])
    plain, engine = (NativeEngine.load(tmp_path, page_size=page_size, cache=cache) for cache in ("auto", "fp8"))
    eager = eager_runner(tmp_path, page_size, "fp8")
    steps = [[Span(0, 0, A[:75]), Span(1, 0, B)], *([Span(1, i - 38, [i]), Span(0, i, [A[i]])] for i in range(75, 90))]
    for spans in steps:
        plain.step(spans)
        assert_close(engine.step(spans), eager.logits_of(engine.plan), 0.01)
    first, plain_first = (e.engine.parts.model.states[0] for e in (engine, plain))
    group = first.spec.group
    pages, data, scales = plain.maps[group][0], first.pages.data, first.pages.scale
    assert pages == engine.maps[group][0]
    for i, page in enumerate(pages):
        used = min(page_size, len(A) - i * page_size)
        keys, values = plain_first.pages[page]  # [heads, dim, page] and [heads, page, dim] in float32
        for which, rows in enumerate((keys.reshape(len(keys), -1, page_size).transpose(1, 2), values)):
            want, scale = round_fp8(rows[:, :used].flatten(0, 1), 0)
            got = data[page, which]
            got = got.reshape(len(keys), -1, page_size).transpose(1, 2) if which == 0 else got
            assert torch.equal(scales[page, which, :, :used].flatten(), scale.flatten())
            assert torch.equal(got[:, :used].reshape(want.shape).view(torch.uint8), want.view(torch.uint8))


MANY_SHAPES = (
    *("qwen3-tied-wide-heads", "windows", "one-kv-head", "gemma2", "glm4", "olmo3", "phi"),
    *("qwen3-moe-every-second-layer", "qwen2-moe", "glm4-moe", "gpt-oss", "gemma4-moe", "gemma4-shared", "laguna"),
    *("qwen3-next", "qwen3.5", "qwen3.5-moe"),
)


KINDS = [(None, "auto"), ("int8", "auto"), ("int4", "auto"), (None, "fp8")]


@pytest.mark.parametrize(("quantization", "cache"), KINDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_do_not_depend_on_the_company(tmp_path: Path, isa: str, dtype: str, quantization: str | None, cache: str):
    """Nor on chunks, prefix hits, page size or threads.

    Of two instruction sets and two dtypes, each model meets each kind of weights and cache once.
    """
    turn = (isa == native.usable_isas()[0]) + 2 * (dtype == "bfloat16") + KINDS.index((quantization, cache))
    for name in MANY_SHAPES[turn % 4 :: 4]:
        config, folder = taken()[name], tmp_path / name
        save(folder, wide(config) if quantization else config)
        want = None
        for page_size, threads in ((16, 2), (32 if cache == "fp8" else 1, 1), (64, 3)):
            engine = NativeEngine.load(folder, dtype, page_size, threads, quantization=quantization, cache=cache)
            for logits in ways(engine):
                want = logits if want is None else want
                assert torch.equal(logits, want)


ADAPTED = (
    *("wide-heads-odd-vocabulary", "qwen2-moe", "gemma4-shared", "qwen3.5"),
    *("phi", "laguna", "gemma4-moe", "qwen3-tied-wide-heads"),
)
ADAPTER_KINDS = [("float32", None), ("bfloat16", "int8"), ("bfloat16", None), ("float32", "int4")]
ROOM = {"lora_dynamic": "anywhere", "max_loras": 2, "max_lora_rank": 40}


def random_adapter(folder: Path, _: str, adapted: Sequence[Adapted], *__: object) -> dict[str, LowRank]:
    """Adapter "a" has rank 5 and all modules; "b" has rank 33 with biases, and not all modules."""
    is_first, result = folder.name == "a", {}
    random = torch.Generator().manual_seed(int(is_first))
    for name, (rows, cols) in {name: shape for one in adapted for name, shape in one.modules.items()}.items():
        if is_first or "k_proj" not in name:
            a, b = (torch.randn(n, 5 if is_first else 33, generator=random) for n in (cols, rows))
            bias = None if is_first else torch.randn(rows, generator=random)
            result[name] = LowRank(a.t() * cols**-0.5, b, 0.1, bias)
    return result


def start_adapters(engine: Engine, of_rows: dict[int, int]) -> None:
    """Load "a" and "b", and give rows their slots."""
    assert engine.parts.adapters is not None
    engine.parts.adapters.start(np.concatenate([adapter_load(1, "key:a"), adapter_load(2, "key:b")]))
    for row in range(ROWS):
        engine.parts.state.adapter[row] = of_rows.get(row, 0)


@pytest.mark.parametrize("kind", ADAPTER_KINDS)
def test_adapters(tmp_path: Path, isa: str, kind: tuple[str, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters give the logits of the reference op, and bits that neither company, chunks nor prefix hits change.

    Rows without one beside them have the bits of a model without adapters. Each family meets one kind of weights.
    """
    monkeypatch.setattr("minisgl.engine.adapters.open_adapter", random_adapter)
    config = taken()[ADAPTED[2 * ADAPTER_KINDS.index(kind) + (isa == native.usable_isas()[0])]]
    for dtype, quantization in dict.fromkeys([("float32", None), kind]):
        folder = tmp_path / dtype / str(quantization)
        save(folder, wide(config) if quantization else config)
        engine = NativeEngine.load(folder, dtype, quantization=quantization, **ROOM)
        plain, eager = NativeEngine.load(folder, dtype, quantization=quantization), eager_engine(folder, 16, **ROOM)
        for parts in (engine.engine, eager):
            start_adapters(parts, dict.fromkeys(range(ROWS), 1) | {7: 0, 8: 2, 13: 0, 15: 2})
            parts.parts.state.last_token[13:15] = 1
        if (dtype, quantization) == kind:
            first, *others = ways(engine)
            assert all(torch.equal(logits, first) for logits in others)
        tolerance = 1e-4 if (dtype, quantization) == ("float32", None) else 0.15
        for spans in (
            [Span(13, 0, A), Span(14, 0, A), Span(15, 0, A[:70])],
            [Span(13, 90, [1]), Span(14, 90, [1]), Span(15, 70, A[70:])],
        ):
            ours, of_base = engine.step(spans, Flag.ADAPTED), plain.step(spans)
            theirs = eager.general.logits_of(engine.plan)
            change, error = ((ours - x).abs().amax(1) / theirs.abs().amax(1) for x in (of_base, theirs))
            assert change[1:].min() > 0.2 > 0 == change[0]
            assert quantization == "int4" or error.median() < tolerance


def test_adapters_verify_drafts(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of adapters and of the base that draft from their own texts get the texts that they get alone."""
    monkeypatch.setattr("minisgl.engine.adapters.open_adapter", random_adapter)
    adapters = [None, *(Adapter(name, name, "key") for name in "ab")]
    params = [SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, adapter=adapter) for adapter in adapters]
    texts = []
    for speculate in ("off", "ngram"):
        llm = LLM(device="cpu", threads=2, quantization="int8", speculate=speculate, **ROOM)
        texts.append([c.token_ids for c in llm.generate(["One, two, one, two, one, two,"] * 3, params)])
    alone = [llm.generate(["One, two, one, two, one, two,"], [p])[0].token_ids for p in params]
    assert texts[0] == texts[1] == alone
    assert len(set(map(tuple, alone))) == 3


def _spin() -> None:
    while True:
        pass


def test_bits_do_not_depend_on_busy_neighbours(tmp_path: Path):
    """The built-in model's shape, four threads and three busy processes on whatever cores there are."""
    engine = NativeEngine.load(Path(resolve(EngineConfig(), "cpu").folder), "bfloat16", threads=4)
    ids = [RNG.randrange(4096) for _ in range(300)]
    neighbours = [multiprocessing.get_context("fork").Process(target=_spin, daemon=True) for _ in range(3)]
    want = engine.step([Span(0, 0, ids)])
    for n in neighbours:
        n.start()
    try:
        for i in range(12):
            row = 1 + i % 2
            engine.mapped[row] = engine.mapped[row] or []
            assert torch.equal(engine.step([Span(row, 0, ids), Span(5 + i % 3, 0, ids[:40])])[:1], want)
            for start in (0, 100):
                logits = engine.step([Span(4, start, ids[start : start + 100 + start])])
            assert torch.equal(logits, want)
    finally:
        for n in neighbours:
            n.kill()
            n.join()


def test_a_step_longer_than_a_slice(tmp_path: Path, isa: str):
    """Prompts that cross the 512 tokens that go through the layers at once."""
    folder = Path(resolve(EngineConfig(), "cpu").folder)
    engine = NativeEngine.load(folder)
    ids = [RNG.randrange(4096) for _ in range(1100)]
    alone = torch.cat([engine.step([Span(0, 0, ids[:700])]), engine.step([Span(1, 0, ids)])])
    together = engine.step([Span(2, 0, ids[:700]), Span(3, 0, ids)])
    assert torch.equal(together, alone)


def test_tokens_are_those_of_the_torch_path(isa: str):
    """The built-in model in float32: greedy, drawn, filtered and penalised requests beside each other."""
    prompts = ["Hello! Who are you?", "Tell me a story.", "What is 3 + 4?", "Name a colour.", "The capital of France"]
    params = [
        SamplingParams(temperature=0, max_tokens=24),
        SamplingParams(temperature=0.9, seed=5, max_tokens=24),
        SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=6, max_tokens=24),
        SamplingParams(temperature=0.7, presence_penalty=0.5, logit_bias=((100, 3.0),), seed=7, max_tokens=24),
        SamplingParams(temperature=1.5, seed=-8, max_tokens=24),
    ]
    native_llm = LLM(dtype="float32", device="cpu", threads=2)
    assert native_llm.scheduler.describe()["runners"] == f"native ({isa})"
    torch_llm = LLM(dtype="float32", device="cpu", threads=2, attention_backend="cpu")
    assert torch_llm.scheduler.describe()["runners"] == "eager"
    ours, theirs = native_llm.generate(prompts, params), torch_llm.generate(prompts, params)
    assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
    alone = [native_llm.generate([prompt], [p])[0].token_ids for prompt, p in zip(prompts[:3], params[:3], strict=True)]
    assert alone == [c.token_ids for c in ours[:3]]


def test_drawn_tokens_have_the_noise_of_the_reference(tmp_path: Path, isa: str):
    from minisgl.ops.sampling import sample

    engine = NativeEngine.load(save(tmp_path, SHAPES["wide-heads-odd-vocabulary"]).folder)
    keys = [0, -1, 2**63 - 1, -(2**63), 123456789012345]
    rows = np.zeros(len(keys), ROW_STATE)
    rows["row"], rows["fields"]["temperature"], rows["fields"]["noise_key"] = (
        range(len(keys)),
        np.arange(len(keys)) + 0.5,
        keys,
    )
    for step in range(20):
        spans = [Span(i, step, [step + i]) for i in range(len(keys))]
        logits = engine.step(spans, rows=rows if step == 0 else None)
        positions = torch.full((len(keys),), step + 1, dtype=torch.int32)
        ones, zeros = torch.ones(len(keys)), torch.zeros(len(keys))
        temperature = torch.arange(len(keys)) + 0.5
        tokens, ok = sample(logits, temperature, zeros.int(), ones, zeros, torch.tensor(keys), positions)
        assert engine.tokens.tolist() == tokens.tolist() and ok.all() and engine.ok.tolist() == [1] * len(keys)


def test_masks_forbid_tokens(tmp_path: Path, isa: str):
    """The vocabulary does not fill the last word of a mask. A mask that allows no token is reported."""
    save(tmp_path, SHAPES["wide-heads-odd-vocabulary"])
    engine, vocab = NativeEngine.load(tmp_path), 161
    spans = [Span(row, 0, ids, samples=True) for row, ids in enumerate((A, B, C, A))]
    logits = engine.step(spans)
    allowed = np.random.default_rng(0).random((4, vocab)) < 0.3
    allowed[0, -1] = allowed[0, int(logits[0].argmax())] = False
    allowed[2] = np.arange(vocab) == vocab - 1
    allowed[3] = False
    bits = np.zeros((4, 192), np.bool_)
    bits[:, :vocab] = allowed
    masks = np.packbits(bits, 1, "little").view(np.int32)
    engine.step(spans, Flag.MASKED, masks=masks)
    assert engine.ok.tolist() == [1, 1, 1, 0]
    assert engine.tokens[:3].tolist() == np.where(allowed, logits, -np.inf)[:3].argmax(1).tolist()


def test_of_equal_logits_the_first_is_chosen(tmp_path: Path, isa: str):
    checkpoint = save(tmp_path / "a", SHAPES["wide-heads-odd-vocabulary"])
    head = checkpoint.model.lm_head.weight
    with torch.no_grad():
        head.copy_(head[torch.tensor([RNG.randrange(9) for _ in range(len(head))])])
    checkpoint.model.save_pretrained(tmp_path / "b")
    engine = NativeEngine.load(tmp_path / "b")
    logits = engine.step([Span(row, 0, A[: 5 + row]) for row in range(8)])
    most = logits == logits.amax(-1, keepdim=True)
    assert (most.sum(-1) > 1).all()
    assert engine.tokens.tolist() == [row.nonzero()[0].item() for row in most]


def test_a_row_that_is_not_finite_is_told(tmp_path: Path, isa: str):
    checkpoint = save(tmp_path, SHAPES["windows"])
    engine = NativeEngine.load(checkpoint.folder)
    engine.step([Span(0, 0, A), Span(1, 0, B)])
    page = engine.mapped[0][-1]
    engine.engine.parts.store.poison([page])
    engine.step([Span(0, 90, [1]), Span(1, 37, [1])])
    assert engine.ok.tolist() == [0, 1] and engine.tokens[0] == 0


def test_amx_tiles_are_used_right():
    """With the instructions replaced by software, since few machines have them; and the real ones at least compile."""
    if "avx512_bf16" not in native.usable_isas():
        pytest.skip("needs the vector instructions beside them")
    software = Path(__file__).parents[1] / "support" / "amx_in_software.h"
    flags = ("-O1", *native.target("avx512_bf16").flags[1:], "-include", str(software))
    flags = (*flags, f"-DSOFTWARE={zlib.crc32(software.read_bytes())}")  # its part of the library's digest
    real = native.target("amx_bf16")
    emulated, compiled = build.build_libraries(
        [build.Target("tiles in software", native.SOURCE, flags), build.Target(real.name, real.source, real.flags)]
    )
    native.run_self_test(emulated.result(), "tiles in software")
    assert compiled.result().exists()


def runner_of(folder: Path) -> object:
    return Engine.from_config(
        EngineConfig(model=str(folder), device="cpu", num_pages=64, threads=1), 64, Group(ALONE)
    ).runners[-1]


def test_other_models_and_wishes_run_op_by_op(tmp_path: Path):
    for name in ("mistral-window", "qwen2"):  # their heads are not a multiple of 16
        save(tmp_path / name, configurations()[name])
        assert isinstance(runner_of(tmp_path / name), EagerRunner)
    save(tmp_path / "hybrid", taken()["qwen3.5"])
    narrow = EngineConfig(model=str(tmp_path / "hybrid"), dtype="bfloat16", state_dtype="model")
    assert "recurrent states" in str(refusal(resolve(narrow, "cpu")))
    assert "float16" in str(refusal(resolve(EngineConfig(dtype="float16"), "cpu")))
    assert "reference" in str(refusal(resolve(EngineConfig(attention_backend="reference"), "cpu")))
    assert "16 tokens" in str(refusal(resolve(EngineConfig(kv_cache_dtype="fp8", page_size=8), "cpu")))
    assert refusal(resolve(EngineConfig(kv_cache_dtype="fp8"), "cpu")) is None
    assert refusal(resolve(EngineConfig(), "cpu")) is None


def test_without_a_compiler_torch_serves(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "prebuilt")
    assert isinstance(runner_of(Path(resolve(EngineConfig(), "cpu").folder)), EagerRunner)
    assert "g++" in caplog.text


@pytest.mark.parametrize("body", ["__builtin_trap();", "return 1;", "for (;;);"])
def test_a_library_that_fails_its_self_test_is_not_loaded(tmp_path, monkeypatch, caplog, body: str):
    source = tmp_path / "bad.cpp"
    source.write_text(f'extern "C" int minisgl_self_test() {{ {body} }}')
    monkeypatch.setattr(native, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "SELF_TEST_TIMEOUT_S", 1.0)
    monkeypatch.setenv("MINISGL_CPU_ISA", "generic")
    assert isinstance(runner_of(Path(resolve(EngineConfig(), "cpu").folder)), EagerRunner)
    assert "fails its self-test" in caplog.text
