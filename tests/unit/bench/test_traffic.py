"""Traffic: lengths, arrival times, and prompts with the shared prefixes of a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl.core.errors import ConfigError
from minisgl.tools.bench.traffic import (
    BLOCK,
    SHAREGPT_IN,
    SHAREGPT_OUT,
    LogNormal,
    OnlineArgs,
    Range,
    block_prompt,
    make_points,
    random_requests,
    read_trace,
    trace_requests,
)

ANY = Range(1, 10**6)


def line(at: float, n: int, out: int, hash_ids: list[int]) -> dict[str, Any]:
    head = {"chat_id": int(at), "parent_chat_id": -1, "timestamp": at, "type": "text", "turn": 1}
    return head | {"input_length": n, "output_length": out, "hash_ids": hash_ids}


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def shared(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_trace_prompts_share_the_blocks_of_equal_hash_ids(tmp_path: Path) -> None:
    rows = [
        line(7.0, 40, 5, [1, 2, 3]),
        line(8.5, 64, 6, [1, 2, 4, 5]),
        line(9.0, 48, 7, [9, 2, 3]),
        line(9.0, 38, 0, [1, 2, 3]),
    ]
    a, b, c, d = trace_requests(write(tmp_path / "t", rows), None, 2.0, ANY, ANY, 4096)
    assert [len(r.prompt) for r in (a, b, c, d)] == [40, 64, 48, 38]
    assert [r.output_len for r in (a, b, c, d)] == [5, 6, 7, 1]
    assert [r.at for r in (a, b, c, d)] == [0.0, 0.75, 1.0, 1.0]
    assert shared(a.prompt, b.prompt) == 2 * BLOCK
    assert shared(a.prompt, c.prompt) == 0 and a.prompt[BLOCK : 2 * BLOCK] == c.prompt[BLOCK : 2 * BLOCK]
    assert d.prompt == a.prompt[:38]
    assert len(trace_requests(str(tmp_path / "t"), 2, 1.0, ANY, ANY, 4096)) == 2
    cut = trace_requests(str(tmp_path / "t"), None, 1.0, Range(1, 20), ANY, 4096)
    assert [len(r.prompt) for r in cut] == [20] * 4 and cut[0].prompt == a.prompt[:20]


@pytest.mark.parametrize("vocab", [3, 10, 4096])
def test_blocks_of_different_ids_differ(vocab: int) -> None:
    blocks = {tuple(block_prompt([i], BLOCK, vocab)) for i in range(3000)}
    assert len(blocks) == 3000 and max(max(b) for b in blocks) < vocab


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no requests"),
        ("{", "line 1 is not JSON with timestamp"),
        ("[1]", "line 1 is not JSON with"),
        (json.dumps({"timestamp": 1}), "KeyError: 'input_length'"),
        (json.dumps(line(0, 33, 1, [1, 2])), "2 hash_ids, but 33 tokens are 3 blocks"),
        (json.dumps(line(0, 0, 1, [])), "input_length 0"),
    ],
)
def test_broken_traces_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_trace(str(tmp_path / "t"), None)


def test_lengths_and_arrivals() -> None:
    requests = random_requests(2000, Range(100, 1024), Range(100, 512), 50, "x", rate=10.0)
    assert {len(r.prompt) for r in requests} <= set(range(100, 1025))
    assert max(r.output_len for r in requests) == 512 and max(max(r.prompt) for r in requests) < 50
    times = [r.at or 0.0 for r in requests]
    assert times == sorted(times) and times[0] == 0 and times[-1] == pytest.approx(200, rel=0.1)
    assert random_requests(3, ANY, ANY, 50, "x")[0].at is None
    assert requests == random_requests(2000, Range(100, 1024), Range(100, 512), 50, "x", rate=10.0)


def test_sharegpt_lengths_have_the_published_means() -> None:
    requests = random_requests(4000, LogNormal(*SHAREGPT_IN, ANY), LogNormal(*SHAREGPT_OUT, ANY), 50, "x", rate=1.0)
    inputs, outputs = [len(r.prompt) for r in requests], [r.output_len for r in requests]
    assert sum(inputs) / 4000 == pytest.approx(246, rel=0.1) and sum(outputs) / 4000 == pytest.approx(322, rel=0.1)
    assert sorted(inputs)[2000] == pytest.approx(101, rel=0.1)  # the median of a skewed distribution is far below


def test_points_share_no_prompts() -> None:
    settings = OnlineArgs(pattern="poisson", rates="1,2", num_requests=5, input_len="20-30", output_len="4")
    one, two = make_points(settings)
    assert (one.label, one.offered, two.label, two.offered) == ("1/s", 1.0, "2/s", 2.0)
    assert not any(shared(a.prompt, b.prompt) > 4 for a in one.requests for b in two.requests)
    closed = make_points(OnlineArgs(streams="1,64"))
    assert [(p.streams, len(p.requests)) for p in closed] == [(1, 192), (64, 192)]
    (burst,) = make_points(OnlineArgs(pattern="burst"))
    assert {(len(r.prompt), r.output_len) for r in burst.requests} == {(1024, 32)} and len(burst.requests) == 64


@pytest.mark.parametrize(
    "given",
    [
        {"pattern": "x"},
        {"pattern": "trace"},
        {"trace": "file"},
        {"background": 2},
        {"rates": "1"},
        {"pattern": "poisson", "rates": "0"},
        {"streams": "x"},
        {"num_requests": 0},
        {"speed": 0.0},
        {"vocab": 1},
    ],
)
def test_bad_settings_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        make_points(OnlineArgs(**given))


@pytest.mark.parametrize("text", ["", "a", "5-", "9-3", "0", "-4", "1-2-3"])
def test_bad_ranges_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--input-len"):
        Range.parse(text, "--input-len")
