"""`minisgl replay`: runs a scheduler again on the inputs of a record (`scheduler/record.py`), without model or device.

It must make the same plans. Then the Engine view of the page can show any step.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import minisgl
from minisgl.api.gate import Access, Gate
from minisgl.api.page import page_routes
from minisgl.core import BatchPlan, StepResult
from minisgl.errors import ConfigError, MinisglError
from minisgl.layout import NO_INTS
from minisgl.message import ids_from_bytes
from minisgl.scheduler.grammars import Grammars
from minisgl.scheduler.io import OfflineIO
from minisgl.scheduler.record import Entry, Header, Result, checksum
from minisgl.scheduler.req import Admission, Req, Status
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.stats import engine_view
from minisgl.settings.options import ServerArgs

if TYPE_CHECKING:
    from minisgl.core import Ints, StepCosts
    from minisgl.errors import RequestError
    from minisgl.scheduler.plan import Step
    from minisgl.scheduler.rows import Index, Rows


class ReplayError(MinisglError):
    """The scheduler of this version makes other plans than the recorded one."""


class Replay:
    """A scheduler that replays a record. `step` is the number of replayed entries.

    Raises `ConfigError` for a file that is not a record.
    """

    def __init__(self, path: str) -> None:
        try:
            self._data = memoryview(Path(path).read_bytes())
        except OSError as e:
            raise ConfigError(f"{path} cannot be read: {e.strerror}") from e
        try:
            self.header = msgspec.msgpack.decode(self._frame() or b"", type=Header)
        except msgspec.MsgspecError as e:
            raise ConfigError(f"{path} is not a record of minisgl {minisgl.__version__}: {e}") from e
        self.scheduler = _ReplayingScheduler(self.header)
        self.step = 0

    def _frame(self) -> memoryview | None:
        """Return the next frame of the file; None at the end, or if the last frame is cut off."""
        end = 4 + int.from_bytes(self._data[:4], "little")
        if not self._data or len(self._data) < end:
            return None
        frame, self._data = self._data[4:end], self._data[end:]
        return frame

    def advance(self, steps: int | None = None) -> bool:
        """Replay until `step` is `steps`, or all entries. Return whether the record has so many.

        Raises `ReplayError` at the first step with another plan.
        """
        while steps is None or self.step < steps:
            if (frame := self._frame()) is None:
                return False
            self.scheduler.replay(msgspec.msgpack.decode(frame, type=Entry))
            self.step += 1
        return True


class _Output:
    """A launched step. Its result is in the record."""

    def __init__(self, plan: BatchPlan, results: list[Result]) -> None:
        self._plan = plan
        self._results = results
        self.awaits_masks = plan.awaits_masks

    def sample(self, masks: Ints) -> None:
        self.awaits_masks = False

    def wait(self) -> StepResult:
        if not self._results:
            raise ReplayError("a step collects a result that the recorded step did not collect")
        result = self._results.pop(0)
        tokens = ids_from_bytes(result.tokens)
        finite = ids_from_bytes(result.finite) if result.finite else np.ones(len(tokens), np.int32)
        columns = len(tokens) + len(self._plan.prompt_logprob_ids)
        confirmed, ready = (ids_from_bytes(x) if x else None for x in (result.confirmed, result.ready))
        logprobs = np.zeros((StepResult.WIDTH, columns), np.int32)
        return StepResult(tokens, finite, logprobs, confirmed=confirmed, ready=ready)


class _Engine(Header):
    """An engine that computes nothing: its facts and results come from the record."""

    results: list[Result] = msgspec.field(default_factory=list)

    def launch(self, plan: BatchPlan) -> _Output:
        return _Output(plan, self.results)

    def step_costs(self) -> StepCosts | None:
        return self.costs

    def shutdown(self) -> None:
        pass

    def describe(self) -> dict[str, str | int | float]:
        return {}


class _Matcher:
    """A matcher without a grammar. Only its end is known, from the record."""

    mask = NO_INTS

    def along(self, drafts: Ints) -> list[Ints]:
        return [self.mask] * len(drafts)

    is_complete = False
    error: RequestError | None = None


class _Grammars(Grammars):
    """Grammars that become ready and end when they did in the record."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = Entry()

    def submit(self, req: Req) -> None:
        self._jobs[req.uid] = req, Future(), 0.0
        req.status = Status.COMPILING

    def take(self) -> Iterator[tuple[Req, RequestError | None]]:
        for uid, failure in self.entry.compiled:
            req = self._jobs.pop(uid)[0]
            if failure is None:
                req.matcher = _Matcher()  # type: ignore[assignment]
                req.status = Status.WAITING
                self.num_followed += 1
            yield req, failure.error() if failure else None

    def wait(self, seconds: float) -> None:
        pass

    def follow(self, rows: Rows, sampled: Index, tokens: Ints) -> Index:
        ended = self.entry.ended.pop(0)
        for (_, failure), req in zip(ended, rows.holders(sampled[[i for i, _ in ended]]), strict=True):
            matcher = cast("_Matcher", req.matcher)
            matcher.is_complete, matcher.error = failure is None, failure.error() if failure else None
        return np.array([i for i, _ in ended], np.intp)


class _ReplayingScheduler(Scheduler):
    def __init__(self, header: Header) -> None:
        self._device = _Engine(**msgspec.structs.asdict(header))
        self._channels = OfflineIO()
        self._answers = _Grammars()
        clock = lambda: self._answers.entry.now  # noqa: E731
        super().__init__(header.config, self._device, self._channels, self._answers, clock=clock)
        limits = msgspec.structs.replace(header.limits, vocab_size=2**31)  # hashes may stand for token ids
        self.admission = Admission(header.config, limits, self.cache.arena.most_pages * header.page_size)

    def replay(self, entry: Entry) -> None:
        """Run one step. Raises `ReplayError` if its plan differs from the record."""
        self._answers.entry = entry
        self._channels.inbox.extend(entry.messages)
        self._device.results.extend(entry.results)
        self.step_number = entry.step - 1
        self.step()
        self._channels.replies.clear()
        if entry.plan or self._device.results:
            raise ReplayError(f"step {entry.step} has no plan, or collects fewer results than in the record")

    def _constrain(self, req: Req, guess: Ints) -> tuple[Ints, bool]:
        count, is_forced = self._answers.entry.drafts.pop(0)
        return np.zeros(count, np.int32), is_forced

    def launch(self, step: Step) -> None:
        super().launch(step)
        plan, entry = self.launched[-1].plan, self._answers.entry
        if checksum(plan) != entry.plan:
            raise ReplayError(f"step {entry.step} has another plan than in the record: {plan.slots}")
        entry.plan = 0


# -- the command


def check(path: str) -> int:
    """Replay a whole record; return the number of its steps. Raises `ReplayError` at the first difference."""
    replay = Replay(path)
    replay.advance()
    return replay.step


def serve(path: str, steps: int, port: int) -> None:
    """Serve the page with the Engine view of each of the `steps`, until Ctrl-C. Port 0 means any free port."""
    replay = Replay(path)

    async def models(_: Request) -> Response:
        return JSONResponse({"data": [{"id": Path(path).name}], "replay": True})

    async def show_step(request: Request) -> Response:
        nonlocal replay
        step = min(steps, int(request.query_params.get("step", steps)))
        if step < replay.step:
            replay = Replay(path)
        replay.advance(step)
        scheduler = replay.scheduler
        view, stats = engine_view(scheduler, 0), scheduler.stats.snapshot(scheduler)
        body = {"view": view, "stats": stats, "replay": {"step": replay.step, "steps": steps}}
        return Response(msgspec.json.encode(body), media_type="application/json")

    routes = [*page_routes(), Route("/v1/models", models), Route("/engine_view", show_step)]
    app = Starlette(routes=routes, middleware=[Middleware(Gate, access=Access.of(ServerArgs()))])
    with socket.create_server(("127.0.0.1", port)) as sock:
        print(f"the Engine view of each step: http://127.0.0.1:{sock.getsockname()[1]}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([sock])
