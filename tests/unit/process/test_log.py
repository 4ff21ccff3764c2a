"""Log lines, their levels, and progress."""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from datetime import datetime

import pytest

from minisgl.core.errors import ConfigError
from minisgl.process.log import OTHERS, Progress, configure_logging, log_format, log_level, tell


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("minisgl", *OTHERS)]
    old = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (logger.handlers, level, logger.propagate) in zip(loggers, old, strict=True):
        logger.setLevel(level)
    logging.captureWarnings(False)


def test_log_lines_name_their_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOG_LEVEL", raising=False)
    for _ in range(2):  # a second call must not double the lines
        configure_logging("minisgl-test-0")
    tell("something 1")
    tell("hidden", is_shown=False)
    logging.getLogger("minisgl.some.module").debug("hidden")
    error = capsys.readouterr().err
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} INFO minisgl-test-0: something 1\n", error)


def test_lines_of_other_packages_have_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("minisgl-test-0", "INFO", "text")
    logging.getLogger("uvicorn.error").info("started")  # says what our banner says
    logging.getLogger("uvicorn.error").warning("Invalid HTTP request received.")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        configure_logging("minisgl-test-0", "INFO", "text")
        warnings.warn("this is old", stacklevel=1)
    lines = capsys.readouterr().err.splitlines()
    assert " WARNING minisgl-test-0: Invalid HTTP request received." in lines[0]
    assert " WARNING minisgl-test-0: " in lines[1] and "this is old" in lines[1]


def test_json_lines_have_the_fields_of_the_call(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOG_FORMAT", "JSON")
    configure_logging("minisgl-test-0", "INFO")
    logger = logging.getLogger("minisgl.some.module")
    logger.info('two\nlines, "quoted"', extra={"fields": {"status": 200}})
    try:
        raise ValueError("bad")
    except ValueError:
        logger.exception("it failed")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert datetime.fromisoformat(first.pop("time")).tzinfo is not None
    assert first == {
        "level": "INFO",
        "process": "minisgl-test-0",
        "message": 'two\nlines, "quoted"',
        "status": 200,
    }
    assert second["level"] == "ERROR" and second["exception"].endswith("ValueError: bad")


def test_unknown_level_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_LEVEL", "debug")
    assert log_level() == "DEBUG"
    monkeypatch.setenv("LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="LOG_LEVEL=loud is unknown; use one of DEBUG"):
        log_level()
    monkeypatch.setenv("LOG_FORMAT", "xml")
    with pytest.raises(ConfigError, match="LOG_FORMAT=xml"):
        log_format()


@pytest.mark.parametrize(("is_terminal", "shown"), [(True, "\rloading [#####..."), (False, "")])
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
