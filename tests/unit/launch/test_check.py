"""What is checked before a server starts anything."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.core.errors import ConfigError
from minisgl.launch.children import divided
from minisgl.launch.launch import check_args
from minisgl.settings.options import EngineConfig, SchedulerConfig, ServerArgs


def args_of(folder: Path) -> ServerArgs:
    return ServerArgs(scheduler=SchedulerConfig(engine=EngineConfig(model=str(folder))))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BUILTIN_MODEL, tmp_path / "model"))


def test_an_unusable_template_is_told_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }")
    with caplog.at_level(logging.WARNING):
        template = check_args(args_of(folder)).template
    assert [*template.problems] == ["default"]
    assert caplog.text.count("the chat template 'default' cannot be used: it does not compile: ") == 1


def test_tokens_beyond_the_vocabulary_are_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Trainers add a pad token to the tokenizer and forget the embedding."""
    check_args(args_of(folder))
    assert not caplog.messages
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"pad_token": "<new>"}))
    check_args(args_of(folder))
    assert any("such as '<new>': prompts with them are refused" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (
            {"architectures": ["NewForCausalLM"], "text_config": {"vocab_size": 5}, "vision_config": {}},
            "architecture NewForCausalLM is not supported",
        ),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantized by hqq, which is not supported"),
        ('{"a":' * 100_000, r"config\.json is not valid JSON"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers=1000000000000; an integer from 1 to 4096"),
    ],
)
def test_the_first_thing_that_is_wrong_is_named(folder: Path, config: dict[str, Any] | str, says: str) -> None:
    file = folder / "config.json"
    if isinstance(config, dict):
        whole = json.loads(file.read_text()) | config
        if "text_config" in config:
            del whole["vocab_size"]
        config = json.dumps(whole)
    file.write_text(config)
    with pytest.raises(ConfigError, match=says) as e:
        check_args(args_of(folder))
    assert "\n" not in str(e.value)


def test_replicas_divide_the_tiers(tmp_path: Path) -> None:
    engine = EngineConfig(device="cpu", threads=2, disk_kv=f"{tmp_path}:1001")
    args = ServerArgs(dp=2, scheduler=SchedulerConfig(engine=engine))
    for index in range(2):
        assert divided(args, index).scheduler.engine.disk_tier == (tmp_path / f"replica-{index}", 500)


def test_a_disk_without_room_is_told_before_the_model_is_loaded(tmp_path: Path) -> None:
    def check(folder: Path, size: str) -> None:
        check_args(ServerArgs(scheduler=SchedulerConfig(engine=EngineConfig(device="cpu", disk_kv=f"{folder}:{size}"))))

    with pytest.raises(ConfigError, match=r"lacks space: 1000000\.0 GB are needed"):
        check(tmp_path / "not" / "there", "1000000000000000")
    assert not [*tmp_path.iterdir()]
    free = shutil.disk_usage(tmp_path).free
    with (tmp_path / "rank0.kv").open("wb") as file:
        file.truncate(1 << 40)  # what the files have already is not asked for again
    check(tmp_path, str((1 << 40) + free // 2))
