"""How long the next plan may wait."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from minisgl.core import StepResult
    from minisgl.scheduler.engine_protocol import StepOutput

RECENT: Final = 4  # steps whose shortest tells how long one takes
MARGIN_S: Final = 0.0015  # for planning and launching
LATE_S: Final = 0.0001  # who waits no longer than that for a result may have come too late for it


class StepClock:
    """When the device will be done with the step that it computes, told by the last ones that only decoded.

    The next step is best planned just before: whoever arrives until then is in it, and not only in the one after. If
    that was too late, the device has waited, and nothing is known of how long the step took: so everything is
    forgotten, and the next plan does not wait.
    """

    def __init__(self) -> None:
        self._started = 0.0
        self._recent: deque[float] = deque(maxlen=RECENT)

    def launch(self, now: float, is_idle: bool) -> None:
        """A step is launched; it begins at once if the device is idle."""
        if is_idle:
            self._started = now

    def wait_for(self, output: StepOutput, is_decode: bool) -> StepResult:
        """The result of the oldest step in flight."""
        asked = time.monotonic()
        result = output.wait()
        self.collect(asked, time.monotonic(), is_decode)
        return result

    def collect(self, asked: float, now: float, is_decode: bool) -> None:
        """The oldest step in flight has ended, and the one behind it begun; its result was waited for since `asked`."""
        if now - asked < LATE_S:
            self._recent.clear()
        elif is_decode:
            self._recent.append(now - self._started)
        self._started = now

    def spare(self, now: float) -> float:
        """Seconds for which the step that runs `now` will go on, less what the next one needs before it can begin."""
        return max(0.0, self._started + min(self._recent) - MARGIN_S - now) if self._recent else 0.0
