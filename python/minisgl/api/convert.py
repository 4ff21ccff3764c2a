"""`/tokenize` and `/detokenize`. This process has no tokenizer: both are questions to a tokenizer worker."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from minisgl.api.body import read_request, require_model
from minisgl.api.prepare import SamplingDefaults, chat_messages, packed_ids
from minisgl.api.protocol import ChatCompletionRequest, ChatMessage
from minisgl.api.render import json_response
from minisgl.api.served import ServedModel
from minisgl.errors import RequestError
from minisgl.message import DecodeMsg, EncodeMsg, TokenizeMsg, ids_from_bytes
from minisgl.params import Limits, SamplingParams
from minisgl.settings.options import ServerArgs


class TokenizeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize: a text, or messages as for a chat completion."""

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


def encode_message(request: TokenizeRequest, limits: Limits) -> EncodeMsg:
    """The question for `request`; raises `RequestError`. Its uid comes later."""
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give exactly one of prompt and messages", param="prompt")
    if request.messages is None:
        prompt = TokenizeMsg(uid=0, sampling_params=SamplingParams(), text=request.prompt)
    else:
        chat = ChatCompletionRequest(
            messages=request.messages,
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            chat_template_kwargs=request.chat_template_kwargs,
        )
        (prompt,) = chat_messages(chat, SamplingDefaults(), limits)
    return EncodeMsg(uid=0, prompt=prompt, add_special_tokens=request.add_special_tokens)


def decode_message(request: DetokenizeRequest, limits: Limits) -> DecodeMsg:
    """The question for `request`; raises `RequestError` for ids that the model does not have. Its uid comes later."""
    return DecodeMsg(
        uid=0,
        input_ids=packed_ids(request.tokens, "tokens", limits),
        skip_special_tokens=bool(request.skip_special_tokens),
    )


def add_convert_routes(app: FastAPI, args: ServerArgs, model: ServedModel) -> None:
    """POST /tokenize and /detokenize."""

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = await read_request(request, TokenizeRequest, args.max_body)
        require_model(body.model, model.name)
        reply = await app.state.frontend.convert(encode_message(body, model.limits))
        tokens = ids_from_bytes(reply.input_ids).tolist()
        return json_response({"tokens": tokens, "count": len(tokens), "max_model_len": model.limits.max_model_len})

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = await read_request(request, DetokenizeRequest, args.max_body)
        require_model(body.model, model.name)
        reply = await app.state.frontend.convert(decode_message(body, model.limits))
        return json_response({"prompt": reply.text})
