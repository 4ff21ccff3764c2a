"""Every option once: its name, aliases, default, range and help.

Command-line flags, environment variables, the YAML file (`settings/sources.py`) and the keywords of `LLM(...)` are all
made from the fields below, so this module must not import torch: the API process reads it too. The fields hold what the
user *asked for*. `engine/config.py: resolve` computes what follows for one model and machine, and never writes back.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from operator import ge, gt, le
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_type_hints

from minisgl.errors import ConfigError, did_you_mean
from minisgl.settings.foreign import asks_nothing, sentence_for

T = TypeVar("T")

TRUE: Final = {"1", "true", "yes", "on"}
FALSE: Final = {"", "0", "false", "no", "off"}

MAX_DRAFTS: Final = 8  # tokens of a row that a step computes behind the newest
# What the options that depend on the kind of device default to.
PAGE_SIZES: Final = {"cpu": 16, "cuda": 64}  # larger pages read faster on a GPU, smaller pages share more
MEMORY_RATIOS: Final = {"cpu": 0.1, "cuda": 0.9}
MULTIPLES: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}  # vLLM's and SGLang's


def option(
    default: Any,
    help: str,
    *,
    aliases: tuple[str, ...] = (),
    choices: tuple[str | int, ...] = (),
    words: Mapping[str | int, Any] | None = None,
    switches: Mapping[str, Mapping[bool | str, Any]] | None = None,
    form: type | None = None,
    above: float | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """Declare a configuration field that users can set; see `Option`."""
    bounds = {"above": above, "minimum": minimum, "maximum": maximum}
    others = {"words": words or {}, "switches": switches or {}, "form": form}
    return field(default=default, metadata={"help": help, "aliases": aliases, "choices": choices, **others, **bounds})


def seconds(default: float, help: str, aliases: tuple[str, ...] = ()) -> Any:
    """Declare a duration in seconds."""
    return option(default, help, aliases=aliases, above=0, maximum=1e6)


@dataclass(frozen=True)
class Option:
    """One option, as the configuration class `owner` declares it. Bounds are inclusive except for `above`.

    words     other engines' words for a value -> our value
    switches  other engines' flags that set this option: the flag -> what each of its values means here
    form      list or dict: such values are taken as well, and kept as text with commas, or as JSON
    """

    name: str
    owner: type
    kind: type  # str, int, float or bool
    is_optional: bool  # None is a value: the default is computed, or the feature is off
    default: Any
    help: str
    aliases: tuple[str, ...]
    choices: tuple[str | int, ...]
    words: Mapping[str | int, Any]
    switches: Mapping[str, Mapping[bool | str, Any]]
    form: type | None
    above: float | None
    minimum: float | None
    maximum: float | None

    @property
    def flags(self) -> list[str]:
        """The spellings of the command-line flag, the main one first."""
        return ["--" + name.replace("_", "-") for name in (self.name, *self.aliases)]

    def parse(self, text: str, source: str) -> Any:
        """The value of the option's type that `text` means. Raises `ConfigError` if there is none."""
        if self.kind is int and (parts := re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG])", text)):
            return int(float(parts[1]) * MULTIPLES[parts[2]])
        return _convert(self.kind, text, source)

    def translate(self, value: Any) -> Any:
        """The value in our words, and a list or an object as text."""
        if self.form is list and isinstance(value, str) and value.startswith("["):
            value = json.loads(value)
        if self.form is list and isinstance(value, list | tuple):
            return ",".join(map(str, value))
        if self.form is dict and isinstance(value, dict):
            return json.dumps(value)
        if not isinstance(value, str | int):
            return value
        if isinstance(value, str) and value not in self.words and self.words:
            return ",".join(self.words.get(part, part) for part in value.split(","))
        return self.words.get(value, value)

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
        if self.choices and not any(_is_choice(value, choice) for choice in self.choices):
            hint = sentence_for(f"{self.name}={value}")
            raise ConfigError(f"{given} is not one of {', '.join(map(str, self.choices))}{hint and f': {hint}'}")
        bounds = (("above", self.above, gt), ("at least", self.minimum, ge), ("at most", self.maximum, le))
        violated = [
            f"{words} {bound}" for words, bound, holds in bounds if bound is not None and not holds(value, bound)
        ]
        if violated:
            raise ConfigError(f"{given} must be {' and '.join(violated)}")
        return value


def _is_choice(value: Any, choice: str | int) -> bool:
    """Whether `value` is `choice`, or a choice that ends in ":PATH" with a path."""
    prefix = choice.removesuffix("PATH") if isinstance(choice, str) else ""
    return bool(value == choice or (prefix.endswith(":") and str(value).startswith(prefix) and value != prefix))


def _convert(kind: type, text: str, source: str) -> Any:
    try:
        return parse_bool(text) if kind is bool else kind(text)
    except ValueError:
        raise ConfigError(f"{source}{text!r} is not of type {kind.__name__}") from None


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
    revision: str | None = option(None, "branch, tag or commit of the model on the hub; default = the hub's")
    download_source: str = option(
        "huggingface",
        "hub that a model id is downloaded from",
        aliases=("model_source",),
        choices=("huggingface", "modelscope"),
    )
    dtype: str = option(
        "auto",
        "number format of weights and KV cache; auto = the checkpoint's; on a CPU float32, or bfloat16 for large "
        "bfloat16 models that the C++ step can run",
        choices=("auto", "float32", "bfloat16", "float16"),
        words={"half": "float16", "float": "float32"},
    )
    quantization: str | None = option(
        None,
        "quantize the projections of a checkpoint in 16 or 32 bits at the start: on a GPU fp8, int8 or int4, on a CPU "
        "int8 or int4; default = keep --dtype",
        aliases=("q",),
        choices=("int8", "fp8", "int4"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "number format of the KV cache: auto = --dtype, fp8 = 8 bits with a scale for each token and head",
        choices=("auto", "fp8"),
        words={"fp8_e4m3": "fp8"},
    )
    device: str = option("auto", "where to run; auto = a GPU if there is one", choices=("auto", "cpu", "cuda"))
    page_size: int | None = option(
        None,
        f"tokens per KV page; default = {PAGE_SIZES['cuda']} on a GPU, {PAGE_SIZES['cpu']} on a CPU",
        aliases=("block_size",),
        choices=(1, 2, 4, 8, 16, 32, 64, 128),
    )
    num_pages: int | None = option(
        None,
        "KV pages in the pool; default = what --memory-ratio allows",
        aliases=("num_gpu_blocks_override",),
        minimum=1,
    )
    memory_ratio: float | None = option(
        None,
        "part of the free memory (after weights) for the KV cache; "
        f"default = {MEMORY_RATIOS['cuda']} on a GPU, {MEMORY_RATIOS['cpu']} on a CPU",
        above=0,
        maximum=1,
    )
    host_kv: int = option(
        0, "bytes of host memory for K/V pages that the GPU has no room for (64G), in all ranks together", minimum=0
    )
    disk_kv: str | None = option(
        None,
        "PATH:SIZE, a folder and its bytes (/var/cache/kv:200G) for K/V pages that memory has no room for; the next "
        "server with this model finds them",
    )
    max_running_requests: int = option(
        256, "maximum number of requests computed at the same time", aliases=("max_num_seqs",), minimum=1
    )
    max_seq_len: int | None = option(
        None,
        "maximum tokens of prompt plus output; default = the model's",
        aliases=("max_seq_len_override", "max_model_len", "context_length"),
        words={"auto": None, "-1": None, -1: None},
        minimum=2,
    )
    attention_backend: str = option(
        "auto",
        "attention backend, or PREFILL,DECODE; `minisgl doctor` lists the names",
        aliases=("attn",),
        words={"flashinfer": "fi", "FLASHINFER": "fi", "fa": "fa3", "FLASH_ATTN": "fa3", "TRITON_ATTN": "triton"},
    )
    cuda_graph_max_bs: int | None = option(
        None,
        "largest batch whose decode steps run as CUDA graphs, 0 = none; default = --max-running-requests on a GPU",
        aliases=("graph", "cuda_graph_max_bs_decode", "max_cudagraph_capture_size"),
        switches={"enforce_eager": {True: 0, False: None}, "disable_cuda_graph": {True: 0, False: None}},
        minimum=0,
    )
    dummy_weight: bool = option(
        False,
        "random weights instead of the checkpoint's (needs only config.json)",
        switches={"load_format": {"auto": False, "safetensors": False, "dummy": True}},
    )
    speculate: str | None = option(
        None,
        "draft several tokens a step, which never changes a text: ngram = what followed the last tokens before, "
        "tree = what followed the text in the prefix cache, auto = as many of both as pay, and on a CPU by a head that "
        "ships with the model, draft:PATH = a smaller model of the same vocabulary, eagle3:PATH = an EAGLE-3 head; "
        "default = auto on a CPU if the model has such a head, else off",
        aliases=("speculative_algorithm", "spec_method"),
        choices=("off", "auto", "ngram", "tree", "draft:PATH", "eagle3:PATH"),
        words={"NGRAM": "ngram", "none": "off"},
    )
    num_draft_tokens: int = option(
        4,
        "drafts of a request in one step, at most",
        aliases=("speculative_num_draft_tokens", "spec_tokens", "num_speculative_tokens"),
        minimum=1,
        maximum=MAX_DRAFTS,
    )
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
    dist_init_addr: str = option(
        "", "HOST:PORT of host 0, where the other hosts connect; use a private network", aliases=("nccl_init_addr",)
    )
    chat_template: str | None = option(None, "chat template in place of the model's: a file, or the text itself")
    default_chat_template_kwargs: str | None = option(
        None, "JSON object of chat_template_kwargs for requests that do not set them", form=dict
    )

    @property
    def disk_tier(self) -> tuple[Path, int] | None:
        """The folder and the bytes of `--disk-kv`. Raises `ConfigError` for anything else."""
        if self.disk_kv is None:
            return None
        parts = re.fullmatch(r"(.+):(\d+(?:\.\d+)?)([kmgKMG]?)", str(self.disk_kv))
        if parts is None:
            raise ConfigError(f"--disk-kv {self.disk_kv} is not PATH:SIZE, such as /var/cache/kv:200G")
        return Path(parts[1]).expanduser(), int(float(parts[2]) * MULTIPLES.get(parts[3], 1))

    def load_chat_template(self) -> str | None:
        """The text of `--chat-template`. Raises `ConfigError` for a file that cannot be read."""
        if self.chat_template is None or "{" in self.chat_template:
            return self.chat_template
        try:
            return Path(self.chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeError) as e:
            raise ConfigError(f"--chat-template {self.chat_template} cannot be read: {e}") from e

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The object of `--default-chat-template-kwargs`. Raises `ConfigError` if that is none."""
        try:
            value = json.loads(self.default_chat_template_kwargs or "{}")
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise ConfigError(
                f"--default-chat-template-kwargs {self.default_chat_template_kwargs} is not a JSON object"
            )
        return value


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(Settings):
    """What decides which request runs when."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    cache_type: str = option(
        "radix",
        "prefix cache: radix = share common prefixes, naive = none",
        aliases=("cache",),
        choices=("radix", "naive"),
        switches={
            "enable_prefix_caching": {True: "radix", False: "naive"},
            "disable_radix_cache": {True: "naive", False: "radix"},
        },
    )
    schedule_policy: str = option(
        "fcfs",
        "order of waiting requests: fcfs = the shortest prompt first, within a bound for the others, then by arrival; "
        "lpm = longest cached prefix first",
        aliases=("scheduling_policy",),
        choices=("fcfs", "lpm"),
    )
    max_prefill_length: int = option(
        8192,
        "token budget of one step: running requests first, the rest for chunks of prompts",
        aliases=("max_extend_length", "max_num_batched_tokens", "chunked_prefill_size"),
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
        True,
        "compute prompts and running requests in one step; off = running requests wait while there are prompts",
        aliases=("enable_mixed_chunk",),
    )
    overlap: bool | None = option(
        None,
        "plan and reply while the device computes; default = on for a GPU, off for a CPU",
        aliases=("async_scheduling",),
        switches={"disable_overlap_schedule": {True: False, False: None}},
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
    sampling_seed: int = option(
        0, "base of the sampling noise of requests without a seed of their own", aliases=("seed", "random_seed")
    )


@dataclass(frozen=True, kw_only=True)
class ServerArgs(Settings):
    """How the server listens and supervises its processes."""

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    host: str = option("127.0.0.1", "address to listen on; one that others can reach needs --api-key or --no-auth")
    port: int = option(1919, "port to listen on; 0 = any free port", minimum=0, maximum=65535)
    dp: int = option(
        1,
        "replicas of the model, each on --tp devices; requests go where their prefix is cached and the load is low",
        aliases=("dp_size", "data_parallel_size"),
        minimum=1,
        maximum=64,
    )
    num_tokenizer: int = option(
        1,
        "tokenizer processes; 0 = the detokenizer does both: streams wait for long prompts",
        aliases=("tokenizer_count", "tokenizer_worker_num"),
        minimum=0,
        maximum=64,
    )
    uds: str | None = option(None, "listen on this unix socket in place of --host and --port")
    root_path: str = option("", "path under which a proxy serves this server (/llm)", aliases=("fastapi_root_path",))
    ssl_certfile: str | None = option(None, "certificate (PEM) for HTTPS, with --ssl-keyfile")
    ssl_keyfile: str | None = option(None, "private key (PEM) of --ssl-certfile")
    served_model_name: str | None = option(
        None,
        "names of the model in the API; answers carry the first; default = its folder's name or hub id",
        form=list,
    )
    api_key: str | None = option(None, "keys, one of which clients must send as `Authorization: Bearer KEY`", form=list)
    api_key_file: str | None = option(None, "file with one key a line, which keeps them out of the list of processes")
    allowed_hosts: str | None = option(
        None, "names under which clients reach this server, * = any; default = this machine's, or any", form=list
    )
    allowed_origins: str | None = option(
        None, "web pages that may use this server (https://example.com), * = any; default = none (CORS)", form=list
    )
    open_metrics: bool = option(False, "serve /metrics without the key")
    auth: bool = option(True, "refuse to listen on a reachable address without a key")
    ready_timeout: float = seconds(600.0, "seconds that the processes may take to become ready")
    drain_timeout: float = seconds(
        30.0, "seconds that running requests may take to finish after SIGTERM", aliases=("shutdown_timeout",)
    )
    write_timeout: float = seconds(30.0, "seconds after which a client that does not read is disconnected")
    heartbeat_timeout: float = seconds(
        60.0,
        "seconds that a process may be frozen, or the engine be in one step, until the server ends with an error",
        aliases=("watchdog_timeout",),
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
    ui: bool = option(True, "serve the page at /: a chat, a live view of the engine, and the API at /docs")
    log_requests: bool = option(
        False,
        "log a line for each request: status, tokens and times, but no texts",
        aliases=("enable_log_requests",),
        switches={"disable_log_requests": {True: False, False: True}},
    )
    otlp_endpoint: str | None = option(
        None,
        "send OpenTelemetry traces over OTLP/HTTP to this collector (http://127.0.0.1:4318); default = that of "
        "OTEL_EXPORTER_OTLP_ENDPOINT, or none",
        aliases=("otlp_traces_endpoint",),
    )
    log_level: str | None = option(
        None,
        "least severe log lines that are written; default = that of the environment variable LOG_LEVEL, or INFO",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        words={"debug": "DEBUG", "info": "INFO", "warning": "WARNING", "error": "ERROR"},
    )
    log_format: str | None = option(
        None,
        "form of log lines: text, or a JSON object each; default = that of LOG_FORMAT, or text",
        aliases=("log_requests_format",),
        choices=("text", "json"),
    )
    tool_call_parser: str = option(
        "auto",
        "format of the model's tool calls; auto = as the chat template shows",
        choices=("auto", "none", "hermes", "mistral", "llama3"),
        words={"qwen": "hermes", "qwen25": "hermes", "llama3_json": "llama3", "llama4_json": "llama3"},
    )
    reasoning_parser: str = option(
        "auto",
        "format of the model's reasoning; auto = as the chat template shows",
        choices=("auto", "none", "think"),
        words=dict.fromkeys(("deepseek_r1", "deepseek-r1", "qwen3", "qwen3-thinking"), "think"),
    )
    run_dir: str = ""  # private folder of the ipc sockets, made at the start; not an option
    life: int = 0  # of a replica: the number of its run among those of all replicas; not an option
    replicas_join: bool = False  # there are none at the start, and they come and go (`minisgl.ray`); not an option

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that cannot work."""
        super().__post_init__()
        keys = self.load_keys()
        if keys is not None and not (keys and all(k and k.isascii() and k.isprintable() for k in keys)):
            raise ConfigError("--api-key or the file of --api-key-file must be printable ASCII and not empty")
        if self.auth and keys is None and self.uds is None and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} lets others use this server; give --api-key-file FILE or --api-key KEY, "
                "or --no-auth to allow everybody"
            )

    def load_keys(self) -> list[str] | None:
        """The API keys: those of `--api-key`, or the lines of `--api-key-file`. Raises `ConfigError`."""
        if self.api_key_file is None:
            return None if self.api_key is None else split_list(self.api_key)
        if self.api_key is not None:
            raise ConfigError("--api-key and --api-key-file exclude each other")
        try:
            lines = Path(self.api_key_file).read_text(encoding="utf-8").splitlines()
            return [line.strip() for line in lines if line.strip()]
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
        """Where requests are received from the tokenizers: by the scheduler, or for several replicas by the API."""
        return self._addr("backend")

    @property
    def zmq_scheduler_addr(self) -> str:
        """Where the scheduler receives: one address for each life, so that no request of a dead one is left there."""
        return self._addr(f"backend-{self.life}") if self.is_routed else self.zmq_backend_addr

    @property
    def is_routed(self) -> bool:
        """Whether the API process chooses a replica for each request."""
        return self.dp > 1 or self.replicas_join

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


def split_list(text: str | None) -> list[str]:
    """The items of an option of the form list."""
    return [item.strip() for item in (text or "").split(",") if item.strip()]


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


@dataclass(frozen=True)
class Spelling:
    """One name under which an option is set. `meanings` says what values under this name mean, if not themselves."""

    option: Option
    meanings: Mapping[Any, Any] | None = None

    @property
    def is_switch(self) -> bool:
        """Whether the flag stands without a value."""
        return self.option.kind is bool if self.meanings is None else set(self.meanings) <= {True, False}

    def read(self, value: Any, source: str, is_text: bool) -> Any:
        """The option's value, checked; `is_text` if `value` comes from a place that has nothing but texts."""
        option, given = self.option, value
        if is_text and self.is_switch:
            given = _convert(bool, value, source)
        if self.meanings is not None:
            if type(given) not in (bool, str) or given not in self.meanings:
                raise ConfigError(f"{source}{value!r} is not one of {', '.join(map(str, self.meanings))}")
            return self.meanings[given]
        try:
            given = option.translate(given)
        except ValueError as e:
            raise ConfigError(f"{source}{value!r} is not valid JSON: {e}") from None
        if is_text and isinstance(given, str):
            given = option.parse(given, source)
        return option.check(given, source)


@cache
def spellings_of(cls: type) -> Mapping[str, Spelling]:
    """Every name under which an option of `cls` is set, with underscores; no_X for a switch X.

    Where an option has the name that is another one's alias, the name counts.
    """
    options = options_of(cls).values()
    found = {switch: Spelling(o, meanings) for o in options for switch, meanings in o.switches.items()}
    found |= {alias: Spelling(o) for o in options for alias in o.aliases}
    found |= {o.name: Spelling(o) for o in options}
    for name, spelling in list(found.items()):
        if spelling.is_switch:
            meanings = {True: True, False: False} if spelling.meanings is None else spelling.meanings
            found.setdefault(f"no_{name}", Spelling(spelling.option, {not key: v for key, v in meanings.items()}))
    return found


def named_values(given: Iterable[tuple[Any, Any, str, str]], cls: type, is_text: bool = False) -> dict[str, Any]:
    """The values by option name of (spelling, value, where it was found, what stands before it in a message).

    What other engines' options ask for is left out where it is what happens anyway (`settings/foreign.py`). Raises
    `ConfigError` for a spelling that is unknown or the second of its option, and for a value that cannot work.
    """
    spellings = spellings_of(cls)
    found: dict[str, Any] = {}
    for name, value, where, source in given:
        words = str(name).replace("-", "_")
        if (spelling := spellings.get(words)) is None:
            if not asks_nothing(words, value):
                raise ConfigError(f"{where}{_unknown(name, words, spellings)}")
            continue
        if spelling.option.name in found:
            raise ConfigError(f"{where}{name} is set twice")
        found[spelling.option.name] = spelling.read(value, source, is_text)
    return found


def _unknown(name: Any, words: str, spellings: Iterable[str]) -> str:
    """What to say about a name that is not an option."""
    if sentence := sentence_for(words):
        return f"{name}: {sentence}"
    if words in spellings_of(ServerArgs):
        return f"{name} is an option of `minisgl serve` only"
    return f"there is no option {name!r}{did_you_mean(words, spellings) or '; `minisgl serve --help` lists them'}"


def build_config(cls: type[T], values: Mapping[str, Any]) -> T:
    """Build the configuration class `cls` and the classes nested in it from flat `values`, by any spelling.

    Raises `ConfigError` for an unknown option and for a value that cannot work.
    """
    given = ((name, value, "", f"--{str(name).replace('_', '-')} ") for name, value in values.items())
    return _build(cls, named_values(given, cls))


def _build(cls: type[T], values: Mapping[str, Any]) -> T:
    known = options_of(cls)
    arguments = {name: value for name, value in values.items() if known[name].owner is cls}
    for name, nested in get_type_hints(cls).items():
        if is_dataclass(nested):
            assert isinstance(nested, type)
            names = options_of(nested)
            arguments[name] = _build(nested, {n: value for n, value in values.items() if n in names})
    return cls(**arguments)
