"""Checks and times the Triton attention kernels on a GPU: `python benchmark/kernels/attention.py [PART ...]`.

Parts: decode, fused, prefill, latent (multi-head latent attention); all without arguments. FP8 stands for pages of 8
bits.
Every figure is the median of graph replays, per layer, over K/V that together exceed the L2, after a comparison with
the reference. Decode is given in us and in percent of the time that reading the K/V at 4.55 TB/s takes; prefill in
TFLOP/s of the multiplications inside the causal mask.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from minisgl.attention import triton as backend
from minisgl.attention.backend import MixerSpec, StepAttention
from minisgl.attention.latent_triton import Tile, TritonLatents
from minisgl.attention.triton import TritonAttention
from minisgl.core.layout import SEQUENCE
from minisgl.core.plan import SeqLayout, StepShape
from minisgl.core.specs import GroupedQuery, Latent
from minisgl.engine.batch import step_shape
from minisgl.kernels.triton.linear import gemv
from minisgl.ops import reference
from minisgl.ops.quantized import Pages, QuantizedPages, round_fp8
from minisgl.ops.reference import HeadTransform
from minisgl.ops.table import load_ops

READ = 4.55e12  # bytes per second
KV_HEADS, DIM, PAGE = 8, 128, 64
MODELS = {"0.6B": 16, "8B": 32}  # query heads
CASES = [(f"{model}{' FP8' * is_fp8}", n, is_fp8) for model, n in MODELS.items() for is_fp8 in (False, True)]
DTYPE = torch.bfloat16
Mix = list[tuple[int, int]]


def skewed() -> Mix:
    """256 lengths between 64 and 8192, most of them short, about 1,090 on average."""
    rng = np.random.default_rng(1)
    return [(1, int(n)) for n in np.clip(rng.lognormal(6.4, 1.1, 256), 64, 8192)]


DECODE: dict[str, Mix] = {
    "1x256": [(1, 256)],
    "1x1024": [(1, 1024)],
    "1x8192": [(1, 8192)],
    "8x1024": [(1, 1024)] * 8,
    "64x600": [(1, 500 + 200 * i // 63) for i in range(64)],
    "256x600": [(1, 500 + 200 * i // 255) for i in range(256)],
    "256x1024": [(1, 1024)] * 256,
    "skew256": skewed(),
}
PREFILL: dict[str, Mix] = {
    "16x1024": [(1024, 1024)] * 16,
    "1x8192": [(8192, 8192)],
    "4x512@4096": [(512, 4608)] * 4,
    "64 decode + 512": [(1, 1000)] * 64 + [(512, 512)],
    "64@100k": [(64, 100_000)],
    "7 tokens@1000": [(7, 1000)],
}
FUSED = ((1, 256), (1, 600), (1, 4096), (2, 600), (4, 600), (8, 600), (16, 600), (32, 600), (64, 600))
# Changes of the kernels' options beside the backend's default.
DECODE_VARIANTS: dict[str, dict[str, int]] = {
    "default": {},
    "4 stages": {"NUM_STAGES": 4},
    "7 stages": {"NUM_STAGES": 7},
    "4 warps": {"num_warps": 4},
}
FUSED_VARIANTS: dict[str, dict[str, int]] = {"default": {}, "2 warps": {"num_warps": 2}, "4 warps": {"num_warps": 4}}
PREFILL_VARIANTS: dict[str, dict[str, int]] = {
    "default": {},
    "large": {"BLOCK_M": 128},
    "large, 255 registers": {"BLOCK_M": 128, "maxnreg": 255},
    "small": {"BLOCK_M": 64, "num_warps": 4, "maxnreg": 255},
    "small, 32 keys": {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 4},
}


@dataclass
class Setting:
    """One cell: `layers` independent sets of pages, so that a graph over all of them reads from memory."""

    mix: Mix
    num_heads: int
    attention: TritonAttention
    batch: Any
    table: torch.Tensor
    pages: Sequence[Pages]  # [layers], each [P, 2, Hk, page, D]
    qkv: torch.Tensor
    out_loc: torch.Tensor
    heads: HeadTransform

    @classmethod
    def make(
        cls, mix: Mix, num_heads: int, page: int = PAGE, rotate: float = 400e6, *, is_fp8: bool = False
    ) -> Setting:
        torch.manual_seed(0)
        need = [-(-kv // page) for _, kv in mix]
        total = sum(need) + 1
        layer_bytes = total * 2 * KV_HEADS * page * DIM * 2
        layers = int(min(100, max(2, -(-rotate // layer_bytes))))
        shape = (layers, total, 2, KV_HEADS, page, DIM)
        pages: Sequence[Pages] = list(torch.randn(shape, device="cuda", dtype=DTYPE))
        if is_fp8:
            pages = [rounded(layer) for layer in pages]
        order = torch.randperm(total, device="cuda").to(torch.int32)
        table = torch.zeros(len(mix) + 1, max(need) + 1, device="cuda", dtype=torch.int32)
        first = 0
        for row, n in enumerate(need):
            table[row, :n] = order[first : first + n]
            first += n
        lens = np.array(mix, np.int32)

        def upload(*arrays: Any) -> list[torch.Tensor]:
            return [torch.from_numpy(np.asarray(a)).cuda() for a in arrays]

        rows = np.arange(len(mix), dtype=np.int32)
        ends = np.cumsum([0, *lens[:, 0]], dtype=np.int32)
        sequences = np.zeros(len(mix), SEQUENCE)
        sequences["row"], sequences["start"], sequences["stop"] = rows, lens[:, 1] - lens[:, 0], lens[:, 1]
        layout = SeqLayout(*upload(rows, np.ascontiguousarray(lens[:, 1]), ends))
        positions = np.concatenate([np.arange(kv - n, kv, dtype=np.int32) for n, kv in mix])
        (positions_on_device,) = upload(positions)
        token_rows = upload(np.repeat(rows, lens[:, 0]))[0].long()
        tokens = len(positions)
        batch = SimpleNamespace(
            shape=step_shape(sequences),
            sequences=sequences,
            layout=layout,
            num_tokens=tokens,
            positions=positions_on_device,
        )
        kind = GroupedQuery(num_heads, KV_HEADS, DIM, DIM**-0.5)
        spec = MixerSpec("cuda", DTYPE, kind, page, 4000, fp8_cache=is_fp8)
        out_loc = table[token_rows, positions_on_device.long() // page].long() * page + positions_on_device % page
        angle = torch.rand(int(positions.max()) + 1, DIM // 2, device="cuda") * 6
        weights = [1 + 0.1 * torch.randn(DIM, device="cuda", dtype=DTYPE) for _ in range(2)]
        heads = HeadTransform(weights[0], weights[1], 1e-6, torch.cat([angle.cos(), angle.sin()], -1))
        qkv = torch.randn(tokens, (num_heads + 2 * KV_HEADS) * DIM, device="cuda", dtype=DTYPE)
        return cls(mix, num_heads, TritonAttention(spec, load_ops("triton")), batch, table, pages, qkv, out_loc, heads)

    @property
    def q(self) -> torch.Tensor:
        """As `norm_rope_store` leaves it: with pages of 8 bits, in float16."""
        q = self.qkv.view(len(self.qkv), -1, DIM)[:, : self.num_heads]
        return q.half() if self.attention.spec.fp8_cache else q

    def prepare(self) -> Any:
        return self.attention.prepare(self.batch, self.table, self.out_loc)

    def with_changes(self, changes: dict[str, int], kind: str) -> Setting:
        """Return the same inputs with a backend of another configuration."""
        attention = TritonAttention(self.attention.spec, load_ops("triton"))
        if kind == "prefill" and changes:
            kernel = {**attention._large.kernel, **changes}
            queries = kernel["BLOCK_M"] // (self.num_heads // KV_HEADS)
            tiling = replace(attention._large, queries=queries, kernel=kernel)
            attention._small = attention._large = replace(tiling, plan={**tiling.plan, "BLOCK_Q": queries})
            attention._whole, attention._cuda = attention._large, None
        elif kind != "prefill":
            for options in (*attention._decode.values(), attention._decode_few):
                options.update(changes)
        fields = {**vars(self), "attention": attention}
        return Setting(**fields)

    def error(self) -> float:
        """Return the error relative to the reference, over the queries of up to 64 sequences."""
        out = self.prepare().forward(self.q, self.pages[0])
        whole = self.batch.layout
        layout = SeqLayout(whole.rows[:64], whole.kv_lens[:64], whole.cu_query_lens[:65])
        few = int(layout.cu_query_lens[-1])
        expected = reference.paged_attention(self.q[:few], self.pages[0], self.table, layout, DIM**-0.5)
        return float((out[:few].double() - expected.double()).norm() / expected.double().norm())


def rounded(pages: torch.Tensor) -> QuantizedPages:
    q, scale = round_fp8(pages.reshape(-1, DIM), 0)
    return QuantizedPages(q.view(pages.shape), scale.view(pages.shape[:-1]))


def graph_us(step: Any, reps: int = 7) -> float:
    """Return the median time of a replay of `step`, after a warm-up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    graph.replay()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(reps)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events) * 1e3


def plan_us(s: Setting) -> float:
    return graph_us(lambda: [s.prepare() for _ in range(20)]) / 20


def forward_us(s: Setting, plan: float, fused: bool = False) -> float:
    """Time one layer's attention, without the plan."""
    times, q = max(1, -(-24 // len(s.pages))), s.q

    def step() -> None:
        prepared = s.prepare()
        for i in range(times * len(s.pages)):
            pages = s.pages[i % len(s.pages)]
            if fused:
                prepared.attend(s.qkv, s.heads, pages)
            else:
                prepared.forward(q, pages)

    return (graph_us(step) - plan) / (times * len(s.pages))


def decode() -> None:
    print(f"{'decode':14}{'floor':>7} plan   us (fraction of {READ / 1e12} TB/s), err", flush=True)
    for model, num_heads, is_fp8 in CASES:
        for name, mix in DECODE.items():
            s = Setting.make(mix, num_heads, is_fp8=is_fp8)
            floor = sum(kv for _, kv in mix) * 2 * KV_HEADS * (DIM + 4 if is_fp8 else DIM * 2) / READ * 1e6
            plan, cells = plan_us(s), []
            for label, changes in DECODE_VARIANTS.items():
                v = s.with_changes(changes, "decode")
                error = v.error()
                us = forward_us(v, plan)
                cells.append((us, f"{label} {us:.1f}" + ("" if error < 6e-3 else f" WRONG {error:.4f}")))
                if not changes:
                    own = f"{us:6.1f} ({100 * floor / us:2.0f} %) {error:.4f}"
            print(
                f"{model:9}{name:9}{floor:7.1f} {plan:4.1f} {own} | " + ", ".join(c for _, c in sorted(cells)),
                flush=True,
            )
            del s
            torch.cuda.empty_cache()


def separate_us(s: Setting, plan: float) -> float:
    """As `forward_us`, with norm, RoPE and K/V store in a kernel of their own."""

    def step() -> None:
        prepared = s.prepare()
        for pages in s.pages:
            StepAttention.attend(prepared, s.qkv, s.heads, pages)

    return (graph_us(step) - plan) / len(s.pages)


def chain_us(s: Setting, plan: float, weights: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Time one row with the projections around attention; all kernels overlap by programmatic dependent launch."""

    def step() -> None:
        prepared = s.prepare()
        x = torch.ones(1, weights[0][0].shape[1], device="cuda", dtype=DTYPE)
        for i, pages in enumerate(s.pages):
            qkv, o = weights[i % len(weights)]
            out = prepared.attend(gemv(x, qkv, None)[0], s.heads, pages)
            x = gemv(out.view(1, -1), o, None)[0]

    return (graph_us(step) - plan) / len(s.pages)


def fused() -> None:
    """Time small decode batches with norm, RoPE and K/V store inside the attention kernel, or before it."""
    backend.FUSED_ROWS = 1000
    for model, num_heads, is_fp8 in CASES:
        hidden = {16: 1024, 32: 4096}[num_heads]
        sizes = ((num_heads + 2 * KV_HEADS) * DIM, hidden), (hidden, num_heads * DIM)
        weights = [tuple(torch.randn(n, k, device="cuda", dtype=DTYPE) * k**-0.5 for n, k in sizes) for _ in range(10)]
        for rows, context in FUSED:
            s = Setting.make([(1, context)] * rows, num_heads, is_fp8=is_fp8)
            plan = plan_us(s)
            cells = [f"separate {separate_us(s, plan):.2f}"]
            for label, changes in FUSED_VARIANTS.items():
                v = s.with_changes(changes, "decode")
                text = f"{label} {forward_us(v, plan, fused=True):.2f}"
                cells.append(text + (f" in a chain {chain_us(v, plan, weights):.2f}" if rows == 1 else ""))
            print(f"fused {model:9}{rows:3}x{context:5}  " + ", ".join(cells), flush=True)
            del s
            torch.cuda.empty_cache()


def prefill() -> None:
    for model, num_heads, is_fp8 in CASES:
        for name, mix in PREFILL.items():
            s = Setting.make(mix, num_heads, is_fp8=is_fp8)
            flops = sum(n * kv - n * (n - 1) // 2 for n, kv in mix) * 4 * DIM * num_heads
            plan, cells = plan_us(s), []
            for label, changes in PREFILL_VARIANTS.items():
                v = s.with_changes(changes, "prefill")
                error = v.error()
                us = forward_us(v, plan)
                cells.append((us, f"{label} {us:.1f}" + ("" if error < 6e-3 else f" WRONG {error:.4f}")))
                if not changes:
                    own = f"{us:7.1f} us {flops / us / 1e6:4.0f} TFLOP/s {error:.4f}"
            print(f"{model:9}{name:16} plan {plan:4.1f} {own} | " + ", ".join(c for _, c in sorted(cells)), flush=True)
            del s
            torch.cuda.empty_cache()


LATENTS = {"GLM-4.7-Flash": 20, "DeepSeek V3, 8 ranks": 16, "DeepSeek V3": 128}  # heads of a rank
LATENT_VARIANTS: dict[str, tuple[Tile | None, int]] = {  # with a number of warps
    "default": (None, 4),
    "tiles of 32": (Tile(32, 5, 264), 4),  # two programs on an SM
    "tiles of 64": (Tile(64, 3, 132), 4),
    "8 warps": (None, 8),
}


def latent() -> None:
    """Time decoding over latents in us, and in percent of the time that reading them takes."""
    for model, heads in LATENTS.items():
        for count, context in ((1, 4096), (1, 32768), (64, 4096), (256, 1024)):
            for is_fp8 in (False, True):
                name = f"latent {model}{' FP8' * is_fp8} {count}x{context}"
                print(f"{name}  " + ", ".join(latent_cells(heads, count, context, is_fp8=is_fp8)), flush=True)
                torch.cuda.empty_cache()


def latent_cells(heads: int, count: int, context: int, *, is_fp8: bool) -> list[str]:
    """Time each variant for sequences of equal length."""
    kind, width, total = Latent(heads, 512, 64, 192, 256, 1 / 16), 576, count * context // PAGE
    spec = MixerSpec("cuda", DTYPE, kind, PAGE, 257, fp8_cache=is_fp8)
    pages: list[Pages] = []
    for _ in range(max(2, 400_000_000 // (count * context * 2 * width))):
        layer = torch.randn(total, 1, PAGE, width, device="cuda").to(DTYPE)
        q8, scale = round_fp8(layer.view(-1, width), 0)
        pages.append(QuantizedPages(q8.view(layer.shape), scale.view(layer.shape[:-1])) if is_fp8 else layer)
    table = torch.randperm(total, device="cuda").int().view(count, -1)
    sequences = np.zeros(count, SEQUENCE)
    sequences["row"], sequences["start"], sequences["stop"] = np.arange(count), context - 1, context
    rows = torch.arange(count + 1, dtype=torch.int32, device="cuda")
    layout = SeqLayout(rows[:count], torch.full_like(rows[:count], context), rows)
    batch: Any = SimpleNamespace(shape=StepShape(count, 1), sequences=sequences, layout=layout)
    q = torch.randn(count, heads, 512, device="cuda").to(DTYPE)
    q_rope = torch.randn(count, heads, 256, device="cuda").to(DTYPE)[:, :, 192:]
    few = SeqLayout(layout.rows[:8], layout.kv_lens[:8], rows[:9])
    want = reference.latent_attention(q[:8], q_rope[:8], pages[0], table, few, kind.scale).double()

    def step(mixer: TritonLatents, times: int) -> torch.Tensor:
        prepared = mixer.prepare(batch, table, table)
        outs = [prepared.read(q, q_rope, layer) for layer in pages * times]
        return outs[0]

    cells = []
    for label, (tile, warps) in LATENT_VARIANTS.items():
        mixer = TritonLatents(spec, load_ops("triton"))
        mixer.options["num_warps"] = warps
        if tile is not None:
            mixer.tiles = dict.fromkeys(mixer.tiles, tile)
            mixer.part, mixer.lse, mixer._work = (torch.cat([x, x]) for x in (mixer.part, mixer.lse, mixer._work))
        error = float((step(mixer, 1)[:8].double() - want).norm() / want.norm())
        us = (graph_us(partial(step, mixer, 3)) - graph_us(partial(step, mixer, 1))) / (2 * len(pages))
        floor = count * context * (width + 4 if is_fp8 else 2 * width) / READ * 1e6
        cells.append(f"{label} {us:.1f} us ({100 * floor / us:.0f} %) {error:.4f}")
    return cells


PARTS = {"decode": decode, "fused": fused, "prefill": prefill, "latent": latent}


def compile_some(index: int, count: int) -> None:
    """Compile every count-th kernel of all variants by a call on tiny inputs; the results stay in Triton's cache."""
    jobs = [
        (num_heads, is_fp8, kind, changes)
        for _, num_heads, is_fp8 in CASES
        for kind, variants in (("decode", DECODE_VARIANTS), ("fused", FUSED_VARIANTS), ("prefill", PREFILL_VARIANTS))
        for changes in variants.values()
    ]
    for num_heads, is_fp8, kind, changes in jobs[index::count]:
        for rows in (1, 2) if kind == "fused" else (1,):
            mix = [(3, 70)] if kind == "prefill" else [(1, 70)] * rows
            s = Setting.make(mix, num_heads, rotate=1, is_fp8=is_fp8).with_changes(changes, kind)
            prepared = s.prepare()
            if kind == "fused":
                prepared.attend(s.qkv, s.heads, s.pages[0])
            else:
                prepared.forward(s.q, s.pages[0])
    torch.cuda.synchronize()


def main() -> None:
    if sys.argv[1:2] == ["--compile"]:
        compile_some(int(sys.argv[2]), int(sys.argv[3]))
        return
    started, count = time.time(), os.cpu_count() or 1
    workers = [subprocess.Popen([sys.executable, sys.argv[0], "--compile", str(i), str(count)]) for i in range(count)]
    failed = sum(w.wait() != 0 for w in workers)
    print(f"compiled in {time.time() - started:.0f} s, {failed} of {count} processes failed", flush=True)
    with torch.inference_mode():
        for part in sys.argv[1:] or PARTS:
            PARTS[part]()
            print(f"-- {part}: {time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
