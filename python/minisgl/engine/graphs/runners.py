"""The runners of a GPU: captured steps where a graph fits, eager ones for the rest."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from minisgl.core.errors import ConfigError
from minisgl.core.layout import FOLD, FOLD_TOKENS, STATE
from minisgl.engine.graphs.capture import TAILS, Capture
from minisgl.engine.graphs.step import CapturedRunner
from minisgl.engine.pooling import base_runner
from minisgl.engine.trial import decode_plan, draft_plan, largest_prefill
from minisgl.kernels.triton.launch import compile_ahead
from minisgl.models.llama import LlamaForCausalLM
from minisgl.process.log import Progress

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from minisgl.device.cuda import CudaDevice
    from minisgl.engine.config import EngineSpec
    from minisgl.engine.runner import Parts, Runner
    from minisgl.ops.adapters import AdapterWeights
    from minisgl.ops.quantized import Format

_log = logging.getLogger("minisgl.engine")

# Rows or tokens: with the largest steps they use nearly all kernels.
SMALL_STEPS: Final = (1, 2, 3, 16, 32, 64, 96, 128, 192, 512)


class CudaRunners:
    """The `RunnerFactory` of NVIDIA GPUs."""

    def __init__(self, spec: EngineSpec, device: CudaDevice) -> None:
        self._spec = spec
        self._has_fp8 = device.has_fp8
        if not device.has_fp8 and (spec.quantization is not None or spec.fp8_cache):
            option = "--kv-cache-dtype fp8" if spec.quantization is None else f"--quantization {spec.quantization}"
            raise ConfigError(f"{option} needs a GPU with FP8 (compute capability 8.9 or later)")

    def supports_format(self, kind: Format) -> bool:
        return self._has_fp8

    def pack_adapter(self, weights: AdapterWeights) -> None:
        """Do nothing: the kernels read the matrices as they are."""

    @staticmethod
    def choose_dtype(spec: EngineSpec) -> EngineSpec:
        return spec

    def warm_up(self, parts: Parts) -> None:
        """Compile the kernels of all steps in parallel, or load them from Triton's cache."""
        spec, rows = self._spec, self._spec.max_running_requests
        plans = [largest_prefill(spec), *(largest_prefill(replace(spec, max_step_tokens=n)) for n in SMALL_STEPS)]
        plans += [decode_plan(n, spec.model.vocab_size, 0) for n in sorted({rows, *SMALL_STEPS}) if n <= rows]
        # The kernels of the other tails are the same for any number of rows.
        plans += [decode_plan(rows, spec.model.vocab_size, flags) for flags in TAILS[1:]]
        if parts.drafting is not None:
            plans += [draft_plan(n, spec.max_queries) for n in (1, 16)]
        runner = base_runner(parts, spec)
        with _rehearsal(parts), compile_ahead(Progress("compiling kernels", "kernels", spec.info.rank == 0).update):
            for plan in plans:
                runner.launch(plan).wait()
            if parts.model.recurrences:
                parts.fold(np.array([(parts.store.dummy(STATE), 0, FOLD_TOKENS)], FOLD))
        # No kernel has run, so tokens are what was in memory; the next steps would look up their embeddings.
        parts.state.last_token.zero_()
        if parts.drafting is not None:
            parts.drafting.forget()

    def make(self, parts: Parts) -> list[Runner]:
        """Capture the graphs."""
        spec, eager = self._spec, base_runner(parts, self._spec)
        if not spec.graph_rows:
            return [eager]
        for mixer in parts.mixers:
            if not mixer.captures_decodes:
                _log.warning("decode steps run op by op: %s cannot be captured as a CUDA graph", mixer.name)
                return [eager]
        captures_prompts = all(mixer.captures_prompts for mixer in parts.mixers)
        longest = min(spec.max_step_tokens, spec.max_seq_len) if captures_prompts else 0
        progress = Progress("capturing CUDA graphs", "sizes", spec.info.rank == 0)
        with Capture(partial(_rehearsal, parts)) as capture:
            return [CapturedRunner(parts, capture, spec.graph_rows, longest, spec.max_queries, progress.update), eager]


def _rehearsal(parts: Parts) -> AbstractContextManager[None]:
    """Steps in this context only compile and load kernels. A drafter may read any layer."""
    has_drafter = parts.drafting is not None and parts.drafting.model is not None
    if has_drafter or not isinstance(parts.model, LlamaForCausalLM):
        return nullcontext()
    return parts.model.shortened()
