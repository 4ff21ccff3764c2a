"""Events from byte templates are what makes the API process fast: a quick look that it stays so."""

from __future__ import annotations

from minisgl.bench.frontend_speed import frontend_table, measure_frontend


def test_events_are_at_least_four_times_as_cheap_as_fastapis() -> None:
    report = measure_frontend(steps=250, repeats=1)
    assert report["speedup"]["fastapi"] > 4, report
    assert report["speedup"]["pydantic"] > 1.2, report
    assert len(frontend_table(report).splitlines()) == 4
