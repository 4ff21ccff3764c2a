"""How memory is divided between the pages of layers with and without a window."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minisgl.bench.shapes import SHAPES
from minisgl.engine.config import EngineSpec, resolve
from minisgl.engine.fit import Checkpoint, Footprint
from minisgl.engine.memory import Division
from minisgl.rounding import ceil_div
from minisgl.settings.options import EngineConfig

GIB = 2**30


def division(folder: Path, shape: str, **options: object) -> tuple[EngineSpec, Division]:
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    config = EngineConfig(model=str(folder), dummy_weight=True, device="cpu", page_size=64, **options)
    spec = resolve(config, "cpu", 2048)
    return spec, Division.of(spec, Footprint.of(Checkpoint.read(config), config, "cpu", 2).pages)


def test_gemma_takes_less_than_half_of_the_memory_for_a_request(tmp_path: Path) -> None:
    _, windows = division(tmp_path, "gemma-3-27b")
    spec, whole = division(tmp_path, "gemma-3-27b", disk_kv=f"{tmp_path}:1G")
    assert spec.model.window is None and sum(windows.page_bytes) == sum(whole.page_bytes) == 64 * 62 * 2 * 16 * 128 * 2
    text = ceil_div(8192, 64) * windows.page_bytes[0] + windows.row_pages[0] * windows.page_bytes[1]
    assert text < 0.3 * ceil_div(8192, 64) * whole.page_bytes[0]
    assert 4096 < windows.context < 16384


@pytest.mark.parametrize("size", [0, GIB, 8 * GIB, 80 * GIB, 80 * GIB + 12345])
@pytest.mark.parametrize("shape", ["gemma-3-27b", "qwen3-8b"])
def test_what_fits_is_nearly_all_and_no_more(tmp_path: Path, shape: str, size: int) -> None:
    spec, found = division(tmp_path, shape, context_tokens=4096)
    pages = found.fitting(size)
    if not pages:
        assert size <= GIB
        return
    num_pages = found.num_pages(pages, 256)
    used = sum(count * each for count, each in zip(num_pages, found.page_bytes, strict=True))
    text = used / pages * found.context / 64
    assert size - text < used <= size
    assert len(num_pages) == 1 + (spec.model.window is not None)
    if spec.model.window is not None:
        rows = (num_pages[1] - 2048 // 64) / found.row_pages[0]
        assert rows == pages * 64 // 4096
