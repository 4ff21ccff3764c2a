"""Generates /openapi.json: request, response and error types of each endpoint, from the types in `protocol`.

Descriptions come from docs/api.md; `make rooms` writes them into texts.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute

import minisgl
from minisgl.api import protocol as p
from minisgl.api.http import ANTHROPIC

_COMMON: Final = (401, 403, 500, 503)  # of every endpoint; 503: starting, draining or failed
_WITH_BODY: Final = (400, 404, 408, 413, 415, 429)
_SSE: Final = "text/event-stream"
SAMPLE_URL: Final = "http://localhost:1919"  # in docs/api.md; the page shows its own


@dataclass(frozen=True)
class Endpoint:
    """An endpoint: `response` is the type of a 200, `media` an alternative media type, `errors` further statuses."""

    summary: str
    response: Any
    request: Any = None
    media: str = ""
    errors: tuple[int, ...] = ()


ENDPOINTS: Final = {
    "POST /v1/chat/completions": Endpoint("Answer a chat", p.ChatCompletionResponse, p.ChatCompletionRequest, _SSE),
    "POST /v1/completions": Endpoint("Continue a text", p.CompletionResponse, p.CompletionRequest, _SSE),
    "POST /v1/responses": Endpoint("Answer, in OpenAI's newer shape", p.ResponseObject, p.ResponsesRequest, _SSE),
    "GET /v1/responses/{name}": Endpoint("A kept response", p.ResponseObject, errors=(404,)),
    "DELETE /v1/responses/{name}": Endpoint("Forget a response", p.DeletedResponse, errors=(404,)),
    "POST /v1/messages": Endpoint("Answer, in Anthropic's shape", p.MessageObject, p.MessagesRequest, _SSE),
    "POST /v1/messages/count_tokens": Endpoint("The tokens of a conversation", p.TokenCount, p.MessagesRequest),
    "POST /generate": Endpoint("Continue a text, in SGLang's shape", p.Generated, p.GenerateRequest, _SSE),
    "POST /v1/embeddings": Endpoint("Texts to vectors", p.EmbeddingResponse, p.EmbeddingRequest),
    "POST /v1/score": Endpoint("Similarity of texts", p.ScoreResponse, p.ScoreRequest),
    "POST /v1/rerank": Endpoint("Documents by similarity", p.RerankResponse, p.RerankRequest),
    "GET /v1/models": Endpoint("The served model", p.ModelListResponse),
    "GET /v1/models/{name}": Endpoint("One model", p.ModelCard, errors=(404,)),
    "POST /tokenize": Endpoint("Text to tokens", p.TokenizeResponse, p.TokenizeRequest),
    "POST /detokenize": Endpoint("Tokens to text", p.DetokenizeResponse, p.DetokenizeRequest),
    "GET /health": Endpoint("Whether all processes are alive", p.StatusResponse),
    "GET /ready": Endpoint("Whether requests are accepted", p.StatusResponse),
    "GET /health_generate": Endpoint("One token through every process", p.StatusResponse),
    "GET /metrics": Endpoint("Prometheus metrics", None, media="text/plain"),
    "GET /server_info": Endpoint("Settings and figures", dict[str, Any]),
    "GET /model_info": Endpoint("The model", p.ModelInfoResponse),
    "GET /engine_view": Endpoint("Batch, pages, radix tree and last steps", p.EngineViewResponse),
    "POST /flush_cache": Endpoint("Drop all cached prefixes that no request uses", p.StatusResponse, errors=(415,)),
    "GET /version": Endpoint("Version of the server", p.VersionResponse),
}
_REF: Final = "#/components/schemas/{name}"


def openapi_schema(app: FastAPI) -> dict[str, Any]:
    """Return the document for the routes of `app`. Raises `LookupError` for a route that is not in `ENDPOINTS`."""
    # The descriptions in docs/api.md of "GET /path" and "Type.field".
    texts: dict[str, str] = json.loads(Path(__file__).with_name("texts.json").read_text(encoding="utf-8"))
    routes = [
        (f"{method} {route.path}", route.name)
        for route in app.routes
        if isinstance(route, APIRoute) and route.include_in_schema
        for method in sorted(route.methods or ())
    ]
    described = {key: ENDPOINTS[key.replace(":path}", "}")] for key, _ in routes}
    types = [t for e in described.values() for t in (e.request, e.response) if t is not None]
    all_types = [*types, p.AnthropicErrorResponse, p.ErrorResponse]
    schemas, components = msgspec.json.schema_components(all_types, ref_template=_REF)
    of_type = dict(zip(map(repr, types), schemas, strict=False))
    for name, schema in components.items():
        for field, shape in schema.get("properties", {}).items():
            keys = (f"{base.__name__}.{field}" for base in getattr(p, name, object).__mro__)
            if (text := next((texts[key] for key in keys if key in texts), None)) is not None:
                shape["description"] = text
    paths: dict[str, dict[str, Any]] = {}
    for key, name in routes:
        method, path = key.replace(":path}", "}").split()
        error = schemas[-2 if path.startswith(ANTHROPIC) else -1]
        operation: dict[str, Any] = {"operationId": name, "description": texts.get(key, "")}
        operation |= _operation(path, described[key], of_type, error)
        sample = texts.get(f"curl {key}", f"curl {SAMPLE_URL}{path}")
        operation["x-codeSamples"] = [{"lang": "shell", "source": sample}]
        paths.setdefault(path, {})[method.lower()] = operation
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
    if endpoint.response is not None:
        contents["application/json"] = {"schema": of_type[repr(endpoint.response)]}
    if endpoint.media:
        # Of events a schema would describe each one.
        contents[endpoint.media] = {} if endpoint.media == _SSE else {"schema": {"type": "string"}}
    responses: dict[str, Any] = {"200": {"description": "OK", "content": contents}} if contents else {}
    for status in sorted({*_COMMON, *(_WITH_BODY if endpoint.request else ()), *endpoint.errors}):
        is_status = status == 503 and endpoint.response is p.StatusResponse  # a failed probe is not an error object
        schema = {"anyOf": [of_type[repr(endpoint.response)], error]} if is_status else error
        responses[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {"application/json": {"schema": schema}},
        }
    operation: dict[str, Any] = {"summary": endpoint.summary, "responses": responses}
    if endpoint.request is not None:
        body = {"application/json": {"schema": of_type[repr(endpoint.request)]}}
        operation["requestBody"] = {"required": True, "content": body}
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation
