"""What cannot run on this machine is refused from config.json and headers, before torch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import safe_open

from minisgl.checkpoint import hf
from minisgl.core.errors import ConfigError
from minisgl.engine import fit
from minisgl.engine.fit import Checkpoint, Footprint, check_fit
from minisgl.launch.launch import check_args
from minisgl.settings.options import EngineConfig, SchedulerConfig, ServerArgs
from minisgl.tools.bench.shapes import SHAPES

QWEN = SHAPES["qwen3-32b"]
GPU = 80 * 10**9
AWQ = {"quant_method": "awq", "bits": 4}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A laptop: 2 cores, 16 GB, no GPU."""
    monkeypatch.setattr(fit, "usable_cores", lambda: 2)
    monkeypatch.setattr(fit, "available_memory", lambda: 16 * 10**9)
    return monkeypatch


def config(folder: Path, shape: dict[str, Any], **options: Any) -> EngineConfig:
    (folder / "config.json").write_text(json.dumps(shape))
    return EngineConfig(model=str(folder), **{"device": "cpu", **options})


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ({}, {}, r"does not fit into the available memory of 16.0 GB: weights in bfloat16 65.5 GB, .* smaller model"),
        ({}, {"dtype": "float32"}, "weights in float32 131.0 GB"),
        (SHAPES["qwen3-0.6b"], {"num_pages": 10**8}, r"--num-pages 100000000 \d+\.\d GB; give a smaller number"),
        (SHAPES["qwen3-0.6b"], {"max_running_requests": 10**8}, r"--max-running-requests 100000000 \d+\.\d GB; give"),
        (
            SHAPES["qwen3-0.6b"],
            {"lora_dynamic": "/adapters", "max_loras": 1000, "max_lora_rank": 256},
            r"--max-loras 1000 \d+\.\d GB, .*; give a smaller number, or a lower --max-lora-rank",
        ),
        ({}, {"tp": 3}, "attention heads cannot be divided among 3 ranks"),
        ({"intermediate_size": 25601}, {"tp": 2}, "intermediate features cannot be divided among 2 ranks"),
        ({}, {"tp": 64}, "--tp 64 is too much for a machine of 2 cores"),
        ({}, {"tp": 512}, "--tp 512 is too much"),
        ({}, {"threads": 100000}, "--threads 100000 is too much for a machine of 2 cores"),
        ({}, {"threads": 4, "tp": 4}, "--threads 4 --tp 4 is too much"),
        ({"architectures": ["NewForCausalLM"]}, {"tp": 512}, "architecture NewForCausalLM is not supported"),
        ({"torch_dtype": "float8"}, {"device": "cuda"}, "dtype 'float8' is not one of"),
        ({}, {"max_seq_len": 10**9}, "context of 40960 tokens; give less"),
        ({}, {"cuda_graph_max_bs": 4}, "--cuda-graph-max-bs needs an NVIDIA GPU"),
        ({}, {"quantization": "fp8"}, "fp8 is not for cpu, where it can be int8 or int4"),
        (
            {"quantization_config": {"quant_method": "fp8"}},
            {"device": "cuda", "quantization": "int4"},
            "--quantization int4 is for checkpoints that are not quantized yet",
        ),
        ({}, {"device": "cuda", "tp": 8}, "--tp 8 needs 8 GPUs on this host, which has 2"),
    ],
)
def test_what_cannot_run_is_refused_with_figures(
    tmp_path: Path, machine: pytest.MonkeyPatch, shape: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    if options.get("device") == "cuda":
        machine.setattr(fit, "choose_device", lambda name: name)
        machine.setattr(fit, "gpu_memory", lambda: (GPU, GPU))
    with pytest.raises(ConfigError, match=message):
        check_fit(config(tmp_path, QWEN | shape, **options))


@pytest.mark.parametrize(
    ("shape", "message", "downloads"),
    [
        (QWEN, "does not fit into", False),
        (QWEN | {"architectures": ["NewForCausalLM"]}, "NewForCausalLM is not supported", False),
        (SHAPES["qwen3-0.6b"], r"has no \*\.safetensors", True),
    ],
)
def test_weights_are_downloaded_after_the_checks(
    shape: dict[str, Any], message: str, downloads: bool, tmp_path: Path, machine: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def snapshot_download(hub_id: str, *, allow_patterns: list[str], revision: str | None) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path)

    machine.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    (tmp_path / "config.json").write_text(json.dumps(shape))
    engine = EngineConfig(model="owner/name", device="cpu")
    with pytest.raises(ConfigError, match=message):
        check_args(ServerArgs(scheduler=SchedulerConfig(engine=engine)))
    assert "*.json" in asked
    assert ("*.safetensors" in asked) == downloads


def test_what_fits_is_accepted(tmp_path: Path, machine: pytest.MonkeyPatch) -> None:
    assert check_fit(config(tmp_path, SHAPES["qwen3-0.6b"], num_pages=1000, tp=4, threads=2)).folder == tmp_path
    machine.setattr(fit, "choose_device", lambda name: name)
    machine.setattr(fit, "gpu_memory", lambda: (GPU, GPU))
    check_fit(config(tmp_path, QWEN, device="cuda"))
    with pytest.raises(ConfigError, match=r"a GPU of 80\.0 GB: weights in bfloat16 \d+"):
        check_fit(config(tmp_path, QWEN | {"num_hidden_layers": 128}, device="cuda"))
    check_fit(config(tmp_path, QWEN | {"num_hidden_layers": 128}, device="cuda", tp=2))
    check_fit(config(tmp_path, QWEN | {"num_hidden_layers": 128}, device="cuda", quantization="fp8"))
    check_fit(config(tmp_path, QWEN | {"num_hidden_layers": 300, "quantization_config": AWQ}, device="cuda"))


def test_weights_and_pages_are_counted() -> None:
    checkpoint = Checkpoint.read(EngineConfig(speculate="off"))
    elements = 0
    for path in hf.weight_files(checkpoint.folder):
        with safe_open(path, framework="np") as file:
            shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
        elements += sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)
    assert checkpoint.model.num_weights == elements
    needs = Footprint.of(checkpoint, EngineConfig(page_size=4), "cpu", 2)
    m = checkpoint.model
    assert (needs.weights, *needs.pages) == (2 * elements, m.num_layers * 2 * m.num_kv_heads * 4 * m.head_dim * 2)


def test_a_head_of_8_bits_is_counted(tmp_path: Path) -> None:
    """8.19e9 weights: 0.62e9 of the embedding in 16 bits, as many of the head in 8, the others in 4."""
    asked = config(tmp_path, SHAPES["qwen3-8b"], quantization="int4")
    checkpoint = Checkpoint.read(asked)
    m = checkpoint.model
    assert not m.tie_word_embeddings
    assert (
        Footprint.of(checkpoint, asked, "cuda", 2).weights == 3 * m.vocab_size * m.hidden_size + m.num_projections // 2
    )


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "qwen3-32b"])
def test_large_models_have_the_size_of_their_name(tmp_path: Path, name: str) -> None:
    billions = Checkpoint.read(config(tmp_path, SHAPES[name])).model.num_weights / 1e9
    assert billions == pytest.approx(float(name.split("-")[1].removesuffix("b")), rel=0.03)


def write_safetensors(path: Path, header: bytes, data: bytes = b"") -> Path:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


HEADER = b'{"__metadata__": {"a": "b"}, "x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'


def test_incomplete_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    hf.require_complete(write_safetensors(path, HEADER, b"x" * 8))
    with pytest.raises(ConfigError, match=r"not fully covered.*is the download complete"):
        hf.require_complete(write_safetensors(path, HEADER, b"x" * 7))
    for content in (b"", b"\x08", b"\xff" * 8, b"\xff" * 9, HEADER, b"version https://git-lfs.github.com/spec/v1\n"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="is the download complete"):
            hf.require_complete(path)
    for header in (b"[]", b"{", b'{"x": 1}', b'{"x": {"data_offsets": "ab"}}', b"[" * 10**5):
        with pytest.raises(ConfigError, match="is the download complete"):
            hf.require_complete(write_safetensors(path, header))


def test_a_server_checks_before_torch_is_imported() -> None:
    code = (
        "import sys; from minisgl.launch.launch import check_args; from minisgl.settings.options import ServerArgs;"
        "check_args(ServerArgs()); sys.exit('torch' in sys.modules)"
    )
    env = os.environ | {"PYTHONPATH": str(Path(fit.__file__).parents[2])}
    subprocess.run([sys.executable, "-c", code], check=True, env=env)
