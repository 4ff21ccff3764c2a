"""The offline workloads: which prompts, and how many tokens each request generates. Random, but the same every time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from minisgl.errors import ConfigError

ID_RANGE: Final = 10_000  # prompts are made of ids 0 to this, as in the public benchmark
MIN_LEN: Final = 100  # shortest prompt and output of workload A
WARM_UP_OUT: Final = 16
WARM_UP_SHIFT: Final = 7


@dataclass(frozen=True)
class Item:
    """One request: token ids and the exact number of tokens to generate."""

    prompt: list[int]
    output_len: int


@dataclass(frozen=True)
class Size:
    """How many requests, and their lengths in tokens (for workload A the longest ones)."""

    num_prompts: int
    input_len: int
    output_len: int


@dataclass(frozen=True)
class Workload:
    """A named list of requests; `headline` is the figure that it is run for."""

    name: str
    headline: str
    items: list[Item]

    @property
    def prompt_tokens(self) -> int:
        return sum(len(item.prompt) for item in self.items)

    @property
    def output_tokens(self) -> int:
        return sum(item.output_len for item in self.items)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return max(len(item.prompt) + item.output_len for item in self.items)

    def warm_up(self, vocab_size: int) -> Workload:
        """The same batch sizes with other ids and short outputs, so that the prefix cache learns nothing useful."""
        items = [
            Item([(i + WARM_UP_SHIFT) % vocab_size for i in item.prompt], min(item.output_len, WARM_UP_OUT))
            for item in self.items
        ]
        return replace(self, items=items)

    def truncated(self, output_len: int) -> Workload:
        """The same prompts with at most `output_len` tokens each."""
        return replace(self, items=[Item(i.prompt, min(i.output_len, output_len)) for i in self.items])


def _random_ids(rng: random.Random, n: int, vocab_size: int) -> list[int]:
    # Drawn from the public range and folded into the vocabulary: all other draws, so all lengths, stay the same.
    return [rng.randint(0, ID_RANGE) % vocab_size for _ in range(n)]


def _public(size: Size, vocab_size: int) -> list[Item]:
    """The benchmark of nano-vllm and mini-sglang: first every prompt (its length, then its ids), then every output."""
    rng = random.Random(0)
    prompts = [
        _random_ids(rng, rng.randint(min(MIN_LEN, size.input_len), size.input_len), vocab_size)
        for _ in range(size.num_prompts)
    ]
    low = min(MIN_LEN, size.output_len)
    return [Item(prompt, rng.randint(low, size.output_len)) for prompt in prompts]


def _fixed(size: Size, vocab_size: int) -> list[Item]:
    rng = random.Random(0)
    prompts = [_random_ids(rng, size.input_len, vocab_size) for _ in range(size.num_prompts)]
    return [Item(prompt, size.output_len) for prompt in prompts]


def _shared(size: Size, vocab_size: int) -> list[Item]:
    """Seven eighths of each prompt are the same in all."""
    rng = random.Random(0)
    common = _random_ids(rng, size.input_len * 7 // 8, vocab_size)
    return [
        Item(common + _random_ids(rng, size.input_len - len(common), vocab_size), size.output_len)
        for _ in range(size.num_prompts)
    ]


@dataclass(frozen=True)
class Kind:
    """What a name stands for: `make` builds the requests, `size` is its size unless flags say otherwise."""

    make: Callable[[Size, int], list[Item]]
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


def make_workload(
    name: str,
    vocab_size: int,
    num_prompts: int | None = None,
    input_len: int | None = None,
    output_len: int | None = None,
) -> Workload:
    """The workload called `name`, its size as given or its own; raises `ConfigError` for what cannot be."""
    if name not in WORKLOADS:
        raise ConfigError(f"there is no workload {name!r}; known: {', '.join(WORKLOADS)}")
    given = {"num_prompts": num_prompts, "input_len": input_len, "output_len": output_len}
    for key, value in given.items():
        if value is not None and value < 1:
            raise ConfigError(f"--{key.replace('_', '-')} must be at least 1")
    kind = WORKLOADS[name]
    size = replace(kind.size, **{key: value for key, value in given.items() if value is not None})
    if kind.headline == "ms_per_token" and size.output_len < 2:
        raise ConfigError(f"workload {name} measures the time between tokens, so --output-len must be at least 2")
    return Workload(name, kind.headline, kind.make(size, vocab_size))
