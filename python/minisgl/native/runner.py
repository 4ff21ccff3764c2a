"""The runner of CPUs: a whole step, from plan to tokens, in one C++ call."""

from __future__ import annotations

import logging
import weakref
from ctypes import addressof, byref, c_float
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch.nn import functional as F

from minisgl.core.errors import ConfigError, NativeError
from minisgl.core.layout import NO_MASKS, NO_PAGE_WRITES, NO_ROW_STATES, SEQUENCE, Flag
from minisgl.core.plan import BatchPlan, StepResult
from minisgl.core.rounding import round_up
from minisgl.core.specs import GatedDelta, GroupedQuery
from minisgl.engine.batch import make_sampling
from minisgl.engine.draft_model import SAMPLED_ALIKE, DraftModel, HeadModel, draft_spec, drafted_rows
from minisgl.engine.pooling import base_runner
from minisgl.engine.runner import ForwardOutput
from minisgl.layers.linear import LayerNorm
from minisgl.models.gemma4 import BesideMLP
from minisgl.models.mlp import GatedMLP, PlainMLP, SparseMLP
from minisgl.native.abi import ACTIVATIONS, LayerWeights, LowRank, ModelSpec, Packed, StepPlan
from minisgl.native.library import NativeLibrary, load_native
from minisgl.native.packing import LANES, pack_weights
from minisgl.ops.quantized import INT8, Format, Quantized, data_and_scale
from minisgl.ops.sampling import rows_per_pass

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt
    from torch import Tensor

    from minisgl.core.plan import Ints, Records, Sampling
    from minisgl.device.device import CpuDevice, Pending
    from minisgl.engine.config import EngineSpec
    from minisgl.engine.drafting import Drafting
    from minisgl.engine.runner import Parts, Runner
    from minisgl.layers.linear import Linear, Norm
    from minisgl.layers.parameter import Parameter
    from minisgl.models.attention import Attention
    from minisgl.models.gated_delta import GatedDeltaNet
    from minisgl.models.gemma4 import LayerTail
    from minisgl.models.llama import DecoderLayer
    from minisgl.models.model_config import ModelConfig
    from minisgl.ops.adapters import AdapterWeights

_log = logging.getLogger("minisgl.native")

DTYPES: Final = (torch.float32, torch.bfloat16)
SAMPLING_FLOPS: Final = 50.0  # roughly, per logit of a token that is sampled in torch
PLAIN: Final = Flag.SAMPLES | Flag.FROM_DEVICE | Flag.DRAFTS | Flag.MASKED | Flag.ADAPTED  # the library samples these


def refusal(spec: EngineSpec) -> str | None:
    """Return why the C++ step cannot run a model with these settings; None if it can."""
    m = spec.model
    if (reason := layers_refusal(m)) is not None:
        return f"{m.architecture} has {reason}"
    if spec.info.size > 1:
        return "the model is sharded over several ranks"
    if spec.attention_backend != "auto":
        return f"the attention backend {spec.attention_backend} was given"
    if spec.dtype not in DTYPES:
        return f"dtype {spec.dtype} is not supported"
    if spec.pooling is not None:
        return "the model computes embeddings"
    if spec.fp8_cache and spec.page_size < LANES:
        return f"the KV cache is FP8 with pages of fewer than {LANES} tokens"
    if spec.draft is not None and (reason := refusal(draft_spec(spec))) is not None:
        return f"the drafter's {reason}"
    step = INT8.group if spec.quantization else LANES
    has_head = spec.draft is not None and spec.draft.kind != "draft"  # which reads hidden states in 8 bits
    if m.linear is not None and m.linear.is_narrow and spec.dtype is not torch.float32:
        return f"its recurrent states are in {spec.dtype}, and only float32 is supported"
    sizes = [("hidden_size", m.hidden_size, INT8.group if has_head else step)]
    sizes.append(("hidden_size_per_layer_input", m.layer_input_size, LANES))
    e = m.experts
    if e is not None:
        sizes += [(e.flags.size_key, e.intermediate_size, step), ("size of shared experts", e.shared_size, step)]
    for i, layer in enumerate(m.layers):
        if i in m.linear_layers and m.linear is not None:
            dims = ("key_head_dim", m.linear.key_dim), ("value_head_dim", m.linear.value_dim)
            sizes += [(f"linear_{name}", dim, LANES) for name, dim in dims]
            sizes.append(("size of linear attention", m.linear.value_heads * m.linear.value_dim, step))
        else:
            sizes += [("head_dim", layer.head_dim, LANES), ("heads * head_dim", layer.heads * layer.head_dim, step)]
        if e is None or i in e.dense_layers or e.flags.is_beside:
            sizes.append(("intermediate_size", layer.intermediate, step))
    for name, size, divisor in sizes:
        if size % divisor:
            return f"{name} {size} is not a multiple of {divisor}"
    return None


def layers_refusal(m: ModelConfig) -> str | None:
    """Return what the C++ step does not have of a model's layers; None if it has all."""
    missing = {
        "modelling code of transformers": m.is_fallback,
        "latents instead of keys and values": m.latent is not None,
    }
    return next((name for name, is_missing in missing.items() if is_missing), None)


class NativeModel:
    """A model in the library. It owns the weights and K/V pages: nothing else can use them afterwards.

    The weights are packed or rounded in place. Pages have the layout of `native/cpp/cache.h`.
    """

    def __init__(
        self,
        parts: Parts,
        spec: EngineSpec,
        library: NativeLibrary,
        head: HeadModel | None = None,
        **fields: int | None,
    ) -> None:
        """Load the model of `parts`, or a head. `fields` are further fields of `ModelSpec`."""
        self._library = library
        self._vocab_size = parts.model.config.vocab_size
        self._kept: list[Any] = []  # keeps alive what the library has addresses of, besides the weights
        self._matrices: list[tuple[Packed, Any]] = []  # what the library reads, and the weights to pack for it
        if head is None:
            model, to_round = self._model(parts, spec, fields)
        else:
            self._kept.append(torch.tensor(head.layers))
            fields |= {"taps": self._kept[-1].data_ptr(), "num_taps": len(head.layers)}
            load = self._next_tokens if head.head.draft_ids is None else self._eagle
            model, to_round = load(head, fields)
        pack_weights([weight for _, weight in self._matrices], to_round, library)
        for packed, weight in self._matrices:
            if any(weight is rounded for rounded in to_round):
                packed.bits = INT8.bits
            packed.data = _data(weight).data_ptr()
        self.handle = library.create(byref(model))
        self._close = weakref.finalize(self, library.destroy, self.handle)

    def logits(self, count: int) -> Tensor:
        """Return the logits of the last step, [count, V] float32: a view that the next step overwrites."""
        if count == 0:
            return torch.empty(0, self._vocab_size)
        address = self._library.logits(self.handle)
        kind = c_float * (count * self._vocab_size)
        return torch.from_numpy(np.ctypeslib.as_array(kind.from_address(address))).view(count, self._vocab_size)

    def _model(self, parts: Parts, spec: EngineSpec, fields: dict[str, Any]) -> tuple[ModelSpec, list[Any]]:
        """Return the model's `ModelSpec` and the weights to round to 8 bits."""
        model: Any = parts.model
        decoder, embedding, head = model.model, model.model.embed_tokens, model.lm_head
        layers = self._layers(decoder.layers, model.parameters)
        fields |= {"is_tied": head.weight is embedding.weight, "embedding": embedding.weight.data_ptr()}
        fields |= {"embedding_scale": embedding.scale}
        result = self._spec(parts, spec, layers, head, decoder.norm, fields)
        if (inputs := decoder.inputs) is not None:
            result.input_size, result.input_norm = spec.model.layer_input_size, self._norm(inputs.norm)
            result.input_embedding, result.input_scale = inputs.embedding.weight.data_ptr(), inputs.embedding.scale
            result.input_eps = inputs.norm.eps
            self._linear(result.input_projection, inputs.projection)
        return result, [head.weight] if spec.quantization else []

    def _layers(self, layers: Sequence[DecoderLayer], parameters: tuple[Parameter, ...]) -> list[Any]:
        """Return (attention, MLP, four norms, what follows them) of each layer."""
        whole = {_data(p.tensor).data_ptr(): p.tensor for p in parameters}
        for layer in layers:
            mlp = layer.mlp.experts if isinstance(layer.mlp, BesideMLP) else layer.mlp
            if isinstance(mlp, SparseMLP):  # views would keep the memory of weights that have been packed
                gate_up, down = (whole[_data(w).data_ptr()] for w in mlp.weights[:2])
                mlp.weights = mlp.weights._replace(gate_up=gate_up, down=down)
        return [(x.self_attn, x.mlp, x.norms, x.tail) for x in layers]

    def _next_tokens(self, model: HeadModel, fields: dict[str, Any]) -> tuple[ModelSpec, list[Any]]:
        """Leave the head to the library, which has packed the target's."""
        own: Any = model.head
        fields |= {"embedding_norm": self._norm(own.embedding_norm), "hidden_norm": self._norm(own.hidden_norm)}
        result = self._spec(model.parts, model.spec, self._layers([own.layer], own.parameters), None, own.norm, fields)
        self._linear(result.fc, own.fc)
        return result, []

    def _eagle(self, eagle: HeadModel, fields: dict[str, Any]) -> tuple[ModelSpec, list[Any]]:
        """Round the matrices to 8 bits if possible: reading 16 bits costs more time than worse drafts do."""
        head: Any = eagle.head
        self._kept.append(head.draft_ids)
        fields["draft_ids"] = head.draft_ids.data_ptr()
        fields["hidden_norm"] = self._norm(head.hidden_norm)
        layer = head.attention, head.mlp, (head.embedding_norm, None, head.mlp_norm, None), None
        result = self._spec(eagle.parts, eagle.spec, [layer], head.lm_head, head.norm, fields)
        self._linear(result.fc, head.fc)
        weights: list[Any] = [weight for _, weight in self._matrices]
        return result, [w for w in weights if w.shape[1] % INT8.group == 0]

    def _linear(self, packed: Packed, linear: Linear) -> None:
        """Fill `packed`, all but the address, from a projection."""
        packed.bias, packed.adapter = self._float(linear.bias), self._adapter(linear)
        self._matrix(packed, linear.weight)

    def _adapter(self, linear: Linear) -> int | None:
        """Return the address of what adapters change of a projection; None if nothing."""
        if linear.adapted is None:
            return None
        w = linear.adapted.weights
        rows, ranks = torch.tensor(w.rows), w.ranks
        assert ranks is not None, "the slots of adapters have ranks"
        addresses = (tensor.data_ptr() for tensor in (w.a, w.shift, w.b, ranks))
        result = LowRank(*addresses, w.a.stride(0), w.rank, w.a.shape[1] // w.rank, rows.data_ptr(), len(rows))
        self._kept += [rows, result]
        return addressof(result)

    def _matrix(self, packed: Packed, weight: Tensor | Quantized, count: int = 1) -> None:
        """Fill `packed`, all but the address, from `count` matrices above each other."""
        rows, packed.cols = weight.shape
        packed.rows = rows // count
        packed.bits = weight.format.bits if isinstance(weight, Quantized) else 0
        self._matrices.append((packed, weight))

    def _mlp(self, layer: LayerWeights, mlp: BesideMLP | SparseMLP | GatedMLP | PlainMLP) -> None:
        """Fill the fields of a layer's MLP, or of its experts."""
        if isinstance(mlp, BesideMLP):
            self._mlp(layer, mlp.experts)
            self._linear(layer.shared_up, mlp.mlp.gate_up_proj)
            self._linear(layer.shared_down, mlp.mlp.down_proj)
            layer.router_norm = self._float(mlp.router_norm)
            layer.dense_norm, layer.experts_norm, layer.mixed_norm = map(self._norm, mlp.norms)
        elif isinstance(mlp, SparseMLP):
            self._matrix(layer.up, mlp.weights.gate_up, mlp.experts.count)
            self._matrix(layer.down, mlp.weights.down, mlp.experts.count)
            layer.up.bias, layer.down.bias = map(self._float, (mlp.weights.gate_up_bias, mlp.weights.down_bias))
            layer.expert_scales = self._float(mlp.weights.scale)
            self._router(layer, mlp)
            if mlp.shared is not None:
                self._linear(layer.shared_up, mlp.shared.gate_up_proj)
                self._linear(layer.shared_down, mlp.shared.down_proj)
        else:
            self._linear(layer.up, mlp.gate_up_proj if isinstance(mlp, GatedMLP) else mlp.up_proj)
            self._linear(layer.down, mlp.down_proj)

    def _router(self, layer: LayerWeights, mlp: SparseMLP) -> None:
        """Fill the router's fields with a float32 copy of it, and of the gate of the MLP beside the experts."""
        packed, parts = layer.router, list[Any]()
        if mlp.is_plain:
            parts.append(mlp.router.weight)
            if mlp.router.bias is not None:
                packed.bias = self._float(F.pad(mlp.router.bias, (0, LANES)))
        else:
            parts.append(mlp.scorer)
            layer.rank_bias = self._float(mlp.bias)
        if mlp.shared_gate is not None:
            parts.append(mlp.shared_gate.weight)
            packed.adapter = self._adapter(mlp.shared_gate)
        weight = torch.cat([part.float() for part in parts])
        packed.rows, packed.cols = weight.shape
        weight = F.pad(weight, (0, 0, 0, round_up(len(weight), LANES) - len(weight)))
        self._library.pack(weight.data_ptr(), False, *weight.shape)
        packed.data = self._float(weight)

    def _norm(self, norm: Norm | None) -> int | None:
        """Return the address of a norm's weight, which a LayerNorm's bias follows; None without a norm."""
        if not isinstance(norm, LayerNorm):
            return None if norm is None else self._float(norm.weight)
        weight = norm.weight
        return self._float(torch.stack([weight, torch.zeros_like(weight) if norm.bias is None else norm.bias]))

    def _float(self, tensor: Tensor | None) -> int | None:
        """Return the address of a float32 copy that lives as long as this model; None without a tensor."""
        if tensor is None:
            return None
        self._kept.append(tensor.float().contiguous())
        address: int = self._kept[-1].data_ptr()
        return address

    def _tail(self, layer: LayerWeights, tail: LayerTail | None) -> None:
        """Fill the fields of what follows a layer's MLP."""
        layer.output_scale = 1.0 if tail is None else float(tail.scalar)
        if tail is not None and tail.norm is not None:
            self._linear(layer.input_gate, tail.gate)
            self._linear(layer.input_projection, tail.projection)
            layer.projection_norm = self._norm(tail.norm)

    def _recurrence(self, layer: LayerWeights, net: GatedDeltaNet, kind: GatedDelta) -> None:
        """Fill the fields of gated DeltaNet."""
        w, r, qkvz_ba = net.weights, layer.recurrence, net.projections
        for packed, linear in zip((layer.qkv, layer.beta_decay, layer.o), (*qkvz_ba, net.out_proj), strict=True):
            self._linear(packed, linear)
        r.conv, r.rate = self._float(w.conv[:, 0].t()), self._float(-w.a_log.exp())
        r.dt_bias, r.norm = self._float(w.dt_bias), self._float(w.norm)
        r.key_heads, r.value_heads = kind.key_heads, kind.value_heads
        r.key_dim, r.value_dim, r.width, r.tokens = kind.key_dim, kind.value_dim, kind.width, kind.recent
        r.delta, r.recent, r.decay, r.inputs = (state.data_ptr() for state in net.state)
        r.stride = net.state.delta.stride(0) * net.state.delta.itemsize

    def _attention(self, layer: LayerWeights, attention: Attention, kind: GroupedQuery) -> None:
        """Fill the fields of attention."""
        self._linear(layer.qkv, attention.qkv_proj)
        self._linear(layer.o, attention.o_proj)
        if attention.gate is not None:
            self._linear(layer.gate, attention.gate)
        layer.q_norm, layer.k_norm = self._heads_norms(attention)
        if attention.heads.norms_v:
            layer.v_norm = self._float(torch.ones(kind.head_dim))
        layer.cos_sin = attention.heads.cos_sin.data_ptr()
        layer.sinks, layer.q_scale = self._float(attention.heads.sinks), self._float(attention.heads.q_scale)
        layer.heads, layer.kv_heads, layer.dim = kind.heads, kind.kv_heads, kind.head_dim
        layer.window, layer.scale, layer.softcap = kind.window or 0, kind.scale, kind.softcap
        data, scale = data_and_scale(attention.kv.pages)
        layer.cache, layer.cache_scale = data.data_ptr(), None if scale is data else scale.data_ptr()
        layer.cache_stride = data.stride(0) * data.itemsize

    def _heads_norms(self, attention: Attention) -> tuple[int | None, int | None]:
        """Return the addresses of the weights for q and for k."""
        if attention.heads_norm is None:
            return self._float(attention.heads.q_weight), self._float(attention.heads.k_weight)
        weight = attention.heads_norm.weight
        return self._float(weight[: attention.q_size]), self._float(weight[attention.q_size :])

    def _spec(
        self, parts: Parts, spec: EngineSpec, layers: list[Any], head: Linear | None, norm: Norm, fields: dict[str, Any]
    ) -> ModelSpec:
        """Return the model's `ModelSpec` without addresses of matrices.

        Each layer is (attention, MLP, four norms, what follows them).
        """
        m, state, e = spec.model, parts.state, spec.model.experts
        weights = (LayerWeights * len(layers))()
        self._kept.append(weights)
        for index, (layer, (attention, mlp, norms, tail)) in enumerate(zip(weights, layers, strict=True)):
            kind = m.mixer(index, spec.info)
            if isinstance(kind, GroupedQuery):
                self._attention(layer, attention, kind)
            elif isinstance(kind, GatedDelta):
                self._recurrence(layer, attention, kind)
            layer.page_table = state.page_tables[kind.states[0].group].data_ptr()
            self._mlp(layer, mlp)
            self._tail(layer, tail)
            layer.input_norm, layer.attention_norm, layer.mlp_norm, layer.output_norm = map(self._norm, norms)
        sizes: dict[str, Any] = {
            "is_bf16": spec.dtype is torch.bfloat16,
            "layers": m.num_layers,
            "hidden": m.hidden_size,
            "vocab": self._vocab_size,
            "page": spec.page_size,
            "is_parallel": m.family.is_parallel,
            "is_layer_norm": m.family.norm == "layer",
            "norms_all_heads": m.qk_norm == "all",
            "activation": ACTIVATIONS.index(m.activation),
            "eps": m.norm_eps,
            "block_eps": m.rms_norm_eps,
            "logit_cap": m.logit_softcap,
            "weights": addressof(weights),
            "final_norm": self._norm(norm),
            "last_token": state.last_token.data_ptr(),
            "rows": state.table.data_ptr(),
            "page_tables": state.page_tables.data_ptr(),
            "table_rows": state.page_tables.shape[1],
            "table_width": state.page_tables.shape[2],
        }
        if m.output_gate:
            sizes["gate_activation"] = ACTIVATIONS.index(m.family.output_gate)
        if e is not None:
            sizes |= {"experts": e.count, "top_k": e.top_k, "groups": e.groups, "top_groups": e.top_groups}
            sizes |= {"expert_activation": ACTIVATIONS.index(e.flags.gate)}
            sizes |= {"is_sigmoid": e.flags.scoring == "sigmoid", "normalises": e.normalise, "expert_scale": e.scale}
            sizes["router_cap"] = e.softcap
        result = ModelSpec(**(sizes | fields))
        if head is not None:
            self._linear(result.head, head)
        return result


def _data(weight: Tensor | Quantized) -> Tensor:
    return weight.data if isinstance(weight, Quantized) else weight


class NativeRunner:
    """Runs any plan in the library. No other runner can use the weights and K/V pages afterwards."""

    def __init__(self, parts: Parts, spec: EngineSpec, library: NativeLibrary, device: CpuDevice) -> None:
        self.name = f"native ({', '.join(filter(None, (library.isa, spec.quantization)))})"
        self.parts = parts
        self._library = library
        self._device = device
        drafting = parts.drafting
        fields: dict[str, Any] = {}
        if drafting is not None:
            fields = {"lengths": drafting.lengths.data_ptr(), "drafts": drafting.drafts.data_ptr()}
        self._model = NativeModel(parts, spec, library, threads=device.threads, **fields)
        self.logits = self._model.logits
        self._drafter = None
        if drafting is not None and isinstance(drafting.model, DraftModel):
            fields |= {"target": self._model.handle, "last_token": parts.state.last_token.data_ptr()}
            self._drafter = _Drafter(drafting, drafting.model, library, device, fields)

    def fits(self, plan: BatchPlan) -> bool:
        return True

    def fold(self, folds: Records) -> None:
        folds = np.ascontiguousarray(folds)
        self._library.fold(self._model.handle, folds.ctypes.data, len(folds))

    def launch(self, plan: BatchPlan) -> ForwardOutput:
        def sample(masks: Ints) -> Pending:
            columns = self._run(plan, masks)
            return lambda: columns

        return ForwardOutput(plan, sample)

    @torch.inference_mode()
    def _run(self, plan: BatchPlan, masks: Ints) -> Ints:
        self.parts.penalties.apply(plan.penalties, masks)
        call = _step_plan(plan, masks)
        if self._drafter is not None and plan.has_drafts:
            self._drafter.run(plan)
        if len(plan.prompt_logprob_ids):
            out = self._with_prompt_logprobs(plan)
        else:
            out = self._call(plan, call)
            special = np.flatnonzero(plan.sampled_flags & ~PLAIN)
            if len(special):
                out = self._sample(plan, special, self.logits(out.shape[1])[special], out)
        return self._verify(plan, call, out) if plan.has_drafts else out

    def _verify(self, plan: BatchPlan, call: StepPlan, out: Ints) -> Ints:
        """Accept drafts and update the rows' lengths; return `out` with the two more lines of a `StepResult`."""
        lines = np.zeros((2, out.shape[1]), np.int32)
        lines[0] = 1
        sampling, is_penalized = None, (plan.sampled_flags & Flag.PENALIZED) != 0
        if is_penalized.any():
            sampling = self._sampling(plan, np.flatnonzero(is_penalized))  # before lengths change
        arrays = (out[0], out[1], lines[0], lines[1])
        self._library.verify(self._model.handle, byref(call), *(line.ctypes.data for line in arrays))
        out = np.concatenate([out[:2], lines, out[2:]])
        if sampling is not None:
            self.parts.count(torch.from_numpy(out[:, : len(is_penalized)][:, is_penalized]), sampling)
        return out

    def logits_of(self, plan: BatchPlan) -> Tensor:
        """Return what `EagerRunner.logits_of` does, in float32."""
        return self.logits(self._call(plan, _step_plan(plan)).shape[1]).clone()

    def _call(self, plan: BatchPlan, call: StepPlan) -> Ints:
        """Run a plan in the library; return int32 [2, S]: tokens, and 1 if their logits are finite.

        Sequences that the library does not sample have zeros.
        """
        out = np.zeros((2, len(plan.sampled_flags)), np.int32)
        self._library.step(self._model.handle, byref(call), out[0].ctypes.data, out[1].ctypes.data)
        return out

    def _with_prompt_logprobs(self, plan: BatchPlan) -> Ints:
        """Run a plan with prompt logprobs, in passes; return all lines of a result."""
        sampled, logprobs, special, special_logits = [], [], [], []
        ids = torch.from_numpy(plan.prompt_logprob_ids)
        for part in _passes(plan, rows_per_pass(self.parts.model.config.vocab_size)):
            out, flags = self._call(part, _step_plan(part)), part.sampled_flags
            logits, is_prompt = self.logits(out.shape[1]), (flags & Flag.PROMPT_LOGPROBS) != 0
            is_special = ((flags & (~PLAIN | Flag.MASKED)) != 0) & ~is_prompt  # these calls have no masks
            targets, ids = ids[: is_prompt.sum()], ids[is_prompt.sum() :]
            wanted = torch.full_like(targets, Flag.LOGPROBS)
            logprobs.append(self.parts.ops.token_logprobs(logits[is_prompt], targets, wanted))
            special_logits.append(logits[is_special])
            special.append(is_special[~is_prompt])
            sampled.append(out[:, ~is_prompt])
        columns, index = np.concatenate(sampled, 1), np.flatnonzero(np.concatenate(special))
        if len(index):
            columns = self._sample(plan, index, torch.cat(special_logits), columns)
        result = np.zeros((2 + StepResult.WIDTH, columns.shape[1] + len(plan.prompt_logprob_ids)), np.int32)
        of_answers, of_prompts = np.split(result, [columns.shape[1]], 1)  # views
        of_answers[: len(columns)] = columns
        of_prompts[0], of_prompts[1], of_prompts[2:] = plan.prompt_logprob_ids, 1, torch.cat(logprobs, 1).numpy()
        return result

    def _sample(self, plan: BatchPlan, special: npt.NDArray[np.intp], logits: Tensor, out: Ints) -> Ints:
        """Sample the columns `special` [n] with `logits` [n, V] in torch; return `out` with these columns replaced."""
        self._device.use_threads_for(SAMPLING_FLOPS * logits.numel())
        columns = self.parts.sample(logits, self._sampling(plan, special)).numpy()
        result = np.zeros((len(columns), out.shape[1]), np.int32)
        result[:2] = out
        result[:, special] = columns
        return result

    def _sampling(self, plan: BatchPlan, index: npt.NDArray[np.intp]) -> Sampling:
        """Return the sampling inputs of the columns `index` of a plan."""
        if not plan.has_drafts:
            return make_sampling(plan, index, self._device)
        drafting = self.parts.drafting
        assert drafting is not None, "the plan has DRAFTS, but there is no drafter"
        lengths, newest, drafts = (t.numpy() for t in (drafting.lengths, drafting.last_token, drafting.drafts))
        sequences, widths = plan.sequences[(plan.sequences["flags"] & Flag.SAMPLES) != 0], plan.widths
        flat = np.repeat(sequences, widths)
        offset = np.arange(len(flat), dtype=np.int32) - np.repeat(np.cumsum(widths) - widths, widths).astype(np.int32)
        rows, is_drafted = flat["row"], (flat["flags"] & Flag.DRAFTS) != 0
        flat["stop"] = np.where(is_drafted, lengths[rows] + offset, flat["stop"])
        inputs = np.where(offset == 0, newest[rows], drafts[rows, offset - 1])
        drafted, before = self._device.upload(offset[index], inputs[index])
        return replace(make_sampling(BatchPlan(plan.step, flat), index, self._device), drafted=drafted, inputs=before)


class _Drafter:
    """A draft model in the library, which also gives it the tokens that the target computes."""

    def __init__(
        self, drafting: Drafting, model: DraftModel, library: NativeLibrary, device: CpuDevice, fields: dict[str, Any]
    ) -> None:
        self._drafting = drafting
        self._draft = model
        self._library = library
        self._device = device
        head = model if isinstance(model, HeadModel) else None
        self._model = NativeModel(model.parts, model.spec, library, head, **fields)

    def run(self, plan: BatchPlan) -> None:
        """Draft tokens for the sequences with DRAFTS, whose pages are allocated. The step applies proposals."""
        plan = self._drafting.asked(plan)
        call = _step_plan(plan)
        is_special, number = bool((plan.sampled_flags & SAMPLED_ALIKE).any()), 0
        while self._library.draft(self._model.handle, byref(call), number):
            if is_special:
                self._sample(plan, number)
            number += 1

    def _sample(self, plan: BatchPlan, number: int) -> None:
        """Sample draft `number` of the rows that the library leaves to the ops in torch."""
        rows, counts, flags = drafted_rows(plan)
        rows, flags = rows[counts > number], flags[counts > number]
        sequences, index = np.zeros(len(rows), SEQUENCE), np.flatnonzero(flags)
        sequences["row"], sequences["stop"] = rows, self._drafting.lengths.numpy()[rows] + number
        sequences["flags"] = flags | Flag.SAMPLES
        sampling = make_sampling(BatchPlan(0, sequences), index, self._device)
        tokens = self._draft.sample(self._model.logits(len(sequences))[index], sampling)
        self._drafting.drafts[sampling.rows, number] = tokens


def _step_plan(plan: BatchPlan, masks: Ints = NO_MASKS) -> StepPlan:
    """Return a structure with the addresses and lengths of a plan's arrays, which it keeps alive."""
    states = plan.page_writes, plan.row_states, plan.histories, plan.proposals, plan.captures
    arrays = [np.ascontiguousarray(array) for array in (plan.sequences, plan.tokens, *states, masks)]
    counts = [len(array) for array in arrays]
    addresses = (array.ctypes.data if len(array) else None for array in arrays)
    call = StepPlan(*addresses, counts[0], *counts[2:7])
    call.arrays = arrays
    return call


def _passes(plan: BatchPlan, max_samples: int) -> Iterator[BatchPlan]:
    """Yield parts of a plan with prompt logprobs, each of up to about `max_samples` sampled tokens, without masks.

    Each token of a prompt becomes a sequence of its own, so that the library computes its logits.
    """
    sequences, rest = _split_into_tokens(plan.sequences), replace(plan, masks=NO_MASKS)
    widths = np.where((sequences["flags"] & Flag.DRAFTS) != 0, sequences["stop"] - sequences["start"], 1)
    samples = np.cumsum(np.where((sequences["flags"] & Flag.SAMPLES) != 0, widths, 0)) - 1
    pass_of_sequence = np.maximum(samples, 0) // max_samples
    for part in np.split(sequences, np.flatnonzero(np.diff(pass_of_sequence)) + 1):
        from_host = part[(part["flags"] & Flag.FROM_DEVICE) == 0]
        count = int((from_host["stop"] - from_host["start"]).sum())
        yield replace(rest, sequences=part, tokens=rest.tokens[:count])
        rest = replace(rest, tokens=rest.tokens[count:], page_writes=NO_PAGE_WRITES, row_states=NO_ROW_STATES)


def _split_into_tokens(sequences: Records) -> Records:
    """Return the same step with a sequence, which samples, per token of those with PROMPT_LOGPROBS."""
    result = []
    sampled = Flag.SAMPLES | Flag.PROMPT_LOGPROBS
    for row, start, stop, flags in sequences.tolist():
        if not flags & Flag.PROMPT_LOGPROBS:
            result.append((row, start, stop, flags))
            continue
        result += [(row, t, t + 1, sampled) for t in range(start, stop - 1)]
        result.append((row, stop - 1, stop, flags & ~Flag.PROMPT_LOGPROBS if flags & Flag.SAMPLES else sampled))
    return np.array(result, SEQUENCE)


class CpuRunners:
    """The `RunnerFactory` of CPUs: the C++ step if it can run the model, else the ops in torch."""

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

    def supports_format(self, kind: Format) -> bool:
        """Return whether the C++ step can use weights of this format: 4 bits, no zeros, groups of whole blocks."""
        is_plain = kind.name == "int4" and not kind.has_zeros and not kind.order
        return self._library is not None and is_plain and kind.group % INT8.group == 0

    def pack_adapter(self, weights: AdapterWeights) -> None:
        """Pack a and b as other matrices; the rows of b go on to a multiple of `LANES`."""
        if self._library is None:
            return
        for matrix in (weights.a, weights.b):
            rows, cols = round_up(matrix.shape[1], LANES), matrix.shape[2]
            self._library.pack(matrix.data_ptr(), matrix.dtype is torch.bfloat16, rows, cols)

    @staticmethod
    def choose_dtype(spec: EngineSpec) -> EngineSpec:
        """Choose bfloat16 for a large bfloat16 checkpoint, and int8 for a GGUF file of few bits, which are faster.

        Only the C++ step can run int8, and in torch, bfloat16 is not always faster; a small model is fast enough in
        float32.
        """
        chosen = replace(spec, dtype=torch.bfloat16) if spec.model.is_large_bfloat16 else spec
        if spec.model.is_rounded and spec.quantization is None:
            chosen = replace(chosen, quantization="int8")
        if refusal(chosen) is not None:
            return spec
        try:
            load_native()
        except NativeError:
            return spec
        return chosen

    def warm_up(self, parts: Parts) -> None:
        """Do nothing: nothing is compiled for single steps."""

    def make(self, parts: Parts) -> list[Runner]:
        """Return one runner for any plan. The C++ step takes over the weights and the K/V pool."""
        if self._library is None:
            return [base_runner(parts, self._spec)]
        return [NativeRunner(parts, self._spec, self._library, self._device)]
