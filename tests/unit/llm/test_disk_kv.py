"""K/V pages on disk: the same tokens, found again by the next process, and no harm from damaged or foreign files."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from minisgl import LLM, SamplingParams
from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.core.errors import ConfigError
from minisgl.kvcache import storage
from minisgl.scheduler.budget import LoadBudget, Pace
from support.next_tokens import write_hybrid

pytestmark = pytest.mark.usefixtures("fixed_costs")

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=6, ignore_eos=True)
PROMPTS = [f"Story number {i}. " + "The fox ran over the hill and saw a bird. " * 13 for i in range(3)]
SALTED = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, cache_salt="mine")
TIGHT: dict[str, Any] = {"device": "cpu", "threads": 1, "num_pages": 16}  # one prompt of about 150 tokens, and no more


def tokens(llm: LLM) -> list[list[int]]:
    return [llm.generate(text, params)[0].token_ids for params in (GREEDY, SAMPLED, SALTED) for text in PROMPTS]


def counts(llm: LLM) -> tuple[int, int, int]:
    """Pages stored, loaded and lost."""
    (tier,) = llm.scheduler.cache.prefix.tiers
    return tier.stored_pages, tier.loaded_pages, tier.lost_pages


@pytest.fixture(scope="module")
def want() -> list[list[int]]:
    with LLM(**TIGHT) as llm:
        return tokens(llm)


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(storage._log, "warning", lambda text, *values: said.append(text % values))
    return said


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A disk that is used, however busy it is."""
    monkeypatch.setattr(storage, "_page_seconds", lambda folder, stride: 1e-6)
    return {**TIGHT, "disk_kv": f"{tmp_path / 'kv'}:50M"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": 1, "num_pages": 256},
        {"page_size": 4, "num_pages": 64, "overlap": True},
        pytest.param({"page_size": 64, "num_pages": 4, "mixed_batches": False}, marks=pytest.mark.slow),
        pytest.param({"dtype": "bfloat16"}, marks=pytest.mark.slow),
        {"quantization": "int8", "page_size": 128, "num_pages": 2},
        {"kv_cache_dtype": "fp8"},
        {"attention_backend": "cpu", "speculate": "ngram"},
    ],
    ids=str,
)
def test_the_next_process_finds_what_was_evicted(options: dict[str, Any], disk: dict[str, Any]) -> None:
    with LLM(**{**TIGHT, **options}) as llm:
        alone = tokens(llm)
    with LLM(**{**disk, **options}) as llm:
        assert tokens(llm) == alone
        assert counts(llm)[1] > 0
    with LLM(**{**disk, **options}) as llm:
        assert tokens(llm) == alone
        page = llm.scheduler.engine.page_size
        prompt_tokens = sum(len(llm.get_tokenizer().encode(text)) for text in PROMPTS)
        # Greedy and sampled requests share pages; salted ones have their own.
        assert llm.scheduler.stats.cached_tokens >= 3 * (prompt_tokens - len(PROMPTS) * page)
        assert counts(llm)[1] >= 2 * (prompt_tokens // page - len(PROMPTS)) and counts(llm)[2] == 0


@pytest.mark.parametrize("is_hybrid", [pytest.param(False, marks=pytest.mark.slow), True])
def test_two_ranks_find_their_shards(is_hybrid: bool, tmp_path: Path, warnings: list[str]) -> None:
    """Of pages, and of recurrent states with their snapshots."""
    folder = tmp_path / "model"
    folder.mkdir()
    model = {"model": str(write_hybrid(folder)), "dummy_weight": True} if is_hybrid else {}
    options = {
        **TIGHT,
        **model,
        "tp": 2,
        "max_running_requests": 2,
        "page_size": 8,
        "num_pages": 64 if is_hybrid else 32,
        "disk_kv": f"{tmp_path / 'kv'}:50M",
    }
    tmp_path /= "kv"
    with LLM(**options) as llm:
        alone = tokens(llm)
    with LLM(**options) as llm:
        assert tokens(llm) == alone
        assert counts(llm)[1] > 0 and counts(llm)[2] == 0
        assert sorted(path.name for path in tmp_path.iterdir()) == ["index", "rank0.kv", "rank1.kv"]
        scramble(tmp_path / "rank1.kv")  # of which rank 0 can only know by the results
        assert tokens(llm) == alone
        assert counts(llm)[2] > 0
    assert not warnings, "rank 0 has lost pages"
    with pytest.raises(ConfigError, match="holds pages with ranks 2, but this server has 1: give another folder"):
        LLM(**{**options, "tp": 1})


@pytest.mark.parametrize("more", [{}, {"overlap": True}, pytest.param({"tp": 2}, marks=pytest.mark.slow)], ids=str)
def test_loads_in_parts_change_nothing(
    more: dict[str, Any], disk: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page in each step, while other prompts are computed and answered."""
    monkeypatch.setattr(Pace, "load_budget", lambda *_: LoadBudget(0.0, 0.0))
    with LLM(**TIGHT) as llm:
        alone = [done.token_ids for done in llm.generate(PROMPTS, GREEDY)]
    roomy = {"num_pages": 80, "page_size": 8, **more}
    for _ in range(2):
        with LLM(**{**disk, **roomy}) as llm:
            assert [done.token_ids for done in llm.generate(PROMPTS, GREEDY)] == alone
            loaded = counts(llm)[1]
    assert loaded > 40


def scramble(path: Path) -> None:
    """Change a byte in each KiB after the header."""
    data = bytearray(path.read_bytes())
    for at in range(storage.HEADER_BYTES + 100, len(data), 1024):
        data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("quantization", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_damaged_pages_are_computed(
    disk: dict[str, Any], tmp_path: Path, warnings: list[str], quantization: str
) -> None:
    disk["quantization"] = quantization
    with LLM(**disk) as llm:
        alone = tokens(llm)
    scramble(tmp_path / "kv" / "rank0.kv")
    with LLM(**disk) as llm:
        assert tokens(llm) == alone
        assert counts(llm)[2] > 0
    assert warnings and all("is lost and will be computed" in line for line in warnings)
    warnings.clear()
    with LLM(**disk) as llm:  # what was computed again is on the disk
        assert tokens(llm) == alone
        assert counts(llm)[1] > 0 and counts(llm)[2] == 0 and not warnings


def test_files_of_different_times_are_not_believed(disk: dict[str, Any], tmp_path: Path, want: list[list[int]]) -> None:
    """As after a crash: the index is of one moment, the pages are of another."""
    folder = tmp_path / "kv"
    with LLM(**disk) as llm:
        tokens(llm)
    shutil.copy(folder / "index", tmp_path / "old")
    with LLM(**disk) as llm:
        llm.scheduler.cache.flush()
        llm.generate([f"{i} {text}" for i, text in enumerate(PROMPTS)], GREEDY)
    shutil.copy(tmp_path / "old", folder / "index")
    with LLM(**disk) as llm:
        assert tokens(llm) == want
        assert counts(llm)[2] > 0


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_failing_disk_costs_log_lines(
    disk: dict[str, Any], want: list[list[int]], monkeypatch: pytest.MonkeyPatch, warnings: list[str], call: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with LLM(**disk) as llm:
        monkeypatch.setattr(storage.os, call, fail)
        assert tokens(llm) == want
        assert tokens(llm) == want
    assert sum("cannot be written" in line for line in warnings) == (call == "pwritev")
    assert sum("is lost" in line for line in warnings) > 0


def test_what_cannot_work_is_refused_in_a_sentence(disk: dict[str, Any], tmp_path: Path) -> None:
    def refusal(**options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            LLM(**{**disk, **options})
        return str(caught.value)

    with LLM(**disk):
        assert "is in use by another server" in refusal()
    assert "page size 16, but this server has 8" in refusal(page_size=8)
    assert "K/V in torch.float32, but this server has torch.bfloat16" in refusal(dtype="bfloat16")
    assert "is not PATH:SIZE" in refusal(disk_kv=str(tmp_path))
    assert "a page takes" in refusal(disk_kv=f"{tmp_path}:5000")
    assert "lacks space: 1000000.0 GB are needed" in refusal(disk_kv=f"{tmp_path}:1000000000m")
    assert sum(path.stat().st_size for path in tmp_path.glob("*.kv")) < 10**6, "the attempt has left a large file"
    assert "cannot be used: File exists" in refusal(disk_kv=f"{__file__}:10M")
    assert "cache_type=naive has none" in refusal(cache_type="naive")
    assert "host_kv is for a GPU" in refusal(host_kv=10**9)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "rank0.kv").write_text("my diary")
    assert "is not a file of K/V pages" in refusal(disk_kv=f"{tmp_path / 'other'}:10M")
    assert (tmp_path / "other" / "rank0.kv").read_text() == "my diary"


def test_pages_of_another_model_are_refused(disk: dict[str, Any], tmp_path: Path) -> None:
    with LLM(**disk):
        pass
    other = tmp_path / "other"
    shutil.copytree(BUILTIN_MODEL, other)
    (path,) = other.glob("*.safetensors")
    path.chmod(0o600)
    with LLM(str(other), **disk):
        pass  # the same model elsewhere
    data = bytearray(path.read_bytes())
    size = int.from_bytes(data[:8], "little")
    data[8 + size :] = bytes(byte ^ 1 for byte in data[8 + size :])  # as many tensors, with other numbers
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="holds pages with model"):
        LLM(str(other), **disk)
