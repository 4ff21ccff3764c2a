"""The parameters of a request, their limits, and their validation.

`SamplingParams(...)` refuses what no model can serve. Processes exchange the structs unchanged, and decoding checks
only types. `validate_sampling` is called where the model's limits are known (the API process or `LLM`),
`validate_prompt` where token ids are known (the tokenizer). The scheduler repeats both, so the engine never sees
invalid values. No torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, get_args

import msgspec

from minisgl.errors import RequestError, did_you_mean
from minisgl.settings.foreign import field_names, sentence_for

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


GrammarKind = Literal["json_schema", "regex", "choice", "ebnf", "calls"]


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form that an answer must have.

    `text` is a JSON Schema, a regular expression, a JSON list of strings, a grammar in Lark's or GBNF's notation, or
    the JSON of a `ToolCalls`. It constrains the answer after the first `after` (such as "</think>"). The answer may
    also be `calls`, the JSON of a `ToolCalls`. `param` is the field that errors name.
    """

    kind: GrammarKind
    text: str
    after: str = ""
    param: str = "grammar"
    calls: str = ""

    def __post_init__(self) -> None:
        if self.kind not in (kinds := get_args(GrammarKind)) or not isinstance(self.text, str):
            rule = f"kind must be one of {', '.join(kinds)}, and text a string, such as from json.dumps"
            raise RequestError(f"Grammar({self.kind!r:.40}, {self.text!r:.40}): {rule}", param="grammar")


class ToolCalls(msgspec.Struct, frozen=True):
    """An answer made of tool calls: `begin`, calls separated by `between` (None: only one call), `end`.

    Each call is one of `calls`: text before the arguments, JSON Schema of the arguments, text after them. `markers` in
    the texts are special tokens if the tokenizer has them.
    """

    calls: list[tuple[str, dict[str, Any], str]]
    begin: str = ""
    between: str | None = None
    end: str = ""
    markers: list[str] = []


class _Checked(type(msgspec.Struct)):  # type: ignore[misc]
    """Converts and checks the values that a caller gives. Values that are decoded were checked by their sender."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        if args:
            raise TypeError(f"{cls.__name__} takes names and values, such as {cls.__name__}(temperature=0)")
        fields = _fields(cls)
        for name in given.keys() - fields.keys():
            ours = (field_names()["instead"] | field_names()["aliases"]).get(name)
            advice = sentence_for(f"sampling.{name}") or (f"write {ours}" if ours in fields else "")
            hint = f"; {advice}" if advice else did_you_mean(name, fields)
            raise TypeError(f"{cls.__name__} has no field {name!r}{hint}")
        made = super().__call__(**{name: _converted(fields[name], value) for name, value in given.items()})
        validate_sampling(made, _ANY_MODEL[made.embed])
        return made


class SamplingParams(
    msgspec.Struct, metaclass=_Checked, frozen=True, kw_only=True, omit_defaults=True, repr_omit_defaults=True
):
    """How to sample and when to stop. `temperature` 0 means greedy; `top_k` 0, `top_p` 1 and `min_p` 0 mean off.

    A string becomes a list of one, `top_k` -1 (vLLM's and SGLang's "off") becomes 0, `seed` -1 (vLLM's and llama.cpp's
    "random") becomes None, `logit_bias` may be a mapping. None stands for the default. Raises `RequestError` for a
    value that no model can serve, and `TypeError` for an unknown name.

    `top_p` 0 means greedy, too. `max_tokens` None means the rest of the context, as does every larger value; 0
    generates nothing. With a `seed`, the output depends only on the
    prompt and the seed, whatever else runs. `presence_penalty` and `frequency_penalty` count generated tokens;
    `repetition_penalty` (1 = off) counts the prompt's, too. `logit_bias` has pairs (token id, value added to its
    logit). No EOS or stop token is sampled before `min_tokens`. With `include_stop_str_in_output`, the answer includes
    the stop string or stop token that ends it. `skip_special_tokens` removes special tokens from the text, except for
    `shown_tokens` (their texts).

    `logprobs` asks for the log-probability of each generated token and of that many most likely alternatives, in the
    model's own distribution: before temperature, penalties, biases and filters. `echo` puts the prompt in front of the
    answer, with its log-probabilities if `logprobs` is set; `prompt_logprobs` asks for these without the text.
    `grammar` allows only tokens that can still lead to a valid answer, which ends where nothing can follow. `n` is the
    number of choices (in Python; a request to the scheduler has one). `embed` asks only for the prompt's embedding.
    Requests share cached prefixes only if they have the same `cache_salt`, so that response times tell other clients
    nothing about a prompt. Without `speculate`, the request drafts no tokens.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    shown_tokens: tuple[str, ...] = ()
    logprobs: int | None = None
    echo: bool = False
    prompt_logprobs: bool = False
    grammar: Grammar | None = None
    embed: bool = False
    cache_salt: str = ""
    speculate: bool = True
    n: int = 1

    @property
    def effective_temperature(self) -> float:
        """The temperature at which tokens are sampled: 0, greedy, also if `top_p` keeps only the most likely one."""
        return self.temperature if self.top_p > 0 else 0.0

    @property
    def is_filtered(self) -> bool:
        """Whether top-k, top-p or min-p exclude tokens."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def has_penalties(self) -> bool:
        """Whether penalties, a bias or `min_tokens` change logits before sampling."""
        neutral = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) == (0.0, 0.0, 1.0)
        return not neutral or bool(self.logit_bias) or self.min_tokens > 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the request asks for the log-probabilities of its prompt's tokens."""
        return self.logprobs is not None and (self.echo or self.prompt_logprobs)


@cache
def _fields(kind: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    return {field.name: field for field in msgspec.structs.fields(kind)}


# The numbers of a request, with their types; `n` is not one of the scheduler's.
NUMBERS: Final = {
    f.name: f.type for f in msgspec.structs.fields(SamplingParams) if f.type in (int, float) and f.name != "n"
}


def _converted(field: msgspec.structs.FieldInfo, value: Any) -> Any:
    """Return `value` in the type of the field; None means the default. Raises `RequestError` if that is impossible."""
    if value is None or value is field.default:
        return field.default
    if field.name in ("top_k", "seed") and value == -1:
        return field.default
    given = value
    if field.name in ("stop", "stop_token_ids") and isinstance(value, str | int):
        given = (value,)
    elif isinstance(value, Mapping):
        given = tuple(value.items())
    elif hasattr(value, "tolist"):  # a numpy array or number
        given = value.tolist()
    try:
        return msgspec.convert(given, field.type)
    except msgspec.ValidationError as e:
        raise RequestError(f"{field.name}={value!r:.100}: {e}", param=field.name) from None


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a request to one model. With `embeds`, the model computes embeddings and no text.

    With `has_snapshots`, a cached prompt can be used only where it was captured, so its system prompt is marked.
    """

    max_model_len: int
    vocab_size: int
    embeds: bool = False
    has_snapshots: bool = False
    max_stop_strings: int = 16
    max_stop_length: int = 256
    max_stop_token_ids: int = 64
    max_logit_bias: int = 1024
    max_grammar_chars: int = 16 * 1024
    max_salt_chars: int = 256
    max_schema_chars: int = 128 * 1024


MAX_INT32: Final = 2**31 - 1
MAX_BIAS: Final = 100.0
MAX_REPETITION_PENALTY: Final = 10.0
MAX_LOGPROBS: Final = 20  # alternatives to each token
# The least and largest value of a field, and the rule for messages if it is another than that.
_RANGES: Final[Mapping[str, tuple[int, int, str]]] = {
    "max_tokens": (0, MAX_INT32, "be 0 or more, below 2^31"),
    "n": (1, 1024, ""),
    "temperature": (0, 100, ""),
    "top_k": (0, MAX_INT32, "be 0 (off) or positive, below 2^31"),
    "top_p": (0, 1, ""),
    "min_p": (0, 1, ""),
    "presence_penalty": (-2, 2, ""),  # OpenAI's range
    "frequency_penalty": (-2, 2, ""),
    "seed": (-(2**63), 2**63 - 1, "fit in 64 bits"),
}
_ANY_MODEL: Final = {e: Limits(max_model_len=MAX_INT32, vocab_size=MAX_INT32, embeds=e) for e in (False, True)}


def choice_params(params: SamplingParams, index: int) -> SamplingParams:
    """Return the parameters of choice `index` of `n`. Choice 0 has the given seed, the others have hashes of it.

    With `seed + index`, requests with adjacent seeds would share choices.
    """
    seed = params.seed
    if seed is not None and index:
        digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
        seed = int.from_bytes(digest, "little", signed=True)
    return params if (seed, 1) == (params.seed, params.n) else msgspec.structs.replace(params, seed=seed, n=1)


def _refuse(param: str, message: str) -> NoReturn:
    raise RequestError(f"{param} {message}", param=param)


def validate_sampling(params: SamplingParams, limits: Limits) -> None:
    """Raise `RequestError` for the first field with an invalid value. NaN is outside every range."""
    p = params
    if p.embed != limits.embeds:
        does, does_not = ("computes embeddings", "generate text") if limits.embeds else ("generates text", "embed it")
        raise RequestError(f"this model {does}; it does not {does_not}", param="model", code="unsupported_endpoint")
    if p.embed and p.max_tokens != 0:
        _refuse("max_tokens", "must be 0 for an embedding")
    for name, (least, most, words) in _RANGES.items():
        value = getattr(p, name)
        if value is not None and not least <= value <= most:
            _refuse(name, f"must {words or f'be {least} to {most}'}")
    if not 0.0 < p.repetition_penalty <= MAX_REPETITION_PENALTY:
        _refuse("repetition_penalty", f"must be above 0 and at most {MAX_REPETITION_PENALTY:g}")
    if len(p.logit_bias) > limits.max_logit_bias:
        _refuse("logit_bias", f"takes at most {limits.max_logit_bias} tokens")
    for token, bias in p.logit_bias:
        if not 0 <= token < limits.vocab_size:
            _refuse("logit_bias", f"token ids must be 0 to {limits.vocab_size - 1}")
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            _refuse("logit_bias", f"values must be -{MAX_BIAS:g} to {MAX_BIAS:g}")
    if not 0 <= p.min_tokens <= limits.max_model_len:
        _refuse("min_tokens", f"must be 0 to {limits.max_model_len}")
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        _refuse("min_tokens", "must not exceed max_tokens")
    if len(p.stop) > limits.max_stop_strings:
        _refuse("stop", f"takes at most {limits.max_stop_strings} strings")
    if not all(0 < len(s) <= limits.max_stop_length for s in p.stop):
        _refuse("stop", f"strings must have 1 to {limits.max_stop_length} characters")
    max_logprobs = min(MAX_LOGPROBS, limits.vocab_size)
    if p.logprobs is not None and not 0 <= p.logprobs <= max_logprobs:
        _refuse("logprobs", f"must be 0 to {max_logprobs}")
    if (grammar := p.grammar) is not None:
        is_schema = grammar.kind in ("json_schema", "calls")
        max_chars = limits.max_schema_chars if is_schema else limits.max_grammar_chars
        if len(grammar.text) > max_chars:
            _refuse(grammar.param, f"has {len(grammar.text)} characters; the limit is {max_chars}")
        if len(grammar.calls) > limits.max_schema_chars:
            _refuse("tools", f"has {len(grammar.calls)} characters; the limit is {limits.max_schema_chars}")
    if len(p.cache_salt) > limits.max_salt_chars:
        _refuse("cache_salt", f"takes at most {limits.max_salt_chars} characters")
    if len(p.stop_token_ids) > limits.max_stop_token_ids:
        _refuse("stop_token_ids", f"takes at most {limits.max_stop_token_ids} tokens")
    if not all(0 <= t < limits.vocab_size for t in p.stop_token_ids):
        _refuse("stop_token_ids", f"token ids must be 0 to {limits.vocab_size - 1}")


EMBED: Final = SamplingParams(max_tokens=0, embed=True)


def validate_prompt(input_ids: npt.NDArray[np.int32], limits: Limits) -> None:
    """Raise `RequestError` for a prompt that is empty, outside the vocabulary, or without room for a token after it."""
    n = len(input_ids)
    if n == 0:
        _refuse("prompt", "is empty")
    if input_ids.min() < 0 or input_ids.max() >= limits.vocab_size:
        _refuse("prompt", f"has a token id outside 0 to {limits.vocab_size - 1}")
    if n >= limits.max_model_len:
        raise too_long(limits, f"{n} and needs room for at least one more")


def too_long(limits: Limits, has: str) -> RequestError:
    """Return the error for a prompt that is too long, in OpenAI's words.

    LangChain recognises it by "prompt is too long", LiteLLM by "this model's maximum context length is".
    """
    return RequestError(
        f"the prompt is too long: this model's maximum context length is {limits.max_model_len} tokens, and the prompt "
        f"has {has}",
        param="prompt",
        code="context_length_exceeded",
    )
