"""`minisgl bench` end to end, tiny, with the built-in model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import ServerProcess
from minisgl.__main__ import main

TINY = ("--num-prompts=3", "--input-len=24", "--output-len=20", "--num-pages=200", "--threads=1")


def run(path: Path, *argv: str) -> dict[str, Any]:
    assert main(["bench", *argv, "--json", str(path)]) == 0
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def test_offline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = run(
        tmp_path / "report.json",
        *("offline", "--workload", "batch64,single", *TINY, "--repeat", "2"),
    )
    assert [r["workload"] for r in report["results"]] == ["batch64", "single"]
    for r in report["results"]:
        assert (r["requests"], r["prompt_tokens"], r["output_tokens"]) == (3, 72, 60)
        assert len(r["repeats"]) == 2 and all(repeat["cached_tokens"] == 0 for repeat in r["repeats"])
        assert r["summary"]["output_tok_s"]["median"] > 0 and r["summary"]["ms_per_token"]["median"] > 0
        assert r["repeats"][0]["ttft_ms"]["p50"] > 0 and r["repeats"][0]["steps"] >= 20
    assert report["engine"]["kv_pages"] == 200 and report["engine_start_s"] > 0
    table = capsys.readouterr().out
    assert "batch64" in table and "TTFT p50 ms" in table
    assert table.startswith("minisgl bench offline · ") and report["machine"]["date"] in table.splitlines()[1]


def test_online(server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ("online", "--url", server.url, "--input-len", "16-32")
    closed = run(tmp_path / "closed.json", *common, "--streams", "2,3", "--num-requests", "6", "--output-len", "4-8")
    assert [r["label"] for r in closed["results"]] == ["2 streams", "3 streams"]
    for r in closed["results"]:
        assert (r["requests"], r["completed"], r["errors"], r["wrong_length"]) == (6, 6, 0, 0)
        assert 24 <= r["output_tokens"] <= 48 and r["cached_tokens"] == 0
        assert 0 < r["ttft_ms"]["p50"] <= r["ttft_ms"]["p99"] <= r["e2e_ms"]["p99"]
    burst = run(
        tmp_path / "burst.json",
        *(*common, "--pattern", "burst", "--background", "2", "--num-requests", "5", "--output-len", "6"),
    )
    (r,) = burst["results"]
    assert (r["completed"], r["errors"], r["wrong_length"], r["output_tokens"]) == (5, 0, 0, 30)
    assert r["background"]["requests"] >= 2 and r["background"]["tokens"] > 0
    assert r["late_ms"]["p99"] is not None and r["itl_ms"]["p99"] > 0
    assert burst["model"] == closed["model"] == "minisgl-demo"
    table = capsys.readouterr().out
    assert "ITL" in table and "minisgl bench online · minisgl-demo · closed · times in ms\n" in table
    assert f"{server.url}, clients on {closed['machine']['cores']} x " in table and closed["machine"]["date"] in table


def test_failed_requests_are_counted_and_bad_input_is_one_line(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    argv = ["bench", "online", "--url", server.url, "--num-requests", "2", "--vocab", "90000", "--json", str(path)]
    assert main(argv) == 1
    assert json.loads(path.read_text())["results"][0]["errors"] == 2
    capsys.readouterr()
    for argv in (
        ["online", "--pattern", "trace"],
        ["online", "--url", server.url, "--page-size", "8"],
        ["online", "--streams", "x"],
        ["offline", "--workload", "a", "--input-len", "5000"],
        ["offline", "--repeat", "0"],
        ["offline", "--json", "/nowhere/x.json"],
    ):
        assert main(["bench", *argv]) == 2, argv
        error = capsys.readouterr().err
        assert error.startswith("minisgl: ") and error.count("\n") == 1, error
