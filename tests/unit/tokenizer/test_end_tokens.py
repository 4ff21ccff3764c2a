"""An answer ends at every token that a file of the folder knows as an end."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.engine.resolve import resolve
from minisgl.launch.launch import check_args
from minisgl.settings.options import EngineConfig, SchedulerConfig, ServerArgs
from minisgl.tokenizer.end_tokens import EndTokens
from minisgl.tokenizer.template import ChatTemplate

Files = dict[str, dict[str, Any] | None]

END, TEXT_END = 2, 0  # <|im_end|> and <|endoftext|>, as in the built-in model's tokenizer
WITHOUT: Files = {"config.json": {"eos_token_id": None}, "generation_config.json": None}
NO_NAME: Files = {"tokenizer_config.json": {"eos_token": None}, "chat_template.jinja": {}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUILTIN_MODEL, tmp_path / "model"))


def change(folder: Path, files: Files) -> None:
    """Add to the JSON of files, or delete them; a template that is {} becomes one without an end."""
    for name, added in files.items():
        path = folder / name
        if added is None:
            path.unlink()
        elif name.endswith(".jinja"):
            path.write_text(added.get("source", "{% for m in messages %}{{ m.content }}\n{% endfor %}"))
        else:
            old = json.loads(path.read_text()) if path.exists() else {}
            path.write_text(json.dumps(old | added))


def found(folder: Path) -> EndTokens:
    return EndTokens.of_folder(folder, ChatTemplate.of_folder(folder))


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, {END, TEXT_END}),
        (WITHOUT, {END}),
        (WITHOUT | NO_NAME | {"config.json": {"eos_token_id": END}}, {END}),
        (WITHOUT | NO_NAME | {"config.json": {"eos_token_id": [None, END, TEXT_END]}}, {END, TEXT_END}),
        (WITHOUT | NO_NAME | {"config.json": {"eos_token_id": None, "text_config": {"eos_token_id": [END]}}}, {END}),
        (WITHOUT | NO_NAME | {"generation_config.json": {"eos_token_id": TEXT_END}}, {TEXT_END}),
        (WITHOUT | {"tokenizer_config.json": {"eos_token": "<|endoftext|>"}}, {END, TEXT_END}),
        (WITHOUT | {"tokenizer_config.json": {"eos_token": {"content": "<|im_end|>"}}}, {END}),
        (WITHOUT | NO_NAME | {"special_tokens_map.json": {"eos_token": "<|im_end|>"}}, {END}),
        (WITHOUT | {"tokenizer_config.json": {"eos_token": None}}, {END}),  # by the template alone
    ],
)
def test_every_file_counts(model: Path, files: Files, ids: set[int]) -> None:
    change(model, files)
    assert found(model) == EndTokens(frozenset(ids), [])
    assert resolve(EngineConfig(model=str(model)), "cpu").eos_token_ids == ids


@pytest.mark.parametrize("value", [7, 4096, 2**31, -1, "2", "<|im_end|>", True, 2.5, [[2]], {"a": 1}])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_other_values_are_told_and_ignored(model: Path, file: str, value: Any) -> None:
    """7 is ordinary text; 4096 is not in the vocabulary."""
    change(model, WITHOUT | {file: {"eos_token_id": value}})
    ends = found(model)
    assert ends.ids == {END}
    (problem,) = ends.problems
    assert file in problem and repr(value if not isinstance(value, list) else value[0]) in problem


def test_an_ordinary_token_is_an_end_if_no_other_is_known(model: Path) -> None:
    change(model, WITHOUT | NO_NAME | {"config.json": {"eos_token_id": 7}})
    assert found(model) == EndTokens(frozenset({7}), [])


def test_a_model_without_an_end_is_told_once_at_the_start(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    change(model, WITHOUT | NO_NAME)
    with caplog.at_level(logging.WARNING):
        check_args(ServerArgs(scheduler=SchedulerConfig(engine=EngineConfig(model=str(model)))))
    assert caplog.text.count("names a token that ends an answer") == 1


@pytest.mark.parametrize(
    ("source", "ids"),
    [
        ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}", set()),  # a start, not an end
        ("{% for m in messages %}{{ m.content }} <|im_end|>\u2581<|endoftext|>{% endfor %}", {END}),
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", {END}),
        ("{% for m in messages %}{{ m.content }}{% endfor %}<|im_start|>", set()),  # always asks for an answer
        ("{{ raise_exception('no') }}", set()),
    ],
)
def test_what_a_template_writes_after_an_answer_is_an_end(
    model: Path, source: str, ids: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    name = "<|im_end|>" if "eos_token" in source else None
    change(model, WITHOUT | {"tokenizer_config.json": {"eos_token": name}, "chat_template.jinja": {"source": source}})
    assert found(model).ids == ids
