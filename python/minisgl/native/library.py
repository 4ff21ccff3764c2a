"""The native CPU step: finds the best build of `cpp/forward.cpp` that works on this machine, and calls it.

The library has a plain C interface and knows nothing of torch. A build is trusted after its self-test has passed in a
child process, so one that crashes here only costs its speed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from ctypes import POINTER, c_double, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Final

from minisgl.errors import ConfigError
from minisgl.native.build import build_library

_log = logging.getLogger("minisgl.native")

SOURCE: Final = Path(__file__).parent / "cpp" / "forward.cpp"
# Contraction is off because results must not depend on how a loop was unrolled, see cpp/simd.h.
FLAGS: Final = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=off")
SELF_TEST_TIMEOUT_S: Final = 60.0  # it takes a tenth of a second; a busy machine is no reason to fail it

_AVX512: Final = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
COMPILER_NAMES: Final = {
    "avx512_bf16": "-mavx512bf16",
    "avx512_vnni": "-mavx512vnni",
    "amx_tile": "-mamx-tile",
    "amx_bf16": "-mamx-bf16",
}
# Best first: what the processor must have, by Linux' names. "generic" runs anywhere.
ISAS: Final[Mapping[str, tuple[str, ...]]] = {
    "amx_bf16": (*_AVX512, "avx512_bf16", "avx512_vnni", "fma", "amx_tile", "amx_bf16"),
    "avx512_bf16": (*_AVX512, "avx512_bf16", "avx512_vnni", "fma"),
    "avx512": (*_AVX512, "fma"),
    "avx2": ("avx2", "fma"),
    "generic": (),
}


class LayerWeights(ctypes.Structure):
    """Addresses of one layer's weights, as in cpp/forward.cpp; biases and norms are float32, 0 where there is none."""

    _fields_ = [
        *((name, c_void_p) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in ("qkv_bias", "o_bias", "gate_up_bias", "down_bias")),
        *((name, c_void_p) for name in ("input_norm", "post_norm", "q_norm", "k_norm", "cos_sin")),
        ("window", c_int64),
    ]


class ModelSpec(ctypes.Structure):
    """Sizes and addresses of a model, its K/V pool and the per-row state, as in cpp/forward.cpp."""

    _fields_ = [
        *((name, c_int64) for name in ("is_bf16", "is_int8", "layers", "hidden", "intermediate", "vocab", "heads")),
        *((name, c_int64) for name in ("kv_heads", "dim", "page", "threads", "is_tied")),
        ("eps", c_double),
        ("scale", c_double),
        ("weights", POINTER(LayerWeights)),
        *((name, c_void_p) for name in ("embedding", "head", "final_norm", "cache")),
        ("layer_stride", c_int64),
        ("page_table", c_void_p),
        ("table_width", c_int64),
        *((name, c_void_p) for name in ("last_token", "temperature", "top_k", "top_p", "min_p", "noise_key")),
    ]


class StepPlan(ctypes.Structure):
    """The arrays of a `core.BatchPlan`."""

    _fields_ = [
        *((name, c_void_p) for name in ("slots", "tokens", "pages", "rows")),
        *((name, c_int64) for name in ("num_slots", "num_pages", "num_rows")),
    ]


class NativeLibrary:
    """A loaded build; `isa` is one of ISAS."""

    def __init__(self, path: Path, isa: str) -> None:
        self.isa = isa
        library = ctypes.CDLL(str(path))
        self.create = library.minisgl_create
        self.create.argtypes, self.create.restype = [POINTER(ModelSpec)], c_void_p
        self.destroy = library.minisgl_destroy
        self.destroy.argtypes, self.destroy.restype = [c_void_p], None
        self.step = library.minisgl_step
        self.step.argtypes, self.step.restype = [c_void_p, POINTER(StepPlan), c_void_p, c_void_p], None
        self.logits = library.minisgl_logits
        self.logits.argtypes, self.logits.restype = [c_void_p], c_void_p
        self.pack = library.minisgl_pack
        self.pack.argtypes, self.pack.restype = [c_void_p, c_int64, c_int64, c_int64], None
        self.int8_size = library.minisgl_int8_size
        self.int8_size.argtypes, self.int8_size.restype = [c_int64, c_int64], c_int64
        self.quantize = library.minisgl_quantize
        self.quantize.argtypes, self.quantize.restype = [c_void_p, c_int64, c_int64, c_int64, c_void_p], None


def load_native() -> NativeLibrary | str:
    """The best build that passes its self-test, or why there is none.

    `MINISGL_CPU_ISA` names the only one to try, or "none".
    """
    wanted = os.environ.get("MINISGL_CPU_ISA", "")
    if wanted == "none":
        return "MINISGL_CPU_ISA=none"
    if wanted and wanted not in ISAS:
        raise ConfigError(f"MINISGL_CPU_ISA={wanted!r} is not one of {', '.join(ISAS)}, none")
    reason = f"this processor has no {wanted}"
    for isa in usable_isas():
        if wanted in ("", isa):
            path = build_library(SOURCE, compiler_flags(isa))
            if path is None:
                reason = "the C++ step cannot be compiled (is g++ installed?)"
                continue
            if passes_self_test(path):
                return NativeLibrary(path, isa)
            reason = f"the C++ step for {isa} fails its self-test"
            _log.warning("%s", reason)
    return reason


def usable_isas() -> list[str]:
    """Names of `ISAS` that this machine has, best first."""
    features = _cpu_features()
    return [isa for isa, needs in ISAS.items() if features.issuperset(needs)]


def isas_of(machine: str) -> list[str]:
    """Names of `ISAS` that some processor of an architecture (`platform.machine()`) has."""
    return [isa for isa, needs in ISAS.items() if machine == "x86_64" or not needs]


def compiler_flags(isa: str) -> tuple[str, ...]:
    """What `build_library` needs for a name of `ISAS`."""
    return (*FLAGS, *(COMPILER_NAMES.get(feature, f"-m{feature}") for feature in ISAS[isa]))


@cache
def passes_self_test(path: Path) -> bool:
    """Run the library's own test in a child process, once: the choice of a dtype asks, and the engine."""
    code = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).minisgl_self_test())"
    try:
        command = [sys.executable, "-I", "-S", "-c", code, str(path)]
        return subprocess.run(command, capture_output=True, timeout=SELF_TEST_TIMEOUT_S).returncode == 0
    except (OSError, subprocess.SubprocessError) as e:
        _log.debug("self-test of %s: %s", path.name, e)
        return False


def _cpu_features() -> frozenset[str]:
    if platform.machine() == "x86_64":
        try:
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("flags"):
                    return frozenset(line.split())
        except OSError:
            pass
    return frozenset()
