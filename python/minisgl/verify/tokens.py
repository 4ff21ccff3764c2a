"""Greedy outputs of the whole engine, computed in two ways: the same tokens, or none that is clearly another."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch

from minisgl.engine.engine import Engine
from minisgl.engine.pooling import PoolingRunner
from minisgl.message import FlushCacheMsg
from minisgl.params import SamplingParams
from minisgl.verify.result import Result
from minisgl.verify.steps import Span, Stepper

if TYPE_CHECKING:
    from minisgl.llm.answers import Completion
    from minisgl.llm.llm import LLM

TOKENS: Final = 32
Gap = Callable[[list[int], int, int], float]

TIES: Final = {torch.float32: 2e-4, torch.float16: 6e-3, torch.bfloat16: 5e-2}
"""Of the largest logit: two ways of computing may each be off by half of this, so that the order of two logits that are
closer says nothing. float32: twice the limit of `logits.py`; bfloat16 was off by 0.01 to 0.025 on dense random models
(docs/models.md), and float16 has three bits more."""


def engine_of(llm: LLM) -> Engine:
    """The engine of a real scheduler, with what the scheduler need not know of it."""
    engine = llm.scheduler.engine
    assert isinstance(engine, Engine), "LLM makes real engines"
    return engine


def stepper_of(engine: Engine) -> Stepper:
    """Steps by the runner of the engine that can do any."""
    assert not isinstance(engine.general, PoolingRunner), "an embedding model gives no logits"
    return Stepper(engine.general, engine.num_pages)


def generate(llm: LLM, prompts: list[list[int]], *, flush: bool = True) -> list[Completion]:
    """TOKENS greedy tokens for each prompt, on an empty prefix cache unless told otherwise."""
    if flush:
        llm.scheduler.handle(FlushCacheMsg())
    return llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True))


def logit_gap(llm: LLM) -> Gap:
    """A function of (prefix, token, token): how far apart their logits are, relative to the largest logit."""

    def gap(prefix: list[int], one: int, other: int) -> float:
        llm.scheduler.handle(FlushCacheMsg())  # its pages are about to be overwritten
        engine = engine_of(llm)
        logits = stepper_of(engine).step([Span(0, 0, prefix)])[0].float()
        return float((logits[one] - logits[other]).abs() / logits.abs().max())

    return gap


def compare(
    name: str, prompts: list[list[int]], base: list[Completion], other: list[Completion], gap: Gap, tie: float
) -> Result:
    """Whether `other` has the tokens of `base`. Where a sequence first differs, the two must be nearly as likely: at
    most `tie` apart. What comes after is another text, and is not compared.
    """
    gaps = []
    for prompt, first, second in zip(prompts, base, other, strict=True):
        pairs = zip(first.token_ids, second.token_ids, strict=True)
        at = next((i for i, (one, two) in enumerate(pairs) if one != two), None)
        if at is not None:
            gaps.append(gap(prompt + first.token_ids[:at], first.token_ids[at], second.token_ids[at]))
    figure = f"{len(prompts) - len(gaps)} identical" + (f", else {max(gaps):.1e} apart" if gaps else "")
    compared = f"{len(prompts)} outputs"
    return Result(name, compared, figure, f"{tie:.0e} apart", max(gaps, default=0.0) <= tie)


@contextmanager
def other_overlap(llm: LLM) -> Iterator[None]:
    depth = llm.scheduler.depth
    llm.scheduler.depth = 1 - depth
    try:
        yield
    finally:
        llm.scheduler.depth = depth


@contextmanager
def eager(llm: LLM) -> Iterator[None]:
    engine = engine_of(llm)
    runners = engine.runners
    engine.runners = runners[-1:]
    try:
        yield
    finally:
        engine.runners = runners


def check_tokens(llm: LLM, prompts: list[list[int]], tie: float, others: dict[str, list[Completion]]) -> list[Result]:
    """The engine against itself, cached, with the other kind of overlap and without graphs, and against `others`."""
    gap = logit_gap(llm)
    base = generate(llm, prompts)
    again = generate(llm, prompts, flush=False)
    name = "cached = cold"
    if any(done.cached_tokens for done in again):
        results = [compare(name, prompts, base, again, gap, tie)]
    else:
        results = [Result(name, "-", "nothing was found in the cache (--cache naive?)", "-", None)]
    with other_overlap(llm):
        results.append(compare("overlap on = off", prompts, base, generate(llm, prompts), gap, tie))
    name = "graph = eager"
    if len(engine_of(llm).runners) > 1:
        with eager(llm):
            results.append(compare(name, prompts, base, generate(llm, prompts), gap, tie))
    else:
        results.append(Result(name, "-", "no graphs on this device or with these settings", "-", None))
    return results + [compare(name, prompts, base, outputs, gap, tie) for name, outputs in others.items()]
