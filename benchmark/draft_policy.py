"""What `--speculate auto` gains or costs, simulated: `python benchmark/draft_policy.py`.

The scheduler is real. The engine is a stub that answers at once and adds up the seconds that an H200 would take; they
are measured, without those of the host. Texts are random walks as in `benchmark/draft_streams.py`: a token is followed
by its successor with probability p, else by any of 16. Prints how many times as fast as plain decoding `auto` is, and
always drafting (`ngram`).
"""

from __future__ import annotations

import argparse
import os
from random import Random

import numpy as np
from scheduler.bench import InstantEngine, InstantOutput

from minisgl.core.layout import Flag
from minisgl.core.message import UserMsg, ids_to_bytes
from minisgl.core.params import SamplingParams
from minisgl.core.plan import BatchPlan, StepCosts, StepResult
from minisgl.scheduler.io import OfflineIO
from minisgl.scheduler.scheduler import Scheduler
from minisgl.settings.options import MAX_DRAFTS, EngineConfig, SchedulerConfig
from minisgl.speculative.lookup import MIN_MATCH, look_up

SIZE = 16
# Seconds of an H200 in bfloat16 by rows without drafts, and for each of these by tokens with 0, 1 and 4 drafts a row.
# Measured, but for 256 rows with 4 drafts: these are estimates.
COSTS = {
    "qwen3-8b": StepCosts(
        base=5.77e-3,
        per_token=1.78e-5,
        per_context=3.4e-8,
        plain=((1, 3.94e-3), (8, 4.54e-3), (64, 5.16e-3), (256, 7.81e-3)),
        drafted=(
            ((1, 4.28e-3), (2, 4.75e-3), (5, 4.77e-3)),
            ((8, 4.83e-3), (16, 4.87e-3), (40, 5.35e-3)),
            ((64, 5.49e-3), (128, 5.82e-3), (320, 8.73e-3)),
            ((256, 8.39e-3), (512, 14.66e-3), (1280, 28.3e-3)),
        ),
    ),
    "qwen3-0.6b": StepCosts(
        base=1.36e-3,
        per_token=1.68e-6,
        per_context=2.6e-8,
        plain=((1, 0.729e-3), (8, 1.038e-3), (64, 1.386e-3), (256, 2.432e-3)),
        drafted=(
            ((1, 0.816e-3), (2, 1.073e-3), (5, 1.179e-3)),
            ((8, 1.214e-3), (16, 1.226e-3), (40, 1.436e-3)),
            ((64, 1.617e-3), (128, 1.712e-3), (320, 1.993e-3)),
            ((256, 2.732e-3), (512, 3.149e-3), (1280, 4.6e-3)),
        ),
    ),
}  # fmt: skip


class WalkingEngine(InstantEngine):
    """Walks, looks up what follows in each text as a device does, and counts `seconds`."""

    def __init__(self, rows: int, costs: StepCosts, chance: float, seed: int) -> None:
        super().__init__(rows, page_size=64, num_pages=rows * 64, drafts=0, acceptance=0.0)
        self.seconds = 0.0
        self._costs, self._chance, self._rng = costs, chance, np.random.default_rng(seed)
        self._texts: dict[int, list[int]] = {}
        self._drafts: dict[int, list[int]] = {}

    def step_costs(self) -> StepCosts:
        return self._costs

    def launch(self, plan: BatchPlan) -> InstantOutput:
        tokens, confirmed, ready = [], [], []
        rows = context = first = 0
        for row, start, stop, flags in plan.sequences.tolist():
            if not flags & Flag.FROM_DEVICE:  # of a prompt, from the plan
                text = self._texts[row] = [*(self._texts[row] if start else ()), *plan.tokens[first:][: stop - start]]
                first += stop - start
            else:
                text = self._texts[row]
                rows, context = rows + 1, context + len(text)
            drafts = stop - start - 1 if flags & Flag.DRAFTS else 0
            right = self._walk(text, self._drafts.get(row, [])[:drafts]) if flags & Flag.SAMPLES else []
            tokens += right + [0] * (1 + drafts - len(right)) * bool(right)
            confirmed += [int(i < len(right)) for i in range(1 + drafts)] * bool(right)
            found = look_up(np.array(text, np.int32), MIN_MATCH).tolist() if flags & Flag.DRAFTS else []
            self._drafts[row] = [*found, *[0] * MAX_DRAFTS][:MAX_DRAFTS]
            ready += [len(found), *[0] * drafts] * bool(right)
        self.seconds += self._step_seconds(rows, len(tokens), context, plan.has_drafts) if rows else 0.0
        values = (np.array(x, np.int32) for x in (tokens, np.ones(len(tokens)), confirmed, ready))
        ids, finite, is_right, drafted = values
        if not plan.has_drafts:
            return InstantOutput(StepResult(ids, finite))
        return InstantOutput(StepResult(ids, finite, confirmed=is_right, ready=drafted))

    def _walk(self, text: list[int], drafts: list[int]) -> list[int]:
        """Append the tokens up to the first that differs from its draft; return them."""
        tokens = []
        for draft in [*drafts, None]:
            block, place = divmod(text[-1], SIZE)
            place = (place + 1) % SIZE if self._rng.random() < self._chance else int(self._rng.integers(SIZE))
            tokens.append(block * SIZE + place)
            text.append(tokens[-1])
            if tokens[-1] != draft:
                break
        return tokens

    def _step_seconds(self, rows: int, tokens: int, context: int, has_drafts: bool) -> float:
        plain, drafted = self._costs.draft_seconds(rows, np.array([0, max(1, tokens - rows)]))
        seconds = drafted if has_drafts else plain  # asking costs about as much as one draft
        return float(seconds + self._costs.draft_context_seconds(rows, context))


def seconds(
    costs: StepCosts, rows: int, chance: float, kind: str, seed: int = 0, input_len: int = 128, output_len: int = 128
) -> float:
    """Seconds in which `rows` requests decode, all at once."""
    engine, io = WalkingEngine(rows, costs, chance, seed), OfflineIO()
    given = EngineConfig(speculate=kind, num_draft_tokens=4)
    scheduler = Scheduler(SchedulerConfig(engine=given, max_prefill_length=2**20, cache_type="radix"), engine, io)
    rng, params = Random(seed), SamplingParams(max_tokens=output_len, ignore_eos=True)
    for uid in range(rows):
        place, prompt = 0, []
        for _ in range(input_len):
            place = (place + 1) % SIZE if rng.random() < chance else rng.randrange(SIZE)
            prompt.append((1 + uid) * SIZE + place)
        io.inbox.append(UserMsg(uid=uid, input_ids=ids_to_bytes(np.array(prompt, np.int32)), sampling_params=params))
    scheduler.step()
    while scheduler.live:
        scheduler.step()
        io.replies.clear()
    return engine.seconds


def main() -> None:
    os.environ["MINISGL_CHECK"] = "0"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 256])
    parser.add_argument("--chances", type=float, nargs="+", default=[0.1, 0.5, 0.7, 0.9, 1.0], help="the p of walks")
    parser.add_argument("--texts", type=int, default=64, help="at least so many in all, in one batch after the other")
    args = parser.parse_args()
    for shape, costs in COSTS.items():
        for rows in args.rows:
            line = f"{shape:10} {rows:3} rows:"
            for chance in args.chances:
                seeds = range(max(1, args.texts // rows))
                off, auto, ngram = (
                    sum(seconds(costs, rows, chance, kind, seed) for seed in seeds) for kind in ("off", "auto", "ngram")
                )
                line += f" | {chance:g}: auto {off / auto:.3f} ngram {off / ngram:.3f}"
            print(line, flush=True)


if __name__ == "__main__":
    main()
