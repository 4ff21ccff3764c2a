"""Commands run in the process of the tests, which must keep its logging."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def unconfigured_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.launch.launch.configure_logging", lambda *_: None)
