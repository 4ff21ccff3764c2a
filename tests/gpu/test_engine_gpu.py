"""The built-in model on a GPU against the CPU engine, and all runners against each other."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma3TextConfig, PretrainedConfig, Qwen3MoeConfig

from contract.checkpoints import save
from minisgl import LLM, Grammar, SamplingParams
from minisgl.checkpoint.adapter import adapters_of
from minisgl.checkpoint.hf import BUILTIN_MODEL, load_config
from minisgl.core.layout import FULL, Flag
from minisgl.core.plan import BatchPlan
from minisgl.device.create import create_device
from minisgl.engine.engine import Engine
from minisgl.engine.graphs.capture import TAILS, tail_of
from minisgl.engine.resolve import resolve
from minisgl.engine.trial import trial_plan
from minisgl.scheduler.check import check_idle
from minisgl.settings.options import EngineConfig
from minisgl.tools.bench.shapes import write_adapter

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
CHATS = [
    "What is 12 + 30?",
    "Repeat exactly: crème brûlée 東京 🚀 x9",
    "Tell me a story about a fox named Lily.",
    "Count from 3 to 12.",
    f"{FILLER * 40}The secret code of the castle is 7305982. {FILLER * 30}\n\nWhat is the secret code of the castle?",
    "Tell me a story about a cat named Tom.",
    "What is 45 - 7?",
]
SAMPLED = [
    SamplingParams(temperature=1.0, seed=1, max_tokens=60),
    SamplingParams(temperature=0.8, seed=2, top_k=5, max_tokens=60),
    SamplingParams(temperature=1.2, seed=3, top_p=0.8, max_tokens=60),
    SamplingParams(temperature=1.0, seed=4, min_p=0.1, presence_penalty=0.5, frequency_penalty=0.3, max_tokens=60),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, min_tokens=12, max_tokens=60),
    SamplingParams(temperature=1.0, seed=5, logit_bias=((70, 3.0),), top_p=0.9, top_k=40, max_tokens=60),
    SamplingParams(temperature=0.0, max_tokens=60),
]


@contextmanager
def engine(**options: Any) -> Iterator[LLM]:
    llm = LLM(**{"device": "cuda", "dtype": "float32", "num_pages": 2000, **options})
    yield llm
    check_idle(llm.scheduler)
    del llm
    gc.collect()
    torch.cuda.empty_cache()


def texts(llm: LLM, params: SamplingParams | list[SamplingParams]) -> list[list[int]]:
    chats = [[{"role": "user", "content": text}] for text in CHATS]
    return [c.token_ids for c in llm.chat(chats, params)]


@pytest.fixture(scope="module")
def on_cpu() -> tuple[list[list[int]], list[list[int]]]:
    llm = LLM(device="cpu", dtype="float32", num_pages=2000)
    return texts(llm, SamplingParams(temperature=0, max_tokens=60)), texts(llm, SAMPLED)


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "eager": {"cuda_graph_max_bs": 0},
    "no overlap": {"overlap": False},
    "no cache": {"cache_type": "naive"},
    "page 16": {"page_size": 16},
    "page 128": {"page_size": 128},
    "chunks": {"max_prefill_length": 96},
    "graphs of 4": {"cuda_graph_max_bs": 4},
    "dry pool": {"num_pages": 70},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_tokens_match_cpu(on_cpu: tuple[list[list[int]], list[list[int]]], options: dict[str, Any]):
    greedy, sampled = on_cpu
    with engine(**options) as llm:
        for _ in range(2):  # cold, then with a warm prefix cache
            assert texts(llm, SamplingParams(temperature=0, max_tokens=60)) == greedy
        assert texts(llm, SAMPLED) == sampled


def saved(folder: Path, config: PretrainedConfig) -> Path:
    """Save a random model of `config` with the built-in model's tokenizer; return its folder."""
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BUILTIN_MODEL / file, folder / file)
    save(folder, config)
    return folder


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose tokens go through 4 of 16 experts."""
    config = Qwen3MoeConfig(
        vocab_size=load_config(BUILTIN_MODEL)["vocab_size"],
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=96,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        initializer_range=0.1,
    )
    return saved(tmp_path_factory.mktemp("experts"), config)


def test_moe_tokens_match_cpu(experts: Path):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    want = texts(LLM(str(experts), device="cpu", dtype="float32", num_pages=2000), params)
    assert len({tuple(tokens) for tokens in want}) == len(CHATS)
    for options in ({}, {"cuda_graph_max_bs": 0}, {"max_prefill_length": 96}):
        with engine(model=str(experts), **options) as llm:
            for _ in range(2):
                assert texts(llm, params) == want


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Gemma 3 with windows of 100 positions in two of three layers."""
    config = Gemma3TextConfig(
        vocab_size=load_config(BUILTIN_MODEL)["vocab_size"],
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        sliding_window=100,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        max_position_embeddings=4096,
        initializer_range=0.1,
    )
    return saved(tmp_path_factory.mktemp("windows"), config)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cuda_graph_max_bs": 0},
        {"max_prefill_length": 96, "page_size": 16},
        {"speculate": "ngram"},
        {"num_pages": 70},
        {"kv_cache_dtype": "fp8", "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_pages_behind_windows_are_given_back(windows: Path, options: dict[str, Any], tmp_path: Path):
    """As if all pages were kept, which tiers ask for. Last passed: an H200, 2026-11-29."""
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    kept = {
        "disk_kv": f"{tmp_path}:50M",
        **{name: options[name] for name in ("kv_cache_dtype", "dtype") if name in options},
    }
    with engine(model=str(windows), **kept) as llm:
        assert not llm.scheduler.engine.bounded
        want = texts(llm, params)
    with engine(model=str(windows), **options) as llm:
        assert llm.scheduler.engine.bounded
        for _ in range(2):
            got = texts(llm, params)
            assert got == want or "dtype" in options  # in 16 bits the split of sums decides some tokens
        # A pool that is full of rows keeps nothing of the one prompt that is longer than a page.
        assert llm.scheduler.stats.cached_tokens > 0 or "num_pages" in options


def test_bfloat16_tokens_are_deterministic():
    with engine(dtype="bfloat16") as llm:
        first = texts(llm, SAMPLED)
        assert texts(llm, SAMPLED) == first


@pytest.mark.parametrize("graphs", [0, 8])
def test_logprobs_match_cpu(graphs: int):
    """Logprobs of prompts and generated tokens, with a penalized request in the batch, in captured and eager steps."""
    params = [
        SamplingParams(temperature=0, max_tokens=12, logprobs=5, echo=True),
        SamplingParams(temperature=0, max_tokens=12, logprobs=0, frequency_penalty=1.0),
        SamplingParams(temperature=0, max_tokens=12),
    ]
    prompts = ["Once upon a time, there was a fox", "The sun", "A cat"]
    want = LLM(device="cpu", dtype="float32", num_pages=200).generate(prompts, params)
    with engine(cuda_graph_max_bs=graphs) as llm:
        got = llm.generate(prompts, params)
    for a, b in zip(got, want, strict=True):
        assert a.token_ids == b.token_ids
        assert [t.data for t in a.logprobs] == [t.data for t in b.logprobs]
        assert [t.logprob for t in a.logprobs[1:]] == pytest.approx([t.logprob for t in b.logprobs[1:]], abs=1e-3)


@pytest.mark.parametrize("graphs", [0, 8])
def test_grammar_tokens_match_cpu(graphs: int):
    """Masked and unmasked rows in one batch, in captured and eager steps, with overlap."""
    schema = (
        '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}}}'
    )
    params = [
        SamplingParams(temperature=0, max_tokens=60, grammar=Grammar("json_schema", schema)),
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=0, max_tokens=40, grammar=Grammar("regex", "[a-z ]{60}"), frequency_penalty=0.5),
        SamplingParams(
            temperature=1.0, seed=1, max_tokens=40, grammar=Grammar("choice", '["red", "green"]'), logprobs=1
        ),
    ]
    prompts = ["Once upon a time, there was a fox", "The sun", "A cat", "My color is"]
    want = LLM(device="cpu", dtype="float32", num_pages=200).generate(prompts, params)
    with engine(cuda_graph_max_bs=graphs) as llm:
        got = llm.generate(prompts, params)
    assert [c.token_ids for c in got] == [c.token_ids for c in want]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of two random adapters, strong enough to change what the built-in model answers."""
    folder = tmp_path_factory.mktemp("adapters")
    for seed, rank in enumerate((8, 24)):
        torch.manual_seed(seed)
        write_adapter(folder / str(seed), load_config(BUILTIN_MODEL), rank)
        config = folder / str(seed) / "adapter_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"lora_alpha": 1000}))
    return folder


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cuda_graph_max_bs": 0},
        {"speculate": "ngram"},
        {"max_prefill_length": 96, "overlap": False},
        {"max_loras": 1},
    ],
    ids=str,
)
def test_tokens_with_adapters_match_cpu(options: dict[str, Any], adapters: Path):
    """Of requests with each adapter and with none in one batch."""
    chosen = [None, *adapters_of(str(adapters))]
    params = [SamplingParams(temperature=0, max_tokens=40, adapter=chosen[i % 3]) for i in range(len(CHATS))]
    lora = {"lora": str(adapters)}
    on_cpu = LLM(device="cpu", dtype="float32", num_pages=2000, attention_backend="cpu", **lora)
    plain, want = texts(on_cpu, SamplingParams(temperature=0, max_tokens=40)), texts(on_cpu, params)
    assert [a == b for a, b in zip(plain, want, strict=True)] == [p.adapter is None for p in params]
    with engine(**lora, **options) as llm:
        for _ in range(2):
            assert texts(llm, params) == want


GREETING = Grammar("regex", "[A-Za-z ,.!?]{80,90}")
KINDS = [
    SamplingParams(temperature=0.0, max_tokens=48),
    SamplingParams(temperature=1.0, seed=1, max_tokens=48),
    SamplingParams(temperature=1.0, seed=2, top_k=20, top_p=0.9, max_tokens=48),
    SamplingParams(
        temperature=0.8, seed=3, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7, max_tokens=48
    ),
    SamplingParams(temperature=0.0, logit_bias=((70, 5.0), (2, 100.0)), min_tokens=40, max_tokens=48),
    SamplingParams(temperature=1.0, seed=4, top_p=0.8, grammar=GREETING, frequency_penalty=0.4, max_tokens=48),
    SamplingParams(temperature=0.7, seed=5, logprobs=4, max_tokens=48),
]
KIND_GROUPS = {
    "all": range(7),
    "plain": (0, 1),
    "filtered": (0, 2),
    "penalized": (1, 3, 4),
    "masked": (5,),
    "logprobs": (6,),
}


def by_kind(llm: LLM) -> dict[str, list[tuple[list[int], list[float]]]]:
    """Return the tokens and log-probabilities of the `KINDS`, together and in groups."""
    result = {}
    for name, group in KIND_GROUPS.items():
        chats = [[{"role": "user", "content": CHATS[i]}] for i in group]
        done = llm.chat(chats, [KINDS[i] for i in group])
        result[name] = [(c.token_ids, [t.logprob for t in c.logprobs or ()]) for c in done]
    return result


@contextmanager
def watched(llm: LLM) -> Iterator[set[tuple[str, int]]]:
    """Collect (runner, tail) of all steps that only decode."""
    watched_engine, seen = llm.scheduler.engine, set()
    launch = watched_engine.launch

    def watching(plan: BatchPlan) -> Any:
        flags = plan.sequences["flags"]
        if (flags & Flag.FROM_DEVICE).all():
            runner = next(r for r in watched_engine.runners if r.fits(plan))
            seen.add((runner.name, tail_of(int(np.bitwise_or.reduce(flags)))))
        return launch(plan)

    watched_engine.launch = watching
    yield seen
    del watched_engine.launch  # the method again


@pytest.fixture(scope="module")
def expected_kinds() -> list[dict[str, list[tuple[list[int], list[float]]]]]:
    """Return the results on the CPU, and on a GPU op by op."""
    want = by_kind(LLM(device="cpu", dtype="float32", num_pages=2000))
    with engine(cuda_graph_max_bs=0) as llm:
        return [want, by_kind(llm)]


@pytest.mark.parametrize(
    "options", [{}, {"overlap": False}, {"cuda_graph_max_bs": 3}, {"page_size": 128, "max_prefill_length": 96}], ids=str
)
def test_every_tail_is_captured_and_matches_cpu(
    options: dict[str, Any], expected_kinds: list[dict[str, list[tuple[list[int], list[float]]]]]
):
    with engine(**options) as llm, watched(llm) as seen:
        for _ in range(2):  # the second run reuses rows that had other kinds of requests
            got = by_kind(llm)
            for want in expected_kinds:
                for name in KIND_GROUPS:
                    for (tokens, logprobs), (their_tokens, theirs) in zip(got[name], want[name], strict=True):
                        assert tokens == their_tokens, name
                        assert logprobs == pytest.approx(theirs, abs=1e-3)
    captured = {("cuda graph", tail) for tail in TAILS}
    if options.get("cuda_graph_max_bs") == 3:
        assert seen > captured  # and larger steps by other runners
    else:
        assert seen == captured


def test_no_sampling_kernel_is_compiled_after_start(monkeypatch: pytest.MonkeyPatch):
    from triton import JITFunction, knobs

    from minisgl.kernels.triton import logprobs, penalties, sample, step, top_k_top_p

    modules, later = (penalties, top_k_top_p, logprobs, sample, step), set()
    for module in modules:  # as in a new process
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                kernel.device_caches.clear()

    def note(fn: Any, **_: Any) -> None:
        later.add((fn.module, fn.name))

    with engine() as llm:
        monkeypatch.setattr(knobs.runtime, "jit_cache_hook", note)
        by_kind(llm)
        monkeypatch.undo()
    assert not [name for module, name in later if module in {m.__name__ for m in modules}]


def test_plain_rows_keep_their_bits_beside_penalized_rows():
    """In bfloat16: the other rows are plain, then have penalties, biases and logprobs; the shapes are equal."""
    mates = [
        SamplingParams(temperature=1.0, seed=9, ignore_eos=True, max_tokens=64),
        SamplingParams(
            temperature=1.0,
            seed=9,
            ignore_eos=True,
            max_tokens=64,
            frequency_penalty=1.0,
            logit_bias=((9, 2.0),),
            logprobs=3,
        ),
    ]
    own = [
        SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=64),
        SamplingParams(temperature=1.0, seed=1, ignore_eos=True, max_tokens=64),
        SamplingParams(temperature=1.0, seed=2, ignore_eos=True, max_tokens=64, top_k=30, top_p=0.9),
    ]
    with engine(dtype="bfloat16", cache_type="naive") as llm:
        results = [texts(llm, [*own, mate, mate, mate, mate]) for mate in mates]
    assert results[0][:3] == results[1][:3]
    assert results[0][3:] != results[1][3:]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_are_close_to_cpu(dtype: str):
    """Relative error of a prompt's last logits: float32 1e-5 (measured on an H200: see docs), half precisions 2e-2."""
    ids = np.arange(40, 240, dtype=np.int32)
    plan = trial_plan([(0, 0, len(ids), Flag.SAMPLES)], ids, [(FULL, 0, i, i) for i in range(16)])
    logits = {}
    for device, number in (("cpu", "float32"), ("cuda", dtype)):
        config = EngineConfig(device=device, dtype=number, num_pages=20, page_size=16, cuda_graph_max_bs=0)
        e = Engine(resolve(config, device), create_device(device))
        logits[device] = e.general.logits_of(plan)[0].double().cpu()
    error = ((logits["cuda"] - logits["cpu"]).norm() / logits["cpu"].norm()).item()
    assert error < {"float32": 1e-5, "bfloat16": 2e-2, "float16": 3e-3}[dtype]
    print(f"\nrelative logit error in {dtype}: {error:.2e}")


def _model_with_windows(folder: Path, name: str) -> None:
    """The built-in model with a window in its last layers, or a random Gemma with its tokenizer."""
    shutil.copytree(BUILTIN_MODEL, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("head"))
    if name == "gemma3":
        pytest.importorskip("transformers")
        from contract.checkpoints import GEMMA, Gemma3TextConfig, save

        options = {"vocab_size": 4096, "max_position_embeddings": 4096, "num_key_value_heads": 1, "head_dim": 64}
        save(folder, Gemma3TextConfig(**{**GEMMA, **options}, sliding_window=100))
    else:
        config = json.loads((folder / "config.json").read_text())
        config |= {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 2}
        (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("options", [{}, {"cuda_graph_max_bs": 0, "max_prefill_length": 96}], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", ["built-in", "gemma3"])
def test_sliding_window_models_match_cpu(tmp_path: Path, name: str, options: dict[str, Any]):
    _model_with_windows(tmp_path, name)
    params = SamplingParams(temperature=0, max_tokens=40)
    greedy = texts(LLM(str(tmp_path), device="cpu", dtype="float32", num_pages=2000), params)
    with engine(model=str(tmp_path), **options) as llm:
        for _ in range(2):  # cold, then with a warm prefix cache
            assert texts(llm, params) == greedy
