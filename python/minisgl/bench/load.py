"""The load generator: sends prepared requests in one of three ways and notes what comes back, and when."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from minisgl.bench.client import Endpoint, Record, exchange
from minisgl.bench.traffic import Request

POLL_S: Final = 0.005
# One token each in the usual vocabularies, with the space before them.
WORDS: Final = ("time", "year", "people", "way", "day", "man", "thing", "life", "child", "world", "school", "state")


@dataclass(frozen=True)
class Job:
    """A request as bytes, made before the clock runs, and the record of what becomes of it."""

    message: bytes
    record: Record
    at: float | None


class JobMaker:
    """Requests -> jobs for one server."""

    def __init__(self, endpoint: Endpoint, model: str, temperature: float, is_text: bool, ignore_eos: bool) -> None:
        self._endpoint = endpoint
        self._is_text = is_text
        self._common: dict[str, Any] = {
            "model": model,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if ignore_eos else {}),
        }

    def job(self, request: Request, group: str) -> Job:
        prompt: str | list[int] = request.prompt
        if self._is_text:
            prompt = " ".join(WORDS[i % len(WORDS)] for i in request.prompt)
        body = json.dumps({**self._common, "prompt": prompt, "max_tokens": request.output_len}).encode()
        record = Record(group, len(request.prompt), request.output_len)
        return Job(self._endpoint.message("POST", "/v1/completions", body), record, request.at)


@dataclass(frozen=True)
class Window:
    """A burst, from sending it to its last answer, and what ran beside it."""

    start: float
    end: float
    background: list[Record]


class Load:
    """Sends jobs to one server; a request that fails is noted in its record and disturbs no other."""

    def __init__(self, endpoint: Endpoint, timeout: float) -> None:
        self._endpoint = endpoint
        self._timeout = timeout

    async def _send(self, job: Job) -> None:
        await exchange(self._endpoint, job.message, job.record, self._timeout)

    async def closed(self, jobs: Iterable[Job], streams: int) -> None:
        """`streams` at a time, each sending its next request when its last one is answered."""
        waiting = iter(jobs)

        async def stream() -> None:
            for job in waiting:
                await self._send(job)

        await asyncio.gather(*(stream() for _ in range(streams)))

    async def open(self, jobs: list[Job]) -> None:
        """Each at its own time, whether or not the others are answered. A late one is sent at once and says so."""
        start = time.perf_counter()
        sending = []
        for job in sorted(jobs, key=lambda job: job.at or 0.0):
            job.record.scheduled = start + (job.at or 0.0)
            if (delay := job.record.scheduled - time.perf_counter()) > 0:
                await asyncio.sleep(delay)
            sending.append(asyncio.create_task(self._send(job)))
        await asyncio.gather(*sending)

    async def burst(self, jobs: list[Job], background: Callable[[], Job], streams: int) -> Window:
        """All at once, while `streams` others are in the middle of their answers. Those end with the burst."""
        records: list[Record] = []
        running = [asyncio.create_task(self._keep_busy(background, records)) for _ in range(streams)]
        try:
            while sum(bool(r.times or r.error) for r in records) < streams:
                await asyncio.sleep(POLL_S)
            start = time.perf_counter()
            await self.open(jobs)
            end = time.perf_counter()
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return Window(start, end, records)

    async def _keep_busy(self, background: Callable[[], Job], records: list[Record]) -> None:
        while True:
            job = background()
            records.append(job.record)
            await self._send(job)
            if job.record.error:
                return  # its message is enough; another would fail too


def endless(make: Callable[[int], Job]) -> Callable[[], Job]:
    """A function that returns make(0), make(1), ..."""
    numbers: Iterator[int] = itertools.count()
    return lambda: make(next(numbers))
