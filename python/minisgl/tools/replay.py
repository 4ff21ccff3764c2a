"""`minisgl replay`: runs a scheduler again on the inputs of a record (`scheduler/record.py`), without model or device.

It must make the same plans. Then the Engine view of the page can show any step.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
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
from minisgl.core.errors import ConfigError, MinisglError
from minisgl.core.layout import NO_INTS
from minisgl.core.message import ids_from_bytes
from minisgl.core.plan import BatchPlan, StepResult
from minisgl.scheduler.grammars import Grammars
from minisgl.scheduler.io import OfflineIO
from minisgl.scheduler.record import Entry, Header, checksum
from minisgl.scheduler.req import Admission, Req, Status
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.stats import engine_view
from minisgl.settings.options import ServerArgs

if TYPE_CHECKING:
    from minisgl.core.errors import RequestError
    from minisgl.core.plan import Ints, StepCosts
    from minisgl.scheduler.plan import StepEngine
    from minisgl.scheduler.rows import Index, Rows


class ReplayError(MinisglError):
    """The scheduler of this version makes other plans than the recorded one."""


class Replay:
    """A scheduler whose ports are fed from a record. `step` is the number of replayed entries.

    Raises `ConfigError` for a file that is not a record.
    """

    def __init__(self, path: str) -> None:
        try:
            self._data = memoryview(Path(path).read_bytes())
        except OSError as e:
            raise ConfigError(f"{path} cannot be read: {e.strerror}") from e
        try:
            header = msgspec.msgpack.decode(self._frame() or b"", type=Header)
        except msgspec.MsgspecError as e:
            raise ConfigError(f"{path} is not a record of minisgl {minisgl.__version__}: {e}") from e
        self.entry, self.step = Entry(), 0
        self._io, engine = OfflineIO(), cast("StepEngine", _Engine(replay=self, **msgspec.structs.asdict(header)))
        grammars = _Grammars(self)
        self.scheduler = Scheduler(header.config, engine, self._io, grammars, clock=lambda: self.entry.now)
        limits = msgspec.structs.replace(header.limits, vocab_size=2**31)  # hashes may stand for token ids
        pool_tokens = self.scheduler.cache.arena.max_pages * header.page_size
        self.scheduler.admission = Admission(header.config, limits, pool_tokens)

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
            self._replay(msgspec.msgpack.decode(frame, type=Entry))
            self.step += 1
        return True

    def _replay(self, entry: Entry) -> None:
        self.entry = entry
        self._io.inbox.extend(entry.messages)
        self.scheduler.step_number = entry.step - 1
        self.scheduler.step()
        self._io.replies.clear()
        if entry.plan or entry.results:
            raise ReplayError(f"step {entry.step} has no plan, or collects fewer results than in the record")


class _Output:
    """A launched step. Its result is in the record."""

    def __init__(self, plan: BatchPlan, replay: Replay) -> None:
        self._plan = plan
        self._replay = replay
        self.awaits_masks = plan.awaits_masks

    def sample(self, masks: Ints) -> None:
        self.awaits_masks = False

    def wait(self) -> StepResult:
        if not self._replay.entry.results:
            raise ReplayError("a step collects a result that the recorded step did not collect")
        result = self._replay.entry.results.pop(0)
        tokens = ids_from_bytes(result.tokens)
        finite = ids_from_bytes(result.finite) if result.finite else np.ones(len(tokens), np.int32)
        columns = len(tokens) + len(self._plan.prompt_logprob_ids)
        confirmed, ready = (ids_from_bytes(x) if x else None for x in (result.confirmed, result.ready))
        logprobs = np.zeros((StepResult.WIDTH, columns), np.int32)
        return StepResult(tokens, finite, logprobs, confirmed=confirmed, ready=ready)


class _Engine(SimpleNamespace):
    """An engine that computes nothing: its facts and results come from the record."""

    replay: Replay

    def launch(self, plan: BatchPlan) -> _Output:
        entry = self.replay.entry
        if checksum(plan) != entry.plan:
            raise ReplayError(f"step {entry.step} has another plan than in the record: {plan.sequences}")
        entry.plan = 0
        return _Output(plan, self.replay)

    def read_adapter(self, source: str) -> None:
        pass

    def step_costs(self) -> StepCosts | None:
        costs: StepCosts | None = self.costs
        return costs


class _Matcher:
    """A matcher without a grammar. Only its end is known, from the record."""

    mask = NO_INTS

    def along(self, drafts: Ints) -> list[Ints]:
        return [self.mask] * len(drafts)

    is_complete = False
    error: RequestError | None = None


class _Grammars(Grammars):
    """Grammars that become ready and end when they did in the record."""

    def __init__(self, replay: Replay) -> None:
        super().__init__()
        self._replay = replay

    def submit(self, req: Req, read_adapter: Callable[[str], None]) -> None:
        if not req.sampling_params.has_masks and req.sampling_params.adapter is None:
            return
        self._jobs[req.uid] = req, Future(), 0.0
        req.status = Status.COMPILING

    def pop_compiled(self) -> Iterator[tuple[Req, RequestError | None]]:
        for uid, failure in self._replay.entry.compiled:
            req = self._jobs.pop(uid)[0]
            if failure is None:
                req.status = Status.WAITING
                if req.sampling_params.has_masks:
                    req.matcher = _Matcher()  # type: ignore[assignment]
                    self.num_matchers += 1
            yield req, failure.error() if failure else None

    def wait(self, seconds: float) -> None:
        pass

    def toggled(self, rows: Rows, running: Index, most: int) -> list[int]:
        return self._replay.entry.toggled

    def constrain(self, req: Req, guess: Ints) -> tuple[Ints, bool]:
        count, is_forced = self._replay.entry.drafts.pop(0)
        return np.zeros(count, np.int32), is_forced

    def advance(self, rows: Rows, sampled: Index, tokens: Ints) -> Index:
        ended = self._replay.entry.ended.pop(0)
        for (_, failure), req in zip(ended, rows.holders(sampled[[i for i, _ in ended]]), strict=True):
            matcher = cast("_Matcher", req.matcher)
            matcher.is_complete, matcher.error = failure is None, failure.error() if failure else None
        return np.array([i for i, _ in ended], np.intp)


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
        view, stats = engine_view(scheduler, 0, scheduler.stats), scheduler.stats.snapshot(scheduler)
        body = {"view": view, "stats": stats, "replay": {"step": replay.step, "steps": steps}}
        return Response(msgspec.json.encode(body), media_type="application/json")

    routes = [*page_routes(), Route("/v1/models", models), Route("/engine_view", show_step)]
    app = Starlette(routes=routes, middleware=[Middleware(Gate, access=Access.of(ServerArgs()))])
    with socket.create_server(("127.0.0.1", port)) as sock:
        print(f"the Engine view of each step: http://127.0.0.1:{sock.getsockname()[1]}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([sock])
