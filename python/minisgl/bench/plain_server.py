"""The ways to stream that `minisgl bench frontend` compares: two usual ones around our frontend, and ours."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

from fastapi import FastAPI
from fastapi.sse import EventSourceResponse
from pydantic import BaseModel
from starlette.responses import StreamingResponse

from minisgl.api.api_server import create_app
from minisgl.api.frontend import FrontendManager
from minisgl.api.metrics import Metrics
from minisgl.api.prepare import SamplingDefaults
from minisgl.api.served import ServedModel
from minisgl.message import TokenizeMsg
from minisgl.params import Limits, SamplingParams
from minisgl.settings.options import ServerArgs

LIMITS: Final = Limits(max_model_len=1 << 20, vocab_size=1 << 17)


class Message(BaseModel):
    role: str
    content: str


class ChatRequest(BaseModel):
    model: str
    messages: list[Message]
    stream: bool = False


class Delta(BaseModel):
    role: str | None = None
    content: str | None = None


class Choice(BaseModel):
    index: int
    delta: Delta
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class Chunk(BaseModel):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[Choice]


def _app(args: ServerArgs) -> FastAPI:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.frontend = FrontendManager(args, LIMITS, Metrics("stub"))
        yield
        await app.state.frontend.close()

    return FastAPI(lifespan=lifespan)


async def _chunks(frontend: FrontendManager, body: ChatRequest) -> AsyncIterator[Chunk]:
    """A pydantic object for each event."""
    messages = [m.model_dump() for m in body.messages]
    request_id, created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())

    def chunk(delta: Delta, reason: str | None = None) -> Chunk:
        choice = Choice(index=0, delta=delta, finish_reason=reason)
        return Chunk(id=request_id, created=created, model=body.model, choices=[choice])

    message = TokenizeMsg(uid=0, sampling_params=SamplingParams(), messages=messages)
    async with await frontend.submit([message]) as call:
        yield chunk(Delta(role="assistant", content=""))
        while not call.is_done:
            for _, reply in await call.take():
                yield chunk(Delta(content=reply.text), reply.finish_reason)


def fastapi_app(args: ServerArgs) -> FastAPI:
    """As FastAPI's documentation has it: yield pydantic objects, and FastAPI makes server-sent events of them."""
    app = _app(args)

    @app.post("/v1/chat/completions", response_class=EventSourceResponse)
    async def chat(body: ChatRequest) -> AsyncIterable[Chunk]:
        async for chunk in _chunks(app.state.frontend, body):
            yield chunk
        # its [DONE] is left out: the type of the stream has no room for it

    return app


def pydantic_app(args: ServerArgs) -> FastAPI:
    """Written by hand: a StreamingResponse over text that pydantic has serialized."""
    app = _app(args)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest) -> StreamingResponse:
        async def stream() -> AsyncIterator[str]:
            async for chunk in _chunks(app.state.frontend, body):
                yield f"data: {chunk.model_dump_json()}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(stream(), media_type="text/event-stream")

    return app


def minisgl_app(args: ServerArgs) -> FastAPI:
    """The real one."""
    return create_app(args, ServedModel("stub", LIMITS, SamplingDefaults()))


APPS: Final[dict[str, Callable[[ServerArgs], FastAPI]]] = {
    "fastapi": fastapi_app,
    "pydantic": pydantic_app,
    "minisgl": minisgl_app,
}
