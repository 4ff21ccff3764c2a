"""SGLang's `/generate`: replies -> its body and its stream, which repeats all that has been said so far."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from minisgl.api.logprobs import finite
from minisgl.api.protocol import GenerateRequest
from minisgl.api.receipt import Receipt
from minisgl.api.render import Answer, event, to_json
from minisgl.core import FinishReason
from minisgl.errors import RequestError
from minisgl.message import TokenLogprob, UserReply, ids_from_bytes
from minisgl.params import MAX_LOGPROBS

Scored = tuple[float | None, int, str | None]  # log-probability, token id, and its text if that is wanted


@dataclass(frozen=True)
class LogprobForm:
    """Which log-probabilities are shown: the answer's, and the prompt's from its token `start` on (None: none)."""

    start: int | None
    has_top: bool
    has_text: bool

    @classmethod
    def of(cls, request: GenerateRequest) -> LogprobForm | None:
        """What is to be shown of log-probabilities, if anything; raises `RequestError` naming the field."""
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


class GrowingArray:
    """A JSON array. Each element is encoded once, however often a stream repeats it."""

    def __init__(self) -> None:
        self._elements = bytearray()

    def append(self, value: Any) -> None:
        if self._elements:
            self._elements += b","
        self._elements += to_json(value)

    def json(self) -> msgspec.Raw:
        """What it is now."""
        return msgspec.Raw(b"[" + self._elements + b"]")


class ScoredTokens:
    """The log-probabilities of one generation so far."""

    def __init__(self, form: LogprobForm) -> None:
        self._form = form
        self._is_begun = False
        self._input, self._output = GrowingArray(), GrowingArray()
        self._input_top, self._output_top = GrowingArray(), GrowingArray()

    def add(self, tokens: list[TokenLogprob], prompt_tokens: int) -> None:
        """The next tokens; the first ones begin with the `prompt_tokens` of the prompt if those are wanted."""
        if not self._is_begun and self._form.start is not None:
            prompt, tokens = tokens[:prompt_tokens], tokens[prompt_tokens:]
            for i, token in enumerate(prompt[self._form.start :]):
                # SGLang has nothing to say of the first token that it looks at, wherever that is.
                self._input.append(self._scored(token.id, token.data, token.logprob if i else None))
                self._input_top.append(self._alternatives(token) if i else None)
        self._is_begun = True
        for token in tokens:
            self._output.append(self._scored(token.id, token.data, token.logprob))
            self._output_top.append(self._alternatives(token))

    def fields(self) -> dict[str, msgspec.Raw]:
        """Their part of `meta_info`."""
        arrays = {"input_token_logprobs": self._input, "output_token_logprobs": self._output}
        if self._form.has_top:
            arrays |= {"input_top_logprobs": self._input_top, "output_top_logprobs": self._output_top}
        return {name: array.json() for name, array in arrays.items()}

    def _scored(self, token: int, data: bytes, logprob: float | None) -> Scored:
        return finite(logprob), token, data.decode(errors="replace") if self._form.has_text else None

    def _alternatives(self, token: TokenLogprob) -> list[Scored]:
        return [self._scored(*alternative) for alternative in token.top]


class _Generation:
    """All that one generation has said so far."""

    def __init__(self, form: LogprobForm | None) -> None:
        self._text = ""
        self._ids = GrowingArray()
        self._scored = None if form is None else ScoredTokens(form)

    def add(self, reply: UserReply) -> None:
        self._text += reply.text
        for token in ids_from_bytes(reply.output_ids).tolist():
            self._ids.append(token)
        if self._scored is not None:
            self._scored.add(reply.logprobs, reply.prompt_tokens)

    def result(self, meta: dict[str, Any]) -> dict[str, Any]:
        """The body, with `meta` in its `meta_info`."""
        if self._scored is not None:
            meta = meta | self._scored.fields()
        return {"text": self._text, "output_ids": self._ids.json(), "meta_info": meta}


def generation_ids(rid: str | list[str] | None, count: int, n: int, is_list: bool) -> list[str]:
    """The `meta_info.id` of each of `count` generations, `n` of each prompt in a row.

    Raises `RequestError` where `rid` does not fit: it names the request, or each of its prompts.
    """
    if isinstance(rid, list):
        if len(rid) * n != count:
            raise RequestError(f"rid has {len(rid)} ids for {count // n} prompts", param="rid")
        return [f"{name}_{i}" if n > 1 else name for name in rid for i in range(n)]
    name = uuid.uuid4().hex if rid is None else rid
    return [f"{name}_{i}" for i in range(count)] if is_list else [name]


class GenerateRenderer:
    """The text and the tokens so far, and `meta_info`."""

    def __init__(self, is_list: bool, ids: list[str], logprobs: LogprobForm | None = None) -> None:
        """`is_list`: the body is one. `ids`: of each generation. Log-probabilities are shown on demand."""
        self._is_list = is_list
        self._ids = ids
        self._started = time.monotonic()
        self._generations = [_Generation(logprobs) for _ in ids]

    def body(self, answers: list[Answer], receipt: Receipt) -> bytes:
        results = []
        for i, answer in enumerate(answers):
            assert answer.last is not None, "an answer without an end"
            whole = msgspec.structs.replace(
                answer.last, text=answer.text, logprobs=answer.logprobs, output_ids=bytes(answer.output_ids)
            )
            results.append(self._result(i, whole))
        return to_json(results if self._is_list else results[0])

    def first_events(self, n: int) -> Iterator[bytes]:
        yield from ()

    def events(self, index: int, reply: UserReply) -> Iterator[bytes]:
        extra = {"index": index} if self._is_list else {}
        yield event(to_json(self._result(index, reply) | extra))

    def last_events(self, replies: list[UserReply], receipt: Receipt) -> Iterator[bytes]:
        yield from ()

    def _result(self, index: int, reply: UserReply) -> dict[str, Any]:
        """All so far, to which `reply` adds."""
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
