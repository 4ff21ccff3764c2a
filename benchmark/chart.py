"""Draw the bar chart of docs/performance.md and print its table, both from docs/figures.json.

    python benchmark/chart.py                              # print the table
    python benchmark/chart.py docs/images/performance.svg  # draw the chart; needs matplotlib (pip install '.[bench]')

A figure is a list of measured values: one run, or the lowest and the highest of several. The chart shows each engine's
best run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parents[1] / "docs" / "figures.json"
COLOURS = {"minisgl": "#0b7285", "vLLM": "#ced4da", "SGLang": "#adb5bd", "mini-sglang": "#868e96"}


def best_run(row: dict[str, Any], engine: str) -> float:
    return (max if row["higher_is_better"] else min)(row[engine])


def table(figures: dict[str, Any]) -> list[str]:
    """Return the lines of the Markdown table: a row for each figure, the best engine in bold."""
    engines = figures["engines"]
    lines = [f"| | unit | {' | '.join(engines)} | minisgl / best other | command |", "|---" * (len(engines) + 4) + "|"]
    for row in figures["rows"]:
        measured = {engine: best_run(row, engine) for engine in engines if engine in row}
        best = (max if row["higher_is_better"] else min)(measured, key=lambda engine: measured[engine])
        cells = [f"**{_span(row[e])}**" if e == best else _span(row.get(e, [])) for e in engines]
        command = row["command"] if row["command"] == "the same" else f"`{row['command']}`"
        cells = [row["name"], row["unit"], *cells, f"{speedup(row, engines):.2f}", command]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def speedup(row: dict[str, Any], engines: list[str]) -> float:
    """Compare the best runs of minisgl and of the best other engine: above 1, minisgl is faster."""
    others = [best_run(row, engine) for engine in engines if engine != "minisgl" and engine in row]
    own = best_run(row, "minisgl")
    return own / max(others) if row["higher_is_better"] else min(others) / own


def _span(values: list[float]) -> str:
    return " to ".join(f"{value:,}" for value in values)


def draw(figures: dict[str, Any], path: Path) -> None:
    """Draw a small chart for each row marked `chart`. Latencies become rates, so the longest bar is always the best."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "minisgl"  # the same file for the same figures
    from matplotlib import pyplot

    rows = [row for row in figures["rows"] if row["chart"]]
    figure, axes = pyplot.subplots((len(rows) + 1) // 2, 2, figsize=(10, 1.35 * ((len(rows) + 1) // 2) + 0.5))
    for axis, row in zip(axes.flat, rows, strict=False):
        engines = [engine for engine in figures["engines"] if engine in row]
        rates = [best_run(row, e) if row["higher_is_better"] else 1000 / best_run(row, e) for e in engines]
        bars = axis.barh(engines, rates, color=[COLOURS[engine] for engine in engines], height=0.78)
        axis.bar_label(bars, labels=[f"{rate:,.0f}" for rate in rates], padding=4, fontsize=9)
        axis.set_title(f"{row['name']}: {row['unit'] if row['higher_is_better'] else 'tok/s'}", fontsize=10, loc="left")
        axis.set_xlim(0, max(rates) * 1.15)
        axis.invert_yaxis()
        axis.tick_params(left=False, bottom=False, labelbottom=False, labelsize=9)
        axis.get_yticklabels()[0].set_fontweight("bold")
        for side in axis.spines.values():
            side.set_visible(False)
    figure.suptitle(f"Tokens per second on {figures['machine']}, bf16", fontsize=12, fontweight="bold")
    figure.tight_layout(h_pad=1.2, w_pad=2)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, facecolor="white")


if __name__ == "__main__":
    data = json.loads(FIGURES.read_text())
    if len(sys.argv) > 1:
        draw(data, Path(sys.argv[1]))
    else:
        print("\n".join(table(data)))
