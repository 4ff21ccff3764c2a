"""`minisgl bench` end to end, tiny, with the built-in model."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from e2e.harness import ServerProcess
from minisgl.__main__ import main
from minisgl.core.layout import adapter_loads
from minisgl.core.params import folder_and_key
from minisgl.engine.adapters import AdapterPool
from minisgl.tools.bench.offline import offline_table
from minisgl.tools.bench.workloads import WORKLOADS

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
    words = " ".join(table.split())
    assert words.startswith("minisgl bench offline · ") and " · weights in float32 · " in words
    assert " ".join(report["machine"]["date"].split()) in words
    for row in ("workload batch64 single", "requests 3 3", "tokens in of each 24 24", "tokens out of each 20 20"):
        assert row in words


@pytest.mark.parametrize(("unused", "names"), [((), {"0", "1"}), (("--adapters-unused",), set())])
def test_offline_with_adapters(unused: tuple[str, ...], names: set[str], tmp_path: Path) -> None:
    """Requests use random adapters in turn, which are gone afterwards."""
    used: set[Path] = set()
    start = AdapterPool.start

    def spy(pool: AdapterPool, loads: Any) -> None:
        used.update(folder_and_key(source)[0] for _, source in adapter_loads(loads))
        start(pool, loads)

    adapters = ("--adapters", "2", "--adapter-rank", "4", *unused)
    with patch.object(AdapterPool, "start", spy):
        report = run(tmp_path / "report.json", "offline", "--workload", "batch64", *TINY, "--repeat", "1", *adapters)
    assert report["results"][0]["output_tokens"] == 60
    assert {folder.name for folder in used} == names and not any(folder.exists() for folder in used)


@pytest.mark.parametrize("quantization", ["int8", "fp8_block"])
def test_a_report_of_every_workload_fits_a_terminal(quantization: str) -> None:
    figures = dict.fromkeys(("wall_s", "output_tok_s", "input_tok_s", "total_tok_s", "ms_per_token"), 1234567.8)
    summary = {name: {"median": value, "min": value, "max": 2 * value} for name, value in figures.items()}
    result = {"requests": 1024, "headline": "wall_s", "summary": summary}
    result |= {"input_lens": {"min": 100, "max": 1024}, "output_lens": {"min": 256, "max": 256}}
    result |= {"repeats": [{"ttft_ms": {"p50": 123456.7, "p99": 123456.7}}] * 2}
    engine = {
        "architecture": "Qwen3MoeForCausalLM",
        "parameters": 3e10,
        "dtype": "bfloat16",
        "device": "cpu (64 threads)",
    }
    engine |= {"quantization": quantization, "attention": "cpu"}
    machine = {
        "cores": 128,
        "cpu": "AMD EPYC 7B13",
        "minisgl": "0.1.0",
        "commit": "0123abc-dirty",
        "date": "2026-01-01",
    }
    results = [result | {"workload": name} for name in WORKLOADS]
    shown = offline_table({"results": results, "engine": engine, "machine": machine, "engine_start_s": 1.0})
    assert max(map(len, shown.splitlines())) <= 80
    assert f"weights in {quantization}, the rest in bfloat16 · " in " ".join(shown.split())
    assert re.search("tokens in of each( +100-1,024){5}\ntokens out of each( +256){5}\n", shown)


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
