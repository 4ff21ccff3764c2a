"""Triton kernels on a CPU, by Triton's interpreter: collected only where `TRITON_INTERPRET=1` was set from the start.

`tests/unit/kernel/test_interpreter.py` runs this folder in a process of its own, since the variable decides at import.
"""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    from triton.runtime import interpreter

    _patch = interpreter._patch_lang_tensor

    def _patch_with_item(tensor: type, scope: object) -> None:
        # Triton 3.6 converts one-element arrays with int(), which numpy 2.4 refuses.
        _patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_with_item
