"""Which layers see the last `sliding_window` positions only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from minisgl.errors import ConfigError
from minisgl.models.fields import size

FULL, SLIDING = "full_attention", "sliding_attention"


def _is_last(config: dict[str, Any], i: int) -> bool:
    first = config.get("max_window_layers", 28)
    if not isinstance(first, int):
        raise ConfigError(f"config.json has max_window_layers={first!r}; a number of layers is needed")
    return i >= first


# Whether layer i has the window, by `Flags.slides`.
SLIDES: Final[Mapping[str, Callable[[dict[str, Any], int], bool]]] = MappingProxyType(
    {
        "all": lambda config, i: True,
        "last": _is_last,
        "pattern": lambda config, i: (i + 1) % size(config, "sliding_window_pattern") != 0,  # all but every n-th
    }
)


def read_windows(
    config: dict[str, Any], num_layers: int, slides: str | None, has_switch: bool
) -> tuple[int | None, ...]:
    """The window of each layer, None where it sees everything; raises `ConfigError`.

    `layer_types` goes before the family's rule, except in families whose layers are all alike: there it must agree.
    """
    kinds = config.get("layer_types")
    if kinds is not None and (len(kinds) != num_layers or not {*kinds} <= {FULL, SLIDING}):
        raise ConfigError(
            f"config.json has layer_types={kinds}; for {num_layers} layers as many of {FULL} and {SLIDING} are needed"
        )
    is_on = config.get("sliding_window") is not None
    if has_switch:
        is_on = is_on and bool(config.get("use_sliding_window", False))
    if slides is None and is_on and size(config, "sliding_window") < size(config, "max_position_embeddings"):
        raise ConfigError(f"sliding_window={config['sliding_window']} is nothing that this architecture has")
    if slides is None or not is_on:
        rule = [False] * num_layers
    elif kinds is not None and slides != "all":
        rule = [kind == SLIDING for kind in kinds]
    else:
        rule = [SLIDES[slides](config, i) for i in range(num_layers)]
    if kinds is not None and [kind == SLIDING for kind in kinds] != rule:
        raise ConfigError("layer_types in config.json contradicts the other fields about sliding windows")
    window = size(config, "sliding_window") if any(rule) else None
    return tuple(window if slid else None for slid in rule)
