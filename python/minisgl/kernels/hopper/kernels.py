"""What this room offers: linear layers for the table of kernels, the experts of a token, attention over 8-bit pages."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from minisgl.kernels.hopper import experts as grouped
from minisgl.kernels.hopper import gemm, gemv
from minisgl.kernels.hopper.attention import cuda_decode, cuda_prefill, supports
from minisgl.kernels.hopper.nvrtc import libraries
from minisgl.kernels.triton import moe, quantized
from minisgl.kernels.triton.moe_routing import route
from minisgl.kernels.triton.product import Kernel, Mixture, Norm
from minisgl.ops.deferred import Result
from minisgl.ops.quantized import Quantized
from minisgl.ops.reference import Experts

__all__ = ["MIXTURES", "PRODUCTS", "cuda_decode", "cuda_prefill", "is_usable", "supports"]


def is_usable() -> bool:
    """Whether the libraries that compile and launch these kernels are there."""
    return libraries() is not None


def _gemm(x: Result, weight: Quantized, bias: Tensor | None, gate: str, norm: Norm | None) -> tuple[Result, Result]:
    """Quantize the rows, and multiply by our kernel, or by Triton's if ours cannot be compiled."""
    split, parts = quantized.quantized_rows(x, weight, norm)
    out = gemm.cuda_gemm(split, len(x), parts, weight, bias, x.dtype, gate)
    if out is None:
        out = quantized.multiply_rows(split, parts, x, weight, bias, gate)
    return out, quantized.total(x, norm)


def _experts(x: Tensor, router_logits: Tensor, experts: Experts) -> Tensor:
    """Run a token's experts by our kernel, or by Triton's if ours cannot be compiled."""
    chosen, weights = route(router_logits, experts.top_k, experts.normalise, experts.scale)
    out = gemv.cuda_experts(x, chosen, weights, experts)
    return moe.run_pairs(x, chosen, weights, experts) if out is None else out


def _refuses(mixture: Mixture) -> str | None:
    return moe.refuses_pairs(mixture) or gemv.refuses_mixture(mixture)


def _mixture(x: Tensor, router_logits: Tensor, experts: Experts) -> Tensor:
    """Run experts by our grouped GEMMs, or by Triton's if ours cannot be compiled."""
    out = grouped.cuda_mixture(x, router_logits, experts)
    return moe.by_groups(x, router_logits, experts) if out is None else out


def _refuses_groups(mixture: Mixture) -> str | None:
    return grouped.refuses(mixture) or (None if moe.refuses_pairs(mixture) else "GEMVs of few pairs are faster")


PRODUCTS: Final = (Kernel("gemv.cu", gemv.refuses, gemv.cuda_gemv), Kernel("gemm.cu", gemm.refuses, _gemm))
MIXTURES: Final = (
    Kernel("gemv.cu of pairs", _refuses, _experts),
    Kernel("experts.cu", _refuses_groups, _mixture),
)
