"""Models in GGUF files, against transformers on the checkpoints that the files were made of."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import Tokenizer

from contract.checkpoints import configurations, save
from contract.harness import MiniEngine, Span
from contract.test_parity import assert_equal
from minisgl.checkpoint import gguf_file, hf
from minisgl.checkpoint.gguf_tokenizer import tokenizer_files
from minisgl.core.errors import ConfigError
from minisgl.models.gguf_weights import open_gguf
from minisgl.models.model_config import ModelConfig
from support.gguf_files import write_gguf

IDS = [(7 * i * i + 3 * i) % 150 for i in range(70)]
FOUR_LAYERS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
# Name in `configurations` -> (architecture, other values than there: GGUF has no key for these).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-gqa-llama3-untied": ("llama", {}),
    "llama-linear-biases": ("llama", {}),
    "mistral": ("llama", {}),
    "mixtral": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-yarn": ("qwen2", {}),
    "qwen3-tied-wide-heads": ("qwen3", {}),
    "qwen2-moe": ("qwen2moe", {"decoder_sparse_step": 1}),
    "qwen3-moe-every-second-layer": (
        "qwen3moe",
        {"decoder_sparse_step": 1, "norm_topk_prob": True, "attention_bias": False},
    ),
    "phi3": ("phi3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 32}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 1]}),
    "seed-oss": ("seed_oss", {"attention_out_bias": False}),
    "arcee": ("arcee", {}),
    "granite": ("granite", {}),
    "glm4": ("glm4", {}),
    "ernie4.5": ("ernie4_5", {}),
    "cohere": ("command-r", {}),
    "cohere2": ("cohere2", FOUR_LAYERS),
    "olmo2": ("olmo2", {}),
    "olmoe": ("olmoe", {"norm_topk_prob": False}),
    "exaone4": ("exaone4", FOUR_LAYERS),
    "stablelm": ("stablelm", {}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "nemotron": ("nemotron", {}),
    "phi": ("phi2", {}),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def qwen3(tmp_path: Path) -> Any:
    return save(tmp_path / "folder", configurations()["qwen3-tied-wide-heads"])


@pytest.mark.parametrize("name", CASES)
def test_architectures_agree_with_transformers(name: str, tmp_path: Path):
    arch, values = CASES[name]
    config = copy.deepcopy(configurations()[name])
    for field, value in values.items():
        setattr(config, field, value)
    checkpoint = save(tmp_path / "folder", config)
    file = write_gguf(tmp_path / "model.gguf", checkpoint.folder, arch)
    engine = MiniEngine.load(hf.resolve_model(str(file)))
    want = checkpoint.logits(IDS)
    assert_equal(engine.step([Span(0, 0, IDS[:60])]), want[59:60])
    for i in range(60, 64):
        assert_equal(engine.step([Span(0, i, [IDS[i]])]), want[i : i + 1])


KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS")


@pytest.mark.parametrize("name", KINDS)
def test_parts_of_a_tensor_are_those_of_the_whole(name: str, tmp_path: Path):
    kind = Kind[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(0).integers(0, 60, (3, 5, 2 * size), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    want = torch.from_numpy(gguf.dequantize(data, kind))
    stored = open_gguf(tmp_path / "x.gguf")["x"]
    assert stored.shape == want.shape == (3, 5, 2 * block)
    assert torch.equal(stored.whole(), want)
    part = slice(1, 4), slice(block // 2, block + block // 2 + 1)
    assert torch.equal(stored.data[(2, *part)], want[(2, *part)])


def test_quantized_files_agree_with_their_values(qwen3: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """And one log line says what they are; on a CPU they are held in int8."""
    file = write_gguf(tmp_path / "model.gguf", qwen3.folder, "qwen3", Kind.Q8_0)
    folder = hf.resolve_model(str(file))
    with caplog.at_level(logging.INFO):
        ours = MiniEngine.load(folder).step([Span(0, 0, IDS)])
    (line,) = [record.getMessage() for record in caplog.records if "GGUF" in record.getMessage()]
    assert line.startswith("GGUF tensors in F32, Q8_0 are held in float32: 0.00 GB")
    assert ModelConfig.from_hf(hf.load_config(folder)).is_rounded
    assert_equal(ours, qwen3.logits(IDS)[-1:], 0.05)


def test_sets_folders_and_names(qwen3: Any, tmp_path: Path):
    single = write_gguf(tmp_path / "one" / "model.gguf", qwen3.folder, "qwen3")
    write_gguf(tmp_path / "set" / "many.gguf", qwen3.folder, "qwen3", split_max_tensors=9)
    parts = sorted((tmp_path / "set").iterdir())
    assert len(parts) > 2 and parts[0].name.startswith("many-00001-of-")
    want = qwen3.logits(IDS)[-1:]
    for given in (single, single.parent, parts[1], tmp_path / "set"):
        folder = hf.resolve_model(str(given))
        assert hf.resolve_model(str(given)) == folder  # made once
        assert_equal(MiniEngine.load(folder).step([Span(0, 0, IDS)]), want)
    assert hf.model_name(str(single)) == "model" and hf.model_name(str(parts[1])) == "many"
    parts[2].unlink()
    with pytest.raises(ConfigError, match=r"is of a set of \d files, of which there are \d"):
        hf.resolve_model(str(parts[0]))
    single.rename(parts[0].with_name("other.gguf"))
    with pytest.raises(ConfigError, match="has several models; give one of many-00001-of-"):
        hf.resolve_model(str(tmp_path / "set"))


def test_a_changed_file_is_read_again(qwen3: Any, tmp_path: Path):
    file = write_gguf(tmp_path / "model.gguf", qwen3.folder, "qwen3")
    first = hf.resolve_model(str(file))
    write_gguf(file, qwen3.folder, "qwen3", Kind.F16)
    second = hf.resolve_model(str(file))
    assert first != second
    assert hf.fingerprint(first, has_weights=True) != hf.fingerprint(second, has_weights=True)


def test_the_package_is_named(qwen3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = write_gguf(tmp_path / "model.gguf", qwen3.folder, "qwen3")
    monkeypatch.setattr(gguf_file, "import_module", lambda name: __import__("no_such_module"))
    with pytest.raises(ConfigError, match=r"pip install 'minisgl\[gguf\]'"):
        hf.resolve_model(str(file))


def test_broken_files_are_one_sentence(qwen3: Any, tmp_path: Path):
    whole = write_gguf(tmp_path / "model.gguf", qwen3.folder, "qwen3").read_bytes()
    file = tmp_path / "broken.gguf"

    def refused(data: bytes) -> str:
        file.write_bytes(data)
        with pytest.raises(ConfigError) as error:
            hf.resolve_model(str(file))
        message = str(error.value)
        assert message.startswith(str(file)) and "\n" not in message
        return message

    for size in (*range(1, 400, 13), *range(400, len(whole), len(whole) // 50)):
        assert "is the download complete?" in refused(whole[:size])
    random = np.random.default_rng(0)
    for _ in range(200):  # a flipped bit of the header may mean another model, but raises nothing but ConfigError
        data = bytearray(whole)
        data[random.integers(0, 4000)] ^= 1 << random.integers(0, 8)
        file.write_bytes(data)
        with contextlib.suppress(ConfigError):
            ModelConfig.from_hf(hf.load_config(hf.resolve_model(str(file))))
    for begin in (b"GGML", b"GGUF" + struct.pack("<I", 1), b"GGUF" + struct.pack(">I", 3)):
        message = "is not a little-endian GGUF file of version 2 or 3"
        assert message in refused(begin + whole[len(begin) :])
    assert "has the architecture 'qwenx', which is not supported; supported: " in refused(
        whole.replace(b"qwen3", b"qwenx")
    )
    assert "tokenizer.ggml.model='llamo', which is not supported; supported: gpt2, llama" in refused(
        whole.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0llamo")
    )
    kind = whole.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    assert "999 is not a valid" in refused(whole[:kind] + struct.pack("<I", 999) + whole[kind + 4 :])
    assert "the type Q8_1, which is not supported" in refused(
        (tmp_path / "model.gguf").read_bytes()[:kind] + struct.pack("<I", 9) + whole[kind + 4 :]
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("logit_factor", 2.0, r"has qwen3\.logit_factor=2\.0, which is not supported"),
        ("attention.value_length", 5, r"has qwen3\.attention\.value_length=5, which is not supported"),
    ],
)
def test_unknown_keys_are_refused(key: str, value: float, message: str, qwen3: Any, tmp_path: Path):
    class Writer(gguf.GGUFWriter):
        def write_header_to_file(self, path: Path | None = None) -> None:
            add = self.add_float32 if isinstance(value, float) else self.add_uint32
            add(f"qwen3.{key}", value)
            super().write_header_to_file(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("support.gguf_files.GGUFWriter", Writer)
        file = write_gguf(tmp_path / "model.gguf", qwen3.folder, "qwen3")
    with pytest.raises(ConfigError, match=message):
        hf.resolve_model(str(file))


def test_a_sentencepiece_tokenizer(qwen3: Any, tmp_path: Path):
    folder = hf.resolve_model(str(write_gguf(tmp_path / "model.gguf", qwen3.folder, "qwen3")))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("ab").tokens == ["<s>", "\u2581ab"]  # not "\u2581a" and "b": the better score first
    assert tokenizer.encode("</s>ab c").tokens == ["<s>", "</s>", "\u2581ab", "\u2581", "<0x63>"]
    assert tokenizer.decode(tokenizer.encode("ab \u4e00c").ids) == "ab \u4e00c"
    assert hf.load_generation_config(folder) == {"eos_token_id": [2]}


def test_a_byte_level_tokenizer_is_the_original(tmp_path: Path):
    original = Tokenizer.from_file(str(hf.BUILTIN_MODEL / "tokenizer.json"))
    raw = hf.read_json(hf.BUILTIN_MODEL / "tokenizer.json")
    vocab = original.get_vocab()
    special = {token["id"] for token in raw["added_tokens"]}
    metadata = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": sorted(vocab, key=lambda text: vocab[text]),
        "token_type": [3 if i in special else 1 for i in range(len(vocab))],
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in raw["model"]["merges"]],
    }
    files = tokenizer_files(tmp_path, {f"tokenizer.ggml.{key}": value for key, value in metadata.items()})
    (tmp_path / "tokenizer.json").write_text(json.dumps(files["tokenizer.json"]))
    ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    source = (Path(__file__).read_text() + "äöü 日本語 😀\t\r\n  x").replace("\n\n", "\n")
    for start in range(0, len(source), 61):
        text = source[start : start + 90]
        assert ours.encode(text).ids == original.encode(text, add_special_tokens=False).ids
        assert ours.decode(ours.encode(text).ids) == text
