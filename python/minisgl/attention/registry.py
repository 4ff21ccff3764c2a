"""The attention backends in order of preference, and how a user's choice becomes one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import torch

from minisgl.attention.base import AttentionBackend, AttentionSpec, Requirements
from minisgl.utils.errors import ConfigError
from minisgl.utils.registry import Registry

if TYPE_CHECKING:
    from minisgl.kernel.ops import OpTable
    from minisgl.kvcache.mha_pool import MHAKVPool

_FLOATS: Final = (torch.float32, torch.bfloat16, torch.float16)

ATTENTION: Final[Registry[type[AttentionBackend]]] = Registry("attention backend")
ATTENTION.add(
    "cpu", "minisgl.attention.cpu:CpuAttention", supports=Requirements(device_types=("cpu",), dtypes=_FLOATS).refusal
)
ATTENTION.add("reference", "minisgl.attention.reference:ReferenceAttention")


class AttentionShape(Protocol):
    """The part of a model's configuration that attention depends on."""

    @property
    def num_heads(self) -> int: ...


def resolve_attention(choice: str, pool: MHAKVPool, model: AttentionShape, ops: OpTable) -> AttentionBackend:
    """The backend for "auto", a name, or "PREFILL,DECODE" (two of these: the second takes the pure decode steps).

    Raises `ConfigError` for an unknown name, or with the reasons when none fits.
    """
    spec = AttentionSpec(
        device_type=pool.device.type,
        dtype=pool.dtype,
        num_heads=model.num_heads,
        num_kv_heads=pool.num_kv_heads,
        head_dim=pool.head_dim,
        page_size=pool.page_size,
    )
    names = [ATTENTION.choose(part.strip(), spec) for part in choice.split(",")]
    if len(names) > 2:
        raise ConfigError(f"--attn {choice} names {len(names)} backends; give one, or PREFILL,DECODE")
    backends = [ATTENTION.load(name)(spec, ops) for name in names]
    if len(set(names)) == 1:
        return backends[0]
    from minisgl.attention.hybrid import HybridAttention

    return HybridAttention(*backends)
