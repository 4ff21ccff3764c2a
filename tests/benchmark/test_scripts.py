"""The scripts in benchmark/: each runs, and its figures are what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from minisgl.checkpoint.hf import weight_files
from minisgl.distributed.info import DistributedInfo
from minisgl.tools.bench.shapes import SHAPES

SCRIPTS = Path(__file__).parents[2] / "benchmark"
TINY_RUN = ("--num-prompts=3", "--input-len=24", "--output-len=20", "--num-pages=200", "--threads=1")
TINY: dict[str, Any] = SHAPES["qwen3-8b"] | {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts can be imported, also by processes that they start."""
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.fixture
def tiny_checkpoint(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    import checkpoint

    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 20_000)
    folder: Path = checkpoint.write_checkpoint("tiny", tmp_path)
    return folder


def test_a_written_shape_is_a_checkpoint(tiny_checkpoint: Path) -> None:
    import checkpoint

    files = weight_files(tiny_checkpoint)
    assert len(files) > 2 and all(file.stat().st_size <= 20_000 + 4096 for file in files)
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    sources = [source for parameter in checkpoint.build_parameters(TINY) for source in parameter.sources]
    assert {source.name: source.shape for source in sources} == {n: tuple(t.shape) for n, t in tensors.items()}
    assert tensors["model.norm.weight"].eq(1).all() and 0.01 < tensors["lm_head.weight"].float().std() < 0.03
    ranks = [checkpoint.build_parameters(TINY, info=DistributedInfo(rank, 2)) for rank in range(2)]
    assert sum(p.tensor.numel() for p in ranks[0]) < 0.7 * sum(t.numel() for t in tensors.values())


def test_loading_beside_plain_reads(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import loading

    path = tmp_path / "report.json"
    loading.main([str(tiny_checkpoint), "--tp=2", "--repeat=2", "--device=cpu", "--no-cold", "--json", str(path)])
    (result,) = json.loads(path.read_text())["results"]
    assert (result["tp"], result["cache"]) == (2, "warm") and result["seconds"]["min"] > 0 < result["gb_s"]
    assert result["ratio_percent"]["median"] > 0 and 0 < result["shard_bytes"] < result["bytes"]
    assert "plain read" in capsys.readouterr().out
    assert 0 <= loading.drop_cache([path]) <= 1


def test_host_work_of_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import host_steps

    path = tmp_path / "host.json"
    host_steps.main(["--workload=batch64", *TINY_RUN, "--steps=4", "--json", str(path)])
    host = json.loads(path.read_text())["results"]["batch64"]
    assert host["steps"] == 4 and host["rows"] == 3 and 0 < host["host"] < host["step"]
    assert "host work" in capsys.readouterr().out


def test_tiers_gain_or_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import tiers

    small = "--pool=320 --prefix=240 --conversations=3 --turns=2 --turn=60 --output=4 --streams=2 --stream-tokens=12"
    tiers.main([f"--disk-kv={tmp_path}/kv:40M", *small.split(), "--rounds=1"])
    lines = capsys.readouterr().out.splitlines()
    names = ("prefix", "streams", "conversations")
    assert [line[:21].rstrip() for line in lines[:6]] == [
        f"{name:13} {way}" for name in names for way in ("without", "with")
    ]
    assert "(224 tokens, 0.0" in lines[1] and "between tokens, at most" in lines[3]
    assert lines[6].startswith("no hits") and "x as long" in lines[6]
    assert lines[7] == "22 of 22 answers are equal"


@pytest.mark.parametrize(("is_async", "host"), [(True, 520), (False, 220)])
def test_host_work_excludes_the_model_and_waiting(is_async: bool, host: int) -> None:
    import host_steps

    parts = {"plan": 10, "launch": 500, "engine_launch": 300, "collect": 40, "wait": 30, "step": 560}
    assert tuple(parts) == host_steps.PARTS
    probe = host_steps.HostProbe(type("S", (), {"engine": type("E", (), {"is_async": is_async})}))
    probe.steady = [[4, *parts.values()]] * 12
    figures = probe.figures(2)
    assert (figures["host"], figures["steps"], figures["rows"]) == (host, 2, 4)


def test_the_cost_of_steps_with_drafts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import draft_steps

    monkeypatch.setitem(SHAPES, "tiny", TINY | {"max_position_embeddings": 256})
    monkeypatch.setattr(draft_steps, "STEPS", 3)
    monkeypatch.setattr(draft_steps, "REPEATS", 1)
    draft_steps.main(["--shape=tiny", "--rows", "1", "2", "--tokens", "0", "3", "--context=20"])
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2"]
    for line in lines:
        plain, *drafting = (float(ms) for ms in re.findall(r"(?:plain|tokens) ([\d.]+)", line))
        ratios = [float(x) for x in re.findall(r"([\d.]+) x", line)]
        assert plain > 0 and ratios == [pytest.approx(ms / plain, rel=0.1) for ms in drafting] and len(ratios) == 2


@pytest.mark.slow
def test_what_drafts_gain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import draft_streams

    monkeypatch.setitem(SHAPES, "tiny", TINY | {"max_position_embeddings": 128})
    sizes = ["--num-draft-tokens=2", "--batches", "1", "2", "--input-len=60", "--output-len=48", "--repeats=1"]
    draft_streams.main(["--shape=tiny", "--speculate=ngram", "--chances", "0.6", "1", *sizes])
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0].strip() for line in lines] == ["1", "2"]
    for line in lines:
        (some, tried), (right, drafted) = ((int(a), int(b)) for a, b in re.findall(r"x \((\d+) of (\d+)\)", line))
        assert some < tried and 0 < right == drafted  # where each token is followed by its successor, all are


@pytest.mark.slow
def test_the_cost_of_a_line_in_the_request_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import request_log

    monkeypatch.setattr(request_log, "KINDS", {name: request_log.KINDS[name] for name in ("off", "json")})
    monkeypatch.setattr(request_log, "TURNS", 1)
    request_log.main(["--requests=50"])
    rows = (line.replace(",", "").split() for line in capsys.readouterr().out.splitlines()[2:])
    figures = {name: list(map(float, cells)) for name, *cells in rows}
    (off, _), (json_log, more) = figures["off"], figures["json"]
    assert off > 0 < json_log and more == pytest.approx(json_log - off, abs=2)


def test_timeline_is_a_chrome_trace(tmp_path: Path) -> None:
    import timeline

    path = tmp_path / "trace.json"
    # The C++ step has no operators to show.
    timeline.main([str(path), "--workload=batch64", *TINY_RUN, "--attn=cpu"])
    assert len(json.loads(path.read_text())["traceEvents"]) > 100
    assert timeline.read_bars(path)


def test_timeline_shows_kernels_or_outermost_operators(tmp_path: Path) -> None:
    import timeline

    def bar(cat: str, ts: float, dur: float, name: str) -> dict[str, object]:
        return {"ph": "X", "cat": cat, "ts": ts, "dur": dur, "name": name, "pid": 1, "tid": 2}

    ops = [bar("cpu_op", 10, 5, "linear"), bar("cpu_op", 11, 2, "mm"), bar("cpu_op", 20, 1, "add"), {"ph": "M"}]
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": ops}))
    assert [b.name for b in timeline.read_bars(path)] == ["linear", "add"]
    path.write_text(json.dumps({"traceEvents": [*ops, bar("kernel", 12, 1, "gemm")]}))
    assert [(b.name, b.start) for b in timeline.read_bars(path)] == [("gemm", 0.0)]


@pytest.mark.slow
def test_events_from_byte_templates_are_cheaper_than_fastapis() -> None:
    import frontend

    times = frontend.measure_frontend(steps=250, repeats=1)
    assert min(times["fastapi"]) > 2 * min(times["minisgl"]), times  # 9.5 times on quiet cores, 5.4 on busy ones


def test_snapshots_find_what_pages_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same memory. A conversation computes at most 5 % more, as do prompts with one of some system prompts."""
    monkeypatch.syspath_prepend(str(SCRIPTS / "scheduler"))
    monkeypatch.setenv("MINISGL_CHECK", "0")
    from groups import MODELS, Server, conversations, rows_at_once, shared

    model = MODELS["gemma-3-27b"]
    traffic = [conversations(8, 3, 300, 16), conversations(48, 6, 300, 200), shared(32, 1000, 300, 400, True)]
    for run in traffic:
        servers = [Server(engine) for engine in (model.engine_of_full(), model.engine())]
        for server in servers:
            run(server)
        before, now = (server.scheduler.stats.computed_prompt_tokens for server in servers)
        assert now <= 1.05 * before
    small = model._replace(memory=model.memory // 8)
    assert rows_at_once(small.engine(), lambda rng: 8192) == 6


@pytest.mark.slow
def test_auto_never_costs_much_and_gains_where_drafts_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated with the times of an H200; always drafting is down to 0.66 there."""
    from draft_policy import COSTS, seconds

    monkeypatch.setenv("MINISGL_CHECK", "0")  # which takes as long as the simulation
    for costs in COSTS.values():
        for rows, texts in ((1, 8), (8, 2), (64, 1)):
            gains = [
                sum(seconds(costs, rows, chance, "off", seed) for seed in range(texts))
                / sum(seconds(costs, rows, chance, "auto", seed) for seed in range(texts))
                for chance in (0.1, 0.5, 0.9, 1)
            ]
            assert gains[0] > 0.97 and gains[1] > 0.96 and gains[2] > 1.15 and gains[3] > 2.7


@pytest.mark.slow
def test_replicas_scale_share_prefixes_and_survive(capsys: pytest.CaptureFixture[str]) -> None:
    import replicas

    sizes = "--requests=6 --longest=24 --prefixes=3 --prefix-len=160 --each=2 --clients=2 --streams=8 --stream-len=96"
    replicas.main([*sizes.split(), "--num-pages=256", "--dtype=float32"])
    table = capsys.readouterr().out.partition("requests")[2]
    names = re.findall(r"^(.+?) {2,}\d+ ", table, re.MULTILINE)
    assert [name.partition(",")[0] for name in names] == [
        "workload A",
        "prefixes",
        "workload A",
        "2 x workload A",
        "prefixes",
        "death of one of two replicas",
    ]
    assert "wrong length" not in table and "8 got all 96 tokens" in table and "8 of 8 texts are equal" in table
    assert float(re.findall(r"longest pause ([\d.]+) s", table)[0]) > 0
