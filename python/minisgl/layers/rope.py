"""The parameters of rotary position embeddings. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

# Of layers without RoPE there is a type more, "none".
ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn", "longrope", "dynamic", "proportional")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """The parameters of a rotary embedding. Each `type` of ROPE_TYPES reads the fields that it needs.

    It rotates the first `dim` elements of a head; None means all. Of proportional RoPE, this part of the frequencies is
    not 0.
    """

    theta: float = 10000.0
    type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    attention_factor: float = 1.0
    dim: int | None = None
    part: float = 1.0


NO_ROPE: Final = RopeConfig(type="none")
