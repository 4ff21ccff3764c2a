"""/openapi.json: what each endpoint takes and all that it may answer, from the types of requests and answers."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Final

import msgspec
from fastapi import FastAPI

import minisgl
from minisgl.api import answers
from minisgl.api.convert import DetokenizeRequest, TokenizeRequest
from minisgl.api.embeddings import EmbeddingRequest
from minisgl.api.protocol import ChatCompletionRequest, CompletionRequest, GenerateRequest
from minisgl.message import EngineView, StatsMsg

# Every endpoint may say these; 503: starting, draining or failed.
_COMMON: Final = (401, 500, 503)
_BODY: Final = (400, 408, 413, 415)  # of those that take one
_GENERATION: Final = (*_BODY, 404, 429)


class EngineViewAnswer(msgspec.Struct):
    view: EngineView
    stats: StatsMsg


@dataclass(frozen=True)
class Endpoint:
    """`answer` is the type of a 200, `media` its other form, if any."""

    summary: str
    answer: Any
    takes: Any = None
    errors: tuple[int, ...] = ()
    media: str = ""


ENDPOINTS: Final[dict[tuple[str, str], Endpoint]] = {
    ("post", "/v1/chat/completions"): Endpoint(
        "Answer a conversation", answers.ChatAnswer, ChatCompletionRequest, _GENERATION, "text/event-stream"
    ),
    ("post", "/v1/completions"): Endpoint(
        "Continue a text", answers.CompletionAnswer, CompletionRequest, _GENERATION, "text/event-stream"
    ),
    ("post", "/generate"): Endpoint(
        "Continue a text, in SGLang's shape",
        answers.GeneratedText | list[answers.GeneratedText],
        GenerateRequest,
        _GENERATION,
        "text/event-stream",
    ),
    ("post", "/v1/embeddings"): Endpoint(
        "Texts to vectors, if the model is made for it", answers.EmbeddingAnswer, EmbeddingRequest, _GENERATION
    ),
    ("get", "/v1/models"): Endpoint("The served model", answers.ModelList),
    ("get", "/v1/models/{name}"): Endpoint("One model", answers.ModelCard, errors=(404,)),
    ("post", "/tokenize"): Endpoint("Text to tokens", answers.TokensAnswer, TokenizeRequest, _GENERATION),
    ("post", "/detokenize"): Endpoint("Tokens to text", answers.PromptAnswer, DetokenizeRequest, _GENERATION),
    ("get", "/health"): Endpoint("Whether all processes live", answers.StatusAnswer),
    ("get", "/ready"): Endpoint("Whether requests are taken", answers.StatusAnswer),
    ("get", "/health_generate"): Endpoint("One token through every process", answers.StatusAnswer),
    ("get", "/metrics"): Endpoint("Prometheus metrics", None, media="text/plain"),
    ("get", "/server_info"): Endpoint("Settings and figures", dict[str, Any]),
    ("get", "/model_info"): Endpoint("The model", answers.ModelInfo),
    ("get", "/engine_view"): Endpoint("Batch, pages and radix tree", EngineViewAnswer),
    ("post", "/flush_cache"): Endpoint("Forget cached prefixes that nobody uses", answers.StatusAnswer),
    ("get", "/version"): Endpoint("Version of the server", answers.VersionAnswer),
}
_REF: Final = "#/components/schemas/{name}"


def openapi_schema(app: FastAPI) -> dict[str, Any]:
    """The document for the routes that `app` has; raises `LookupError` for one that is not described here."""
    routes = [
        (method.lower(), route.path.replace(":path}", "}"))  # type: ignore[attr-defined]
        for route in app.routes
        if getattr(route, "include_in_schema", False)
        for method in sorted(route.methods)  # type: ignore[attr-defined]
    ]
    described = {key: ENDPOINTS[key] for key in routes}
    types = [t for e in described.values() for t in (e.takes, e.answer) if t is not None]
    schemas, components = msgspec.json.schema_components([*types, answers.ErrorAnswer], ref_template=_REF)
    of_type = dict(zip(map(repr, types), schemas, strict=False))
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), endpoint in described.items():
        paths.setdefault(path, {})[method] = _operation(path, endpoint, of_type, schemas[-1])
    return {
        "openapi": "3.1.0",
        "info": {"title": "minisgl", "version": minisgl.__version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _operation(path: str, endpoint: Endpoint, of_type: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    contents: dict[str, Any] = {}
    if endpoint.answer is not None:
        contents["application/json"] = {"schema": of_type[repr(endpoint.answer)]}
    if endpoint.media:
        contents[endpoint.media] = {"schema": {"type": "string"}}
    responses: dict[str, Any] = {"200": {"description": "OK", "content": contents}} if contents else {}
    for status in sorted({*_COMMON, *endpoint.errors}):
        is_status = status == 503 and endpoint.answer is answers.StatusAnswer  # a probe's no is no error
        schema = {"anyOf": [of_type[repr(endpoint.answer)], error]} if is_status else error
        responses[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {"application/json": {"schema": schema}},
        }
    operation: dict[str, Any] = {"summary": endpoint.summary, "responses": responses}
    if endpoint.takes is not None:
        body = {"application/json": {"schema": of_type[repr(endpoint.takes)]}}
        operation["requestBody"] = {"required": True, "content": body}
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation
