"""The table of kernels: each product has one, and the reference agrees with it."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from minisgl.ops import reference
from minisgl.ops.quantized import E8M0, Format
from minisgl.triton import kernels
from minisgl.triton.kernels import KERNELS, choose, explain
from minisgl.triton.product import Product

BF16 = torch.bfloat16
FP8, INT8, INT4 = Format(8, 0), Format(8, 0, is_integer=True), Format(4, 128, scale_dtype=BF16)
KINDS = (None, FP8, Format(8, 128), INT8, INT4, Format(4, 32, scale_dtype=E8M0))
SHAPES = ((4096, 4096), (24576, 4096), (4096, 12288), (151936, 1024), (130, 200))
FIRST = {None: "GEMV", FP8: "gemv.cu", INT8: "gemv.cu", INT4: "gemv.cu"}


def test_every_product_has_a_kernel() -> None:
    used = set()
    for kind, (n_rows, n_in), rows, gate, is_hopper in product(
        KINDS, SHAPES, (1, 2, 16, 33, 64, 129, 257, 4096), ("", "silu"), (False, True)
    ):
        call = Product(rows, n_rows, n_in, kind, BF16, gate, is_hopper=is_hopper)
        kernel = choose(call)
        assert kernel.refuses(call) is None
        before = KERNELS[: KERNELS.index(kernel)]
        assert all(isinstance(other.refuses(call), str) for other in before)
        assert is_hopper or not kernel.name.endswith(".cu")
        assert (kind is None) == (kernel.name in ("GEMV", "GEMM", "cuBLAS"))
        used.add(kernel.name)
    assert used == {kernel.name for kernel in KERNELS}


@pytest.mark.parametrize("name", [kernel.name for kernel in KERNELS if not kernel.name.endswith(".cu")])
def test_the_reference_agrees(name: str) -> None:
    """Each kernel on the smallest product that it gets."""
    torch.manual_seed(0)
    for kind, gate, rows in product((None, FP8, INT4), ("", "silu"), (1, 3, 65, 200, 300)):
        dtype = torch.float32 if kind is None and name != "GEMM" else torch.float16
        dense = torch.randn(256, 256) / 16
        x = torch.randn(rows, 256).to(dtype)
        weight = dense.to(dtype)
        if kind is not None:
            weight = kind.empty(256, 256, torch.device("cpu"))
            weight.round_from(dense)
        if choose(Product.of(x, weight, gate, None)).name != name:
            continue
        got, total = kernels.multiply(x, weight, None, gate)
        want = reference.linear(x, weight if kind is None else weight.dense(dtype), None, gate)
        assert float((got.float() - want.float()).norm() / want.float().norm()) < (0.05 if kind is FP8 else 0.02)
        assert total is x
        return
    pytest.skip("its products are too large for the interpreter")


@pytest.mark.parametrize(
    ("is_hopper", "first"),
    [(True, "from 1 rows gemv.cu; from 2 rows gemm.cu"), (False, "from 1 rows GEMV, quantized")],
)
def test_the_doctor_explains(is_hopper: bool, first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "is_hopper", lambda device: is_hopper)
    (name, text), (last, reasons) = explain({"down": (4096, 12288, "")}, FP8, BF16)
    assert name == "kernels of down" and text.startswith(first)
    assert last == "kernels not used" and "GEMV: for one row and weights in 16 bits" in reasons
    assert ("gemv.cu: for Hopper" in reasons) != is_hopper
