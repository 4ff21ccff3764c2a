"""An engine without a model whose "K/V cache" holds the tokens themselves.

The next token is a checksum of the whole sequence *as read back through the page table*, so any mistake in pages, rows,
prefix sharing, chunking or preemption changes the text, and a request's output can be compared with a plain function of
its prompt (`expected_output`). Like a slow device, the engine executes a step only when its result is awaited or `late`
newer steps have been launched: pages that the host frees too early are read as poison. Copies between pages and the
slots of tiers run as early or as late as they may, at random.

With bounded state, windowed layers store the tokens in pages of their own, and read a window. A recurrent layer keeps a
checksum in the row's slot. Both must agree with the text. All pages are in one memory, in which blocks change hands.

An adapter changes what is stored of each token. It is in its slot as early or as late as it may be.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from minisgl.core.errors import ConfigError
from minisgl.core.layout import FOLD_TOKENS, FULL, LOAD, SLOT_ID, STATE, STATE_LEN, Flag, adapter_loads
from minisgl.core.params import Limits
from minisgl.core.plan import BatchPlan, StepCosts, StepResult
from minisgl.kvcache.arena import Blocks
from minisgl.kvcache.snapshots import STEP_TOKENS, Bounded, IdPool, recent_tokens
from minisgl.kvcache.tiers import TierSpec
from minisgl.scheduler.cache import CacheManager
from support.fake_grammar import FakeMatcher, LimitedMatcher

EOS = 0
POISON = -7
RECENT = recent_tokens(STEP_TOKENS)  # tokens that a slot keeps besides its state
DAMAGED = -8  # what a page of a tier that is not intact becomes: its sequences have no finite logits


HUE = 1_000_000


def hue_of(source: str) -> int:
    """What an adapter adds to the tokens that are stored."""
    return HUE * (1 + zlib.crc32(source.encode()) % 997) if source else 0


def next_token(ids: np.ndarray, vocab: int, allowed: Sequence[int] | None = None) -> int:
    """The "model": a checksum of the sequence, which samples one of the allowed tokens."""
    allowed = range(vocab) if allowed is None else allowed
    return allowed[zlib.crc32(np.ascontiguousarray(ids, np.int32).tobytes()) % len(allowed)]


def logprob_column(position: int, token: int) -> list[int]:
    """A column of `StepResult.logprobs`: the position as "log-probability", the token itself as likeliest."""
    return [*np.array([position], np.float32).view(np.int32).tolist(), token, *([0] * (StepResult.WIDTH - 2))]


def step_seconds(costs: StepCosts, plan: BatchPlan) -> float:
    """How long a step takes, tokens and pairs counted one by one."""
    seconds = costs.base
    for _, start, stop, flags in plan.sequences.tolist():
        if flags & Flag.FROM_DEVICE:
            seconds += costs.per_token * (stop - start) + costs.per_context * start
        else:
            seconds += sum(costs.per_token + costs.per_pair * (position + 0.5) for position in range(start, stop))
    return seconds


def expected_output(
    prompt: Sequence[int],
    max_tokens: int,
    vocab: int,
    *,
    ignore_eos: bool = False,
    stops: Sequence[int] = (),
    matcher: FakeMatcher | LimitedMatcher | None = None,
    adapter: str = "",
) -> list[int]:
    """What the engine must generate for a prompt, whatever else is going on."""
    ids, hue = list(prompt), hue_of(adapter)
    for _ in range(max_tokens):
        ids.append(next_token(np.array(ids) + hue, vocab, None if matcher is None else matcher.allowed()))
        if (ids[-1] == EOS and not ignore_eos) or ids[-1] in stops:
            break
        if matcher is not None:
            matcher.advance(ids[-1])
            if matcher.is_complete:
                break
    return ids[len(prompt) :]


def unit_ids(blocks: Blocks, group: int, page: int) -> list[int]:
    return blocks.units_of(group, [page])[0].tolist()


def planned_units(cache: CacheManager) -> set[int]:
    """The units of copies to and from tiers that will be in the next plan."""
    moves = cache.prefix._keeper._moves if cache.prefix.tiers else []  # type: ignore[attr-defined]
    return {unit for some in moves for unit in some["unit"].tolist()}


class FakeOutput:
    def __init__(self, engine: FakeEngine, plan: BatchPlan) -> None:
        self.engine, self.plan = engine, plan
        self.result: StepResult | None = None
        self.awaits_masks = plan.awaits_masks
        self.moves: list[tuple[int, ...]] = []

    def sample(self, masks: np.ndarray) -> None:
        assert self.awaits_masks and self.engine.pending[-1:] in ([self], []), "too late"
        self.plan, self.awaits_masks = replace(self.plan, masks=masks.copy()), False
        self.engine.plans.append(masks.tobytes())

    def run(self) -> None:
        assert not self.awaits_masks, "executed before it has its masks"
        if self.result is None:
            self.result = self.engine.execute(self.plan, self.moves)

    def wait(self) -> StepResult:
        self.engine.run_until(self)
        assert self.result is not None
        return self.result


def _after(checksum: int, token: int) -> int:
    """The checksum of a text and one more token."""
    assert token >= 0, "a state takes in a token that was rejected or never computed"
    return zlib.crc32(token.to_bytes(4, "little"), checksum)


class FakeEngine:
    is_async = True

    def __init__(
        self,
        *,
        rows: int = 4,
        num_pages: int = 40,
        page_size: int = 4,
        max_model_len: int = 64,
        vocab: int = 11,
        late: int = 1,
        costs: StepCosts | None = None,
        tiers: Sequence[TierSpec] = (),
        bounded: Sequence[Bounded] = (),
        room: Sequence[int] = (),
        per_block: tuple[int, ...] = (1, 1, 1),
        adapter_slots: int = 0,
    ) -> None:
        """There are blocks for `num_pages` pages of FULL and for `room` of each of `bounded`; any may take them."""
        count = -(-num_pages // per_block[FULL])
        count += sum(-(-pages // per_block[b.group]) for b, pages in zip(bounded, room, strict=True))
        self.blocks = Blocks(count, per_block)
        self.page_size, self.max_running_requests = page_size, rows
        self.limits = Limits(max_model_len=max_model_len, vocab_size=vocab)
        self.eos_token_ids = frozenset({EOS})
        self.vocab, self.late, self.costs = vocab, late, costs
        self.seconds = 0.0  # what the batches that were executed took, according to `costs`
        # A block has words for the pages of any group. The last block is never owned.
        width = max(2 + RECENT, page_size)
        memory = np.full((self.blocks.count + 1, math.lcm(*per_block) * width), POISON, np.int64)
        self.units = memory.reshape(-1, width)
        self.kv, self.windows, self.states = (
            memory.reshape(memory.shape[0] * pages, -1)[:, :used]
            for pages, used in zip(per_block, (page_size, page_size, 2 + RECENT), strict=True)
        )
        self.page_table = np.full((rows, -(-max_model_len // page_size)), -1, np.int64)
        self.last_token = np.full(rows, POISON, np.int64)
        self.length = np.full(rows, POISON, np.int64)
        self.history = np.full((rows, max_model_len + 8), POISON, np.int64)
        self.drafts = np.zeros((rows, 8), np.int64)
        self.draft_luck = 0.8  # how often a draft is right
        self.num_right = 0
        self.tiers = [*tiers]
        self.bounded = [*bounded]
        self.adapter_slots = adapter_slots
        self.adapters = [""] * (1 + adapter_slots)  # sources by slot
        self.num_loads = 0
        self.adapter_of_row = np.zeros(rows, np.int64)
        self.loading: list[tuple[int, int, str]] = []  # (step of the plan, slot, source)
        self.window = max((b.window for b in bounded), default=0)
        self.has_state = any(b.group == STATE for b in bounded)
        self.window_table = np.full_like(self.page_table, -1)
        self.state_table = np.full((rows, 2), -1)  # SLOT_ID, STATE_LEN
        self.num_copies = [0, 0]  # of states: restores and captures
        self.slots: list[dict[int, tuple[int, np.ndarray]]] = [{} for _ in tiers]  # slot -> (name, page)
        self.damaged: set[tuple[int, int]] = set()  # (tier, slot) whose next load finds a damaged page
        self.num_moves = [0, 0]  # pages stored and loaded
        self.moves: list[tuple[int, ...]] = []  # that wait to be carried out
        self.rng = random.Random(num_pages)
        self.pending: list[FakeOutput] = []
        self.nan_rows: set[int] = set()
        self.plans: list[bytes] = []

    def describe(self) -> dict[str, str | int | float]:
        return {"model": "fake"}

    def shutdown(self) -> None:
        pass

    def step_costs(self) -> StepCosts | None:
        return self.costs

    def read_adapter(self, source: str) -> None:
        if "bad" in source:
            raise ConfigError(f"{source} does not fit the model")

    def launch(self, plan: BatchPlan) -> FakeOutput:
        packed = plan.pack()
        self.plans.append(packed.tobytes())
        output = FakeOutput(self, BatchPlan.unpack(packed.copy()))
        self.pending.append(output)
        for record in plan.moves.tolist():
            self.num_moves[record[3] == LOAD] += 1
            output.moves.append((*record, sum(self.num_moves)))
            self.moves.append(output.moves[-1])
            if self.rng.random() < 0.5:
                self.move(self.moves[-1])
        for slot, source in adapter_loads(plan.adapters):
            self.loading.append((plan.step, slot, source))
            if self.rng.random() < 0.5:
                self._load_adapters(plan.step + 1)
        while len(self.pending) > self.late:
            self.pending.pop(0).run()
        return output

    def _load_adapters(self, step: int) -> None:
        """Load what plans before `step` have asked for."""
        while self.loading and self.loading[0][0] < step:
            _, slot, source = self.loading.pop(0)
            self.num_loads += 1
            self.adapters[slot] = source

    def run_until(self, output: FakeOutput) -> None:
        while output.result is None:
            self.pending.pop(0).run()

    def watch(self, cache: CacheManager) -> None:
        """Poison whatever becomes free in `cache`."""
        cache.on_free = self.poison
        for pool in [] if cache.bounded is None else cache.bounded.pools:
            release = partial(self._poison_released, cache, pool, pool.release)
            pool.release = release  # type: ignore[method-assign]

    def _poison_released(
        self, cache: CacheManager, pool: IdPool, release: Callable[..., None], ids: list[int], *, last: bool = False
    ) -> None:
        copied = {move[0] for move in self.moves} | planned_units(cache)  # not before it is in its tier
        freed = [i for i in ids if i not in pool.others and not copied & {*unit_ids(self.blocks, pool.group, i)}]
        self.poison(freed, pool.group)
        release(ids, last=last)

    def poison(self, pages: list[int], group: int = FULL) -> None:
        """What a free page holds; called at once, not in device order, to punish early frees."""
        (self.kv, self.windows, self.states)[group][pages] = POISON

    def move(self, move: tuple[int, ...]) -> None:
        """Copy a unit to a slot or back, once, after the earlier moves of this unit or slot."""
        if move not in self.moves:
            return
        unit, tier, slot, kind, name, _ = move
        for earlier in self.moves[: self.moves.index(move)]:
            if earlier[0] == unit or earlier[1:3] == (tier, slot):
                self.move(earlier)
        self.moves.remove(move)
        if kind != LOAD:
            is_free = not self.bounded and (self.kv[unit] < 0).any()
            assert not is_free, f"page {unit} is stored after it was freed: {self.kv[unit]}"
            self.slots[tier][slot] = name, self.units[unit].copy()
            return
        stored, tokens = self.slots[tier][slot]
        assert stored == name, f"slot {slot} of tier {tier} holds something else"
        is_damaged = (tier, slot) in self.damaged
        self.damaged.discard((tier, slot))
        self.units[unit] = DAMAGED if is_damaged else tokens

    def execute(self, plan: BatchPlan, moves: Sequence[tuple[int, ...]] = ()) -> StepResult:
        self._load_adapters(plan.step)
        for state in plan.row_states:
            self.adapter_of_row[state["row"]] = state["fields"]["adapter"]
        for row, _, _, flags in plan.sequences.tolist():
            assert bool(flags & Flag.ADAPTED) == bool(self.adapter_of_row[row]), f"row {row} has another adapter"
        for slot, start, stop in plan.folds.tolist():
            self._fold(slot, start, stop)
        written = {*([] if len(plan.sequences) else plan.moves["unit"].tolist())}
        copies = [(STATE, target) for target in [*plan.restores["target"], *plan.captures["target"]]]
        writes = plan.page_writes[(plan.page_writes["group"] != STATE) | (plan.page_writes["index"] == SLOT_ID)]
        for group, page in [*writes[["group", "page"]].tolist(), *copies]:
            written |= {*unit_ids(self.blocks, group, page)}
        for move in [*self.moves]:
            if move[0] in written or (move in moves and move[3] == LOAD):
                self.move(move)
        for group, row, index, page in plan.page_writes.tolist():
            (self.page_table, self.window_table, self.state_table)[group][row, index] = page
        self.captures = plan.captures.tolist()
        for restore in plan.restores.tolist():
            self.copy(*restore)
        if self.costs is not None:
            self.seconds += step_seconds(self.costs, plan)
        tokens, prompt_ids = plan.tokens.tolist(), plan.prompt_logprob_ids.tolist()
        masks = [np.flatnonzero(np.unpackbits(m.view(np.uint8), bitorder="little")).tolist() for m in plan.masks]
        sampled, finite, logprobs, prompt_logprobs = [], [], [], []
        confirmed, ready = [], []
        self._remember(plan)
        for row, start, stop, flags in plan.sequences.tolist():
            if flags & Flag.DRAFTS and self._is_damaged(row, int(self.length[row]) - 1):
                count = stop - start
                masks = masks[count if flags & Flag.MASKED else 0 :]
                sampled += [0] * count
                finite += [False] * count
                confirmed += [i == 0 for i in range(count)]
                ready += [0] * count
                logprobs += [logprob_column(0, 0)] * count
                continue
            if flags & Flag.DRAFTS:
                width = stop - start if flags & Flag.MASKED else 0
                allowed, masks = masks[:width], masks[width:]
                columns = self._verify(row, start, stop, allowed)
                sampled += columns
                finite += [row not in self.nan_rows] * len(columns)
                right = int((np.cumprod(np.equal(columns[:-1], self.drafts[row, : len(columns) - 1]))).sum())
                self.num_right += right
                confirmed += [i <= right for i in range(len(columns))]
                count = self._propose(row, columns[: right + 1])
                ready += [0 if flags & Flag.MASKED else count, *([0] * (len(columns) - 1))]
                first = int(self.length[row]) - right - 1
                wanted = bool(flags & Flag.LOGPROBS)
                logprobs += [logprob_column((first + i) * wanted, t * wanted) for i, t in enumerate(columns)]
                continue
            if flags & Flag.FROM_DEVICE:
                ids = [int(self.last_token[row])]
                assert stop - start == 1
            else:
                ids, tokens = tokens[: stop - start], tokens[stop - start :]
            for position, token in zip(range(start, stop), ids, strict=True):
                self._store(row, position, token, in_chunk=not flags & Flag.FROM_DEVICE)
            pages = self.page_table[row, : -(-stop // self.page_size)]
            sequence = self.kv[pages].reshape(-1)[:stop]
            is_damaged = self._is_damaged(row, stop)
            assert is_damaged or (sequence >= 0).all(), f"row {row} reads what was freed or never written: {sequence}"
            if not is_damaged:
                self._check_state(row, sequence)
            if flags & Flag.SAMPLES:
                allowed = masks.pop(0) if flags & Flag.MASKED else None
                self.last_token[row] = next_token(sequence, self.vocab, allowed)
                sampled.append(int(self.last_token[row]))
                finite.append(row not in self.nan_rows and not is_damaged)
                confirmed.append(True)
                ready.append(0)
                logprobs.append(logprob_column(stop, sampled[-1]) if flags & Flag.LOGPROBS else logprob_column(0, 0))
            if flags & Flag.PROMPT_LOGPROBS:
                count = stop - start - bool(flags & Flag.SAMPLES)
                ids, prompt_ids = prompt_ids[:count], prompt_ids[count:]
                prompt_logprobs += [logprob_column(p, t) for p, t in zip(range(start + 1, stop + 1), ids, strict=False)]
        assert not self.captures, f"no chunk comes to so many tokens: {self.captures}"
        self.num_copies = [self.num_copies[0] + len(plan.restores), self.num_copies[1] + len(plan.captures)]
        assert not tokens, "the plan has tokens that no sequence takes"
        assert not masks, "the plan has masks that no sequence takes"
        assert not prompt_ids, "the plan has prompt token ids that no sequence takes"
        has_logprobs = bool((plan.sequences["flags"] & (Flag.LOGPROBS | Flag.PROMPT_LOGPROBS)).any())
        columns = np.array(logprobs + prompt_logprobs, np.int32).reshape(-1, StepResult.WIDTH).T
        tokens, oks, flags, counts = (np.array(x, np.int32) for x in (sampled, finite, confirmed, ready))
        drafts = {"confirmed": flags, "ready": counts} if plan.has_drafts else {}
        return StepResult(tokens, oks, columns if has_logprobs else None, **drafts)

    def copy(self, source: int, target: int, row: int, length: int) -> None:
        """Copy a state between a row and a snapshot."""
        assert self.states[source, 0] != POISON, f"row {row}, {length} tokens: state {source} is free"
        self.states[target] = self.states[source]

    def _fold(self, slot: int, start: int, stop: int) -> None:
        """Move a state on by tokens that the slot has."""
        state = self.states[slot]
        if state[0] == POISON:
            return  # its holder has freed it since
        assert state[0] == start < stop and stop % FOLD_TOKENS == 0, f"state {slot} of {state[0]}: {start} to {stop}"
        for position in range(start, stop):
            state[:2] = position + 1, _after(int(state[1]), int(state[2 + position % RECENT]))

    def _store(self, row: int, position: int, token: int, *, in_chunk: bool = False) -> None:
        """Store what layers keep of a token, read what those with a window read, and capture the state after it."""
        token += self._hue(row)
        page, offset = divmod(position, self.page_size)
        self.kv[self.page_table[row, page], offset] = token
        if self.window:
            assert self.window_table[row, page] >= 0, f"row {row} has no window page {page}"
            self.windows[self.window_table[row, page], offset] = token
            read = np.arange(max(0, position + 1 - self.window), position + 1)
            pages, offsets = read // self.page_size, read % self.page_size
            window = self.windows[self.window_table[row, pages], offsets]
            text = self.kv[self.page_table[row, pages], offsets]
            is_damaged = (window == DAMAGED) | (text == DAMAGED)
            assert (is_damaged | (window == text)).all(), f"row {row} has at {position} the window {window} of {text}"
            if is_damaged.any():  # so is what is computed from it
                self.kv[self.page_table[row, page], offset] = DAMAGED
        if self.has_state:
            state, state_len = self.states[self.state_table[row, SLOT_ID]], self.state_table[row, STATE_LEN]
            length, checksum = state[:2].tolist() if position else (0, 0)
            if length == DAMAGED:
                self.kv[self.page_table[row, page], offset], length, checksum = DAMAGED, position, 0
            where = f"row {row} computes position {position} from a state of {length} tokens, planned {state_len}"
            if not in_chunk:
                assert length == state_len and 0 <= position - length < RECENT, where
                state[2 + position % RECENT] = token
                return
            assert length == position < state_len, where
            state[:2] = position + 1, _after(checksum, token)
            for capture in [c for c in self.captures if c[2:] == (row, position + 1)]:
                self.copy(*capture)
                self.captures.remove(capture)

    def _hue(self, row: int) -> int:
        return hue_of(self.adapters[self.adapter_of_row[row]])

    def _check_state(self, row: int, sequence: np.ndarray) -> None:
        if self.has_state:
            state = self.states[self.state_table[row, SLOT_ID]]
            checksum = int(state[1])
            for position in range(state[0], len(sequence)):
                checksum = _after(checksum, int(state[2 + position % RECENT]))
            expected = zlib.crc32(sequence.astype("<i4").tobytes())
            assert checksum == expected, f"row {row} has another state than {sequence}"

    def _is_damaged(self, row: int, length: int) -> bool:
        pages = self.page_table[row, : -(-length // self.page_size)]
        return bool((self.kv[pages].reshape(-1)[:length] == DAMAGED).any())

    def _read(self, row: int, length: int) -> np.ndarray:
        """The sequence of `length` tokens as the page table finds it."""
        pages = self.page_table[row, : -(-length // self.page_size)]
        sequence = self.kv[pages].reshape(-1)[:length]
        assert (sequence >= 0).all(), f"row {row} reads what was freed, rejected or never written: {sequence}"
        return sequence

    def _remember(self, plan: BatchPlan) -> None:
        """Apply the plan's history records and proposals."""
        rest = plan.histories
        while len(rest):
            words, row, first, length = rest[:4].tolist()
            self.history[row, first : first + words - 4] = rest[4:words]
            self.history[row, first + words - 4 : length] = POISON  # in flight
            self.length[row] = length
            rest = rest[words:]
        for row, first, tokens in plan.proposals.tolist():
            offset = int(self.length[row]) - first
            assert offset >= 0, f"the host knows more of row {row} than the device"
            found = tokens[offset : offset + 8]
            self.drafts[row, : len(found)] = found

    def _verify(self, row: int, start: int, stop: int, masks: list[list[int]]) -> list[int]:
        """Compute the newest token of `row` and stop - start - 1 drafts; return what is sampled after each."""
        first = int(self.length[row]) - 1
        assert 0 <= first <= start, f"row {row} has {first + 1} tokens, the plan allows {start + 1}"
        tokens = [int(self.last_token[row]), *self.drafts[row, : stop - start - 1].tolist()]
        self.history[row, first] = tokens[0]
        for position, token in enumerate(tokens, first):
            self._store(row, position, token)
            self._check_state(row, self._read(row, position + 1))
        known = self.history[row, : first + 1]
        sequence = self._read(row, first + 1)
        assert ((known == sequence % HUE) | (known == POISON)).all(), (
            f"the history of row {row} is {known}, not {sequence}"
        )
        allowed = masks or [None] * len(tokens)
        sampled = [next_token(self._read(row, first + 1 + i), self.vocab, allowed[i]) for i in range(len(tokens))]
        right = int(np.cumprod(np.equal(sampled[:-1], tokens[1:])).sum())
        for position in range(first + 1 + right, first + len(tokens)):  # what nobody may read
            self.kv[self.page_table[row, position // self.page_size], position % self.page_size] = POISON
            self.windows[self.window_table[row, position // self.page_size], position % self.page_size] = POISON
            if self.has_state:
                self.states[self.state_table[row, SLOT_ID], 2 + position % RECENT] = POISON
        return sampled

    def _propose(self, row: int, confirmed: Sequence[int]) -> int:
        """Add the confirmed tokens to the history, and draft: mostly what follows. Return how many drafts there are."""
        length = int(self.length[row])
        self.history[row, length : length + len(confirmed)] = confirmed
        self.length[row] = length + len(confirmed)
        self.last_token[row] = confirmed[-1]
        hue = self._hue(row)
        ids = [*self._read(row, length), *(token + hue for token in confirmed)]
        luck = np.random.default_rng(zlib.crc32(np.array(ids, np.int32).tobytes()))
        for i in range(8):
            ids.append(next_token(np.array(ids), self.vocab) + hue)
            self.drafts[row, i] = ids[-1] % HUE if luck.random() < self.draft_luck else luck.integers(self.vocab)
        return int(luck.integers(9)) if luck.random() < 0.8 else 0
