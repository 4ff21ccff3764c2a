"""What the load generator sends, and when: requests with exact lengths, from a seed or from a trace file."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from minisgl.errors import ConfigError

BLOCK: Final = 16  # tokens per hash id of the Qwen trace
DEFAULT_VOCAB: Final = 4096  # every model has these ids; the built-in one has no more

# Tokens of ShareGPT's conversations as NanoFlow gives them (arXiv 2408.12757): (mean, standard deviation).
SHAREGPT_IN: Final = (246.0, 547.0)
SHAREGPT_OUT: Final = (322.0, 244.0)


@dataclass(frozen=True)
class Request:
    """One completion: `at` is when to send it in seconds from the start; None = when a stream is free."""

    prompt: list[int]
    output_len: int
    at: float | None = None


@dataclass(frozen=True)
class Range:
    """Lengths from `low` to `high` tokens."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str, flag: str) -> Range:
        """From "100-1024" or "128"; raises `ConfigError`."""
        low, dash, high = text.partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()):
            raise ConfigError(f"{flag} {text!r} is not a number of tokens or a range like 100-1024")
        lengths = cls(int(low), int(high) if dash else int(low))
        if not 1 <= lengths.low <= lengths.high:
            raise ConfigError(f"{flag} {text!r} must be 1 or more, the smaller number first")
        return lengths

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def clip(self, n: float) -> int:
        return int(min(max(n, self.low), self.high))


def random_prompt(rng: random.Random, length: int, vocab: int) -> list[int]:
    """`length` random token ids below `vocab`."""
    return rng.choices(range(vocab), k=length)


def uniform_requests(
    n: int, inputs: Range, outputs: Range, vocab: int, seed: str, rate: float | None = None
) -> list[Request]:
    """`n` requests with uniform lengths; with a `rate` (requests per second) they arrive as a Poisson process."""
    rng = random.Random(seed)
    times = poisson_times(rng, n, rate)
    return [Request(random_prompt(rng, inputs.draw(rng), vocab), outputs.draw(rng), at) for at in times]


def sharegpt_requests(n: int, inputs: Range, outputs: Range, vocab: int, seed: str, rate: float) -> list[Request]:
    """`n` requests with log-normal lengths of ShareGPT's mean and deviation, cut to the ranges; Poisson arrivals."""
    rng = random.Random(seed)
    times = poisson_times(rng, n, rate)
    return [
        Request(
            random_prompt(rng, inputs.clip(_log_normal(rng, *SHAREGPT_IN)), vocab),
            outputs.clip(_log_normal(rng, *SHAREGPT_OUT)),
            at,
        )
        for at in times
    ]


def poisson_times(rng: random.Random, n: int, rate: float | None) -> list[float | None]:
    """Arrival times with exponential gaps of mean 1/`rate` seconds, the first at 0; None each without a rate."""
    if rate is None:
        return [None] * n
    times: list[float | None] = []
    at = 0.0
    for _ in range(n):
        times.append(at)
        at += rng.expovariate(rate)
    return times


def _log_normal(rng: random.Random, mean: float, deviation: float) -> float:
    """sigma^2 = ln(1 + (deviation / mean)^2) and mu = ln(mean) - sigma^2 / 2 give this mean and deviation."""
    variance = math.log1p((deviation / mean) ** 2)
    return rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))


def trace_requests(
    path: str, limit: int | None, speed: float, inputs: Range, outputs: Range, vocab: int
) -> list[Request]:
    """The first `limit` requests of a file in the format of the Qwen-Bailian traces, `speed` times as fast.

    Lines are JSON with `timestamp` (seconds), `input_length`, `output_length` and `hash_ids`: one id for each 16-token
    block of the prompt, equal ids for equal blocks. Lengths are cut to the ranges. Raises `ConfigError` with the line
    that cannot be read.
    """
    rows = sorted(read_trace(path, limit), key=lambda row: row[0])
    zero = rows[0][0]
    return [
        Request(block_prompt(hash_ids, inputs.clip(input_len), vocab), outputs.clip(output_len), (at - zero) / speed)
        for at, input_len, output_len, hash_ids in rows
    ]


TraceRow = tuple[float, int, int, list[int]]


def read_trace(path: str, limit: int | None) -> list[TraceRow]:
    """(timestamp, input length, output length, hash ids) of the first `limit` lines; raises `ConfigError`."""
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
        at, n, out = float(row["timestamp"]), int(row["input_length"]), int(row["output_length"])
        hash_ids = [int(h) for h in row.get("hash_ids", ())]
    except (ValueError, TypeError, KeyError, AttributeError) as e:
        raise ConfigError(
            f"{where} is not JSON with timestamp, input_length, output_length and hash_ids ({type(e).__name__}: {e})"
        ) from None
    if n < 1 or out < 0 or not math.isfinite(at):
        raise ConfigError(f"{where} has timestamp {at}, input_length {n}, output_length {out}")
    if len(hash_ids) * BLOCK < n:
        raise ConfigError(
            f"{where} has {len(hash_ids)} hash_ids, but {n} tokens are {-(-n // BLOCK)} blocks of {BLOCK}"
        )
    return at, n, out, hash_ids


def block_prompt(hash_ids: list[int], length: int, vocab: int) -> list[int]:
    """A prompt whose blocks are functions of their ids alone: prompts share exactly the blocks whose ids they share."""
    prompt: list[int] = []
    for hash_id in hash_ids[: -(-length // BLOCK)]:
        prompt += _block(hash_id, vocab)
    return prompt[:length]


def _block(hash_id: int, vocab: int) -> list[int]:
    """Half of it are the id's digits to the base `vocab`, so that ids below vocab^8 never give the same block."""
    block: list[int] = []
    rest = hash_id
    for _ in range(BLOCK // 2):
        rest, digit = divmod(rest, vocab)
        block.append(digit)
    return block + random_prompt(random.Random(hash_id), BLOCK - len(block), vocab)
