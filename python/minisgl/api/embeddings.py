"""`/v1/embeddings`: texts to vectors, for a checkpoint that is an embedding model."""

from __future__ import annotations

import base64
from collections.abc import Callable
from typing import Final

import numpy as np
from fastapi import FastAPI, Request, Response

from minisgl.api.frontend import Receipt
from minisgl.api.http import read_request, require_model, to_json
from minisgl.api.protocol import Embedding, EmbeddingRequest, EmbeddingResponse, EmbeddingUsage
from minisgl.api.requests import ServedModel, prompt_messages
from minisgl.api.responses import BodyResponse
from minisgl.checkpoint.embedder import Vector
from minisgl.errors import RequestError
from minisgl.message import UserReply
from minisgl.params import EMBED
from minisgl.settings.options import ServerArgs

MAX_INPUTS: Final = 2048  # OpenAI's limit, which clients rely on


def _base64(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


ENCODINGS: Final[dict[str, Callable[[Vector], str | list[float]]]] = {"float": np.ndarray.tolist, "base64": _base64}


def add_embeddings_route(app: FastAPI, args: ServerArgs, model: ServedModel) -> None:
    """POST /v1/embeddings; 400 with the reason for a model that generates text."""

    @app.post("/v1/embeddings")
    async def embeddings(request: Request) -> Response:
        body = await read_request(request, EmbeddingRequest, args)
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
        encode, length = ENCODINGS[encoding], embedder.length(body.dimensions)

        def render(replies: list[UserReply], receipt: Receipt) -> bytes:
            assert all(reply.embedding for reply in replies), "a reply without an embedding"
            vectors = [embedder.vector(reply.embedding, length) for reply in replies]
            data = [Embedding(i, encode(vector)) for i, vector in enumerate(vectors)]
            tokens = sum(reply.prompt_tokens for reply in replies)
            return to_json(EmbeddingResponse(data, model.name, EmbeddingUsage(tokens, tokens)))

        messages = prompt_messages(body.input, "input", EMBED, model.limits, MAX_INPUTS)
        return BodyResponse(app.state.frontend, messages, render)
