"""`minisgl doctor`: reports what this machine can run, what it cannot run and why, and the memory plan of a model."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Final

import minisgl
from minisgl.checkpoint.adapter import adapters_of
from minisgl.checkpoint.hf import model_name
from minisgl.core.errors import ConfigError, MinisglError, NativeError
from minisgl.core.layout import GROUPS
from minisgl.core.specs import GroupedQuery
from minisgl.device.machine import available_memory, choose_device, cpu_name, gpu_memory, usable_cores
from minisgl.engine.fit import GB, Footprint, check_fit, estimate_step
from minisgl.launch.launch import bind_socket, check_args
from minisgl.process.log import announce
from minisgl.settings.options import EngineConfig, ServerArgs

PACKAGES: Final = ("torch", "triton", "numpy", "tokenizers", "safetensors", "starlette", "uvicorn", "pyzmq", "msgspec")
LENGTHS: Final = (1024, 4096, 32768)  # of the requests in the memory plan, in tokens
TIMED_STEPS: Final = 20

Facts = Iterator[tuple[str, str]]


def examine(args: ServerArgs) -> int:
    """Print the facts of this machine and model that matter to a server with `args`. Imports torch.

    Return the exit code: 1 if the server could not start, else 0.
    """
    problems = []
    for check in (check_args, lambda args: bind_socket(args).close()):
        try:
            check(args)
        except ConfigError as e:
            problems.append(str(e))
    for name, fact in chain(_machine(), _cpu_step(), _model(args)):
        announce(f"{name:<18}{fact}")
    announce(f"{'start':<18}" + ("; ".join(problems) or f"nothing is in the way; {args.host} port {args.port} is free"))
    return int(bool(problems))


def _machine() -> Facts:
    yield "minisgl", f"{minisgl.__version__}, Python {platform.python_version()}, {platform.platform()}"
    installed = {package.name: package.version for package in importlib.metadata.distributions()}
    yield "packages", ", ".join(f"{name} {installed.get(name, 'is not installed')}" for name in PACKAGES)
    yield "processor", f"{cpu_name()}, {usable_cores()} cores usable"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield "memory", f"{available_memory() / GB:.1f} GB available of {total / GB:.1f} GB"
    try:
        gpu_memory()
    except OSError as e:
        yield "GPU", f"none: {e}"
        return
    import torch

    try:
        torch.cuda.init()
    except RuntimeError as e:
        yield "GPU", f"torch cannot use it: {str(e).partition('.')[0]}"
        return
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        yield f"GPU {i}", f"{p.name}, {p.total_memory / GB:.0f} GB, compute capability {p.major}.{p.minor}"


def _cpu_step() -> Facts:
    from minisgl.native.build import cache_dir, find_compiler
    from minisgl.native.library import ISAS, load_native, missing_features

    try:
        version = subprocess.run([find_compiler(), "--version"], capture_output=True, text=True, check=False).stdout
        yield "compiler", version.partition("\n")[0]
    except NativeError as e:
        yield "compiler", str(e)
    missing = {isa: ", ".join(missing_features(isa)) for isa in ISAS}
    yield "instruction sets", "; ".join(f"{isa}: " + (f"lacks {x}" if x else "usable") for isa, x in missing.items())
    try:
        library = load_native()
        yield "CPU step", f"{library.isa}, a step of the built-in model takes {time_step():.2f} ms; {library.path}"
    except MinisglError as e:
        yield "CPU step", f"none, so steps run op by op, several times slower: {e}"
    folder = cache_dir()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    yield "cache", f"{folder}, " + ("writable" if os.access(existing, os.W_OK) else f"but {existing} is not writable")


def time_step() -> float:
    """Return the milliseconds of a decode step of the built-in model on the CPU.

    Raises `NativeError` if its logits are not finite.
    """
    from minisgl.device.create import create_device
    from minisgl.engine.engine import Engine
    from minisgl.engine.resolve import resolve
    from minisgl.engine.trial import decode_plan

    config = EngineConfig(device="cpu", num_pages=1, max_running_requests=1)
    engine = Engine(resolve(config, "cpu", 64), create_device("cpu"))
    plan = decode_plan(1, engine.spec.model.vocab_size, 0)
    if not engine.launch(plan).wait().finite.all():  # not timed: the first step is slower
        raise NativeError("a step of the built-in model computes non-finite logits")
    start = time.perf_counter()
    for _ in range(TIMED_STEPS):
        engine.launch(plan).wait()
    return 1000 * (time.perf_counter() - start) / TIMED_STEPS


def _model(args: ServerArgs) -> Facts:
    """Yield the attention backends and a rank's memory plan: the engine's, with an estimate of the largest step."""
    config = args.scheduler.engine
    try:
        checkpoint = check_fit(config)
    except ConfigError as e:
        yield "model", str(e)
        return
    from minisgl.attention.selection import ATTENTION
    from minisgl.device.create import create_device
    from minisgl.engine.memory import plan_blocks, rows_at_once
    from minisgl.engine.resolve import resolve
    from minisgl.native.runner import refusal

    device = choose_device(config.device)
    spec = resolve(replace(config, dummy_weight=True), device, args.scheduler.max_prefill_length)
    m, item = spec.model, spec.dtype.itemsize
    yield (
        "model",
        f"{model_name(config.model)}: {m.architecture}, {m.num_weights / GB:.2f} billion weights in {m.dtype}",
    )
    if m.is_fallback:
        yield "its layers", "are known once transformers has loaded the model"
        return
    if device == "cpu":
        yield "its steps", f"op by op: {reason}" if (reason := refusal(spec)) else "in C++, if this machine has them"
    if (room := spec.adapters) is not None:
        names = ", ".join(adapter.name for adapter in adapters_of(config.lora)) or "those of --lora-dynamic"
        yield "adapters", f"{names}; {room.slots} slots of rank {room.rank}, {room.hosted} in host memory"
    kinds = dict.fromkeys(m.mixer(layer, spec.info) for layer in range(m.num_layers))
    required = [spec.mixer_spec(kind, device) for kind in kinds if isinstance(kind, GroupedQuery)]
    reasons = {name: [ATTENTION.refusal(name, needs) for needs in required] for name in ATTENTION.names}
    usable = "; ".join(f"{name}: {next(filter(None, found), 'usable')}" for name, found in reasons.items())
    yield "attention", usable if required else "to latents, by kernels of their own"

    if device == "cuda" and m.quantization is None:
        from minisgl.kernels.triton.kernels import explain
        from minisgl.kernels.triton.product import Mixture, Product
        from minisgl.ops.quantized import target_format

        inputs = m.hidden_size if m.latent is None else m.latent.q_rank or m.hidden_size
        attention, ranks = (m.num_heads + 2 * m.num_kv_heads) * m.head_dim, spec.info.size
        kind, dtype = target_format(device, spec.quantization or "", m.hidden_size), spec.dtype
        value_dim = m.head_dim
        if m.latent is not None:
            attention, value_dim = m.num_heads * m.latent.qk_dim, m.latent.v_dim
        work: dict[str, Product | Mixture] = {
            "qkv" if m.latent is None else "q": Product(1, attention // ranks, inputs, kind, dtype),
            "o": Product(1, m.hidden_size, m.num_heads * value_dim // ranks, kind, dtype),
            "gate and up": Product(1, 2 * m.intermediate_size // ranks, m.hidden_size, kind, dtype, m.activation)
            if m.family.is_gated
            else Product(1, m.intermediate_size // ranks, m.hidden_size, kind, dtype),
            "down": Product(1, m.hidden_size, m.intermediate_size // ranks, kind, dtype),
        }
        if experts := m.experts:
            del work["gate and up"], work["down"]
            size, flags = experts.intermediate_size // ranks, experts.flags
            sizes = experts.top_k, experts.count, m.hidden_size, size
            work["experts"] = Mixture(1, *sizes, (kind, kind), dtype, flags.gate, flags.has_bias)
        yield from explain(work)
    needs = Footprint.of(checkpoint, config, device, item)
    free = create_device(config.device, config.threads, 0, config.tp // config.nnodes).free_memory()
    step = estimate_step(m, config, spec.max_step_tokens, item) if device == "cuda" else 0
    rest = free - needs.weights - needs.rows
    size, blocks = plan_blocks(spec, needs.pages, int(rest * spec.memory_ratio) - step)
    kv = blocks.count * size
    parts = {"weights": needs.weights, "rows": needs.rows, "largest step, about": step, "K/V": kv}
    shown = ", ".join(f"{name} {size / GB:.2f}" for name, size in parts.items() if size)
    yield "memory plan", f"{shown}, left {(free - sum(parts.values())) / GB:.2f} GB of {free / GB:.2f} GB for each rank"
    lengths = [*(n for n in LENGTHS if n < spec.max_seq_len), spec.max_seq_len]
    if len(blocks.pages) > 1:
        each = " or ".join(f"{count} of {name}" for count, name in zip(blocks.pages, GROUPS, strict=False))
        yield "pages", f"{blocks.count} blocks of {size / 1e6:.1f} MB, each for pages of one kind: {each}"
    counts = (rows_at_once(spec, blocks, n) for n in lengths)
    capacity = ", or ".join(f"{count} of {n} tokens" for count, n in zip(counts, lengths, strict=True))
    yield (
        "requests at once",
        capacity if blocks.count else "none: no memory is left for K/V pages; raise --memory-ratio",
    )
