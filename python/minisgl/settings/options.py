"""Every option, declared once: its name, aliases, default, range and help.

Command-line flags, environment variables, the YAML file (`settings/sources.py`) and the keywords of `LLM(...)` are all
made from the fields below. The API process reads them, so this module must not import torch. A field has the value that
the user *asked for*. `engine/config.py: resolve` derives what one model and machine use, and never writes back.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from operator import ge, gt, le
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeVar, get_args, get_type_hints

from minisgl.core.errors import ConfigError, did_you_mean, is_unicode
from minisgl.settings.foreign import asks_nothing, sentence_for

T = TypeVar("T")

TRUE: Final = {"1", "true", "yes", "on"}
FALSE: Final = {"", "0", "false", "no", "off"}

# The options that `--help` shows, in this order, beside `--config`; `--help-all` shows all.
COMMON: Final = (
    *("model", "served_model_name", "host", "port", "api_key", "device", "dtype", "quantization", "tp", "dp"),
    *("max_seq_len", "max_running_requests", "memory_ratio", "threads", "speculate", "chat_template"),
    *("tool_call_parser", "reasoning_parser", "log_level"),
)
MAX_DRAFTS: Final = 8  # drafts of a row in one step
# Defaults that depend on the type of device.
PAGE_SIZES: Final = {"cpu": 16, "cuda": 64}  # a GPU reads larger pages faster; smaller pages share more
MEMORY_RATIOS: Final = {"cpu": 0.1, "cuda": 0.9}
MULTIPLES: Final = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}  # vLLM's and SGLang's


def option(default: Any, help: str, **traits: Any) -> Any:
    """Declare a configuration field that users can set. `traits` are fields of `Option` that have defaults."""
    return field(default=default, metadata={"help": help, **traits})


def seconds(default: float, help: str, **traits: Any) -> Any:
    """Declare a duration in seconds."""
    return option(default, help, above=0, maximum=1e6, **traits)


@dataclass(frozen=True)
class Option:
    """One option, as the configuration class `owner` declares it. Bounds are inclusive, except for `above`.

    words     other engines' words for a value -> our value
    switches  other engines' flags that set this option -> what each value of such a flag means here
    form      list or dict: values of this type are accepted, too, and stored as text with commas, or as JSON
    is_named  whether the elements of the list are NAME=PATH, so that an object may have them
    """

    name: str
    owner: type
    kind: type  # str, int, float or bool
    is_optional: bool  # None is a value: the default is computed, or the feature is off
    default: Any
    help: str
    aliases: tuple[str, ...] = ()
    choices: tuple[str | int, ...] = ()
    words: Mapping[Any, Any] = field(default_factory=dict)
    switches: Mapping[str, Mapping[Any, Any]] = field(default_factory=dict)
    form: type | None = None
    is_named: bool = False
    above: float | None = None
    minimum: float | None = None
    maximum: float | None = None

    @property
    def flags(self) -> list[str]:
        """The spellings of the command-line flag, beginning with the main one."""
        return ["--" + name.replace("_", "-") for name in (self.name, *self.aliases)]

    def read(self, value: Any, source: str, is_text: bool) -> Any:
        """Return the option's value for what a user has written. `is_text`: the source has only texts.

        Raises `ConfigError` like `check`.
        """
        try:
            parsed = self._parse(value, is_text)
        except ValueError:
            raise ConfigError(f"{source}{value!r} is not of type {(self.form or self.kind).__name__}") from None
        is_word = isinstance(parsed, str | int) and parsed in self.words
        return self.words[parsed] if is_word else self.check(parsed, source)

    def _parse(self, value: Any, is_text: bool) -> Any:
        """Convert text to the option's type, and a list or an object to text. Raises `ValueError`."""
        if self.is_named and isinstance(value, dict):
            value = [f"{name}={path}" for name, path in value.items()]
        if self.form is list and isinstance(value, str) and value.startswith("["):
            value = json.loads(value)
        if self.form is list and isinstance(value, list | tuple):
            return ",".join(json.dumps(one) if isinstance(one, dict) else str(one) for one in value)
        if self.form is dict and isinstance(value, dict):
            return json.dumps(value)
        if isinstance(value, str) and "," in value:
            return ",".join(str(self.words.get(part, part)) for part in value.split(","))
        if not is_text or value in self.words:
            return value
        return {bool: parse_bool, int: parse_size}.get(self.kind, self.kind)(value)

    def check(self, value: Any, source: str) -> Any:
        """Return `value`, converted from int to float if the option is a float.

        Raises `ConfigError` for a value of another type or out of range. The message begins with `source` (such as
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
    """Return whether `value` is `choice`; if the choice ends in ":PATH", whether it has that prefix and a path."""
    prefix = choice.removesuffix("PATH") if isinstance(choice, str) else ""
    return bool(value == choice or (prefix.endswith(":") and str(value).startswith(prefix) and value != prefix))


def parse_size(text: str) -> int:
    """Parse an integer, or a decimal number with a suffix such as 1.5k or 64G. Raises `ValueError` for other texts."""
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG])", text)
    return int(text) if parts is None else int(float(parts[1]) * MULTIPLES[parts[2]])


def parse_bool(text: str) -> bool:
    """Parse a boolean: 1, true, yes, on; 0, false, no, off, or nothing. Raises `ValueError` for other texts."""
    word = text.strip().lower()
    if word not in TRUE | FALSE:
        raise ValueError(text)
    return word in TRUE


class Settings:
    """The base of configuration classes."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value of the wrong type or out of range."""
        for name, declared in options_of(type(self)).items():
            if declared.owner is type(self):
                declared.check(getattr(self, name), f"{declared.flags[0]} ")


@dataclass(frozen=True, kw_only=True)
class EngineConfig(Settings):
    """The options of an engine: one model on its devices."""

    model: str = option(
        "", "folder, GGUF file or hub id of the model; empty = the built-in demo model", aliases=("model_path",)
    )
    revision: str | None = option(None, "branch, tag or commit of the model on the hub; default = the hub's main one")
    download_source: str = option(
        "huggingface",
        "hub from which a model id is downloaded",
        aliases=("model_source",),
        choices=("huggingface", "modelscope"),
    )
    model_impl: str = option(
        "minisgl",
        "whose code computes the model: transformers = that of the installed package, for decoders that minisgl does "
        "not have; slower, on one device, not quantized",
        choices=("minisgl", "transformers"),
        words={"auto": "minisgl", "vllm": "minisgl", "sglang": "minisgl"},
    )
    dtype: str = option(
        "auto",
        "data type of weights and KV cache; auto = on a GPU the checkpoint's, on a CPU float32, or bfloat16 for a "
        "large bfloat16 model that the C++ step can run",
        choices=("auto", "float32", "bfloat16", "float16"),
        words={"half": "float16", "float": "float32"},
    )
    quantization: str | None = option(
        None,
        "quantize the weights of all linear layers when loading: fp8, int8 or int4 on a GPU, int8 or int4 on a CPU; "
        "default = the checkpoint's quantization, or int8 for a quantized GGUF file on a CPU without --dtype, or none",
        aliases=("q",),
        choices=("int8", "fp8", "int4"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "data type of the KV cache: auto = --dtype; fp8 = E4M3 with a scale per token and head, twice the tokens",
        choices=("auto", "fp8"),
        words={"fp8_e4m3": "fp8"},
    )
    state_dtype: str = option(
        "float32",
        "data type of the states of recurrent layers; model = --dtype, half the memory and less exact",
        choices=("float32", "model"),
    )
    device: str = option("auto", "device to run on; auto = a GPU if there is one", choices=("auto", "cpu", "cuda"))
    page_size: int | None = option(
        None,
        "tokens per KV page; requests share prefixes of whole pages; "
        f"default = {PAGE_SIZES['cuda']} on a GPU, {PAGE_SIZES['cpu']} on a CPU and for recurrent layers",
        aliases=("block_size",),
        choices=(1, 2, 4, 8, 16, 32, 64, 128),
    )
    num_pages: int | None = option(
        None,
        "pages of the KV cache, of which sliding windows and recurrent states take a part; default = as many as "
        "--memory-ratio allows",
        aliases=("num_gpu_blocks_override",),
        minimum=1,
    )
    memory_ratio: float | None = option(
        None,
        "fraction of the memory left by the weights that the KV cache gets; "
        f"default = {MEMORY_RATIOS['cuda']} on a GPU, {MEMORY_RATIOS['cpu']} on a CPU",
        above=0,
        maximum=1,
    )
    host_kv: int = option(
        0,
        "size in bytes of the host KV cache (64G), over all ranks, for pages evicted from the GPU; 0 = off",
        minimum=0,
    )
    disk_kv: str | None = option(
        None,
        "PATH:SIZE of the disk KV cache (/var/cache/kv:200G), for pages evicted from memory; it outlives the server",
    )
    max_running_requests: int = option(
        256, "maximum number of requests that run at the same time", aliases=("max_num_seqs",), minimum=1
    )
    max_seq_len: int | None = option(
        None,
        "maximum tokens of a request, prompt plus output; default = the model's context",
        aliases=("max_seq_len_override", "max_model_len", "context_length"),
        words={"auto": None, "-1": None, -1: None},
        minimum=2,
    )
    attention_backend: str = option(
        "auto",
        "attention backend, or two as PREFILL,DECODE; auto = the fastest that works; `minisgl doctor` lists them",
        aliases=("attn",),
        words={"flashinfer": "fi", "FLASHINFER": "fi", "fa": "fa3", "FLASH_ATTN": "fa3", "TRITON_ATTN": "triton"},
    )
    cuda_graph_max_bs: int | None = option(
        None,
        "largest decode batch that runs as a CUDA graph, 0 = none; default = --max-running-requests on a GPU",
        aliases=("graph", "cuda_graph_max_bs_decode", "max_cudagraph_capture_size"),
        switches={"enforce_eager": {True: 0, False: None}, "disable_cuda_graph": {True: 0, False: None}},
        minimum=0,
    )
    dummy_weight: bool = option(
        False,
        "use random weights, so that the folder needs only config.json; for tests and measurements",
        switches={"load_format": {"auto": False, "safetensors": False, "dummy": True}},
    )
    speculate: str | None = option(
        None,
        "speculative decoding, which never changes a text; drafts come from: ngram = earlier occurrences of the last "
        "tokens in the request, tree = the prefix cache, mtp = the checkpoint's own layer for this, auto = all of "
        "these, as far as they pay, and on a CPU a draft head in the model's folder, draft:PATH = a smaller model "
        "with the same vocabulary, eagle3:PATH = an EAGLE-3 head; "
        "default = auto on a CPU if the model has a draft head, else off",
        aliases=("speculative_algorithm", "spec_method"),
        choices=("off", "auto", "ngram", "tree", "mtp", "draft:PATH", "eagle3:PATH"),
        words={"NGRAM": "ngram", "NEXTN": "mtp", "none": "off"},
    )
    lora: str | None = option(
        None,
        "LoRA adapters in PEFT's layout that requests choose as their model: NAME=PATH, or a folder of adapters; "
        "separated by commas",
        aliases=("lora_modules", "lora_paths"),
        form=list,
        is_named=True,
    )
    lora_dynamic: str | None = option(
        None,
        "folder whose adapters may be loaded while the server runs (POST /v1/load_lora_adapter); default = none",
    )
    max_loras: int = option(
        8, "adapters in device memory, so that one step may use them", aliases=("max_loras_per_batch",), minimum=1
    )
    max_cpu_loras: int = option(64, "adapters in host memory", aliases=("max_loaded_loras",), minimum=1)
    max_lora_rank: int | None = option(
        None, "largest rank of an adapter; default = that of --lora, and at least 16", minimum=1, maximum=1024
    )
    num_draft_tokens: int = option(
        4,
        "maximum draft tokens of a request per step",
        aliases=("speculative_num_draft_tokens", "spec_tokens", "num_speculative_tokens"),
        minimum=1,
        maximum=MAX_DRAFTS,
    )
    threads: int | None = option(
        None, "CPU threads of each rank; default = the usable cores divided among the ranks", minimum=1
    )
    tp: int = option(
        1,
        "tensor parallelism: ranks (GPUs, or processes on a CPU) that share each layer",
        aliases=("tp_size", "tensor_parallel_size"),
        minimum=1,
    )
    disable_pynccl: bool = option(False, "use NCCL through torch.distributed instead of calling it directly")
    nnodes: int = option(
        1, "number of nodes for multi-node inference; start the same command on all, except for --node-rank", minimum=1
    )
    node_rank: int = option(0, "rank of this node, from 0 on; node 0 serves", minimum=0)
    dist_init_addr: str = option(
        "", "HOST:PORT on node 0 to which the other nodes connect; use a private network", aliases=("nccl_init_addr",)
    )
    chat_template: str | None = option(None, "chat template to use instead of the model's: a file, or the text itself")
    default_chat_template_kwargs: str | None = option(
        None, "JSON object with the default chat_template_kwargs of requests", form=dict
    )

    @property
    def disk_tier(self) -> tuple[Path, int] | None:
        """The folder and bytes of `--disk-kv`, or None. Raises `ConfigError` for an invalid value."""
        if self.disk_kv is None:
            return None
        path, _, size = str(self.disk_kv).rpartition(":")
        with contextlib.suppress(ValueError):
            if path and (num_bytes := parse_size(size)) >= 0:
                return Path(path).expanduser(), num_bytes
        raise ConfigError(f"--disk-kv {self.disk_kv} is not PATH:SIZE, such as /var/cache/kv:200G")

    def load_chat_template(self) -> str | None:
        """Return the text of `--chat-template`, or None. Raises `ConfigError` for a file that cannot be read."""
        if self.chat_template is None or "{" in self.chat_template:
            return self.chat_template
        return _read_text("--chat-template", self.chat_template)

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The object of `--default-chat-template-kwargs`. Raises `ConfigError` if it is not a JSON object."""
        with contextlib.suppress(ValueError):
            if isinstance(value := json.loads(self.default_chat_template_kwargs or "{}"), dict):
                return value
        raise ConfigError(f"--default-chat-template-kwargs {self.default_chat_template_kwargs} is not a JSON object")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(Settings):
    """The options of the scheduler."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    cache_type: str = option(
        "radix",
        "prefix cache: radix = reuse the KV cache of common prefixes, naive = none",
        aliases=("cache",),
        choices=("radix", "naive"),
        switches={
            "enable_prefix_caching": {True: "radix", False: "naive"},
            "disable_radix_cache": {True: "naive", False: "radix"},
        },
    )
    schedule_policy: str = option(
        "shortest",
        "scheduling policy: shortest = shortest prompt first, with a bound on the wait of the others; fcfs = first "
        "come, first served; lpm = longest prefix match",
        aliases=("scheduling_policy",),
        choices=("shortest", "fcfs", "lpm"),
    )
    max_prefill_length: int = option(
        8192,
        "token budget of a step: running requests first, the rest for chunked prefill",
        aliases=("max_extend_length", "max_num_batched_tokens", "chunked_prefill_size"),
        minimum=1,
    )
    itl_target_ms: float | None = option(
        None,
        "target for inter-token latency in ms; it limits the prompt tokens per step; 0 = no limit; default = 29, or "
        "twice the time of a decode step if that is longer",
        minimum=0,
        maximum=1e9,
    )
    mixed_batches: bool = option(
        True,
        "mix prefill chunks and decode in one step; off = decode waits for prefill",
        aliases=("enable_mixed_chunk",),
    )
    overlap: bool | None = option(
        None,
        "overlap scheduling: plan the next step while the device computes; default = on for a GPU, off for a CPU",
        aliases=("async_scheduling",),
        switches={"disable_overlap_schedule": {True: False, False: None}},
    )
    max_queued_requests: int = option(2048, "maximum queued requests; more are refused with status 429", minimum=0)
    max_queued_tokens: int = option(
        1 << 20,
        "maximum queued prompt tokens; with more, a new request is refused with status 429",
        minimum=0,
    )
    max_queue_time: float = seconds(300.0, "queue timeout in seconds; a request that waits longer gets status 503")
    view_texts: bool = option(
        False, "show the beginnings of cached prompts without a salt in the Engine view; for a server only you use"
    )
    record: str | None = option(
        None, "file to record the scheduler's inputs in, for `minisgl replay`; tokens are hashed"
    )
    record_texts: bool = option(False, "record the tokens themselves instead of hashes")
    sampling_seed: int = option(0, "base seed for requests that have no seed", aliases=("seed", "random_seed"))


@dataclass(frozen=True, kw_only=True)
class ServerArgs(Settings):
    """The options of the server: how it listens, and how it supervises its processes."""

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    host: str = option(
        "127.0.0.1", "address to listen on; an address that others can reach needs --api-key or --no-auth"
    )
    port: int = option(1919, "port to listen on; 0 = any free port", minimum=0, maximum=65535)
    dp: int = option(
        1,
        "data parallelism: replicas of the model, each on --tp devices, with prefix- and load-aware routing",
        aliases=("dp_size", "data_parallel_size"),
        minimum=1,
        maximum=64,
    )
    num_tokenizer: int = option(
        1,
        "tokenizer processes; 0 = the detokenizer also tokenizes, and streams wait for long prompts",
        aliases=("tokenizer_count", "tokenizer_worker_num"),
        minimum=0,
        maximum=64,
    )
    uds: str | None = option(None, "unix socket to listen on instead of --host and --port")
    root_path: str = option(
        "", "path under which a proxy makes this server available (/llm)", aliases=("fastapi_root_path",)
    )
    ssl_certfile: str | None = option(None, "certificate (PEM) for HTTPS; needs --ssl-keyfile")
    ssl_keyfile: str | None = option(None, "private key (PEM) of --ssl-certfile")
    served_model_name: str | None = option(
        None,
        "names of the model in the API; answers have the first one; default = its folder's name or hub id",
        form=list,
    )
    api_key: str | None = option(
        None, "API keys; clients must send one of them as `Authorization: Bearer KEY`", form=list
    )
    api_key_file: str | None = option(
        None, "file with one API key per line; unlike --api-key, it does not show keys in the list of processes"
    )
    classes: str | None = option(
        None,
        "classes of clients, the most urgent first (interactive,batch); each API key then begins with its class "
        "(interactive=KEY)",
        aliases=("class",),
        form=list,
    )
    allowed_hosts: str | None = option(
        None,
        "host names by which clients may reach this server, * = any; default = this machine's on a loopback address, "
        "else any",
        form=list,
    )
    allowed_origins: str | None = option(
        None, "other sites' pages that may use this server (https://example.com), * = any; default = none", form=list
    )
    open_metrics: bool = option(False, "serve /metrics without a key")
    auth: bool = option(True, "refuse to start without a key on an address that others can reach")
    ready_timeout: float = seconds(600.0, "startup timeout in seconds")
    drain_timeout: float = seconds(
        30.0, "graceful shutdown timeout in seconds, for running requests after SIGTERM", aliases=("shutdown_timeout",)
    )
    write_timeout: float = seconds(30.0, "write timeout in seconds; a client that does not read is disconnected")
    heartbeat_timeout: float = seconds(
        60.0, "heartbeat timeout in seconds, also for one step; the server then exits", aliases=("watchdog_timeout",)
    )
    max_body: int = option(4 * 1024 * 1024, "maximum size of a request body in bytes", minimum=1024, maximum=2**30)
    max_choices: int = option(16, "maximum n, the number of choices per prompt", minimum=1, maximum=1024)
    unknown_fields: str = option(
        "accept",
        "request fields that no API defines: accept = ignore, and list them in the header x-ignored-fields; refuse = "
        "status 400",
        choices=("accept", "refuse"),
    )
    stream_usage: bool = option(False, "end every stream with the usage, even if the client does not ask for it")
    ui: bool = option(True, "serve the page at /: a chat, a live view of the engine, and the API's documentation")
    log_requests: bool = option(
        False,
        "log a line per request, with status, tokens and times, but without texts",
        aliases=("enable_log_requests",),
        switches={"disable_log_requests": {True: False, False: True}},
    )
    otlp_endpoint: str | None = option(
        None,
        "collector to send OpenTelemetry traces to, over OTLP/HTTP (http://127.0.0.1:4318); default = the environment "
        "variable OTEL_EXPORTER_OTLP_ENDPOINT, or none",
        aliases=("otlp_traces_endpoint",),
    )
    log_level: str | None = option(
        None,
        "minimum severity of log lines; default = the environment variable LOG_LEVEL, or INFO",
        choices=("DEBUG", "INFO", "WARNING", "ERROR"),
        words={"debug": "DEBUG", "info": "INFO", "warning": "WARNING", "error": "ERROR"},
    )
    log_format: str | None = option(
        None,
        "format of log lines: text, or a JSON object per line; default = the environment variable LOG_FORMAT, or text",
        aliases=("log_requests_format",),
        choices=("text", "json"),
    )
    tool_call_parser: str = option(
        "auto",
        "format of the model's tool calls; auto = detected from the chat template",
        choices=(
            *("auto", "none", "harmony", "seed_oss", "qwen3_coder", "glm47", "glm45", "minimax_m2", "hermes"),
            *("mistral_v11", "mistral", "kimi_k2", "deepseek_v31", "deepseek", "gemma4", "functiongemma", "command"),
            *("olmo3", "hunyuan", "phi4", "granite", "lfm2", "llama3", "pythonic"),
        ),
        words=dict.fromkeys(("openai", "gpt-oss"), "harmony")
        | dict.fromkeys(("qwen", "qwen25", "granite4"), "hermes")
        | dict.fromkeys(("qwen3_xml", "step3p5", "mimo"), "qwen3_coder")
        | dict.fromkeys(("glm", "poolside_v1"), "glm45")
        | dict.fromkeys(("deepseek_v3", "deepseekv3"), "deepseek")
        | dict.fromkeys(("llama3_json", "llama4_json"), "llama3")
        | dict.fromkeys(("llama4_pythonic", "xlam"), "pythonic")
        | dict.fromkeys(("cohere_command3", "cohere_command4"), "command")
        | dict.fromkeys(("hunyuan_a13b", "jamba"), "hunyuan")
        | {"minimax-m2": "minimax_m2", "deepseekv31": "deepseek_v31", "phi4_mini_json": "phi4"}
        | {"granite-20b-fc": "granite"},
    )
    reasoning_parser: str = option(
        "auto",
        "format of the model's reasoning; auto = detected from the chat template",
        choices=(
            *("auto", "none", "harmony", "think", "deepseek_r1", "seed_oss", "mistral", "gemma4", "command", "kimi"),
            "granite",
        ),
        words={"deepseek-r1": "deepseek_r1"}
        | dict.fromkeys(("openai_gptoss", "gpt-oss"), "harmony")
        | dict.fromkeys(
            ("qwen3", "qwen3-thinking", "glm45", "glm47", "minimax_m2", "minimax", "kimi_k2", "olmo3"), "think"
        )
        | dict.fromkeys(("deepseek_v3", "deepseek-v3", "nemotron_v3", "nemotron_3"), "think")
        | dict.fromkeys(("holo2", "mimo", "poolside_v1", "interns1"), "think")
        | dict.fromkeys(("step3", "step3p5"), "deepseek_r1")
        | dict.fromkeys(("cohere_command3", "cohere_command4"), "command"),
    )
    thinking_budget: int = option(
        -1,
        "most tokens of a model's reasoning, after which its end is forced, for requests that set no limit; 0 = no "
        "reasoning, -1 = no limit",
        aliases=("reasoning_budget",),
        minimum=-1,
        maximum=2**31 - 1,
    )
    run_dir: str = ""  # the private folder of the ipc sockets, made at the start; not an option
    incarnation: int = 0  # the number of a replica's run, over all replicas; not an option
    replicas_join: bool = False  # whether replicas come and go, and none is there at the start; not an option

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that cannot work."""
        super().__post_init__()
        keys = self.load_keys()
        if keys is not None and not (keys and all(k and k.isascii() and k.isprintable() for k in keys)):
            raise ConfigError("--api-key or the file of --api-key-file must be printable ASCII and not empty")
        if self.classes and keys is None:
            raise ConfigError("--classes needs keys: give --api-key-file FILE or --api-key, each key as CLASS=KEY")
        if self.auth and keys is None and self.uds is None and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} lets others use this server; give --api-key-file FILE or --api-key KEY, "
                "or --no-auth to allow everyone"
            )

    def load_keys(self) -> dict[str, int] | None:
        """Return the API keys of `--api-key` or `--api-key-file`, with the number of their class; None without either.

        Raises `ConfigError` for both, for a file that cannot be read, and for a key without its class.
        """
        if self.api_key is not None and self.api_key_file is not None:
            raise ConfigError("--api-key and --api-key-file exclude each other: give one of them")
        if self.api_key_file is not None:
            lines = _read_text("--api-key-file", self.api_key_file).splitlines()
            given = [line.strip() for line in lines if line.strip()]
        elif self.api_key is None:
            return None
        else:
            given = split_list(self.api_key)
        names = split_list(self.classes)
        if not names:
            return dict.fromkeys(given, 0)
        if len({*names}) < len(names):
            raise ConfigError("--classes: there is a class twice")
        pairs = {key.partition("=")[::2] for key in given}
        keys = {key: names.index(name) for name, key in pairs if name in names}
        if len(keys) < len(pairs):
            raise ConfigError(f"--classes: each API key must begin with its one class, such as {names[0]}=KEY")
        return keys

    def _addr(self, name: str) -> str:
        assert self.run_dir, "the run directory is not made yet"
        return f"ipc://{self.run_dir}/{name}"

    @property
    def zmq_frontend_addr(self) -> str:
        """The address at which the API server receives."""
        return self._addr("frontend")

    @property
    def zmq_backend_addr(self) -> str:
        """The address to which tokenizers send requests: the scheduler's, or with several replicas the API server's."""
        return self._addr("backend")

    @property
    def zmq_scheduler_addr(self) -> str:
        """The address at which the scheduler receives; each incarnation has its own, without old requests."""
        return self._addr(f"backend-{self.incarnation}") if self.is_routed else self.zmq_backend_addr

    @property
    def is_routed(self) -> bool:
        """Whether the API process chooses a replica for each request."""
        return self.dp > 1 or self.replicas_join

    @property
    def zmq_detokenizer_addr(self) -> str:
        """The address at which the detokenizer receives."""
        return self._addr("detokenizer")

    @property
    def zmq_tokenizer_addrs(self) -> list[str]:
        """The addresses of the tokenizers. Each has its own, so that a request and its abort keep their order."""
        if self.num_tokenizer == 0:
            return [self.zmq_detokenizer_addr]
        return [self._addr(f"tokenizer-{i}") for i in range(self.num_tokenizer)]


def _read_text(flag: str, path: str) -> str:
    """Return the text of the file that `flag` names. Raises `ConfigError` if it cannot be read."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeError) as e:
        raise ConfigError(f"{flag} {path} cannot be read: {e}") from e


def split_list(text: str | None) -> list[str]:
    """Split the text of an option with form list."""
    return [item.strip() for item in (text or "").split(",") if item.strip()]


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def options_of(cls: type) -> Mapping[str, Option]:
    """Return the options of a configuration class and of the classes nested in it, by name."""
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
def spellings_of(cls: type) -> Mapping[str, Option]:
    """Return what reads the value of each name that sets an option of `cls`, with underscores.

    For a switch of another engine, and for no_X of a switch X, it is an option of that type whose `words` are ours.
    If a name is also an alias of another option, the name counts.
    """
    options = options_of(cls).values()
    found: dict[str, Option] = {}
    for o in options:
        for name, words in o.switches.items():
            kind, choices = (bool, ()) if True in words else (str, tuple(words))
            found[name] = replace(o, kind=kind, words=words, choices=choices, minimum=None)
    found |= {alias: o for o in options for alias in o.aliases}
    found |= {o.name: o for o in options}
    for name, switch in list(found.items()):
        if switch.kind is bool:
            words = {value: switch.words.get(not value, not value) for value in (True, False)}
            found.setdefault(f"no_{name}", replace(switch, words=words))
    return found


def named_values(given: Iterable[tuple[Any, Any, str]], cls: type, is_text: bool = False) -> dict[str, Any]:
    """Return the values by option name of (spelling, value, what was written before the value).

    Options of other engines that ask for what happens anyway are dropped (`settings/foreign.py`). Raises `ConfigError`
    for an unknown spelling, for two spellings of one option, and for an invalid value.
    """
    spellings = spellings_of(cls)
    found: dict[str, Any] = {}
    for name, value, source in given:
        words, written = str(name).replace("-", "_"), source.rstrip("= ")
        if (option := spellings.get(words)) is None:
            if not asks_nothing(words, value):
                raise ConfigError(f"{written}{_unknown(words, spellings)}")
            continue
        if option.name in found:
            raise ConfigError(f"{written} is set twice")
        if not is_unicode(str(value)):
            raise ConfigError(f"{source}{value!a} is not text in UTF-8")
        found[option.name] = option.read(value, source, is_text)
    return found


def _unknown(words: str, spellings: Iterable[str]) -> str:
    """Return the error message for a name that is not an option, without the name."""
    if sentence := sentence_for(words):
        return f": {sentence}"
    if words in spellings_of(ServerArgs):
        return " is an option of `minisgl serve` only"
    return f" is not an option{did_you_mean(words, spellings) or '; `minisgl serve --help-all` lists them'}"


def build_config(cls: type[T], values: Mapping[str, Any]) -> T:
    """Build the configuration class `cls` and its nested classes from flat `values`, in any spelling.

    Raises `ConfigError` for an unknown option and for a value that cannot work.
    """
    given = ((name, value, f"{name}=") for name, value in values.items())
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
