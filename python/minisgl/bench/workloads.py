"""Offline workloads: random prompts and output lengths, the same in every run."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from minisgl.bench.shapes import SHAPE_HELP
from minisgl.bench.traffic import Request
from minisgl.errors import ConfigError
from minisgl.settings.options import Settings, option

ID_RANGE: Final = 10_000  # prompts are made of ids 0 to this, as in the public benchmark
MIN_LEN: Final = 100  # shortest prompt and output of workload A
WARM_UP_OUT: Final = 16
WARM_UP_SHIFT: Final = 7


@dataclass(frozen=True)
class Size:
    """The number of requests and their lengths in tokens (for workload A the longest lengths)."""

    num_prompts: int
    input_len: int
    output_len: int


@dataclass(frozen=True)
class Workload:
    """A named list of requests; `headline` names the figure that the workload measures."""

    name: str
    headline: str
    requests: list[Request]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(r.prompt) for r in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(r.output_len for r in self.requests)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return max(len(r.prompt) + r.output_len for r in self.requests)

    def warm_up(self, vocab_size: int) -> Workload:
        """The same batch sizes with other token ids, so that the prefix cache does not help, and short outputs."""
        requests = [
            Request([(i + WARM_UP_SHIFT) % vocab_size for i in r.prompt], min(r.output_len, WARM_UP_OUT))
            for r in self.requests
        ]
        return replace(self, requests=requests)


def _random_ids(rng: random.Random, n: int, vocab_size: int) -> list[int]:
    # Drawn from the public range and folded into the vocabulary: later draws, so all lengths, stay the same.
    return [rng.randint(0, ID_RANGE) % vocab_size for _ in range(n)]


def _public(size: Size, vocab_size: int) -> list[Request]:
    """The benchmark of nano-vllm and mini-sglang: first every prompt (its length, then its ids), then every output."""
    rng = random.Random(0)
    low = min(MIN_LEN, size.input_len)
    prompts = [_random_ids(rng, rng.randint(low, size.input_len), vocab_size) for _ in range(size.num_prompts)]
    low = min(MIN_LEN, size.output_len)
    return [Request(prompt, rng.randint(low, size.output_len)) for prompt in prompts]


def _fixed(size: Size, vocab_size: int, common_len: int = 0) -> list[Request]:
    """Requests of one size, whose prompts begin with the same `common_len` tokens."""
    rng = random.Random(0)
    common = _random_ids(rng, common_len, vocab_size)
    return [
        Request(common + _random_ids(rng, size.input_len - common_len, vocab_size), size.output_len)
        for _ in range(size.num_prompts)
    ]


def _shared(size: Size, vocab_size: int) -> list[Request]:
    """Prompts with a common prefix of seven eighths of their length."""
    return _fixed(size, vocab_size, size.input_len * 7 // 8)


@dataclass(frozen=True)
class Kind:
    """How to make a workload: `size` holds unless flags say otherwise."""

    make: Callable[[Size, int], list[Request]]
    size: Size
    headline: str
    help: str


WORKLOADS: Final[dict[str, Kind]] = {
    "a": Kind(_public, Size(256, 1024, 1024), "output_tok_s", "256 requests, 100-1,024 tokens in, 100-1,024 out"),
    "batch64": Kind(_fixed, Size(64, 128, 256), "output_tok_s", "64 x (128 in, 256 out)"),
    "single": Kind(_fixed, Size(1, 128, 256), "ms_per_token", "1 x (128 in, 256 out): decode time per token"),
    "prefill": Kind(_fixed, Size(16, 1024, 1), "input_tok_s", "16 x (1,024 in, 1 out): input tokens per second"),
    "shared": Kind(_shared, Size(128, 1024, 64), "total_tok_s", "128 x (1,024 in, 896 of them common, 64 out)"),
}


@dataclass(frozen=True, kw_only=True)
class OfflineArgs(Settings):
    """The requests and what to do with the results."""

    shape: str | None = option(None, SHAPE_HELP)
    workload: str = option(
        "a", "comma-separated: " + "; ".join(f"{name} = {kind.help}" for name, kind in WORKLOADS.items())
    )
    num_prompts: int | None = option(None, "requests; default = the workload's", minimum=1)
    input_len: int | None = option(None, "tokens of a prompt, for workload a the maximum", minimum=1)
    output_len: int | None = option(None, "tokens of an output, for workload a the maximum", minimum=1)
    temperature: float = option(0.6, "sampling temperature", minimum=0, maximum=100)
    accept_length: float | None = option(
        None,
        "tokens of a request in a step, on average: drafts come from the answers of a first run, with mistakes; "
        "at most --num-draft-tokens + 1",
        minimum=1,
    )
    repeat: int = option(3, "timed runs of each workload", minimum=1)
    json: str | None = option(None, "write everything measured to this file")


def make_workloads(args: OfflineArgs, vocab_size: int) -> list[Workload]:
    """The requests of each workload, with token ids below `vocab_size`; raises `ConfigError` for an impossible one."""
    workloads = []
    for name in args.workload.split(","):
        if name not in WORKLOADS:
            raise ConfigError(f"there is no workload {name!r}; known: {', '.join(WORKLOADS)}")
        kind = WORKLOADS[name]
        size = Size(
            args.num_prompts or kind.size.num_prompts,
            args.input_len or kind.size.input_len,
            args.output_len or kind.size.output_len,
        )
        if kind.headline == "ms_per_token" and size.output_len < 2:
            raise ConfigError(f"workload {name} measures the time between tokens, so --output-len must be at least 2")
        workloads.append(Workload(name, kind.headline, kind.make(size, vocab_size)))
    return workloads
