"""Generates /openapi.json: request, response and error types of each endpoint, from the types in `protocol`.

Descriptions come from docs/api.md; `make rooms` writes them into texts.json.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import msgspec

import minisgl
from minisgl.api import protocol as p
from minisgl.api.http import ANTHROPIC
from minisgl.api.routes import SSE, Endpoint

_COMMON: Final = (401, 403, 500, 503)  # of every endpoint; 503: starting, draining or failed
_WITH_BODY: Final = (400, 404, 408, 413, 415, 429)
SAMPLE_URL: Final = "http://localhost:1919"  # in docs/api.md; the page shows its own
_REF: Final = "#/components/schemas/{name}"


def openapi_schema(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    """Return the document that describes `endpoints`."""
    # The descriptions in docs/api.md of "GET /path" and "Type.field".
    texts: dict[str, str] = json.loads(Path(__file__).with_name("texts.json").read_text(encoding="utf-8"))
    types = [t for e in endpoints for t in (e.request, e.response) if t is not None]
    all_types = [*types, p.AnthropicErrorResponse, p.ErrorResponse]
    schemas, components = msgspec.json.schema_components(all_types, ref_template=_REF)
    of_type = dict(zip(map(repr, types), schemas, strict=False))
    for name, schema in components.items():
        for field, shape in schema.get("properties", {}).items():
            keys = (f"{base.__name__}.{field}" for base in getattr(p, name, object).__mro__)
            if (text := next((texts[key] for key in keys if key in texts), None)) is not None:
                shape["description"] = text
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        method, path = endpoint.key.split()
        key = f"{method} {endpoint.path}"
        operation: dict[str, Any] = {"operationId": endpoint.handler.__name__, "description": texts.get(key, "")}
        operation |= _operation(path, endpoint, of_type, schemas[-2 if path.startswith(ANTHROPIC) else -1])
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
        contents[endpoint.media] = {} if endpoint.media == SSE else {"schema": {"type": "string"}}
    responses: dict[str, Any] = {"200": {"description": "OK", "content": contents}} if contents else {}
    further = _WITH_BODY if endpoint.request else (404,) * ("{name}" in path) + (415,) * (endpoint.method == "POST")
    for status in sorted({*_COMMON, *further}):
        is_status = status == 503 and endpoint.response is p.StatusResponse  # a failed probe is not an error object
        schema = {"anyOf": [of_type[repr(endpoint.response)], error]} if is_status else error
        responses[str(status)] = {
            "description": HTTPStatus(status).phrase,
            "content": {"application/json": {"schema": schema}},
        }
    operation: dict[str, Any] = {"summary": (endpoint.handler.__doc__ or "").partition("\n")[0], "responses": responses}
    if endpoint.request is not None:
        body = {"application/json": {"schema": of_type[repr(endpoint.request)]}}
        operation["requestBody"] = {"required": True, "content": body}
    if "{name}" in path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation
