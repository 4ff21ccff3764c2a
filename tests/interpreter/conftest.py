"""Triton kernels on a CPU, by Triton's interpreter: collected only where `TRITON_INTERPRET=1` was set from the start.

`tests/test_interpreter.py` runs this folder in a process of its own, since the variable decides at import.
"""

from __future__ import annotations

import os
from collections.abc import Callable

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

    def _with_bool_mask(create: Callable[..., object], at: int) -> Callable[..., object]:
        def created(self: object, *args: object) -> object:
            # A scalar condition combined with a block's becomes int32 there, and Triton 3.9 takes bool only.
            args[at].data = args[at].data.astype(bool)
            return create(self, *args)

        return created

    _builder = interpreter.InterpreterBuilder
    _builder.create_masked_load = _with_bool_mask(_builder.create_masked_load, 1)
    _builder.create_masked_store = _with_bool_mask(_builder.create_masked_store, 2)
