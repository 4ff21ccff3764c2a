"""The attention backends in order of preference, and how a user's choice becomes one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, Protocol

import torch

from minisgl.attention.backend import AttentionBackend, AttentionSpec, Requirements, Window
from minisgl.errors import ConfigError
from minisgl.registry import Registry

if TYPE_CHECKING:
    from minisgl.kvcache.mha_pool import MHAKVPool
    from minisgl.ops.table import OpTable

logger = logging.getLogger(__name__)

_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)


def _needs(
    module: str, extra: str, requirements: Requirements, capability: tuple[int, int] | None = None
) -> Callable[[AttentionSpec], str | None]:
    """The `supports` of a backend whose kernels come with an optional package, perhaps for one kind of GPU only."""

    def refusal(spec: AttentionSpec) -> str | None:
        reason = requirements.refusal(spec)
        if reason is not None:
            return reason
        if find_spec(module) is None:
            return f"{module} is not installed; pip install 'minisgl[{extra}]'"
        if capability is not None and torch.cuda.get_device_capability() != capability:
            return "compute capability {}.{} is needed, this GPU has {}.{}".format(
                *capability, *torch.cuda.get_device_capability()
            )
        return None

    return refusal


ATTENTION: Final[Registry[type[AttentionBackend]]] = Registry("attention backend")
ATTENTION.add(
    "cpu", "minisgl.attention.sdpa:CpuAttention", supports=Requirements(device_types=("cpu",), dtypes=_FLOATS).refusal
)
# Before fi and fa3, which need a package each, because it decodes fastest: on an H200 in 0.8 to 0.93 of the time of
# fi and a third of that of fa3, with no plan on the host (0.1 to 0.8 ms in fi) and steps that a graph replays. Prompts
# alone take fa3 0.68 to 0.8 of its time: `--attn fa3,triton`, pages of 128 (benchmark/kernels/backends.py).
ATTENTION.add(
    "triton",
    "minisgl.attention.triton:TritonAttention",
    supports=Requirements(device_types=("cuda",), dtypes=_FLOATS, head_dims=(64, 128, 256)).refusal,
)
ATTENTION.add(
    "fi",
    "minisgl.attention.fi:FlashInferAttention",
    supports=_needs(
        "flashinfer",
        "fi",
        Requirements(device_types=("cuda",), dtypes=(torch.bfloat16, torch.float16), head_dims=(64, 128, 256)),
    ),
)
ATTENTION.add(
    "fa3",
    "minisgl.attention.fa3:FA3Attention",
    supports=_needs(
        "fa3_fwd",
        "fa3",
        # What the wheel was built with: no float16, no windows, whole tiles of 128 keys a page (80 for dimension 256).
        Requirements(
            device_types=("cuda",),
            dtypes=(torch.bfloat16,),
            head_dims=(64, 128),
            page_sizes=(128, 256, 512, 1024),
            windows=False,
        ),
        capability=(9, 0),
    ),
)
ATTENTION.add("reference", "minisgl.attention.backend:ReferenceAttention")


class AttentionShape(Protocol):
    """The part of a model's configuration that attention depends on."""

    @property
    def num_heads(self) -> int: ...
    @property
    def windows(self) -> tuple[Window, ...]: ...  # of each layer
    @property
    def attention_scale(self) -> float | None: ...  # None: 1 / sqrt(head_dim)


def resolve_attention(
    choice: str, pool: MHAKVPool, model: AttentionShape, ops: OpTable, max_rows: int = 257
) -> AttentionBackend:
    """The backend for "auto", a name, or "PREFILL,DECODE" (two of these: the second takes the pure decode steps).

    A named backend that cannot serve this model or machine, or cannot be built, is replaced by the first that can, with
    a warning that says why. Raises `ConfigError` for an unknown name, or with the reasons when none can.
    """
    spec = AttentionSpec(
        device_type=pool.device.type,
        dtype=pool.dtype,
        num_heads=model.num_heads,
        num_kv_heads=pool.num_kv_heads,
        head_dim=pool.head_dim,
        page_size=pool.page_size,
        max_rows=max_rows,
        windows=tuple(dict.fromkeys(model.windows)),
        score_scale=model.attention_scale,
    )
    choices = [part.strip() for part in choice.split(",")]
    if len(choices) > 2:
        raise ConfigError(f"--attn {choice} names {len(choices)} backends; give one, or PREFILL,DECODE")
    for name in choices:
        if name != "auto":
            ATTENTION.refusal(name, spec)  # an unknown name is an error before anything is built
    built: dict[str, AttentionBackend] = {}
    backends = [_build(name, spec, ops, built) for name in choices]
    if backends[0] is backends[-1]:
        return backends[0]
    from minisgl.attention.hybrid import HybridAttention

    return HybridAttention(*backends)


def _build(choice: str, spec: AttentionSpec, ops: OpTable, built: dict[str, AttentionBackend]) -> AttentionBackend:
    """The backend `choice`, or the first other one that works; one that is in `built` already is used again."""
    candidates = [choice] if choice != "auto" else []
    candidates += [name for name in ATTENTION.names if name != choice]
    reasons, surprises = [], []
    for name in candidates:
        reason = ATTENTION.refusal(name, spec)
        if reason is None:
            try:
                backend = built.get(name) or ATTENTION.load(name)(spec, ops)
            except Exception as error:  # a library that does not load, a failed compilation: whatever it is, say so
                logger.debug("attention backend %s", name, exc_info=True)
                reason = _first_error(error)
                surprises.append(f"{name}: {reason}")
            else:
                if surprises:
                    logger.warning("using attention backend %s instead of %s", name, "; ".join(surprises))
                built[name] = backend
                return backend
        elif name == choice:
            surprises.append(f"{name}: {reason}")
        reasons.append(f"{name}: {reason}")
    raise ConfigError(f"no attention backend fits ({'; '.join(reasons)})")


def _first_error(error: Exception) -> str:
    """The kind of `error` and one line of its text: of a compiler's output the first that speaks of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    telling = next((line for line in lines if "error:" in line), lines[0])
    return f"{type(error).__name__}: {telling[:300]}"
