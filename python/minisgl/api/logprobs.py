"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

from typing import Any, Final

from minisgl.message import TokenLogprob

LEAST: Final = -9999.0  # OpenAI's word for a token that cannot come; JSON has no infinity


def chat_logprobs(tokens: list[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a chat completion."""
    content = []
    for t in tokens:
        top = [_chat_token(data, logprob) for _, data, logprob in t.top]
        content.append(_chat_token(t.data, t.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(data: bytes, logprob: float | None) -> dict[str, Any]:
    return {"token": token_text(data), "logprob": finite(logprob), "bytes": list(data)}


def text_logprobs(tokens: list[TokenLogprob]) -> dict[str, Any]:
    """`choices[].logprobs` of a text completion; the token itself is among its alternatives, likely or not."""
    return {
        "tokens": [token_text(t.data) for t in tokens],
        "token_logprobs": [finite(t.logprob) for t in tokens],
        "top_logprobs": [_alternatives(t) for t in tokens],
        "text_offset": [t.offset for t in tokens],
    }


def _alternatives(token: TokenLogprob) -> dict[str, float | None] | None:
    if token.logprob is None:
        return None
    return {
        token_text(data): finite(logprob) for _, data, logprob in [*token.top, (token.id, token.data, token.logprob)]
    }


def token_text(data: bytes) -> str:
    """The token as text; one that is no whole characters is spelled "bytes:" and its bytes, as OpenAI does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{b:02x}" for b in data)


def finite(logprob: float | None) -> float | None:
    """`logprob`, or OpenAI's word for one that JSON cannot write."""
    return None if logprob is None else max(logprob, LEAST)
