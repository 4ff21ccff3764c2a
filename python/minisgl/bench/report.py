"""Numbers -> percentiles, tables and JSON, and what machine and code they came from. Imports no torch."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from minisgl.errors import ConfigError
from minisgl.launch.environment import cpu_name

Numbers = Sequence[float] | npt.NDArray[np.float64]


def percentile(values: Numbers, q: float) -> float | None:
    """The `q`-th percentile (linear between neighbours); None of nothing."""
    return float(np.percentile(values, q)) if len(values) else None


def percentiles(values: Numbers, qs: Sequence[int] = (50, 90, 99), scale: float = 1.0) -> dict[str, float | None]:
    """{"p50": ...} of `values` times `scale`, with their mean."""
    scaled = np.asarray(values, np.float64) * scale
    return {f"p{q}": percentile(scaled, q) for q in qs} | {"mean": float(scaled.mean()) if len(scaled) else None}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and extremes of repeated measurements."""
    return {"median": float(np.median(values)), "min": min(values), "max": max(values)}


def spread_percent(values: dict[str, float]) -> float:
    """How far the repeats lie apart, in percent of their median."""
    return 100 * (values["max"] - values["min"]) / values["median"]


def shown(value: Any) -> str:
    """A table cell: four significant digits or all integer ones; a dash for None."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def format_table(headers: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Aligned columns; the first to the left, the others to the right."""
    cells = [list(headers), *([shown(value) for value in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = []
    for row in cells:
        first, *rest = (
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *rest]).rstrip())
    return "\n".join(lines)


def check_writable(path: str | None, flag: str) -> None:
    """Raises `ConfigError` before the minutes of measuring, not after, when `path` has no folder to be written in."""
    if path is not None and not Path(path).expanduser().absolute().parent.is_dir():
        raise ConfigError(f"{flag} {path}: the folder {Path(path).parent} does not exist")


def write_json(path: str, value: dict[str, Any]) -> None:
    """`value` in `path`; raises `ConfigError` when it cannot be written. NaN is our bug, not a value."""
    text = json.dumps(value, indent=2, allow_nan=False, default=str)
    try:
        Path(path).expanduser().write_text(text + "\n")
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror}") from e


def provenance() -> dict[str, Any]:
    """What ran where: command, commit, versions, processor."""
    import minisgl

    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "minisgl": minisgl.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
    }


def _commit() -> str | None:
    """The checkout's commit, with -dirty when files differ from it; None for an installed package."""
    folder = Path(__file__).resolve().parent
    git = ["git", "-C", str(folder)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", "../__main__.py"], check=True, capture_output=True)
        command = [*git, "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
