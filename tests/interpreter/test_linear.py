"""GEMV and GEMM of few rows: every shape of tile, tails in both dimensions, and counters left at zero."""

from __future__ import annotations

import pytest
import torch
import triton
from torch.testing import assert_close

from minisgl.kernels.triton import kernels, ops
from minisgl.kernels.triton.gemm import GemmConfig, gemm
from minisgl.kernels.triton.launch import COUNTERS, counters
from minisgl.kernels.triton.linear import MAX_GEMM_ROWS, GemvConfig, gemm_config, gemv
from minisgl.ops import reference


def inputs(rows: int, n_out: int, n_in: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(rows + n_out)
    return tuple(torch.randn(*s).to(dtype) for s in ((rows, n_in), (n_out, n_in), (n_out,)))


@pytest.mark.parametrize("config", [GemvConfig(2, 64, 4), GemvConfig(4, 256, 4)])
@pytest.mark.parametrize(("n_out", "n_in"), [(6, 192), (13, 200)])
def test_gemv(config: GemvConfig, n_out: int, n_in: int):
    x, w, b = inputs(1, 2 * n_out, n_in, torch.float32)
    residual, norm = torch.randn(1, n_in), torch.rand(n_in)
    for bias in (None, b):
        plain, _ = gemv(x, w, bias, config=config)
        assert_close(plain, reference.linear(x, w, bias), rtol=1e-4, atol=1e-4)
        for gate in reference.GATES:
            got = gemv(x, w, bias, residual=residual, norm_weight=norm, eps=1e-6, gate=gate, config=config)
            for a, want in zip(got, reference.add_norm_linear(x, residual, norm, 1e-6, w, bias, gate), strict=True):
                assert_close(a, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fused", [0, 2048])
@pytest.mark.parametrize("has_residual", [False, True])
def test_one_row_with_a_separate_norm_and_a_fused_one(fused: int, has_residual: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "MAX_FUSED_INPUTS", fused)
    x, w, b = inputs(1, 26, 200, torch.float32)
    residual, norm = torch.randn(1, 200) if has_residual else None, torch.rand(200)
    for gate in ("", "silu"):
        want = reference.add_norm_linear(x, residual, norm, 1e-6, w, b, gate)
        given = None if residual is None else residual.clone()
        for got, expected in zip(ops.add_norm_linear(x, given, norm, 1e-6, w, b, gate), want, strict=True):
            assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("rows", "config"),
    [
        (2, GemmConfig(16, 32, 64, 1, 2, 4)),
        (16, GemmConfig(16, 64, 32, 2, 2, 4)),
        (40, GemmConfig(32, 64, 32, 4, 2, 4)),
        (64, GemmConfig(64, 64, 128, 1, 2, 4)),
    ],
)
def test_gemm(rows: int, config: GemmConfig):
    x, w, b = inputs(rows, 102, 128, torch.float16)
    for bias in (None, b):
        for gate in ("", *reference.GATES):
            want = reference.linear(x, w, bias, gate)
            got = gemm(x, rows, 1, w, bias, x.dtype, gate, config)
            assert_close(got, want, rtol=1e-2, atol=2e-1 if gate else 1e-1)
    assert not counters(x.device).any()


@pytest.mark.parametrize("gate", ["", "silu"])
def test_configurations_fit_or_are_refused(gate: str):
    bf16 = torch.bfloat16
    assert gemm_config(1, 4096, 4096, bf16, gate) is None
    assert gemm_config(MAX_GEMM_ROWS + 1, 4096, 4096, bf16, gate) is None
    assert gemm_config(2, 4096, 4096, torch.float32, gate) is None
    for n_rows in (48, 1024, 2048, 3072, 4096, 5120, 6144, 12288, 17408, 151936):
        assert gemm_config(2, n_rows, 96, bf16, gate) is None
        for n_in in (128, 640, 1024, 2048, 3072, 4096, 5120, 17408):
            for rows in (2, 16, 17, 64):
                found = gemm_config(rows, n_rows, n_in, bf16, gate)
                if found is None:
                    assert (not gate and n_in >= 4096) or n_rows > 8192
                    continue
                assert n_in % (found.block_k * found.split_k) == 0
                assert found.split_k == 1 or triton.cdiv(n_rows, 64) * triton.cdiv(rows, found.block_m) <= COUNTERS
                assert (found.block_m + 64) * found.block_k * 2 * found.num_stages <= 227 << 10
