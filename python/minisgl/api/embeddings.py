"""`/v1/embeddings`: texts to vectors, with a checkpoint that is made for it; otherwise a 400 that says why not."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np
from fastapi import FastAPI, Request, Response

from minisgl.api.answer import BodyResponse
from minisgl.api.body import read_request, require_model
from minisgl.api.prepare import prompt_messages
from minisgl.api.receipt import Receipt
from minisgl.api.render import Answer, to_json
from minisgl.api.served import ServedModel
from minisgl.checkpoint.embedder import Embedder, Vector
from minisgl.errors import RequestError
from minisgl.params import EMBED
from minisgl.settings.options import ServerArgs

MAX_INPUTS: Final = 2048  # OpenAI's limit, of which clients make use


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/embeddings"""

    input: str | list[Any]
    model: str | None = None
    encoding_format: str | None = None
    dimensions: int | None = None
    user: str | None = None


def _base64(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


ENCODINGS: Final[dict[str, Callable[[Vector], str | list[float]]]] = {"float": np.ndarray.tolist, "base64": _base64}


class EmbeddingRenderer:
    """OpenAI's list of embeddings."""

    def __init__(self, model: str, embedder: Embedder, encoding: str, length: int) -> None:
        """`encoding` is one of `ENCODINGS`, `length` one of the embedder's `dimensions`."""
        self._model = model
        self._embedder = embedder
        self._encode = ENCODINGS[encoding]
        self._length = length

    def body(self, answers: list[Answer], receipt: Receipt) -> bytes:
        data, tokens = [], 0
        for index, answer in enumerate(answers):
            assert answer.last is not None and answer.last.embedding, "an answer without an embedding"
            tokens += answer.last.prompt_tokens
            vector = self._embedder.vector(answer.last.embedding, self._length)
            data.append({"object": "embedding", "index": index, "embedding": self._encode(vector)})
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return to_json({"object": "list", "data": data, "model": self._model, "usage": usage})


def add_embeddings_route(app: FastAPI, args: ServerArgs, model: ServedModel) -> None:
    """POST /v1/embeddings; a 400 that says why for a model that is not made for it."""

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        body = await read_request(request, EmbeddingRequest, args.max_body)
        require_model(body.model, model.name)
        embedder = model.embedder
        if embedder is None:
            raise RequestError(
                f"{model.name!r} is served as a generator of text, and does not compute embeddings: its folder has no "
                "modules.json that would say how",
                param="model",
                code="unsupported_endpoint",
            )
        encoding = body.encoding_format or "float"
        if encoding not in ENCODINGS:
            raise RequestError(
                f"encoding_format {encoding[:40]!r} is not one of {', '.join(ENCODINGS)}",
                param="encoding_format",
            )
        renderer = EmbeddingRenderer(model.name, embedder, encoding, embedder.length(body.dimensions))
        messages = prompt_messages(body.input, "input", EMBED, model.limits, MAX_INPUTS)
        return BodyResponse(app.state.frontend, messages, renderer)
