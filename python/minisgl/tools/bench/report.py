"""Percentiles, tables, plots and JSON of a report, and the facts of machine and code. Imports no torch.

matplotlib is an extra (`pip install 'minisgl[bench]'`) and is imported when first needed.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl.core.errors import ConfigError
from minisgl.device.machine import cpu_name


def percentiles_ms(seconds: Sequence[float] | npt.NDArray[np.float64]) -> dict[str, float | None]:
    """Return p50, p90, p99 (with linear interpolation) and mean in milliseconds; None without values."""
    if not len(seconds):
        return dict.fromkeys(("p50", "p90", "p99", "mean"))
    ms = np.asarray(seconds, np.float64) * 1e3
    p50, p90, p99 = np.percentile(ms, (50, 90, 99)).tolist()
    return {"p50": p50, "p90": p90, "p99": p99, "mean": float(ms.mean())}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, minimum and maximum of repeated measurements."""
    return {"median": float(np.median(values)), "min": min(values), "max": max(values)}


def spread_percent(values: dict[str, float]) -> float:
    """Return the difference between maximum and minimum in percent of the median."""
    return 100 * (values["max"] - values["min"]) / values["median"]


def shown(value: Any) -> str:
    """Format a table cell: floats with four significant digits, None as a dash."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def format_table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table with aligned columns: the first one flush left, the others flush right."""
    cells = [list(headers), *([shown(value) for value in row] for row in rows)]
    first, *others = (max(map(len, column)) for column in zip(*cells, strict=True))
    return "\n".join("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]).rstrip() for row in cells)


def check_writable(path: str | None, flag: str) -> None:
    """Raise `ConfigError` if the folder of `path` does not exist: better now than after the measurement."""
    if path is not None and not Path(path).expanduser().absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: the folder {Path(path).parent} does not exist")


def write_json(path: str | None, value: dict[str, Any]) -> None:
    """Write `value` to `path`, if given. Raises `ConfigError` if that fails, and `ValueError` for NaN (our bug)."""
    if path is None:
        return
    text = json.dumps(value, indent=2, allow_nan=False, default=str)
    try:
        Path(path).expanduser().write_text(text + "\n")
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror}") from e


def provenance() -> dict[str, Any]:
    """Return the command, commit, versions and CPU of this run."""
    import minisgl

    return {
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "minisgl": minisgl.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
    }


def origin(machine: dict[str, Any]) -> str:
    """Return one line that says where and when a report was measured, from its `provenance`."""
    gpus = machine.get("gpus")
    device = f"{len(gpus)} x {gpus[0]}" if gpus else f"{machine['cores']} x {machine['cpu']}"
    return f"{device} · minisgl {machine['minisgl']} ({machine['commit'] or 'installed'}) · {machine['date']}"


def _commit() -> str | None:
    """Return the checkout's commit, with -dirty if files differ from it; None for an installed package."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", "../__main__.py"], check=True, capture_output=True)
        command = [*git, "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def new_figure(width: float = 7, height: float = 4, title: str = "") -> Any:
    """Return a matplotlib figure of this size in inches, with only a title. Raises `ConfigError` without matplotlib."""
    try:
        figure = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'minisgl[bench]'") from None
    new = figure.Figure(figsize=(width, height), layout="constrained")  # no pyplot: no global state, no display
    new.suptitle(title, fontsize="small")
    return new


def plot_throughput(points: list[tuple[float, float, float | None]], label: str, title: str, path: Path) -> None:
    """Plot throughput and median TTFT over load, from points (load, output tok/s, TTFT p50 in ms).

    `label` names the load.
    """
    figure = new_figure(title=title)
    axes = figure.subplots()
    loads = [load for load, _, _ in points]
    axes.plot(loads, [tokens for _, tokens, _ in points], "o-", color="tab:blue")
    axes.set(xlabel=label, ylabel="output tokens per second", ylim=(0, None))
    right = axes.twinx()
    right.plot(loads, [np.nan if ttft is None else ttft for _, _, ttft in points], "s--", color="tab:red")
    right.set(ylim=(0, None))
    right.set_ylabel("TTFT p50, ms (dashed)", color="tab:red")
    figure.savefig(path, dpi=120)


def plot_distribution(series: dict[str, list[float]], label: str, title: str, path: Path) -> None:
    """Plot the cumulative distribution of each named series of seconds, on a logarithmic axis that shows the tail."""
    figure = new_figure(title=title)
    axes = figure.subplots()
    for name, values in series.items():
        x = np.sort(np.asarray(values, np.float64)) * 1e3
        if len(x):
            axes.plot(np.maximum(x, 1e-2), np.arange(1, len(x) + 1) / len(x), label=name)
    axes.set(xscale="log", xlabel=f"{label}, ms", ylabel="fraction below", ylim=(0, 1.01))
    for level in (0.5, 0.99):
        axes.axhline(level, color="0.8", linewidth=0.8)
    if axes.lines:
        axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
