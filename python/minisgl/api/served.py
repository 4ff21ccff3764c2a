"""The model as the API server knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from minisgl.api.parsers.choose import OutputForms
from minisgl.api.prepare import SamplingDefaults
from minisgl.checkpoint.embedder import Embedder
from minisgl.params import Limits


@dataclass(frozen=True)
class ServedModel:
    """What the API server knows about the model and the processes behind it."""

    name: str
    limits: Limits
    defaults: SamplingDefaults
    forms: OutputForms = field(default_factory=OutputForms)  # of tool calls and reasoning
    facts: dict[str, str | int | float] = field(default_factory=dict)  # from the scheduler
    pids: dict[str, int] = field(default_factory=dict)  # without the API processes'
    embedder: Embedder | None = None
