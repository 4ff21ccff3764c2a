"""Time the Triton ops on a GPU, as nodes of a CUDA graph, against cuBLAS and the time that moving their bytes takes.

    PYTHONPATH=python python benchmark/kernels/ops.py [linear] [chain] [small] [sample]

Every cell is checked against float32 first. Inputs rotate beyond the L2. Bandwidth is given in percent of 4,550
GB/s, the most that reading weights reached on an H200. The first run compiles in several processes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace

import torch
from torch.nn import functional as F

from minisgl.kernels.triton import epilogue, linear, norm, ops, sample, top_k_top_p
from minisgl.kernels.triton.gemm import GemmConfig, gemm
from minisgl.ops import reference

BF16, GPU, VOCAB = torch.bfloat16, torch.device("cuda", 0), 151936
CEILING = 4.55e6  # bytes per us
MODELS = {"0.6B": (1024, 3072, 16), "8B": (4096, 12288, 32), "14B": (5120, 17408, 40)}  # H, I, Hq; Hk 8, D 128
FUSED = {"qkv", "gate_up", "lm_head"}  # after a norm
PROCESSES = 5


@dataclass
class Cell:
    """One thing to time: a table's row and column, and a call per input set."""

    row: str
    column: str
    calls: list[Callable[[], object]]
    bytes: float = 0.0
    error: Callable[[], float] | None = None


def time_us(calls: list[Callable[[], object]], nodes: int = 48, repeats: int = 7, load: float = 0.0) -> float:
    """Median microseconds per call, as nodes of one graph, after `load` seconds of the same."""
    calls = calls * max(1, nodes // len(calls))
    torch.cuda.synchronize()  # inputs are ready: the capture runs in another stream
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    end = time.perf_counter() + load
    while time.perf_counter() < end:
        graph.replay()
        torch.cuda.synchronize()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, stop in pairs:
        start.record()
        graph.replay()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairs) * 1e3 / len(calls)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def randn(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.empty(*shape, device=GPU, dtype=BF16).normal_(0, scale)


def linears(model: str) -> dict[str, tuple[int, int]]:
    """(N, K) of a model's projections."""
    hidden, size, heads = MODELS[model]
    qkv = (heads + 16) * 128
    return {
        "qkv": (qkv, hidden),
        "o": (hidden, heads * 128),
        "gate_up": (2 * size, hidden),
        "down": (hidden, size),
        "lm_head": (VOCAB, hidden),
    }


TILES = [(64, 128, 1, 3, 4), (64, 128, 1, 6, 4), (64, 128, 2, 6, 4), (64, 128, 4, 6, 4), (128, 128, 1, 3, 8)]


def projection(
    row: str,
    column: str,
    x: torch.Tensor,
    ws: list[torch.Tensor],
    op: Callable[..., torch.Tensor],
    want: Callable[[], torch.Tensor],
) -> Cell:
    """Return the cell of op(x, w) with each of the weights; `want` returns the exact result with the first."""
    calls = [partial(op, x, w) for w in ws]
    return Cell(row, column, calls, 2.0 * ws[0].numel(), lambda: relative(op(x, ws[0]), want()))


def after_norm(op: Callable[..., tuple[torch.Tensor, torch.Tensor]], r: torch.Tensor, norm_weight: torch.Tensor):
    """Return the projection of `op`, with a residual and a norm, as a function of x and w."""
    return lambda x, w: op(x, r.clone() if r.dtype is torch.float32 else r, norm_weight, 1e-6, w)[0]


def linear_cells(everything: bool) -> Iterator[Cell]:
    """Every projection of every model; `fused` is the op that the model calls, with norm and activation."""
    flat = randn(1 << 31, scale=0.03)
    for (model, name, n_out, n_in), rows in projection_shapes():
        size = n_out * n_in
        count = max(2, min(flat.numel() // size, 150_000_000 // size))
        ws = [flat[i * size : (i + 1) * size].view(n_out, n_in) for i in range(count)]
        x, row = randn(rows, n_in), f"{model} {name} x{rows}"
        exact = cache(lambda x=x, w=ws[0]: x.float() @ w.float().T)
        yield projection(row, "cublas", x, ws, F.linear, exact)
        if rows > 16:
            continue
        yield projection(row, "ours", x, ws, ops.linear, exact)
        gated = name == "gate_up"
        if name in FUSED:
            gate = "silu" if gated else ""
            op, ref = (partial(f, gate=gate) for f in (ops.add_norm_linear, reference.add_norm_linear))
            r, weight = randn(rows, n_in, scale=0.0), randn(n_in, scale=0.3)
            norm_exact = partial(after_norm(ref, r.float(), weight.float()), x.float(), ws[0].float())
            yield projection(row, "fused", x, ws, after_norm(op, r, weight), norm_exact)
        if everything:
            yield from other_configurations(row, rows, x, ws, gated, exact)


def projection_shapes() -> Iterator[tuple[tuple[str, str, int, int], int]]:
    for model in MODELS:
        for name, (n_out, n_in) in linears(model).items():
            for rows in (1, 2, 4, 8, 16, 32, 64):
                yield (model, name, n_out, n_in), rows


def other_configurations(
    row: str, rows: int, x: torch.Tensor, ws: list[torch.Tensor], gated: bool, exact: Callable[[], torch.Tensor]
) -> Iterator[Cell]:
    """The measurements behind the tables in `kernels/triton/linear.py`."""
    n_out, n_in = ws[0].shape
    if rows == 1:
        for bn in (2, 4):
            config = linear.GemvConfig(bn, 1024, 4)
            yield projection(row, f"bn{bn}", x, ws, lambda x, w, c=config: linear.gemv(x, w, None, config=c)[0], exact)
    for c in TILES if rows in (4, 16, 64) else ():
        config = GemmConfig(max(16, rows), *c)
        if n_in % (config.block_k * config.split_k) or (config.split_k > 1 and n_out > 100_000):
            continue

        def call(x: torch.Tensor, w: torch.Tensor, gate: str = "", config: GemmConfig = config) -> torch.Tensor:
            return gemm(x, len(x), 1, w, None, x.dtype, gate, config)

        yield projection(row, f"tile {c}", x, ws, call, exact)
        if gated and config.split_k == 1:
            gated_op = partial(call, gate="silu")
            yield projection(row, f"gated {c}", x, ws, gated_op, lambda: reference.gate_and_mul(exact(), "silu"))


def patched(run: Callable[[], None], module: object, name: str, value: object) -> Callable[[], None]:
    def call() -> None:
        old = getattr(module, name)
        setattr(module, name, value)
        run()
        setattr(module, name, old)

    return call


def only_for(n_out: int, n_in: int, bn: int) -> Callable[[int, int], linear.GemvConfig]:
    """`gemv_config`, but with tiles of `bn` outputs for one shape."""
    usual = linear.gemv_config
    return lambda a, b: linear.GemvConfig(bn, 1024, 4) if (a, b) == (n_out, n_in) else usual(a, b)


def chain_cells(everything: bool) -> Iterator[Cell]:
    """Yield chains of all projections of 8 layers with one row, in order: with PDL they overlap."""
    flat = randn(1 << 31, scale=0.03)
    for model, (hidden, _, heads) in MODELS.items():
        shapes = linears(model)
        weights, start = [], 0
        layers = min(8, flat.numel() // sum(n * k for name, (n, k) in shapes.items() if name != "lm_head"))
        for _ in range(layers):
            layer = {}
            for name in ("qkv", "o", "gate_up", "down"):
                n_out, n_in = shapes[name]
                layer[name] = flat[start : start + n_out * n_in].view(n_out, n_in)
                start += n_out * n_in
            weights.append(layer)
        x0, r0, weight, attended = randn(1, hidden), randn(1, hidden), randn(hidden, scale=0.3), randn(1, heads * 128)

        def run(w=weights, x0=x0, r0=r0, weight=weight, attended=attended, table=ops) -> None:
            x, r = x0, r0
            for layer in w:
                _, r = table.add_norm_linear(x, r, weight, 1e-6, layer["qkv"])
                x = table.linear(attended, layer["o"])
                x, r = table.add_norm_linear(x, r, weight, 1e-6, layer["gate_up"], gate="silu")
                x = table.linear(x, layer["down"])

        moved = 2.0 * start
        yield Cell(f"{model} chain of {layers} layers x1", "ours", [run], moved)
        if not everything:
            continue

        title = f"{model} chain of {layers} layers x1"
        yield Cell(title, "norms fused", [patched(run, ops, "MAX_FUSED_INPUTS", 1 << 30)], moved)
        yield Cell(title, "norms apart", [patched(run, ops, "MAX_FUSED_INPUTS", 0)], moved)
        yield Cell(title, "gemv without PDL", [patched(run, linear, "pdl_options", lambda *_: {"PDL": False})], moved)
        for name in ("qkv", "o", "gate_up", "down"):
            n_out, n_in = shapes[name]
            for bn in (1, 2, 4):
                config = only_for(n_out // 2 if name == "gate_up" else n_out, n_in, bn)
                yield Cell(title, f"{name} bn{bn}", [patched(run, linear, "gemv_config", config)], moved)


def small_cells(everything: bool) -> Iterator[Cell]:
    for tokens in (1, 64, 256, 8192, 16384):
        sets = max(1, min(16, 16384 // tokens))
        for model, (hidden, size, heads) in MODELS.items():
            if model == "14B":
                continue
            if tokens >= 64:
                xs, rs, w = randn(sets, tokens, hidden), randn(sets, tokens, hidden), randn(hidden)
                calls = [lambda i=i, xs=xs, rs=rs, w=w: norm.add_rms_norm(xs[i], rs[i], w, 1e-6) for i in range(sets)]
                yield Cell(f"{model} add_rms_norm x{tokens}", "ours", calls, 8 * xs[0].numel())
                gs = randn(min(sets, 4), tokens, 2 * size)
                calls = [lambda i=i, gs=gs: epilogue.gate_and_mul(gs[i], "silu") for i in range(len(gs))]
                yield Cell(f"{model} gate_and_mul x{tokens}", "ours", calls, 3 * gs[0].numel())
            width = (heads + 16) * 128
            qkv, w = randn(min(sets, 4), tokens, width), randn(128)
            pages = torch.zeros(tokens // 64 * 2 + 4, 2, 8, 64, 128, device=GPU, dtype=BF16)
            loc = torch.randperm(len(pages) * 64, device=GPU)[:tokens]
            if tokens > 256:  # a prompt's slots are neighbours
                loc = torch.arange(tokens, device=GPU)
            positions = torch.arange(tokens, device=GPU, dtype=torch.int32)
            table = torch.rand(16384, 128, device=GPU)
            args = reference.HeadTransform(w, w, 1e-6, table), positions, pages, loc
            calls = [lambda i=i, args=args, qkv=qkv: norm.norm_rope_store(qkv[i], *args) for i in range(len(qkv))]
            moved = tokens * (2 * 2 * width + 512)
            yield Cell(f"{model} norm_rope_store x{tokens}", "ours", calls, moved)


def sample_cells(everything: bool) -> Iterator[Cell]:
    for count in (1, 64, 256):
        sets = {1: 32, 64: 6, 256: 3}[count]
        flat = [randn(count, VOCAB, scale=2.5) for _ in range(sets)]
        peaked = [x.clone().scatter_(1, torch.randint(0, VOCAB, (count, 1), device=GPU), 25.0) for x in flat]
        rows, positions = torch.arange(count, device=GPU), torch.arange(count, device=GPU, dtype=torch.int32)

        def cell(
            title: str, column: str, logits: list[torch.Tensor], t: float, k=0, p=1.0, m=0.0,
            count=count, rows=rows, positions=positions, **patch: object,
        ) -> Cell:  # fmt: skip
            state = SimpleNamespace(
                last_token=torch.zeros(count, dtype=torch.int32, device=GPU),
                temperature=torch.full((count,), t, device=GPU),
                top_k=torch.full((count,), k, dtype=torch.int32, device=GPU),
                top_p=torch.full((count,), p, device=GPU),
                min_p=torch.full((count,), m, device=GPU),
                noise_key=torch.arange(count, device=GPU) * 7919,
            )

            def call(x: torch.Tensor) -> torch.Tensor:
                old = {}
                for name, value in patch.items():
                    module, attribute = name.split("__")
                    module = {"sample": sample, "top_k_top_p": top_k_top_p}[module]
                    old[module, attribute] = getattr(module, attribute)
                    setattr(module, attribute, value)
                out = sample.sample_rows(x, rows, positions, state, k > 0 or p < 1 or m > 0)
                for (module, attribute), value in old.items():
                    setattr(module, attribute, value)
                return out

            def error() -> float:
                exact = reference_sample(logits[0], rows, positions, state, k > 0 or p < 1 or m > 0)
                return (call(logits[0])[0] != exact[0]).float().mean().item()

            calls = [lambda x=x: call(x) for x in logits]
            return Cell(
                f"sample {title} x{count}", column, calls, 2.0 * count * VOCAB, error if column == "ours" else None
            )

        variants: dict[str, dict[str, object]] = {"ours": {}}
        if everything:
            variants |= {
                f"b{b}p{p}": {"sample__BLOCK": b, "sample__PROGRAMS": p}
                for b, p in ((256, 4096), (256, 16384), (512, 2816), (512, 4096), (512, 8192))
            }
        for column, patch in variants.items():
            yield cell("greedy, noise", column, flat, 0.0, **patch)
            yield cell("T=0.6, noise", column, flat, 0.6, **patch)
            yield cell("T=0.6, peaked", column, peaked, 0.6, **patch)
        variants = {"ours": {}}
        if everything:
            variants |= {
                f"b{b}w{w}r{r}": {"top_k_top_p__BLOCK": b, "top_k_top_p__NUM_WARPS": w, "top_k_top_p__MAX_REGISTERS": r}
                for b, w, r in ((4096, 16, 128), (2048, 16, 64), (2048, 8, 128), (8192, 32, 64))
            }
        for column, patch in variants.items():
            yield cell("k=50 p=0.95, noise", column, flat, 0.6, 50, 0.95, **patch)
            yield cell("k=50 p=0.95, peaked", column, peaked, 0.6, 50, 0.95, **patch)
            yield cell("p=0.9, peaked", column, peaked, 0.6, 0, 0.9, **patch)
            yield cell("p=0.9 T=1, noise (slow path)", column, flat, 1.0, 0, 0.9, **patch)
            yield cell("min_p=0.05, noise", column, flat, 0.6, 0, 1.0, 0.05, **patch)


def reference_sample(*args: object) -> torch.Tensor:
    from minisgl.ops.sampling import sample_rows

    return sample_rows(*args)


SECTIONS = {
    "linear": linear_cells,
    "chain": chain_cells,
    "small": small_cells,
    "sample": sample_cells,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help=", ".join(SECTIONS))
    parser.add_argument("--all", action="store_true", help="try the other configurations too")
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further cell starts")
    args = parser.parse_args()
    names = args.sections or list(SECTIONS)
    started = time.time()
    if args.share is None:
        compiled = names or ["small"]
        command = [sys.executable, __file__, *compiled, *(["--all"] if args.all else []), "--share"]
        workers = [subprocess.Popen([*command, str(i)]) for i in range(PROCESSES)]
        print("compiled:", [w.wait() for w in workers], f"{time.time() - started:.0f} s", flush=True)
    torch.manual_seed(0)
    for name in names:
        table: dict[str, dict[str, float]] = {}
        facts: dict[str, tuple[float, float]] = {}
        for i, cell in enumerate(SECTIONS[name](args.all)):
            if args.share is not None and args.share >= 0:
                if i % PROCESSES == args.share:
                    cell.calls[0]()
                continue
            if time.time() - started > args.limit:
                break
            error = cell.error() if cell.error is not None else 0.0
            if not error < 0.02:
                print("WRONG", cell.row, cell.column, error, flush=True)
            table.setdefault(cell.row, {})[cell.column] = time_us(cell.calls, 48 if cell.bytes < 1e8 else 8)
            if cell.column in ("ours", "fused", "cublas"):
                facts[cell.row] = cell.bytes, max(error, facts.get(cell.row, (0.0, 0.0))[1])
        for row, columns in table.items():
            moved, error = facts.get(row, (0.0, 0.0))
            first = {c: columns.pop(c) for c in ("cublas", "ours", "fused") if c in columns}
            others = sorted(columns.items(), key=lambda c: c[1])[: 12 if name == "chain" else 6]
            best = min(v for c, v in first.items() if c != "cublas" or len(first) == 1)
            text = " ".join(f"{c} {v:.2f}" for c, v in first.items())
            tried = " ".join(f"{c.replace(' ', '')}={v:.2f}" for c, v in others)
            floor = moved / CEILING
            print(f"{row:34} floor {floor:7.2f} | {text} | {floor / best:4.0%} err {error:.4f} | {tried}")
        print(f"-- {name}: {time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
