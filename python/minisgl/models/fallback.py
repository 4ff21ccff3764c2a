"""Decoders that only transformers has: its modelling code runs on our pages.

transformers calls attention through a table of functions, in which ours stores and reads pages. What the layers keep,
and whether the model can be computed in this way at all, is seen from two short runs at the start, in which attention
mixes no tokens: see `FallbackForCausalLM`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from minisgl.core.errors import ConfigError
from minisgl.core.rounding import ceil_div
from minisgl.core.specs import GroupedQuery
from minisgl.layers.builder import Builder
from minisgl.layers.linear import Stream
from minisgl.layers.parameter import Init, Parameter
from minisgl.layers.rope import NO_ROPE
from minisgl.layers.rotary import cos_sin_table
from minisgl.ops.deferred import finished
from minisgl.ops.reference import HeadTransform

if TYPE_CHECKING:
    from pathlib import Path

    from minisgl.core.plan import Context
    from minisgl.models.model_config import ModelConfig

PAGED: Final = "minisgl"  # our attention, without masks
MASKED: Final = "minisgl_masked"  # the same with masks, to see which positions layers attend to
HEAD_SIZES: Final = (64, 80, 96, 128, 192, 256, 512)  # heads are padded to one, for which GPUs have kernels
WATCHED: Final = 7  # the token id that both runs watch
LENGTH: Final = 160  # tokens of the first run, more than the blocks of any compressed attention
NO_INTERFACE: Final = "no layer attends through transformers' attention interface"
SPARSE: Final = re.compile("Indexer|Compressor")  # modules that choose or merge keys, perhaps only of longer texts
TOLERANCES: Final = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # relative to the largest value
KNOWN: Final = {"scaling", "softcap", "s_aux"}  # arguments of attention that change scores
# Those that do not: a window is also in the mask, a causal mask makes `is_causal` redundant, dropout is for training.
HARMLESS: Final = {"sliding_window", "is_causal", "dropout", "position_ids", "output_attentions", "use_cache"}


class _Call(NamedTuple):
    """A layer's attention to the watched token: its q [Hq, D], k [Hk, D] and v [Hk, D'], mask and further arguments."""

    module: nn.Module
    heads: tuple[Tensor, Tensor, Tensor]
    mask: Any
    options: dict[str, Any]


class _Layer(NamedTuple):
    """How a module attends: its mixer's index, what it keeps, and its heads, padded to the width of `cos_sin`."""

    mixer: int
    kv: Any  # with the pages
    heads: HeadTransform


class FallbackForCausalLM:
    """A decoder of transformers, with the interface of `llama.LlamaForCausalLM` that generating text needs.

    Two runs at the start watch one token. In the first, others precede it and the model counts positions itself; in the
    second, others follow it, up to the last position, and it is given the same position. Others are NaN from their
    embeddings on, and attention returns each token's own value. So the token has the same q, k, v and logits in both if
    nothing but attention mixes tokens and the position counts that we give, and else not. The first run has masks,
    which show the layers' windows; the second is computed as later steps are.
    """

    adapted = ()  # nor projections of ours
    recurrences: ClassVar[dict[int, list[Any]]] = {}  # it has no state beside K/V

    def __init__(self, builder: Builder, config: ModelConfig, model: Any) -> None:
        """Declare what the layers of transformers' `model` keep. Raises `ConfigError` if it cannot be computed."""
        self.config = config
        self.parameters = tuple(Parameter(weight, (), Init.NORMAL) for weight in model.parameters())
        self.num_parameters = sum(weight.numel() for weight in model.parameters())
        self.quantization = "none"
        self._model, self._dtype, self._device = model, builder.dtype, builder.device
        self._makes_some_logits = "logits_to_keep" in signature(model.forward).parameters
        self._layers: dict[nn.Module, _Layer] = {}
        self._ctx: Context | None = None
        self._calls: list[_Call] = []
        self._watched, self._length = 0, 0
        for module in model.modules():
            module.minisgl = self
        calls = self._check()
        mixers, length = [self._mixer(call) for call in calls], config.max_position_embeddings
        widths = {mixer.head_dim for mixer in mixers}
        tables = {width: cos_sin_table(NO_ROPE, width, length, builder.device) for width in widths}
        for call, mixer in zip(calls, mixers, strict=True):
            sinks = call.options["s_aux"].float() if mixer.has_sinks else None
            heads = HeadTransform(None, None, 0.0, tables[mixer.head_dim], sinks=sinks)
            self._layers[call.module] = _Layer(builder.mixer(mixer), builder.state(*mixer.states), heads)
        self.states, self.mixers = tuple(builder.states), tuple(builder.mixers)

    def hidden(self, input_ids: Tensor, ctx: Context) -> Stream:
        """Run the model on token ids [T] int32; return the logits [S, V] of `ctx.batch.logit_tokens`."""
        self._ctx = ctx
        return Stream(self._run(input_ids, ctx.batch.positions, ctx.batch.logit_tokens))

    def logits(self, stream: Stream) -> Tensor:
        """Return `hidden` [S, V]: transformers' models make logits in the same call."""
        return finished(stream.x)

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> Tensor:
        """Attend with q [1, Hq, T, D], k and v [1, Hk, T, D] -> [1, T, Hq, D of v]; before any step, only record it."""
        if self._ctx is None:
            return self._record(module, q, k, v, mask, options)
        layer = self._layers[module]
        width = layer.heads.cos_sin.shape[1]
        each = [F.pad(x[0].transpose(0, 1), (0, width - x.shape[-1])).to(self._dtype) for x in (q, k, v)]
        out: Tensor = self._ctx.mixers[layer.mixer].attend(torch.cat(each, 1).flatten(1), layer.heads, layer.kv.pages)
        return out[None, :, :, : v.shape[-1]].to(q.dtype).contiguous()

    def _run(self, input_ids: Tensor, positions: Tensor, wanted: Tensor) -> Tensor:
        """Return the logits [S, V] of the tokens `wanted` [S] of tokens [T] at positions [T]."""
        ids = input_ids.clamp(0, self.config.vocab_size - 1)  # a step that only compiles kernels has any token
        inputs = {"input_ids": ids[None].long(), "position_ids": positions[None].long()}
        if self._makes_some_logits:
            inputs["logits_to_keep"] = wanted
        logits: Tensor = self._model(**inputs, use_cache=False).logits[0]
        return (logits if self._makes_some_logits else logits[wanted]).to(self._dtype)

    def _record(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> Tensor:
        if {x.shape[::2] for x in (q, k, v)} != {(1, self._length)}:
            raise ConfigError("a layer has more or fewer keys than tokens")
        own_q, own_k, own_v = (x[0, :, self._watched].float() for x in (q, k, v))
        self._calls.append(_Call(module, (own_q, own_k, own_v), mask, options))
        return v.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(1, 2).contiguous()

    @contextmanager
    def _watching(self, index: int, length: int, attention: str) -> Iterator[list[_Call]]:
        """Record the calls of attention for one token of `length`; the embeddings of the others are NaN."""

        def poison(module: nn.Module, args: Any, out: Tensor) -> Tensor:
            is_other = torch.arange(length, device=out.device) != index
            return out.masked_fill(is_other[:, None], float("nan"))

        self._model.config._attn_implementation = attention
        self._watched, self._length, self._calls = index, length, []
        with self._model.get_input_embeddings().register_forward_hook(poison):
            yield self._calls

    @torch.inference_mode()
    def _check(self) -> list[_Call]:
        """Do the two runs; return the calls of attention in the first."""
        found = {type(module).__name__ for module in self._model.modules()}
        if sparse := sorted(filter(SPARSE.search, found)):
            raise ConfigError(f"layers do not attend to all keys, but to those of {', '.join(sparse)}")
        last, size = self.config.max_position_embeddings - 1, self.config.vocab_size
        length = min(LENGTH, last + 1)
        ids = torch.full((length,), min(WATCHED, size - 1), device=self._device)
        with self._watching(length - 1, length, MASKED) as calls:
            inputs = {"input_ids": ids[None], "attention_mask": torch.ones_like(ids[None])}
            first = self._model(**inputs, use_cache=False).logits[0, -1:].float()
        if not calls:
            raise ConfigError(NO_INTERFACE)
        positions = torch.arange(ceil_div(length, 2), device=self._device)  # nothing may depend on the length
        positions[0], positions[-1] = length - 1, last
        with self._watching(0, len(positions), PAGED) as others:
            second = self._run(ids[: len(positions)], positions, torch.zeros_like(ids[:1])).float()
        modules = [call.module for call in calls]
        if len({*modules}) < len(modules) or modules != [other.module for other in others]:
            raise ConfigError("a layer attends more than once, or not in every step")
        if first.shape[1] != size:
            raise ConfigError(f"it has {first.shape[1]} logits, and config.json a vocab_size of {size}")
        pairs = [(first, second)]
        for call, other in zip(calls, others, strict=True):
            pairs += zip(call.heads, other.heads, strict=True)
        if not all(x.isfinite().all() and y.isfinite().all() for x, y in pairs):
            raise ConfigError("something besides attention mixes tokens, such as a recurrence or a convolution")
        tolerance = TOLERANCES[self._dtype]
        if not all(x.shape == y.shape and (x - y).abs().max() <= tolerance * x.abs().max() for x, y in pairs):
            raise ConfigError("a token's values do not follow from this token and the position that it is given")
        return calls

    def _mixer(self, call: _Call) -> GroupedQuery:
        q, k, v = call.heads
        options, width = call.options, max(q.shape[1], v.shape[1])
        unknown = {n for n, x in options.items() if x is not None and x is not False} - KNOWN - HARMLESS
        if unknown:
            raise ConfigError(f"attention has the unknown arguments {', '.join(sorted(unknown))}")
        if not hasattr(call.mask, "function"):
            raise ConfigError("attention has no causal mask, or one of its own")
        scale = options.get("scaling")
        return GroupedQuery(
            heads=len(q),
            kv_heads=len(k),
            head_dim=next((size for size in HEAD_SIZES if size >= width), width),
            scale=q.shape[1] ** -0.5 if scale is None else float(scale),
            window=self._window(call.mask.function),
            softcap=float(options.get("softcap") or 0.0),
            has_sinks=options.get("s_aux") is not None,
        )

    def _window(self, visible: Any) -> int | None:
        """Return the window of a mask, a function of batch, head, query and key; None if it only hides later keys."""
        last = self.config.max_position_embeddings - 1
        keys, window = torch.arange(last + 1, device=self._device), 0
        zero = torch.zeros_like(keys[0])
        for query in (last, last - 1, last // 2):
            seen = visible(zero, zero, zero + query, keys)
            window = window or int(seen.sum())
            if not torch.equal(seen, (keys <= query) & (keys > query - window)):
                raise ConfigError("its masks are not those of causal attention, with or without a sliding window")
        return window if window <= last else None


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any) -> Any:
    return module.minisgl.attend(module, query, key, value, attention_mask, options), None


def _mask(*, q_length: int, mask_function: Any, device: Any, **others: Any) -> Tensor:
    """Return a causal mask with its `function`, which a changed mask does not have."""
    mask: Any = torch.ones(1, 1, q_length, q_length, dtype=torch.bool, device=device).tril_()
    mask.function = mask_function
    return mask  # type: ignore[no-any-return]


def load_fallback(folder: Path, config: ModelConfig, builder: Builder, *, dummy: bool) -> FallbackForCausalLM:
    """Load the model in `folder` with transformers, or with random weights if `dummy`.

    Raises `ConfigError` if transformers cannot load the model, or our pages cannot serve it.
    """
    try:
        model = _load(folder, config.architecture, builder, dummy=dummy)
        return FallbackForCausalLM(builder, config, model.to(builder.device).eval())
    except Exception as error:  # of any code in transformers
        reason = f"its code fails with {type(error).__name__}: {(str(error).strip() or '?').splitlines()[0]:.300}"
        if isinstance(error, ConfigError):
            reason = str(error)
        elif isinstance(error, KeyError) and error.args == (PAGED,):  # it has a class for each kind of attention
            reason = NO_INTERFACE
        raise ConfigError(f"--model-impl transformers cannot run {config.architecture}: {reason}") from error


def _load(folder: Path, name: str, builder: Builder, *, dummy: bool) -> Any:
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise ConfigError("code from a checkpoint is never run, and transformers' own has no such decoder")
    AttentionInterface.register(PAGED, _attend)
    AttentionInterface.register(MASKED, _attend)
    AttentionMaskInterface.register(MASKED, _mask)
    kind: Any = getattr(transformers, name)
    settings = kind.config_class.from_pretrained(folder, local_files_only=True)
    options: dict[str, Any] = {"dtype": builder.dtype, "attn_implementation": PAGED}
    if dummy:
        with torch.random.fork_rng(), torch.device(builder.device):
            torch.manual_seed(0)
            return kind._from_config(settings, **options)
    options |= {"use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, info = kind.from_pretrained(folder, config=settings, **options)
    for key in ("missing_keys", "mismatched_keys", "error_msgs"):
        if found := sorted(map(str, info[key])):
            what = f"{key.replace('_', ' ')} {', '.join(found[:5])}"
            raise ConfigError(f"the checkpoint in {folder} does not fit its config.json: {what}")
    return model
