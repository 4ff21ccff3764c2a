"""Compiles the C++ step into the package while the package is built, so that a server's first start need not."""

from __future__ import annotations

import logging
import platform
import shutil
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class CompileHook(BuildHookInterface):
    """An editable installation gets the library of this machine's best instruction set; a wheel gets all libraries of
    this architecture, or none where there is no compiler."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        _make_importable(Path(self.root))
        from minisgl.core.errors import NativeError
        from minisgl.native import library as native
        from minisgl.native.build import PREBUILT, build_libraries

        logging.basicConfig(level=logging.INFO, format="%(message)s")
        usable = native.usable_isas()
        others = [isa for isa in native.isas_of(platform.machine()) if isa not in usable]
        isas = usable[:1] if version == "editable" else [*usable, *others]
        PREBUILT.mkdir(exist_ok=True)
        built = set()
        for future in build_libraries([native.target(isa) for isa in isas]):
            try:
                library = future.result()
            except NativeError as e:
                self.app.display_warning(str(e))
                continue
            built.add(PREBUILT / library.name)
            if library.parent != PREBUILT:
                shutil.copy2(library, PREBUILT)
        for stale in {*PREBUILT.glob("*.so")} - built:
            stale.unlink()
        if built and version != "editable":
            build_data["artifacts"].append(str(PREBUILT.relative_to(self.root) / "*.so"))
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def _make_importable(root: Path) -> None:
    """Let `minisgl.native` be imported without the package's own __init__, whose imports are not installed yet."""
    package = ModuleType("minisgl")
    package.__path__ = [str(root / "python" / "minisgl")]
    sys.modules["minisgl"] = package
