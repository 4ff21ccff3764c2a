"""The table of kernels: each product has one, and the reference agrees with it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from minisgl.kernels.hopper import kernels as hopper_kernels
from minisgl.kernels.triton import kernels
from minisgl.kernels.triton.kernels import PRODUCTS, choose, explain
from minisgl.kernels.triton.product import Mixture, Product
from minisgl.ops import reference
from minisgl.ops.deferred import finished
from minisgl.ops.quantized import E8M0, Format

BF16 = torch.bfloat16
FP8, INT8, INT4 = Format(8, 0), Format(8, 0, is_integer=True), Format(4, 128, scale_dtype=BF16)
KINDS = (None, FP8, Format(8, 128), INT8, INT4, Format(4, 32, scale_dtype=E8M0))
SHAPES = ((4096, 4096), (24576, 4096), (4096, 12288), (151936, 1024), (130, 200))


@pytest.fixture(params=[False, True], ids=["no Hopper", "Hopper"])
def on_hopper(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether the kernels in CUDA C++ are in the table."""
    monkeypatch.setattr(kernels, "hopper", lambda: hopper_kernels if request.param else None)
    choose.cache_clear()
    yield request.param
    choose.cache_clear()


def test_every_product_has_a_kernel(on_hopper: bool) -> None:
    used, table = set(), kernels.table(Product)
    for kind, (n_rows, n_in), rows, gate in product(KINDS, SHAPES, (1, 2, 16, 33, 64, 129, 257, 4096), ("", "silu")):
        call = Product(rows, n_rows, n_in, kind, BF16, gate)
        kernel = choose(call)
        assert kernel.refuses(call) is None
        assert all(isinstance(other.refuses(call), str) for other in table[: table.index(kernel)])
        assert (kind is None) == (kernel.name in ("GEMV", "GEMM", "cuBLAS"))
        used.add(kernel.name)
    assert used == {kernel.name for kernel in table}
    assert ("gemv.cu" in used) == on_hopper


@pytest.mark.parametrize("name", [kernel.name for kernel in PRODUCTS])
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
        assert float((finished(got).float() - want.float()).norm() / want.float().norm()) < (
            0.05 if kind is FP8 else 0.02
        )
        assert total is x
        return
    pytest.skip("its products are too large for the interpreter")


def test_the_doctor_explains(on_hopper: bool) -> None:
    (name, text), (last, reasons) = explain({"down": Product(1, 4096, 12288, FP8, BF16)})
    assert name == "kernels of down" and last == "kernels not used"
    assert text.startswith("from 1 rows gemv.cu; from 2 rows gemm.cu" if on_hopper else "from 1 rows GEMV, quantized")
    assert "GEMV: for one row and weights in 16 bits" in reasons
    assert ("gemv.cu and gemm.cu: for Hopper" in reasons) != on_hopper


@pytest.mark.parametrize(
    ("kind", "top_k", "experts", "hidden", "size"),
    [(None, 8, 128, 2048, 768), (FP8, 8, 128, 2048, 768), (INT4, 2, 8, 4096, 14336), (Format(8, 128), 2, 8, 64, 2048)],
    ids=str,
)
def test_every_mixture_has_a_kernel(kind: Format | None, top_k: int, experts: int, hidden: int, size: int) -> None:
    """And the doctor says which. `test_moe.py` and the contract of ops run them."""
    mixture = Mixture(1, top_k, experts, hidden, size, (kind, kind), BF16)
    (_, text), (_, reasons) = explain({"experts": mixture})
    few = "grouped GEMMs" if size == 2048 else "GEMVs of pairs"
    assert text.startswith(f"from 1 rows {few}") and "grouped GEMMs" in text
    assert "gemv.cu and gemm.cu: for Hopper" in reasons


def test_nothing_needs_the_room_of_hopper() -> None:
    """As if it were not installed: its folder is not found, and nothing has imported it."""
    code = (
        "import sys; sys.modules['minisgl.kernels.hopper'] = None\n"
        "import minisgl.kernels.triton.ops, minisgl.attention.triton, minisgl.engine.graphs.runners\n"
        "from minisgl.kernels.triton.launch import hopper; assert hopper() is None\n"
        "assert not [name for name in sys.modules if name.startswith('minisgl.kernels.hopper.')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
