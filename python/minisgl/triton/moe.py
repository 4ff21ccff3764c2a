"""Mixture of experts: which kernels for how many tokens."""

from __future__ import annotations

from torch import Tensor, empty_like

from minisgl.triton.moe_gemm import combine, grouped, moe_config
from minisgl.triton.moe_gemv import pair_down, pair_gate_up
from minisgl.triton.moe_route import route, route_and_list

# A product for each pair while pairs are at most this part of the experts, so that few are chosen twice. Against sorted
# lists at 1, 2, 4 tokens: Qwen3-30B-A3B 22, 39, 72 / 29, 45, 75 us; Mixtral 8x7B 162, 316, 621 / 171, 287, 455.
PAIRS_OF_EXPERTS = 4


def moe(x: Tensor, router_logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, normalise: bool) -> Tensor:
    """As `reference.moe`; of equally probable experts the lowest is chosen.

    A captured step may hold it: nothing is read by the host. A row's bits do not depend on the other rows, only (by the
    choice of kernels) on their number.
    """
    if not len(x):
        return empty_like(x)
    x, router_logits = x.contiguous(), router_logits.contiguous()
    pairs, num_experts = len(x) * top_k, len(gate_up)
    if pairs * PAIRS_OF_EXPERTS <= num_experts:
        experts, weights = route(router_logits, top_k, normalise)
        return pair_down(pair_gate_up(x, experts, gate_up), experts, weights, down)
    config = moe_config(pairs, num_experts, x.dtype)
    weights, lists = route_and_list(router_logits, top_k, normalise, config.rows)
    hidden = grouped(x, gate_up, lists, top_k, config.up, swap=config.swap, is_gated=True)
    parts = grouped(hidden, down, lists, top_k, config.down, swap=config.swap, is_gated=False)
    return combine(parts, weights)
