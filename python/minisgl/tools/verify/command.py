"""`minisgl verify`: computes texts with transformers, then with our engine, and compares."""

from __future__ import annotations

import gc
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Final, TypeVar

import torch

from minisgl.core.errors import ConfigError
from minisgl.core.message import FlushCacheMsg
from minisgl.core.params import SamplingParams
from minisgl.device.create import create_device
from minisgl.engine.config import EngineSpec
from minisgl.engine.resolve import resolve
from minisgl.llm.llm import LLM
from minisgl.settings.options import SchedulerConfig, build_config
from minisgl.tokenizer.folder import load_tokenizer
from minisgl.tools.bench.report import format_table
from minisgl.tools.verify.checks import (
    EIGHT_BITS,
    ROUNDING_LIMITS,
    TIES,
    TOKENS,
    WAYS,
    Case,
    Result,
    Texts,
    check_logits,
    check_perplexity,
    check_rounding,
    check_tokens,
    generate,
    reading,
    reference,
)
from minisgl.tools.verify.steps import stepper_of
from minisgl.tools.verify.texts import check_texts

T = TypeVar("T")

ROWS: Final = 16
TEXTS: Final = (
    "The lighthouse keeper wrote down the weather every evening. On 3 March 1907 the wind came from the north-west, "
    "force 8, and two ships waited behind the island until morning. He counted 14 lamps, cleaned the lens, and noted "
    'that "the glass fell by 21 points in six hours". Nobody read his books until they were found in an attic. ',
    "def area(width: float, height: float) -> float:\n    return width * height\n\nprint(area(3.5, 2))  # 7.0\n"
    "A function like this one is easy to test: call it with a few numbers, and compare what it returns. ",
    "Zum Frühstück gab es Brot, Käse und Äpfel. Le marché ouvre à sept heures. Dos por dos son cuatro. "
    "What do these three sentences have in common? They are short, and each is in another language. ",
)

QUESTIONS: Final = (
    "Tell me a story about a lighthouse.",
    "Count from 3 to 20.",
    "What is 17 + 25?",
    "Repeat exactly: The wind came from the north-west, force 8.",
    "Say hello and ask how I am.",
    "Name three colors.",
)
WRITTEN: Final = 150  # tokens of an answer


def make_texts(spec: EngineSpec, length: int) -> Texts:
    """Tokenize the texts, the longest to `length` tokens. Raises `ConfigError` if `length` does not fit."""
    if length + TOKENS > spec.max_seq_len:
        raise ConfigError(
            f"--length {length} and {TOKENS} more do not fit into the context of {spec.max_seq_len} tokens"
        )
    shared = length * 3 // 4 // spec.page_size * spec.page_size
    if not shared:
        raise ConfigError(f"--length {length} is too short to share a page of {spec.page_size} tokens")
    tokenizer = load_tokenizer(spec.folder)
    ids: list[list[int]] = []
    for text, size in zip(TEXTS, (length, length // 4, length // 3), strict=True):
        encoded = tokenizer.encode(text).ids
        ids.append((encoded * (size // len(encoded) + 1))[:size])
    a, b, c = ids
    return Texts(a, b, c, shared)


def verify(options: dict[str, Any], length: int) -> list[Result]:
    """Run every check of the model in `options`. Raises `ConfigError` for settings that cannot work."""
    options = {"max_running_requests": ROWS, **options}
    requested = build_config(SchedulerConfig, options)
    if requested.engine.nnodes != 1:
        raise ConfigError("minisgl verify works on one host only: leave out --nnodes")
    one_rank = {**options, "tp": 1}
    config = build_config(SchedulerConfig, one_rank)
    if config.engine.dummy_weight:
        raise ConfigError("--dummy-weight has no checkpoint to verify: leave it out")
    if config.engine.max_running_requests < ROWS:
        raise ConfigError(f"minisgl verify needs --max-running-requests of {ROWS} or more")
    device = create_device(config.engine.device, config.engine.threads)
    spec = resolve(config.engine, device.type)
    if spec.model.quantization is not None:
        raise ConfigError("minisgl verify compares checkpoints in 16 or 32 bits only; this one is quantized")
    if spec.pooling is not None:
        raise ConfigError("an embedding model has no logits to verify")
    texts = make_texts(spec, length)
    prompts = [*texts.sequences, texts.c[:5], texts.b[:20]]
    # Only one model is in memory at a time: transformers', the one on several ranks, the unquantized one, and ours.
    ranks = requested.engine.tp
    others = {}
    if ranks > 1:
        others[f"tp {ranks} = tp 1"] = _compute_and_free(options, lambda llm: generate(llm, prompts))
    if config.engine.quantization is not None or config.engine.kv_cache_dtype != "auto":
        llm, results, worst = _compare_with_unrounded(one_rank, spec, texts)
    else:
        llm, results, worst = _compare_with_transformers(one_rank, spec, texts, device.torch_device)
    return results + check_tokens(llm, prompts, max(TIES[spec.dtype], 2 * worst), others)


def _compare_with_transformers(
    options: dict[str, Any], spec: EngineSpec, texts: Texts, device: torch.device
) -> tuple[LLM, list[Result], float]:
    """Return the engine, its comparison with transformers, and the largest error that passed."""
    if find_spec("transformers") is None:
        missing = "needs `pip install 'minisgl[verify]'`"
        return LLM(**options), [Result.skipped(f"{name} = transformers", missing) for name in ("texts", *WAYS)], 0.0
    exact = reference(spec.folder, texts.sequences, torch.float32, device)
    is_exact = spec.dtype is torch.float32
    theirs = None if is_exact else reference(spec.folder, texts.sequences, spec.dtype, device)
    llm, results = LLM(**options), check_texts(spec.folder)
    compared = [check_logits(name, way(stepper_of(llm), texts), exact, theirs) for name, way in WAYS.items()]
    return llm, results + [result for result, _ in compared], _largest(compared)


def _compare_with_unrounded(options: dict[str, Any], spec: EngineSpec, texts: Texts) -> tuple[LLM, list[Result], float]:
    """Return the engine, its comparison with an unquantized one in the same dtype, and the largest error that passed.

    The other engine quantizes neither weights nor K/V. Both read TEXTS, and what the other one answers to QUESTIONS:
    errors count where the model is used, and a small model knows little of other texts.
    """
    tokenizer = load_tokenizer(spec.folder)
    sequences = [tokenizer.encode(text).ids for text in TEXTS]

    def answered(llm: LLM) -> dict[str, list[Case]]:
        sequences.extend(_answers(llm))
        return cases_of(llm)

    def cases_of(llm: LLM) -> dict[str, list[Case]]:
        by_way = {name: way(stepper_of(llm), texts) for name, way in WAYS.items()}
        by_way["reading"] = reading(stepper_of(llm), sequences)
        return {name: [(prefix, logits.cpu()) for prefix, logits in cases] for name, cases in by_way.items()}

    unrounded = {"quantization": None, "kv_cache_dtype": "auto", "dtype": str(spec.dtype).split(".")[1]}
    plain = _compute_and_free(options | unrounded, answered)
    llm = LLM(**options)
    ours = cases_of(llm)
    divergence, growth = ROUNDING_LIMITS.get(spec.quantization or "", EIGHT_BITS)
    compared = [check_rounding(name, cases, plain[name], divergence) for name, cases in ours.items()]
    perplexity = check_perplexity(ours["reading"], plain["reading"], sequences, growth)
    return llm, [*(result for result, _ in compared), perplexity], _largest(compared)


def _largest(compared: list[tuple[Result, float]]) -> float:
    """Return the largest error of the checks that passed."""
    return max((error for result, error in compared if result.passed), default=0.0)


def _answers(llm: LLM) -> list[list[int]]:
    """Return prompts and sampled answers as token ids. A model without a chat template continues the questions."""
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=WRITTEN)
    if llm.tokenizer.template.sources:
        done = llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], params)
    else:
        done = llm.generate(list(QUESTIONS), params)
    llm.scheduler.handle(FlushCacheMsg())
    return [answer.prompt_token_ids + answer.token_ids for answer in done]


def _compute_and_free(options: dict[str, Any], compute: Callable[[LLM], T]) -> T:
    """Return what `compute` returns for an engine with `options`, and free the engine's memory."""
    with LLM(**options) as llm:
        result = compute(llm)
    del llm
    gc.collect()
    torch.cuda.empty_cache()  # without effect on a CPU
    return result


def verify_table(results: list[Result]) -> str:
    """Format the results as text."""
    words = {True: "pass", False: "FAIL", None: "skipped"}
    return format_table(
        ["check", "compared", "difference", "limit", ""],
        [[r.name, r.compared, r.figure, r.limit, words[r.passed]] for r in results],
    )
