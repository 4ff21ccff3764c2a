"""Model folders, whole and broken."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minisgl.checkpoint import hf
from minisgl.checkpoint.quantization import Quantization, read_quantization
from minisgl.core.errors import ConfigError


def write(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(json.dumps(value))


def test_builtin_and_local(tmp_path: Path) -> None:
    write(tmp_path, "config.json", {})
    assert hf.resolve_model(str(tmp_path)) == tmp_path
    assert hf.model_name(str(tmp_path)) == tmp_path.name
    assert hf.model_name("") == "minisgl-demo"
    assert hf.model_name("owner/name") == "owner/name"
    assert hf.resolve_model("").name == "model"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/no/such/folder", "does not exist"),
        ("nofolder", "does not exist"),
        ("a/b/c", "does not exist"),
        (".", "no config.json; --model takes"),
    ],
)
def test_no_model(model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        hf.resolve_model(model)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("adapter_config.json", "a LoRA adapter"),
        ("pytorch_model.bin", "pickled"),
    ],
)
def test_other_formats_are_named(tmp_path: Path, file: str, says: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(ConfigError, match=rf"has no config\.json, but .*{says}.*, which cannot be served; --model"):
        hf.resolve_model(str(tmp_path))
    write(tmp_path, "config.json", {})
    with pytest.raises(ConfigError, match=rf"has no \*\.safetensors weights, but .*{says}.*, which cannot be served"):
        hf.weight_files(tmp_path)


def test_the_folder_with_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "snapshots/abc").mkdir(parents=True)
    write(tmp_path, "snapshots/abc/config.json", {})
    write(tmp_path, "snapshots/abc/x.safetensors", {})
    for wrong in (tmp_path, tmp_path / "snapshots", tmp_path / "snapshots/abc/x.safetensors"):
        with pytest.raises(ConfigError, match=rf"--model takes .*, such as {tmp_path}/snapshots/abc$"):
            hf.resolve_model(str(wrong))


def test_a_hub_model_without_config_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = SimpleNamespace(snapshot_download=lambda *_, **__: str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(
        ConfigError, match=r"owner/name-GGUF has no config\.json, but GGUF weights \(download a file and give"
    ):
        hf.resolve_model("owner/name-GGUF")


def test_failed_download_advises_a_local_path(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def fail(*_: object, **__: object) -> None:
        raise OSError("no route\nmore")

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(
        ConfigError, match=r"not download owner/name from huggingface \(OSError: no route\).*local path"
    ):
        hf.resolve_model("owner/name")


@pytest.mark.parametrize(("source", "module"), [("huggingface", "huggingface_hub"), ("modelscope", "modelscope")])
def test_download(source: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the hub that was asked for is imported, and only its call is faked."""
    write(tmp_path, "config.json", {})
    asked: list[tuple[str, str | None, list[str]]] = []

    def snapshot_download(hub_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((hub_id, revision, allow_patterns))
        return str(tmp_path)

    for name in ("huggingface_hub", "modelscope"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it is an ImportError
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(snapshot_download=snapshot_download))
    assert hf.resolve_model("owner/name", source) == tmp_path
    small = ["*.json", "*.jinja"]
    assert asked == [("owner/name", None, small), ("owner/name", None, [*small, "*.safetensors"])]
    assert hf.resolve_model("owner/name", source, weights=False, revision="v2") == tmp_path
    assert asked[2:] == [("owner/name", "v2", small)]


@pytest.mark.parametrize(
    ("source", "package"), [("huggingface", "huggingface_hub"), ("modelscope", r"'minisgl\[modelscope\]'")]
)
def test_a_missing_hub_library_is_named(source: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("huggingface_hub", "modelscope"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"from {source}, `pip install {package}`"):
        hf.resolve_model("owner/name", source)
    with pytest.raises(ConfigError, match="--download-source 'elsewhere' is not one of"):
        hf.resolve_model("owner/name", "elsewhere")


def test_unreadable_config(tmp_path: Path) -> None:
    for text in ("{", "[]", "\xff", '{"a":' * 100_000, '{"a": ' + "1" * 10_000 + "}"):
        (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
        with pytest.raises(ConfigError, match=r"config\.json"):
            hf.load_config(tmp_path)


V1, V2 = (Quantization("gptq", 4, zero_offset=offset) for offset in (1, 0))
OLD_AWQ = {"zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
OLD_GPTQ = {"bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": False, "sym": True, "true_sequential": True}
GPTQ_V2 = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
INT4 = {"format": "pack-quantized", "config_groups": {"group_0": {"weights": {"num_bits": 4}}}}


@pytest.mark.parametrize(
    ("config", "files", "expected"),
    [
        ({}, {"quantize_config.json": OLD_GPTQ}, V1),
        ({}, {"quantize_config.json": {"bits": 4, "group_size": 128}}, V1),
        ({"quantization_config": None}, {"quantize_config.json": OLD_GPTQ | {"checkpoint_format": None}}, V1),
        ({}, {"quantize_config.json": OLD_GPTQ | GPTQ_V2 | {"meta": {"quantizer": ["gptqmodel:1.0.0"]}}}, V2),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, {"quantize_config.json": GPTQ_V2}, V2),
        (
            {"quantization_config": {"bits": 4, "quant_method": "gptq", "checkpoint_format": None}},
            {"quantize_config.json": GPTQ_V2},
            V2,
        ),
        ({"quantization_config": GPTQ_V2 | {"bits": 4}}, {"quantize_config.json": OLD_GPTQ}, V2),
        ({}, {"quantize_config.json": OLD_AWQ}, Quantization("awq", 4)),
        ({}, {"quant_config.json": OLD_AWQ}, Quantization("awq", 4)),
        ({}, {"quant_config.json": {"w_bit": 4, "q_group_size": 64}}, Quantization("awq", 4)),
        ({}, {"quant_config.json": OLD_GPTQ}, V1),
        ({}, {"hf_quant_config.json": {"quantization": {"quant_algo": "FP8"}}}, Quantization("scaled")),
        ({"quantization_config": {"quant_algo": "FP8"}}, {}, Quantization("scaled")),
        ({"quantization_config": OLD_AWQ}, {}, Quantization("awq", 4)),
        ({"quantization_config": OLD_GPTQ}, {}, V1),
        ({"quantization_config": INT4}, {}, Quantization("packed", 4)),
        ({"quantization_config": INT4 | {"config_groups": {}, "kv_cache_scheme": {"num_bits": 8}}}, {}, None),
        ({"compression_config": INT4 | {"quant_method": "compressed_tensors"}}, {}, Quantization("packed", 4)),
        ({"quantization_config": {"activation_scheme": "dynamic"}}, {}, Quantization("scaled")),
        ({}, {}, None),
    ],
)
def test_settings_of_quantized_weights(
    tmp_path: Path, config: Any, files: dict[str, Any], expected: Quantization | None
) -> None:
    for name, value in {"config.json": config, **files}.items():
        write(tmp_path, name, value)
    assert read_quantization(hf.load_config(tmp_path)) == expected


@pytest.mark.parametrize("value", [[], {"quantization": 5}])
def test_bad_settings_of_quantized_weights(tmp_path: Path, value: Any) -> None:
    write(tmp_path, "config.json", {})
    write(tmp_path, "hf_quant_config.json", value)
    with pytest.raises(ConfigError, match=r"is not a JSON object|quantization_config=5; an object is needed"):
        read_quantization(hf.load_config(tmp_path))


def test_max_model_len() -> None:
    assert hf.max_model_len({"max_position_embeddings": 4096}) == 4096
    long = {"max_position_embeddings": 131072, "rope_scaling": {"type": "longrope", "short_factor": [1.0]}}
    assert hf.max_model_len({**long, "original_max_position_embeddings": 4096}) == 4096
    with pytest.raises(ConfigError):
        hf.max_model_len({})


def test_weight_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        hf.weight_files(tmp_path)
    for name in ("b.safetensors", "a.safetensors"):
        (tmp_path / name).touch()
    assert [f.name for f in hf.weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]
    (tmp_path / "model-1.safetensors").touch()
    assert [f.name for f in hf.weight_files(tmp_path)] == ["model-1.safetensors"]
    write(tmp_path, "model.safetensors.index.json", {"weight_map": {"x": "b.safetensors", "y": "b.safetensors"}})
    assert [f.name for f in hf.weight_files(tmp_path)] == ["b.safetensors"]
    for bad in ({"x": "missing.safetensors"}, {"x": "../b.safetensors"}, {}):
        write(tmp_path, "model.safetensors.index.json", {"weight_map": bad})
        with pytest.raises(ConfigError):
            hf.weight_files(tmp_path)
    (tmp_path / "model.safetensors").touch()
    assert [f.name for f in hf.weight_files(tmp_path)] == ["model.safetensors"]
