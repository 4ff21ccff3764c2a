"""Sizes the K/V pool from the memory that the weights and the largest steps leave."""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Final

from minisgl.core.errors import ConfigError
from minisgl.core.layout import FULL, MAX_DRAFT_TOKENS, WINDOW
from minisgl.core.rounding import ceil_div
from minisgl.engine.graphs.capture import TAILS
from minisgl.engine.pooling import base_runner
from minisgl.engine.trial import decode_plan, draft_plan, largest_prefill
from minisgl.kernels.triton.cublas import cublas_linear
from minisgl.kvcache.arena import Blocks, divide
from minisgl.kvcache.snapshots import ids_per_row

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minisgl.core.plan import BatchPlan
    from minisgl.engine.config import EngineSpec
    from minisgl.engine.runner import Parts, Runner

MIN_EVENNESS: Final = 0.75  # the smallest free memory of a rank over the largest


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on the device. `step_bytes` is the measured peak of the largest steps, 0 where it is not measured."""

    num_blocks: int
    block_bytes: int
    weight_bytes: int
    step_bytes: int
    free_bytes: int

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

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
    """Choose the number of blocks: those of `--num-pages`, else as many as fit and all rows can use.

    All ranks take the count of the rank with the least memory. The store may have a single block: trial steps map every
    position to page 0. Raises `ConfigError` when no text fits, or when the ranks' free memory is too uneven.
    """
    m = spec.model
    device = parts.device
    comm = parts.comm
    runner, rows = base_runner(parts, spec), spec.max_running_requests
    comm.all_gather_int(0)  # ranks may share memory: wait until all have loaded their weights
    free = device.free_memory()
    trials = [largest_prefill(spec), *(decode_plan(rows, m.vocab_size, flags) for flags in (0, TAILS[-1]))]
    if parts.drafting is not None:  # a step with drafts samples after each token
        trials.append(draft_plan(min(rows, MAX_DRAFT_TOKENS // spec.max_queries), spec.max_queries))
    with cublas_linear.loading():
        step_bytes = sum(device.peak_memory(partial(_run, runner, plan)) for plan in trials)
    least = 0
    if spec.num_pages is None:
        require_even(comm.all_gather_int(free))
        least = min(comm.all_gather_int(int(free * spec.memory_ratio) - step_bytes))
    size, blocks = plan_blocks(spec, parts.store.page_bytes, least)
    if blocks.count < (needed := least_blocks(spec, blocks.pages)):
        raise ConfigError(
            f"no memory for the KV cache: {free >> 20} MiB are free, a step takes {step_bytes >> 20} MiB, and the "
            f"state of one request {needed * size} bytes; raise --memory-ratio or --num-pages, or use a smaller "
            "--page-size, --max-prefill-length or model"
        )
    return MemoryPlan(blocks.count, size, parts.weight_bytes, step_bytes, free)


def row_pages(spec: EngineSpec, pages: Sequence[int]) -> list[int]:
    """Return how many pages of WINDOW, and of STATE, a row has, in a model with so many groups of `pages`."""
    window = spec.model.window
    return [0 if window is None else ids_per_row(window, spec.page_size), 1][: len(pages) - 1]


def least_blocks(spec: EngineSpec, pages: Sequence[int]) -> int:
    """Return the blocks without which no request runs, where a block has so many `pages` of each group."""
    return 1 + sum(map(ceil_div, row_pages(spec, pages), pages[WINDOW:]))


def plan_blocks(spec: EngineSpec, page_bytes: Sequence[int], memory: int) -> tuple[int, Blocks]:
    """Return the bytes of a block, and the blocks that fit in `memory`, or that `--num-pages` asks for.

    They are no more than all rows need: for the longest texts, and twice for what a row has of the groups besides FULL.
    """
    size, pages = divide(page_bytes)
    if spec.num_pages is not None:
        return size, Blocks(ceil_div(spec.num_pages, pages[FULL]), pages)
    rows, others = spec.max_running_requests, sum(map(ceil_div, row_pages(spec, pages), pages[WINDOW:]))
    needed = ceil_div(rows * spec.pages_per_row, pages[FULL]) + 2 * rows * others
    return size, Blocks(min(max(0, memory) // size, needed + _chunk_blocks(spec, pages)), pages)


def rows_at_once(spec: EngineSpec, blocks: Blocks, tokens: int) -> int:
    """Return how many requests of so many tokens there is memory for, at most `--max-running-requests`."""
    needs = [ceil_div(tokens, spec.page_size), *row_pages(spec, blocks.pages)]
    row = sum(Fraction(n, count) for n, count in zip(needs, blocks.pages, strict=True))
    return min(spec.max_running_requests, int(max(0, blocks.count - _chunk_blocks(spec, blocks.pages)) / row))


def _chunk_blocks(spec: EngineSpec, pages: Sequence[int]) -> int:
    """Return the blocks for what the prompts of a step need of WINDOW besides what rows have."""
    return 0 if spec.model.window is None else ceil_div(ceil_div(spec.max_step_tokens, spec.page_size), pages[WINDOW])


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
