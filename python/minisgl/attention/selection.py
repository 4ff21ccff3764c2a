"""The attention backends in order of preference, and the choice of one."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

import torch

from minisgl.attention.backend import Attention, AttentionBackend, AttentionSpec
from minisgl.attention.latent import LatentMixer
from minisgl.core.errors import ConfigError
from minisgl.core.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from minisgl.attention.backend import MixerSpec
    from minisgl.core.specs import Latent
    from minisgl.ops.table import OpTable

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Requirements:
    """What a backend supports and needs; None means no restriction. Checking imports no kernels."""

    device_types: tuple[str, ...] | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    page_sizes: tuple[int, ...] | None = None
    windows: bool = True
    sinks: bool = True
    fp8_cache: bool = False
    drafts: bool = True  # decodes sequences with drafts, whose lengths only the device knows
    module: str = ""  # a module of an optional package, which `extra` installs
    extra: str = ""
    capability: tuple[int, int] | None = None

    def refusal(self, spec: AttentionSpec) -> str | None:
        """Return why the backend does not support `spec` on this machine; None if it does."""
        for word, value, allowed in (
            ("device", spec.device_type, self.device_types),
            ("dtype", spec.dtype, self.dtypes),
            ("head dimension", spec.kind.head_dim, self.head_dims),
            ("page size", spec.page_size, self.page_sizes),
        ):
            if allowed is not None and value not in allowed:
                return f"{word} {value} is not one of {', '.join(str(a) for a in allowed)}"
        for is_needed, is_supported, sentence in (
            (spec.fp8_cache, self.fp8_cache, "an FP8 cache is not supported"),
            (spec.kind.window is not None, self.windows, "sliding windows are not supported"),
            (spec.kind.has_sinks, self.sinks, "attention sinks are not supported"),
            (spec.max_queries > 1, self.drafts, "it cannot decode with drafts"),
        ):
            if is_needed and not is_supported:
                return sentence
        if self.module and find_spec(self.module) is None:
            return f"{self.module} is not installed; pip install 'minisgl[{self.extra}]'"
        if self.capability is not None and (found := torch.cuda.get_device_capability()) != self.capability:
            return "compute capability {}.{} is needed, this GPU has {}.{}".format(*self.capability, *found)
        return None


HALVES: Final = (torch.bfloat16, torch.float16)
FLOATS: Final = (torch.float32, *HALVES)
# triton comes before fi and fa3, which each need a package, because it decodes fastest: on an H200 it takes 0.8 to 0.93
# of fi's time and a third of fa3's, needs no plan on the host (0.1 to 0.8 ms in fi), and is captured in graphs. For
# prompts alone, fa3 takes 0.68 to 0.8 of its time: `--attn fa3,triton`, pages of 128 (benchmark/kernels/backends.py).
ATTENTION: Final[Registry[type[AttentionBackend]]] = Registry("attention backend")
ATTENTION.add("cpu", "minisgl.attention.sdpa:CpuAttention", Requirements(("cpu",), FLOATS, fp8_cache=True).refusal)
ATTENTION.add(
    "triton",
    "minisgl.attention.triton:TritonAttention",
    Requirements(("cuda",), FLOATS, (64, 80, 96, 128, 192, 256, 512), fp8_cache=True).refusal,
)
ATTENTION.add(
    "fi",
    "minisgl.attention.fi:FlashInferAttention",
    Requirements(("cuda",), HALVES, (64, 128, 256), sinks=False, drafts=False, module="flashinfer", extra="fi").refusal,
)
# The limits of fa3's wheel: no float16, no windows, whole tiles of 128 keys per page (80 for head dimension 256).
ATTENTION.add(
    "fa3",
    "minisgl.attention.fa3:FA3Attention",
    Requirements(
        device_types=("cuda",),
        dtypes=(torch.bfloat16,),
        head_dims=(64, 128),
        page_sizes=(128, 256, 512, 1024),
        windows=False,
        sinks=False,
        drafts=False,
        module="fa3_fwd",
        extra="fa3",
        capability=(9, 0),
    ).refusal,
)
ATTENTION.add("reference", "minisgl.attention.backend:ReferenceAttention")


def resolve_attention(choice: str, specs: Sequence[AttentionSpec], ops: OpTable) -> tuple[Attention, ...]:
    """Return attention for each spec by "auto", a name, or "PREFILL,DECODE" (the second is for decoding sequences).

    A named backend that does not support this model or machine, or cannot be built, is replaced by the first one that
    works, with a warning. Raises `ConfigError` for an unknown name, or with all reasons if no backend works.
    """
    choices = [part.strip() for part in choice.split(",")]
    if len(choices) > 2:
        raise ConfigError(f"--attn {choice} names {len(choices)} backends; give one, or PREFILL,DECODE")
    for name in choices:
        if name not in ("auto", *ATTENTION.names):  # is an error before anything is built
            known = ", ".join(("auto", *ATTENTION.names))
            raise ConfigError(f"--attn {choice}: unknown attention backend {name!r}; known: {known}")
    warnings: dict[str, None] = {}
    found = []
    for spec in specs:
        built: dict[str, AttentionBackend] = {}
        decode = _build(choices[-1], spec, ops, built, warnings)
        found.append(Attention(_build(choices[0], replace(spec, max_queries=1), ops, built, warnings), decode))
    for warning in warnings:
        logger.warning("using attention backend %s", warning)
    return tuple(found)


def latent_mixer(spec: MixerSpec[Latent], ops: OpTable) -> LatentMixer:
    """Return the mixer of layers with latents: by kernels on a GPU in 16 bits, else by the op table."""
    if spec.device_type == "cuda" and spec.dtype in HALVES:
        from minisgl.attention.latent_triton import TritonLatents

        return TritonLatents(spec, ops)
    return LatentMixer(spec, ops)


def _build(
    choice: str, spec: AttentionSpec, ops: OpTable, built: dict[str, AttentionBackend], warnings: dict[str, None]
) -> AttentionBackend:
    """Return the backend `choice`, or the first other one that works; then add a sentence to `warnings`.

    Backends in `built` are reused.
    """
    candidates = [choice] if choice != "auto" else []
    candidates += [name for name in ATTENTION.names if name != choice]
    reasons, unexpected = [], []
    for name in candidates:
        reason = ATTENTION.refusal(name, spec)
        if reason is None:
            try:
                built[name] = built.get(name) or ATTENTION.load(name)(spec, ops)
            except Exception as error:  # such as a library that does not load or a failed compilation
                logger.debug("attention backend %s", name, exc_info=True)
                reason = _first_error(error)
                unexpected.append(f"{name}: {reason}")
            else:
                if unexpected:
                    warnings[f"{name} instead of {'; '.join(unexpected)}"] = None
                return built[name]
        elif name == choice:
            unexpected.append(f"{name}: {reason}")
        reasons.append(f"{name}: {reason}")
    raise ConfigError(f"no attention backend fits ({'; '.join(reasons)})")


def _first_error(error: Exception) -> str:
    """Return the type of `error` and one line of its text, preferably one with "error:" (compilers)."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    telling = next((line for line in lines if "error:" in line), lines[0])
    return f"{type(error).__name__}: {telling[:300]}"
