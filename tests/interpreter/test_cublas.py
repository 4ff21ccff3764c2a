"""What the search for GEMM algorithms decides, with a fake cuBLASLt and fake times."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from minisgl.triton import cublas
from minisgl.triton.cublas import Shape

Pace = Callable[[str, int], float]
"""Time of "default" or of an algorithm with a number of rows."""


class FakeGemm:
    """Algorithms are names; "wrong" computes nothing, "refused" does not start, "small" takes no odd sizes."""

    def __init__(self, library: object, shape: Shape) -> None:
        self.rows, self.name, self.calls = shape.rows, "", 0

    def candidates(self, count: int) -> list[str]:
        return ["first", "refused", "wrong", "small"]

    def use(self, name: str) -> None:
        self.name = name

    def resize(self, rows: int) -> bool:
        self.rows = rows
        return self.name != "small" or rows % 16 == 0

    def run(self, x: Tensor, weight: Tensor, out: Tensor) -> bool:
        assert len(x) == self.rows
        self.calls += 1
        if self.name in ("first", "small"):
            torch.mm(x, weight.T, out=out)
        return self.name != "refused"


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[Pace], cublas.CublasLinear]:
    """A tuner that finds the times that it is given."""
    current: list[FakeGemm] = []

    def gemm(library: object, shape: Shape) -> FakeGemm:
        current.append(FakeGemm(library, shape))
        return current[-1]

    monkeypatch.setattr(cublas, "Library", lambda device: None)
    monkeypatch.setattr(cublas, "LtGemm", gemm)
    monkeypatch.setattr(cublas, "_can_search", lambda shape, weight: True)
    monkeypatch.setattr(cublas, "COLD_BYTES", 64)

    def made(pace: Pace) -> cublas.CublasLinear:
        class Paced(cublas.CublasLinear):
            def _times(self, calls: list[cublas.Call], count: int, repeats: int) -> list[float]:
                found = []
                for call in calls:
                    before, rows = current[-1].calls, current[-1].rows
                    call(0)
                    found.append(pace(current[-1].name if current[-1].calls > before else "default", rows))
                return found

        return Paced()

    return made


def tune(tuned: cublas.CublasLinear, *sizes: int) -> Tensor:
    torch.manual_seed(0)
    weight = torch.randn(24, 16)
    with tuned.autotuning():
        for rows in sizes:
            tuned(torch.randn(rows, 16), weight)
    return weight


def algorithms(tuned: cublas.CublasLinear) -> dict[int, str | None]:
    return {shape.rows: gemm and gemm.name for shape, gemm in tuned.chosen.items()}


def test_the_fastest_right_one_is_taken_if_it_is_clearly_faster(make):
    times = {"default": 1.0, "wrong": 0.1, "first": 0.9, "small": 0.8}
    tuned = make(lambda name, rows: times[name])
    weight = tune(tuned, 32, 40)
    assert algorithms(tuned) == {32: "small", 40: "small"}
    x = torch.randn(32, 16)
    torch.testing.assert_close(tuned(x, weight), F.linear(x, weight))
    times |= {"small": 0.97, "first": 0.98}
    tune(tuned, 48)
    assert algorithms(tuned)[48] is None


def test_without_tuning_and_without_search_nothing_is_tried(make):
    tuned = make(lambda name, rows: {"default": 1.0}.get(name, 0.5))
    tuned(torch.randn(32, 16), torch.randn(24, 16))
    tuned.search = False
    tune(tuned, 32)
    assert not tuned.chosen and not tuned._is_tuning


def test_a_prefill_size_serves_a_few_fewer_rows(make):
    slow_at = {4096 * 26 // 32}
    tuned = make(lambda name, rows: 1.0 if name == "default" else 2.0 if rows in slow_at else 0.5)
    weight = tune(tuned, 4096)
    assert algorithms(tuned) == {2048: "first", 4096: "first"}
    assert {shape.rows: bool(gemm) for shape, gemm in tuned._buckets.items()} == {2048: True, 4096: False}
    for rows, is_ours in ((2047, True), (1536, True), (1535, False), (4095, False), (4096, True), (500, False)):
        before = sum(gemm.calls for gemm in tuned.chosen.values())
        x = torch.randn(rows, 16)
        torch.testing.assert_close(tuned(x, weight), F.linear(x, weight))
        assert sum(gemm.calls for gemm in tuned.chosen.values()) == before + is_ours, rows
    assert sorted(algorithms(tuned)) == [2048, 4096]


def test_other_sizes_of_a_bucket_are_not_searched_again(make):
    tuned = make(lambda name, rows: 1.0 if name == "default" else 0.5)
    weight = tune(tuned, 4096, 3584, 2048, 1536, 2304)
    assert algorithms(tuned) == {2048: "first", 4096: "first", 1536: "first"}
    for rows, is_ours in ((3584, True), (2304, False)):
        before = sum(gemm.calls for gemm in tuned.chosen.values())
        x = torch.randn(rows, 16)
        torch.testing.assert_close(tuned(x, weight), F.linear(x, weight))
        assert sum(gemm.calls for gemm in tuned.chosen.values()) == before + is_ours, rows


def test_a_search_without_memory_is_none(make, monkeypatch: pytest.MonkeyPatch):
    def full(*args: object, **kwargs: object) -> Tensor:
        raise torch.OutOfMemoryError("full")

    tuned = make(lambda name, rows: 0.5)
    x, weight = torch.randn(32, 16), torch.randn(24, 16)
    monkeypatch.setattr(cublas.torch, "empty_like", full)
    with tuned.autotuning():
        torch.testing.assert_close(tuned(x, weight), F.linear(x, weight))
    assert algorithms(tuned) == {32: None}


def test_kernels_for_fewer_rows_are_loaded_once(make, monkeypatch: pytest.MonkeyPatch):
    launched: list[tuple[int, bool]] = []

    def recorded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        launched.append((len(x), bias is not None))
        return torch.nn.functional.linear(x, weight, bias)

    tuned = make(lambda name, rows: 1.0)
    monkeypatch.setattr(cublas, "_can_tune", lambda weight: True)
    monkeypatch.setattr(cublas, "F", SimpleNamespace(linear=recorded))
    weight, bias = torch.randn(24, 16), torch.randn(24)
    tuned(torch.randn(90, 16), weight, bias)
    assert launched == [(90, True)], "while serving nothing is loaded"
    launched.clear()
    with tuned.autotuning():
        for rows in (40, 30, 90):
            tuned(torch.randn(rows, 16), weight, bias)
    assert [rows for rows, _ in launched] == [*range(2, 41), 30, *range(41, 91)]
    assert all(is_biased for _, is_biased in launched) and not tuned.chosen
    launched.clear()
    with tuned.autotuning():
        tuned(torch.randn(20, 16), weight)
    assert [rows for rows, _ in launched][:18] == [*range(2, 20)], "without a bias they are other kernels"
