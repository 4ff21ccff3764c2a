"""GEMV and GEMM of few rows: every shape of tile, tails in both dimensions, and counters left at zero."""

from __future__ import annotations

import pytest
import torch
import triton
from torch.testing import assert_close

from minisgl.ops import reference
from minisgl.triton import ops
from minisgl.triton.launch import COUNTERS, counters
from minisgl.triton.linear import GemvConfig, SkinnyConfig, gemv, gemv_rows, skinny_config, skinny_gemm


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
    monkeypatch.setattr(ops, "MAX_FUSED_INPUTS", fused)
    x, w, b = inputs(1, 26, 200, torch.float32)
    residual, norm = torch.randn(1, 200) if has_residual else None, torch.rand(200)
    for gate in ("", "silu"):
        want = reference.add_norm_linear(x, residual, norm, 1e-6, w, b, gate)
        given = None if residual is None else residual.clone()
        for got, expected in zip(ops.add_norm_linear(x, given, norm, 1e-6, w, b, gate), want, strict=True):
            assert_close(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [2, 3])
def test_gemv_of_a_few_rows(rows: int):
    x, w, b = inputs(rows, 13, 200, torch.float32)
    for bias in (None, b):
        assert_close(gemv_rows(x, w, bias), reference.linear(x, w, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("config", [SkinnyConfig(32, 64, 1, 2, 4), SkinnyConfig(64, 32, 2, 2, 4)])
@pytest.mark.parametrize("rows", [2, 16])
def test_skinny_gemm(config: SkinnyConfig, rows: int):
    x, w, b = inputs(rows, 102, 128, torch.float16)
    for bias in (None, b):
        assert_close(skinny_gemm(x, w, bias, config), reference.linear(x, w, bias), rtol=1e-2, atol=1e-1)
        for gate in reference.GATES if config.split_k == 1 else ():
            want = reference.linear(x, w, bias, gate)
            assert_close(skinny_gemm(x, w, bias, config, gate=gate), want, rtol=1e-2, atol=2e-1)
    assert not counters(x.device).any()


@pytest.mark.parametrize("is_gated", [False, True])
def test_configurations_fit_or_are_refused(is_gated: bool):
    def config(rows: int, n_out: int, n_in: int, dtype: torch.dtype = torch.bfloat16) -> SkinnyConfig | None:
        return skinny_config(rows, n_out, n_in, dtype, is_gated)

    assert config(1, 4096, 4096) is None and config(17, 4096, 4096) is None
    assert config(2, 4096, 4096, torch.float32) is None
    for n_out in (48, 1024, 2048, 3072, 4096, 5120, 6144, 12288, 17408, 151936):
        assert config(2, n_out, 96) is None
        for n_in in (1024, 3072, 4096, 5120, 17408):
            found = config(2, n_out, n_in)
            if found is not None:
                assert n_in % (found.block_k * found.split_k) == 0
                assert found.split_k == 1 or not is_gated
                assert found.split_k == 1 or triton.cdiv(n_out, found.block_n) <= COUNTERS
    assert config(16, 3072 if is_gated else 4096, 1024) is not None
