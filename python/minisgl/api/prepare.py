"""Request bodies -> `TokenizeMsg`: what OpenAI's and SGLang's fields mean for the engine. Their uids come later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from minisgl.api.generate import LogprobForm
from minisgl.api.messages import check_template_kwargs, check_tool, template_message
from minisgl.api.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerateRequest,
    GenerateSampling,
    SamplingFields,
)
from minisgl.api.structured import grammar_of
from minisgl.errors import RequestError
from minisgl.message import TokenizeMsg, ids_to_bytes
from minisgl.params import MAX_LOGPROBS, Limits, SamplingParams, validate_sampling

MAX_PROMPTS: Final = 1024
MAX_ID_DIGITS: Final = 10
GENERATE_MAX_TOKENS: Final = 128  # SGLang's default for /generate


@dataclass(frozen=True)
class SamplingDefaults:
    """What applies when the client does not say; a model's generation_config.json may set them."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    @classmethod
    def from_generation_config(cls, config: dict[str, Any]) -> SamplingDefaults:
        """The temperature, top_p and top_k of `config`, as far as it has them."""
        values: dict[str, Any] = {}
        for name, kind in (("temperature", float), ("top_p", float), ("top_k", int)):
            value = config.get(name)
            if isinstance(value, int | float) and not isinstance(value, bool):
                values[name] = kind(value)
        return cls(**values)


def sampling_params(
    fields: SamplingFields,
    max_tokens: int | None,
    seed: int | None,
    defaults: SamplingDefaults,
    limits: Limits,
    *,
    logprobs: int | None = None,
    echo: bool = False,
    prompt_logprobs: bool = False,
) -> SamplingParams:
    """Validated `SamplingParams`; raises `RequestError` naming the first field that cannot be honoured."""
    top_k = defaults.top_k if fields.top_k is None else fields.top_k
    stop = fields.stop or ()
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=defaults.temperature if fields.temperature is None else fields.temperature,
        top_k=0 if top_k == -1 else top_k,  # vLLM and SGLang write -1 for "off"
        top_p=defaults.top_p if fields.top_p is None else fields.top_p,
        min_p=fields.min_p or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        repetition_penalty=1.0 if fields.repetition_penalty is None else fields.repetition_penalty,
        logit_bias=_logit_bias(fields.logit_bias or {}),
        min_tokens=fields.min_tokens or 0,
        seed=seed,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        shows_stop=bool(fields.include_stop_str_in_output or fields.no_stop_trim),
        ignore_eos=bool(fields.ignore_eos),
        skip_special_tokens=fields.skip_special_tokens is not False,
        logprobs=logprobs,
        echo=echo,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar_of(fields),
        cache_salt=fields.cache_salt or "",
    )
    validate_sampling(params, limits)
    return params


def _logit_bias(biases: dict[str, float]) -> tuple[tuple[int, float], ...]:
    """OpenAI writes token ids as the keys of a JSON object; no id may be given twice ("7" and "07")."""
    pairs = {}
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) <= MAX_ID_DIGITS) or int(key) in pairs:
            raise RequestError(f"logit_bias key {key[:40]!r} is not a token id", param="logit_bias")
        pairs[int(key)] = bias
    return tuple(pairs.items())


def _first_given(*values: int | None) -> int | None:
    return next((v for v in values if v is not None), None)


def _max_tokens(request: Any, names: Sequence[str], limits: Limits, least: int = 0) -> int | None:
    """The first of the fields `names` that is given; an error names the one that the client has sent."""
    name = next((n for n in names if getattr(request, n) is not None), None)
    if name is None:
        return None
    value: int = getattr(request, name)
    if not least <= value <= limits.max_model_len:
        raise RequestError(f"{name} must be {least} to {limits.max_model_len}", param=name)
    return value


def chat_messages(request: ChatCompletionRequest, defaults: SamplingDefaults, limits: Limits) -> list[TokenizeMsg]:
    """One message for a chat completion."""
    max_tokens = _max_tokens(request, ("max_completion_tokens", "max_tokens"), limits, least=1)
    if not request.messages:
        raise RequestError("messages is empty", param="messages")
    for tool in request.tools or ():
        check_tool(tool)
    kwargs = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", request.reasoning_effort)
    check_template_kwargs(kwargs)
    is_continued = bool(request.continue_final_message)
    if is_continued and request.add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other", param="continue_final_message"
        )
    message = TokenizeMsg(
        uid=0,
        sampling_params=sampling_params(
            request, max_tokens, request.seed, defaults, limits, logprobs=_chat_logprobs(request)
        ),
        messages=[template_message(m) for m in request.messages],
        tools=(request.tools or None) if request.tool_choice != "none" else None,
        add_generation_prompt=request.add_generation_prompt is not False and not is_continued,
        continue_final_message=is_continued,
        template_kwargs=kwargs,
    )
    return [message]


def _chat_logprobs(request: ChatCompletionRequest) -> int | None:
    """How many alternatives to each token are wanted; None = no log-probabilities at all."""
    if request.logprobs is not None and not isinstance(request.logprobs, bool):
        raise RequestError("logprobs must be true or false", param="logprobs", code="invalid_type")
    if request.top_logprobs is not None and not 0 <= request.top_logprobs <= MAX_LOGPROBS:
        raise RequestError(f"top_logprobs must be 0 to {MAX_LOGPROBS}", param="top_logprobs")
    if request.top_logprobs and not request.logprobs:
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    return request.top_logprobs or 0 if request.logprobs else None


def completion_messages(request: CompletionRequest, defaults: SamplingDefaults, limits: Limits) -> list[TokenizeMsg]:
    """One message for each prompt of a text completion."""
    if isinstance(request.logprobs, bool):
        raise RequestError("logprobs must be a number", param="logprobs", code="invalid_type")
    params = sampling_params(
        request,
        _max_tokens(request, ("max_tokens",), limits),
        request.seed,
        defaults,
        limits,
        logprobs=request.logprobs,
        echo=bool(request.echo),
    )
    messages = prompt_messages(request.prompt, "prompt", params, limits)
    if request.add_special_tokens is False:
        messages = [msgspec.structs.replace(m, add_special_tokens=False) for m in messages]
    return messages


def generate_messages(request: GenerateRequest, defaults: SamplingDefaults, limits: Limits) -> list[TokenizeMsg]:
    """One message for each prompt of /generate."""
    given = {n: v for n in ("text", "prompt", "input_ids") if (v := getattr(request, n)) is not None}
    if len(given) != 1:
        raise RequestError("give exactly one of text, prompt and input_ids", param=next(iter(given), "text"))
    fields = request.sampling_params or GenerateSampling()
    if fields.logprobs not in (None, False):
        raise RequestError(
            "logprobs is not supported here, only return_logprob beside sampling_params",
            param="logprobs",
            code="unsupported_value",
        )
    form = LogprobForm.of(request)
    params = sampling_params(
        fields,
        _first_given(
            _max_tokens(fields, ("max_new_tokens", "max_tokens"), limits),
            min(GENERATE_MAX_TOKENS, limits.max_model_len - 1),
        ),
        _first_given(fields.sampling_seed, fields.seed),
        defaults,
        limits,
        logprobs=None if form is None else request.top_logprobs_num or 0,
        prompt_logprobs=form is not None and form.start is not None,
    )
    ((name, prompt),) = given.items()
    return prompt_messages(prompt, name, params, limits)


def is_batch(prompt: str | Sequence[Any]) -> bool:
    """Whether `prompt` is a list of prompts, rather than one text or one list of token ids."""
    return not isinstance(prompt, str) and (not prompt or not isinstance(prompt[0], int))


def prompt_messages(
    prompt: str | list[Any], param: str, params: SamplingParams, limits: Limits, most: int = MAX_PROMPTS
) -> list[TokenizeMsg]:
    """`prompt` is a text, a list of texts, token ids, or a list of lists of token ids; `most`: how many of them."""
    prompts = prompt if not isinstance(prompt, str) and is_batch(prompt) else [prompt]
    if not 1 <= len(prompts) <= most:
        raise RequestError(f"{param} must be 1 to {most} prompts", param=param)
    messages = []
    for p in prompts:
        if isinstance(p, str):
            if not p:
                raise RequestError(f"{param} is empty", param=param)
            messages.append(TokenizeMsg(uid=0, sampling_params=params, text=p))
        else:
            messages.append(TokenizeMsg(uid=0, sampling_params=params, input_ids=_token_ids(p, param, limits)))
    return messages


def _token_ids(ids: Any, param: str, limits: Limits) -> bytes:
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise RequestError(f"{param} must be text, token ids, or a list of either", param=param, code="invalid_type")
    if not ids:
        raise RequestError(f"{param} is empty", param=param)
    return packed_ids(ids, param, limits)


def packed_ids(ids: list[int], param: str, limits: Limits) -> bytes:
    """The token ids as int32; raises `RequestError` for one that the model does not have."""
    if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
        raise RequestError(f"{param} has a token id outside 0 to {limits.vocab_size - 1}", param=param)
    return ids_to_bytes(ids)
