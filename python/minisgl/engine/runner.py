"""How a plan is run on a device: `Engine` takes the first runner that fits, and all runners give the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch import Tensor

from minisgl.core.layout import Flag, as_words
from minisgl.core.plan import Batch, BatchPlan, Context, Sampling, StepResult
from minisgl.core.registry import Registry
from minisgl.engine.batch import make_batch
from minisgl.engine.graphs.capture import TAILS
from minisgl.ops.adapters import TokenSlots
from minisgl.ops.sampling import rows_per_pass

if TYPE_CHECKING:
    from minisgl.attention.backend import MixerSpec
    from minisgl.core.layout import Records
    from minisgl.core.plan import Ints, PromptLogprobs
    from minisgl.device.device import Device, Pending
    from minisgl.distributed.communicator import Communicator
    from minisgl.distributed.tensor_parallel import VocabParallel
    from minisgl.engine.adapters import AdapterPool
    from minisgl.engine.config import EngineSpec
    from minisgl.engine.drafting import Drafting
    from minisgl.engine.state import LogitPenalties, RowState
    from minisgl.kvcache.store import StateStore
    from minisgl.layers.linear import Stream
    from minisgl.models.fallback import FallbackForCausalLM
    from minisgl.models.llama import LlamaForCausalLM
    from minisgl.ops.adapters import AdapterWeights
    from minisgl.ops.quantized import Format
    from minisgl.ops.table import OpTable


NO_TOKENS: Final = torch.empty(2, 0, dtype=torch.int32)


class Mixer(Protocol):
    """How layers with equal `specs.Mixer` mix tokens: `attention.backend.Attention`, or a recurrence."""

    name: str
    group: int  # whose page table `prepare` gets
    captures_decodes: bool  # whether a graph can replay steps that decode, and steps with prompts
    captures_prompts: bool

    def prepare(self, batch: Batch, page_table: Tensor, out_loc: Tensor) -> Any:
        """Return what these layers call in this step. Runs once a step, after its page writes, in the order of steps.

        page_table is [rows, pages per row] int32, out_loc [T] int64.
        """


# Those that are not attention with K and V, by type of `specs.Mixer`. Recurrences have `fold(layers, folds)` besides,
# for `BatchPlan.folds`.
MIXERS: Final[Registry[Callable[[MixerSpec[Any], OpTable], Any]]] = Registry("mixer")
MIXERS.add("Latent", "minisgl.attention.selection:latent_mixer")
MIXERS.add("GatedDelta", "minisgl.attention.recurrent:GatedDeltaMixer")


class ForwardOutput:
    """A launched step on its way to the host.

    Sampling starts at once, unless it needs masks that the plan does not have: then `sample` brings them.
    """

    def __init__(self, plan: BatchPlan, sample: Callable[[Ints], Pending], *, embeds: bool = False) -> None:
        """`sample(masks)` starts sampling. Its result is int32 with a column for each sequence that samples, then one
        for each of the plan's `prompt_logprob_ids`: a token, whether its logits were finite, with DRAFTS whether it is
        confirmed and the number of drafts that are ready and, if any is wanted, `StepResult.logprobs` (with `embeds`:
        `StepResult.embeddings`).
        """
        self._has_drafts = plan.has_drafts
        self._num_prompt_logprobs = len(plan.prompt_logprob_ids)
        self._embeds = embeds
        self._sample = sample
        self._pending = None if plan.awaits_masks else sample(plan.masks)

    @property
    def awaits_masks(self) -> bool:
        return self._pending is None

    def sample(self, masks: Ints) -> None:
        """Start sampling with the masks [M, W] that the plan did not have."""
        assert self._pending is None, "sampling has started already"
        self._pending = self._sample(masks)

    def wait(self) -> StepResult:
        """The step's result; blocks until the step is done."""
        assert self._pending is not None, "the step still awaits its masks"
        columns = self._pending()
        sampled = columns.shape[1] - self._num_prompt_logprobs
        confirmed, ready = columns[2:4, :sampled] if self._has_drafts else (None, None)
        height = 4 if self._has_drafts else 2
        rest = columns[height:] if len(columns) > height else None
        logprobs, embeddings = (None, rest) if self._embeds else (rest, None)
        return StepResult(columns[0, :sampled], columns[1, :sampled], logprobs, embeddings, confirmed, ready)


class Runner(Protocol):
    """One way to run plans."""

    name: str

    def fits(self, plan: BatchPlan) -> bool:
        """Whether this runner can run `plan`."""

    def launch(self, plan: BatchPlan) -> ForwardOutput:
        """Start the step after those launched before."""

    # The one that fits any plan has `fold(folds)` besides, which moves recurrent states on as `BatchPlan.folds` says.


class RunnerFactory(Protocol):
    """Makes the runners of one kind of device."""

    def __init__(self, spec: EngineSpec, device: Device) -> None:
        """Raises `ConfigError` for settings that the device cannot honour, before anything is loaded."""

    def supports_format(self, kind: Format) -> bool:
        """Whether the runners multiply a checkpoint's matrices of this format as they are."""

    def pack_adapter(self, weights: AdapterWeights) -> None:
        """Bring what one adapter (S = 1) has of a projection into the layout that the runners read."""

    @staticmethod
    def choose_dtype(spec: EngineSpec) -> EngineSpec:
        """`spec` with the dtype that suits the runners best; called when the user gave none."""

    def warm_up(self, parts: Parts) -> None:
        """Do what makes the first steps as fast as later ones."""

    def make(self, parts: Parts) -> list[Runner]:
        """The runners in order of preference; the last one fits any plan."""


RUNNERS: Final[Registry[type[RunnerFactory]]] = Registry("runner factory")
RUNNERS.add("cuda", "minisgl.engine.graphs.runners:CudaRunners")
RUNNERS.add("cpu", "minisgl.native.runner:CpuRunners")


@dataclass(frozen=True, slots=True)
class Parts:
    """What all runners of an engine share."""

    device: Device
    ops: OpTable
    model: LlamaForCausalLM | FallbackForCausalLM
    store: StateStore
    mixers: tuple[Mixer, ...]
    state: RowState
    penalties: LogitPenalties
    comm: Communicator
    vocab: VocabParallel
    drafting: Drafting | None = None
    adapters: AdapterPool | None = None

    @property
    def page_size(self) -> int:
        return self.store.page_size

    @property
    def flops_per_token(self) -> float:
        """Of this rank, without attention; experts count as if all were chosen."""
        return 2.0 * self.model.num_parameters / self.comm.info.size

    @property
    def weight_bytes(self) -> int:
        """Of this rank, those of a drafter and the room for adapters included."""
        draft = None if self.drafting is None else self.drafting.model
        adapters = 0 if self.adapters is None else self.adapters.memory.nbytes
        return adapters + sum(p.tensor.nbytes for p in (*self.model.parameters, *(draft.parameters if draft else ())))

    def fold(self, folds: Records) -> None:
        """Move recurrent states on, as `BatchPlan.folds` says."""
        moves = self.device.upload(as_words(folds))[0]
        for mixer, layers in self.model.recurrences.items():
            self.mixers[mixer].fold(layers, moves)  # type: ignore[attr-defined]

    def run(self, batch: Batch) -> Tensor:
        """Logits [S, this rank's part of V] of a step, its page writes and sampling states applied first."""
        return self.model.logits(self.hidden(*self.begin(batch)))

    def begin(self, batch: Batch) -> tuple[Tensor, Batch, Tensor]:
        """Apply a step's page writes and sampling states; what `hidden` takes."""
        state = self.state
        state.apply(batch.page_writes, batch.row_states)
        if batch.drafts is not None:
            assert self.drafting is not None, "the plan has DRAFTS, but there is no drafter"
            batch = self.drafting.complete(batch)
        input_ids = torch.where(batch.input_ids < 0, state.last_token[batch.token_rows.long()], batch.input_ids)
        return input_ids, batch, self.out_loc(batch)

    def out_loc(self, batch: Batch) -> Tensor:
        """Where the K/V of each token goes in each group, [groups, T]; see `StepAttention`."""
        size = self.page_size
        pages = self.state.page_tables[:, batch.token_rows.long(), (batch.positions // size).long()]
        return pages.long() * size + batch.positions % size

    def context(self, batch: Batch, out_loc: Tensor) -> Context:
        """What a forward pass of `batch` needs besides its inputs; out_loc [groups, T] int64."""
        tables = self.state.page_tables
        mixers = tuple(m.prepare(batch, tables[m.group], out_loc[m.group]) for m in self.mixers)
        return Context(batch, mixers, adapters=self.adapters_of(batch.token_rows) if batch.has_adapters else None)

    def adapters_of(self, rows: Tensor) -> TokenSlots:
        """Return the slots of the adapters of tokens in `rows` [T]."""
        assert self.adapters is not None, "there is no room for adapters"
        return TokenSlots.of(self.state.adapter[rows.long()], self.adapters.sizes.slots)

    def hidden(self, input_ids: Tensor, batch: Batch, out_loc: Tensor, taps: dict[int, Tensor] | None = None) -> Stream:
        """What the model makes logits of: the hidden states [S, H] of a step after `begin`; `taps` as in `Context`."""
        context = self.context(batch, out_loc)
        return self.model.hidden(input_ids, context if taps is None else replace(context, taps=taps))

    def sample(self, logits: Tensor, sampling: Sampling) -> Tensor:
        """Sample and commit tokens -> int32 [2, S], or [2 + StepResult.WIDTH, S] if log-probabilities are wanted.

        Penalties count the drafts before a token as if they were accepted; if not, the token is rejected in any case.
        Log-probabilities are the model's own, whatever changes the logits here. Several ranks exchange the best
        candidate of each, unless a sequence asks for more than a temperature: filters look at all logits, so these are
        gathered, and every rank samples as one rank would.
        """
        rows, positions, row_flags = sampling.rows, sampling.positions, sampling.row_flags
        if not (self.vocab.is_whole or sampling.flags & (TAILS[-1] | Flag.PROMPT_LOGPROBS)):
            own = self.ops.candidates(logits, rows, positions, self.state, self.vocab.shard.start)
            out = self.vocab.best(own)
            self.state.last_token[rows] = out[0]
            return out
        logits = self.vocab.gather(logits)
        penalized = logits
        if sampling.flags & (Flag.PENALIZED | Flag.MASKED):
            drafts = (sampling.drafted, sampling.inputs)
            penalized = self.ops.apply_penalties(
                logits, row_flags, sampling.mask_index, rows, positions, self.penalties, *drafts
            )
        out = self.ops.sample_rows(penalized, rows, positions, self.state, bool(sampling.flags & Flag.FILTERED))
        if sampling.drafted is None:
            self.count(out, sampling)
        if not sampling.flags & (Flag.LOGPROBS | Flag.PROMPT_LOGPROBS):
            return out
        return torch.cat([out, self.ops.token_logprobs(logits, out[0], row_flags)])

    def count(self, out: Tensor, sampling: Sampling) -> None:
        """Count the tokens of `out` for the penalties; in a step with DRAFTS, those that its third line confirms."""
        if sampling.flags & Flag.PENALIZED:
            tokens, flags = out[0, : len(sampling.rows)], sampling.row_flags
            flags = flags if sampling.drafted is None else flags * out[2, : len(flags)]
            self.ops.count_tokens(tokens, flags, sampling.rows, self.penalties)

    def prompt_logprobs(self, stream: Stream, wanted: PromptLogprobs) -> Tensor:
        """Columns [2 + StepResult.WIDTH, N] int32 for the targets; the stream is [K, H].

        A vocabulary of logits for each token of a long prompt would not fit: they are made and used pass by pass.
        """
        step, parts = rows_per_pass(self.model.config.vocab_size), []
        for start in range(0, len(wanted.token_ids), step):
            at, targets = wanted.logprobs_at[start : start + step], wanted.token_ids[start : start + step]
            logits = self.vocab.gather(self.model.logits(stream.at(at)))
            parts.append(self.ops.token_logprobs(logits, targets, torch.full_like(targets, Flag.LOGPROBS)))
        finite = torch.ones_like(wanted.token_ids)
        return torch.cat([torch.stack([wanted.token_ids, finite]), torch.cat(parts, 1)])


class EagerRunner:
    """Runs any plan, op by op."""

    name = "eager"

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self._flops_per_token = parts.flops_per_token
        self._draft_model = None if parts.drafting is None else parts.drafting.model
        self.fold = parts.fold

    def fits(self, plan: BatchPlan) -> bool:
        return True

    def launch(self, plan: BatchPlan) -> ForwardOutput:
        batch = make_batch(plan, self.parts.device)
        submit, flops = self.parts.device.submit, self._flops_per_token * batch.num_tokens
        if not plan.awaits_masks:
            return ForwardOutput(
                plan, lambda masks: submit(lambda: self._sample(plan, self._forward(plan, batch), masks), flops)
            )
        forward: list[_Forward] = []

        def start() -> Tensor:
            forward.append(self._forward(plan, batch))
            return NO_TOKENS

        submit(start, flops)
        return ForwardOutput(plan, lambda masks: submit(lambda: self._sample(plan, forward.pop(), masks), 0.0))

    @torch.inference_mode()
    def logits_of(self, plan: BatchPlan) -> Tensor:
        """The logits that a plan samples from: [S, V] in the model's dtype, for checks."""
        return self.parts.vocab.gather(self.parts.run(make_batch(plan, self.parts.device)))

    @torch.inference_mode()
    def _forward(self, plan: BatchPlan, batch: Batch) -> _Forward:
        parts, wanted, sampled = self.parts, batch.prompt_logprobs, batch.logit_tokens
        if parts.drafting is not None:
            parts.drafting.remember(plan)
            if self._draft_model is not None:
                parts.state.apply(batch.page_writes, batch.row_states)
                self._draft_model.read_prompts(plan)
                self._draft_model.draft(parts.drafting.asked(plan), parts.drafting)
            parts.drafting.propose(plan)
        input_ids, batch, out_loc = parts.begin(batch)
        kept = batch if wanted is None else replace(batch, logit_tokens=wanted.kept)
        layers = () if self._draft_model is None else self._draft_model.layers
        taps = dict.fromkeys(layers, input_ids)  # the model replaces the values
        stream = parts.hidden(input_ids, kept, out_loc, taps)
        columns = None
        if wanted is not None:
            columns = parts.prompt_logprobs(stream, wanted)
            stream = stream.at(wanted.sampled_at)
        logits = parts.model.logits(stream) if len(sampled) else None
        return _Forward(batch, input_ids, [taps[i] for i in layers], logits, columns)

    @torch.inference_mode()
    def _sample(self, plan: BatchPlan, forward: _Forward, masks: Ints) -> Tensor:
        self.parts.penalties.apply(plan.penalties, masks)
        batch, columns = forward.batch, []
        inputs = forward.input_ids[batch.logit_tokens]
        if forward.logits is not None:
            sampling = replace(batch.sampling, inputs=inputs)
            if forward.prompt_logprobs is not None:  # the columns of both are of one height
                sampling = replace(sampling, flags=sampling.flags | Flag.PROMPT_LOGPROBS)
            columns.append(self.parts.sample(forward.logits, sampling))
        if forward.prompt_logprobs is not None:
            columns.append(forward.prompt_logprobs)
        out = torch.cat(columns, 1) if columns else NO_TOKENS
        drafting = self.parts.drafting
        if batch.drafts is not None:
            assert drafting is not None, "the plan has DRAFTS, but there is no drafter"
            out = drafting.verify(out, batch.drafts, inputs)
            self.parts.count(out, batch.sampling)
        if drafting is not None and drafting.model is not None and (plan.has_drafts or len(plan.tokens)):
            drafting.model.extend(batch, forward.input_ids, forward.states, out, drafting)
        return out


@dataclass(frozen=True, slots=True)
class _Forward:
    """The batch with its true positions, its tokens [T], the outputs [T, H] of the layers that a drafter reads, logits
    [S, this rank's shard of V], and the columns of the prompt logprobs."""

    batch: Batch
    input_ids: Tensor
    states: list[Tensor]
    logits: Tensor | None
    prompt_logprobs: Tensor | None
