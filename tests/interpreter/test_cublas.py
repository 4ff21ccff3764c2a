"""Kernels of cuBLAS are loaded once, before the first request."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from minisgl.kernels.triton import cublas


def test_kernels_for_fewer_rows_are_loaded_once(monkeypatch: pytest.MonkeyPatch):
    launched: list[tuple[int, bool]] = []

    def recorded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        launched.append((len(x), bias is not None))
        return torch.nn.functional.linear(x, weight, bias)

    linear = cublas.CublasLinear()
    monkeypatch.setattr(cublas, "_can_load", lambda weight: True)
    monkeypatch.setattr(cublas, "F", SimpleNamespace(linear=recorded))
    weight, bias = torch.randn(24, 16), torch.randn(24)
    linear(torch.randn(90, 16), weight, bias)
    assert launched == [(90, True)], "nothing is loaded while serving"
    launched.clear()
    with linear.loading():
        for rows in (40, 30, 90):
            linear(torch.randn(rows, 16), weight, bias)
    assert [rows for rows, _ in launched] == [*range(2, 41), 30, *range(41, 91)]
    assert all(is_biased for _, is_biased in launched)
    launched.clear()
    with linear.loading():
        linear(torch.randn(20, 16), weight)
    assert [rows for rows, _ in launched][:18] == [*range(2, 20)], "without a bias the kernels are others"
