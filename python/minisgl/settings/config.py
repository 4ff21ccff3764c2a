"""Settings of the engine and the scheduler: the one place for their names, defaults and help.

Command-line flags (`settings/args.py`) and `LLM(...)` keywords are both made from these fields, so this module must not
import torch: the API process reads it too. Everything here is what the user *asked for*; what follows from it for a
given model and machine is computed once by `engine/config.py: resolve` and never written back.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeVar, get_type_hints

from minisgl.errors import ConfigError

T = TypeVar("T")


def option(default: Any, help: str, *, flags: tuple[str, ...] = (), choices: tuple[str, ...] = ()) -> Any:
    """A configuration field: `flags` are the accepted spellings besides `--field-name`."""
    return field(default=default, metadata={"help": help, "flags": flags, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What runs one model on one device."""

    model: str = option("", "folder or hub id of the model; empty = the built-in demo model", flags=("--model-path",))
    download_source: str = option(
        "huggingface", "hub that a model id is downloaded from", choices=("huggingface", "modelscope")
    )
    dtype: str = option(
        "auto",
        "number format of weights and KV cache; auto = the checkpoint's; on a CPU float32, but for large bfloat16 "
        "models that the C++ step can run",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str | None = option(
        None,
        "round the weights at the start: int8 = to 8 bits, in the C++ step of a CPU; default = as --dtype has them",
        choices=("int8",),
    )
    device: str = option("auto", "where to run; auto = a GPU if there is one", choices=("auto", "cpu", "cuda"))
    page_size: int | None = option(
        None, "tokens per KV page, a power of two from 1 to 128; default 64 on a GPU, 16 on a CPU"
    )
    num_pages: int | None = option(None, "KV pages in the pool; default = from the free memory and --memory-ratio")
    memory_ratio: float | None = option(
        None, "share of the free memory (after weights) for the KV cache; default 0.9 on a GPU, 0.1 on a CPU"
    )
    max_running_requests: int = option(256, "most requests computed at the same time")
    max_seq_len: int | None = option(
        None, "longest prompt plus output in tokens; default = what the model allows", flags=("--max-seq-len-override",)
    )
    attention_backend: str = option(
        "auto", "attention backend, or PREFILL,DECODE; `minisgl env` lists them", flags=("--attn",)
    )
    cuda_graph_max_bs: int | None = option(
        None,
        "largest batch whose decode steps run as CUDA graphs, 0 = none; default = --max-running-requests on a GPU",
        flags=("--graph",),
    )
    dummy_weight: bool = option(False, "random weights instead of the checkpoint's (needs only config.json)")
    threads: int | None = option(
        None, "CPU threads of the engine, of each rank; default = the cores this process may use, shared by the ranks"
    )
    tp: int = option(
        1,
        "ranks (GPUs, or processes on a CPU) that compute each layer together",
        flags=("--tp-size", "--tensor-parallel-size"),
    )
    disable_pynccl: bool = option(False, "let torch's process groups call NCCL instead of calling it directly")
    nnodes: int = option(1, "hosts that the ranks are on, as many on each; start the same command on every one")
    node_rank: int = option(0, "number of this host; host 0 is the one that serves")
    dist_init_addr: str = option("", "HOST:PORT of host 0, where the others find it; its network must be a private one")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What decides which request runs when."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    cache_type: str = option(
        "radix",
        "prefix cache: radix = share common prefixes, naive = none",
        flags=("--cache",),
        choices=("radix", "naive"),
    )
    schedule_policy: str = option(
        "fcfs",
        "order of waiting requests: fcfs = as they came, but short prompts pass long ones within a bound; lpm = "
        "longest cached prefix first",
        choices=("fcfs", "lpm"),
    )
    max_prefill_length: int = option(
        8192,
        "token budget of one step: running requests first, the rest for chunks of prompts",
        flags=("--max-extend-length",),
    )
    itl_target_ms: float | None = option(
        None,
        "longest time between two tokens of a running stream to aim at, by the size of the chunks of prompts computed "
        "beside it, 0 = no limit; default = 29, or twice a pure decode step if that is longer, where the engine has "
        "measured what a step costs",
    )
    mixed_batches: bool = option(
        True, "compute prompts and running requests in one step; off = while there are prompts, running requests wait"
    )
    overlap: bool | None = option(
        None, "plan and reply while the device computes; default: on for a GPU, off for a CPU, where it gains nothing"
    )
    max_queued_requests: int = option(2048, "waiting requests beyond which new ones are refused (429)")
    sampling_seed: int = option(0, "base of the sampling noise of requests without a seed of their own")


def option_fields(cls: type) -> dict[str, tuple[type, str]]:
    """Leaf options of a (nested) configuration class: name -> (the class that owns it, its type as written)."""
    leaves: dict[str, tuple[type, str]] = {}
    for f in fields(cls):
        hint = get_type_hints(cls)[f.name]
        if is_dataclass(hint):
            assert isinstance(hint, type)
            leaves.update(option_fields(hint))
        else:
            leaves[f.name] = (cls, str(f.type))
    return leaves


def build_config(cls: type[T], options: dict[str, Any]) -> T:
    """An instance of the (nested) configuration class `cls` from flat `options`.

    Raises `ConfigError` for a name that no field has.
    """
    known = option_fields(cls)
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}; known: {', '.join(sorted(known))}")

    def build(c: type) -> Any:
        values = {}
        for f in fields(c):
            hint = get_type_hints(c)[f.name]
            if is_dataclass(hint):
                assert isinstance(hint, type)
                values[f.name] = build(hint)
            elif f.name in options:
                values[f.name] = options[f.name]
        return c(**values)

    result: T = build(cls)
    return result
