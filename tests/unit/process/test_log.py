"""Log lines, their levels, and progress."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest

from minisgl.errors import ConfigError
from minisgl.process.log import Progress, configure_logging, log_level


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    logger = logging.getLogger("minisgl")
    old = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = old


def test_log_lines_name_their_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOG_LEVEL", raising=False)
    for _ in range(2):  # a second call must not double the lines
        configure_logging("minisgl-test-0")
    logging.getLogger("minisgl.some.module").info("something %d", 1)
    logging.getLogger("minisgl.some.module").debug("hidden")
    error = capsys.readouterr().err
    assert error.endswith("I minisgl-test-0: something 1\n")
    assert len(error.splitlines()) == 1


def test_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_LEVEL", "debug")
    assert log_level() == "DEBUG"
    monkeypatch.setenv("LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="LOUD"):
        log_level()


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, "\rloading [########"), (False, "")])
def test_progress_is_a_bar_on_terminals_only(
    is_terminal: bool, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    progress = Progress("loading", "B")
    progress.update(1, 3)
    assert capsys.readouterr().err == ""  # short work shows nothing
    progress._start -= 10
    progress.update(1, 3)
    error = capsys.readouterr().err
    assert error.startswith(shown) and bool(error) is is_terminal
    Progress("hidden", "B", is_shown=False).update(3, 3)


def test_progress_without_a_terminal_is_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("minisgl").propagate = True
    progress = Progress("compiling", "kernels")
    progress._start -= 10
    with caplog.at_level(logging.INFO):
        for done in range(4):
            progress.update(done, 3)
    (record,) = caplog.records
    assert record.message.startswith("compiling: 3/3 kernels in 10.")
