"""Runs a whole step of a CPU, from plan to tokens, in one C++ call."""

from __future__ import annotations

import logging
import weakref
from ctypes import addressof, byref, c_float
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from minisgl.core import BatchPlan, StepResult
from minisgl.engine.batch import drafted_before, make_sampling
from minisgl.engine.draft_model import draft_slots, draft_spec, drafted_slots
from minisgl.engine.pooling import base_runner
from minisgl.engine.runner import ForwardOutput
from minisgl.errors import ConfigError, NativeError
from minisgl.layout import NO_INTS, NO_MASKS, NO_PAGE_WRITES, NO_ROW_STATES, SLOT, Flag, as_words
from minisgl.models.families import FAMILIES
from minisgl.native.abi import LayerWeights, ModelSpec, StepPlan
from minisgl.native.library import NativeLibrary, load_native
from minisgl.native.packing import LANES, pack_weights
from minisgl.ops.quantized import INT8, Format, Quantized
from minisgl.ops.sampling import rows_per_pass

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from minisgl.core import Ints, Records, Sampling
    from minisgl.device.device import CpuDevice, Pending
    from minisgl.engine.config import EngineSpec
    from minisgl.engine.draft_model import DraftModel
    from minisgl.engine.drafting import Drafting
    from minisgl.engine.runner import Parts, Runner

_log = logging.getLogger("minisgl.native")

DTYPES: Final = (torch.float32, torch.bfloat16)
SAMPLING_FLOPS: Final = 50.0  # roughly, for each logit of a token that the ops in torch sample
PLAIN: Final = Flag.SAMPLES | Flag.FROM_DEVICE


def refusal(spec: EngineSpec) -> str | None:
    """Why the C++ step cannot run a model with these settings; None if it can."""
    m = spec.model
    if spec.info.size > 1:
        return "the model is sharded over several ranks"
    if spec.attention_backend != "auto":
        return f"attention backend {spec.attention_backend} was asked for"
    if not FAMILIES[m.architecture].on_cpu_step or m.activation != "silu":
        return f"{m.architecture} with {m.activation} is not Llama-shaped enough"
    if spec.dtype not in DTYPES:
        return f"dtype {spec.dtype}"
    if spec.pooling is not None:
        return "the model makes embeddings"
    if spec.fp8_cache:
        return "the KV cache is FP8"
    if spec.draft is not None:
        if spec.draft.kind != "draft":
            return "the drafter reads hidden states"
        if (reason := refusal(draft_spec(spec))) is not None:
            return f"the drafter's {reason}"
    sizes = {"head_dim": (m.head_dim, LANES)}
    step = INT8.group if spec.quantization else LANES
    sizes |= {"hidden_size": (m.hidden_size, step), "intermediate_size": (m.intermediate_size, step)}
    sizes |= {"heads * head_dim": (m.num_heads * m.head_dim, step)}
    for name, (size, divisor) in sizes.items():
        if size % divisor:
            return f"{name} {size} is not a multiple of {divisor}"
    return None


class NativeRunner:
    """Runs any plan. It takes over weights and K/V pages: no other runner can use them afterwards.

    The weights' tensors are packed or quantized in place. The layout of the pages is that of `native/cpp/cache.h`.
    """

    def __init__(self, parts: Parts, spec: EngineSpec, library: NativeLibrary, device: CpuDevice) -> None:
        self.name = f"native ({', '.join(filter(None, (library.isa, spec.quantization)))})"
        self.parts = parts
        self._library = library
        self._vocab_size = spec.model.vocab_size
        self._kept: list[Tensor] = []  # tensors whose addresses the library has, besides the weights
        pack_weights(parts.model, library, spec.quantization is not None)
        self._device = device
        model = self._model_spec(spec, device.threads)
        self._model = library.create(byref(model))
        self._close = weakref.finalize(self, library.destroy, self._model)
        draft = None if parts.drafting is None else parts.drafting.model
        self._draft = None if draft is None else _Drafter(draft, library, device)

    def fits(self, plan: BatchPlan) -> bool:
        return True

    def launch(self, plan: BatchPlan) -> ForwardOutput:
        def sample(masks: Ints) -> Pending:
            columns = self._run(plan, masks)
            return lambda: columns

        return ForwardOutput(plan, sample)

    @torch.inference_mode()
    def _run(self, plan: BatchPlan, masks: Ints) -> Ints:
        self.parts.penalties.apply(plan.penalties, masks)
        drafting = self.parts.drafting
        if drafting is not None:
            drafting.remember(plan)
            if self._draft is not None:
                self._draft.run(plan, drafting)
        if not plan.has_drafts:
            return self.sampled(plan)
        assert drafting is not None, "a plan with DRAFTS, but no drafter"
        flat, inputs = drafting.flatten(plan)
        out = drafting.settle_flat(self.sampled(flat, inputs), plan, inputs)
        index = np.flatnonzero(plan.sampled_flags & Flag.PENALIZED)
        if len(index):
            self.parts.count(torch.from_numpy(out[:, index]), self._sampling(flat, index, inputs))
        return out

    def sampled(self, plan: BatchPlan, inputs: Ints = NO_INTS) -> Ints:
        """Columns as `ForwardOutput` says; `inputs` [S] are the tokens before, for rows that sample several."""
        if len(plan.prompt_logprob_ids):
            return self._with_prompt_logprobs(plan, inputs)
        out = self._call(plan)
        special = np.flatnonzero(plan.sampled_flags & ~PLAIN)
        if len(special):
            out = self._sample(plan, special, self.logits(out.shape[1])[special], out, inputs)
        return out

    def logits_of(self, plan: BatchPlan) -> Tensor:
        """As `EagerRunner.logits_of`, in float32."""
        return self.logits(self._call(plan).shape[1]).clone()

    def _call(self, plan: BatchPlan) -> Ints:
        """Run a plan in the library -> [2, S] tokens and whether they are finite; zeros for slots sampled elsewhere."""
        arrays = [np.ascontiguousarray(a) for a in (plan.slots, plan.tokens, plan.page_writes)]
        call = StepPlan(*(a.ctypes.data for a in arrays), len(plan.slots), len(plan.page_writes))
        if len(plan.row_states):
            self.parts.state.fill(torch.from_numpy(as_words(plan.row_states)))
        out = np.zeros((2, len(plan.sampled_flags)), np.int32)
        self._library.step(self._model, byref(call), out[0].ctypes.data, out[1].ctypes.data)
        return out

    def _with_prompt_logprobs(self, plan: BatchPlan, inputs: Ints) -> Ints:
        """Run a plan whose prompts want log-probabilities: each of these tokens is a slot of its own, in passes whose
        logits fit in memory."""
        slots = _token_by_token(plan.slots)
        samples = np.cumsum((slots["flags"] & Flag.SAMPLES) != 0) - 1
        pass_of_slot = np.maximum(samples, 0) // rows_per_pass(self._vocab_size)
        outs = []
        special = []
        special_logits = []
        logprobs = []
        rest = replace(plan, masks=NO_MASKS)
        for part in np.split(slots, np.flatnonzero(np.diff(pass_of_slot)) + 1):
            from_host = part[(part["flags"] & Flag.FROM_DEVICE) == 0]
            count = int((from_host["stop"] - from_host["start"]).sum())
            now = replace(rest, slots=part, tokens=rest.tokens[:count])
            out = self._call(now)
            flags, logits = now.sampled_flags, self.logits(out.shape[1])
            is_prompt = (flags & Flag.PROMPT_LOGPROBS) != 0
            is_special = ((flags & ~PLAIN) != 0) & ~is_prompt
            num_ids = int(is_prompt.sum())
            ids = torch.from_numpy(rest.prompt_logprob_ids[:num_ids])
            wanted = torch.full_like(ids, Flag.LOGPROBS)
            logprobs.append(self.parts.ops.token_logprobs(logits[is_prompt], ids, wanted))
            special_logits.append(logits[is_special])
            special.append(is_special[~is_prompt])
            outs.append(out[:, ~is_prompt])
            rest = replace(
                rest,
                tokens=rest.tokens[count:],
                prompt_logprob_ids=rest.prompt_logprob_ids[num_ids:],
                page_writes=NO_PAGE_WRITES,
                row_states=NO_ROW_STATES,
            )
        sampled = np.concatenate(outs, 1)
        index = np.flatnonzero(np.concatenate(special))
        if len(index):
            sampled = self._sample(plan, index, torch.cat(special_logits), sampled, inputs)
        count = sampled.shape[1]
        columns = np.zeros((2 + StepResult.WIDTH, count + len(plan.prompt_logprob_ids)), np.int32)
        columns[: len(sampled), :count] = sampled
        columns[0, count:] = plan.prompt_logprob_ids
        columns[1, count:] = 1
        columns[2:, count:] = torch.cat(logprobs, 1).numpy()
        return columns

    def _sample(self, plan: BatchPlan, special: npt.NDArray[np.intp], logits: Tensor, out: Ints, inputs: Ints) -> Ints:
        """`out` with the columns `special` [n], whose logits [n, V] these are, sampled by the ops in torch."""
        self._device.use_threads_for(SAMPLING_FLOPS * logits.numel())
        columns = self.parts.sample(logits, self._sampling(plan, special, inputs)).numpy()
        whole = np.zeros((len(columns), out.shape[1]), np.int32)
        whole[:2] = out
        whole[:, special] = columns
        return whole

    def _sampling(self, plan: BatchPlan, index: npt.NDArray[np.intp], inputs: Ints) -> Sampling:
        sampling = make_sampling(plan, index, self._device)
        if not len(inputs):
            return sampling
        drafted = drafted_before(sampling.rows.numpy(), self._device)
        return replace(sampling, drafted=drafted, inputs=torch.from_numpy(inputs[index]))

    def logits(self, count: int) -> Tensor:
        """[count, V] float32 of the last step; a view that the next step overwrites."""
        if count == 0:
            return torch.empty(0, self._vocab_size)
        address = self._library.logits(self._model)
        kind = c_float * (count * self._vocab_size)
        return torch.from_numpy(np.ctypeslib.as_array(kind.from_address(address))).view(count, self._vocab_size)

    def _float(self, tensor: Tensor | None) -> int | None:
        """The address of a float32 copy that lives as long as this runner."""
        if tensor is None:
            return None
        self._kept.append(tensor.float().contiguous())
        return self._kept[-1].data_ptr()

    def _model_spec(self, spec: EngineSpec, threads: int) -> ModelSpec:
        m = spec.model
        model = self.parts.model
        pool = self.parts.kv_cache
        state = self.parts.state

        decoder: Any = model.model  # of LlamaDecoderLayers with a GatedMLP, see `refusal`
        layers = self._layers = (LayerWeights * m.num_layers)()
        for c, layer, window in zip(layers, decoder.layers, m.windows, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            c.qkv, c.qkv_bits = _address_and_bits(attention.qkv_proj.weight)
            c.o, c.o_bits = _address_and_bits(attention.o_proj.weight)
            c.gate_up, c.gate_up_bits = _address_and_bits(mlp.gate_up_proj.weight)
            c.down, c.down_bits = _address_and_bits(mlp.down_proj.weight)
            c.qkv_bias, c.o_bias = self._float(attention.qkv_proj.bias), self._float(attention.o_proj.bias)
            c.gate_up_bias, c.down_bias = self._float(mlp.gate_up_proj.bias), self._float(mlp.down_proj.bias)
            c.input_norm = self._float(layer.input_layernorm.weight)
            c.post_norm = self._float(layer.post_attention_layernorm.weight)
            c.q_norm, c.k_norm = self._float(attention.heads.q_weight), self._float(attention.heads.k_weight)
            c.cos_sin = attention.heads.cos_sin.data_ptr()
            c.window = window or 0
        head: Any = model.lm_head.weight  # always a tensor
        return ModelSpec(
            is_bf16=spec.dtype is torch.bfloat16,
            head_bits=8 if spec.quantization else 0,
            layers=m.num_layers,
            hidden=m.hidden_size,
            intermediate=m.intermediate_size,
            vocab=m.vocab_size,
            heads=m.num_heads,
            kv_heads=m.num_kv_heads,
            dim=m.head_dim,
            page=spec.page_size,
            threads=threads,
            is_tied=m.tie_word_embeddings,
            eps=m.rms_norm_eps,
            scale=m.attention_scale or m.head_dim**-0.5,
            weights=addressof(layers),
            embedding=model.model.embed_tokens.weight.data_ptr(),
            head=head.data_ptr(),
            final_norm=self._float(model.model.norm.weight),
            cache=pool.data.data_ptr(),
            layer_stride=pool.data.stride(0),
            page_table=state.page_table.data_ptr(),
            table_width=state.page_table.stride(0),
            **{name: getattr(state, name).data_ptr() for name in ("last_token", "temperature", "noise_key")},
        )


class _Drafter:
    """The passes of a small model that drafts (`engine/draft_model.py`), each in one C++ call."""

    def __init__(self, draft: DraftModel, library: NativeLibrary, device: CpuDevice) -> None:
        ops = replace(draft.parts.ops, count_tokens=lambda *_: None)  # penalties count no drafts
        self._runner = NativeRunner(replace(draft.parts, ops=ops), draft.spec, library, device)

    def run(self, plan: BatchPlan, drafting: Drafting) -> None:
        """Compute the prompts of a step, and the drafts of its slots with DRAFTS, which have their pages."""
        drafted = drafted_slots(plan)
        chunks = plan.slots[(plan.slots["flags"] & Flag.FROM_DEVICE) == 0]
        if not len(drafted) + len(chunks):
            return
        lengths, newest, drafts, history = (
            t.numpy() for t in (drafting.lengths, drafting.last_token, drafting.drafts, drafting.history)
        )
        rows, counts = drafted["row"], drafted["stop"] - drafted["start"] - 1
        length = lengths[rows]
        chunks["flags"] = 0
        slots = np.concatenate([draft_slots(drafted, length - 2, length, 0), chunks])
        tokens = np.stack([history[rows, length - 2].clip(0), newest[rows]], 1).reshape(-1)
        first = BatchPlan(plan.step, slots, np.append(tokens, plan.tokens), plan.page_writes)
        drafts[rows, 0] = self._runner.sampled(first)[0]
        for i in range(1, int(counts.max(initial=0))):
            more = counts > i
            slots = draft_slots(drafted[more], length[more] - 1 + i, length[more] + i, 0)
            following = self._runner.sampled(BatchPlan(plan.step, slots, drafts[rows[more], i - 1]))
            drafts[rows[more], i] = following[0]


def _address_and_bits(weight: Tensor | Quantized) -> tuple[int, int]:
    return (weight.data.data_ptr(), weight.format.bits) if isinstance(weight, Quantized) else (weight.data_ptr(), 0)


def _token_by_token(slots: Records) -> Records:
    """The same step with a slot for each token whose successor's log-probability is wanted."""
    result = []
    wanted = Flag.SAMPLES | Flag.PROMPT_LOGPROBS
    for row, start, stop, flags in slots.tolist():
        if not flags & Flag.PROMPT_LOGPROBS:
            result.append((row, start, stop, flags))
            continue
        result += [(row, t, t + 1, wanted) for t in range(start, stop - 1)]
        result.append((row, stop - 1, stop, flags & ~Flag.PROMPT_LOGPROBS if flags & Flag.SAMPLES else wanted))
    return np.array(result, SLOT)


class CpuRunners:
    """The `RunnerFactory` of CPUs: the C++ step where it can run the model, else the ops in torch."""

    def __init__(self, spec: EngineSpec, device: CpuDevice) -> None:
        self._spec = spec
        self._device = device
        self._library: NativeLibrary | None = None
        reason = refusal(spec)
        if reason is None:
            try:
                self._library = load_native()
                return
            except NativeError as e:
                reason = str(e)
        if spec.quantization is not None:
            raise ConfigError(f"--quantization {spec.quantization} needs the C++ step of a CPU: {reason}")
        if spec.pooling is None:
            _log.warning("steps run op by op, several times slower than the C++ step: %s", reason)

    def holds(self, kind: Format) -> bool:
        """The C++ step multiplies numbers of 4 bits without zeros, in groups of a multiple of its own."""
        is_plain = kind.name == "int4" and not kind.has_zeros and not kind.order
        return self._library is not None and is_plain and kind.group % INT8.group == 0

    @staticmethod
    def choose_dtype(spec: EngineSpec) -> EngineSpec:
        """Choose bfloat16 for a large checkpoint of that type if the C++ step can run it: such steps are faster.

        Steps in torch are not always faster in bfloat16, and a small model may keep the digits of float32.
        """
        halved = replace(spec, dtype=torch.bfloat16)
        if not spec.model.is_large_bfloat16 or refusal(halved) is not None:
            return spec
        try:
            load_native()
        except NativeError:
            return spec
        return halved

    def warm_up(self, parts: Parts) -> None:
        """Nothing is compiled for single steps."""

    def make(self, parts: Parts) -> list[Runner]:
        """One runner for any plan. The C++ step takes over the weights and the K/V pool."""
        if self._library is None:
            return [base_runner(parts, self._spec)]
        return [NativeRunner(parts, self._spec, self._library, self._device)]
