"""Adapters on the disk, in PEFT's layout: what is known of them before their weights are read. No torch."""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

from minisgl.core.errors import ConfigError
from minisgl.core.params import Adapter

CONFIG: Final = "adapter_config.json"


def adapters_of(asked: str | None) -> list[Adapter]:
    """Return the adapters of `--lora`: NAME=PATH, or a folder of adapters, separated by commas."""
    found: list[Adapter] = []
    for part in asked.split(",") if asked else []:
        name, is_named, path = part.partition("=")
        if is_named:
            found.append(make_adapter(name, Path(path)))
            continue
        folders = sorted(file.parent for file in Path(part).glob(f"*/{CONFIG}"))
        if not folders:
            raise ConfigError(f"--lora {part} is not NAME=PATH, and no folder in it has {CONFIG}")
        found += [make_adapter(folder.name, folder) for folder in folders]
    return found


def by_name(adapters: Iterable[Adapter]) -> dict[str, Adapter]:
    """Return `adapters` by name. Raises `ConfigError` if two have the same."""
    found: dict[str, Adapter] = {}
    for adapter in adapters:
        if found.setdefault(adapter.name, adapter) is not adapter:
            raise ConfigError(f"--lora has two adapters {adapter.name!r}: name one of them, as NAME=PATH")
    return found


def make_adapter(name: str, folder: Path) -> Adapter:
    """Return the adapter in `folder`. Raises `ConfigError` if it has none."""
    folder = folder.expanduser().absolute()
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(folder.iterdir())]
    return Adapter(name, str(folder), blake2b(repr(stats).encode(), digest_size=8).hexdigest())


def read_config(folder: Path) -> dict[str, Any]:
    """Return adapter_config.json. Raises `ConfigError` for a kind of adapter that cannot be served."""
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    return config


def largest_rank(config: dict[str, Any]) -> int:
    """Return the rank of a slot that the adapter needs: a bias takes one."""
    ranks: list[int] = [config["r"], *(config.get("rank_pattern") or {}).values()]
    return max(ranks) + bool(config.get("lora_bias"))
