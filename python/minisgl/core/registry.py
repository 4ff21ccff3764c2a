"""Registries of named alternatives (ops, attention backends, models), which are imported only when chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, TypeVar

from minisgl.core.errors import ConfigError

T = TypeVar("T")

Supports = Callable[..., str | None]
"""Asked with the arguments of `choose`: None when the alternative fits, else the reason why not."""


@dataclass(frozen=True, slots=True)
class _Entry:
    target: str
    supports: Supports | None


class Registry(Generic[T]):
    """Alternatives in order of preference. Adding one takes a file and a line.

    `kind` is the word for messages ("attention backend"). Registration imports nothing, so `supports` must be a light
    function (or a `Requirements.refusal`) that lives apart from the implementation.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, _Entry] = {}

    def add(self, name: str, target: str, supports: Supports | None = None) -> None:
        """Declare `name` as the attribute `target` ("package.module:attribute"), after all earlier ones."""
        assert name not in self._entries and name != "auto", f"{self.kind} {name!r} is declared twice or reserved"
        assert target.count(":") == 1, f"{target!r} is not module:attribute"
        self._entries[name] = _Entry(target, supports)

    @property
    def names(self) -> tuple[str, ...]:
        """All declared names, in order of preference."""
        return tuple(self._entries)

    def refusal(self, name: str, *args: Any) -> str | None:
        """Return why `name` does not fit `args`; None if it does. Raises `ConfigError` for an unknown name."""
        supports = self._entry(name).supports
        return None if supports is None else supports(*args)

    def choose(self, name: str, *args: Any) -> str:
        """Return `name`, or for "auto" the first name that fits `args`.

        Raises `ConfigError` with the reason of each candidate if none fits.
        """
        candidates = self.names if name == "auto" else (name,)
        reasons = []
        for candidate in candidates:
            reason = self.refusal(candidate, *args)
            if reason is None:
                return candidate
            reasons.append(f"{candidate}: {reason}")
        raise ConfigError(f"no {self.kind} fits ({'; '.join(reasons) or 'none is known'})")

    def load(self, name: str) -> T:
        """Import the alternative called `name`. Raises `ConfigError` for an unknown name."""
        module, _, attribute = self._entry(name).target.partition(":")
        loaded: T = getattr(import_module(module), attribute)
        return loaded

    def resolve(self, name: str, *args: Any) -> T:
        """Load what `choose` returns."""
        return self.load(self.choose(name, *args))

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise ConfigError(f"unknown {self.kind} {name!r}; known: {', '.join(self.names)}")
        return entry
