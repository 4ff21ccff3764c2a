"""Triton kernels on a CPU, by Triton's interpreter: collected only where `TRITON_INTERPRET=1` was set from the start.

`tools/run_tests.py` runs this folder in a process of its own, since the variable decides at import.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]
else:
    import inspect
    import math
    from dataclasses import replace
    from functools import cache
    from types import SimpleNamespace

    import numpy as np
    import torch
    from triton import language
    from triton.language import core
    from triton.language.semantic import TritonSemantic
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

    _dot = _builder.create_dot

    def _create_dot(
        self: object,
        a: interpreter.TensorHandle,
        b: interpreter.TensorHandle,
        c: interpreter.TensorHandle,
        *rest: object,
    ) -> interpreter.TensorHandle:
        """Multiply row by row: OpenBLAS's GEMM for Haswell and Zen gives a row other bits at another position."""
        a, c = (interpreter.TensorHandle(x.data[..., None, :], x.dtype) for x in (a, c))
        b = interpreter.TensorHandle(b.data[..., None, :, :], b.dtype)
        rows = _dot(self, a, b, c, *rest)
        return interpreter.TensorHandle(rows.data[..., 0, :], rows.dtype)

    _builder.create_dot = _create_dot

    _convert = interpreter._convert_float

    def _convert_float(data: np.ndarray, source: core.dtype, target: core.dtype, rounding: object) -> np.ndarray:
        """As a GPU rounds to float8_e4m3fn: to the nearest, and at most 448; Triton 3.6 cuts bits off."""
        if target.scalar is not core.float8e4nv or source.scalar is not core.float32:
            return _convert(data, source, target, rounding)
        values = torch.from_numpy(np.array(data)).clamp(-448.0, 448.0)
        return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = _convert_float

    # The rest is for speed alone: the tests of attention take a third of their time with it.
    _options = interpreter.interpreter_builder.options
    # Triton computes whether integers overflow, and ignores the result, since `debug` is off.
    interpreter.interpreter_builder.options = replace(_options, sanitize_overflow=False)

    # A kernel patches all of the language, and not each function that it calls what that one uses.
    _patch_lang, _all = interpreter._patch_lang, SimpleNamespace(__globals__={"language": language, "core": core})
    interpreter._patch_lang = lambda fn: _patch_lang(_all)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)

    _broadcast = TritonSemantic.broadcast_impl_value

    def _broadcast_impl_value(self: TritonSemantic, a: core.tensor, b: core.tensor) -> tuple[core.tensor, core.tensor]:
        sizes = [of.sizes if of.is_block() else () for of in (a.type, b.type)]
        return (a, b) if sizes[0] == sizes[1] else _broadcast(self, a, b)

    TritonSemantic.broadcast_impl_value = _broadcast_impl_value

    _members: dict[object, list[tuple[str, object]]] = {}

    def _patch_builtin(package: object, builder: object, scope: object) -> None:
        """Patch what is not patched yet; the list of a package's functions is made once, not at every call."""
        if package not in _members:
            _members[package] = [(k, v) for k, v in inspect.getmembers(package) if core.is_builtin(v)]
        for name, member in _members[package]:
            if getattr(package, name) is member:
                interpreter._patch_attr(package, name, member, builder, scope)

    _np_dtype = interpreter._get_np_dtype
    _np_dtypes: dict[str, object] = {}

    def _get_np_dtype(of: core.dtype) -> object:
        scalar = of.scalar
        if scalar.name not in _np_dtypes:
            _np_dtypes[scalar.name] = _np_dtype(scalar)
        return _np_dtypes[scalar.name]

    class _Shape:
        """What types and tensors of one shape have in common."""

        def __init__(self, sizes: tuple[int, ...]) -> None:
            self.of_type, self.of_tensor = core.tuple(sizes), core.tuple([core.constexpr(size) for size in sizes])
            self.numel = core.constexpr(math.prod(sizes))
            if sizes:
                core.validate_block_shape(sizes)

    _shape = cache(_Shape)

    def _init_block_type(self: core.block_type, element: core.dtype, shape: Iterable[int | core.constexpr]) -> None:
        self.sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        common = _shape(self.sizes)
        self.element_ty, self.shape, self.numel = element, common.of_type, common.numel.value
        self.name = f"<{self.sizes}, {element}>"

    def _init_tensor(self: core.tensor, handle: object, of: core.dtype) -> None:
        self.handle, self.type, self.dtype = handle, of, of.scalar
        common = _shape(of.sizes if of.is_block() else ())
        self.numel, self.shape = common.numel, common.of_tensor

    interpreter._patch_builtin = _patch_builtin
    interpreter._get_np_dtype = _get_np_dtype
    core.block_type.__init__, core.tensor.__init__ = _init_block_type, _init_tensor
