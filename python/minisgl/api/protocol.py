"""The types of all request and response bodies.

Every optional field may be null. `api/fields.py` reads requests. Responses are encoded from the types below,
except stream events and the growing arrays of /generate, which are assembled from bytes. `tests/e2e/test_openapi.py`
checks real responses against the types.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from minisgl.core.message import EngineView, StatsMsg
from minisgl.core.params import NUMBERS

# A text, token ids, or a list of texts and lists of token ids.
Prompt = str | list[int | str | list[int]]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class ToolFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: Any = None


class CustomCall(msgspec.Struct, frozen=True):
    """A call of a tool that takes a text."""

    name: str
    input: str


class ToolCall(msgspec.Struct, frozen=True):
    function: ToolFunction | None = None
    id: str | None = None
    type: str | None = None
    custom: CustomCall | None = None

    @property
    def called(self) -> ToolFunction | None:
        """The function that is called. A custom tool is a function of one text; other tools are none."""
        return self.function if self.custom is None else ToolFunction(self.custom.name, {"input": self.custom.input})


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class GivenMessage(ChatMessage, frozen=True):
    """A message of a chat completion, and the object that the client has sent: templates may read more fields."""

    given: dict[str, Any] = {}


if TYPE_CHECKING:
    _Numbers = msgspec.Struct
else:
    _Numbers = msgspec.defstruct(
        "_Numbers", [(name, kind | None, None) for name, kind in NUMBERS.items()], frozen=True, kw_only=True
    )


class SamplingFields(_Numbers, frozen=True, kw_only=True):
    """Fields of chat completions, text completions and /generate; the numbers of `SamplingParams` are among them."""

    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None  # vLLM's name
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = None
    best_of: int | None = None
    logit_bias: dict[str, float] | list[tuple[int, float]] | None = None
    logprobs: bool | int | None = None  # a boolean for chat, a number for completions
    cache_salt: str | None = None
    speculate: bool | None = None
    # Structured output (`api/structured.py`), under OpenAI's and vLLM's names.
    response_format: dict[str, Any] | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: dict[str, Any] | None = None


class OpenAIFields(SamplingFields, frozen=True, kw_only=True):
    """Fields of chat and text completions."""

    model: str | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_timing: bool | None = None
    return_token_ids: bool | None = None
    lora_path: str | None = None  # SGLang's: the name of an adapter
    user: Any = None


class ResponseReasoning(msgspec.Struct, frozen=True):
    """OpenAI's form, with OpenRouter's `enabled`, `exclude` and `max_tokens`."""

    effort: str | None = None
    summary: str | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    max_tokens: int | None = None


class Thinking(msgspec.Struct, frozen=True):
    type: str
    budget_tokens: int | None = None


class ChatFields(OpenAIFields, frozen=True, kw_only=True):
    """Fields of all APIs of conversations. Many services have names of their own for turning reasoning on or off."""

    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None
    reasoning_effort: str | None = None
    reasoning: ResponseReasoning | None = None
    include_reasoning: bool | None = None
    thinking: Thinking | bool | None = None
    enable_thinking: bool | None = None
    think: bool | str | None = None
    thinking_budget: int | None = None


class ChatCompletionRequest(ChatFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions"""

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class CompletionRequest(OpenAIFields, frozen=True, kw_only=True):
    """POST /v1/completions"""

    prompt: Prompt
    echo: bool | None = None
    add_special_tokens: bool | None = None


class InputItem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message, a call, its output, reasoning, or the id of a kept item. `type` says which fields count."""

    type: str | None = None
    id: str | None = None
    role: str | None = None
    content: Any = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: Any = None
    output: Any = None
    summary: Any = None


class ResponseText(msgspec.Struct, frozen=True):
    format: dict[str, Any] | None = None


class ResponsesRequest(ChatFields, frozen=True, kw_only=True):
    """POST /v1/responses"""

    input: str | list[InputItem] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    text: ResponseText | None = None
    tool_choice: str | dict[str, Any] | None = None
    include: list[str] | None = None
    max_tool_calls: int | None = None


class AnthropicMessage(msgspec.Struct, frozen=True):
    role: str
    content: str | list[dict[str, Any]]


class AnthropicToolChoice(msgspec.Struct, frozen=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(msgspec.Struct, frozen=True):
    format: dict[str, Any] | None = None
    effort: str | None = None


class MessagesRequest(ChatFields, frozen=True, kw_only=True):
    """POST /v1/messages and /v1/messages/count_tokens: Anthropic's API"""

    messages: list[AnthropicMessage]
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tool_choice: AnthropicToolChoice | None = None
    output_config: OutputConfig | None = None


class GenerateSampling(SamplingFields, frozen=True, kw_only=True):
    """`sampling_params` of /generate, under SGLang's names and OpenAI's."""

    max_new_tokens: int | None = None
    max_tokens: int | None = None
    min_new_tokens: int | None = None
    sampling_seed: int | None = None
    seed: int | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /generate"""

    model: str | None = None
    lora_path: str | None = None
    text: str | list[str] | None = None
    prompt: Prompt | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: GenerateSampling | None = None
    stream: bool | None = None
    max_tokens: int | None = None  # mini-sglang has these two at the top level
    ignore_eos: bool | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/embeddings"""

    input: Prompt
    model: str | None = None
    lora_path: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: Any = None


class ScoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/score"""

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    user: Any = None


class RerankRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/rerank"""

    query: str
    documents: list[str | dict[str, Any]]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    user: Any = None


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: a text, or messages as in a chat completion"""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, str | int | float | bool | None] | None = None


class DetokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool | None = None


class ErrorDetail(msgspec.Struct, frozen=True, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(msgspec.Struct, frozen=True):
    error: ErrorDetail


class CachedTokens(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: CompletionDetails | None = None  # of reasoning, and of drafted tokens


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Queue time, time to first token, and speed of one request (`return_timing`)."""

    queue_ms: float
    ttft_ms: float | None
    cached_tokens: int
    prefill_chunks: int
    tokens_per_s: float | None


class GeneratedFunction(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class GeneratedToolCall(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    id: str
    function: GeneratedFunction


class GeneratedCustomCall(msgspec.Struct, frozen=True, tag_field="type", tag="custom"):
    id: str
    custom: CustomCall


class AssistantMessage(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="role", tag="assistant"):
    content: str | None
    reasoning_content: str = ""
    tool_calls: list[GeneratedToolCall | GeneratedCustomCall] = []


Ids = list[int] | msgspec.UnsetType  # with `return_token_ids`


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    token_ids: Ids = msgspec.UNSET
    logprobs: dict[str, Any] | None
    finish_reason: str
    stop_reason: str | int | None


class ChatChoice(Choice, frozen=True, kw_only=True):
    message: AssistantMessage


class TextChoice(Choice, frozen=True, kw_only=True):
    text: str
    prompt_token_ids: Ids = msgspec.UNSET


class OpenAIResponse(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    id: str
    created: int
    model: str
    usage: Usage
    timing: Timing | None = None


class ChatCompletionResponse(OpenAIResponse, frozen=True, kw_only=True, tag_field="object", tag="chat.completion"):
    choices: list[ChatChoice]
    prompt_token_ids: Ids = msgspec.UNSET


class CompletionResponse(OpenAIResponse, frozen=True, kw_only=True, tag_field="object", tag="text_completion"):
    choices: list[TextChoice]


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0  # a service may bill these


class ReasoningTokens(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ThinkingTokens(msgspec.Struct, frozen=True):
    thinking_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: ReasoningTokens
    total_tokens: int


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="response"):
    """A response of /v1/responses: what was asked for, and the answer so far."""

    id: str
    created_at: int
    model: str
    status: str = "in_progress"
    output: list[dict[str, Any]] = []
    usage: ResponseUsage | None = None
    error: dict[str, str] | None = None
    incomplete_details: dict[str, str] | None = None
    background: bool = False
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = {}
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: ResponseReasoning = ResponseReasoning()
    store: bool = True
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_p: float
    truncation: str = "disabled"
    user: str | None = None


class DeletedResponse(msgspec.Struct, frozen=True, tag_field="object", tag="response"):
    id: str
    deleted: bool = True


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Anthropic's usage: `input_tokens` are those that were not in the cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class MessageObject(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """The answer of /v1/messages."""

    id: str
    role: str = "assistant"
    model: str
    content: list[dict[str, Any]] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


class AnthropicError(msgspec.Struct, frozen=True):
    type: str
    message: str


class AnthropicErrorResponse(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    error: AnthropicError


class GenerateResponse(msgspec.Struct, frozen=True):
    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]


Generated = GenerateResponse | list[GenerateResponse]


class Embedding(msgspec.Struct, frozen=True, tag_field="object", tag="embedding"):
    index: int
    embedding: list[float] | str  # base64 of little-endian float32


class EmbeddingUsage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingResponse(msgspec.Struct, frozen=True, tag_field="object", tag="list"):
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Score(msgspec.Struct, frozen=True, tag_field="object", tag="score"):
    index: int
    score: float


class ScoreResponse(msgspec.Struct, frozen=True, tag_field="object", tag="list"):
    data: list[Score]
    model: str
    usage: EmbeddingUsage


class RankedDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class RerankResponse(msgspec.Struct, frozen=True):
    results: list[RankedDocument]
    model: str
    usage: EmbeddingUsage


class ModelCard(msgspec.Struct, frozen=True, kw_only=True, tag_field="object", tag="model"):
    id: str
    created: int
    owned_by: str
    root: str
    parent: str | None = None  # the base of an adapter
    max_model_len: int


class LoadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/load_lora_adapter"""

    lora_name: str
    lora_path: str
    load_inplace: bool | None = None


class UnloadAdapterRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/unload_lora_adapter"""

    lora_name: str


class AdaptersResponse(msgspec.Struct, frozen=True, kw_only=True):
    """SGLang's answer to a change: the folders of all adapters by name."""

    success: bool
    loaded_adapters: dict[str, str]


class ModelListResponse(msgspec.Struct, frozen=True, tag_field="object", tag="list"):
    data: list[ModelCard]


class TokenizeResponse(msgspec.Struct, frozen=True):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str


class StatusResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    status: str
    cause: str = ""


class VersionResponse(msgspec.Struct, frozen=True):
    version: str


class ModelInfoResponse(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    served_model_name: str
    model_path: str
    tokenizer_path: str
    max_model_len: int
    vocab_size: int
    is_generation: bool
    default_sampling_params: dict[str, float]


class ReplicaView(msgspec.Struct, frozen=True, kw_only=True):
    """The router's view of a running replica. `stats` is its last heartbeat."""

    replica: int
    state: str  # serving, silent (no heartbeat for a while) or draining
    silent_seconds: float
    requests: int
    queued_tokens: int
    cached_prefixes: int  # in pages
    stats: StatsMsg


class EngineViewResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The engine of one `replica`, and the figures of all; `starting` are the numbers of those that do not run yet."""

    replica: int
    view: EngineView
    stats: StatsMsg
    replicas: list[ReplicaView]
    starting: list[int]
