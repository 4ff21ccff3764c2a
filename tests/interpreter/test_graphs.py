"""What the CUDA graph runners do on the host, and the batches that their graphs see, against the eager runner.

A graph is played here by what it would have recorded: its work is done again, into the same tensors. The model is a
table: its logits depend on everything that a step tells it about a token.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from minisgl.core.layout import (
    FULL,
    NO_INTS,
    NO_MASKS,
    NO_SEQUENCES,
    PAGE_WRITE,
    PROPOSAL,
    PROPOSED,
    ROW_STATE,
    SEQUENCE,
    WINDOW,
    Flag,
)
from minisgl.core.params import Grammar, SamplingParams
from minisgl.core.plan import Batch, BatchPlan, StepResult
from minisgl.device.device import CpuDevice
from minisgl.distributed.communicator import SoloCommunicator
from minisgl.distributed.info import ALONE
from minisgl.distributed.tensor_parallel import VocabParallel
from minisgl.engine.draft_model import DraftModel
from minisgl.engine.drafting import Drafting
from minisgl.engine.graphs import runners as runners_of_gpus
from minisgl.engine.graphs.capture import TAILS, tail_of
from minisgl.engine.graphs.sizes import LAUNCH_FLOPS, prompt_sizes
from minisgl.engine.graphs.step import CapturedRunner
from minisgl.engine.runner import EagerRunner, Parts
from minisgl.engine.state import LogitPenalties, RowState
from minisgl.engine.trial import trial_plan
from minisgl.layers.linear import Stream
from minisgl.ops.table import load_ops
from minisgl.scheduler.req import Req
from minisgl.scheduler.writes import decode_flags, penalty_record, row_fields, sampling_flags
from minisgl.settings.options import MAX_DRAFTS
from minisgl.speculative.ngram import NGramDrafter

CPU = torch.device("cpu")
VOCAB, ROWS, PAGE, WIDTH, DRAFTS = 90, 9, 4, 20, 4
WORDS = -(-VOCAB // 32)
MASK = Grammar("regex", "")
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=5, top_p=0.9),
    SamplingParams(temperature=0.0, frequency_penalty=2.0, presence_penalty=1.0, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, min_p=0.1, logit_bias=((3, 4.0), (7, -9.0)), min_tokens=9, stop_token_ids=(3, 5)),
    SamplingParams(temperature=1.0, grammar=MASK),
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=0.5, grammar=MASK, frequency_penalty=1.0, logprobs=0),
]


class Replayed:
    def __init__(self, work: Callable[[], Any]) -> None:
        self.work, self.result = work, work()

    def replay(self) -> None:
        result = self.work()
        if isinstance(result, torch.Tensor):
            self.result.copy_(result)


def capture(work: Callable[[], Any]) -> tuple[Replayed, Any]:
    recorded = Replayed(work)
    return recorded, recorded.result


class Event:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class Device(CpuDevice):
    def upload_into(self, target: torch.Tensor, array: np.ndarray) -> None:
        target.copy_(torch.from_numpy(array))

    def copy_ahead(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)


class Table:
    """A model of random numbers."""

    num_parameters, config = 1, SimpleNamespace(vocab_size=VOCAB, num_layers=1)
    recurrences: ClassVar[dict[int, Any]] = {}

    def __init__(self, repeats: bool) -> None:
        """The text `repeats` itself where the position is below 50."""
        self.table = torch.randn(97, VOCAB, generator=torch.Generator().manual_seed(8)).half() * 3
        self.repeats = repeats

    def forward(self, input_ids: torch.Tensor, context: Any) -> torch.Tensor:
        return self.logits(self.hidden(input_ids, context))

    def hidden(self, input_ids: torch.Tensor, context: Any) -> Stream:
        rows = context.batch.token_rows.long()
        at = (
            (input_ids * 31 + context.batch.positions * 7).long() + context.mixers[0] * 3 + context.mixers[1] * 5 + rows
        )
        half = self.table[at % 97] / 2
        if self.repeats:
            positions = context.batch.positions.long()
            half[torch.arange(len(at)), positions % 3] += 9 * (positions < 50)
        for layer in context.taps:
            context.taps[layer] = half
        half = half[context.batch.logit_tokens]
        return Stream(half, half)

    def logits(self, stream: Stream) -> torch.Tensor:
        return stream.x + stream.residual


class Head(DraftModel):
    """Knows how the texts go on, and notes what it is shown."""

    layers = (0,)

    def __init__(self) -> None:
        self.parameters, self.spec = (), SimpleNamespace(max_queries=1 + DRAFTS)
        self.parts: Any = SimpleNamespace(device=Device(1))
        self.notes = torch.zeros(ROWS + 1, VOCAB + 2)

    def draft_rows(self, inputs: torch.Tensor, max_drafts: int, flags: int, drafting: Drafting) -> None:
        rows = inputs[0].long()
        drafting.drafts[rows] = ((drafting.lengths[rows].unsqueeze(1) - 1 + torch.arange(MAX_DRAFTS)) % 3).int()

    def extend(
        self, batch: Batch, input_ids: torch.Tensor, states: list[torch.Tensor], out: torch.Tensor, drafting: Drafting
    ) -> None:
        at = batch.logit_tokens
        seen = torch.cat([out[0, : len(at)].unsqueeze(1), input_ids[at].unsqueeze(1), states[0][at].float()], 1)
        self.notes.index_add_(0, batch.sampling.rows, seen * batch.positions[at].unsqueeze(1))

    def _logits(self, ids: torch.Tensor, batch: Batch) -> torch.Tensor:
        raise AssertionError


def parts(ops: str | None = None, *, has_model: bool = False) -> Parts:
    """With drafts, if `ops` names those of the drafter."""
    comm, device = SoloCommunicator(ALONE, CPU), Device(1)
    state = RowState(ROWS + 1, WIDTH, CPU, groups=2)
    state.page_tables.fill_(ROWS * WIDTH)
    vocab, store = VocabParallel(comm, VOCAB), SimpleNamespace(page_size=PAGE)
    penalties = LogitPenalties(ROWS + 1, VOCAB, 8, device)
    penalties.seen.fill_(77)  # unwritten
    attention = [SimpleNamespace(group=i, prepare=lambda batch, page_table, out_loc: out_loc) for i in (FULL, WINDOW)]
    played: Any = (Table(ops is not None), store, attention)
    drafting = None
    if ops is not None:
        drafter = Head() if has_model else NGramDrafter(load_ops(ops))
        drafting = Drafting(ROWS + 1, 80, state.last_token, drafter, device)
    return Parts(device, load_ops("reference"), *played, state, penalties, comm, vocab, drafting)


class Traffic:
    """Plans as a scheduler makes them: prompts, then decoding rows in any order and number."""

    def __init__(self, seed: int) -> None:
        self.rng, self.step, self.lens = random.Random(seed), 0, [0] * ROWS
        self.params = [*PARAMS, PARAMS[3]]
        self.texts: list[list[int]] = [[] for _ in range(ROWS)]
        self.ready = [0] * ROWS  # drafts; -1 where the device has no history

    def prompts(self, rows: list[int]) -> BatchPlan:
        """Rows are filled, some with tokens that were generated before."""
        sequences, tokens, pages, states, penalties = [], [], [], [], [NO_INTS]
        for row in rows:
            ids = np.array([self.rng.randrange(VOCAB) for _ in range(self.rng.randrange(1, 9))], np.int32)
            req = Req(row, ids, self.params[row], 40, row, (5 << 32) | (row * 977))
            req.append_sampled(np.array([self.rng.randrange(9)] * self.rng.randrange(3), np.int32))
            p, count = req.sampling_params, len(req.ids)
            sequences.append((row, 0, count, Flag.SAMPLES | sampling_flags(req)))
            tokens.append(req.ids)
            pages += [(FULL, row, i, row * WIDTH + i) for i in range(WIDTH)]
            pages += [(WINDOW, row, i, row * WIDTH + (3 * i) % WIDTH) for i in range(WIDTH)]
            states.append((row, row_fields(req)))
            if p.has_penalties:
                penalties.append(penalty_record(req, row, frozenset({2})))
            self.lens[row], self.texts[row], self.ready[row] = count, req.ids.tolist(), -1
        return self._plan(sequences, np.concatenate(tokens), pages, states, np.concatenate(penalties))

    def decode(self, rows: list[int]) -> BatchPlan:
        sequences = []
        for row in rows:
            req = Req(row, NO_INTS, self.params[row], 1, row, 0)
            sequences.append((row, self.lens[row], self.lens[row] + 1, decode_flags(req)))
            self.lens[row] += 1
        return self._plan(sequences, NO_INTS, [(FULL, rows[0], WIDTH - 1, rows[0] * WIDTH)], [], NO_INTS)

    def draft(self, rows: list[int]) -> BatchPlan:
        """As `decode`, but most of the rows have DRAFTS, and the host thinks that some texts are longer."""
        sequences, histories, proposals = [], [NO_INTS], []
        for row in rows:
            flags = decode_flags(Req(row, NO_INTS, self.params[row], 1, row, 0))
            start, count = self.lens[row], 0
            if self.rng.random() < 0.8:
                if self.ready[row] < 0:
                    tokens = np.array(self.texts[row], np.int32)
                    histories += [np.array([len(tokens) + 4, row, 0, start + 1], np.int32), tokens]
                    self.ready[row] = 0
                if self.rng.random() < 0.2:
                    tokens = np.resize([(start + i) % 3 for i in range(3)], PROPOSED)
                    proposals.append((row, start + 1, tokens))
                    self.ready[row] = DRAFTS
                count, flags = self.rng.randrange(min(self.ready[row], DRAFTS) + 1), flags | Flag.DRAFTS
                start += self.rng.randrange(3)
            else:
                self.ready[row] = -1
            sequences.append((row, start, start + 1 + count, flags))
        plan = self._plan(sequences, NO_INTS, [(FULL, rows[0], WIDTH - 1, rows[0] * WIDTH)], [], NO_INTS)
        return replace(plan, histories=np.concatenate(histories), proposals=np.array(proposals, PROPOSAL))

    def collect(self, plan: BatchPlan, result: np.ndarray) -> None:
        """Take in a result of tokens, finiteness, confirmation and the number of drafts."""
        column = 0
        for (row, _, _, flags), width in zip(plan.sequences.tolist(), plan.widths.tolist(), strict=True):
            tokens, _, confirmed, ready = result[:4, column : column + width]
            column += width
            taken = tokens[confirmed != 0].tolist()
            self.texts[row] += taken
            if flags & Flag.DRAFTS:
                self.lens[row], self.ready[row] = self.lens[row] + len(taken), int(ready[0])
            elif flags & Flag.FROM_DEVICE:
                self.lens[row] += 1

    def mixed(self, decoding: list[int], filled: list[int], drafts: bool = False) -> BatchPlan:
        first, then = (self.draft if drafts else self.decode)(decoding), self.prompts(filled)
        if drafts:
            then = replace(then, histories=first.histories, proposals=first.proposals)
        masks = [plan.masks for plan in (first, then) if len(plan.masks)]
        both = {
            name: np.concatenate([getattr(first, name), getattr(then, name)]) for name in ("sequences", "page_writes")
        }
        return replace(then, **both, masks=np.concatenate(masks) if masks else NO_MASKS)

    def _plan(self, sequences: list, tokens: np.ndarray, pages: list, states: list, penalties: np.ndarray) -> BatchPlan:
        self.step += 1
        masked = [
            row
            for row, start, stop, flags in sequences
            for _ in range(stop - start if flags & Flag.DRAFTS else 1)
            if flags & Flag.MASKED
        ]
        bits = [self.rng.getrandbits(32) for _ in range(WORDS * len(masked))]
        masks = np.array(bits, np.uint32).view(np.int32).reshape(-1, WORDS) if masked else NO_MASKS
        records = np.array(sequences, SEQUENCE), tokens, np.array(pages, PAGE_WRITE), np.array(states, ROW_STATE)
        return BatchPlan(self.step, *records, penalties, masks)


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[EagerRunner, list[Any]]]:
    """An eager runner with its own state, and the runners of another that has graphs."""
    monkeypatch.setattr(torch.cuda, "Event", Event)

    def made(drafts: bool = False, has_model: bool = False) -> tuple[EagerRunner, list[Any]]:
        captured = parts("triton" if drafts else None, has_model=has_model)
        eager: Any = EagerRunner(captured)
        graphs = CapturedRunner(captured, capture, ROWS, 48, 1 + DRAFTS * drafts)  # type: ignore[arg-type]
        captured.state.page_tables.fill_(ROWS * WIDTH)
        return EagerRunner(parts("reference" if drafts else None, has_model=has_model)), [graphs, eager]

    return made


def kind(runner: Any, plan: BatchPlan) -> str:
    """What the step that a plan takes was captured for."""
    if not isinstance(runner, CapturedRunner):
        return "eager"
    size = runner._choose(plan).size
    return "prompts" if size.shape.chunks else "decode" if size.is_plain else "drafts"


def run(runner: Any, plan: BatchPlan, is_late: bool) -> np.ndarray:
    """Its result, the masks with the plan or after it."""
    if not (is_late and len(plan.masks)):
        return columns(runner.launch(plan).wait())
    output = runner.launch(replace(plan, masks=NO_MASKS))
    assert output.awaits_masks
    output.sample(plan.masks)
    return columns(output.wait())


def columns(result: StepResult) -> np.ndarray:
    """Tokens, finiteness, confirmation, drafts and log-probabilities, one below the other."""
    lines = result.tokens, result.finite, result.confirmed, result.ready, result.logprobs
    return np.concatenate([np.atleast_2d(line) for line in lines if line is not None])


@pytest.mark.parametrize("is_late", [False, True], ids=["masks with the plan", "masks after it"])
def test_graphs_give_what_the_eager_runner_gives(runners: Any, is_late: bool) -> None:
    alone, captured = runners()
    traffic, used = Traffic(40), set()

    def compare(plan: BatchPlan) -> None:
        runner = next(r for r in captured if r.fits(plan))
        want = run(alone, plan, not is_late)
        assert np.array_equal(run(runner, plan, is_late), want)
        mine, theirs = runner.parts, alone.parts
        assert torch.equal(mine.state.last_token[:ROWS], theirs.state.last_token[:ROWS])
        assert torch.equal(mine.penalties.seen[:ROWS], theirs.penalties.seen[:ROWS])
        used.add((kind(runner, plan), tail_of(int(np.bitwise_or.reduce(plan.sequences["flags"])))))

    for rows in ([0, 1], [2], [3, 4, 5, 6], [8, 7]):
        compare(traffic.prompts(rows))
    for i in range(40):
        rows = traffic.rng.sample(range(ROWS), traffic.rng.randrange(1, ROWS + 1))
        if i % 7 == 3:
            compare(traffic.prompts([7, 0, 5] if i == 3 else rows[:3]))
        elif i % 3 == 1 and len(rows) > 2:
            compare(traffic.mixed(rows[2:], rows[:2]))
        else:
            compare(traffic.decode({4: [0, 1], 5: [2, 0]}.get(i % 9, rows)))
    assert used == {(name, tail) for name in ("decode", "prompts") for tail in TAILS}


@pytest.mark.parametrize("is_late", [False, True], ids=["masks with the plan", "masks after it"])
@pytest.mark.parametrize("has_model", [False, True], ids=["looked up", "by a model"])
def test_graphs_with_drafts_give_what_the_eager_runner_gives(runners: Any, is_late: bool, has_model: bool) -> None:
    alone, captured = runners(drafts=True, has_model=has_model)
    traffic, used, right = Traffic(41), set(), 0
    rng = traffic.rng
    for _ in range(60):
        rows = rng.sample(range(ROWS), rng.randrange(2, ROWS + 1))
        full = [row for row in rows if traffic.lens[row] == 0 or traffic.lens[row] > 60]
        rest = [row for row in rows if row not in full]
        if full:
            plan = traffic.mixed(rest, full, drafts=True) if rest else traffic.prompts(full)
        else:
            plan = traffic.draft(rows)
        runner = next(r for r in captured if r.fits(plan))
        want = run(alone, plan, not is_late)
        got = run(runner, plan, is_late)
        if plan.has_drafts:  # the number of drafts is read for rows with DRAFTS only
            got[3] *= np.repeat((plan.sequences["flags"] & Flag.DRAFTS) != 0, plan.widths)
        assert np.array_equal(got, want)
        if plan.has_drafts:
            right += int(want[2].sum()) - len(plan.widths)
            traffic.collect(plan, want)
        else:
            traffic.collect(plan, np.stack([*want[:2], np.ones_like(want[0]), np.zeros_like(want[0])]))
        mine, theirs = runner.parts, alone.parts
        assert torch.equal(mine.state.last_token[:ROWS], theirs.state.last_token[:ROWS])
        assert torch.equal(mine.penalties.seen[:ROWS], theirs.penalties.seen[:ROWS])
        for row in np.flatnonzero(np.array(traffic.ready) >= 0).tolist():
            texts = [p.drafting.history[row, : p.drafting.lengths[row]] for p in (mine, theirs)]
            assert torch.equal(texts[0], texts[1]) and texts[0].tolist() == traffic.texts[row]
        tail = tail_of(int(np.bitwise_or.reduce(plan.sequences["flags"])))
        used.add((kind(runner, plan), tail, plan.has_drafts, bool(full)))
    if has_model:
        notes, theirs = (p.drafting.drafter.notes[:ROWS] for p in (captured[0].parts, alone.parts))
        assert notes.any(1).all() and torch.allclose(notes, theirs)
    assert right > 100
    assert {(name, has_drafts, full) for name, _, has_drafts, full in used} >= {
        ("drafts", True, False),
        ("prompts", True, True),
    }


def test_rows_without_changes_have_the_same_bits_beside_those_with(runners: Any) -> None:
    """Plain and filtered rows alone, and in a step that penalizes, masks and scores others."""
    plain, results = [0, 1, 2], []
    for beside in ([], [3, 4, 5, 6, 7]):
        _, captured = runners()
        traffic, tokens = Traffic(1), []
        for plan in (traffic.prompts(plain + beside), *(traffic.decode(plain + beside) for _ in range(12))):
            runner = next(r for r in captured if r.fits(plan))
            tokens.append(columns(runner.launch(plan).wait())[:2, :3].tolist())
        results.append(tokens)
    assert results[0] == results[1]


def test_prompt_logprobs_are_left_to_the_eager_runner(runners: Any) -> None:
    _, captured = runners()
    plan = Traffic(0).prompts([0])
    assert captured[0].fits(plan)
    plan.sequences["flags"][0] |= Flag.PROMPT_LOGPROBS
    assert not captured[0].fits(plan)


def test_prompts_of_any_length_up_to_the_largest_size_are_graphs(runners: Any) -> None:
    tokens = runners()[1][0]
    for n, fits in ((1, True), (32, True), (33, True), (48, True), (49, False)):
        assert tokens.fits(trial_plan([(0, 0, n, Flag.SAMPLES)])) is fits


@pytest.mark.parametrize(
    ("max_tokens", "parameters", "layers", "largest"),
    [(8192, 0.6e9, 28, 8192), (8192, 1.7e9, 28, 2816), (8192, 8.2e9, 36, 1408), (1000, 0.6e9, 28, 896)],
)
def test_large_steps_are_captured_where_layers_are_small(
    max_tokens: int, parameters: float, layers: int, largest: int
) -> None:
    sizes = [size.tokens for size in prompt_sizes(max_tokens, 256, 1, LAUNCH_FLOPS * layers / (2 * parameters))]
    assert sizes[-1] == largest and sizes == sorted(sizes)


def test_padding_is_no_longer_than_a_text_may_be(runners: Any) -> None:
    """The dummy row's page table is as wide as the others'. A step is captured with nothing but padding."""
    graphs = runners(drafts=True)[1][0]
    for captured in graphs._graphs:
        size = captured.size
        for given in (NO_SEQUENCES, np.array([(0, 0, 1, Flag.FROM_DEVICE)], SEQUENCE)):
            sequences = graphs._io._padded(given, size)
            lens = sequences["stop"] - sequences["start"]
            assert lens.sum() == size.tokens and not lens[-1]
            decoding = sequences[: size.shape.decodes] if size.shape.chunks else sequences
            assert (decoding["stop"] <= (0 if size.shape.chunks else size.shape.queries) + len(given)).all()


def test_nothing_is_left_of_steps_that_only_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their tokens are what was in memory: an embedding would be looked up out of the vocabulary."""
    made = parts("triton")
    assert made.drafting is not None

    class Garbage:
        def launch(self, plan: BatchPlan) -> Any:
            for tensor in (made.state.last_token, made.drafting.drafts, made.drafting.lengths):
                tensor.fill_(1 << 30)
            return SimpleNamespace(wait=lambda: None)

    spec = SimpleNamespace(
        max_running_requests=ROWS, max_step_tokens=64, max_seq_len=80, max_queries=1 + DRAFTS,
        model=SimpleNamespace(vocab_size=VOCAB), info=ALONE,
    )  # fmt: skip
    monkeypatch.setattr(runners_of_gpus, "replace", lambda spec, **changes: SimpleNamespace(**vars(spec) | changes))
    monkeypatch.setattr(runners_of_gpus, "base_runner", lambda parts, spec: Garbage())
    monkeypatch.setattr(runners_of_gpus, "compile_ahead", lambda progress: nullcontext())
    monkeypatch.setattr(runners_of_gpus, "_rehearsal", lambda parts: nullcontext())
    factory = runners_of_gpus.CudaRunners.__new__(runners_of_gpus.CudaRunners)
    factory._spec = spec  # type: ignore[assignment]
    factory.warm_up(made)
    assert not (made.state.last_token.any() or made.drafting.drafts.any() or made.drafting.lengths.any())
