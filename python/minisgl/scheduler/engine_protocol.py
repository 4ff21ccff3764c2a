"""What the scheduler needs of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from minisgl.core import BatchPlan, Ints, StepCosts, StepResult
    from minisgl.params import Limits


class StepOutput(Protocol):
    """A launched batch."""

    @property
    def awaits_masks(self) -> bool:
        """Whether sampling waits for masks that the plan did not have."""

    def sample(self, masks: Ints) -> None:
        """Start sampling with these masks [M, W], before the next step is launched."""

    def wait(self) -> StepResult:
        """What it computed; blocks until it is done."""


class StepEngine(Protocol):
    """What the scheduler needs of an engine (`engine.Engine`, or a fake one in tests)."""

    num_pages: int
    page_size: int
    max_running_requests: int
    limits: Limits
    eos_token_ids: frozenset[int]
    is_async: bool  # it works while the host plans, and may be brought masks after a launch

    def launch(self, plan: BatchPlan) -> StepOutput:
        """Start a step behind those launched before."""

    def step_costs(self) -> StepCosts | None:
        """What a step costs, as far as it was measured at the start."""

    def shutdown(self) -> None:
        """Leave the other ranks."""

    def describe(self) -> dict[str, str | int | float]: ...
