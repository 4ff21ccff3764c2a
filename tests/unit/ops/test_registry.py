"""The registry's messages and laziness."""

from __future__ import annotations

import sys

import pytest

from minisgl.core.errors import ConfigError
from minisgl.core.registry import Registry


def make() -> Registry[object]:
    registry: Registry[object] = Registry("toy")
    registry.add("big", "colorsys:rgb_to_hsv", supports=lambda n: None if n > 9 else "needs 10")
    registry.add("even", "no_such_module:x", supports=lambda n: None if n % 2 == 0 else "is odd")
    return registry


def test_registration_imports_nothing_and_load_does():
    sys.modules.pop("colorsys", None)
    registry = make()
    assert "colorsys" not in sys.modules and registry.names == ("big", "even")
    import colorsys

    assert registry.resolve("auto", 11) is colorsys.rgb_to_hsv


def test_auto_takes_the_first_that_fits():
    assert make().choose("auto", 12) == "big"
    assert make().choose("auto", 4) == "even"
    assert make().refusal("big", 4) == "needs 10"


def test_messages():
    with pytest.raises(ConfigError, match=r"no toy fits \(big: needs 10; even: is odd\)"):
        make().choose("auto", 3)
    with pytest.raises(ConfigError, match=r"no toy fits \(even: is odd\)"):
        make().resolve("even", 11)
    with pytest.raises(ConfigError, match="unknown toy 'huge'; known: big, even"):
        make().load("huge")
