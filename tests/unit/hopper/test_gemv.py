"""The source of the GEMV in CUDA C++, compiled for a CPU, beside the reference."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("nothing here is for the interpreter", allow_module_level=True)
pytest.importorskip("triton")

from minisgl.kernels.hopper import gemv as cuda_gemv
from minisgl.kernels.hopper import nvrtc
from minisgl.kernels.hopper.gemv import (
    CHAIN_MEMORY,
    SHARED_MEMORY,
    Chain,
    Launch,
    Link,
    ResidualSum,
    plan_experts,
    plan_launch,
    refuses_mixture,
)
from minisgl.kernels.triton.launch import compile_ahead
from minisgl.kernels.triton.product import Mixture, Norm
from minisgl.ops import reference
from minisgl.ops.deferred import Deferred, finished
from minisgl.ops.quantized import Format, Quantized
from support.cuda_on_cpu import compile_on_cpu, compiler

FP8, INT8 = Format(8, 0), Format(8, 0, is_integer=True)
INT4 = Format(4, 128, scale_dtype=torch.bfloat16)
WITH_ZEROS = Format(4, 128, has_zeros=True, scale_dtype=torch.float16)


def matrix(kind: Format, n_out: int, n_in: int) -> Quantized:
    weight = kind.empty(n_out, n_in, torch.device("cpu"))
    weight.round_from(torch.randn(weight.shape) * 0.02)
    if weight.zeros is not None:
        weight.zeros.copy_(torch.randint(6, 11, weight.zeros.shape))
    return weight


def run(chain: Chain, results: Tensor | None = None) -> Tensor:
    """Run `gemv.cu` in two CTAs, compiled for this CPU."""
    out = torch.full(chain.shape, torch.nan, dtype=chain.dtype)
    run_plan(plan_launch(chain, out, results, num_sms=2), [link.weight for link in chain.links])
    return out


def run_plan(launch: Launch, weights: Sequence[Quantized]) -> None:
    library = compile_on_cpu("gemv_on_cpu", launch.defines | {"SOURCE": f'"{nvrtc.SOURCES / "gemv.cu"}"'})
    assert library.shared_bytes() <= launch.shared <= max(*SHARED_MEMORY.values(), CHAIN_MEMORY)
    for weight in weights:
        library.add_weights(ctypes.c_void_p(weight.data.data_ptr()), ctypes.c_longlong(weight.data.numel()))
    library.run(ctypes.byref(launch.arguments), launch.grid)


@pytest.mark.skipif(compiler is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("kind", "n_out", "n_in", "gate", "has_norm", "has_residual", "dtype"),
    [
        (FP8, 50, 1088, "silu", True, True, torch.bfloat16),  # the last warps have no or fewer columns
        (FP8, 150, 2048, "", False, False, torch.bfloat16),  # several tiles: the ring goes round
        (INT8, 50, 1088, "gelu_tanh", True, False, torch.float16),
        (FP8, 403, 1024, "silu", True, True, torch.bfloat16),  # many outputs per CTA
        (INT4, 3, 2048, "", False, False, torch.float16),
        (INT4, 150, 2048, "", False, False, torch.bfloat16),
        (WITH_ZEROS, 50, 1280, "silu", True, True, torch.bfloat16),
    ],
    ids=str,
)
def test_one_row(
    kind: Format, n_out: int, n_in: int, gate: str, has_norm: bool, has_residual: bool, dtype: torch.dtype
) -> None:  # fmt: skip
    torch.manual_seed(0)
    weight = matrix(kind, n_out * (2 if gate else 1), n_in)
    x, residual = torch.randn(2, 1, n_in).to(dtype)
    norm_weight, bias = torch.rand(n_in).to(dtype), torch.randn(len(weight)).to(dtype)
    norm = Norm(residual if has_residual else None, norm_weight, 1e-6) if has_norm else None
    total = ResidualSum(torch.full_like(x, torch.nan))
    out = run(Chain(x, (Link(weight, bias, gate, norm, total if has_residual else None),)))

    dense = weight.dense(torch.float32)
    if norm is None:
        want = reference.linear(x.float(), dense, bias.float(), gate)
    else:
        summed = (x.float() + residual.float()).to(dtype) if has_residual else x
        assert not has_residual or torch.equal(total.stored, summed)
        normed = reference.rms_norm(summed.float(), norm_weight.float(), 1e-6)
        want = reference.linear(normed, dense, bias.float(), gate)
    assert (out.float() - want).norm() < 0.003 * want.norm()


@pytest.mark.skipif(compiler is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    "kind", [FP8, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (INT8, WITH_ZEROS))], ids=str
)
def test_chain(kind: Format) -> None:
    """One kernel for o, gate and up, down and qkv computes what four do, whatever an earlier launch has left."""
    torch.manual_seed(0)
    o, gate_up, down, qkv = (matrix(kind, *shape) for shape in ((512, 256), (512, 512), (512, 256), (40, 512)))
    norm_weight, bias = torch.rand(512).bfloat16(), torch.randn(512).bfloat16()
    results = torch.full((4 + 512 + 256 + 512,), 0xFFFF, dtype=torch.int32)
    results[0] = 0xFFFF + 1
    for _ in range(2):
        x, residual = torch.randn(1, 256).bfloat16(), torch.randn(1, 512).bfloat16()
        first, second = (ResidualSum(torch.full((1, 512), torch.nan).bfloat16()) for _ in range(2))
        links = [
            Link(o, bias),
            Link(gate_up, None, "silu", Norm(residual, norm_weight, 1e-6), first),
            Link(down),
            Link(qkv, None, "", Norm(Deferred(first), norm_weight, 1e-6), second),
        ]
        got, number = run(Chain(x, tuple(links)), results), int(results[0])
        pairs = [(total.stored.clone(), total) for total in (first, second)]
        want = x
        for link in links:
            want = run(Chain(want, (link,)))
        assert (got - want).norm() < 0.01 * want.norm() and int(results[0]) == number
        assert all((total - each.stored).norm() < 0.01 * total.norm() for total, each in pairs)
        assert torch.equal(results[4:] & 0xFFFF, torch.full_like(results[4:], number - 1 & 0xFFFF))


@pytest.mark.skipif(compiler is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("kind", "hidden", "size", "top_k", "dtype"),
    [
        (FP8, 192, 128, 4, torch.bfloat16),  # two warps for the columns of an expert
        (INT8, 64, 64, 8, torch.float16),
        (WITH_ZEROS, 512, 256, 8, torch.float16),
    ],
    ids=str,
)
def test_experts(kind: Format, hidden: int, size: int, top_k: int, dtype: torch.dtype) -> None:
    """Gate and up of a token's experts, and their weighted sum of down: tiles of several experts in a CTA."""
    torch.manual_seed(0)
    gate_up = matrix(kind, 12 * 2 * size, hidden).experts(12)
    down = matrix(kind, 12 * hidden, size).experts(12)
    x, experts = torch.randn(1, hidden).to(dtype), torch.randperm(12)[None, :top_k].int()
    choices = torch.rand(1, top_k)
    between, out = torch.full((top_k, size), torch.nan, dtype=dtype), torch.full((1, hidden), torch.nan, dtype=dtype)
    run_plan(plan_experts(x, experts, choices, gate_up, between, False, num_sms=2), [gate_up])
    run_plan(plan_experts(between, experts, choices, down, out, True, num_sms=2), [down])
    want = torch.zeros(1, hidden)
    for i, expert in enumerate(experts[0].tolist()):
        row = reference.linear(x.float(), gate_up[expert].dense(torch.float32), None, "silu")
        assert (between[i].float() - row[0]).norm() < 0.005 * row.norm()
        want += choices[0, i] * reference.linear(row, down[expert].dense(torch.float32), None, "")
    assert (out.float() - want).norm() < 0.005 * want.norm()


def test_experts_whose_columns_fit_no_warps_take_other_kernels() -> None:
    def is_supported(kind: Format, size: int, top_k: int, tokens: int = 1) -> bool:
        return refuses_mixture(Mixture(tokens, top_k, 4, 512, size, (kind, kind), torch.bfloat16)) is None

    for kind, size, top_k in ((INT4, 768, 8), (INT4, 1024, 2), (FP8, 768, 8), (FP8, 384, 8), (INT8, 1536, 4)):
        assert is_supported(kind, size, top_k)
    for kind, size, top_k in (
        (INT4, 384, 8),
        (INT4, 512, 2),
        (INT4, 768, 6),
        (INT4, 1792, 2),
        (FP8, 96, 8),
        (FP8, 14336, 2),
    ):
        assert not is_supported(kind, size, top_k)
    assert not is_supported(INT4, 768, 8, tokens=2)


def test_without_a_compiled_kernel(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """One warning, and Triton's kernels take the row, link by link."""

    def fail(nvrtc: object, source: bytes, defines: dict[str, int]) -> bytes:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(nvrtc, "find_or_compile", fail)

    def by_triton(x: Tensor, weight: Quantized, bias: object, gate: str, norm: Norm | None) -> tuple[Tensor, Tensor]:
        return x[:, :1] + torch.zeros(1, len(weight), dtype=x.dtype), x if norm is None else x + finished(norm.residual)

    monkeypatch.setattr(nvrtc, "libraries", lambda: (None, None))
    monkeypatch.setattr(cuda_gemv, "quantized_gemv", by_triton)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    weights = [FP8.empty(n, 512, torch.device("cpu")) for n in (512, 16, 1 << 16)]
    x, residual, ones = torch.full((1, 512), 2).bfloat16(), torch.ones(1, 512).bfloat16(), torch.ones(512).bfloat16()
    first = cuda_gemv.cuda_gemv(x, weights[0], None)
    with caplog.at_level(logging.WARNING), compile_ahead():
        assert first is not None and first[0].shape == (1, 512)
        assert finished(first[0]).shape == (1, 512), "noted, not launched"
    for last in weights[1:]:
        first = cuda_gemv.cuda_gemv(x, weights[0], None)
        assert first is not None
        both = cuda_gemv.cuda_gemv(first[0], last, None, "", Norm(residual, ones, 1e-6))
        assert both is not None and (finished(both[1]) == 3).all() and (finished(both[0]) == 2).all()
    assert [record.message for record in caplog.records] == [
        "Triton's kernel is used, because gemv.cu cannot be compiled or loaded: no compiler"
    ]
