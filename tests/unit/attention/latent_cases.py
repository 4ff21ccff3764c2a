"""Checks of attention to latents that hold on every device: the interpreter's tests and those on a GPU share them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from contract.harness import make_batch
from contract.test_attention import setting
from minisgl.attention.backend import MixerSpec
from minisgl.attention.latent import LatentMixer
from minisgl.attention.latent_triton import TritonLatents
from minisgl.core.layout import Flag
from minisgl.core.specs import Latent
from minisgl.engine.batch import step_shape
from minisgl.kernels.triton.attention_latent import store_latents
from minisgl.ops.quantized import QuantizedPages, round_fp8
from minisgl.ops.reference import LatentTransform
from minisgl.ops.table import OpTable
from unit.attention.triton_cases import TOLERANCE, apart, assert_near, on

Mix = list[tuple[int, int]]


def check_latents(
    mix: Mix,
    kind: Latent,
    page_size: int,
    dtype: torch.dtype,
    device: str,
    *,
    max_queries: int = 1,
    fp8_cache: bool = False,
    scales_queries: bool = False,
) -> None:
    """Compare output, stored latents and changed inputs with the op table's. Pages have NaN beyond each last key."""
    width = kind.rank + kind.rope_dim
    whole, table, _, spans = setting(mix, page_size, 1, width, dtype)
    pages: Any = apart(whole[:, 0, :1].to(device))
    if fp8_cache:
        q, scale = round_fp8(pages.flatten(0, 2), 0)
        pages = QuantizedPages(apart(q.view(pages.shape)), scale.view(pages.shape[:-1]).contiguous())
    batch = make_batch(spans)
    if max_queries > 1:
        for sequence in batch.sequences[: sum(n <= max_queries for n, _ in mix)]:
            sequence["flags"] |= Flag.FROM_DEVICE
        batch = replace(batch, shape=step_shape(batch.sequences))
    batch, table = on(batch, device), table.to(device)
    positions, generator = batch.positions.long(), torch.Generator().manual_seed(1)
    out_loc = table[batch.token_rows.long(), positions // page_size].long() * page_size + positions % page_size
    angle = torch.rand(int(positions.max()) + 1, kind.rope_dim // 2, generator=generator) * 6
    weight = torch.randn(kind.heads, kind.nope_dim + kind.v_dim, kind.rank, generator=generator) * kind.rank**-0.5
    heads = LatentTransform(
        (torch.rand(kind.rank, generator=generator) + 0.5).to(device, dtype),
        1e-6,
        torch.cat([angle.cos(), angle.sin()], -1).to(device),
        weight.to(device, dtype),
        (2.0 ** (torch.arange(len(angle)) % 3 - 1)).to(device) if scales_queries else None,
    )
    size = kind.heads * (kind.nope_dim + kind.rope_dim)
    projected = torch.randn(len(positions), size + width, generator=generator).to(device, dtype)
    spec = MixerSpec(device, dtype, kind, page_size, len(mix) + 1, max_queries, fp8_cache)
    results = []
    for make, ops in ((LatentMixer, OpTable()), (TritonLatents, OpTable(store_latents=store_latents))):
        own = QuantizedPages(apart(pages.data), pages.scale.clone()) if fp8_cache else apart(pages)
        queries, latents = projected.clone().tensor_split([size], 1)
        inputs = queries.view(len(positions), kind.heads, -1), latents
        out = make(spec, ops).prepare(batch, table, out_loc).attend(*inputs, heads, own)
        dense = own.dense(table.unique().long()) if fp8_cache else own.float()
        results.append((out, *inputs, dense.nan_to_num()))
    (want, *before), (out, *after) = results
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b, rtol=0.13 if fp8_cache else 2e-2, atol=2e-2)  # a step of float8_e4m3fn
    assert_near(out, want, spans, (3e-2 if fp8_cache else 3.0 * TOLERANCE[dtype]))
