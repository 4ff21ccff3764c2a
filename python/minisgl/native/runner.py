"""The runner of a CPU: a whole step, from plan to tokens, in one C++ call (`native/library.py`)."""

from __future__ import annotations

import weakref
from ctypes import byref, c_float
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from minisgl.core import BatchPlan, StepResult
from minisgl.engine.prepare import prepare_batch
from minisgl.engine.runner import lacks_masks
from minisgl.models.families import FAMILIES
from minisgl.native.library import LayerWeights, ModelSpec, NativeLibrary, StepPlan
from minisgl.native.packing import LANES, pack_weights
from minisgl.ops.logprobs import rows_per_pass

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from minisgl.core import Ints
    from minisgl.device.device import CpuDevice, Pending
    from minisgl.engine.config import EngineSpec
    from minisgl.engine.runner import Parts

DTYPES: Final = (torch.float32, torch.bfloat16)
GROUP: Final = 32  # columns that share a scale in quantized ones
CHOICE_FLOPS: Final = 50.0  # about, for each logit of a token that torch's ops choose
PLAIN: Final = BatchPlan.SAMPLES | BatchPlan.FROM_DEVICE


def refusal(spec: EngineSpec) -> str | None:
    """Why the native step cannot run this model as asked; None when it can."""
    m = spec.model
    if spec.info.size > 1:
        return "several ranks share the model"
    if spec.attention_backend != "auto":
        return f"attention backend {spec.attention_backend} was asked for"
    if not FAMILIES[m.architecture].on_cpu_step or m.activation != "silu":
        return f"{m.architecture} with {m.activation} is not Llama-shaped enough"
    if spec.dtype not in DTYPES:
        return f"dtype {spec.dtype}"
    if spec.pooling is not None:
        return "it makes embeddings"
    sizes = {"head_dim": (m.head_dim, LANES)}
    step = GROUP if spec.quantization else LANES
    sizes |= {"hidden_size": (m.hidden_size, step), "intermediate_size": (m.intermediate_size, step)}
    sizes |= {"heads * head_dim": (m.num_heads * m.head_dim, step)}
    for name, (size, divisor) in sizes.items():
        if size % divisor:
            return f"{name} {size} is not a multiple of {divisor}"
    return None


class _Result:
    def __init__(self, tokens: Ints) -> None:
        self._tokens = tokens

    def wait(self) -> Ints:
        return self._tokens


class NativeRunner:
    """Any step. Takes over the weights, whose tensors are packed or quantized afterwards: no other runner can use them.

    Also the K/V pages hold what only it can read, see `native/cpp/cache.h`.
    """

    def __init__(self, parts: Parts, spec: EngineSpec, library: NativeLibrary, device: CpuDevice) -> None:
        self.name = f"native ({', '.join(filter(None, (library.isa, spec.quantization)))})"
        self.parts = parts
        self._library = library
        self._vocab_size = spec.model.vocab_size
        self._kept: list[Tensor] = []  # what the library has addresses of, besides the weights
        pack_weights(parts.model, library, spec.quantization is not None)
        self.weight_bytes = sum(p.tensor.nbytes for p in parts.model.parameters)
        self._device = device
        model = self._model_spec(spec, device.threads)
        self._model = library.create(byref(model))
        self._close = weakref.finalize(self, library.destroy, self._model)

    def fits(self, plan: BatchPlan) -> bool:
        return True

    def prepare(self, plan: BatchPlan) -> BatchPlan:
        return plan

    @torch.inference_mode()
    def launch(self, plan: BatchPlan) -> Pending:
        kinds = _sampled(plan.slots)
        assert not lacks_masks(int(np.bitwise_or.reduce(kinds, initial=0)), plan.masks), "a CPU's plan has all masks"
        self.parts.adjuster.apply(plan.adjusts, plan.masks)
        if len(plan.targets):
            return _Result(self._scored(plan))
        out = self._call(plan.slots, plan.tokens, plan.pages, plan.rows)
        special = np.flatnonzero(kinds & ~PLAIN)
        if len(special):
            out = self._choose(plan, special, self.logits(out.shape[1])[special], out)
        return _Result(out)

    def logits_of(self, plan: BatchPlan) -> Tensor:
        """As `EagerRunner.logits_of`, in float32."""
        return self.logits(self._call(plan.slots, plan.tokens, plan.pages, plan.rows).shape[1]).clone()

    def _call(self, slots: Ints, tokens: Ints, pages: Ints, rows: Ints) -> Ints:
        """Parts of a plan through the library -> [2, S]; zeros for those that it leaves to others to choose."""
        arrays = [np.ascontiguousarray(a, np.int32) for a in (slots, tokens, pages, rows)]
        call = StepPlan(*(a.ctypes.data for a in arrays), len(slots), len(pages), len(rows))
        out = np.zeros((2, len(_sampled(slots))), np.int32)
        self._library.step(self._model, byref(call), out[0].ctypes.data, out[1].ctypes.data)
        return out

    def _scored(self, plan: BatchPlan) -> Ints:
        """A step with prompts whose log-probabilities are wanted: each of their tokens as a slot of its own, in passes
        whose logits have room."""
        slots = _token_by_token(plan.slots)
        in_pass = np.maximum(np.cumsum((slots[:, 3] & BatchPlan.SAMPLES) != 0) - 1, 0) // rows_per_pass(
            self._vocab_size
        )
        outs, special, logits, scores, token, target = [], [], [], [], 0, 0
        pages, rows = plan.pages, plan.rows
        for part in np.split(slots, np.flatnonzero(np.diff(in_pass)) + 1):
            from_host = part[(part[:, 3] & BatchPlan.FROM_DEVICE) == 0]
            count = int((from_host[:, 2] - from_host[:, 1]).sum())
            out = self._call(part, plan.tokens[token : token + count], pages, rows)
            pages, rows, token = pages[:0], rows[:0], token + count
            kinds, all_logits = _sampled(part), self.logits(out.shape[1])
            is_scored = (kinds & BatchPlan.SCORED) != 0
            is_special = ((kinds & ~PLAIN) != 0) & ~is_scored
            targets = torch.from_numpy(plan.targets[target : target + int(is_scored.sum())])
            wanted = torch.full_like(targets, BatchPlan.LOGPROBS)
            scores.append(self.parts.ops.token_scores(all_logits[is_scored], targets, wanted))
            target += len(targets)
            logits.append(all_logits[is_special])
            special.append(is_special[~is_scored])
            outs.append(out[:, ~is_scored])
        chosen = np.concatenate(outs, 1)
        index = np.flatnonzero(np.concatenate(special))
        if len(index):
            chosen = self._choose(plan, index, torch.cat(logits), chosen)
        columns = np.zeros((2 + StepResult.WIDTH, chosen.shape[1] + len(plan.targets)), np.int32)
        columns[: len(chosen), : chosen.shape[1]] = chosen
        columns[0, chosen.shape[1] :], columns[1, chosen.shape[1] :] = plan.targets, 1
        columns[2:, chosen.shape[1] :] = torch.cat(scores, 1).numpy()
        return columns

    def _choose(self, plan: BatchPlan, special: npt.NDArray[np.intp], logits: Tensor, out: Ints) -> Ints:
        """`out` with the columns `special` [n], whose logits [n, V] these are, chosen by the ops in torch."""
        self._device.use_threads_for(CHOICE_FLOPS * logits.numel())
        index = torch.from_numpy(special)
        batch = prepare_batch(replace(plan, pages=plan.pages[:0], rows=plan.rows[:0]), self.parts.device)
        batch = replace(
            batch,
            sample_rows=batch.sample_rows[index],
            sample_positions=batch.sample_positions[index],
            sample_flags=batch.sample_flags[index],
            mask_places=batch.mask_places[index],
            scored=None,
        )
        columns = self.parts.sample(logits, batch).numpy()
        whole = np.zeros((len(columns), out.shape[1]), np.int32)
        whole[:2] = out
        whole[:, special] = columns
        return whole

    def logits(self, count: int) -> Tensor:
        """[count, V] float32 of the last step; a view that the next one overwrites."""
        if count == 0:
            return torch.empty(0, self._vocab_size)
        address = self._library.logits(self._model)
        kind = c_float * (count * self._vocab_size)
        return torch.from_numpy(np.ctypeslib.as_array(kind.from_address(address))).view(count, self._vocab_size)

    def _float(self, tensor: Tensor | None) -> int | None:
        """The address of a float32 copy that lives as long as this."""
        if tensor is None:
            return None
        self._kept.append(tensor.float().contiguous())
        return self._kept[-1].data_ptr()

    def _model_spec(self, spec: EngineSpec, threads: int) -> ModelSpec:
        m, model, pool, state = spec.model, self.parts.model, self.parts.kv_cache, self.parts.state

        decoder: Any = model.model  # of LlamaDecoderLayers with a GatedMLP, see `refusal`
        layers = (LayerWeights * m.num_layers)()
        for c, layer, window in zip(layers, decoder.layers, m.windows, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            c.qkv, c.o = attention.qkv_proj.weight.data_ptr(), attention.o_proj.weight.data_ptr()
            c.gate_up, c.down = mlp.gate_up_proj.weight.data_ptr(), mlp.down_proj.weight.data_ptr()
            c.qkv_bias, c.o_bias = self._float(attention.qkv_proj.bias), self._float(attention.o_proj.bias)
            c.gate_up_bias, c.down_bias = self._float(mlp.gate_up_proj.bias), self._float(mlp.down_proj.bias)
            c.input_norm = self._float(layer.input_layernorm.weight)
            c.post_norm = self._float(layer.post_attention_layernorm.weight)
            c.q_norm, c.k_norm = self._float(attention.heads.q_weight), self._float(attention.heads.k_weight)
            c.cos_sin = attention.heads.cos_sin.data_ptr()
            c.window = window or 0
        return ModelSpec(
            is_bf16=spec.dtype is torch.bfloat16,
            is_int8=spec.quantization == "int8",
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
            weights=layers,
            embedding=model.model.embed_tokens.weight.data_ptr(),
            head=model.lm_head.weight.data_ptr(),
            final_norm=self._float(model.model.norm.weight),
            cache=pool.data.data_ptr(),
            layer_stride=pool.data.stride(0),
            page_table=state.page_table.data_ptr(),
            table_width=state.page_table.stride(0),
            **{name: getattr(state, name).data_ptr() for name in ("last_token", "temperature", "top_k", "top_p")},
            min_p=state.min_p.data_ptr(),
            noise_key=state.noise_key.data_ptr(),
        )


def _sampled(slots: Ints) -> Ints:
    """The flags of the slots that sample."""
    flags: Ints = slots[:, 3]
    sampled: Ints = flags[(flags & BatchPlan.SAMPLES) != 0]
    return sampled


def _token_by_token(slots: Ints) -> Ints:
    """The same step with a slot for each token whose successor is scored."""
    result = []
    for row, start, stop, flags in slots.tolist():
        if not flags & BatchPlan.SCORED:
            result.append((row, start, stop, flags))
            continue
        scored = BatchPlan.SAMPLES | BatchPlan.SCORED
        result += [(row, t, t + 1, scored) for t in range(start, stop - 1)]
        result.append((row, stop - 1, stop, flags & ~BatchPlan.SCORED if flags & BatchPlan.SAMPLES else scored))
    return np.array(result, np.int32)
