"""Drive a scheduler over a fake engine and check the rules that hold for every request."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from minisgl.core.layout import STATE, WINDOW
from minisgl.core.message import AbortMsg, UserMsg, ids_from_bytes, ids_to_bytes
from minisgl.core.params import Adapter, Grammar, SamplingParams, Thinking
from minisgl.core.plan import FinishReason, StepCosts
from minisgl.kvcache.snapshots import Bounded, ids_per_row
from minisgl.kvcache.tiers import TierSpec
from minisgl.scheduler.check import check_idle
from minisgl.scheduler.grammars import Grammars
from minisgl.scheduler.io import OfflineIO
from minisgl.scheduler.scheduler import Scheduler
from minisgl.settings.options import EngineConfig, SchedulerConfig
from support.fake_engine import FakeEngine, expected_output
from support.fake_grammar import FakeCompiler, FakeMatcher, LateExecutor, LimitedMatcher, text_of


class Harness:
    """A scheduler on a fake engine; records every reply. In the invariant mode each step checks itself."""

    def __init__(self, fake: FakeEngine, depth: int, /, **options: object) -> None:
        self.config, self.depth = SchedulerConfig(**options), depth  # type: ignore[arg-type]
        self.aborted: set[int] = set()
        self.begun: set[int] = set()
        self._start(fake)
        self.requests: dict[int, tuple[list[int], SamplingParams]] = {}
        self.outputs: dict[int, list[int]] = {}
        self.endings: dict[int, FinishReason] = {}
        self.errors: dict[int, str] = {}
        self.params: dict[int, str | None] = {}  # the field that an error names
        self.logprobs: dict[int, list[tuple[float, int]]] = {}  # (log-probability, likeliest token) of each token

    def _start(self, fake: FakeEngine) -> None:
        self.engine, self.io = fake, OfflineIO()
        self.compiling = LateExecutor()
        grammars = Grammars(FakeCompiler(fake.vocab), self.compiling)
        self.scheduler = Scheduler(self.config, fake, self.io, grammars)
        self.scheduler.depth = self.depth
        fake.watch(self.scheduler.cache)

    def die(self, fake: FakeEngine) -> None:
        """Lose the scheduler with all steps in flight: its requests go on in another one, on the engine `fake`."""
        fake.draft_luck = self.engine.draft_luck
        self._start(fake)
        for uid, (prompt, sampling) in self.requests.items():
            if uid in self.aborted:
                self.endings.setdefault(uid, FinishReason.ABORT)
            elif uid not in self.endings:
                ids, output = ids_to_bytes(prompt), ids_to_bytes(self.outputs[uid])
                self.io.inbox.append(UserMsg(uid=uid, input_ids=ids, sampling_params=sampling, output_ids=output))

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int | None = 8,
        child_index: int = 0,
        system_tokens: int = 0,
        **params: object,
    ) -> int:
        uid = len(self.requests)
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, **params)  # type: ignore[arg-type]
        self.requests[uid] = (list(prompt), sampling)
        self.outputs[uid] = []
        known = {"input_ids": ids_to_bytes(prompt), "child_index": child_index, "system_tokens": system_tokens}
        self.io.inbox.append(UserMsg(uid=uid, sampling_params=sampling, **known))
        return uid

    def abort(self, uid: int) -> None:
        self.io.inbox.append(AbortMsg(uid))
        self.aborted.add(uid)

    def table_row(self, uid: int) -> int | None:
        """Return the row that a request holds now."""
        req = self.scheduler.live.get(uid)
        return None if req is None else req.table_idx

    def step(self) -> None:
        self.scheduler.step()
        self.compiling.work()
        self.drain_replies()

    def drain_replies(self) -> None:
        while self.io.replies:
            msg = self.io.replies.popleft()
            uids = np.frombuffer(msg.uids, "<i8").tolist()
            assert len(set(uids)) == len(uids)
            for uid, token in zip(uids, ids_from_bytes(msg.tokens).tolist(), strict=True):
                assert uid not in self.endings, f"token for {uid} after its end"
                self.outputs[uid].append(token)
            for begun in msg.started:
                assert begun.uid not in self.begun, f"{begun.uid} began twice"
                assert begun.prompt_tokens == len(self.requests[begun.uid][0])
                self.begun.add(begun.uid)
            logprobs = [s for s in (*(b.prompt_logprobs for b in msg.started), *msg.logprobs) if s is not None]
            for s in logprobs:
                assert self.requests[s.uid][1].logprobs == s.top == 1
                values, tokens = np.frombuffer(s.logprobs, "<f4").tolist(), ids_from_bytes(s.top_ids).tolist()
                self.logprobs.setdefault(s.uid, []).extend(zip(values, tokens, strict=True))
            for end in msg.finished:
                assert end.uid not in self.endings, f"{end.uid} ended twice"
                self.endings[end.uid] = end.reason
                assert (end.failure is not None) == (end.reason is FinishReason.ERROR)
                self.errors[end.uid] = "" if end.failure is None else end.failure.message
                self.params[end.uid] = None if end.failure is None else end.failure.param

    def finish_all(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not (self.scheduler.is_busy or self.io.inbox):
                break
            self.step()
        assert not self.scheduler.is_busy, f"stuck: {list(self.scheduler.live.values())}"
        assert sorted(self.endings) == sorted(self.requests), "a request without a terminal reply"
        self.check_no_leak()

    def check_no_leak(self) -> None:
        s = self.scheduler
        check_idle(s)

    def check_outputs(self) -> None:
        """Check that finished requests have the text of their solo run, and aborted ones a prefix of it."""
        for uid, (prompt, params) in self.requests.items():
            if self.endings[uid] is FinishReason.ERROR:
                continue
            capacity = self.scheduler.cache.arena.max_pages * self.engine.page_size + 1
            most = min(self.engine.limits.max_model_len, capacity) - len(prompt)
            limit = most if params.max_tokens is None else min(most, params.max_tokens)
            matcher: FakeMatcher | LimitedMatcher | None = None
            if params.grammar is not None and params.grammar.text == "bad":
                assert self.endings[uid] is FinishReason.ABORT and not self.outputs[uid]
                continue
            if params.grammar is not None:
                matcher = FakeMatcher(params.grammar.text, self.engine.vocab, not params.ignore_eos)
            if params.thinking is not None:
                matcher = LimitedMatcher(params.thinking, self.engine.vocab, matcher)
            want = expected_output(
                prompt,
                limit,
                self.engine.vocab,
                ignore_eos=params.ignore_eos,
                stops=params.stop_token_ids,
                matcher=matcher,
                adapter="" if params.adapter is None else params.adapter.source,
            )
            got = self.outputs[uid]
            if params.logprobs is not None and got:
                ids = list(enumerate([*prompt, *got]))[1 if params.echo else len(prompt) :]
                assert self.logprobs[uid] == ids, f"request {uid}"
            assert params.logprobs is not None or uid not in self.logprobs
            if self.endings[uid] is FinishReason.ABORT:
                assert got == want[: len(got)]
            else:
                assert got == want, f"request {uid}: {got} instead of {want}"


def run_random_trace(
    seed: int,
    depth: int,
    speculate: str = "off",
    tiers: Sequence[TierSpec] = (),
    damage: float = 0.0,
    deaths: int = 0,
    bounded: str = "",
    adapter_slots: int = 0,
) -> tuple[Harness, Counter[str]]:
    """Random arrivals with shared prefixes, chunked prompts, aborts, EOS, tight pools; all rules checked throughout.

    So many `deaths` of the scheduler happen on the way. In each step a stored page is damaged with the probability
    `damage`. `bounded` names the bounded state that rows have: "window", "state", or "window state". With
    `adapter_slots`, most requests have one of five adapters, of which one is bad.
    """
    rng, limits = random.Random(seed), random.Random(seed)
    page_size = rng.choice((1, 2, 4, 8))
    max_len = 64
    tight = rng.random() < 0.5
    num_pages = -(-max_len // page_size) + rng.randrange(4) if tight else 4 * max_len // page_size
    vocab = rng.choice((7, 23, 101))  # the smaller, the sooner an EOS
    costs = StepCosts(1e-3, 1e-4, 1e-6, 1e-6) if rng.random() < 0.3 else None
    new_engine = partial(
        FakeEngine,
        rows=rng.choice((1, 2, 4, 7)),
        num_pages=num_pages,
        page_size=page_size,
        max_model_len=max_len,
        vocab=vocab,
        costs=costs,
        late=rng.choice((1, 3)),
        tiers=tiers,
        adapter_slots=adapter_slots,
        **random_bounded(bounded, seed, page_size),
    )

    def make_engine() -> FakeEngine:
        engine = new_engine()
        engine.is_async = seed % 4 != 3
        return engine

    h = Harness(
        make_engine(),
        depth,
        cache_type=rng.choice(("radix", "radix", "radix", "radix" if tiers else "naive")),
        schedule_policy=rng.choice((("shortest", "fcfs")[seed % 3 == 2], "lpm")),
        max_prefill_length=rng.choice((3, 8, 24, 200)),
        itl_target_ms=None if costs is None else rng.choice((0.5, 2.0, 4.0, None)),
        engine=EngineConfig(speculate=speculate, num_draft_tokens=1 + seed % 8),
    )
    h.engine.draft_luck = (0.0, 0.5, 0.9, 1.0)[seed % 4]
    h.scheduler.pace.floor = rng.choice((1, 5))
    h.scheduler.prefill.patience = rng.choice((1, 3, 1000))
    prefixes = [[rng.randrange(vocab) for _ in range(rng.choice((5, 16, 40)))] for _ in range(3)]
    dies_at = {(i + 1) * 60 // (deaths + 1) for i in range(deaths)}
    for turn in range(60):
        if turn in dies_at:
            h.die(make_engine())
        for _ in range(rng.choice((0, 0, 1, 2, 3))):
            head = rng.choice(prefixes)[: rng.randrange(1, 41)] if rng.random() < 0.7 else []
            tail = [rng.randrange(vocab) for _ in range(rng.choice((0, 1, 2, 9, 30)))]
            max_tokens = rng.choice((1, 2, 8, 20, None))
            stops = tuple(rng.randrange(vocab) for _ in range(3 if rng.random() < 0.05 else 0))
            wanted: dict[str, object] = {"logprobs": 1, "echo": rng.random() < 0.5} if rng.random() < 0.2 else {}
            if rng.random() < 0.2:
                wanted["cache_salt"] = "a"
            if speculate != "off" and rng.random() < 0.1:
                wanted["speculate"] = False
            if rng.random() < 0.25:
                text = "bad" if rng.random() < 0.1 else f"{rng.randrange(9)} {rng.choice((1, 3, 12, 99))}"
                wanted["grammar"] = Grammar("regex", text)
            if limits.random() < 0.2:
                markers = [
                    text_of([limits.randrange(1, vocab) for _ in range(limits.choice((1, 1, 2, 3)))]) for _ in "ab"
                ]
                budget = limits.choice((0, 1, 3, 7, 30))
                lead = limits.choice(("", "", text_of([1]), markers[0][:1] + text_of([2])))
                wanted["thinking"] = Thinking(*markers, limits.random() < 0.7, lead, budget)
            if limits.random() < 0.3:
                wanted["priority"] = limits.choice((-5, 1, 2))
            if adapter_slots and rng.random() < 0.7:
                name = rng.choice(("bad", *"abcd"))
                wanted["adapter"] = Adapter(name, f"/{name}", "key")
            prompt = (head + tail)[: max_len - (max_tokens or 1)] or [1]
            child_index = len(h.requests) % 5
            h.add(prompt, max_tokens, child_index, ignore_eos=rng.random() < 0.3, stop_token_ids=stops, **wanted)
        if h.requests and rng.random() < 0.3:
            h.abort(rng.randrange(len(h.requests)))
        if damage and rng.random() < damage:
            h.engine.damaged |= {(tier, slot) for tier, slots in enumerate(h.engine.slots) for slot in slots}
        h.step()
    h.finish_all()
    h.check_outputs()
    return h, Counter(h.endings.values())


def random_bounded(kinds: str, seed: int, page_size: int) -> dict[str, Any]:
    """Return options of a `FakeEngine` with bounded state of these `kinds`, "window" and "state".

    There is room for them, and for snapshots or not.
    """
    rng, window = random.Random(seed), random.Random(seed).choice((1, 3, 8, 20))
    pages = ids_per_row(window, page_size)
    pages = rng.choice((2 * pages, 3 * pages + 4, 6 * pages, 9 * pages))
    each = {"window": (Bounded(WINDOW, window), pages), "state": (Bounded(STATE), rng.choice((1, 2, 5, 20)))}
    chosen = [found for kind, found in each.items() if kind in kinds]
    per_block = rng.choice(((1, 1, 1), (5, 1, 1), (1, 3, 1), (6, 2, 1))) if kinds else (1, 1, 1)
    return {"bounded": [b for b, _ in chosen], "room": [n for _, n in chosen], "per_block": per_block}


def digest_of_plans() -> str:
    """Return a checksum of all plans of some traces, to compare processes with different hash seeds."""
    digest = hashlib.sha256()
    for seed in range(8):
        h, _ = run_random_trace(seed, depth=1)
        for plan in h.engine.plans:
            digest.update(plan)
    return digest.hexdigest()
