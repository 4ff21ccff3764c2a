"""Every option once: its name, aliases, default, range and help.

Command-line flags, environment variables, the YAML file (`settings/sources.py`) and the keywords of `LLM(...)` are all
made from the fields below, so this module must not import torch: the API process reads it too. The fields hold what the
user *asked for*. `engine/config.py: resolve` computes what follows for one model and machine, and never writes back.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from operator import ge, gt, le
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_type_hints

from minisgl.errors import ConfigError, did_you_mean

T = TypeVar("T")

TRUE: Final = {"1", "true", "yes", "on"}
FALSE: Final = {"", "0", "false", "no", "off"}

# What the options that depend on the kind of device default to.
MAX_DRAFTS: Final = 8  # tokens of a row that a step computes behind the newest
PAGE_SIZES: Final = {"cpu": 16, "cuda": 64}  # larger pages read faster on a GPU, smaller pages share more
MEMORY_RATIOS: Final = {"cpu": 0.1, "cuda": 0.9}


def option(
    default: Any,
    help: str,
    *,
    aliases: tuple[str, ...] = (),
    choices: tuple[str | int, ...] = (),
    above: float | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """Declare a configuration field that users can set; its bounds are inclusive except for `above`."""
    bounds = {"above": above, "minimum": minimum, "maximum": maximum}
    return field(default=default, metadata={"help": help, "aliases": aliases, "choices": choices, **bounds})


def seconds(default: float, help: str) -> Any:
    """Declare a duration in seconds."""
    return option(default, help, above=0, maximum=1e6)


@dataclass(frozen=True)
class Option:
    """One option, as the configuration class `owner` declares it."""

    name: str
    owner: type
    kind: type  # str, int, float or bool
    is_optional: bool  # None is a value: the default is computed, or the feature is off
    default: Any
    help: str
    aliases: tuple[str, ...]
    choices: tuple[str | int, ...]
    above: float | None
    minimum: float | None
    maximum: float | None

    @property
    def flags(self) -> list[str]:
        """The spellings of the command-line flag, the main one first."""
        return ["--" + name.replace("_", "-") for name in (self.name, *self.aliases)]

    def parse(self, text: str, source: str) -> Any:
        """The value that `text` means. Raises `ConfigError` as `check` does."""
        try:
            value = parse_bool(text) if self.kind is bool else self.kind(text)
        except ValueError:
            raise ConfigError(f"{source}{text!r} is not of type {self.kind.__name__}") from None
        return self.check(value, source)

    def check(self, value: Any, source: str) -> Any:
        """Return `value`, an integer as a float where the option is a float.

        Raises `ConfigError` for a value of another type or out of range; the message begins with `source` (such as
        "--port " or "MINISGL_PORT=") and the value.
        """
        if value is None and self.is_optional:
            return None
        given = f"{source}{value!r}"
        if self.kind is float and type(value) is int:
            value = float(value)
        kind = type(value)
        if kind is not self.kind and not (self.kind is str and isinstance(value, PathLike)):
            raise ConfigError(f"{given} is not of type {self.kind.__name__}")
        if self.choices and value not in self.choices:
            raise ConfigError(f"{given} is not one of {', '.join(map(str, self.choices))}")
        bounds = (("above", self.above, gt), ("at least", self.minimum, ge), ("at most", self.maximum, le))
        violated = [
            f"{words} {bound}" for words, bound, holds in bounds if bound is not None and not holds(value, bound)
        ]
        if violated:
            raise ConfigError(f"{given} must be {' and '.join(violated)}")
        return value


def parse_bool(text: str) -> bool:
    """True for 1, true, yes and on, False for their opposites and for nothing; raises `ValueError` for other texts."""
    word = text.strip().lower()
    if word not in TRUE | FALSE:
        raise ValueError(text)
    return word in TRUE


class Settings:
    """Base of the configuration classes."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value of the wrong type or out of range."""
        for name, declared in options_of(type(self)).items():
            if declared.owner is type(self):
                declared.check(getattr(self, name), f"{declared.flags[0]} ")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Settings):
    """What runs one model on one device."""

    model: str = option("", "folder or hub id of the model; empty = the built-in demo model", aliases=("model_path",))
    download_source: str = option(
        "huggingface", "hub that a model id is downloaded from", choices=("huggingface", "modelscope")
    )
    dtype: str = option(
        "auto",
        "number format of weights and KV cache; auto = the checkpoint's; on a CPU float32, or bfloat16 for large "
        "bfloat16 models that the C++ step can run",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str | None = option(
        None,
        "quantize the projections of a checkpoint in 16 or 32 bits at the start: on a GPU fp8 or int4, on a CPU int8 "
        "or int4; default = keep --dtype",
        choices=("int8", "fp8", "int4"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "number format of the KV cache: auto = --dtype, fp8 = 8 bits with a scale for each token and head",
        choices=("auto", "fp8"),
    )
    device: str = option("auto", "where to run; auto = a GPU if there is one", choices=("auto", "cpu", "cuda"))
    page_size: int | None = option(
        None,
        f"tokens per KV page; default = {PAGE_SIZES['cuda']} on a GPU, {PAGE_SIZES['cpu']} on a CPU",
        choices=(1, 2, 4, 8, 16, 32, 64, 128),
    )
    num_pages: int | None = option(None, "KV pages in the pool; default = what --memory-ratio allows", minimum=1)
    memory_ratio: float | None = option(
        None,
        "part of the free memory (after weights) for the KV cache; "
        f"default = {MEMORY_RATIOS['cuda']} on a GPU, {MEMORY_RATIOS['cpu']} on a CPU",
        above=0,
        maximum=1,
    )
    max_running_requests: int = option(256, "maximum number of requests computed at the same time", minimum=1)
    max_seq_len: int | None = option(
        None,
        "maximum tokens of prompt plus output; default = the model's",
        aliases=("max_seq_len_override",),
        minimum=2,
    )
    attention_backend: str = option(
        "auto", "attention backend, or PREFILL,DECODE; `minisgl doctor` lists the names", aliases=("attn",)
    )
    cuda_graph_max_bs: int | None = option(
        None,
        "largest batch whose decode steps run as CUDA graphs, 0 = none; default = --max-running-requests on a GPU",
        aliases=("graph",),
        minimum=0,
    )
    dummy_weight: bool = option(False, "random weights instead of the checkpoint's (needs only config.json)")
    speculate: str = option(
        "off",
        "draft several tokens a step, which never changes a text: ngram = what followed the last tokens before, "
        "auto = as many as pay",
        choices=("off", "auto", "ngram"),
    )
    num_draft_tokens: int = option(4, "drafts of a request in one step, at most", minimum=1, maximum=MAX_DRAFTS)
    threads: int | None = option(
        None, "CPU threads of each rank; default = the usable cores divided among the ranks", minimum=1
    )
    tp: int = option(
        1,
        "ranks (GPUs, or processes on a CPU) that compute each layer together",
        aliases=("tp_size", "tensor_parallel_size"),
        minimum=1,
    )
    disable_pynccl: bool = option(False, "let torch's process groups call NCCL instead of calling NCCL directly")
    nnodes: int = option(1, "hosts with equally many ranks; start the same command on every host", minimum=1)
    node_rank: int = option(0, "number of this host; host 0 serves", minimum=0)
    dist_init_addr: str = option("", "HOST:PORT of host 0, where the other hosts connect; use a private network")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(Settings):
    """What decides which request runs when."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    cache_type: str = option(
        "radix",
        "prefix cache: radix = share common prefixes, naive = none",
        aliases=("cache",),
        choices=("radix", "naive"),
    )
    schedule_policy: str = option(
        "fcfs",
        "order of waiting requests: fcfs = the shortest prompt first, within a bound for the others, then by arrival; "
        "lpm = longest cached prefix first",
        choices=("fcfs", "lpm"),
    )
    max_prefill_length: int = option(
        8192,
        "token budget of one step: running requests first, the rest for chunks of prompts",
        aliases=("max_extend_length",),
        minimum=1,
    )
    itl_target_ms: float | None = option(
        None,
        "target for the time between two tokens of a running stream in ms, met by limiting the prompt tokens computed "
        "in the same step, 0 = no limit; default = 29, or twice a pure decode step if that is longer, where the engine "
        "has measured the cost of a step",
        minimum=0,
        maximum=1e9,
    )
    mixed_batches: bool = option(
        True, "compute prompts and running requests in one step; off = running requests wait while there are prompts"
    )
    overlap: bool | None = option(
        None, "plan and reply while the device computes; default = on for a GPU, off for a CPU"
    )
    max_queued_requests: int = option(2048, "waiting requests beyond which new ones are refused (429)", minimum=0)
    max_queued_tokens: int = option(
        1 << 20,
        "waiting prompt tokens beyond which a new prompt is refused (429); those that it would pass do not count",
        minimum=0,
    )
    max_queue_time: float = seconds(300.0, "seconds after which a request that still waits is refused (503)")
    view_texts: bool = option(
        False, "show the beginnings of cached prompts in the Engine view, but of salted ones: for a server of your own"
    )
    record: str | None = option(None, "file to write messages and sampled tokens to, hashed, for `minisgl replay`")
    record_texts: bool = option(False, "record the tokens themselves")
    sampling_seed: int = option(0, "base of the sampling noise of requests without a seed of their own")


@dataclass(frozen=True, kw_only=True)
class ServerArgs(Settings):
    """How the server listens and supervises its processes."""

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    host: str = option("127.0.0.1", "address to listen on; one that others can reach needs --api-key or --no-auth")
    port: int = option(1919, "port to listen on; 0 = any free port", minimum=0, maximum=65535)
    num_tokenizer: int = option(
        1,
        "tokenizer processes; 0 = the detokenizer does both: streams wait for long prompts",
        minimum=0,
        maximum=64,
    )
    served_model_name: str | None = option(None, "name of the model in the API; default = its folder's name or hub id")
    api_key: str | None = option(None, "key that clients must send as `Authorization: Bearer KEY`")
    api_key_file: str | None = option(None, "file with the key, which keeps it out of the list of processes")
    allowed_hosts: str | None = option(
        None, "comma-separated names under which clients reach this server, * = any; default = this machine's, or any"
    )
    allowed_origins: str | None = option(
        None, "comma-separated web pages that may use this server (https://example.com), * = any; default = none (CORS)"
    )
    open_metrics: bool = option(False, "serve /metrics without the key")
    auth: bool = option(True, "refuse to listen on a reachable address without a key")
    ready_timeout: float = seconds(600.0, "seconds that the processes may take to become ready")
    drain_timeout: float = seconds(30.0, "seconds that running requests may take to finish after SIGTERM")
    write_timeout: float = seconds(30.0, "seconds after which a client that does not read is disconnected")
    heartbeat_timeout: float = seconds(
        60.0, "seconds that a process may be frozen, or the engine be in one step, until the server ends with an error"
    )
    max_body: int = option(4 * 1024 * 1024, "largest request body in bytes", minimum=1024, maximum=2**30)
    max_choices: int = option(16, "largest n, the number of choices for a prompt", minimum=1, maximum=1024)
    unknown_fields: str = option(
        "accept",
        "request fields that no API defines: accept = answer, and name them in the header x-ignored-fields; "
        "refuse = 400",
        choices=("accept", "refuse"),
    )
    stream_usage: bool = option(False, "end every stream with the usage, also for clients that do not ask for it")
    ui: bool = option(True, "serve the page at /: a chat and a live view of the engine")
    tool_call_parser: str = option(
        "auto",
        "format of the model's tool calls; auto = as the chat template shows",
        choices=("auto", "none", "hermes", "mistral", "llama3"),
    )
    reasoning_parser: str = option(
        "auto",
        "format of the model's reasoning; auto = as the chat template shows",
        choices=("auto", "none", "think"),
    )
    run_dir: str = ""  # private folder of the ipc sockets, made at the start; not an option

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that cannot work."""
        super().__post_init__()
        key = self.load_key()
        if key is not None and not (key and key.isascii() and key.isprintable()):
            raise ConfigError("--api-key or the file of --api-key-file must be printable ASCII and not empty")
        if self.auth and key is None and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} lets others use this server; give --api-key-file FILE or --api-key KEY, "
                "or --no-auth to allow everybody"
            )

    def load_key(self) -> str | None:
        """The API key: the value of `--api-key`, or the content of `--api-key-file`. Raises `ConfigError`."""
        if self.api_key_file is None:
            return self.api_key
        if self.api_key is not None:
            raise ConfigError("--api-key and --api-key-file exclude each other")
        try:
            return Path(self.api_key_file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeError) as e:
            raise ConfigError(f"--api-key-file {self.api_key_file} cannot be read: {e}") from e

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


def options_of(cls: type) -> Mapping[str, Option]:
    """The options of a configuration class and of the classes nested in it, by name."""
    return _declared_options(cls)


@cache
def _declared_options(cls: type) -> Mapping[str, Option]:
    found: dict[str, Option] = {}
    hints = get_type_hints(cls)
    for f in fields(cls):
        hint = hints[f.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            found |= options_of(hint)
        elif f.metadata:
            kind, *none = get_args(hint) or (hint,)
            found[f.name] = Option(f.name, cls, kind, bool(none), f.default, **f.metadata)
    return found


@cache
def spellings_of(cls: type) -> Mapping[str, str]:
    """Every spelling of the options of `cls`, with underscores -> the option's name; no_X is `False` for a boolean."""
    options = options_of(cls).values()
    negations = {f"no_{option.name}": option.name for option in options if option.kind is bool}
    return {name: option.name for option in options for name in (option.name, *option.aliases)} | negations


def named_values(given: Iterable[tuple[Any, Any, str]], cls: type) -> dict[str, Any]:
    """The values by option name from (spelling, value, where it was found), as all of `--help`'s spellings allow.

    Raises `ConfigError` for a spelling that is unknown or the second of its option.
    """
    spellings = spellings_of(cls)
    found: dict[str, Any] = {}
    for spelling, value, where in given:
        words = str(spelling).replace("-", "_")
        if (name := spellings.get(words)) is None:
            hint = did_you_mean(words, spellings) or "; `minisgl serve --help` lists them"
            raise ConfigError(f"{where}there is no option {spelling!r}{hint}")
        if name in found:
            raise ConfigError(f"{where}{spelling} is set twice")
        found[name] = not value if words == f"no_{name}" and type(value) is bool else value
    return found


def build_config(cls: type[T], values: Mapping[str, Any]) -> T:
    """Build the configuration class `cls` and the classes nested in it from flat `values`, by any spelling.

    Raises `ConfigError` for an unknown option and for a value that cannot work.
    """
    return _build(cls, named_values(((name, value, "") for name, value in values.items()), cls))


def _build(cls: type[T], values: Mapping[str, Any]) -> T:
    known = options_of(cls)
    arguments = {name: value for name, value in values.items() if known[name].owner is cls}
    for name, nested in get_type_hints(cls).items():
        if is_dataclass(nested):
            assert isinstance(nested, type)
            names = options_of(nested)
            arguments[name] = _build(nested, {n: value for n, value in values.items() if n in names})
    return cls(**arguments)
