"""Pictures of results. matplotlib is an extra (`pip install 'minisgl[bench]'`) and is imported when first needed."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from minisgl.bench.report import Numbers
from minisgl.errors import ConfigError

TOP_KERNELS: Final = 9  # kernels with a colour and a name of their own


class Bar(NamedTuple):
    """One kernel: seconds from the beginning of the trace; bars of one lane do not overlap."""

    lane: str
    start: float
    duration: float
    name: str


def require_matplotlib() -> None:
    """Raises `ConfigError` when no picture can be drawn."""
    _new_figure(1, 1)


def _new_figure(width: float, height: float) -> Any:
    try:
        figure = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'minisgl[bench]'") from None
    return figure.Figure(figsize=(width, height), layout="constrained")  # no pyplot: no global state, no display


def plot_rates(points: list[tuple[float, float, float | None]], label: str, path: Path) -> None:
    """Throughput and median TTFT over the load that `label` names: (load, output tok/s, TTFT p50 in ms)."""
    figure = _new_figure(7, 4)
    axes = figure.subplots()
    rates = [rate for rate, _, _ in points]
    axes.plot(rates, [tokens for _, tokens, _ in points], "o-", color="tab:blue")
    axes.set(xlabel=label, ylabel="output tokens per second", ylim=(0, None))
    right = axes.twinx()
    right.plot(rates, [np.nan if ttft is None else ttft for _, _, ttft in points], "s--", color="tab:red")
    right.set(ylim=(0, None))
    right.set_ylabel("TTFT p50, ms (dashed)", color="tab:red")
    figure.savefig(path, dpi=120)


def plot_distribution(series: dict[str, Numbers], label: str, path: Path) -> None:
    """Share of values below x, for each named series of seconds; the tail is what matters, so x is logarithmic."""
    figure = _new_figure(7, 4)
    axes = figure.subplots()
    for name, values in series.items():
        x = np.sort(np.asarray(values, np.float64)) * 1e3
        if len(x):
            axes.plot(np.maximum(x, 1e-2), np.arange(1, len(x) + 1) / len(x), label=name)
    axes.set(xscale="log", xlabel=f"{label}, ms", ylabel="share below", ylim=(0, 1.01))
    for level in (0.5, 0.99):
        axes.axhline(level, color="0.8", linewidth=0.8)
    if axes.lines:
        axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)


def plot_timeline(bars: list[Bar], path: Path) -> None:
    """Kernels over time, a row a stream, the longest ones by colour."""
    lanes = sorted({bar.lane for bar in bars})
    figure = _new_figure(14, 2.5 + 0.6 * len(lanes))
    axes = figure.subplots()
    total: dict[str, float] = {}
    for bar in bars:
        total[bar.name] = total.get(bar.name, 0.0) + bar.duration
    names = sorted(total, key=lambda name: -total[name])[:TOP_KERNELS]
    for i, name in enumerate([*names, None]):
        shown = [bar for bar in bars if (bar.name == name if name else bar.name not in names)]
        if not shown:
            continue
        color = f"C{i}" if name else "0.7"
        text = "others" if name is None else f"{name[:60]} ({1e3 * total[name]:.2f} ms)"
        for lane in lanes:
            spans = [(1e3 * b.start, 1e3 * b.duration) for b in shown if b.lane == lane]
            axes.broken_barh(spans, (lanes.index(lane) - 0.4, 0.8), color=color, label=text)
            text = "_"  # one entry in the legend
    axes.set(xlabel="ms", yticks=range(len(lanes)), yticklabels=lanes)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), fontsize="x-small", ncols=2)
    figure.savefig(path, dpi=120)
