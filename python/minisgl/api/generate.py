"""SGLang's `/generate`: bodies to `TokenizeMsg`, and replies to its response or its cumulative stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from minisgl.api.frontend import Timeline
from minisgl.api.http import NAMES, to_json
from minisgl.api.openai import finite
from minisgl.api.protocol import Generated, GenerateRequest, GenerateSampling
from minisgl.api.requests import (
    SamplingDefaults,
    is_batch,
    num_choices,
    prompt_messages,
    requested_max_tokens,
    sampling_params,
    with_choices,
)
from minisgl.api.responses import DONE, Renderer, event, response_to
from minisgl.api.routes import SSE, Routes
from minisgl.core.errors import RequestError, unsupported
from minisgl.core.message import TokenizeMsg, TokenLogprob, UserReply, ids_from_bytes
from minisgl.core.params import MAX_LOGPROBS, Limits
from minisgl.core.plan import FinishReason

DEFAULT_MAX_TOKENS: Final = 128  # SGLang's

LogprobEntry = tuple[float | None, int, str | None]  # log-probability, token id, text if requested


@dataclass(frozen=True)
class LogprobForm:
    """The log-probabilities to return: of the output, and of the prompt from token `start` on (None: without it)."""

    start: int | None
    has_top: bool
    has_text: bool

    @classmethod
    def of(cls, request: GenerateRequest) -> LogprobForm | None:
        """Return the form for `request`; None without log-probabilities. Raises `RequestError` for invalid fields."""
        top = request.top_logprobs_num or 0
        if not 0 <= top <= MAX_LOGPROBS:
            raise RequestError(f"top_logprobs_num must be 0 to {MAX_LOGPROBS}", param="top_logprobs_num")
        start = -1 if request.logprob_start_len is None else request.logprob_start_len
        if start < -1:
            raise RequestError(
                "logprob_start_len must be -1 (none of the prompt) or the index of a token of the prompt",
                param="logprob_start_len",
            )
        if not request.return_logprob:
            return None
        return cls(None if start < 0 else start, top > 0, bool(request.return_text_in_logprobs))

    def entry(self, token: int, data: bytes, logprob: float | None) -> LogprobEntry:
        """Return a token in SGLang's form."""
        return finite(logprob), token, data.decode(errors="replace") if self.has_text else None


def _requested_prompt(request: GenerateRequest) -> tuple[str, str | list[Any]]:
    """Return (name of the field, prompt). Raises `RequestError` unless there is exactly one prompt."""
    given = [(name, v) for name in ("text", "prompt", "input_ids") if (v := getattr(request, name)) is not None]
    if len(given) != 1:
        raise RequestError("give exactly one of text, prompt and input_ids", param=given[0][0] if given else "text")
    return given[0]


def _sampling_fields(request: GenerateRequest) -> GenerateSampling:
    """Return `sampling_params`, or mini-sglang's fields at the top level. Raises `RequestError` for both."""
    top_level = {name: v for name in ("max_tokens", "ignore_eos") if (v := getattr(request, name)) is not None}
    fields = request.sampling_params or GenerateSampling()
    if top_level and request.sampling_params is not None:
        name = next(iter(top_level))
        raise RequestError(f"{name} and sampling_params exclude each other", param=name)
    if fields.min_new_tokens is not None:
        top_level["min_tokens"] = fields.min_new_tokens
    return msgspec.structs.replace(fields, **top_level)


def generate_messages(request: GenerateRequest, defaults: SamplingDefaults, limits: Limits) -> list[TokenizeMsg]:
    """Return a message for each prompt of /generate. Raises `RequestError` for an invalid field."""
    name, prompt = _requested_prompt(request)
    fields = _sampling_fields(request)
    if fields.logprobs not in (None, False):
        raise unsupported("logprobs is not supported here, only return_logprob beside sampling_params", "logprobs")
    form = LogprobForm.of(request)
    params = sampling_params(
        fields,
        requested_max_tokens(fields, ("max_new_tokens", "max_tokens"), limits, default=DEFAULT_MAX_TOKENS),
        fields.seed if fields.sampling_seed is None else fields.sampling_seed,
        defaults,
        limits,
        logprobs=None if form is None else request.top_logprobs_num or 0,
        prompt_logprobs=form is not None and form.start is not None,
    )
    return prompt_messages(prompt, name, params, limits)


def generation_ids(rid: str | list[str] | None, count: int, n: int, is_list: bool) -> list[str]:
    """Return the `meta_info.id` of each of `count` generations; each `n` adjacent ones are of one prompt.

    `rid` names the request, or each of its prompts. Raises `RequestError` if it has another number of names.
    """
    if isinstance(rid, list):
        if len(rid) * n != count:
            raise RequestError(f"rid has {len(rid)} ids for {count // n} prompts", param="rid")
        return [f"{name}_{i}" if n > 1 else name for name in rid for i in range(n)]
    name = uuid.uuid4().hex if rid is None else rid
    return [f"{name}_{i}" for i in range(count)] if is_list else [name]


class _GrowingArray:
    """A JSON array. Each element is encoded once, however often a stream repeats it."""

    def __init__(self) -> None:
        self._elements = bytearray()

    def append(self, value: Any) -> None:
        if self._elements:
            self._elements += b","
        self._elements += to_json(value)

    def json(self) -> msgspec.Raw:
        return msgspec.Raw(b"[" + self._elements + b"]")


class _Generation:
    """The text, tokens and log-probabilities of one generation so far."""

    def __init__(self, form: LogprobForm | None) -> None:
        self._form = form
        self._has_begun = False
        self._text = ""
        self._ids = _GrowingArray()
        # By the name in `meta_info`.
        kinds = ("token_logprobs", "top_logprobs") if form is not None and form.has_top else ("token_logprobs",)
        self._logprobs = {f"{side}_{kind}": _GrowingArray() for side in ("input", "output") for kind in kinds if form}

    def add(self, reply: UserReply) -> None:
        """Add an increment. The first one begins with the log-probabilities of the prompt, if requested."""
        self._text += reply.text
        for token_id in ids_from_bytes(reply.output_ids).tolist():
            self._ids.append(token_id)
        if self._form is None:
            return
        tokens = reply.logprobs
        if not self._has_begun and self._form.start is not None:
            prompt, tokens = tokens[: reply.prompt_tokens], tokens[reply.prompt_tokens :]
            for i, token in enumerate(prompt[self._form.start :]):
                # SGLang gives no value for the first token that it returns, wherever that token is.
                self._append(self._form, "input", token, is_known=i > 0)
        self._has_begun = True
        for token in tokens:
            self._append(self._form, "output", token)

    def _append(self, form: LogprobForm, side: str, token: TokenLogprob, is_known: bool = True) -> None:
        entry = form.entry(token.id, token.data, token.logprob if is_known else None)
        self._logprobs[f"{side}_token_logprobs"].append(entry)
        if form.has_top:
            top = [form.entry(*alternative) for alternative in token.top] if is_known else None
            self._logprobs[f"{side}_top_logprobs"].append(top)

    def result(self, meta: dict[str, Any]) -> dict[str, Any]:
        """Return the body of the response, with `meta` in its `meta_info`."""
        meta |= {name: array.json() for name, array in self._logprobs.items()}
        return {"text": self._text, "output_ids": self._ids.json(), "meta_info": meta}


class GenerateRenderer(Renderer):
    """Writes the text and tokens so far, and `meta_info`."""

    def __init__(self, is_list: bool, ids: list[str], logprobs: LogprobForm | None = None) -> None:
        """`is_list` makes the response a list; `ids` are those of the generations."""
        self._is_list = is_list
        self._ids = ids
        self._started = time.monotonic()
        self._generations = [_Generation(logprobs) for _ in ids]

    def body(self, replies: list[UserReply], timeline: Timeline) -> bytes:
        results = [self._result(i, reply) for i, reply in enumerate(replies)]
        return to_json(results if self._is_list else results[0])

    def events(self, index: int, reply: UserReply) -> Iterator[bytes]:
        extra = {"index": index} if self._is_list else {}
        yield event(to_json(self._result(index, reply) | extra))

    def last_events(self, replies: list[UserReply], timeline: Timeline) -> Iterator[bytes]:
        yield DONE

    def _result(self, index: int, reply: UserReply) -> dict[str, Any]:
        """Add `reply` to a generation; return the whole generation so far."""
        generation = self._generations[index]
        generation.add(reply)
        reason: dict[str, Any] | None = None
        if reply.finish_reason is not None:
            reason = {"type": reply.finish_reason}
            if reply.finish_reason is FinishReason.LENGTH:
                reason["length"] = reply.completion_tokens
            elif reply.stop_reason is not None:
                reason["matched"] = reply.stop_reason
        return generation.result(
            {
                "id": self._ids[index],
                "finish_reason": reason,
                "prompt_tokens": reply.prompt_tokens,
                "completion_tokens": reply.completion_tokens,
                "cached_tokens": reply.cached_tokens,
                "e2e_latency": time.monotonic() - self._started,
            }
        )


def add_generate_route(routes: Routes) -> None:
    """Add POST /generate."""
    model = routes.model

    @routes.add("POST /generate")
    async def generate(request: Request, body: GenerateRequest) -> Annotated[Response, Generated, SSE]:
        """Continue a text, in SGLang's shape"""
        if body.sampling_params is not None:
            inner = {name: f"sampling_params.{name}" for name in GenerateSampling.__struct_fields__}
            request.scope[NAMES] = inner | request.scope[NAMES]
        n = num_choices(_sampling_fields(body), routes.args.max_choices)
        messages = with_choices(generate_messages(body, model.defaults, model.limits), n)
        is_list = n > 1 or is_batch(_requested_prompt(body)[1])
        renderer = GenerateRenderer(is_list, generation_ids(body.rid, len(messages), n, is_list), LogprobForm.of(body))
        return response_to(request.app.state.frontend, messages, renderer, body.stream, n)
