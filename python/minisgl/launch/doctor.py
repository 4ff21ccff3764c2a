"""`minisgl doctor`: what this machine can run, what it cannot and why, and what a model would leave free."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import minisgl
from minisgl.checkpoint.hf import model_name
from minisgl.device.machine import available_memory, choose_device, cpu_name, gpu_memory, usable_cores
from minisgl.engine.fit import Checkpoint, Footprint, check_fit, estimate_step
from minisgl.errors import ConfigError, MinisglError, NativeError
from minisgl.launch.launch import bind_socket
from minisgl.rounding import ceil_div
from minisgl.settings.options import MEMORY_RATIOS, EngineConfig, ServerArgs

if TYPE_CHECKING:
    from minisgl.engine.config import EngineSpec

PACKAGES: Final = ("torch", "triton", "numpy", "tokenizers", "safetensors", "fastapi", "uvicorn", "pyzmq", "msgspec")
LENGTHS: Final = (1024, 4096, 32768)  # of requests that people ask about
TRIED_STEPS: Final = 20
GB: Final = 1e9

Facts = Iterator[tuple[str, str]]


class Doctor:
    """Looks at one thing after the other; `problems` are those that keep a server with these settings from starting."""

    def __init__(self, args: ServerArgs) -> None:
        self.args = args
        self.problems: list[str] = []

    def examine(self) -> Facts:
        """Yield facts in the order of a start. Imports torch, and takes some seconds."""
        yield from self._machine()
        yield from self._gpus()
        yield from self._cpu_step()
        yield from self._model()
        yield from self._places()

    def _machine(self) -> Facts:
        yield "minisgl", f"{minisgl.__version__}, Python {platform.python_version()}, {platform.platform()}"
        yield "packages", ", ".join(f"{name} {_version(name)}" for name in PACKAGES)
        yield "processor", f"{cpu_name()}, {usable_cores()} cores usable"
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        yield "memory", f"{available_memory() / GB:.1f} GB available of {whole / GB:.1f} GB"

    def _gpus(self) -> Facts:
        try:
            gpu_memory()
        except OSError as e:
            yield "GPU", f"none: {e}"
            return
        import torch

        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            yield f"GPU {i}", f"{p.name}, {p.total_memory / GB:.0f} GB, compute capability {p.major}.{p.minor}"
        yield "CUDA", str(torch.version.cuda)

    def _cpu_step(self) -> Facts:
        from minisgl.native.build import find_compiler
        from minisgl.native.library import ISAS, load_native, missing_features

        try:
            compiler = find_compiler()
            version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
            yield "compiler", f"{compiler}: {version.partition(chr(10))[0]}"
        except NativeError as e:
            yield "compiler", str(e)
        yield (
            "CPU instructions",
            "; ".join(
                f"{isa}: " + (f"lacks {', '.join(missing)}" if (missing := missing_features(isa)) else "usable")
                for isa in ISAS
            ),
        )
        try:
            library = load_native()
            yield "CPU step", f"{library.isa} ({library.path}), {try_step()}"
        except MinisglError as e:
            yield "CPU step", f"none, so steps run op by op, several times slower: {e}"

    def _model(self) -> Facts:
        config = self.args.scheduler.engine
        name = model_name(config.model)
        try:
            checkpoint = check_fit(config)
        except ConfigError as e:
            self.problems.append(str(e))
            yield "model", f"{name}: {e}"
            return
        m = checkpoint.model
        yield "model", f"{name}: {m.architecture}, {m.num_weights / GB:.2f} billion weights in {m.dtype}"

        from minisgl.engine.config import resolve

        device = choose_device(config.device)
        spec = resolve(config, device, self.args.scheduler.max_prefill_length)
        yield "attention", _attention(spec, device)
        yield from self._memory(checkpoint, config, spec, device)

    def _memory(self, checkpoint: Checkpoint, config: EngineConfig, spec: EngineSpec, device: str) -> Facts:
        """The plan of one rank, as `engine/memory.py` will make it, with an estimate of what that measures."""
        from minisgl.device.device import create_device

        needs = Footprint.of(checkpoint, config, device, spec.dtype.itemsize)
        free = create_device(config.device, config.threads, 0, config.tp // config.nnodes).free_memory()
        step = estimate_step(spec.model, config, spec.max_step_tokens, spec.dtype.itemsize) if device == "cuda" else 0
        ratio = config.memory_ratio or MEMORY_RATIOS[device]
        rest = free - needs.weights - needs.rows
        pages = config.num_pages or min(
            max(0, int(rest * ratio) - step) // needs.page, spec.max_running_requests * spec.pages_per_row
        )
        yield "free memory", f"{free / GB:.2f} GB for each rank"
        yield "weights", f"{needs.weights / GB:.2f} GB in {str(spec.dtype).removeprefix('torch.')}"
        yield "rows", f"{needs.rows / GB:.2f} GB for --max-running-requests {spec.max_running_requests}"
        if step:
            yield "largest step", f"about {step / GB:.2f} GB with --max-prefill-length {spec.max_step_tokens}"
        yield "K/V cache", f"{pages * needs.page / GB:.2f} GB for {pages * needs.page_size} tokens"
        left = rest - pages * needs.page - step
        yield "left free", f"{left / GB:.2f} GB" + (", for CUDA graphs" if spec.graph_rows else "")
        lengths = [n for n in LENGTHS if n < spec.max_seq_len] + [spec.max_seq_len]
        fits = (min(spec.max_running_requests, pages // ceil_div(n, needs.page_size)) for n in lengths)
        shown = (f"{count} of {length} tokens" for count, length in zip(fits, lengths, strict=True))
        yield "requests at once", ", or ".join(shown)
        if pages < 1:
            self.problems.append("no memory is left for the K/V cache: raise --memory-ratio, or take a smaller model")

    def _places(self) -> Facts:
        from minisgl.native.build import PREBUILT, cache_dir

        args = self.args
        try:
            bind_socket(args.host, args.port).close()
            yield "port", f"{args.host} port {args.port} is free"
        except ConfigError as e:
            self.problems.append(str(e))
            yield "port", str(e)
        for name, folder in (("compiled libraries", PREBUILT), ("cache", cache_dir())):
            files = [path for path in folder.glob("*.so") if path.is_file()] if folder.is_dir() else []
            size = sum(path.stat().st_size for path in files) / 1e6
            yield name, f"{folder}: {len(files)} libraries, {size:.1f} MB{_writable(folder) if name == 'cache' else ''}"


def examine(args: ServerArgs) -> int:
    """Print what a server with `args` would find here; return 1 if it could not start."""
    doctor = Doctor(args)
    for name, fact in doctor.examine():
        print(f"{name:<20}{fact}", flush=True)
    for problem in doctor.problems:
        print(f"\nA server with these settings cannot start: {problem}")
    return int(bool(doctor.problems))


def try_step() -> str:
    """Run steps of the built-in model on the CPU."""
    from minisgl.device.device import create_device
    from minisgl.engine.config import resolve
    from minisgl.engine.engine import Engine
    from minisgl.engine.trial import decode_plan

    config = EngineConfig(device="cpu", num_pages=1, max_running_requests=1)
    engine = Engine(resolve(config, "cpu", 64), create_device("cpu"))
    plan = decode_plan(1, engine.spec.model.vocab_size, 0)
    engine.launch(plan).wait()  # the first one is slower
    began = time.perf_counter()
    for _ in range(TRIED_STEPS):
        result = engine.launch(plan).wait()
    ms = 1000 * (time.perf_counter() - began) / TRIED_STEPS
    engine.shutdown()
    if not result.finite.all():
        raise NativeError("a step of the built-in model gave logits that are not finite")
    return f"a step of the built-in model takes {ms:.2f} ms"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"


def _attention(spec: EngineSpec, device: str) -> str:
    from minisgl.attention.selection import ATTENTION

    wanted = spec.attention_spec(device)
    return "; ".join(f"{name}: {ATTENTION.refusal(name, wanted) or 'usable'}" for name in ATTENTION.names)


def _writable(folder: Path) -> str:
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return ", writable" if os.access(existing, os.W_OK) else f"; {existing} is not writable"
