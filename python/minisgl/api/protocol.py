"""The request bodies: OpenAI's chat and text completions and SGLang's /generate.

Every optional field may be null. A field that we know but whose value we cannot honour is refused by name; a field
that we do not know is accepted and mentioned in the debug log.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from minisgl.errors import RequestError

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ToolFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, frozen=True):
    function: ToolFunction
    id: str | None = None
    type: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """What the three APIs have in common. The second half is known but only supported at its neutral value."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None  # vLLM's word
    no_stop_trim: bool | None = None  # SGLang's
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    n: int | None = None
    best_of: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None

    logprobs: bool | int | None = None  # a switch for chat, a number for completions
    cache_salt: str | None = None
    priority: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    allowed_token_ids: Any = None
    bad_words: list[str] | None = None
    custom_logit_processor: Any = None
    logits_processors: Any = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    stop_regex: Any = None
    structural_tag: Any = None
    truncate_prompt_tokens: int | None = None
    # What the answer must look like (`api/structured.py`), in OpenAI's, vLLM's and SGLang's words.
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None
    json_schema: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    ebnf: str | None = None


class OpenAIFields(SamplingFields, frozen=True, kw_only=True):
    """What chat and text completions share."""

    model: str | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_timing: bool | None = None
    user: str | None = None


class ChatCompletionRequest(OpenAIFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions"""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: Any = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    functions: Any = None
    function_call: Any = None
    modalities: list[str] | None = None
    audio: Any = None
    prediction: Any = None
    documents: list[Any] | None = None
    web_search_options: Any = None


class CompletionRequest(OpenAIFields, frozen=True, kw_only=True):
    """POST /v1/completions"""

    prompt: str | list[Any]
    echo: bool | None = None
    suffix: str | None = None
    add_special_tokens: bool | None = None
    prompt_embeds: Any = None


class GenerateSampling(SamplingFields, frozen=True, kw_only=True):
    """`sampling_params` of /generate, in SGLang's words and in ours."""

    max_new_tokens: int | None = None
    max_tokens: int | None = None
    sampling_seed: int | None = None
    seed: int | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /generate"""

    text: str | list[str] | None = None
    prompt: str | list[Any] | None = None
    input_ids: list[Any] | None = None
    sampling_params: GenerateSampling | None = None
    stream: bool | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    token_ids_logprob: Any = None
    return_hidden_states: bool | None = None
    input_embeds: Any = None
    session_params: Any = None
    lora_path: Any = None
    image_data: Any = None


# Neutral values of the fields whose effect does not exist yet; null is always neutral.
_NEUTRAL: Final[dict[str, Callable[[Any], bool]]] = {
    "length_penalty": lambda v: v == 1,
    "priority": lambda v: v == 0,
    "use_beam_search": lambda v: not v,
    "modalities": lambda v: v == ["text"],
    "suffix": lambda v: v == "",
    "bad_words": lambda v: not v,
    "documents": lambda v: not v,
    "return_token_ids": lambda v: not v,
    "return_tokens_as_token_ids": lambda v: not v,
    "return_hidden_states": lambda v: not v,
} | {
    f: lambda v: False
    for f in (
        *("chat_template", "functions", "function_call", "audio", "prediction", "web_search_options"),
        *("allowed_token_ids", "custom_logit_processor", "logits_processors", "prompt_logprobs", "prompt_embeds"),
        *("stop_regex", "structural_tag", "truncate_prompt_tokens"),
        *("token_ids_logprob", "input_embeds", "session_params", "lora_path", "image_data"),
    )
}


def parse_body(body: bytes, kind: type[T]) -> T:
    """The JSON `body` as a `kind`; raises `RequestError` (400) that names the field that is wrong."""
    try:
        request = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as e:
        raise RequestError(_readable(str(e)), param=_field_of(str(e)), code="invalid_type") from e
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise RequestError(f"the body is not valid JSON: {e}", code="invalid_json") from e
    if logger.isEnabledFor(logging.DEBUG):
        given = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        if unknown := given.keys() - {f.name for f in msgspec.structs.fields(kind)}:
            logger.debug("unknown fields are not used: %s", ", ".join(sorted(unknown)))
    refuse_unsupported(request)
    return request


def refuse_unsupported(request: Any) -> None:
    """Raises `RequestError` for the first known field whose value we cannot honour."""
    for name in request.__struct_fields__:
        value = getattr(request, name)
        if isinstance(value, SamplingFields):
            refuse_unsupported(value)
        if value is not None and name in _NEUTRAL and not _NEUTRAL[name](value):
            raise RequestError(f"{name}={_short(value)} is not supported", param=name, code="unsupported_value")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _field_of(error: str) -> str | None:
    """The top field that a msgspec error is about."""
    if (path := re.search(r"at `\$\.(\w+)", error)) is not None:
        return path[1]
    missing = re.search(r"missing required field `(\w+)`", error)
    return missing[1] if missing is not None else None


def _readable(error: str) -> str:
    return error.replace(" - at `$.", " at `").replace(" - at `$`", "")
