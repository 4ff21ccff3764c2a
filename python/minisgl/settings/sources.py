"""Reads the values of options from the command line, the environment, and the YAML file given by `--config`.

A flag overrides the environment, and the environment overrides the file. The keys of the file are the flags without the
leading dashes:

    model: ~/models/Qwen3-0.6B
    port: 8000
    max-running-requests: 64       # or max_running_requests
    overlap: false

Names options in messages as their user has written them: other code calls each by a flag of ours.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NoReturn

from minisgl.core.errors import ConfigError, MinisglError, did_you_mean, near_miss
from minisgl.settings.foreign import asks_nothing, foreign, sentence_for
from minisgl.settings.options import (
    COMMON,
    Option,
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
OTHER_VARIABLES: Final = frozenset({"config", "check", "disable_overlap_scheduling", "cpu_isa"})  # not options
# Kubernetes sets variables like these in each pod for a service named minisgl or minisgl-something.
OF_A_SERVICE: Final = re.compile(
    r"(\w+_)?(service_(host|port(_\w+)?)=.*|port_\d+_(tcp|udp|sctp)(_\w+)?=.*|port=(tcp|udp|sctp)://.*)"
)


class _Help(argparse.RawDescriptionHelpFormatter):
    """Shows the value of an option only once, after its last flag, and not in the usage."""

    def add_usage(self, usage: str | None, actions: Any, groups: Any, prefix: str | None = None) -> None:
        positional = (action for action in actions if not action.option_strings)
        words = [self._format_args(action, self._get_default_metavar_for_positional(action)) for action in positional]
        options = ["[OPTIONS]"] if prefix is None else []  # with one it becomes the `prog` of subcommands
        super().add_usage(" ".join(["%(prog)s", *words, *options]), actions, groups, prefix)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        values = self._format_args(action, self._get_default_metavar_for_optional(action))
        return f"{', '.join(action.option_strings)} {values}"


class _HelpAll(argparse.Action):
    """Prints the help with all options, and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        for action in parser._actions:
            if isinstance(action, _SetOption):
                action.help = action.full_help
        parser.print_help()
        parser.exit()


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence, which suggests the right flag for an unknown one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Help, **options})

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        return []  # argparse would read -t as the beginning of -tp, and llama.cpp's -hf as -h -f

    def parse_known_args(self, *args: Any, **options: Any) -> Any:
        parsed, unknown = super().parse_known_args(*args, **options)
        # What another engine leaves out on request is left out here.
        unknown = [word for word in unknown if not (word.startswith("--no-") and asks_nothing(_words(word[5:]), None))]
        if unknown:
            flag = unknown[0].partition("=")[0]
            if sentence := sentence_for(_words(flag.lstrip("-"))):
                self.error(f"{flag}: {sentence}")
            self.error(f"unrecognized arguments: {' '.join(unknown)}{did_you_mean(flag, self._option_string_actions)}")
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            hint = foreign().commands.get(" ".join((*self.prog.split()[1:], value)))
            self.error(f"there is no command {value!r}{f': {hint}' if hint else did_you_mean(value, action.choices)}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def _words(flag: str) -> str:
    return flag.replace("-", "_")


class _SetOption(argparse.Action):
    """Converts the value of a flag as other sources' values, and stores it under the option's main name."""

    def __init__(self, cls: type, **options: Any) -> None:
        super().__init__(**{**options, "default": argparse.SUPPRESS})
        self._cls = cls
        self.full_help = self.help
        if self.dest not in COMMON and options_of(ServerArgs).get(self.dest):
            self.help = argparse.SUPPRESS

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        assert flag is not None, "a value without a flag is not an option"
        if isinstance(values, list):
            values = _joined(values, flag) if values else "true"
        namespace.written = [*getattr(namespace, "written", []), flag]
        given = [(flag.lstrip("-"), values, f"{flag} ")]
        for name, value in named_values(given, self._cls, is_text=True).items():
            if options_of(self._cls)[name].form is list and (others := getattr(namespace, name, None)):
                value = f"{others},{value}"
            setattr(namespace, name, value)


def _joined(words: list[str], flag: str) -> str:
    """Join the words after a flag that takes several. Raises `ConfigError` for a word that is probably the model."""
    for word in words[1:]:
        if ("/" in word and "=" not in word) or Path(word).is_dir():
            raise ConfigError(f"{flag} takes all words after it: put MODEL {word} first, or join names with commas")
    return ",".join(words)


def add_options(parser: argparse.ArgumentParser, cls: type = ServerArgs) -> None:
    """Add `--config` and the flags of all options of `cls`, in a group per configuration class."""
    parser.add_argument("--help-all", action=_HelpAll, nargs=0, help="show all options and exit")
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=CONFIG_HELP)
    groups: dict[type, argparse._ArgumentGroup] = {}
    named: set[str] = set()
    for option in options_of(cls).values():
        owner = option.owner
        if owner not in groups:
            groups[owner] = parser.add_argument_group((owner.__doc__ or "").partition("\n")[0].rstrip(".:"))
        shown = [name for name in (option.name, *option.aliases) if spellings_of(cls)[name] is option]
        named |= {*shown}
        groups[owner].add_argument(*_flags(*shown), action=_SetOption, cls=cls, help=_help(option), **_shape(option))
    switches = {name: option.kind is bool for name, option in spellings_of(cls).items()}
    switches |= {name: "true" in accepted for name, accepted in foreign().redundant.items()}
    for name in switches.keys() - named:
        nargs = 0 if switches[name] else None
        parser.add_argument(*_flags(name), action=_SetOption, cls=cls, nargs=nargs, help=argparse.SUPPRESS)


def _flags(*names: str) -> list[str]:
    """Return the flags of spellings. Those of one or two letters also have a form with one dash (-tp)."""
    flags = ["--" + name.replace("_", "-") for name in names]
    return flags + [flag[1:] for flag in flags if len(flag) <= 4]


def _shape(option: Option) -> dict[str, Any]:
    """Return argparse's arguments for the number of values of `option`, and for their name in the help."""
    if option.kind is bool:
        return {"nargs": 0}
    names = f"{{{','.join(map(str, option.choices))}}}" if option.choices else option.kind.__name__.upper()
    return {"nargs": "+" if option.form is list else None, "metavar": names}


def _help(option: Option) -> str:
    """Return the option's help with its default, its opposite, and other engines' flags that set it."""
    notes = [f"--no-{option.flags[0][2:]}: the opposite"] if option.kind is bool else []
    notes += [f"default: {option.default}"] if option.default not in (None, "") else []
    notes += ["also " + ", ".join(f"--{name.replace('_', '-')}" for name in option.switches)] if option.switches else []
    return (f"{option.help} ({'; '.join(notes)})" if notes else option.help).replace("%", "%%")


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Add the positional form of --model."""
    help = "folder, GGUF file or hub id, the same as --model; none = the built-in demo model"
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help=help)


def given_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """Return the options among the values of a parsed command line, and `config`."""
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
    """Parse flags and an optional positional MODEL.

    Raises `ConfigError` for values that cannot work. A flag that cannot be parsed ends the process with status 2.
    """
    parser = Parser(prog=prog, description="Serve a language model over HTTP (OpenAI's API).")
    add_model_argument(parser)
    add_options(parser)
    return args_from_options(given_options(parser.parse_args(argv)))


def args_from_options(given: dict[str, Any]) -> ServerArgs:
    """Build `ServerArgs` from the options `given` on the command line, the environment and the file."""
    return build_config(ServerArgs, server_options(given))


def engine_options(given: dict[str, Any]) -> dict[str, Any]:
    """Return what `server_options` does, without the options that only a server has."""
    return server_options(given, SchedulerConfig)


def server_options(given: dict[str, Any], cls: type = ServerArgs) -> dict[str, Any]:
    """Return the options `given` on the command line, completed from the environment, then from the file.

    File and environment may set options of a server that `cls` does not have.
    """
    path = given.get("config", _config_in_environment())
    in_file = () if path is None else (entry for entry in _file_entries(path) if entry[1] is not None)
    others = named_values(in_file, ServerArgs) | named_values(_checked_environment(), ServerArgs, is_text=True)
    options = {name: value for name, value in others.items() if name in options_of(cls)}
    return options | {name: value for name, value in given.items() if name != "config"}


# -- the environment


def read_flag(name: str) -> bool:
    """Return the boolean environment variable `name`; False if unset. Raises `ConfigError` for other values."""
    value = os.environ.get(name, "")
    try:
        return parse_bool(value)
    except ValueError:
        raise ConfigError(f"{name}={value!r} is not a boolean; use 1 or 0") from None


def is_check_mode() -> bool:
    """Return whether `MINISGL_CHECK=1`: check all bookkeeping invariants at every step (`scheduler/check.py`)."""
    return read_flag("MINISGL_CHECK")


def is_overlap_disabled() -> bool:
    """Return whether `MINISGL_DISABLE_OVERLAP_SCHEDULING=1`: collect each step before the next is planned."""
    return read_flag("MINISGL_DISABLE_OVERLAP_SCHEDULING")


def _config_in_environment() -> str | None:
    return os.environ.get(f"{ENV_PREFIX}CONFIG", "").strip() or None


def _environment() -> Iterator[tuple[str, str, str]]:
    """Yield (spelling, value, what is before the value) of each variable MINISGL_<NAME> that is meant for us."""
    for variable, text in sorted(os.environ.items()):
        name = variable.removeprefix(ENV_PREFIX).lower()
        is_other = name in OTHER_VARIABLES or OF_A_SERVICE.fullmatch(f"{name}={text}")
        if variable.startswith(ENV_PREFIX) and text.strip() and not is_other:
            yield name, text, f"{variable}="


def _checked_environment() -> Iterator[tuple[str, str, str]]:
    """Yield what `_environment` does, without unknown names, which are told. Raises `ConfigError` for misspelt ones."""
    spellings = spellings_of(ServerArgs)
    for name, text, source in _environment():
        if name in spellings or sentence_for(name):
            yield name, text, source
            continue
        variable = source.rstrip("=")
        if close := near_miss(name, {*spellings, *OTHER_VARIABLES}):
            raise ConfigError(f"{variable} is not an option; did you mean {ENV_PREFIX}{close.upper()}?")
        print(f"minisgl: the environment variable {variable} is not an option and is ignored", file=sys.stderr)


# -- the file


def _file_entries(shown: str) -> Iterator[tuple[Any, Any, str]]:
    """Yield (spelling, value, what is before the value) of each entry of the file's mapping; null means unset."""
    import yaml  # only needed if there is a file

    path = Path(shown).expanduser()
    try:
        loader = yaml.SafeLoader(path.read_text(encoding="utf-8"))
        node = loader.get_single_node()
        if node is not None and not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"--config {path} must hold lines like `port: 8000`")
        for key_node, value_node in () if node is None else node.value:
            key, value = (loader.construct_object(each, deep=True) for each in (key_node, value_node))
            yield key, value, f"{shown}, line {key_node.start_mark.line + 1}: {key}="
    except OSError as e:
        raise ConfigError(f"cannot read --config {path}: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise ConfigError(f"--config {path} is not UTF-8 text") from e
    except (yaml.YAMLError, ValueError) as e:  # ValueError: a date like 2026-13-40
        raise ConfigError(f"--config {path} is not valid YAML: {' '.join(str(e).split())}") from e


# -- messages


def as_written(message: str, given: Iterable[tuple[Any, str]]) -> str:
    """Return `message`, which has our flags, with the names that the user has written.

    `given`: (a spelling, what was written before its value), such as ("max_model_len", "MINISGL_MAX_MODEL_LEN="). The
    last of several for one option counts.
    """
    spellings, options = spellings_of(ServerArgs), options_of(ServerArgs).values()
    sources = {option.name: source for name, source in given if (option := spellings.get(_words(str(name))))}
    words = "|".join(re.escape(str(choice)) for option in options for choice in option.choices)

    def rename(match: re.Match[str]) -> str:
        option = spellings.get(_words(match[1]))
        source = match[0] if option is None else sources.get(option.name, match[0])
        return source if match[2] else source.rpartition(": ")[2].rstrip("= ")

    return re.sub(rf"(?<![\w-])--([a-z][\w-]*)( (?=[\d'\"/~.]|(?:{words})\b))?", rename, message)


def as_typed(error: MinisglError, options: argparse.Namespace) -> str:
    """Return the message of `error` for a parsed command line; environment and file are read again for their names."""
    cause = error.__cause__ if isinstance(error.__cause__, ConfigError) else error  # `LLM` has named its keywords
    given: list[tuple[Any, str]] = []
    if path := vars(options).get("config", _config_in_environment()):
        with contextlib.suppress(ConfigError):  # a file that cannot be read: `error` is about that
            given = [(name, source) for name, _, source in _file_entries(path)]
    given += [(name, source) for name, _, source in _environment()]
    given += [(flag.lstrip("-"), f"{flag} ") for flag in getattr(options, "written", [])]
    return as_written(str(cause), given)
