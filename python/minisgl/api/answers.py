"""The shapes of the answers, for /openapi.json. Nothing is encoded through these types: `render` writes the bytes.

They say which fields an answer has; `tests/e2e/test_openapi.py` holds real answers against them.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(msgspec.Struct):
    error: ErrorDetail


class CachedTokens(msgspec.Struct):
    cached_tokens: int


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class Timing(msgspec.Struct):
    queue_ms: float
    ttft_ms: float | None
    cached_tokens: int
    prefill_chunks: int
    tokens_per_s: float | None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class AnsweredToolCall(msgspec.Struct):
    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(msgspec.Struct, omit_defaults=True):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[AnsweredToolCall] = []


class Choice(msgspec.Struct):
    index: int
    logprobs: dict[str, Any] | None
    finish_reason: str
    stop_reason: str | int | None


class ChatChoice(Choice):
    message: AssistantMessage


class TextChoice(Choice):
    text: str


class OpenAIAnswer(msgspec.Struct, omit_defaults=True, kw_only=True):
    id: str
    created: int
    model: str
    usage: Usage
    timing: Timing | None = None


class ChatAnswer(OpenAIAnswer):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class CompletionAnswer(OpenAIAnswer):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class GeneratedText(msgspec.Struct):
    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]


class AnsweredEmbedding(msgspec.Struct):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str  # base64 of little-endian float32


class EmbeddingUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(msgspec.Struct):
    object: Literal["list"]
    data: list[AnsweredEmbedding]
    model: str
    usage: EmbeddingUsage


class ModelCard(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[ModelCard]


class TokensAnswer(msgspec.Struct):
    tokens: list[int]
    count: int
    max_model_len: int


class PromptAnswer(msgspec.Struct):
    prompt: str


class StatusAnswer(msgspec.Struct, omit_defaults=True):
    status: str
    cause: str = ""


class VersionAnswer(msgspec.Struct):
    version: str


class ModelInfo(msgspec.Struct):
    model: str
    model_path: str
    max_model_len: int
    vocab_size: int
    is_generation: bool
    default_sampling_params: dict[str, float]
