"""Turns request bodies into validated `TokenizeMsg`s. The `FrontendManager` assigns uids later."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, NamedTuple

import msgspec

from minisgl.api import protocol as p
from minisgl.api.parsers.output import OutputForms
from minisgl.api.structured import json_text, requested_grammar
from minisgl.checkpoint.embedder import Embedder
from minisgl.core.errors import RequestError, unsupported
from minisgl.core.message import TokenizeMsg, UserReply, ids_to_bytes
from minisgl.core.params import MAX_LOGPROBS, NUMBERS, Adapter, Limits, SamplingParams, choice_params, validate_sampling

logger = logging.getLogger(__name__)

ROLES: Final = ("system", "developer", "user", "assistant", "tool")
MAX_PROMPTS: Final = 1024
MAX_GENERATIONS: Final = 1024  # per request: prompts times choices
MAX_ANSWER_BYTES: Final = 64 << 20
TOKEN_BYTES: Final = 8  # of a token's text in an answer
LOGPROB_BYTES: Final = 120  # of one log-probability with its token and bytes
MAX_ID_DIGITS: Final = 10
MAX_TEMPLATE_KWARGS: Final = 32
MAX_NAMES: Final = 20  # of models, in an error message
_RESERVED_KWARGS: Final = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling parameters of requests that set none. A model's generation_config.json may define them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @classmethod
    def from_generation_config(cls, config: dict[str, Any]) -> SamplingDefaults:
        """Return the parameters in `config`. Log those that no request may have, which do not count."""
        values, problems = {}, []
        for name in [name for name in asdict(cls()) if config.get(name) is not None]:
            value = config[name]
            is_whole = isinstance(value, float) and value.is_integer()  # an integer by JSON Schema
            given: dict[str, Any] = {name: int(value) if is_whole else value}
            try:
                params = SamplingParams(**given)
                validate_sampling(params, Limits(max_model_len=1, vocab_size=1))
                values[name] = getattr(params, name)
            except RequestError as e:
                problems.append(f"{name}={value!r:.60} ({e})")
        if problems:
            logger.warning("generation_config.json: no request may have %s: ignored", ", ".join(problems))
        return cls(**values)


@dataclass(slots=True)
class ServedAdapter:
    """An adapter that requests may choose, and the sums of its requests that have ended."""

    adapter: Adapter
    created: int  # Unix time
    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0

    def count(self, reply: UserReply) -> None:
        """Count a request whose last reply is `reply`."""
        self.requests += 1
        self.prompt_tokens += reply.prompt_tokens
        self.generation_tokens += reply.completion_tokens


class ChosenModel(NamedTuple):
    """What a request has chosen: the name that its answer gives as `model`, and an adapter, or None for the base."""

    name: str
    served: ServedAdapter | None = None


@dataclass(frozen=True)
class ServedModel:
    """What the API knows about the model and the processes behind it."""

    name: str
    limits: Limits
    defaults: SamplingDefaults
    forms: OutputForms = field(default_factory=OutputForms)  # of tool calls and reasoning
    facts: dict[str, str | int | float] = field(default_factory=dict)  # from the scheduler
    pids: Callable[[], dict[str, int]] = dict  # without the API process
    embedder: Embedder | None = None
    template_variables: frozenset[str] = frozenset()  # the names that the chat template reads
    adapters: dict[str, ServedAdapter] = field(default_factory=dict)  # by name; they come and go

    def choose(self, asked: str, param: str, names: Sequence[str]) -> ChosenModel:
        """Return what the field `param` chooses: one of `names`, the base, or an adapter as NAME or base:NAME.

        Raises `RequestError` (404) for an unknown name.
        """
        if asked in names:
            return ChosenModel(self.name)
        adapter = next((asked.removeprefix(f"{name}:") for name in names if asked.startswith(f"{name}:")), asked)
        if (served := self.adapters.get(adapter)) is not None:
            return ChosenModel(asked, served)
        known = [repr(name) for name in (self.name, *self.adapters)]
        more = f" and {len(known) - MAX_NAMES} others: see /v1/models" if len(known) > MAX_NAMES else ""
        message = f"model {asked[:100]!r} is not served here, only {', '.join(known[:MAX_NAMES])}{more}"
        raise RequestError(message, param=param, code="model_not_found", status=404)


def sampling_params(
    fields: p.SamplingFields,
    max_tokens: int | None,
    seed: int | None,
    defaults: SamplingDefaults,
    limits: Limits,
    *,
    logprobs: int | None = None,
    echo: bool = False,
    prompt_logprobs: bool = False,
) -> SamplingParams:
    """Return validated `SamplingParams`. Raises `RequestError` for the first field that cannot be honoured."""
    preset = asdict(defaults)
    chosen: dict[str, Any] = {name: preset.get(name) if (v := getattr(fields, name)) is None else v for name in NUMBERS}
    stop = fields.stop or ()
    params = SamplingParams(
        max_tokens=max_tokens,
        **chosen,
        logit_bias=_logit_bias(fields.logit_bias or ()),
        seed=seed,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        include_stop_str_in_output=bool(fields.include_stop_str_in_output),
        ignore_eos=bool(fields.ignore_eos),
        skip_special_tokens=fields.skip_special_tokens is not False,
        logprobs=logprobs,
        echo=echo,
        prompt_logprobs=prompt_logprobs,
        grammar=requested_grammar(fields),
        cache_salt=fields.cache_salt or "",
        speculate=fields.speculate is not False,
    )
    validate_sampling(params, limits)
    return params


def _logit_bias(biases: dict[str, float] | Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return (token id, bias) pairs. A JSON object may give a token twice, as "7" and "07"; llama.cpp has a list."""
    pairs = {}
    for token, bias in biases.items() if isinstance(biases, dict) else biases:
        key = str(token)
        if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS) or int(key) in pairs:
            raise RequestError(f"logit_bias key {key[:40]!r} is not a token id", param="logit_bias")
        pairs[int(key)] = bias
    return tuple(pairs.items())


def requested_max_tokens(
    request: Any, names: Sequence[str], limits: Limits, minimum: int = 0, default: int | None = None
) -> int | None:
    """Return the value of the first field among `names` that is set, at most the context length; else `default`.

    None means the rest of the context, as do llama.cpp's and Ollama's -1 and -2. Raises `RequestError` for a value
    below `minimum`.
    """
    name, value = next(((n, v) for n in names if (v := getattr(request, n)) is not None), ("", default))
    if value is None or value in (-1, -2):
        return None
    if value < minimum:
        raise RequestError(f"{name} must be {minimum} or more, or -1 for the rest of the context", param=name)
    return min(value, limits.max_model_len)


def chat_message(request: p.ChatCompletionRequest, defaults: SamplingDefaults, limits: Limits) -> TokenizeMsg:
    """Return the message for a chat completion, before `OutputForms.prepare`. Raises `RequestError`."""
    max_tokens = requested_max_tokens(request, ("max_completion_tokens", "max_tokens"), limits, minimum=1)
    if not request.messages:
        raise RequestError("messages is empty", param="messages")
    for i, tool in enumerate(request.tools or ()):
        check_tool(tool, f"tools[{i}]")
    kwargs = dict(request.chat_template_kwargs or {})
    _check_template_kwargs(kwargs)
    is_continued = bool(request.continue_final_message)
    if is_continued and request.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    params = sampling_params(request, max_tokens, request.seed, defaults, limits, logprobs=_num_chat_logprobs(request))
    messages = [_template_message(m, f"messages[{i}]") for i, m in enumerate(request.messages)]
    if is_continued:
        messages[-1]["content"] = text_of(request.messages[-1].content, "messages")
    return TokenizeMsg(
        uid=0,
        sampling_params=params,
        messages=messages,
        tools=(request.tools or None) if request.tool_choice != "none" else None,
        add_generation_prompt=request.add_generation_prompt is not False and not is_continued,
        continue_final_message=is_continued,
        template_kwargs=kwargs,
        param="messages",
    )


def _num_chat_logprobs(request: p.ChatCompletionRequest) -> int | None:
    """Return the number of alternatives to each token; None without log-probabilities."""
    if request.logprobs is not None and not isinstance(request.logprobs, bool):
        raise RequestError("logprobs must be true or false", param="logprobs", code="invalid_type")
    if request.top_logprobs is not None and not 0 <= request.top_logprobs <= MAX_LOGPROBS:
        raise RequestError(f"top_logprobs must be 0 to {MAX_LOGPROBS}", param="top_logprobs")
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    return request.top_logprobs or 0 if request.logprobs else None


def _template_message(message: p.ChatMessage, path: str) -> dict[str, Any]:
    """Return a message as the client has sent it, but with the arguments of calls as text."""
    if message.role not in ROLES:
        raise RequestError(f"{path}.role {message.role[:40]!r} is not one of {', '.join(ROLES)}", param=f"{path}.role")
    text_of(message.content, f"{path}.content")  # refuses what is not text
    given = message.given if isinstance(message, p.GivenMessage) else msgspec.to_builtins(message)
    result = _without_nulls(given)
    if message.tool_calls:
        calls = zip(message.tool_calls, result["tool_calls"], strict=True)
        result["tool_calls"] = [_template_call(*c, f"{path}.tool_calls") for c in calls if c[0].called is not None]
    if isinstance(message.content, list):
        result["content"] = [_text_part(part) for part in message.content]
    return result


def _template_call(call: p.ToolCall, given: dict[str, Any], path: str) -> dict[str, Any]:
    """Return an earlier call with its arguments as text, which may be anything: models write what they want."""
    function: dict[str, Any] = given["function"] if call.custom is None else msgspec.to_builtins(call.called)
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json_text(arguments, path)
    named = {name: value for name, value in _without_nulls(given).items() if name != "custom"}
    return named | {"type": "function", "function": function | {"arguments": text}}


def _text_part(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "text", "text": part["refusal"]} if part["type"] == "refusal" else part


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def unsupported_type(what: str, kind: Any, param: str) -> RequestError:
    """Return the error for an unsupported type of part, item or tool."""
    return unsupported(f"{param}: {what} of type {str(kind)[:40]!r} is not supported", param)


def text_of(content: Any, param: str, kinds: Sequence[str] = ("text", "refusal")) -> str:
    """Return the text of `content`: a string, or a list of text parts whose type is one of `kinds`.

    Parts are joined without a separator, as in templates that accept parts. Raises `RequestError` for other types.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for i, part in enumerate(content if isinstance(content, list) else [content]):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in kinds:
            raise unsupported_type("a part", kind, param)
        name = "refusal" if kind == "refusal" else "text"
        if not isinstance(part.get(name), str):
            raise RequestError(
                f"{param}[{i}].{name} must be a string", param=f"{param}[{i}].{name}", code="invalid_type"
            )
        texts.append(part[name])
    return "".join(texts)


def check_tool(tool: dict[str, Any], path: str) -> None:
    """Raise `RequestError` unless `tool`, which is at `path` in the body, is a function."""
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise RequestError(f'{path} must be {{"type": "function", "function": {{...}}}}', param=path)
    name, parameters = function.get("name"), function.get("parameters")
    if not (isinstance(name, str) and name):
        raise RequestError(f"{path}.function.name must be a non-empty string", param=f"{path}.function.name")
    if not (parameters is None or isinstance(parameters, dict)):
        raise RequestError(f"{path}.function.parameters must be an object", param=f"{path}.function.parameters")


def _check_template_kwargs(kwargs: dict[str, Any]) -> None:
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        raise RequestError(
            f"chat_template_kwargs takes at most {MAX_TEMPLATE_KWARGS} names", param="chat_template_kwargs"
        )
    for name, value in kwargs.items():
        is_representable = not isinstance(value, int) or abs(value) < 2**63
        if not name.isidentifier() or name in _RESERVED_KWARGS or not is_representable:
            raise RequestError(f"chat_template_kwargs may not set {name!r}", param="chat_template_kwargs")


def completion_messages(request: p.CompletionRequest, defaults: SamplingDefaults, limits: Limits) -> list[TokenizeMsg]:
    """Return a message for each prompt of a text completion. Raises `RequestError`."""
    if request.logprobs is True:
        raise RequestError("logprobs must be a number", param="logprobs", code="invalid_type")
    params = sampling_params(
        request,
        requested_max_tokens(request, ("max_tokens",), limits),
        request.seed,
        defaults,
        limits,
        logprobs=None if request.logprobs is False else request.logprobs,
        echo=bool(request.echo),
    )
    messages = prompt_messages(request.prompt, "prompt", params, limits)
    if request.add_special_tokens is False:
        messages = [msgspec.structs.replace(m, add_special_tokens=False) for m in messages]
    return messages


def is_batch(prompt: str | Sequence[Any]) -> bool:
    """Return whether `prompt` is a list of prompts instead of one text or one list of token ids."""
    return not isinstance(prompt, str) and (not prompt or not isinstance(prompt[0], int))


def prompt_messages(
    prompt: str | list[Any], param: str, params: SamplingParams, limits: Limits, limit: int = MAX_PROMPTS
) -> list[TokenizeMsg]:
    """Return a message for each of at most `limit` prompts: a text, a list of token ids, or a list of either.

    Raises `RequestError` for the field `param`.
    """
    prompts = prompt if not isinstance(prompt, str) and is_batch(prompt) else [prompt]
    if not 1 <= len(prompts) <= limit:
        raise RequestError(f"{param} must be 1 to {limit} prompts", param=param)
    messages = []
    for one in prompts:
        if not isinstance(one, str) and not (isinstance(one, list) and all(type(i) is int for i in one)):
            error = f"{param} must be text, token ids, or a list of either"
            raise RequestError(error, param=param, code="invalid_type")
        if not one:
            raise RequestError(f"{param} is empty" if one is prompt else f"{param} has an empty prompt", param=param)
        form = {"text": one} if isinstance(one, str) else {"input_ids": packed_ids(one, param, limits)}
        messages.append(TokenizeMsg(uid=0, sampling_params=params, param=param, **form))
    return messages


def packed_ids(ids: list[int], param: str, limits: Limits) -> bytes:
    """Return token ids as int32 bytes. Raises `RequestError` for an id outside the vocabulary."""
    if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
        raise RequestError(f"{param} has a token id outside 0 to {limits.vocab_size - 1}", param=param)
    return ids_to_bytes(ids)


def num_choices(fields: p.SamplingFields, limit: int) -> int:
    """Return the number of choices per prompt (`n`). Raises `RequestError` if it is more than `limit`."""
    n = 1 if fields.n is None else fields.n
    if not 1 <= n <= limit:
        raise RequestError(f"n must be 1 to {limit} (--max-choices)", param="n")
    if fields.best_of is not None and fields.best_of != n:
        raise unsupported("best_of is only supported equal to n", "best_of")
    return n


def with_choices(messages: Sequence[TokenizeMsg], n: int) -> list[TokenizeMsg]:
    """Return `n` adjacent copies of each message. Raises `RequestError` for too many.

    Each choice is a request of its own; the prefix cache shares the prompt.
    """
    if len(messages) * n > MAX_GENERATIONS:
        raise RequestError(f"n={n} for {len(messages)} prompts is more than {MAX_GENERATIONS} choices", param="n")
    replace = msgspec.structs.replace
    return [replace(m, sampling_params=choice_params(m.sampling_params, i)) for m in messages for i in range(n)]


def require_answer_fits(messages: Sequence[TokenizeMsg], limits: Limits) -> None:
    """Raise `RequestError` if the answer to `messages` in one body might have more than `MAX_ANSWER_BYTES`.

    Such a body is collected in memory, and encoding it blocks all other requests for a moment.
    """
    size = 0
    for message in messages:
        params = message.sampling_params
        tokens = limits.max_model_len if params.max_tokens is None else params.max_tokens
        if params.echo or params.prompt_logprobs:
            tokens += len(message.input_ids or b"") // 4 + min(len(message.text or ""), limits.max_model_len)
        shown = 0 if params.logprobs is None else 1 + params.logprobs
        size += tokens * (TOKEN_BYTES + shown * LOGPROB_BYTES)
    if size > MAX_ANSWER_BYTES:
        raise RequestError(
            f"the answer may have {size >> 20} MB, and at most {MAX_ANSWER_BYTES >> 20} are sent in one piece: ask for "
            "less (max_tokens, n, prompts, log-probabilities) or for a stream",
            param="max_tokens",
        )
