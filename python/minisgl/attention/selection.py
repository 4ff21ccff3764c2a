"""The attention backends in order of preference, and the selection of one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

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
    """Return the `supports` of a backend that needs an optional package, and perhaps one compute capability."""

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
# triton comes before fi and fa3, which need a package each, because it decodes fastest: on an H200 in 0.8 to 0.93 of
# fi's time and a third of fa3's, with no plan on the host (0.1 to 0.8 ms in fi) and captured in graphs. For prompts
# alone fa3 takes 0.68 to 0.8 of its time: `--attn fa3,triton`, pages of 128 (benchmark/kernels/backends.py).
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
        # The limits of the wheel: no float16, no windows, whole tiles of 128 keys per page (80 for head dimension 256).
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


def resolve_attention(
    choice: str,
    pool: MHAKVPool,
    ops: OpTable,
    *,
    num_heads: int,
    windows: Sequence[Window] = (None,),
    score_scale: float | None = None,
    max_rows: int = 257,
) -> AttentionBackend:
    """Return the backend for "auto", a name, or "PREFILL,DECODE" (two names; the second is for decoding sequences).

    `windows` are those of the layers; see `AttentionSpec`. A named backend that does not support this model or machine,
    or fails to build, is replaced by the first one that works, with a warning. Raise `ConfigError` for an unknown name,
    or with all reasons if no backend works.
    """
    spec = AttentionSpec(
        device_type=pool.device.type,
        dtype=pool.dtype,
        num_heads=num_heads,
        num_kv_heads=pool.num_kv_heads,
        head_dim=pool.head_dim,
        page_size=pool.page_size,
        max_rows=max_rows,
        windows=tuple(dict.fromkeys(windows)),
        score_scale=score_scale,
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
    """Return the backend `choice`, or the first other one that works; backends in `built` are reused."""
    candidates = [choice] if choice != "auto" else []
    candidates += [name for name in ATTENTION.names if name != choice]
    reasons, warnings = [], []
    for name in candidates:
        reason = ATTENTION.refusal(name, spec)
        if reason is None:
            try:
                backend = built.get(name) or ATTENTION.load(name)(spec, ops)
            except Exception as error:  # such as a library that does not load or a failed compilation
                logger.debug("attention backend %s", name, exc_info=True)
                reason = _first_error(error)
                warnings.append(f"{name}: {reason}")
            else:
                if warnings:
                    logger.warning("using attention backend %s instead of %s", name, "; ".join(warnings))
                built[name] = backend
                return backend
        elif name == choice:
            warnings.append(f"{name}: {reason}")
        reasons.append(f"{name}: {reason}")
    raise ConfigError(f"no attention backend fits ({'; '.join(reasons)})")


def _first_error(error: Exception) -> str:
    """Return the type of `error` and one line of its text, preferably one with "error:" (compilers)."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    telling = next((line for line in lines if "error:" in line), lines[0])
    return f"{type(error).__name__}: {telling[:300]}"
