"""The table of ops that layers and engine call. It is resolved once per device, and passed to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from torch import Tensor

from minisgl.core.registry import Registry
from minisgl.ops import adapters, reference, sampling
from minisgl.ops import gated_delta as recurrences
from minisgl.ops.deferred import Result
from minisgl.ops.quantized import Rounding, rounded


@dataclass(frozen=True, slots=True)
class OpTable:
    """All ops by name.

    `reference`, `adapters`, `gated_delta`, `sampling` and `quantized` have their shapes and formulas, and are the
    defaults.
    """

    name: str = "reference"
    embedding: Callable[[Tensor, Tensor], Tensor] = reference.embedding
    linear: Callable[..., Result] = reference.linear
    rms_norm: Callable[..., Tensor] = reference.rms_norm
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] = reference.add_rms_norm
    add_norm_linear: Callable[..., tuple[Result, Result]] = reference.add_norm_linear
    add_adapters: Callable[..., Tensor] = adapters.add_adapters
    moe: Callable[[Tensor, Tensor, reference.Experts], Tensor] = reference.moe
    norm_rope_store: Callable[..., Tensor] = reference.norm_rope_store
    paged_attention: Callable[..., Tensor] = reference.paged_attention
    gated_delta: Callable[..., Tensor] = recurrences.gated_delta
    fold: Callable[..., None] = recurrences.fold
    store_latents: Callable[..., None] = reference.store_latents
    latent_attention: Callable[..., Tensor] = reference.latent_attention
    look_up: Callable[..., tuple[Tensor, Tensor]] = reference.look_up
    apply_penalties: Callable[..., Tensor] = sampling.apply_penalties
    count_tokens: Callable[..., None] = sampling.count_tokens
    sample_rows: Callable[..., Tensor] = sampling.sample_rows
    candidates: Callable[..., Tensor] = sampling.candidates
    token_logprobs: Callable[[Tensor, Tensor, Tensor], Tensor] = sampling.token_logprobs
    rounded: Rounding = rounded


def _on(device_type: str) -> Callable[[str], str | None]:
    def refusal(wanted: str) -> str | None:
        return None if wanted == device_type else f"for {device_type}, not {wanted}"

    return refusal


# Each alternative is a mapping from names of `OpTable` to its own ops.
OPS: Final[Registry[Mapping[str, Callable[..., Any]]]] = Registry("op table")
OPS.add("triton", "minisgl.kernels.triton.ops:OPS", supports=_on("cuda"))
OPS.add("cpu", "minisgl.ops.cpu:OPS", supports=_on("cpu"))
OPS.add("reference", "minisgl.ops.reference:OPS")


def load_ops(name: str) -> OpTable:
    """Return the table `name`. Ops that it does not have are the reference's."""
    return OpTable(name=name, **OPS.load(name))


def resolve_ops(device_type: str) -> OpTable:
    """Return the best table for a type of device ("cpu", "cuda")."""
    return load_ops(OPS.choose("auto", device_type))
