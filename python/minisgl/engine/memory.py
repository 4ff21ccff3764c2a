"""Sizes the K/V pool from the memory that the weights and the largest steps leave."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from minisgl.engine.graphs.capture import TAILS
from minisgl.engine.pooling import base_runner
from minisgl.engine.trial import decode_plan, draft_plan, largest_prefill
from minisgl.errors import ConfigError
from minisgl.layout import MAX_DRAFT_TOKENS
from minisgl.triton.cublas import cublas_linear

if TYPE_CHECKING:
    from minisgl.core import BatchPlan
    from minisgl.engine.config import EngineSpec
    from minisgl.engine.runner import Parts, Runner

MIN_EVENNESS: Final = 0.75  # the smallest free memory of a rank over the largest


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes on the device. `step_bytes` is the measured peak of the largest steps, 0 where it is not measured."""

    num_pages: int
    page_bytes: int
    weight_bytes: int
    step_bytes: int
    free_bytes: int

    def with_weights(self, size: int) -> MemoryPlan:
        """Return the plan with weights of another size."""
        return replace(self, weight_bytes=size, free_bytes=self.free_bytes + self.weight_bytes - size)

    def describe(self) -> str:
        """Return one line for the log."""
        gib = 2.0**30
        parts = {"weights": self.weight_bytes, "KV cache": self.num_pages * self.page_bytes}
        if self.step_bytes:
            parts["largest step"] = self.step_bytes
        shares = ", ".join(f"{name} {size / gib:.2f} GiB" for name, size in parts.items())
        return f"{shares}, of {(self.free_bytes + self.weight_bytes) / gib:.2f} GiB"


def plan_memory(parts: Parts, spec: EngineSpec) -> MemoryPlan:
    """Choose the number of pages of the pool: `--num-pages`, else as many as fit and all rows can use.

    All ranks take the count of the rank with the least memory. `parts.store` may have a single page: trial steps map
    every position to page 0. Raises `ConfigError` when no page fits, or when the ranks' free memory is too uneven.
    """
    m = spec.model
    device = parts.device
    comm = parts.comm
    page_bytes = parts.store.page_bytes
    weight_bytes = parts.weight_bytes
    runner, rows = base_runner(parts, spec), spec.max_running_requests
    comm.all_gather_int(0)  # ranks may share memory: wait until all have loaded their weights
    free = device.free_memory()
    trials = [largest_prefill(spec), *(decode_plan(rows, m.vocab_size, flags) for flags in (0, TAILS[-1]))]
    if parts.drafting is not None:  # a step with drafts samples after each token
        trials.append(draft_plan(min(rows, MAX_DRAFT_TOKENS // spec.max_queries), spec.max_queries))
    with cublas_linear.loading():
        step_bytes = sum(device.peak_memory(partial(_run, runner, plan)) for plan in trials)
    if spec.num_pages is not None:
        return MemoryPlan(spec.num_pages, page_bytes, weight_bytes, step_bytes, free)
    require_even(comm.all_gather_int(free))
    fitting = min(comm.all_gather_int((int(free * spec.memory_ratio) - step_bytes) // page_bytes))
    pages = min(fitting, rows * spec.pages_per_row)
    if pages < 1:
        raise ConfigError(
            f"no memory for the KV cache: {free >> 20} MiB are free, a step takes {step_bytes >> 20} MiB and one page "
            f"{page_bytes} bytes; raise --memory-ratio, or use a smaller --page-size, --max-prefill-length or model"
        )
    return MemoryPlan(pages, page_bytes, weight_bytes, step_bytes, free)


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
