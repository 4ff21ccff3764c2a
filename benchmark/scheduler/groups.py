"""What windows and recurrent states cost and gain in memory, by simulation: `python benchmark/scheduler/groups.py`.

The scheduler runs on an engine that answers at once.

hits     prompt tokens computed with all pages in FULL (a prompt goes on from any page boundary), and with snapshots, in
         the same memory. Conversations as in `benchmark/tiers.py`; prompts that share one of some system prompts, whose
         end the tokenizer tells or does not; prompts that part within a text
agents   prompt tokens found of agents' sessions, several at once, some with sub-agents, in the memory of their K/V and
         16 GB: by the policy, and by snapshots at a stride or at the ends of prompts alone
lengths  prompt tokens found of prompts that share their first 100, 500 or 1,500 tokens, by the order of arrival; where
         a message ends there, and where none does
rows     requests that run at once when more are waiting, and as many as would fill the memory
"""

from __future__ import annotations

import argparse
import heapq
import os
import random
from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
from bench import InstantEngine

from minisgl.core.layout import STATE, WINDOW
from minisgl.core.message import UserMsg, ids_to_bytes
from minisgl.core.params import Limits, SamplingParams
from minisgl.kvcache.arena import Blocks, divide
from minisgl.kvcache.snapshots import Bounded, Reason, Snapshot, ids_per_row
from minisgl.scheduler.bounded import BoundedState
from minisgl.scheduler.io import OfflineIO
from minisgl.scheduler.req import Req
from minisgl.scheduler.scheduler import Scheduler
from minisgl.settings.options import SchedulerConfig

PAGE = 16
CHUNK = 8192  # --max-prefill-length
PACE = 4096  # tokens of a step beside streams


class Model(NamedTuple):
    """Bytes of a token in FULL, of a token in a window, and of a slot; and of all of them on the device."""

    name: str
    token: int
    window_token: int
    window: int
    slot: int
    memory: int

    @property
    def row_bytes(self) -> int:
        """The bounded state of a row."""
        pages = ids_per_row(self.window, PAGE) if self.window else 0
        return pages * PAGE * self.window_token + self.slot

    def engine(self) -> Engine:
        """Return an engine whose memory any group may take, in blocks."""
        slot = [self.slot] if self.slot else []
        size, pages = divide((PAGE * self.token, PAGE * self.window_token, *slot))
        bounded = [Bounded(WINDOW, self.window)] if self.window else []
        bounded += [Bounded(STATE)] if self.slot else []
        return Engine(Blocks(self.memory // size, pages), bounded)

    def engine_of_full(self) -> Engine:
        """Return an engine that keeps windows like the other pages: there are no snapshots."""
        return Engine(Blocks(self.memory // (self.token + self.window_token) // PAGE), [])


GIB = 1 << 30
MODELS = {
    model.name: model
    for model in (
        # 62 layers, 10 of them full, 16 KV heads of 128 in bf16; as on an H200 with 54 GB of weights
        Model("gemma-3-27b", 10 * 8192, 52 * 8192, 1024, 0, 72 * GIB),
        # 40 layers, 10 of them full, 2 KV heads of 256; 30 states of 32 x 128 x 128 in float32, convolutions' inputs,
        # and what the last 20 tokens add
        Model("qwen3.5-35b-a3b", 10 * 2048, 0, 0, 30 * (4 * 32 * 128 * 128 + 2 * 23 * 8192 + 20 * 12_416), 12 * GIB),
        # 24 layers, every second with a window of 128, 8 KV heads of 64; with less memory, for fewer rows
        Model("gpt-oss-20b", 12 * 2048, 12 * 2048, 128, 0, 8 * GIB),
    )
}


class Engine(InstantEngine):
    limits = Limits(max_model_len=1 << 19, vocab_size=150_000)

    def __init__(self, blocks: Blocks, bounded: list[Bounded]) -> None:
        super().__init__(1024, PAGE, 1, 0, 0.0)
        self.blocks, self.bounded = blocks, bounded


class Server:
    """A scheduler, and what it has computed."""

    def __init__(self, engine: Engine, policy: str = "shortest") -> None:
        self.io = OfflineIO()
        queue = {"max_queued_requests": 10**6, "max_queued_tokens": 10**9, "schedule_policy": policy}
        self.scheduler = Scheduler(SchedulerConfig(max_prefill_length=CHUNK, **queue), engine, self.io)
        self.uid = 0

    def add(self, prompt: list[int], output: int, system_tokens: int = 0) -> None:
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        ids = ids_to_bytes(np.array(prompt, np.int32))
        self.io.inbox.append(UserMsg(uid=self.uid, input_ids=ids, sampling_params=params, system_tokens=system_tokens))
        self.uid += 1

    def step(self) -> list[int]:
        """Run a step; return the requests that have ended."""
        self.scheduler.step()
        ended = [end.uid for msg in self.io.replies for end in getattr(msg, "finished", ())]
        self.io.replies.clear()
        return ended

    def finish(self) -> None:
        while self.scheduler.is_busy or self.io.inbox:
            self.step()


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 2000) for _ in range(count)]


# -- hits


def conversations(count: int, turns: int, turn: int, output: int, streams: int = 16) -> Callable[[Server], None]:
    """Each turn adds tokens to one of several conversations."""

    def run(server: Server) -> None:
        rng = random.Random(1)
        histories = [tokens(rng, turn) for _ in range(count)]
        for _ in range(turns):
            for i in range(0, count, streams):
                for history in histories[i : i + streams]:
                    server.add(history, output)
                server.finish()
            for history in histories:
                history += [7] * output + tokens(rng, turn)

    return run


def shared(prompts: int, length: int, rest: int, total: int, is_told: bool) -> Callable[[Server], None]:
    """Prompts begin with one of some system prompts."""

    def run(server: Server) -> None:
        rng = random.Random(2)
        heads = [tokens(rng, length) for _ in range(prompts)]
        for i in range(total):
            server.add(rng.choice(heads) + tokens(rng, rest), 64, length if is_told else 0)
            if i % 16 == 15:
                server.finish()
        server.finish()

    return run


def parting(texts: int, length: int, questions: int) -> Callable[[Server], None]:
    """Several questions about each of some long texts, one text after the other."""

    def run(server: Server) -> None:
        rng = random.Random(3)
        for _ in range(texts):
            text = tokens(rng, length)
            for _ in range(questions):
                server.add(text + tokens(rng, 100), 64)
                server.finish()

    return run


def one_after_the_other(*parts: Callable[[Server], None]) -> Callable[[Server], None]:
    def run(server: Server) -> None:
        for part in parts:
            part(server)

    return run


TRAFFIC = {
    "8 conversations, 6 turns of 300": conversations(8, 6, 300, 64),
    "24 conversations, 10 turns of 300": conversations(24, 10, 300, 200),
    "48 conversations, 10 turns of 300": conversations(48, 10, 300, 200),
    "96 conversations, 8 turns of 300": conversations(96, 8, 300, 200),
    "16 conversations, 8 turns of 2000": conversations(16, 8, 2000, 200),
    "4 system prompts of 2000, told": shared(4, 2000, 300, 256, True),
    "4 system prompts of 2000": shared(4, 2000, 300, 256, False),
    "64 system prompts of 1000, told": shared(64, 1000, 300, 1024, True),
    "64 system prompts, then conversations": one_after_the_other(
        shared(64, 1000, 300, 1024, True), conversations(40, 10, 300, 200)
    ),
    "8 questions about 16 texts of 8000": parting(16, 8000, 8),
}


def hits(model: Model) -> None:
    for name, run in TRAFFIC.items():
        computed = []
        for engine in (model.engine_of_full(), model.engine()):
            server = Server(engine)
            run(server)
            computed.append(server.scheduler.stats.computed_prompt_tokens)
            total = server.scheduler.stats.prompt_tokens
        rate = computed[1] / computed[0] - 1
        print(f"hits   {name:36} of {total:9,} tokens {computed[0]:9,} computed, {computed[1]:9,} now: {rate:+.1%}")


# -- agents

TURNS, LAST, OUTPUT, SYSTEM = 43, 142_000, 444, 20_000  # of a session: its turns, the tokens of its last prompt
SUB_TURNS, SUB_LAST, SUB_SYSTEM = 12, 40_000, 8_000
SNAPSHOTS = 16 * 10**9  # bytes

Turns = Generator[tuple[list[int], int, int], None, None]
"""The prompts of a session, each with the number of its first tokens that are a system prompt, and that were sent."""


def session(rng: random.Random, turns: int, last: int, system: list[int]) -> Turns:
    """Yield prompts up to `last` tokens, each the one before with its answer and new tokens."""
    text, new, sent = list(system), (last - len(system)) / turns - OUTPUT, len(system)
    for _ in range(turns):
        text += tokens(rng, int(rng.uniform(0.2, 1.8) * new))
        yield text, len(system), sent
        text += [7] * OUTPUT
        sent = len(text)


def agents(sessions: int, at_once: int, last: int) -> Callable[[Server], float]:
    """Sessions, of which 44 % send 1 to 3 sub-agents, one after the other, and wait for what they find.

    A tool runs for up to 1,000 steps between turns. System prompts are the same in all sessions. Return the part of all
    prompt tokens that were sent before.
    """

    def run(server: Server) -> float:
        rng = random.Random(5)
        main, sub = tokens(rng, SYSTEM), tokens(rng, SUB_SYSTEM)

        def one(rng: random.Random) -> Turns:
            calls = rng.choices(range(1, TURNS), k=rng.randint(1, 3)) if rng.random() < 0.44 else []
            for turn, asked in enumerate(session(rng, TURNS, last, main)):
                yield asked
                for _ in range(calls.count(turn)):
                    yield from session(rng, SUB_TURNS, SUB_LAST, sub)

        clock, todo = 0, [one(random.Random(i)) for i in range(sessions)]
        due = [(rng.randrange(2000), i) for i in range(at_once)]
        asked: dict[int, int] = {}
        heapq.heapify(due)
        known = -len(main) - len(sub)  # the first time
        while due or asked:
            if not asked:
                clock = max(clock, due[0][0])
            while due and due[0][0] <= clock:
                _, i = heapq.heappop(due)
                if (turn := next(todo[i], None)) is not None:
                    text, system_tokens, sent = turn
                    known += sent
                    asked[server.uid] = i
                    server.add(text, OUTPUT, system_tokens)
                elif i + at_once < sessions:
                    heapq.heappush(due, (clock, i + at_once))
            for uid in server.step() if asked else ():
                heapq.heappush(due, (clock + rng.randrange(1000), asked.pop(uid)))
            clock += 1
        return known / server.scheduler.stats.prompt_tokens

    return run


class Stride(BoundedState):
    """Snapshots at a stride alone."""

    every = 1024

    def open(self, req: Req, waiting: Iterable[Req]) -> None:
        super().open(req, ())
        req.capture_at = dict.fromkeys(range(self.every, len(req.ids), self.every), Reason.END)

    def pop_captures(self, req: Req, finite: int, *, is_leaving: bool) -> list[tuple[int, Snapshot]]:
        return super().pop_captures(req, finite, is_leaving=False)  # none at the end of an answer


class PromptEnds(Stride):
    """Snapshots at the ends of prompts alone."""

    def open(self, req: Req, waiting: Iterable[Req]) -> None:
        super().open(req, ())
        req.capture_at = {(len(req.ids) - 1) // PAGE * PAGE: Reason.END}


POLICIES: dict[str, type[BoundedState]] = {"policy": BoundedState, "ends of prompts alone": PromptEnds} | {
    f"every {every} tokens alone": type("Every", (Stride,), {"every": every}) for every in (512, 2048, 8192)
}


def agent_hits(model: Model, sessions: int, at_once: int, last: int) -> None:
    model = model._replace(memory=at_once * last * model.token + SNAPSHOTS)
    for name, policy in POLICIES.items():
        with patch("minisgl.scheduler.cache.BoundedState", policy):
            server = Server(model.engine())
        known, stats = agents(sessions, at_once, last)(server), server.scheduler.stats
        rate = stats.cached_tokens / stats.prompt_tokens
        print(
            f"agents {name:28} {rate:.4f} found of {stats.prompt_tokens:,} tokens; {known:.4f} sent before", flush=True
        )


# -- lengths


def lengths(model: Model) -> None:
    """64 requests that share a prefix of each length and have 200 tokens besides, one by one or 8 at once."""
    for length in (100, 500, 1500):
        for kind in ("a message ends there", "none does"):
            for at_once in (1, 8):
                server, rng, parts = Server(model.engine()), random.Random(6), []
                head = [*tokens(rng, length - 1), 1 if kind == "a message ends there" else 1000]  # 1 is EOS
                for i in range(64):
                    server.add(head + tokens(rng, 200), 64)
                    if i % at_once == at_once - 1:
                        before = server.scheduler.stats.cached_tokens
                        server.finish()
                        parts.append((server.scheduler.stats.cached_tokens - before) / at_once / length)
                figures = " ".join(f"{part:.2f}" for part in parts[:4])
                print(f"lengths {length:5} shared, {kind:20}, {at_once} at once: {figures} ... {min(parts[2:]):.2f}")


# -- rows

MIXES: dict[str, Callable[[random.Random], int]] = {
    "1K": lambda rng: 1024,
    "8K": lambda rng: 8192,
    "32K": lambda rng: 32_000,
    "chat: log-normal, median 2K": lambda rng: min(32_000, max(200, int(rng.lognormvariate(7.6, 1.0)))),
    "half 1K, half 16K": lambda rng: rng.choice((1024, 16_384)),
}


def rows_at_once(engine: Engine, draw: Callable[[random.Random], int]) -> float:
    """Return how many requests run at once, once the first have ended."""
    server, rng = Server(engine, "fcfs"), random.Random(4)  # so that the mix stays the same
    server.scheduler.pace.max_tokens = PACE
    output = 512
    for _ in range(600):
        length = draw(rng)
        server.add([1000 + server.uid] * (length - output), output)
    counts = []
    while server.scheduler.is_busy or server.io.inbox:
        server.step()
        scheduler = server.scheduler
        if len(scheduler.prefill.waiting) > 20 and scheduler.stats.generation_tokens:
            counts.append(len(scheduler.decode.running) + len(scheduler.prefill.chunked))
    return float(np.median(counts)) if counts else float("nan")


def rows(model: Model) -> None:
    for name, draw in MIXES.items():
        rng = random.Random(4)
        mean = float(np.mean([draw(rng) for _ in range(2000)]))
        limit = (model.memory - CHUNK * model.window_token) / (mean * model.token + model.row_bytes)
        found = rows_at_once(model.engine(), draw)
        print(f"rows   {name:28} {found:5.0f} of {limit:5.0f} ({found / limit:.2f})")


def main() -> None:
    os.environ["MINISGL_CHECK"] = "0"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gemma-3-27b")
    parser.add_argument("--only", choices=("hits", "agents", "lengths", "rows"))
    parser.add_argument("--sessions", type=int, default=24, help="of agents")
    parser.add_argument("--at-once", type=int, default=8, help="sessions of agents")
    parser.add_argument("--last", type=int, default=LAST, help="tokens of the last prompt of a session")
    args = parser.parse_args()
    model = MODELS[args.model]
    engine = model.engine()
    print(f"{model.name}: {engine.blocks}, {engine.bounded}, {model.row_bytes / 1e6:.0f} MB a row")
    parts: dict[str, Callable[[], None]] = {
        "hits": lambda: hits(model),
        "agents": lambda: agent_hits(model, args.sessions, args.at_once, args.last),
        "lengths": lambda: lengths(model),
        "rows": lambda: rows(model),
    }
    for name in parts if args.only is None else [args.only]:
        parts[name]()


if __name__ == "__main__":
    main()
