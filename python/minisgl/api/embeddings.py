"""`/v1/embeddings`, `/v1/score` and `/v1/rerank`: embeddings of texts and their cosine similarity."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Final

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from minisgl.api import protocol as p
from minisgl.api.frontend import Timeline
from minisgl.api.http import MODEL, to_json
from minisgl.api.requests import prompt_messages
from minisgl.api.responses import GenerationResponse, Renderer
from minisgl.api.routes import Routes
from minisgl.checkpoint.embedder import Embedder, Vector
from minisgl.core.errors import RequestError
from minisgl.core.message import TokenizeMsg, UserReply
from minisgl.core.params import EMBED

MAX_INPUTS: Final = 2048  # OpenAI's limit, which clients rely on

Body = Callable[[list[Vector], p.EmbeddingUsage], Any]


def _base64(vector: Vector) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


ENCODINGS: Final[dict[str, Callable[[Vector], str | list[float]]]] = {"float": np.ndarray.tolist, "base64": _base64}


def _cosine(a: Vector, b: Vector) -> float:
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / norm if norm > 0 else 0.0


@dataclass
class _VectorRenderer(Renderer):
    embedder: Embedder
    length: int
    write: Body

    def body(self, replies: list[UserReply], timeline: Timeline) -> bytes:
        assert all(reply.embedding for reply in replies), "a reply has no embedding"
        tokens = sum(reply.prompt_tokens for reply in replies)
        vectors = [self.embedder.vector(reply.embedding, self.length) for reply in replies]
        return to_json(self.write(vectors, p.EmbeddingUsage(tokens, tokens)))


def add_embeddings_routes(routes: Routes) -> None:
    """Add POST /v1/embeddings, /v1/score and /v1/rerank."""
    model = routes.model

    def respond(
        request: Request, inputs: dict[str, str | list[Any]], body: Body, dimensions: int | None = None
    ) -> Response:
        """Return the response whose body `body` makes from the embeddings of `inputs`, the texts of each field.

        Raises `RequestError` (400) if the model generates text.
        """
        if (embedder := model.embedder) is None:
            error = f"{model.name!r} generates text and does not compute embeddings: its folder has no modules.json"
            raise RequestError(error, param="model", code="unsupported_endpoint")
        renderer = _VectorRenderer(embedder, embedder.length(dimensions), body)
        messages: list[TokenizeMsg] = []
        for param, texts in inputs.items():
            messages += prompt_messages(texts, param, EMBED, model.limits, MAX_INPUTS - len(messages))
        return GenerationResponse(request.app.state.frontend, messages, renderer)

    @routes.add("POST /v1/embeddings")
    async def embeddings(request: Request, body: p.EmbeddingRequest) -> Annotated[Response, p.EmbeddingResponse]:
        """Texts to vectors"""
        encoding = body.encoding_format or "float"
        if encoding not in ENCODINGS:
            raise RequestError(
                f"encoding_format {encoding[:40]!r} is not one of {', '.join(ENCODINGS)}",
                param="encoding_format",
            )
        encode = ENCODINGS[encoding]

        def result(vectors: list[Vector], usage: p.EmbeddingUsage) -> p.EmbeddingResponse:
            data = [p.Embedding(i, encode(vector)) for i, vector in enumerate(vectors)]
            return p.EmbeddingResponse(data, request.scope[MODEL].name, usage)

        return respond(request, {"input": body.input}, result, body.dimensions)

    @routes.add("POST /v1/score")
    async def score(request: Request, body: p.ScoreRequest) -> Annotated[Response, p.ScoreResponse]:
        """Similarity of texts"""
        first, second = ([t] if isinstance(t, str) else t for t in (body.text_1, body.text_2))
        if len(first) not in (1, len(second)) or not second:
            error = f"text_1 must be one text or as many as text_2, and has {len(first)} for {len(second)}"
            raise RequestError(error, param="text_1")

        def result(vectors: list[Vector], usage: p.EmbeddingUsage) -> p.ScoreResponse:
            left, right = vectors[: len(first)] * (len(second) // len(first)), vectors[len(first) :]
            scores = [p.Score(i, _cosine(a, b)) for i, (a, b) in enumerate(zip(left, right, strict=True))]
            return p.ScoreResponse(scores, request.scope[MODEL].name, usage)

        return respond(request, {"text_1": first, "text_2": second}, result)

    @routes.add("POST /v1/rerank")
    async def rerank(request: Request, body: p.RerankRequest) -> Annotated[Response, p.RerankResponse]:
        """Documents by similarity"""
        texts = [d if isinstance(d, str) else d.get("text") for d in body.documents]
        if not texts or not all(isinstance(text, str) for text in texts):
            raise RequestError("documents must be texts, or objects with a text", param="documents")
        if body.top_n is not None and body.top_n < 1:
            raise RequestError("top_n must be 1 or more", param="top_n")

        def result(vectors: list[Vector], usage: p.EmbeddingUsage) -> p.RerankResponse:
            shown = [None if body.return_documents is False else {"text": text} for text in texts]
            scores = [_cosine(vectors[0], vector) for vector in vectors[1:]]
            ranked = [
                p.RankedDocument(i, scores[i], shown[i])
                for i in sorted(range(len(scores)), key=scores.__getitem__, reverse=True)
            ]
            return p.RerankResponse(ranked[: body.top_n], request.scope[MODEL].name, usage)

        return respond(request, {"query": body.query, "documents": texts}, result)
