"""The op table for NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import Tensor

from minisgl.kernels.triton.adapters import add_adapters
from minisgl.kernels.triton.attention_latent import store_latents
from minisgl.kernels.triton.drafts import look_up
from minisgl.kernels.triton.gated_delta import fold, gated_delta
from minisgl.kernels.triton.kernels import mix, multiply
from minisgl.kernels.triton.logprobs import token_logprobs
from minisgl.kernels.triton.norm import add_rms_norm, embedding, norm_rope_store, rms_norm
from minisgl.kernels.triton.penalties import apply_penalties, count_tokens
from minisgl.kernels.triton.product import Norm
from minisgl.kernels.triton.rounding import rounded
from minisgl.kernels.triton.sample import candidates, sample_rows
from minisgl.ops.deferred import Result
from minisgl.ops.quantized import Quantized


def linear(x: Result, weight: Tensor | Quantized, bias: Tensor | None = None, gate: str = "") -> Result:
    """`reference.linear`, by the kernel that `kernels.KERNELS` has for it."""
    return multiply(x, weight, bias, gate)[0]


def add_norm_linear(
    x: Result,
    residual: Result | None,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor | Quantized,
    bias: Tensor | None = None,
    gate: str = "",
) -> tuple[Result, Result]:
    """`reference.add_norm_linear`; overwrites `residual` unless one kernel does it all."""
    return multiply(x, weight, bias, gate, Norm(residual, norm_weight, eps))


OPS: Final[Mapping[str, Callable[..., Any]]] = {
    "embedding": embedding,
    "linear": linear,
    "rms_norm": rms_norm,
    "add_rms_norm": add_rms_norm,
    "add_norm_linear": add_norm_linear,
    "add_adapters": add_adapters,
    "moe": mix,
    "norm_rope_store": norm_rope_store,
    "store_latents": store_latents,
    "gated_delta": gated_delta,
    "fold": fold,
    "look_up": look_up,
    "apply_penalties": apply_penalties,
    "count_tokens": count_tokens,
    "sample_rows": sample_rows,
    "candidates": candidates,
    "token_logprobs": token_logprobs,
    "rounded": rounded,
}
