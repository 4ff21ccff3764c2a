"""What a step costs on the host: stopwatches around the scheduler's methods, put there for the measurement only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from minisgl.core import BatchPlan

if TYPE_CHECKING:
    from minisgl.core import Ints, StepResult
    from minisgl.scheduler.engine_protocol import StepOutput
    from minisgl.scheduler.scheduler import Scheduler

SKIPPED_STEPS: Final = 8  # steady steps before the first one that counts


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` inside the block: an instance attribute that hides the method of the class."""
    assert name not in vars(owner), f"{name} is hidden already"
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)


def is_steady(plan: BatchPlan) -> bool:
    """Whether a step only decodes."""
    return bool((plan.slots[:, 3] & BatchPlan.FROM_DEVICE).all())


class _TimedOutput:
    def __init__(self, output: StepOutput, waited: Callable[[float], None]) -> None:
        self._output = output
        self._waited = waited

    @property
    def awaits_masks(self) -> bool:
        return self._output.awaits_masks

    def choose(self, masks: Ints) -> None:
        self._output.choose(masks)

    def wait(self) -> StepResult:
        start = time.perf_counter()
        result = self._output.wait()
        self._waited(time.perf_counter() - start)
        return result


class HostProbe:
    """Inside `with`, takes the times of up to `steps` steady steps of `scheduler`.

    Host work of a step = plan + launch + collect, less the time blocked in `output.wait()`, and less the engine's own
    launch on a device that computes inside it (`is_async` false), where that is the model's time. A step that only
    decodes is steady; of a workload without such steps all count.
    """

    PARTS: ClassVar = ("plan_us", "launch_us", "prepare_us", "engine_launch_us", "collect_us", "wait_us", "step_us")

    def __init__(self, scheduler: Scheduler, steps: int) -> None:
        self._scheduler = scheduler
        self._limit = steps
        self._now = dict.fromkeys(self.PARTS, 0.0)
        self._rows = 0
        self._is_steady = False
        self._steady: list[list[float]] = []  # rows, then PARTS
        self._other: list[list[float]] = []
        self._stack = ExitStack()

    def __enter__(self) -> HostProbe:
        scheduler, engine = self._scheduler, self._scheduler.engine
        plan, prepare, launch = scheduler.plan, engine.prepare, engine.launch

        def timed_plan() -> Any:
            start = time.perf_counter()
            step = plan()
            self._add("plan_us", time.perf_counter() - start)
            return step

        def timed_prepare(plan: BatchPlan) -> Any:
            start = time.perf_counter()
            batch = prepare(plan)
            self._add("prepare_us", time.perf_counter() - start)
            self._rows, self._is_steady = len(plan.slots), is_steady(plan)
            return batch

        def timed_launch(batch: Any) -> StepOutput:
            start = time.perf_counter()
            output = launch(batch)
            self._add("engine_launch_us", time.perf_counter() - start)
            return _TimedOutput(output, lambda seconds: self._add("wait_us", seconds))

        self._stack.enter_context(replaced(scheduler, "plan", timed_plan))
        self._stack.enter_context(replaced(scheduler, "launch", self._timed("launch_us", scheduler.launch)))
        self._stack.enter_context(replaced(scheduler, "collect", self._timed("collect_us", scheduler.collect)))
        self._stack.enter_context(replaced(engine, "prepare", timed_prepare))
        self._stack.enter_context(replaced(engine, "launch", timed_launch))
        self._stack.enter_context(replaced(scheduler, "step", self._timed_step(scheduler.step)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _add(self, part: str, seconds: float) -> None:
        self._now[part] += seconds * 1e6

    def _timed(self, part: str, method: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def timed(argument: Any) -> Any:
            start = time.perf_counter()
            result = method(argument)
            self._add(part, time.perf_counter() - start)
            return result

        return timed

    def _timed_step(self, step: Callable[..., None]) -> Callable[..., None]:
        def timed(timeout: float = 0.0) -> None:
            self._now, self._rows = dict.fromkeys(self.PARTS, 0.0), 0
            start = time.perf_counter()
            step(timeout)
            self._add("step_us", time.perf_counter() - start)
            if self._rows:
                (self._steady if self._is_steady else self._other).append([self._rows, *self._now.values()])

        return timed

    def figures(self) -> dict[str, float | int | bool]:
        """Medians over the steps, microseconds; `steps` says how many there were."""
        steady = self._steady[SKIPPED_STEPS:][: self._limit]
        samples = np.array(steady or self._other[: self._limit], np.float64)
        rows, parts = samples[:, 0], dict(zip(self.PARTS, samples[:, 1:].T, strict=True))
        host = parts["plan_us"] + parts["launch_us"] + parts["collect_us"] - parts["wait_us"]
        if not self._scheduler.engine.is_async:
            host = host - parts["engine_launch_us"]
        return {
            "steps": len(samples),
            "decode_only": bool(steady),
            "rows": float(np.median(rows)),
            "host_us": float(np.median(host)),
            **{name: float(np.median(values)) for name, values in parts.items()},
        }
