"""What is checked before a server starts anything."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from minisgl.checkpoint.hf import BUILTIN_MODEL
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
