"""What windows and recurrent states cost and gain in memory, by simulation: `python benchmark/scheduler/groups.py`.

The scheduler runs on an engine that answers at once.

hits     prompt tokens computed with all pages in FULL (a prompt goes on from any page boundary), and with snapshots, in
         the same memory. Conversations as in `benchmark/tiers.py`; prompts that share one of some system prompts, whose
         end the tokenizer tells or does not; prompts that part within a text
rows     requests that run at once when more are waiting, and as many as would fill the memory
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from bench import InstantEngine

from minisgl.core.layout import STATE, WINDOW
from minisgl.core.message import UserMsg, ids_to_bytes
from minisgl.core.params import Limits, SamplingParams
from minisgl.kvcache.arena import Blocks, divide
from minisgl.kvcache.snapshots import Bounded, ids_per_row
from minisgl.scheduler.io import OfflineIO
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
        # 40 layers, 10 of them full, 2 KV heads of 256; 30 states of 32 x 128 x 128 in float32 and convolutions
        Model("qwen3.5-35b-a3b", 10 * 2048, 0, 0, 30 * (32 * 128 * 128 * 4 + 8192 * 3 * 2), 12 * GIB),
        # 24 layers, every second with a window of 128, 8 KV heads of 64; with less memory, for fewer rows
        Model("gpt-oss-20b", 12 * 2048, 12 * 2048, 128, 0, 8 * GIB),
    )
}


class Engine(InstantEngine):
    limits = Limits(max_model_len=65_536, vocab_size=150_000)

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

    def step(self) -> None:
        self.scheduler.step()
        self.io.replies.clear()

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
    parser.add_argument("--only", choices=("hits", "rows"))
    args = parser.parse_args()
    model = MODELS[args.model]
    engine = model.engine()
    print(f"{model.name}: {engine.blocks}, {engine.bounded}, {model.row_bytes / 1e6:.0f} MB a row")
    if args.only != "rows":
        hits(model)
    if args.only != "hits":
        rows(model)


if __name__ == "__main__":
    main()
