"""How much memory the state of texts gets, of layers with and without a window."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minisgl.core.rounding import ceil_div
from minisgl.engine.config import EngineSpec
from minisgl.engine.fit import Checkpoint, Footprint
from minisgl.engine.memory import least_blocks, plan_blocks, row_pages, rows_at_once
from minisgl.engine.resolve import resolve
from minisgl.settings.options import EngineConfig
from minisgl.tools.bench.shapes import SHAPES

GIB = 2**30


def page_bytes(folder: Path, shape: str, **options: object) -> tuple[EngineSpec, tuple[int, ...]]:
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    config = EngineConfig(model=str(folder), dummy_weight=True, device="cpu", page_size=64, **options)
    return resolve(config, "cpu", 2048), Footprint.of(Checkpoint.read(config), config, "cpu", 2).pages


def test_gemma_takes_less_than_half_of_the_memory_for_a_request(tmp_path: Path) -> None:
    windows, each = page_bytes(tmp_path, "gemma-3-27b")
    whole = sum(each)
    assert len(page_bytes(tmp_path, "gemma-3-27b", disk_kv=f"{tmp_path}:1G")[1]) == len(each) == 2
    assert whole == 64 * 62 * 2 * 16 * 128 * 2
    assert ceil_div(8192, 64) * each[0] + row_pages(windows, each)[0] * each[1] < 0.3 * ceil_div(8192, 64) * whole


@pytest.mark.parametrize("size", [8 * GIB, 80 * GIB, 80 * GIB + 12345])
@pytest.mark.parametrize("shape", ["gemma-3-27b", "qwen3-8b"])
def test_what_fits_is_nearly_all_and_no_more(tmp_path: Path, shape: str, size: int) -> None:
    spec, each = page_bytes(tmp_path, shape)
    block, blocks = plan_blocks(spec, each, size)
    assert size - block < blocks.count * block <= size and len(blocks.pages) == 1 + (spec.model.window is not None)
    for tokens in (1024, 8192):
        rows, texts = rows_at_once(spec, blocks, tokens), [ceil_div(tokens, 64), *row_pages(spec, blocks.pages)]
        chunk = 0 if spec.model.window is None else 2048 // 64 * each[1]
        needed = sum(n * of for n, of in zip(texts, each, strict=True))
        assert rows == 256 or 0.9 * (size - chunk) <= (rows + 1) * needed
        assert rows * needed <= size


def test_no_more_than_all_rows_need(tmp_path: Path) -> None:
    spec, each = page_bytes(tmp_path, "gemma-3-27b", max_running_requests=2, max_seq_len=4096)
    _, blocks = plan_blocks(spec, each, 1 << 60)
    pages = blocks.pages
    most = ceil_div(2 * 64, pages[0]) + 4 * row_pages(spec, pages)[0] + 2048 // 64
    assert least_blocks(spec, pages) < blocks.count == most
    spec, _ = page_bytes(tmp_path, "gemma-3-27b", num_pages=100)
    assert plan_blocks(spec, each, 0)[1].count == 100 // pages[0]
