"""Compiles the C++ libraries into the package while it is built, so that a server's first start need not."""

from __future__ import annotations

import platform
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompileHook(BuildHookInterface):
    """For all instruction sets that the compiler knows, whatever this machine has; none without a compiler."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        build, libraries = _libraries(Path(self.root))

        def compile_one(library: tuple[Path, tuple[str, ...]]) -> Path | None:
            try:
                return build.prebuild_library(*library)
            except (OSError, subprocess.SubprocessError) as e:
                self.app.display_warning(f"{library[0].name} {' '.join(library[1])} is not compiled: {e}")
                return None

        with ThreadPoolExecutor() as pool:
            built = {path for path in pool.map(compile_one, libraries) if path is not None}
        for stale in set(build.PREBUILT.glob("*.so")) - built:
            stale.unlink()
        if built and version != "editable":
            build_data["artifacts"].append(str(build.PREBUILT.relative_to(self.root) / "*.so"))
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def _libraries(root: Path) -> tuple[ModuleType, list[tuple[Path, tuple[str, ...]]]]:
    """`native/build.py`, and (source, flags) of all that is to be compiled."""
    # Without the package's own __init__, whose imports are not installed yet.
    package = ModuleType("minisgl")
    package.__path__ = [str(root / "python" / "minisgl")]
    sys.modules["minisgl"] = package
    from minisgl.native import build
    from minisgl.native import library as native

    return build, [(native.SOURCE, native.compiler_flags(isa)) for isa in native.isas_of(platform.machine())]
