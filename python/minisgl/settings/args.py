"""Settings of the server and the command line made from them: every flag is a dataclass field."""

from __future__ import annotations

import argparse
import ipaddress
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NoReturn

from minisgl.errors import ConfigError
from minisgl.settings.config import SchedulerConfig, build_config, option, option_fields
from minisgl.settings.sources import CONFIG_HELP, collect_options, settings_of

MAX_TOKENIZERS: Final = 64


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """How the server listens and supervises its processes."""

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    host: str = option("127.0.0.1", "address to listen on; one that others can reach needs --api-key or --no-auth")
    port: int = option(1919, "port to listen on; 0 = any free one")
    num_tokenizer: int = option(0, "tokenizer processes; 0 = the detokenizer's process does both")
    served_model_name: str | None = option(None, "name of the model in the API; default = its folder's name or hub id")
    api_key: str | None = option(None, "key that clients must send as `Authorization: Bearer KEY`")
    auth: bool = option(True, "refuse to listen on a reachable address without a key")
    ready_timeout: float = option(600.0, "seconds that the processes may take to become ready")
    drain_timeout: float = option(30.0, "seconds that running requests may take to finish after SIGTERM")
    write_timeout: float = option(30.0, "seconds after which a client that reads nothing is given up")
    heartbeat_timeout: float = option(60.0, "seconds without a sign of life of the engine until /health says so")
    max_body: int = option(4 * 1024 * 1024, "largest request body in bytes")
    ui: bool = option(True, "serve the page at /: a chat and a live view of the engine")
    tool_call_parser: str = option(
        "auto",
        "form of the model's tool calls; auto = as its chat template shows",
        choices=("auto", "none", "hermes", "mistral", "llama3"),
    )
    reasoning_parser: str = option(
        "auto",
        "form of the model's reasoning; auto = as its chat template shows",
        choices=("auto", "none", "think"),
    )
    run_dir: str = ""  # private folder of the ipc sockets; made at start, not an option

    def __post_init__(self) -> None:
        """Raises `ConfigError` for a value that cannot work."""
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port {self.port} is not 0 to 65535")
        if not 0 <= self.num_tokenizer <= MAX_TOKENIZERS:
            raise ConfigError(f"--num-tokenizer {self.num_tokenizer} is not 0 to {MAX_TOKENIZERS}")
        for name in ("ready_timeout", "drain_timeout", "write_timeout", "heartbeat_timeout"):
            if not 0 < getattr(self, name) < 1e6:
                raise ConfigError(f"--{name.replace('_', '-')} must be a positive number of seconds")
        if not 1024 <= self.max_body <= 2**30:
            raise ConfigError("--max-body must be 1024 to 2^30 bytes")
        if self.api_key is not None and not (self.api_key and self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("--api-key must be printable ASCII and not empty")
        if self.auth and self.api_key is None and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} lets others use this server; give --api-key KEY, or --no-auth to allow everybody"
            )

    def _addr(self, name: str) -> str:
        assert self.run_dir, "the run directory is not made yet"
        return f"ipc://{self.run_dir}/{name}"

    @property
    def zmq_frontend_addr(self) -> str:
        """Where the API server receives."""
        return self._addr("frontend")

    @property
    def zmq_backend_addr(self) -> str:
        """Where the scheduler receives."""
        return self._addr("backend")

    @property
    def zmq_detokenizer_addr(self) -> str:
        """Where the detokenizer receives."""
        return self._addr("detokenizer")

    @property
    def zmq_tokenizer_addrs(self) -> list[str]:
        """Where the tokenizers receive, one address each, so that a request and its abort keep their order."""
        if self.num_tokenizer == 0:
            return [self.zmq_detokenizer_addr]
        return [self._addr(f"tokenizer-{i}") for i in range(self.num_tokenizer)]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message} (see {self.prog} --help)", file=sys.stderr)
        sys.exit(2)


def add_options(parser: argparse.ArgumentParser, cls: type = ServerArgs) -> None:
    """`--config` and one flag for each option of the (nested) configuration `cls`, in a group for each class."""
    parser.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=CONFIG_HELP)
    groups: dict[type, argparse._ArgumentGroup] = {}
    for name, setting in settings_of(cls).items():
        owner = setting.owner
        if owner not in groups:
            title = owner.__name__.removesuffix("Config").removesuffix("Args").lower()
            groups[owner] = parser.add_argument_group(title, (owner.__doc__ or "").partition("\n")[0])
        help = setting.help
        if setting.default not in (None, ""):
            help += f" (default: {setting.default})"
        common: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": help.replace("%", "%%")}
        if setting.kind is bool:
            common["action"] = argparse.BooleanOptionalAction
        else:
            common["type"] = setting.kind
            common["choices"] = setting.choices or None
            common["metavar"] = None if setting.choices else setting.kind.__name__.upper()
        groups[owner].add_argument("--" + name.replace("_", "-"), *setting.flags, **common)


def args_from_options(options: dict[str, Any]) -> ServerArgs:
    """`ServerArgs` from flat options, those given here before those of the environment and of the file."""
    return build_config(ServerArgs, server_options(options))


def parse_args(argv: list[str] | None = None, prog: str = "minisgl serve") -> ServerArgs:
    """Flags (and an optional positional MODEL) -> `ServerArgs`.

    Raises `ConfigError` for values that cannot work; a flag that cannot be parsed ends the process with status 2.
    """
    parser = Parser(prog=prog, description="Serve a language model over HTTP (OpenAI's API).", allow_abbrev=False)
    add_model_argument(parser)
    add_options(parser)
    return args_from_options(take_options(parser.parse_args(argv)))


def engine_options(options: dict[str, Any]) -> dict[str, Any]:
    """As `server_options`, for whoever starts no server; raises `ConfigError` for a server's own."""
    if extra := options.keys() - settings_of(SchedulerConfig).keys() - {"config"}:
        raise ConfigError(f"no server is started here, so {', '.join(sorted(extra))} cannot be used")
    return collect_options(options, ServerArgs, SchedulerConfig)


def server_options(options: dict[str, Any]) -> dict[str, Any]:
    """`options` and, behind them, those of the environment and of the file."""
    return collect_options(options, ServerArgs, ServerArgs)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """The positional form of --model."""
    help = "folder or hub id, the same as --model; none = the built-in demo model"
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help=help)


def take_options(namespace: argparse.Namespace) -> dict[str, Any]:
    """The configuration options of a parsed command line."""
    given = vars(namespace)
    options = {name: value for name, value in given.items() if name in option_fields(ServerArgs) or name == "config"}
    if given.get("positional_model") is not None:
        if "model" in options:
            raise ConfigError("give the model once: MODEL or --model")
        options["model"] = given["positional_model"]
    if options.get("model") and Path(options["model"]).expanduser().is_dir():
        options["model"] = str(Path(options["model"]).expanduser().resolve())
    return options
