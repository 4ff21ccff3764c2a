"""The loading benchmark: what it writes is a checkpoint, its ranks' shards are the whole, its figures are measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minisgl.__main__ import main
from minisgl.bench import checkpoint
from minisgl.bench.plain_read import drop_cache, read_all
from minisgl.bench.shapes import SHAPES
from minisgl.checkpoint.hf import weight_files
from minisgl.device.device import CpuDevice
from minisgl.errors import ConfigError
from minisgl.models.weight import load_weights

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


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "tiny", TINY)
    monkeypatch.setattr(checkpoint, "FILE_BYTES", 20_000)
    monkeypatch.setattr(checkpoint, "NOISE_VALUES", 1000)


@pytest.mark.usefixtures("tiny")
def test_a_written_shape_is_a_checkpoint_and_shards_are_its_parts(tmp_path: Path) -> None:
    folder = checkpoint.write_checkpoint("tiny", tmp_path)
    files = weight_files(folder)
    assert len(files) > 2 and all(file.stat().st_size <= 20_000 + 4096 for file in files)
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    written = {file: file.stat().st_mtime_ns for file in files}
    assert checkpoint.write_checkpoint("tiny", tmp_path) == folder
    assert written == {file: file.stat().st_mtime_ns for file in files}, "it is there already"
    wanted = checkpoint.wanted_parameters(TINY)
    ranks = [checkpoint.shard(wanted, rank, 2, torch.bfloat16, torch.device("cpu")) for rank in range(2)]
    for shards in ranks:
        load_weights(files, shards, set(), CpuDevice(1))
    seen = set()
    for first, second in zip(*ranks, strict=True):
        for source in first.sources:
            seen.add(source.name)
            stop = source.start + source.rows
            parts = [first.tensor[source.start : stop], second.tensor[source.start : stop]]
            whole = tensors[source.name]
            if "norm" in source.name:
                assert whole.eq(1).all()
                assert all(torch.equal(part, whole) for part in parts)
            else:
                dim = int("o_proj" in source.name or "down_proj" in source.name)
                assert torch.equal(torch.cat(parts, dim), whole)
    assert seen == tensors.keys()
    with pytest.raises(ConfigError, match=r"cannot be divided among 5 ranks"):
        checkpoint.shard(wanted, 0, 5, torch.bfloat16, torch.device("cpu"))


def test_plain_reads_and_the_page_cache(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(bytes(100_000))
    assert read_all([path], 2) > 0
    assert 0 <= drop_cache([path]) <= 1


@pytest.mark.usefixtures("tiny")
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    shape = ("--shape", "tiny", "--folder", str(tmp_path))
    options = ("--tp", "2", "--repeat", "2", "--device", "cpu", "--no-cold", "--json", str(path))
    assert main(["bench", "loading", *shape, *options]) == 0
    report = json.loads(path.read_text())
    (result,) = report["results"]
    assert (result["tp"], result["cache"]) == (2, "warm") and result["seconds"]["min"] > 0 < result["gb_s"]
    assert result["share_percent"]["median"] > 0 and 0 < result["shard_bytes"] < report["bytes"]
    assert "plain read" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--shape", "qwen3-8b"), "--shape and --folder"),
        (("--shape", "nothing", "--folder", "."), "no shape 'nothing'"),
        (("--tp", "0"), "--tp"),
        (("--tp", "3", "--device", "cpu", "--no-cold"), "cannot be divided among 3 ranks"),
    ],
)
def test_bad_settings(argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "loading", *argv]) == 2
    assert message in capsys.readouterr().err
