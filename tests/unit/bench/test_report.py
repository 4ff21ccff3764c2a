"""Figures and options of `minisgl bench`: percentiles, tables, times of tokens, and the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pytest

from minisgl.core.errors import ConfigError
from minisgl.core.message import DetokenizeMsg
from minisgl.settings.sources import parse_args
from minisgl.tools.bench.command import add_offline, bench_args
from minisgl.tools.bench.offline import TokenClock
from minisgl.tools.bench.online import server_flags
from minisgl.tools.bench.report import format_table, percentiles_ms, spread, write_json
from minisgl.tools.bench.workloads import OfflineArgs


def test_percentiles() -> None:
    values = list(range(101))
    assert percentiles_ms(values) == {"p50": 50e3, "p90": 90e3, "p99": 99e3, "mean": 50e3}
    assert percentiles_ms([1.0, 2.0])["p50"] == 1500.0
    assert percentiles_ms([]) == {"p50": None, "p90": None, "p99": None, "mean": None}
    assert spread([3.0, 1.0, 2.0]) == {"median": 2.0, "min": 1.0, "max": 3.0}


def test_table_and_json(tmp_path: Path) -> None:
    table = format_table(["name", "x"], [["a", 1234567.8], ["bcdef", None], ["c", 0.123456]])
    assert table.splitlines() == ["name           x", "a      1,234,568", "bcdef          -", "c         0.1235"]
    with pytest.raises(ConfigError, match="cannot write"):
        write_json(str(tmp_path), {})


def test_latencies_of_tokens() -> None:
    clock = TokenClock()
    for at, uids in [(1.0, [5, 6]), (2.0, [6]), (4.0, [6, 5])]:
        clock.record(DetokenizeMsg(uids=np.array(uids, "<i8").tobytes(), tokens=b"", started=[], finished=[]))
        clock._times[-1] = at
    figures = clock.figures(start=0.5)
    assert figures["steps"] == 3 and figures["ttft_ms"]["p50"] == 500.0
    assert figures["itl_ms"]["mean"] == 2000.0  # gaps 3, 1, 2
    assert figures["ms_per_token"] == 2250.0  # the median of 3 and 1.5


def test_server_flags_set_the_same_options() -> None:
    flags = ["--page-size=8", "--no-overlap", "--dummy-weight", "--model=/x y", "--port=0"]
    args = parse_args(flags)
    options = {"page_size": 8, "overlap": False, "dummy_weight": True, "model": "/x y", "port": 0}
    assert server_flags(options) == ["--page-size=8", "--no-overlap", "--dummy-weight", "--model=/x y", "--port=0"]
    assert parse_args(server_flags(options)) == args


def test_settings_come_from_the_command_line() -> None:
    parser = argparse.ArgumentParser()
    add_offline(parser)
    assert bench_args(OfflineArgs, parser.parse_args([])) == OfflineArgs()
    given = parser.parse_args(["--workload", "a,single", "--input-len", "5", "--temperature", "1"])
    assert bench_args(OfflineArgs, given) == OfflineArgs(workload="a,single", input_len=5, temperature=1.0)
    with pytest.raises(ConfigError, match="--repeat 0 must be at least 1"):
        bench_args(OfflineArgs, parser.parse_args(["--repeat", "0"]))
