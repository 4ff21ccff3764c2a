"""The checks of `minisgl verify`: our logits against a reference, and greedy tokens computed in two ways."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import torch

from minisgl.core.errors import ConfigError
from minisgl.core.message import FlushCacheMsg
from minisgl.core.params import SamplingParams
from minisgl.tools.verify.steps import Span, Stepper, engine_of, stepper_of

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from minisgl.llm.completions import Completion
    from minisgl.llm.llm import LLM

FLOAT32_LIMIT: Final = 1e-4
"""The largest error, relative to the largest logit. float32 rounds to 6e-8, which 15 random models amplified to 1e-6 to
4e-6 (docs/models.md); deeper models may amplify more. An error of 1 % in one projection of the built-in model gave 2e-3
to 5e-3."""

HALF_FACTOR: Final = 1.5
"""Our mean error, relative to that of transformers in the same dtype: both round as often, in another order. On 15
random models the ratio was 0.3 to 1.15 for every way of computing, over about ten prefixes (docs/models.md)."""

TIES: Final = {torch.float32: 2e-4, torch.float16: 6e-3, torch.bfloat16: 5e-2}
"""The gap, relative to the largest logit, below which two tokens tie: each way of computing may err by half of it.
float32 has twice FLOAT32_LIMIT. bfloat16 erred by 0.01 to 0.025 on dense random models (docs/models.md), and float16
has three more bits."""

ROUNDING_LIMITS: Final = {"int4": (0.05, 0.03)}
EIGHT_BITS: Final = (0.01, 0.005)
"""Limits of quantization: the mean KL divergence in nats, and the logarithm of the growth of the perplexity."""

FEW: Final = 100
SCATTER: Final = 3
"""The limit of a mean KL divergence over fewer than FEW logits is SCATTER times as large. With the built-in model, ten
logits gave 0.2 to 3 times the mean over 579."""

CHUNKS: Final = (33, 1, 16, 7, 50)
DECODED: Final = 16
PREFIXES: Final = 10
TOKENS: Final = 32
NO_PREFIX: Final = "no prefix was found in the cache (--cache naive?)"
NO_GRAPHS: Final = "no graphs on this device or with these settings"

Case = tuple[list[int], "Tensor"]
"""A prefix, and our logits [V] after it."""

Gap = Callable[[list[int], int, int], float]
"""The distance between the logits of two tokens after a prefix, relative to the largest logit."""


@dataclass(frozen=True, slots=True)
class Result:
    """One line of the table. `passed` is None if the check was skipped; then `figure` is the reason."""

    name: str
    compared: str
    figure: str
    limit: str
    passed: bool | None

    @classmethod
    def skipped(cls, name: str, reason: str) -> Result:
        return cls(name, "-", reason, "-", None)


@dataclass(frozen=True, slots=True)
class Texts:
    """Token ids of three texts, `a` the longest. `shared` is the length of the prefix of `a` that others share."""

    a: list[int]
    b: list[int]
    c: list[int]
    shared: int  # whole pages

    @property
    def joined(self) -> list[int]:
        """The shared prefix of `a`, followed by `b`."""
        return self.a[: self.shared] + self.b

    @property
    def sequences(self) -> list[list[int]]:
        """All sequences: every prefix in a `Case` is a prefix of one of these."""
        return [self.a, self.b, self.c, self.joined]


@dataclass(frozen=True, slots=True)
class Reference:
    """The logits of sequences, [length, V] float32 on the host, each computed as one prompt."""

    sequences: list[list[int]]
    logits: list[Tensor]

    def after(self, prefix: list[int]) -> Tensor:
        """Return the logits [V] float32 after `prefix`, which must be a prefix of one of the sequences."""
        index = next(i for i, s in enumerate(self.sequences) if s[: len(prefix)] == prefix)
        return self.logits[index][len(prefix) - 1]


@torch.inference_mode()
def reference(folder: Path, sequences: list[list[int]], dtype: torch.dtype, device: torch.device) -> Reference:
    """Compute the logits with transformers in `dtype`, then free the model.

    Raises `ConfigError` if transformers cannot load the checkpoint.
    """
    model = _load(folder, dtype).to(device).eval()
    logits = [model(torch.tensor([ids], device=device)).logits[0].float().cpu() for ids in sequences]
    del model
    gc.collect()
    torch.cuda.empty_cache()  # without effect on a CPU
    return Reference(sequences, logits)


def _load(folder: Path, dtype: torch.dtype) -> Any:
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        architectures = transformers.PreTrainedConfig.get_config_dict(folder)[0].get("architectures") or [""]
        # `AutoModelForCausalLM` does not know text parts (Mistral 4), and most multimodal models.
        model = getattr(transformers, architectures[0], transformers.AutoModelForCausalLM)
        # Load in `dtype`: converting the model later would also round its rotary frequencies.
        return model.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", local_files_only=True, use_safetensors=True
        )
    except Exception as e:  # any kind: an unknown architecture, a missing package, a broken file
        cause = str(e).strip().partition("\n")[0]
        raise ConfigError(f"transformers cannot load {folder} ({type(e).__name__}: {cause})") from e


def prefill(stepper: Stepper, t: Texts) -> list[Case]:
    """Compute whole prompts, one per step."""
    lengths = [max(1, len(t.a) * (i + 1) // PREFIXES) for i in range(PREFIXES)]
    return [(t.a[:n], stepper.step([Span(row, 0, t.a[:n])])[0]) for row, n in enumerate(lengths)]


def chunked(stepper: Stepper, t: Texts) -> list[Case]:
    """Compute one prompt in chunks of odd sizes."""
    cases: list[Case] = []
    start = 0
    for size in cycle(CHUNKS):
        if start >= len(t.a):
            break
        ids = t.a[start : start + size]
        start += len(ids)
        cases.append((t.a[:start], stepper.step([Span(0, start - len(ids), ids)])[0]))
    return cases


def decode(stepper: Stepper, t: Texts) -> list[Case]:
    """Compute the last DECODED tokens of a prompt one by one."""
    start = max(1, len(t.a) - DECODED)
    stepper.step([Span(0, 0, t.a[:start])])
    return [(t.a[: i + 1], stepper.step([Span(0, i, [t.a[i]])])[0]) for i in range(start, len(t.a))]


def prefix_hit(stepper: Stepper, t: Texts) -> list[Case]:
    """Compute prompts whose prefix is in pages of another sequence."""
    stepper.step([Span(0, 0, t.a)])
    cases: list[Case] = []
    for row in range(1, PREFIXES + 1):
        n = max(1, len(t.b) * row // PREFIXES)
        stepper.share_prefix(0, row, t.shared)
        cases.append((t.joined[: t.shared + n], stepper.step([Span(row, t.shared, t.b[:n])])[0]))
    return cases


def mixed(stepper: Stepper, t: Texts) -> list[Case]:
    """Run a step with a decoding sequence, a whole prompt, a first and a last chunk; then decode two sequences."""
    a = len(t.a) // 2
    b = max(1, len(t.b) - 4)
    c = len(t.c) // 2
    stepper.step([Span(0, 0, t.a[:a]), Span(1, 0, t.c[:c], samples=False)])
    steps = [[Span(0, a, [t.a[a]]), Span(2, 0, t.b[:b]), Span(3, 0, t.a[:a], samples=False), Span(1, c, t.c[c:])]]
    steps += [[Span(2, i, [t.b[i]]), Span(0, a + 1 + n, [t.a[a + 1 + n]])] for n, i in enumerate(range(b, len(t.b)))]
    texts = {0: t.a, 1: t.c, 2: t.b}
    cases: list[Case] = []
    for spans in steps:
        sampled = [span for span in spans if span.samples]
        cases += zip((texts[s.row][: s.stop] for s in sampled), stepper.step(spans), strict=True)
    return cases


def reading(stepper: Stepper, sequences: list[list[int]]) -> list[Case]:
    """Compute every proper prefix of all sequences, token by token in one batch."""
    cases: list[Case] = []
    for i in range(max(map(len, sequences)) - 1):
        spans = [Span(row, i, [ids[i]]) for row, ids in enumerate(sequences) if i + 1 < len(ids)]
        cases += zip((sequences[s.row][: s.stop] for s in spans), stepper.step(spans), strict=True)
    return cases


WAYS: Final[dict[str, Callable[[Stepper, Texts], list[Case]]]] = {
    "prefill": prefill,
    "chunked prefill": chunked,
    "decode": decode,
    "prefix hit": prefix_hit,
    "mixed batch": mixed,
}


def relative_errors(logits: Tensor, want: Tensor) -> Tensor:
    """Return the largest difference in each row of [N, V], relative to the row's largest expected logit."""
    return (logits.float() - want).abs().amax(-1) / want.abs().amax(-1)


def check_logits(name: str, cases: list[Case], exact: Reference, theirs: Reference | None) -> tuple[Result, float]:
    """Compare our logits with `exact`, transformers' in float32. Return the result and our largest error.

    Without `theirs` our dtype is float32, and the limit of every error is FLOAT32_LIMIT. Otherwise `theirs` are
    transformers' logits in our dtype, and the limit of our mean error is HALF_FACTOR times theirs.
    """
    prefixes = [prefix for prefix, _ in cases]
    want = torch.stack([exact.after(prefix) for prefix in prefixes])
    ours = relative_errors(torch.stack([logits.cpu() for _, logits in cases]), want)
    worst = float(ours.max())
    if theirs is None:
        figure, limit = worst, FLOAT32_LIMIT
    else:
        their_logits = torch.stack([theirs.after(prefix) for prefix in prefixes])
        figure, limit = float(ours.mean()), HALF_FACTOR * float(relative_errors(their_logits, want).mean())
    name = f"{name} = transformers"
    return Result(name, f"{len(cases)} logits", f"{figure:.1e}", f"{limit:.1e}", figure <= limit), worst


def check_rounding(name: str, ours: list[Case], plain: list[Case], limit: float) -> tuple[Result, float]:
    """Compare logits with those of an unquantized engine. Return the result, and the largest error."""
    rounded, want = (torch.stack([logits.float().cpu() for _, logits in cases]) for cases in (ours, plain))
    p, q = want.double().log_softmax(-1), rounded.double().log_softmax(-1)
    figure = float((p.exp() * (p - q)).sum(-1).mean())
    limit *= SCATTER if len(ours) < FEW else 1
    result = Result(f"{name} ~ unrounded", f"{len(ours)} logits", f"KL {figure:.1e}", f"{limit:.1e}", figure <= limit)
    return result, float(relative_errors(rounded, want).max())


def check_perplexity(ours: list[Case], plain: list[Case], sequences: list[list[int]], limit: float) -> Result:
    """Compare the perplexity of `sequences`; the cases have all their proper prefixes.

    The growth over so few tokens is uncertain, so the check fails only if it exceeds the limit by two standard errors.
    """
    tokens = [next(s[len(x)] for s in sequences if s[: len(x)] == x and len(s) > len(x)) for x, _ in ours]
    losses = [
        torch.stack([-logits.double().cpu().log_softmax(-1)[t] for (_, logits), t in zip(cases, tokens, strict=True)])
        for cases in (ours, plain)
    ]
    growth = losses[0] - losses[1]
    mean, error = float(growth.mean()), 2 * float(growth.std()) / len(tokens) ** 0.5
    figure = f"{100 * math.expm1(mean):+.2f} % (+-{100 * error:.2f})"
    return Result(
        "perplexity ~ unrounded", f"{len(tokens)} tokens", figure, f"{100 * limit:+.2f} %", mean - error <= limit
    )


def generate(llm: LLM, prompts: list[list[int]], *, flush: bool = True) -> list[Completion]:
    """Generate TOKENS greedy tokens for each prompt, with an empty prefix cache unless `flush` is false."""
    if flush:
        llm.scheduler.handle(FlushCacheMsg())
    return llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True))


def logit_gap(llm: LLM) -> Gap:
    """Return a `Gap` that the engine of `llm` computes."""

    def gap(prefix: list[int], one: int, other: int) -> float:
        llm.scheduler.handle(FlushCacheMsg())  # the step overwrites cached pages
        logits = stepper_of(llm).step([Span(0, 0, prefix)])[0].float()
        return float((logits[one] - logits[other]).abs() / logits.abs().max())

    return gap


def compare(
    name: str, prompts: list[list[int]], base: list[Completion], other: list[Completion], gap: Gap, tie: float
) -> Result:
    """Compare the tokens of `other` with those of `base`.

    Where two outputs first differ, the logits of their tokens may be at most `tie` apart. What follows is another text
    and is not compared.
    """
    gaps = []
    for prompt, first, second in zip(prompts, base, other, strict=True):
        pairs = enumerate(zip(first.token_ids, second.token_ids, strict=True))
        index = next((i for i, (one, two) in pairs if one != two), None)
        if index is not None:
            gaps.append(gap(prompt + first.token_ids[:index], first.token_ids[index], second.token_ids[index]))
    figure = f"{len(prompts) - len(gaps)} identical" + (f", else {max(gaps):.1e} apart" if gaps else "")
    return Result(name, f"{len(prompts)} outputs", figure, f"{tie:.0e} apart", max(gaps, default=0.0) <= tie)


def check_tokens(llm: LLM, prompts: list[list[int]], tie: float, others: dict[str, list[Completion]]) -> list[Result]:
    """Compare the engine's outputs with those of a filled cache, other overlap, no drafts, no graphs, and `others`."""
    gap, engine, scheduler = logit_gap(llm), engine_of(llm), llm.scheduler
    base = generate(llm, prompts)
    again = generate(llm, prompts, flush=False)
    found = any(done.num_cached_tokens for done in again)
    outputs: dict[str, list[Completion] | str] = {"cached = cold": again if found else NO_PREFIX}
    for name, owner, attribute, value, skipped in (
        ("overlap on = off", scheduler, "depth", 1 - scheduler.depth, ""),
        ("drafts = none", scheduler, "drafts", None, "" if scheduler.drafts else "give --speculate"),
        ("graph = eager", engine, "runners", engine.runners[-1:], "" if engine.runners[1:] else NO_GRAPHS),
    ):
        with patch.object(owner, attribute, value):
            outputs[name] = skipped or generate(llm, prompts)
    return [
        Result.skipped(name, done) if isinstance(done, str) else compare(name, prompts, base, done, gap, tie)
        for name, done in (outputs | others).items()
    ]
