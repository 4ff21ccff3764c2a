"""The kernels of linear layers and experts in tables: which one runs for which product, and why not another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import groupby
from typing import Final

from torch import Tensor, empty_like

from minisgl.kernels.triton import moe, quantized
from minisgl.kernels.triton.cublas import cublas_linear
from minisgl.kernels.triton.epilogue import gate_and_mul
from minisgl.kernels.triton.gemm import gemm
from minisgl.kernels.triton.launch import hopper
from minisgl.kernels.triton.linear import gemm_config, gemv, normalised
from minisgl.kernels.triton.product import Kernel, Mixture, Norm, Product
from minisgl.kernels.triton.quantized_gemv import quantized_gemv
from minisgl.ops.deferred import Deferred, Result, finished
from minisgl.ops.quantized import Quantized
from minisgl.ops.reference import Experts

# With more inputs, loading the residual and the norm's weight in every program costs more than a separate kernel, which
# takes 1.5 to 1.9 us. With / without the norm, N x K: 151936 x 1024 70.8 / 69.6; 6144 x 4096 15.9 / 13.1 (11.9 in tiles
# of 2); 24576 x 4096 51.8 / 45.3; 34816 x 5120 97.7 / 79.2; 151936 x 5120 388 / 334.
MAX_FUSED_INPUTS: Final = 2048

EXPLAINED_ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 8192)

Facts = Iterator[tuple[str, str]]


def _gemv(x: Tensor, weight: Tensor, bias: Tensor | None, gate: str, norm: Norm | None) -> tuple[Tensor, Tensor]:
    if norm is not None and x.shape[1] <= MAX_FUSED_INPUTS:
        return gemv(x, weight, bias, residual=finished(norm.residual), norm_weight=norm.weight, eps=norm.eps, gate=gate)
    normed, total = normalised(x, norm)
    return gemv(normed, weight, bias, gate=gate)[0], total


def _gemm(x: Tensor, weight: Tensor, bias: Tensor | None, gate: str, norm: Norm | None) -> tuple[Tensor, Tensor]:
    n_rows, n_in = weight.shape
    config = gemm_config(len(x), n_rows, n_in, x.dtype, gate)
    assert config is not None, "the GEMM kernel does not support this product"
    normed, total = normalised(x, norm)
    return gemm(normed, len(x), 1, weight, bias, x.dtype, gate, config), total


def _cublas(x: Tensor, weight: Tensor, bias: Tensor | None, gate: str, norm: Norm | None) -> tuple[Tensor, Tensor]:
    normed, total = normalised(x, norm)
    if gate:  # our kernel may be faster without it
        return gate_and_mul(finished(multiply(normed, weight, bias)[0]), gate), total
    return cublas_linear(normed, weight, bias), total


def _unless(is_supported: Callable[[Product], object], reason: str) -> Callable[[Product], str | None]:
    return lambda product: None if is_supported(product) else reason


def _refuses_tiles(p: Product) -> str | None:
    if p.kind is not None:
        return "for weights in 16 bits"
    config = gemm_config(p.rows, p.n_rows, p.n_in, p.dtype, p.gate)
    return "no tile is faster than cuBLAS" if config is None else None


def _refuses_rows(p: Product) -> str | None:
    return "for quantized weights" if p.kind is None else quantized.refuses_rows(p)


# In order of preference, after those of `hopper`.
PRODUCTS: Final = (
    Kernel(
        "GEMV, quantized",
        _unless(lambda p: p.rows == 1 and p.kind, "for one row and quantized weights"),
        quantized_gemv,
    ),
    Kernel("GEMV", _unless(lambda p: p.rows == 1 and not p.kind, "for one row and weights in 16 bits"), _gemv),
    Kernel("GEMM, quantized", _refuses_rows, quantized.by_tensor_cores),
    Kernel("cuBLAS in FP8", _unless(lambda p: p.kind and p.kind.bits == 8, "for 8 bits"), quantized.by_cublas_in_fp8),
    Kernel("cuBLAS, dequantized", _unless(lambda p: p.kind, "for quantized weights"), quantized.by_cublas_widened),
    Kernel("GEMM", _refuses_tiles, _gemm),
    Kernel("cuBLAS", _unless(lambda p: not p.kind, "for weights in 16 bits"), _cublas),
)


MIXTURES: Final = (
    Kernel("GEMVs of pairs", moe.refuses_pairs, moe.by_pairs),
    Kernel("grouped GEMMs", lambda mixture: None, moe.by_groups),
)


def table(of: type[Product | Mixture]) -> tuple[Kernel, ...]:
    """Return the kernels of this machine for products or for mixtures, in order of preference."""
    room, own = hopper(), PRODUCTS if of is Product else MIXTURES
    return own if room is None else (*(room.PRODUCTS if of is Product else room.MIXTURES), *own)


@lru_cache(maxsize=4096)
def choose(work: Product | Mixture) -> Kernel:
    """Return the kernel for a product or a mixture: the first that does not refuse it."""
    return next(kernel for kernel in table(type(work)) if kernel.refuses(work) is None)


def multiply(
    x: Result, weight: Tensor | Quantized, bias: Tensor | None = None, gate: str = "", norm: Norm | None = None
) -> tuple[Result, Result]:
    """Run the kernel for a product; see `Run`."""
    x = x if isinstance(x, Deferred) and isinstance(weight, Quantized) else finished(x).contiguous()
    return choose(Product.of(x, weight, gate, norm)).run(x, weight, bias, gate, norm)


def mix(x: Tensor, router_logits: Tensor, experts: Experts) -> Tensor:
    """`reference.moe`, with the lowest of equally probable experts chosen.

    The host reads nothing, so a CUDA graph can capture it. A row's bits depend only on the number of rows, which
    selects the kernels, not on the other rows.
    """
    if not len(x):
        return empty_like(x)
    out: Tensor = choose(Mixture.of(x, experts)).run(x.contiguous(), router_logits.contiguous(), experts)
    return out


def explain(work: Mapping[str, Product | Mixture]) -> Facts:
    """Yield a line for each product or mixture, of any number of rows: the kernels by rows of x, on this machine.

    The last line has what never runs, and why.
    """
    every = [[one._replace(rows=rows) for rows in EXPLAINED_ROWS] for one in work.values()]
    for name, each in zip(work, every, strict=True):
        runs = groupby(each, lambda one: choose(one).name)
        yield f"kernels of {name}", "; ".join(f"from {next(run).rows} rows {kernel}" for kernel, run in runs)
    reasons = {} if hopper() is not None else {"gemv.cu and gemm.cu": "for Hopper, with NVRTC"}
    for of in dict.fromkeys(map(type, work.values())):
        asked = [one for each in every for one in each if type(one) is of]
        for kernel in table(of):
            if all(choose(one) is not kernel for one in asked):
                reasons[kernel.name] = " or ".join(dict.fromkeys(filter(None, map(kernel.refuses, asked))))
    yield "kernels not used", "; ".join(f"{name}: {found or 'others are faster'}" for name, found in reasons.items())
