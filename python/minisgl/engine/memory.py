"""Sizes the K/V pool from the memory that the weights and the largest steps leave."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from operator import mul
from typing import TYPE_CHECKING, Final

from minisgl.engine.graphs.capture import TAILS
from minisgl.engine.pooling import base_runner
from minisgl.engine.trial import decode_plan, draft_plan, largest_prefill
from minisgl.errors import ConfigError
from minisgl.kvcache.snapshots import ids_per_row
from minisgl.layout import FULL, MAX_DRAFT_TOKENS, WINDOW
from minisgl.rounding import ceil_div
from minisgl.triton.cublas import cublas_linear

if TYPE_CHECKING:
    from minisgl.core import BatchPlan
    from minisgl.engine.config import EngineSpec
    from minisgl.engine.runner import Parts, Runner

MIN_EVENNESS: Final = 0.75  # the smallest free memory of a rank over the largest


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on the device. `step_bytes` is the measured peak of the largest steps, 0 where it is not measured.

    `num_pages` and `page_bytes` are of each group that has pages.
    """

    num_pages: tuple[int, ...]
    page_bytes: tuple[int, ...]
    weight_bytes: int
    step_bytes: int
    free_bytes: int

    @property
    def kv_bytes(self) -> int:
        return sum(map(mul, self.num_pages, self.page_bytes))

    def with_weights(self, size: int) -> MemoryPlan:
        """Return the plan with weights of another size."""
        return replace(self, weight_bytes=size, free_bytes=self.free_bytes + self.weight_bytes - size)

    def describe(self) -> str:
        """Return one line for the log."""
        gib = 2.0**30
        parts = {"weights": self.weight_bytes, "KV cache": self.kv_bytes}
        if self.step_bytes:
            parts["largest step"] = self.step_bytes
        shares = ", ".join(f"{name} {size / gib:.2f} GiB" for name, size in parts.items())
        return f"{shares}, of {(self.free_bytes + self.weight_bytes) / gib:.2f} GiB"


def plan_memory(parts: Parts, spec: EngineSpec) -> MemoryPlan:
    """Choose the number of pages: `--num-pages`, else as many as fit and all rows can use; and those of windows.

    All ranks take the count of the rank with the least memory. The stores may have a single page: trial steps map every
    position to page 0. Raises `ConfigError` when no page fits, or when the ranks' free memory is too uneven.
    """
    m = spec.model
    device = parts.device
    comm = parts.comm
    page_bytes = tuple(store.page_bytes for store in parts.stores)
    runner, rows = base_runner(parts, spec), spec.max_running_requests
    comm.all_gather_int(0)  # ranks may share memory: wait until all have loaded their weights
    free = device.free_memory()
    trials = [largest_prefill(spec), *(decode_plan(rows, m.vocab_size, flags) for flags in (0, TAILS[-1]))]
    if parts.drafting is not None:  # a step with drafts samples after each token
        trials.append(draft_plan(min(rows, MAX_DRAFT_TOKENS // spec.max_queries), spec.max_queries))
    with cublas_linear.loading():
        step_bytes = sum(device.peak_memory(partial(_run, runner, plan)) for plan in trials)
    division = Division.of(spec, page_bytes)
    if spec.num_pages is not None:
        return MemoryPlan(division.num_pages(spec.num_pages, rows), page_bytes, parts.weight_bytes, step_bytes, free)
    require_even(comm.all_gather_int(free))
    least = min(comm.all_gather_int(int(free * spec.memory_ratio) - step_bytes))
    pages = min(division.fitting(least), rows * spec.pages_per_row)
    if pages < 1:
        raise ConfigError(
            f"no memory for the KV cache: {free >> 20} MiB are free, a step takes {step_bytes >> 20} MiB and one page "
            f"{page_bytes[FULL]} bytes; raise --memory-ratio, or use a smaller --page-size, --max-prefill-length or "
            "model"
        )
    return MemoryPlan(division.num_pages(pages, rows), page_bytes, parts.weight_bytes, step_bytes, free)


@dataclass(frozen=True, slots=True)
class Division:
    """How memory is divided between the groups of pages: for texts of `context` tokens, which each have `row_pages` of
    the groups besides FULL, and for a chunk of prompts with `chunk_pages` of them.
    """

    page_size: int
    page_bytes: tuple[int, ...]  # of each group
    context: int
    row_pages: tuple[int, ...]
    chunk_pages: tuple[int, ...]

    @classmethod
    def of(cls, spec: EngineSpec, page_bytes: tuple[int, ...]) -> Division:
        """Choose a context. If all texts have one length from 1K to 32K, it loses the fewest rows in the worst case."""
        size, window = spec.page_size, spec.model.window
        others = page_bytes[WINDOW:]
        row_pages = (0 if window is None else ids_per_row(window, size), 1)[: len(others)]
        chunk_pages = (0 if window is None else ceil_div(spec.max_step_tokens, size), 0)[: len(others)]
        tokens = sum(map(mul, row_pages, others)) * size / page_bytes[FULL]  # of FULL, in the same memory
        context = spec.context_tokens or int((1024 + tokens) * 32768 / (32768 + tokens))
        return cls(size, page_bytes, min(context, spec.max_seq_len) if others else size, row_pages, chunk_pages)

    def fitting(self, size: int) -> int:
        """Return how many pages of FULL fit in `size` bytes, with the others that belong to them."""
        full, *others = self.page_bytes
        text: int = ceil_div(self.context, self.page_size) * full + sum(map(mul, self.row_pages, others))
        reserved: int = sum(map(mul, self.chunk_pages, others))
        return max(0, size - reserved) // text * self.context // self.page_size

    def num_pages(self, pages: int, max_rows: int) -> tuple[int, ...]:
        """Return the number of pages of each group for so many of FULL; others are for twice `max_rows` at most."""
        texts = min(max(1, pages * self.page_size // self.context), 2 * max_rows)
        return (pages, *(texts * row + chunk for row, chunk in zip(self.row_pages, self.chunk_pages, strict=True)))


def require_even(free: list[int]) -> None:
    """Raise `ConfigError` if a rank has much less free memory than another, since the smallest counts for all."""
    if min(free) < MIN_EVENNESS * max(free):
        each = ", ".join(f"rank {rank} {size / 2**30:.2f} GiB" for rank, size in enumerate(free))
        raise ConfigError(
            f"the ranks' free memory is too uneven ({each}): end what else runs on the devices with less, "
            "choose others, or give --num-pages"
        )


def _run(runner: Runner, plan: BatchPlan) -> None:
    runner.launch(plan).wait()
