"""Every registered attention backend against the reference op, on pages full of garbage."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.testing import assert_close
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

from contract.harness import Span, make_batch
from minisgl.attention.backend import MixerSpec
from minisgl.attention.selection import ATTENTION, resolve_attention
from minisgl.core.specs import GroupedQuery
from minisgl.ops import reference
from minisgl.ops.table import resolve_ops

SPEC = MixerSpec("cpu", torch.float32, GroupedQuery(heads=4, kv_heads=2, head_dim=64, scale=0.125), page_size=16)
NAMES = [name for name in ATTENTION.names if ATTENTION.refusal(name, SPEC) is None]
BACKENDS = [*NAMES, "reference,cpu"]
MIXES = {
    "decode": [(1, 1), (1, 70), (1, 17), (1, 128), (1, 300)],
    "prefill": [(40, 40), (2, 2), (129, 129)],
    "chunks": [(7, 30), (300, 410), (16, 144)],
    "mixed": [(1, 33), (50, 50), (3, 20), (1, 1), (260, 261), (1, 200)],
}
WINDOWS = (None, 1, 31, 32, 100, 1000)


def setting(
    mix: list[tuple[int, int]], page_size: int, group: int, dim: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[Span]]:
    """Pages (NaN but for the valid slots), shuffled table, queries and spans for pairs of (query, kv) length."""
    rng, kv_heads = np.random.default_rng(seed), 2
    need = [-(-kv // page_size) for _, kv in mix]
    all_pages = torch.full((sum(need) + 3, 2, kv_heads, page_size, dim), float("nan"), dtype=dtype)
    free = rng.permutation(len(all_pages)).tolist()
    table = torch.full((len(mix) + 2, max(need) + 1), free.pop(), dtype=torch.int32)
    rows = rng.permutation(len(mix) + 2)[: len(mix)].tolist()
    generator = torch.Generator().manual_seed(seed)
    spans = []
    for (query_len, kv_len), row, pages in zip(mix, rows, need, strict=True):
        for i in range(pages):
            table[row, i] = free.pop()
            used = min(page_size, kv_len - i * page_size)
            content = torch.randn(2, kv_heads, used, dim, generator=generator).to(dtype)
            all_pages[table[row, i], :, :, :used] = content
        spans.append(Span(row, kv_len - query_len, [0] * query_len))
    q = torch.randn(sum(n for n, _ in mix), kv_heads * group, dim, generator=generator).to(dtype)
    return all_pages, table, q, spans


def give_back(pages: torch.Tensor, table: torch.Tensor, spans: list[Span], window: int) -> None:
    """Fill with NaN the pages before the windows of all queries: another sequence may have them."""
    for span in spans:
        count = max(0, span.start + 1 - window) // pages.shape[3]
        pages[table[span.row, :count].long()] = float("nan")


def run(
    backend: str,
    pages: torch.Tensor,
    table: torch.Tensor,
    q: torch.Tensor,
    spans: list[Span],
    window: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    kind = GroupedQuery(
        q.shape[1],
        pages.shape[2],
        q.shape[2],
        scale or q.shape[2] ** -0.5,
        window,
        softcap=softcap,
        has_sinks=sinks is not None,
    )
    spec = MixerSpec("cpu", pages.dtype, kind, pages.shape[3])
    (attention,) = resolve_attention(backend, [spec], resolve_ops("cpu"))
    step = attention.prepare(make_batch(spans), table, torch.zeros(len(q), dtype=torch.int64))
    out = step.forward(q, pages, sinks)
    assert out.is_contiguous()
    return out


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize(("group", "dim"), [(1, 64), (2, 128), (4, 64), (8, 64)])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backend_equals_reference(backend: str, mix: str, group: int, dim: int, page_size: int):
    pages, table, q, spans = setting(MIXES[mix], page_size, group, dim)
    out = run(backend, pages, table, q, spans)
    expected = reference.paged_attention(q, pages, table, make_batch(spans).layout, dim**-0.5)
    assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_with_windows(backend: str, mix: str, page_size: int):
    pages, table, q, spans = setting(MIXES[mix], page_size, 2, 64)
    layout = make_batch(spans).layout
    for window in WINDOWS:
        expected = reference.paged_attention(q, pages, table, layout, 0.2, window)
        given = pages.clone()
        if window is not None:
            give_back(given, table, spans, window)
        out = run(backend, given, table, q, spans, window, scale=0.2)
        assert_close(out, expected, rtol=1e-4, atol=1e-5)


OPTIONS = {"softcap": (2.0, False), "sinks": (0.0, True), "both": (0.7, True)}
"""Soft caps that bend scores of normal queries and keys visibly, and whether there are sinks."""


def sinks_of(heads: int) -> torch.Tensor:
    """Sinks that count little, as much as all keys, and more than these: one that is wrong or counted twice shows."""
    return torch.tensor([-3.0, 4.0, 1.0, 30.0])[torch.arange(heads) % 4]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("page_size", "group", "dim", "window"), [(16, 2, 64, None), (1, 4, 80, 31), (64, 1, 96, 100)])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_options_of_scores(
    backend: str, mix: str, page_size: int, group: int, dim: int, window: int | None, option: str
):
    pages, table, q, spans = setting(MIXES[mix], page_size, group, dim)
    softcap, has_sinks = OPTIONS[option]
    sinks = sinks_of(q.shape[1]) if has_sinks else None
    out = run(backend, pages, table, q, spans, window, 0.2, softcap, sinks)
    expected = reference.paged_attention(q, pages, table, make_batch(spans).layout, 0.2, window, softcap, sinks)
    assert_close(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_scores_agree_with_transformers(option: str):
    """A prompt with the eager attention of GPT-OSS, which has sinks, and of Gemma 2, which has a soft cap."""
    softcap, has_sinks = OPTIONS[option]
    pages, table, q, spans = setting([(70, 70)], 16, 2, 64)
    sinks = sinks_of(4)
    kv = pages[table[spans[0].row, :5].long()].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, None, :, :70]
    module = SimpleNamespace(sinks=sinks, num_key_value_groups=2, training=False)
    mask = torch.full((70, 70), float("-inf")).triu(1)
    if has_sinks and softcap:  # no model has both: a sink is a key with a score of its own and the value 0
        scores = softcap * torch.tanh(q.transpose(0, 1) @ kv[0, 0].repeat_interleave(2, 0).mT * 0.2 / softcap) + mask
        weights = torch.cat([scores, sinks[:, None, None].expand(-1, 70, 1)], -1).softmax(-1)[..., :-1]
        want = (weights @ kv[1, 0].repeat_interleave(2, 0)).transpose(0, 1)
    elif has_sinks:
        want = modeling_gpt_oss.eager_attention_forward(module, q.transpose(0, 1)[None], *kv, mask, 0.2)[0][0]
    else:
        want = modeling_gemma2.eager_attention_forward(
            module, q.transpose(0, 1)[None], *kv, mask, scaling=0.2, softcap=softcap
        )[0][0]
    out = run("reference", pages, table, q, spans, None, 0.2, softcap, sinks if has_sinks else None)
    assert_close(out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group", [1, 2, 8])
@pytest.mark.parametrize("backend", NAMES)
def test_half_precision(backend: str, group: int, dtype: torch.dtype):
    pages, table, q, spans = setting(MIXES["mixed"], 16, group, 64, dtype)
    for options in ((), (2.0, sinks_of(q.shape[1]))):
        out = run(backend, pages, table, q, spans, None, 0.125, *options)
        layout = make_batch(spans).layout
        expected = reference.paged_attention(q.float(), pages.float(), table, layout, 0.125, None, *options)
        assert out.dtype is dtype
        assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", NAMES)
def test_result_of_a_sequence_is_independent_of_the_batch(backend: str, dtype: torch.dtype):
    pages, table, q, spans = setting(MIXES["mixed"] + MIXES["decode"], 16, 2, 64, dtype)
    together = run(backend, pages, table, q, spans)
    start = 0
    for span in spans:
        part = slice(start, start + len(span.ids))
        alone = run(backend, pages, table, q[part], [span])
        assert torch.equal(together[part], alone)
        start = part.stop


def test_many_sequences_are_gathered_in_several_groups(monkeypatch: pytest.MonkeyPatch):
    pages, table, q, spans = setting(MIXES["mixed"], 16, 2, 64)
    at_once = run("cpu", pages, table, q, spans)
    monkeypatch.setattr("minisgl.attention.sdpa.GATHER_BYTES", 100_000)
    assert torch.equal(run("cpu", pages, table, q, spans), at_once)


def test_reference_agrees_with_plain_softmax():
    pages, table, q, spans = setting([(3, 5)], 4, 1, 64)
    ids = table[spans[0].row, :2].long()
    k, v = pages[ids].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :5]
    out = reference.paged_attention(q, pages, table, make_batch(spans).layout, 0.125)
    for i in range(3):
        for head in range(2):
            weights = torch.softmax(k[head, : 3 + i] @ q[i, head] * 0.125, 0)
            assert_close(out[i, head], weights @ v[head, : 3 + i], rtol=1e-4, atol=1e-5)


def test_window_masks_older_positions():
    """Of the sequence that begins where the window does, which has the same keys at other positions."""
    pages, table, q, spans = setting([(1, 90)], 1, 2, 64)
    out = reference.paged_attention(q, pages, table, make_batch(spans).layout, 0.125, 40)
    later = table.clone()
    later[:, :40] = table[:, 50:90]
    short = [Span(spans[0].row, 39, [0])]
    assert_close(out, reference.paged_attention(q, pages, later, make_batch(short).layout, 0.125))
