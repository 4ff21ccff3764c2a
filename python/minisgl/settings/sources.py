"""Where options come from besides the command line: the environment, and a YAML file given by `--config`.

model: ~/models/Qwen3-0.6B     # the keys of the file are the flags, without the dashes in front
port: 8000
max-running-requests: 64       # or max_running_requests
overlap: false
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Final

from minisgl.errors import ConfigError
from minisgl.settings.config import option_fields
from minisgl.settings.env import read_flag

ENV_PREFIX: Final = "MINISGL_"
CONFIG_HELP: Final = "YAML file of options, named as the flags are; flags and the environment go before it"


@dataclass(frozen=True)
class Setting:
    """One option that a user can set, as its configuration class declares it."""

    owner: type
    kind: type  # str, int, float or bool
    help: str
    default: Any  # None: computed, or none
    flags: tuple[str, ...]  # further spellings of its flag
    choices: tuple[str, ...]

    def check(self, value: Any, where: str) -> Any:
        """`value` if it can be this option's (whole numbers are fine where fractions are), or `ConfigError`."""
        if self.kind is float and type(value) is int:
            value = float(value)
        if type(value) is not self.kind:
            raise ConfigError(f"{where}={value!r} is not of type {self.kind.__name__}")
        if self.choices and value not in self.choices:
            raise ConfigError(f"{where}={value!r} is not one of {', '.join(self.choices)}")
        return value


def settings_of(cls: type) -> dict[str, Setting]:
    """The settings of a (nested) configuration class, by field name."""
    found = {}
    for name, (owner, type_name) in option_fields(cls).items():
        f = next(f for f in fields(owner) if f.name == name)
        if "help" in f.metadata:
            kind = {"str": str, "int": int, "float": float, "bool": bool}[type_name.removesuffix(" | None")]
            default = None if f.default is MISSING else f.default
            found[name] = Setting(owner, kind, f.metadata["help"], default, f.metadata["flags"], f.metadata["choices"])
    return found


def collect_options(given: dict[str, Any], server: type, cls: type) -> dict[str, Any]:
    """The options for `cls`: those `given` on the command line, then the environment's, then the file's.

    `given["config"]` or MINISGL_CONFIG names the file; it may set any option of `server`, also where `cls` is only the
    part of it that starts no server. Raises `ConfigError` for what cannot be read.
    """
    path = given.get("config", os.environ.get(f"{ENV_PREFIX}CONFIG"))
    from_file = {} if path is None else _options_from_file(path, settings_of(server))
    wanted = settings_of(cls)
    rest = {name: value for name, value in given.items() if name != "config"}
    return {n: v for n, v in from_file.items() if n in wanted} | _options_from_env(wanted) | rest


def _options_from_env(settings: dict[str, Setting]) -> dict[str, Any]:
    """What `MINISGL_<FLAG>` says."""
    options: dict[str, Any] = {}
    for name, setting in settings.items():
        variable = ENV_PREFIX + name.upper()
        text = os.environ.get(variable)
        if text is None:
            continue
        try:
            value = read_flag(variable) if setting.kind is bool else setting.kind(text)
        except ValueError:
            raise ConfigError(f"{variable}={text!r} is not of type {setting.kind.__name__}") from None
        options[name] = setting.check(value, variable)
    return options


def _options_from_file(path: str, settings: dict[str, Setting]) -> dict[str, Any]:
    """What the file says; a null is as if its key were not there. Errors name the file, the line and the key."""
    options: dict[str, Any] = {}
    for key, value, line in _pairs(Path(path).expanduser()):
        where = f"{path}, line {line}"
        name = key.replace("-", "_") if isinstance(key, str) else ""
        if name not in settings:
            raise ConfigError(f"{where}: there is no option {key!r}; `minisgl serve --help` lists them")
        if name in options:
            raise ConfigError(f"{where}: {key} is set twice")
        if value is not None:
            options[name] = settings[name].check(value, f"{where}: {key}")
    return options


def _pairs(path: Path) -> Iterator[tuple[Any, Any, int]]:
    """(key, value, line) of the mapping in the file."""
    import yaml  # most starts need none

    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if node is not None and not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"--config {path} must hold lines like `port: 8000`")
        for key, value in () if node is None else node.value:
            yield (
                loader.construct_object(key, deep=True),
                loader.construct_object(value, deep=True),
                key.start_mark.line + 1,
            )
    except OSError as e:
        raise ConfigError(f"cannot read --config {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"--config {path} is not UTF-8 text") from e
    except (yaml.YAMLError, ValueError) as e:  # ValueError: a date like 2026-13-40
        raise ConfigError(f"--config {path} is not valid YAML: {' '.join(str(e).split())}") from e
