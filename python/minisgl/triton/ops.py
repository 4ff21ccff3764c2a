"""The op table for NVIDIA GPUs: which kernel runs for how many rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import Tensor

from minisgl.ops.quantized import Quantized
from minisgl.triton.cublas import cublas_linear
from minisgl.triton.drafts import look_up
from minisgl.triton.epilogue import gate_and_mul
from minisgl.triton.gemm import gemm
from minisgl.triton.linear import Norm, gemm_config, gemv
from minisgl.triton.logprobs import token_logprobs
from minisgl.triton.moe import moe
from minisgl.triton.norm import add_rms_norm, embedding, norm_rope_store, rms_norm
from minisgl.triton.penalties import apply_penalties, count_tokens
from minisgl.triton.quantized import quantized_linear
from minisgl.triton.rounding import rounded
from minisgl.triton.sample import candidates, sample_rows

MAX_FUSED_INPUTS: Final = 2048


def linear(x: Tensor, weight: Tensor | Quantized, bias: Tensor | None = None, gate: str = "") -> Tensor:
    """`reference.linear`, by one of our kernels for few rows, else by cuBLAS."""
    if isinstance(weight, Quantized):
        return quantized_linear(x, weight, bias, gate)[0]
    rows = len(x)
    x = x.contiguous()
    if rows == 1:
        return gemv(x, weight, bias, gate=gate)[0]
    n_rows, n_in = weight.shape
    config = gemm_config(rows, n_rows, n_in, x.dtype, gate)
    if config is not None:
        return gemm(x, rows, 1, weight, bias, x.dtype, gate, config)
    return gate_and_mul(linear(x, weight, bias), gate) if gate else cublas_linear(x, weight, bias)


def _is_fused(x: Tensor) -> bool:
    """Whether norm and projection are one kernel, as for one row and a small K.

    With a larger K, loading the residual and the norm's weight in every program costs more than a separate kernel,
    which takes 1.5 to 1.9 us. With / without the norm, N x K: 151936 x 1024 70.8 / 69.6; 6144 x 4096 15.9 / 13.1 (11.9
    in tiles of 2); 24576 x 4096 51.8 / 45.3; 34816 x 5120 97.7 / 79.2; 151936 x 5120 388 / 334.
    """
    return len(x) == 1 and x.shape[1] <= MAX_FUSED_INPUTS


def add_norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor | Quantized,
    bias: Tensor | None = None,
    gate: str = "",
) -> tuple[Tensor, Tensor]:
    """`reference.add_norm_linear`; overwrites `residual` unless one kernel does it all."""
    if isinstance(weight, Quantized):
        return quantized_linear(x, weight, bias, gate, Norm(residual, norm_weight, eps))
    if _is_fused(x):
        return gemv(x, weight, bias, residual=residual, norm_weight=norm_weight, eps=eps, gate=gate)
    if residual is None:
        return linear(rms_norm(x, norm_weight, eps), weight, bias, gate), x
    normed, total = add_rms_norm(x, residual, norm_weight, eps)
    return linear(normed, weight, bias, gate), total


OPS: Final[Mapping[str, Callable[..., Any]]] = {
    "embedding": embedding,
    "linear": linear,
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "add_norm_linear": add_norm_linear,
    "moe": moe,
    "norm_rope_store": norm_rope_store,
    "look_up": look_up,
    "apply_penalties": apply_penalties,
    "count_tokens": count_tokens,
    "sample_rows": sample_rows,
    "candidates": candidates,
    "token_logprobs": token_logprobs,
    "rounded": rounded,
}
