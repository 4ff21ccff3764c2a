"""The ways to load a server: their settings, and the requests of each measurement."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from minisgl.bench.traffic import (
    DEFAULT_VOCAB,
    Range,
    Request,
    sharegpt_requests,
    trace_requests,
    uniform_requests,
)
from minisgl.errors import ConfigError

ANY_LENGTH: Final = "1-1000000"
BACKGROUND: Final = (Range(128, 128), Range(1024, 1024))  # long answers, so that a stream lasts as long as the burst


@dataclass(frozen=True)
class Pattern:
    """A way to send, and what it sends unless flags say otherwise."""

    help: str
    num_requests: int | None
    inputs: str
    outputs: str
    rates: tuple[float, ...] = ()


PATTERNS: Final = {
    "closed": Pattern("N streams, each sends its next request when it has its answer", 192, "100-1024", "100-512"),
    "poisson": Pattern("random arrivals at each of --rates", 192, "100-1024", "100-512", (1.0, 2.0, 4.0, 8.0)),
    "burst": Pattern("all at once, while --background streams are running", 64, "1024", "32"),
    "sharegpt": Pattern("random arrivals, log-normal lengths as in ShareGPT", 192, "4-1024", "4-1024", (4.0,)),
    "trace": Pattern("replay of a file in the Qwen-Bailian format (--trace)", None, ANY_LENGTH, ANY_LENGTH),
}


@dataclass(frozen=True, kw_only=True)
class OnlineSettings:
    """What to send. None means the pattern's own."""

    pattern: str = "closed"
    num_requests: int | None = None
    input_len: str | None = None
    output_len: str | None = None
    streams: tuple[int, ...] = (64,)
    rates: tuple[float, ...] = ()
    background: int = 0
    trace: str | None = None
    speed: float = 1.0
    temperature: float = 0.0
    vocab: int = DEFAULT_VOCAB
    seed: int = 0
    warm_up: int = 4
    timeout: float = 600.0
    text: bool = False
    ignore_eos: bool = True

    def __post_init__(self) -> None:
        """Raises `ConfigError` for a value that cannot work."""
        if self.pattern not in PATTERNS:
            raise ConfigError(f"there is no pattern {self.pattern!r}; known: {', '.join(PATTERNS)}")
        if (self.trace is None) == (self.pattern == "trace"):
            raise ConfigError("--pattern trace needs --trace FILE, and no other pattern takes one")
        if self.background and self.pattern != "burst":
            raise ConfigError("--background goes with --pattern burst")
        if self.rates and not PATTERNS[self.pattern].rates:
            raise ConfigError(f"--rates does not go with --pattern {self.pattern}")
        if self.num_requests is not None and self.num_requests < 1:
            raise ConfigError("--num-requests must be at least 1")
        if not self.streams or min(self.streams) < 1 or any(rate <= 0 for rate in self.rates):
            raise ConfigError("--streams and --rates must be positive")
        if self.background < 0 or self.warm_up < 0 or self.vocab < 2:
            raise ConfigError("--background and --warm-up must not be negative, and --vocab must be at least 2")
        if not self.speed > 0 or not self.timeout > 0:
            raise ConfigError("--speed and --timeout must be positive")

    @property
    def lengths(self) -> tuple[Range, Range]:
        """Of prompts and outputs; raises `ConfigError`."""
        own = PATTERNS[self.pattern]
        inputs = Range.parse(self.input_len or own.inputs, "--input-len")
        return inputs, Range.parse(self.output_len or own.outputs, "--output-len")


@dataclass(frozen=True)
class Point:
    """One measurement: `at` is its number of streams or its rate, `offered` the requests per second that it sends."""

    label: str
    requests: list[Request]
    streams: int | None = None
    offered: float | None = None


def make_points(settings: OnlineSettings) -> list[Point]:
    """Everything that will be sent, one point after the other. No two points share prompts, except in a trace."""
    inputs, outputs = settings.lengths
    own = PATTERNS[settings.pattern]
    n = settings.num_requests or own.num_requests
    vocab = settings.vocab
    if settings.pattern == "trace":
        assert settings.trace is not None
        requests = trace_requests(settings.trace, n, settings.speed, inputs, outputs, vocab)
        return [Point(f"x{settings.speed:g}", requests, offered=_rate_of(requests))]
    assert n is not None, "a pattern without a number of requests"
    if settings.pattern == "closed":
        return [
            Point(f"{s} streams", uniform_requests(n, inputs, outputs, vocab, f"{settings.seed} closed {s}"), streams=s)
            for s in settings.streams
        ]
    if settings.pattern == "burst":
        return [Point(f"{n} at once", uniform_requests(n, inputs, outputs, vocab, f"{settings.seed} burst"))]
    make = sharegpt_requests if settings.pattern == "sharegpt" else uniform_requests
    return [
        Point(f"{rate:g}/s", make(n, inputs, outputs, vocab, f"{settings.seed} {rate}", rate), offered=rate)
        for rate in settings.rates or own.rates
    ]


def _rate_of(requests: list[Request]) -> float | None:
    span = max(r.at or 0.0 for r in requests)
    return len(requests) / span if span else None
