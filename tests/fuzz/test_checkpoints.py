"""Any file of a model folder: it is read, or one sentence says that it cannot be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minisgl.api.requests import SamplingDefaults
from minisgl.checkpoint import hf
from minisgl.core.errors import ConfigError
from minisgl.engine.fit import check_fit
from minisgl.settings.options import EngineConfig
from minisgl.tokenizer.end_tokens import EndTokens
from minisgl.tokenizer.template import ChatTemplate
from minisgl.tokenizer.tokenize import TokenizeManager, load_tokenizer, model_limits
from support.fuzz import ODD_NUMBERS, VALUES, fuzz

BUILT_IN = hf.resolve_model("")
CONFIG = json.loads((BUILT_IN / "config.json").read_text())
TOKENIZER = json.loads((BUILT_IN / "tokenizer.json").read_text())
NAMES = ["rope_scaling", "rope_parameters", "layer_types", "sliding_window", "quantization_config", "head_dim"]
MANY = st.one_of(VALUES, ODD_NUMBERS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A copy of the built-in model without weights and template."""
    path = tmp_path_factory.mktemp("model")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(BUILT_IN / name, path)
    return path


def require_sentence(error: ConfigError) -> None:
    assert str(error) and "\n" not in str(error), error


def check(folder: Path) -> None:
    try:
        check_fit(EngineConfig(model=str(folder)))
        EndTokens.of_folder(folder, ChatTemplate.of_folder(folder))
        model_limits(folder)
        SamplingDefaults.from_generation_config(hf.load_generation_config(folder))
    except ConfigError as e:
        require_sentence(e)


@fuzz(60)
@given(st.dictionaries(st.sampled_from([*CONFIG, *NAMES]), MANY, min_size=1, max_size=3))
@example({"layer_types": 1})
@example({"layer_types": [{}]})
def test_any_config(folder: Path, changed: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG | changed))
    check(folder)


@fuzz(40)
@given(st.one_of(st.binary(max_size=30), VALUES.map(lambda v: json.dumps(v).encode())))
@example(b"[" * 100_000)
@example(b'{"a":' * 100_000)
@example(b"\xff\xfe")
def test_any_bytes_instead_of_a_config(folder: Path, content: bytes) -> None:
    (folder / "config.json").write_bytes(content)
    check(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_bytes(content)
    check(folder)
    (folder / "generation_config.json").unlink()


@fuzz(40)
@given(st.dictionaries(st.sampled_from(["temperature", "top_p", "top_k", "eos_token_id", "min_p"]), MANY))
def test_any_generation_config(folder: Path, values: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "generation_config.json").write_text(json.dumps(values))
    check(folder)
    (folder / "generation_config.json").unlink()


HEADER = {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}


@fuzz(80)
@given(
    st.one_of(VALUES, st.fixed_dictionaries({"a": st.one_of(VALUES, st.fixed_dictionaries({"data_offsets": MANY}))})),
    st.one_of(st.none(), st.integers(0, 2**64 - 1)),
    st.binary(max_size=8),
)
@example(HEADER, None, b"1234")
@example(HEADER, 2**63, b"1234")
@example({"a": {"data_offsets": [0, 2**70]}}, None, b"")
def test_any_header_of_safetensors(folder: Path, header: Any, size: int | None, data: bytes) -> None:
    text = json.dumps(header).encode()
    path = folder / "model.safetensors"
    path.write_bytes((len(text) if size is None else size).to_bytes(8, "little") + text + data)
    try:
        hf.require_complete(path)
    except ConfigError as e:
        require_sentence(e)
        assert (header, size, data) != (HEADER, None, b"1234")
    path.unlink()


@fuzz(30)
@given(st.sampled_from(["model", "added_tokens", "decoder", "pre_tokenizer", "normalizer", "post_processor"]), VALUES)
def test_any_part_of_a_tokenizer(folder: Path, part: str, value: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(TOKENIZER | {part: value}))
    try:
        load_tokenizer(folder)
    except ConfigError as e:
        require_sentence(e)


@fuzz(30)
@given(
    st.sampled_from(["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"]),
    st.one_of(
        VALUES,
        st.dictionaries(st.sampled_from(["bos_token", "eos_token", "added_tokens_decoder", "tokenizer_class"]), VALUES),
    ),
)
def test_any_settings_of_a_tokenizer(folder: Path, name: str, value: Any) -> None:
    shutil.copy(BUILT_IN / "tokenizer.json", folder)
    shutil.copy(BUILT_IN / "config.json", folder)
    (folder / name).write_text(json.dumps(value))
    try:
        TokenizeManager(folder)
    except ConfigError as e:
        require_sentence(e)
    (folder / name).unlink()
