"""The C++ library of the CPU step: selects the best build of `cpp/forward.cpp` that works on this machine.

The library has a plain C interface and does not use torch. A build is used only after its self-test has passed in a
child process, so a build that crashes on this machine costs only speed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from ctypes import CFUNCTYPE, POINTER, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Final

from minisgl.core.errors import ConfigError, InvariantError, NativeError
from minisgl.native.build import Target, build_library

_log = logging.getLogger("minisgl.native")

SOURCE: Final = Path(__file__).parent / "cpp" / "forward.cpp"
# Contraction is off because results must not depend on how a loop is unrolled; see cpp/simd.h.
FLAGS: Final = ("-O3", "-std=c++17", "-shared", "-fPIC", "-pthread", "-ffp-contract=off")
SELF_TEST_TIMEOUT_S: Final = 60.0  # the test takes a tenth of a second; a busy machine is no reason to fail

_AVX512: Final = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
COMPILER_NAMES: Final = {
    "avx512_bf16": "-mavx512bf16",
    "avx512_vnni": "-mavx512vnni",
    "amx_tile": "-mamx-tile",
    "amx_bf16": "-mamx-bf16",
}
# The instruction sets, best first, with the CPU features that each needs by Linux's names. "generic" runs anywhere.
ISAS: Final[Mapping[str, tuple[str, ...]]] = {
    "amx_bf16": (*_AVX512, "avx512_bf16", "avx512_vnni", "fma", "amx_tile", "amx_bf16"),
    "avx512_bf16": (*_AVX512, "avx512_bf16", "avx512_vnni", "fma"),
    "avx512_vnni": (*_AVX512, "avx512_vnni", "fma"),
    "avx512": (*_AVX512, "fma"),
    "avx2": ("avx2", "fma"),
    "generic": (),
}


class NativeLibrary:
    """The functions of a loaded build. `isa` is one of ISAS."""

    def __init__(self, path: Path, isa: str) -> None:
        from minisgl.native.abi import LAYOUT_VERSION, ModelSpec, StepPlan  # needs numpy, which `hatch_build.py` lacks

        self.path = path
        self.isa = isa
        library = ctypes.CDLL(str(path))
        version = CFUNCTYPE(c_int64)(("minisgl_layout_version", library))()
        if version != LAYOUT_VERSION:
            raise InvariantError(f"{path.name} has layout version {version}, but plans have {LAYOUT_VERSION}")
        # The first type is that of the result.
        self.create = CFUNCTYPE(c_void_p, POINTER(ModelSpec))(("minisgl_create", library))
        self.destroy = CFUNCTYPE(None, c_void_p)(("minisgl_destroy", library))
        self.step = CFUNCTYPE(None, c_void_p, POINTER(StepPlan), c_void_p, c_void_p)(("minisgl_step", library))
        self.fold = CFUNCTYPE(None, c_void_p, c_void_p, c_int64)(("minisgl_fold", library))
        self.verify = CFUNCTYPE(None, c_void_p, POINTER(StepPlan), c_void_p, c_void_p, c_void_p, c_void_p)(
            ("minisgl_verify", library)
        )
        self.draft = CFUNCTYPE(c_int64, c_void_p, POINTER(StepPlan), c_int64)(("minisgl_draft", library))
        self.logits = CFUNCTYPE(c_void_p, c_void_p)(("minisgl_logits", library))
        self.pack = CFUNCTYPE(None, c_void_p, c_int64, c_int64, c_int64)(("minisgl_pack", library))
        self.quantized_size = CFUNCTYPE(c_int64, c_int64, c_int64, c_int64)(("minisgl_quantized_size", library))
        self.pack_quantized = CFUNCTYPE(None, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_void_p)(
            ("minisgl_pack_quantized", library)
        )


def load_native() -> NativeLibrary:
    """Load the best build that passes its self-test.

    The environment variable `MINISGL_CPU_ISA` selects one of ISAS, or "none". Raises `NativeError` with the reason why
    each build failed.
    """
    wanted = os.environ.get("MINISGL_CPU_ISA", "")
    if wanted == "none":
        raise NativeError("MINISGL_CPU_ISA=none")
    if wanted and wanted not in ISAS:
        raise ConfigError(f"MINISGL_CPU_ISA={wanted!r} is not one of {', '.join(ISAS)}, none")
    failures = []
    for isa in usable_isas():
        if wanted in ("", isa):
            try:
                path = build_library(target(isa))
                run_self_test(path, isa)
            except NativeError as e:
                failures.append(str(e))
                continue
            if failures:
                _log.warning("the C++ step uses only %s: %s", isa, "; ".join(failures))
            return NativeLibrary(path, isa)
    raise NativeError("; ".join(dict.fromkeys(failures)) or f"this processor has no {wanted}")


def usable_isas() -> list[str]:
    """Return the names of `ISAS` that this machine supports, best first."""
    return [isa for isa in ISAS if not missing_features(isa)]


def missing_features(isa: str) -> list[str]:
    """Return the features that `ISAS[isa]` needs and this CPU lacks."""
    features = _cpu_features()
    return [feature for feature in ISAS[isa] if feature not in features]


def isas_of(machine: str) -> list[str]:
    """Return the names of `ISAS` that exist on an architecture (`platform.machine()`), best first."""
    return [isa for isa, needs in ISAS.items() if machine == "x86_64" or not needs]


def target(isa: str) -> Target:
    """Return the library to compile for a name of `ISAS`."""
    flags = (COMPILER_NAMES.get(feature, f"-m{feature}") for feature in ISAS[isa])
    return Target(f"the C++ step for {isa}", SOURCE, (*FLAGS, *flags))


@cache
def run_self_test(path: Path, isa: str) -> None:
    """Run the library's self-test in a child process, once per library. Raises `NativeError` if it fails."""
    code = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).minisgl_self_test())"
    command = [sys.executable, "-I", "-S", "-c", code, str(path)]
    try:
        subprocess.run(command, capture_output=True, timeout=SELF_TEST_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError) as e:
        _log.debug("self-test of %s: %s", path.name, e)
        raise NativeError(f"the C++ step for {isa} fails its self-test") from e


def _cpu_features() -> frozenset[str]:
    if platform.machine() == "x86_64":
        try:
            for line in Path("/proc/cpuinfo").read_text().splitlines():
                if line.startswith("flags"):
                    return frozenset(line.split())
        except OSError:
            pass
    return frozenset()
