"""The parameters of a request, their limits, and their validation.

`SamplingParams(...)` refuses what no model can serve: msgspec checks the types and ranges of its fields.
`validate_sampling` is called where the model's limits are known (the API process or `LLM`), `validate_prompt` where
token ids are known (the tokenizer). The scheduler repeats both, so the engine never sees invalid values. No torch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NoReturn, get_args

import msgspec
from msgspec import Meta

from minisgl.core.errors import RequestError, did_you_mean
from minisgl.settings.foreign import field_names, sentence_for

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


MAX_INT32: Final = 2**31 - 1
MAX_LOGPROBS: Final = 20  # alternatives to each token
MAX_LOGIT_BIASES: Final = 1024
MAX_STOP_TOKENS: Final = 64
MAX_GRAMMAR_CHARS: Final = 16 * 1024
MAX_SCHEMA_CHARS: Final = 128 * 1024

_Count = Annotated[int, Meta(ge=0, le=MAX_INT32)]
_TokenId = Annotated[int, Meta(ge=0, lt=MAX_INT32)]
_Fraction = Annotated[float, Meta(ge=0, le=1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]  # OpenAI's range
_Bias = Annotated[float, Meta(ge=-100, le=100)]
_StopString = Annotated[str, Meta(min_length=1, max_length=256)]
GrammarKind = Literal["json_schema", "regex", "choice", "ebnf", "calls"]


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """The form that an answer must have.

    `text` is a JSON Schema, a regular expression, a JSON list of strings, a grammar in Lark's or GBNF's notation, or
    the JSON of a `ToolCalls`. It constrains the answer after the first `after` (such as "</think>"), and after `lead`.
    With `before`, what ends at `after` begins with it, or is left out. The answer may also be `calls`, the JSON of a
    `ToolCalls`. `param` is the field that errors name.
    """

    kind: GrammarKind
    text: str
    after: str = ""
    param: str = "grammar"
    calls: str = ""
    before: str = ""
    lead: str = ""

    def __post_init__(self) -> None:
        if self.kind not in (kinds := get_args(GrammarKind)) or not isinstance(self.text, str):
            rule = f"kind must be one of {', '.join(kinds)}, and text a string, such as from json.dumps"
            raise RequestError(f"Grammar({self.kind!r:.40}, {self.text!r:.40}): {rule}", param="grammar")


class Adapter(msgspec.Struct, frozen=True):
    """An adapter: the name that requests give, its folder, and a `key` that other contents of the folder have not."""

    name: str
    folder: str
    key: str

    @property
    def source(self) -> str:
        """What identifies its weights; `folder_and_key` takes it apart."""
        return f"{self.key}:{self.folder}"


def folder_and_key(source: str) -> tuple[Path, str]:
    """Return the folder and the key of an adapter's `source`."""
    key, _, folder = source.partition(":")
    return Path(folder), key


NUMBER, KEY = "\0", "\1"  # in the texts of `ToolCalls`: any number, and any name of an argument


class Thinking(msgspec.Struct, frozen=True, omit_defaults=True):
    """The markers around a model's reasoning, and the most tokens between them, after which the end marker is forced.

    `is_open`: the prompt ends inside the reasoning. It may begin at the start of the answer only, unless the rest has a
    `lead`; then the tokens of all its parts count. `param` is the field that errors name.
    """

    open: str
    close: str
    is_open: bool = False
    lead: str = ""
    budget: _Count | None = None
    param: str = "thinking_budget"


class CallItem(msgspec.Struct, frozen=True):
    """One argument of a call that is not in JSON: `before`, the value, `after`.

    The value follows a JSON Schema, is one of several texts, or is any text up to the tag in `after` (None). The
    argument may be missing if its `count` is "?". If it is "*", all arguments are of these kinds.
    """

    before: str
    value: dict[str, Any] | list[str] | None
    after: str
    count: str = ""


class ToolCalls(msgspec.Struct, frozen=True):
    """An answer made of tool calls: `begin`, calls separated by `between` (None: only one call), `end`.

    Each call is one of `calls`: text before the arguments; the JSON Schema of the arguments, or the arguments one by
    one, with `comma` between them; text after them. `markers` in the texts are special tokens if the tokenizer has
    them.
    """

    calls: list[tuple[str, dict[str, Any] | list[CallItem], str]]
    begin: str = ""
    between: str | None = None
    end: str = ""
    markers: list[str] = []
    comma: str = ""


class _Checked(type(msgspec.Struct)):  # type: ignore[misc]
    """Converts and checks the values that a caller gives."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        if args:
            raise TypeError(f"{cls.__name__} takes names and values, such as {cls.__name__}(temperature=0)")
        known = cls.__struct_fields__
        for name in given.keys() - {*known}:
            ours = (field_names()["instead"] | field_names()["aliases"]).get(name)
            advice = sentence_for(f"sampling.{name}") or (f"write {ours}" if ours in known else "")
            hint = f"; {advice}" if advice else did_you_mean(name, known)
            raise TypeError(f"{cls.__name__} has no field {name!r}{hint}")
        made = _checked({name: _adapted(name, value) for name, value in given.items() if value is not None})
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
    `grammar` allows only tokens that can still lead to a valid answer, which ends where nothing can follow. `thinking`
    says what is reasoning, whose tokens are counted, and limits it. `n` is the
    number of choices (in Python; a request to the scheduler has one). `embed` asks only for the prompt's embedding.
    Requests share cached prefixes only if they have the same `cache_salt`, so that response times tell other clients
    nothing about a prompt. Without `speculate`, the request drafts no tokens. An `adapter` changes the model. A lower
    `priority` goes first.
    """

    max_tokens: _Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_k: _Count = 0
    top_p: _Fraction = 1.0
    min_p: _Fraction = 0.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] = 1.0
    logit_bias: Annotated[tuple[tuple[_TokenId, _Bias], ...], Meta(max_length=MAX_LOGIT_BIASES)] = ()
    min_tokens: _Count = 0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[tuple[_StopString, ...], Meta(max_length=16)] = ()
    stop_token_ids: Annotated[tuple[_TokenId, ...], Meta(max_length=MAX_STOP_TOKENS)] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    shown_tokens: tuple[str, ...] = ()
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool = False
    prompt_logprobs: bool = False
    grammar: Grammar | None = None
    embed: bool = False
    thinking: Thinking | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] = ""
    speculate: bool = True
    priority: Annotated[int, Meta(ge=-(2**31), le=MAX_INT32)] = 0
    adapter: Adapter | None = None
    n: Annotated[int, Meta(ge=1, le=1024)] = 1

    @property
    def effective_temperature(self) -> float:
        """The temperature at which tokens are sampled: 0, greedy, also if `top_p` keeps only the most likely one."""
        return self.temperature if self.top_p > 0 else 0.0

    @property
    def salt(self) -> str:
        """What requests that share cached prefixes have in common; "" without an adapter and `cache_salt`."""
        return self.cache_salt if self.adapter is None else f"{self.adapter.source}\n{self.cache_salt}"

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
    def thinking_limit(self) -> Thinking | None:
        """The reasoning, if its end may be forced."""
        return None if self.thinking is None or self.thinking.budget is None else self.thinking

    @property
    def has_masks(self) -> bool:
        """Whether not every token may be sampled: there is a grammar, or a limit of the reasoning."""
        return self.grammar is not None or self.thinking_limit is not None

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the request asks for the log-probabilities of its prompt's tokens."""
        return self.logprobs is not None and (self.echo or self.prompt_logprobs)


_OFF: Final = {"top_k": 0, "seed": None}  # what -1 means
# The numbers of a request, with their types; `n` is not one of the scheduler's.
NUMBERS: Final = {
    field.name: kind
    for field in msgspec.structs.fields(SamplingParams)
    if (kind := getattr(field.type, "__origin__", None)) in (int, float) and field.name != "n"
}


def _adapted(name: str, value: Any) -> Any:
    """Return `value` in the form of the field `name`."""
    if name in _OFF and value == -1:
        return _OFF[name]
    if name in ("stop", "stop_token_ids") and isinstance(value, str | int):
        return (value,)
    if isinstance(value, Mapping):
        return tuple(value.items())
    return value.tolist() if hasattr(value, "tolist") else value  # a numpy array or number


def _checked(values: Mapping[str, Any]) -> SamplingParams:
    """Return parameters of the right types and in their ranges. Raises `RequestError` for the first that is not."""
    try:
        return msgspec.convert(values, SamplingParams)
    except msgspec.ValidationError as e:
        rule, _, path = str(e).partition(" - at `$.")
        name = re.split(r"\W", path)[0]
        raise RequestError(f"{name}={values[name]!r:.100}: {rule}", param=name) from None


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of a request to one model. With `embeds`, the model computes embeddings and no text.

    With `has_snapshots`, a cached prompt can be used only where it was captured, so its system prompt is marked.
    """

    max_model_len: int
    vocab_size: int
    embeds: bool = False
    has_snapshots: bool = False


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
    """Raise `RequestError` for the first field with a value that this model cannot serve."""
    p = _checked(msgspec.structs.asdict(params))  # `msgspec.structs.replace` checks nothing
    if p.embed != limits.embeds:
        does, does_not = ("computes embeddings", "generate text") if limits.embeds else ("generates text", "embed it")
        raise RequestError(f"this model {does}; it does not {does_not}", param="model", code="unsupported_endpoint")
    if p.embed and p.max_tokens != 0:
        _refuse("max_tokens", "must be 0 for an embedding")
    if p.min_tokens > limits.max_model_len:
        _refuse("min_tokens", f"must be 0 to {limits.max_model_len}")
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        _refuse("min_tokens", "must not exceed max_tokens")
    if (p.logprobs or 0) > limits.vocab_size:
        _refuse("logprobs", f"must be 0 to {limits.vocab_size}")
    for name, tokens in ("logit_bias", [token for token, _ in p.logit_bias]), ("stop_token_ids", p.stop_token_ids):
        if max(tokens, default=0) >= limits.vocab_size:
            _refuse(name, f"token ids must be 0 to {limits.vocab_size - 1}")
    if (grammar := p.grammar) is not None:
        max_chars = MAX_SCHEMA_CHARS if grammar.kind in ("json_schema", "calls") else MAX_GRAMMAR_CHARS
        if len(grammar.text) > max_chars:
            _refuse(grammar.param, f"has {len(grammar.text)} characters; the limit is {max_chars}")
        if len(grammar.calls) > MAX_SCHEMA_CHARS:
            _refuse("tools", f"has {len(grammar.calls)} characters; the limit is {MAX_SCHEMA_CHARS}")


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
