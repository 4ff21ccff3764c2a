"""Traffic for a server: the patterns, and requests with lengths and arrival times from a seed or a trace."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from minisgl.core.errors import ConfigError
from minisgl.core.rounding import ceil_div
from minisgl.settings.options import Settings, option
from minisgl.tools.bench.shapes import SHAPE_HELP

if TYPE_CHECKING:
    from minisgl.core.params import Adapter

N = TypeVar("N", int, float)

ANY_LENGTH: Final = "1-1000000"
BLOCK: Final = 16  # tokens per hash id of the Qwen trace
# (mean, standard deviation) of token counts in ShareGPT's conversations, from NanoFlow (arXiv:2408.12757).
SHAREGPT_IN: Final = (246.0, 547.0)
SHAREGPT_OUT: Final = (322.0, 244.0)


@dataclass(frozen=True)
class Request:
    """One completion request, sent `at` seconds after the start, or as soon as a stream is free if None.

    Offline it may have an `adapter`.
    """

    prompt: list[int]
    output_len: int
    at: float | None = None
    adapter: Adapter | None = None


@dataclass(frozen=True)
class Range:
    """Lengths from `low` to `high` tokens, both included."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, flag: str) -> Range:
        """Parse "100-1024" or "128". Raises `ConfigError` for anything else."""
        low, dash, high = text.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise ConfigError(f"{flag} {text!r} is not a number of tokens or a range like 100-1024")
        lengths = cls(int(low), int(high) if dash else int(low))
        if not 1 <= lengths.low <= lengths.high:
            raise ConfigError(f"{flag} {text!r} must have lengths of 1 or more, the smaller one first")
        return lengths

    def draw(self, rng: random.Random) -> int:
        """Draw a uniform length."""
        return rng.randint(self.low, self.high)

    def clip(self, n: float) -> int:
        """Return the integer in this range that is nearest to `n`, rounded down."""
        return int(min(max(n, self.low), self.high))


@dataclass(frozen=True)
class LogNormal:
    """Log-normal lengths with this mean and standard deviation, clipped to `limits`."""

    mean: float
    deviation: float
    limits: Range

    def draw(self, rng: random.Random) -> int:
        # sigma^2 = ln(1 + (deviation / mean)^2) and mu = ln(mean) - sigma^2 / 2
        variance = math.log1p((self.deviation / self.mean) ** 2)
        return self.limits.clip(rng.lognormvariate(math.log(self.mean) - variance / 2, math.sqrt(variance)))


Lengths = Range | LogNormal

BACKGROUND: Final = (Range(128, 128), Range(1024, 1024))  # long outputs, so that a stream outlasts the burst


@dataclass(frozen=True)
class Pattern:
    """A traffic pattern and its defaults."""

    help: str
    num_requests: int | None
    inputs: str
    outputs: str
    rates: str = ""


PATTERNS: Final = {
    "closed": Pattern("N streams, each sends its next request after its last answer", 192, "100-1024", "100-512"),
    "poisson": Pattern("random arrivals at each of --rates", 192, "100-1024", "100-512", "1,2,4,8"),
    "burst": Pattern("all at once, while --background streams are running", 64, "1024", "32"),
    "sharegpt": Pattern("random arrivals, log-normal lengths as in ShareGPT", 192, "4-1024", "4-1024", "4"),
    "trace": Pattern("replay of a file in the Qwen-Bailian format (--trace)", None, ANY_LENGTH, ANY_LENGTH),
}


@dataclass(frozen=True, kw_only=True)
class OnlineArgs(Settings):
    """The options of `minisgl bench online`: the server, the requests, and the output."""

    url: str | None = option(None, "measure the server at http://host:port; --model is then the name in requests")
    shape: str | None = option(None, SHAPE_HELP)
    pattern: str = option(
        "closed",
        "; ".join(f"{name} = {pattern.help}" for name, pattern in PATTERNS.items()),
        choices=tuple(PATTERNS),
    )
    num_requests: int | None = option(None, "requests per point; default = the pattern's", minimum=1)
    input_len: str | None = option(None, "tokens per prompt, N or N-M; for sharegpt and trace these are limits")
    output_len: str | None = option(None, "tokens per output, N or N-M; for sharegpt and trace these are limits")
    streams: str = option("64", "concurrent streams of --pattern closed; a list (1,8,64) measures several points")
    rates: str = option("", "requests per second; a list (1,2,4) measures several points")
    background: int = option(0, "streams that are running when the burst arrives", minimum=0)
    trace: str | None = option(None, "JSONL file in the format of the Qwen-Bailian traces")
    speed: float = option(1.0, "replay the trace this many times as fast", above=0)
    temperature: float = option(0.0, "sampling temperature", minimum=0)
    vocab: int = option(4096, "prompts have token ids below this; all models have the default's", minimum=2)
    seed: int = option(0, "seed of prompts and arrivals; change it if the server has cached the last prompts")
    warm_up: int = option(4, "short requests before the measurement", minimum=0)
    timeout: float = option(600.0, "seconds after which a request counts as failed", above=0)
    text: bool = option(False, "send prompts as text, for servers that accept no token ids")
    ignore_eos: bool = option(True, "ask for outputs of exactly --output-len; turn off if the server refuses the field")
    json: str | None = option(None, "write the full report to this file")
    plot: str | None = option(None, "draw throughput and latency distributions in this folder (needs matplotlib)")

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that cannot work."""
        super().__post_init__()
        if (self.trace is None) == (self.pattern == "trace"):
            raise ConfigError("--pattern trace needs --trace FILE, and no other pattern takes one")
        if self.background and self.pattern != "burst":
            raise ConfigError("--background needs --pattern burst")
        if self.rates and not PATTERNS[self.pattern].rates:
            raise ConfigError(f"--rates has no meaning with --pattern {self.pattern}: leave it out")


@dataclass(frozen=True)
class Point:
    """One measurement. `offered` is the rate of arrivals, in requests per second."""

    label: str
    requests: list[Request]
    streams: int | None = None
    offered: float | None = None


def make_points(args: OnlineArgs) -> list[Point]:
    """Make the requests of each measurement. Points share no prompts.

    Raises `ConfigError` for invalid lengths, streams or rates, and for a trace that cannot be read.
    """
    pattern = PATTERNS[args.pattern]
    inputs = Range.parse(args.input_len or pattern.inputs, "--input-len")
    outputs = Range.parse(args.output_len or pattern.outputs, "--output-len")
    n, vocab = args.num_requests or pattern.num_requests, args.vocab
    if args.trace is not None:
        requests = trace_requests(args.trace, n, args.speed, inputs, outputs, vocab)
        span = max(r.at or 0.0 for r in requests)
        return [Point(f"x{args.speed:g}", requests, offered=len(requests) / span if span else None)]
    assert n is not None, "a pattern has no number of requests"
    if args.pattern == "closed":
        return [
            Point(f"{s} streams", random_requests(n, inputs, outputs, vocab, f"{args.seed} closed {s}"), streams=s)
            for s in _parse_positive(args.streams, int, "--streams")
        ]
    if args.pattern == "burst":
        return [Point(f"{n} at once", random_requests(n, inputs, outputs, vocab, f"{args.seed} burst"))]
    lengths: tuple[Lengths, Lengths] = inputs, outputs
    if args.pattern == "sharegpt":
        lengths = LogNormal(*SHAREGPT_IN, inputs), LogNormal(*SHAREGPT_OUT, outputs)
    return [
        Point(f"{rate:g}/s", random_requests(n, *lengths, vocab, f"{args.seed} {rate}", rate), offered=rate)
        for rate in _parse_positive(args.rates or pattern.rates, float, "--rates")
    ]


def _parse_positive(text: str, kind: type[N], flag: str) -> list[N]:
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not min(numbers) > 0:
        raise ConfigError(f"{flag} {text!r} is not a list of positive numbers like 1,2,4")
    return numbers


def random_prompt(rng: random.Random, length: int, vocab: int) -> list[int]:
    """Return `length` random token ids below `vocab`."""
    return rng.choices(range(vocab), k=length)


def random_requests(
    n: int, inputs: Lengths, outputs: Lengths, vocab: int, seed: str, rate: float | None = None
) -> list[Request]:
    """Return `n` requests with random lengths. With a `rate` (per second), arrivals are a Poisson process."""
    rng = random.Random(seed)
    times = poisson_times(rng, n, rate)
    return [Request(random_prompt(rng, inputs.draw(rng), vocab), outputs.draw(rng), at) for at in times]


def poisson_times(rng: random.Random, n: int, rate: float | None) -> Sequence[float | None]:
    """Return arrival times with exponential gaps of mean 1/`rate` seconds, from 0 on; all None without a rate."""
    if rate is None:
        return [None] * n
    gaps = [rng.expovariate(rate) for _ in range(n)]
    return list(itertools.accumulate(gaps, initial=0.0))[:n]


def trace_requests(
    path: str, limit: int | None, speed: float, inputs: Range, outputs: Range, vocab: int
) -> list[Request]:
    """Read the first `limit` requests of a file in the format of the Qwen-Bailian traces, `speed` times as fast.

    Each line is JSON with `timestamp` (seconds), `input_length`, `output_length` and `hash_ids`: one id per 16-token
    block of the prompt, equal ids for equal blocks. Lengths are clipped to the ranges. Raises `ConfigError` with the
    line number for a line that cannot be read.
    """
    rows = sorted(read_trace(path, limit), key=lambda row: row[0])
    zero = rows[0][0]
    return [
        Request(block_prompt(hash_ids, inputs.clip(input_len), vocab), outputs.clip(output_len), (at - zero) / speed)
        for at, input_len, output_len, hash_ids in rows
    ]


TraceRow = tuple[float, int, int, list[int]]
"""(timestamp, input length, output length, hash ids)."""


def read_trace(path: str, limit: int | None) -> list[TraceRow]:
    """Return the first `limit` rows of a trace. Raises `ConfigError` if the file or a line cannot be read."""
    rows: list[TraceRow] = []
    try:
        with Path(path).expanduser().open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(rows) == limit:
                    break
                if line.strip():
                    rows.append(_trace_row(line, f"{path} line {number}"))
    except OSError as e:
        raise ConfigError(f"cannot read the trace {path}: {e.strerror}") from e
    if not rows:
        raise ConfigError(f"the trace {path} has no requests")
    return rows


def _trace_row(line: str, where: str) -> TraceRow:
    try:
        row: dict[str, Any] = json.loads(line)
        at = float(row["timestamp"])
        n = int(row["input_length"])
        out = int(row["output_length"])
        hash_ids = [int(h) for h in row.get("hash_ids", ())]
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise ConfigError(
            f"{where} is not JSON with timestamp, input_length, output_length and hash_ids ({type(e).__name__}: {e})"
        ) from None
    if n < 1 or out < 0 or not math.isfinite(at):
        raise ConfigError(f"{where} has timestamp {at}, input_length {n}, output_length {out}")
    if len(hash_ids) * BLOCK < n:
        raise ConfigError(
            f"{where} has {len(hash_ids)} hash_ids, but {n} tokens are {ceil_div(n, BLOCK)} blocks of {BLOCK}"
        )
    return at, n, out, hash_ids


def block_prompt(hash_ids: list[int], length: int, vocab: int) -> list[int]:
    """Return a prompt whose blocks are equal if and only if their hash ids are equal."""
    prompt: list[int] = []
    for hash_id in hash_ids[: ceil_div(length, BLOCK)]:
        prompt += _block(hash_id, vocab)
    return prompt[:length]


def _block(hash_id: int, vocab: int) -> list[int]:
    # Half of the block is the id in base `vocab`, so different ids below vocab^8 have different blocks.
    block: list[int] = []
    rest = hash_id
    for _ in range(BLOCK // 2):
        rest, digit = divmod(rest, vocab)
        block.append(digit)
    return block + random_prompt(random.Random(hash_id), BLOCK - len(block), vocab)
