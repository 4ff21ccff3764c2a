"""Times the attention backends side by side on a GPU: `python benchmark/kernels/backends.py [CELL ...]`.

Needs the extras `fi` and `fa3`; what is missing is left out. One layer's attention is the median of graph replays over
K/V that together exceed the L2, without the plan of the step. Next to it is the host's time for the plan of a step, and
for one layer outside a graph (calls of fi and fa3 are never captured).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from attention import DECODE, DIM, KV_HEADS, MODELS, PREFILL, READ, Mix, Setting, forward_us, graph_us, plan_us

from minisgl.attention.selection import ATTENTION

CELLS: dict[str, Mix] = {name: PREFILL[name] for name in ("16x1024", "1x8192", "4x512@4096")}
CELLS |= {name: DECODE[name] for name in ("64x600", "256x600")}
NAMES = ("triton", "fi", "fa3")
WRONG = 6e-3  # relative error beyond that of bfloat16


def layer_us(s: Setting, name: str) -> float:
    if name == "triton":  # its plan belongs into the graph, as it resets the counters of the layers
        return forward_us(s, plan_us(s))
    prepared, times = s.prepare(), max(1, -(-24 // len(s.pages)))

    def step() -> None:
        for _ in range(times):
            for pages in s.pages:
                prepared.forward(s.q, pages)

    return graph_us(step) / (times * len(s.pages))


def host_us(call: Callable[[], Any], times: int = 20) -> float:
    call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(times):
        call()
    elapsed = time.perf_counter() - started
    torch.cuda.synchronize()
    return elapsed / times * 1e6


def rate(mix: Mix, num_heads: int, us: float) -> str:
    """Return the K/V bandwidth of a decode step, or the TFLOP/s inside the causal mask of a prefill."""
    if all(n == 1 for n, _ in mix):
        floor = sum(kv for _, kv in mix) * 2 * KV_HEADS * DIM * 2 / READ * 1e6
        return f"{100 * floor / us:3.0f} %"
    flops = sum(n * kv - n * (n - 1) // 2 for n, kv in mix) * 4 * DIM * num_heads
    return f"{flops / us / 1e6:3.0f} TFLOP/s"


def cell(backend: Any, own: Setting, name: str) -> str:
    s = replace(own, attention=backend)
    error = s.error()
    us = layer_us(s, name)
    prepared = s.prepare()
    plan, layer = host_us(s.prepare), host_us(lambda: prepared.forward(s.q, s.pages[0]))
    wrong = "" if error < WRONG else f" WRONG {error:.4f}"
    return f"{us:8.1f} {rate(s.mix, s.num_heads, us):12} host {plan:5.0f} + {layer:3.0f}{wrong}"


def main() -> None:
    print(f"{'Hq':>3} {'page':>4} {'cell':12}" + "".join(f"{n + ' us':>12}{'':31}" for n in NAMES), flush=True)
    backends: dict[tuple[str, int, int], Any] = {}
    for num_heads in MODELS.values():
        for cell_name in sys.argv[1:] or CELLS:
            for page in (64, 128):
                own = Setting.make(CELLS[cell_name], num_heads, page)
                texts = []
                for name in NAMES:
                    reason = ATTENTION.refusal(name, own.attention.spec)
                    key = (name, num_heads, page)
                    if reason is None and key not in backends:
                        spec, ops = own.attention.spec, own.attention.ops
                        backends[key] = ATTENTION.load(name)(spec, ops) if name != "triton" else own.attention
                    texts.append("-" if reason else cell(backends[key], own, name))
                print(f"{num_heads:3} {page:4} {cell_name:12}" + " | ".join(f"{t:41}" for t in texts), flush=True)
                del own
                torch.cuda.empty_cache()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
