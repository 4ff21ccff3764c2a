"""The log's lines and levels."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from minisgl.errors import ConfigError
from minisgl.process.logger import configure_logging, log_level


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    logger = logging.getLogger("minisgl")
    old = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = old


def test_lines_name_their_process(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOG_LEVEL", raising=False)
    for _ in range(2):  # twice does not mean two lines
        configure_logging("minisgl-test-0")
    logging.getLogger("minisgl.some.module").info("something %d", 1)
    logging.getLogger("minisgl.some.module").debug("hidden")
    error = capsys.readouterr().err
    assert error.endswith("I minisgl-test-0: something 1\n")
    assert len(error.splitlines()) == 1


def test_unknown_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOG_LEVEL", "debug")
    assert log_level() == "DEBUG"
    monkeypatch.setenv("LOG_LEVEL", "loud")
    with pytest.raises(ConfigError, match="LOUD"):
        log_level()
