"""Unknown fields: those that would change the answer elsewhere are refused, the others are accepted and reported.

The names are those of OpenAI, vLLM, SGLang, mini-sglang, llama.cpp and TGI; docs/api.md shows both tables.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from minisgl.api.protocol import GenerateRequest, GenerateSampling
from minisgl.errors import RequestError, near_miss, unsupported

logger = logging.getLogger(__name__)

_WITHOUT_A_NEUTRAL_VALUE: Final = """
access_programs adaptive_decay adaptive_target background_options beam_width custom_params dry_sequence_breakers
enable_thinking extra_key grammar_lazy grammar_triggers lora lora_path lora_request max_new_tokens mirostat_eta
mirostat_tau n_keep n_predict num_beams quadratic samplers sampling_seed stop_sequences t_max_predict_ms tfs thinking
thinking_budget thinking_budget_tokens thinking_token_budget vllm_xargs xargs
audio_data echo_prompt image image_data images input_embeds input_extra input_ids media_io_kwargs mm_processor_kwargs
moderation prompt_embeds session_id session_params use_audio_in_video video_data
decoder_input_details details include response_fields return_full_text
token_ids_logprob top_n_tokens
bootstrap_host bootstrap_port bootstrap_room kv_transfer_params
"""
# Fields that are not implemented and would change the answer -> the value that changes nothing, as null does.
FOREIGN: Final[dict[str, Any]] = dict.fromkeys(_WITHOUT_A_NEUTRAL_VALUE.split()) | {
    "add_bos_token": True,
    "diversity_penalty": 0,
    "do_sample": True,
    "dry_multiplier": 0,
    "dynatemp_range": 0,
    "early_stopping": False,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
    "include_reasoning": True,
    "min_new_tokens": 0,
    "mirostat": 0,
    "n_probs": 0,
    "no_repeat_ngram_size": 0,
    "repeat_penalty": 1,
    "return_entropy": False,
    "return_hidden_states": False,
    "return_routed_experts": False,
    "separate_reasoning": True,
    "smoothing_factor": 0,
    "spaces_between_special_tokens": True,
    "stream_interval": 1,
    "stream_reasoning": True,
    "top_a": 0,
    "truncate": 0,
    "typical": 1,
    "typical_p": 1,
    "watermark": False,
    "xtc_probability": 0,
}
_HARMLESS: Final = """
background cache_prompt conversation_id custom_labels data_parallel_rank external_trace_header guided_decoding_backend
id_slot log_metrics metadata no_logs prompt_cache_key prompt_cache_options prompt_cache_retention provider request_id
require_reasoning return_bytes rid safety_identifier service_tier store timings_per_token user
"""
# Fields that identify the client, or say how a service bills, stores and routes: they have no effect in any server.
HARMLESS: Final = frozenset(_HARMLESS.split())
MAX_REPORTED: Final = 16  # names in the header; each with at most MAX_NAME characters
MAX_NAME: Final = 64
CLOSE: Final = 0.84  # the least similarity of a misspelt name to its field

_logged: set[str] = set()


def ignored_fields(body: bytes, kind: type[msgspec.Struct], refuses: bool) -> list[str]:
    """Return the names in the JSON object `body`, which is a `kind`, that have no effect.

    Raises `RequestError` (400) for a name that has an effect in other servers, that misspells a field, or, with
    `refuses`, that is not a field.
    """
    given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    ignored = _ignored(given, kind, refuses)
    if kind is GenerateRequest and (inner := bytes(given.get("sampling_params", b"null"))) != b"null":
        ignored += _ignored(msgspec.json.decode(inner, type=dict[str, msgspec.Raw]), GenerateSampling, refuses)
    return ignored


def told(names: Iterable[str]) -> list[str]:
    """Return `names` without an effect as a header can have them: sorted, printable, and not too many. Log new ones."""
    shown = sorted({_printable(name) for name in names})[:MAX_REPORTED]
    for name in shown:
        if name not in _logged and len(_logged) < 1000:
            _logged.add(name)
            logger.info("clients send %r, which has no effect", name)
    return shown


def unread_kwargs(kwargs: dict[str, Any] | None, variables: frozenset[str], refuses: bool) -> list[str]:
    """Return the names in `chat_template_kwargs` that are not `variables` of the template.

    Raises `RequestError` (400) for a name that misspells a variable, or, with `refuses`, for any such name.
    """
    unread = sorted((kwargs or {}).keys() - variables)[:MAX_REPORTED]
    for name in unread:
        close = near_miss(name[:MAX_NAME], variables, CLOSE)
        if close or refuses:
            hint = f"; did you mean {close}?" if close else " (--unknown-fields refuse)"
            raise unsupported(f"{name[:MAX_NAME]} is not a variable of the chat template{hint}", "chat_template_kwargs")
    return [f"chat_template_kwargs.{_printable(name)}" for name in unread]


def _printable(name: str) -> str:
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in name[:MAX_NAME])


def _ignored(given: dict[str, msgspec.Raw], kind: type[msgspec.Struct], refuses: bool) -> list[str]:
    known = kind.__struct_fields__
    ignored = []
    for name in given.keys() - set(known):
        value = bytes(given[name])
        if value == b"null" or name in HARMLESS:
            continue
        if kind is GenerateRequest and name in GenerateSampling.__struct_fields__:
            raise _refusal(name, "belongs in sampling_params")
        if name in FOREIGN:
            if msgspec.json.decode(value) != FOREIGN[name]:
                raise _refusal(name, "is not supported")
            continue
        if close := near_miss(name[:MAX_NAME], known, CLOSE):
            raise _refusal(name, f"is not a field; did you mean {close}?")
        if refuses:
            raise _refusal(name, "is not a field (--unknown-fields refuse)")
        ignored.append(_printable(name))
    return sorted(ignored)[:MAX_REPORTED]


def _refusal(name: str, why: str) -> RequestError:
    return unsupported(f"{name[:MAX_NAME]} {why}", name[:MAX_NAME])
