"""Offline workloads: random prompts and lengths, the same in every run."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TYPE_CHECKING, Final

from minisgl.core.errors import ConfigError
from minisgl.settings.options import Settings, option
from minisgl.tools.bench.shapes import SHAPE_HELP
from minisgl.tools.bench.traffic import Request

if TYPE_CHECKING:
    from minisgl.core.params import Adapter

ID_RANGE: Final = 10_000  # the largest token id of a prompt, as in the public benchmark
MIN_LEN: Final = 100  # shortest prompt and output of workload A
WARM_UP_OUT: Final = 16
WARM_UP_SHIFT: Final = 7


@dataclass(frozen=True)
class Size:
    """The number of requests and their lengths in tokens; for workload A, the largest lengths."""

    num_prompts: int
    input_len: int
    output_len: int


@dataclass(frozen=True)
class Workload:
    """A named list of requests. `headline` names the figure that the workload measures."""

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
        """The number of tokens of the longest request, prompt and output together."""
        return max(len(r.prompt) + r.output_len for r in self.requests)

    def warm_up(self, vocab_size: int) -> Workload:
        """Return the same batch sizes with short outputs, and with other token ids, so that no prefix is cached."""
        requests = [
            replace(
                r,
                prompt=[(i + WARM_UP_SHIFT) % vocab_size for i in r.prompt],
                output_len=min(r.output_len, WARM_UP_OUT),
            )
            for r in self.requests
        ]
        return replace(self, requests=requests)

    def with_adapters(self, adapters: Sequence[Adapter]) -> Workload:
        """Return the workload whose requests use the adapters in turn."""
        return replace(
            self, requests=[replace(r, adapter=a) for r, a in zip(self.requests, cycle(adapters), strict=False)]
        )


def _random_ids(rng: random.Random, n: int, vocab_size: int) -> list[int]:
    # Draw from the public range and fold into the vocabulary: so later draws, such as lengths, do not depend on it.
    return [rng.randint(0, ID_RANGE) % vocab_size for _ in range(n)]


def _public(size: Size, vocab_size: int) -> list[Request]:
    """Make the benchmark of nano-vllm and mini-sglang: draw all prompts (length, then ids), then all output lengths."""
    rng = random.Random(0)
    low = min(MIN_LEN, size.input_len)
    prompts = [_random_ids(rng, rng.randint(low, size.input_len), vocab_size) for _ in range(size.num_prompts)]
    low = min(MIN_LEN, size.output_len)
    return [Request(prompt, rng.randint(low, size.output_len)) for prompt in prompts]


def _fixed(size: Size, vocab_size: int, common_len: int = 0) -> list[Request]:
    """Make requests of one size, whose prompts share a prefix of `common_len` tokens."""
    rng = random.Random(0)
    common = _random_ids(rng, common_len, vocab_size)
    return [
        Request(common + _random_ids(rng, size.input_len - common_len, vocab_size), size.output_len)
        for _ in range(size.num_prompts)
    ]


def _shared(size: Size, vocab_size: int) -> list[Request]:
    """Make prompts that share seven eighths of their length."""
    return _fixed(size, vocab_size, size.input_len * 7 // 8)


@dataclass(frozen=True)
class Kind:
    """How to make a workload. Flags override `size`."""

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
    """The options of `minisgl bench offline`: the requests and the output."""

    shape: str | None = option(None, SHAPE_HELP)
    workload: str = option(
        "a", "comma-separated: " + "; ".join(f"{name} = {kind.help}" for name, kind in WORKLOADS.items())
    )
    num_prompts: int | None = option(None, "requests; default = the workload's", minimum=1)
    input_len: int | None = option(None, "tokens per prompt; for workload a, the largest number", minimum=1)
    output_len: int | None = option(None, "tokens per output; for workload a, the largest number", minimum=1)
    temperature: float = option(0.6, "sampling temperature", minimum=0, maximum=100)
    accept_length: float | None = option(
        None,
        "simulate drafts with which a step confirms this many tokens per request on average; at most "
        "--num-draft-tokens + 1",
        minimum=1,
    )
    adapters: int | None = option(None, "make so many random adapters, which the requests use in turn", minimum=1)
    adapter_rank: int = option(16, "their rank", minimum=1)
    adapters_unused: bool = option(False, "load the adapters, or those of --lora, but use none")
    repeat: int = option(3, "timed runs of each workload", minimum=1)
    json: str | None = option(None, "write the full report to this file")


def make_workloads(args: OfflineArgs, vocab_size: int) -> list[Workload]:
    """Make the requests of each workload, with token ids below `vocab_size`. Raises `ConfigError` for invalid ones."""
    workloads = []
    for name in args.workload.split(","):
        if name not in WORKLOADS:
            raise ConfigError(f"--workload {name!r} is unknown; known: {', '.join(WORKLOADS)}")
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
