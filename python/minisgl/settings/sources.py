"""Where the values of options come from: the command line, the environment, and the YAML file given by `--config`.

A flag overrides the environment, and the environment overrides the file. The keys of the file are the flags without the
leading dashes:

    model: ~/models/Qwen3-0.6B
    port: 8000
    max-running-requests: 64       # or max_running_requests
    overlap: false
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

from minisgl.errors import ConfigError, did_you_mean, near_miss
from minisgl.settings.options import (
    SchedulerConfig,
    ServerArgs,
    build_config,
    named_values,
    options_of,
    parse_bool,
    spellings_of,
)

ENV_PREFIX: Final = "MINISGL_"
CONFIG_HELP: Final = "YAML file of options, named like the flags; flags and the environment override the file"
OTHER_VARIABLES: Final = frozenset({"config", "check", "disable_overlap_scheduling", "cpu_isa"})  # are no options


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence, with the flag or command that a misspelt one may mean."""

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        parsed, unknown = super().parse_known_args(*args, **options)
        if unknown:
            hint = did_you_mean(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            self.error(f"there is no command {value!r}{did_you_mean(value, action.choices)}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def add_options(parser: argparse.ArgumentParser, cls: type = ServerArgs) -> None:
    """Add `--config` and one flag for each option of `cls`, in one group for each configuration class."""
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=CONFIG_HELP)
    groups: dict[type, argparse._ArgumentGroup] = {}
    for option in options_of(cls).values():
        owner = option.owner
        if owner not in groups:
            title = owner.__name__.removesuffix("Config").removesuffix("Args").lower()
            groups[owner] = parser.add_argument_group(title, (owner.__doc__ or "").partition("\n")[0])
        help = option.help if option.default in (None, "") else f"{option.help} (default: {option.default})"
        common: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": help.replace("%", "%%")}
        if option.kind is bool:
            common["action"] = argparse.BooleanOptionalAction
        else:
            common["type"] = option.kind
            common["choices"] = option.choices or None
            common["metavar"] = None if option.choices else option.kind.__name__.upper()
        groups[owner].add_argument(*option.flags, **common)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add the positional form of --model."""
    help = "folder or hub id, the same as --model; none = the built-in demo model"
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help=help)


def take_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """The options among the values of a parsed command line, and `config`."""
    given = vars(namespace)
    options = {name: value for name, value in given.items() if name in options_of(ServerArgs) or name == "config"}
    if given.get("positional_model") is not None:
        if "model" in options:
            raise ConfigError("give the model once: MODEL or --model")
        options["model"] = given["positional_model"]
    if options.get("model") and (folder := Path(options["model"]).expanduser()).is_dir():
        options["model"] = str(folder.resolve())
    return options


def parse_args(argv: list[str] | None = None, prog: str = "minisgl serve") -> ServerArgs:
    """Flags (and an optional positional MODEL) -> `ServerArgs`.

    Raises `ConfigError` for values that cannot work; a flag that cannot be parsed ends the process with status 2.
    """
    parser = Parser(prog=prog, description="Serve a language model over HTTP (OpenAI's API).", allow_abbrev=False)
    add_model_argument(parser)
    add_options(parser)
    return args_from_options(take_options(parser.parse_args(argv)))


def args_from_options(given: dict[str, Any]) -> ServerArgs:
    """`ServerArgs` from the options `given` on the command line, the environment and the file."""
    return build_config(ServerArgs, server_options(given))


def server_options(given: dict[str, Any]) -> dict[str, Any]:
    """The options `given` on the command line over those of the environment over those of the file."""
    return _merge_sources(given, ServerArgs)


def engine_options(given: dict[str, Any]) -> dict[str, Any]:
    """As `server_options`, without the options that only a server has."""
    return _merge_sources(given, SchedulerConfig)


def _merge_sources(given: dict[str, Any], cls: type) -> dict[str, Any]:
    """The options of `cls` from all sources; file and environment may also set options that only a server has."""
    path = given.get("config", os.environ.get(f"{ENV_PREFIX}CONFIG"))
    from_file = {} if path is None else _read_file(Path(path).expanduser(), path)
    options = {name: value for name, value in (from_file | _read_environment()).items() if name in options_of(cls)}
    return options | {name: value for name, value in given.items() if name != "config"}


# -- the environment


def read_flag(name: str) -> bool:
    """The boolean environment variable `name`; unset means False. Raises `ConfigError` for any other value."""
    value = os.environ.get(name, "")
    try:
        return parse_bool(value)
    except ValueError:
        raise ConfigError(f"{name}={value!r} is not a boolean; use 1 or 0") from None


def is_check_mode() -> bool:
    """`MINISGL_CHECK=1`: verify every bookkeeping invariant at every step (see scheduler/check.py)."""
    return read_flag("MINISGL_CHECK")


def is_overlap_disabled() -> bool:
    """`MINISGL_DISABLE_OVERLAP_SCHEDULING=1`: collect each batch before the next one is planned (the ablation)."""
    return read_flag("MINISGL_DISABLE_OVERLAP_SCHEDULING")


def _read_environment() -> dict[str, Any]:
    """The options that MINISGL_<NAME> variables set. A variable that is like no option is ignored, with a warning."""
    spellings = spellings_of(ServerArgs)
    given = []
    for variable, text in sorted(os.environ.items()):
        name = variable.removeprefix(ENV_PREFIX).lower()
        if not variable.startswith(ENV_PREFIX) or name in OTHER_VARIABLES:
            continue
        if name not in spellings:
            if close := near_miss(name, {*spellings, *OTHER_VARIABLES}):
                raise ConfigError(f"{variable} is not an option; did you mean {ENV_PREFIX}{close.upper()}?")
            print(f"minisgl: the environment variable {variable} is not an option and is ignored", file=sys.stderr)
            continue
        value = options_of(ServerArgs)[spellings[name]].parse(text, f"{variable}=")
        given.append((name, value, f"{variable}: "))
    return named_values(given, ServerArgs)


# -- the file


def _read_file(path: Path, shown: str) -> dict[str, Any]:
    """The options that the file sets; a null counts as a missing key. Errors name the file, the line and the key."""
    known, spellings = options_of(ServerArgs), spellings_of(ServerArgs)
    pairs = [(key, value, f"{shown}, line {line}: ") for key, value, line in _pairs(path)]
    values = named_values(pairs, ServerArgs)
    for key, value, where in pairs:
        if value is not None:
            known[spellings[key.replace("-", "_")]].check(value, f"{where}{key}=")
    return {name: value for name, value in values.items() if value is not None}


def _pairs(path: Path) -> Iterator[tuple[Any, Any, int]]:
    """(key, value, line) of each entry of the file's mapping."""
    import yaml  # not needed by a start without a file

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
