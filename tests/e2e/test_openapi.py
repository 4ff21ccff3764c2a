"""/openapi.json is true: real responses and refusals have the documented shapes and status codes."""

from __future__ import annotations

import json
import re
import subprocess
from typing import Any

import httpx
import msgspec
import pytest

from e2e.harness import ServerProcess
from minisgl.api.app import served_routes
from minisgl.api.protocol import AnthropicErrorResponse, ErrorResponse
from minisgl.api.requests import SamplingDefaults, ServedModel
from minisgl.api.routes import SAMPLE_URL
from minisgl.core.params import Limits
from minisgl.settings.options import ServerArgs

MODEL = ServedModel("m", Limits(max_model_len=100, vocab_size=50), SamplingDefaults())
ENDPOINTS = {endpoint.key: endpoint for endpoint in served_routes(ServerArgs(), MODEL).endpoints}

CHAT = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "max_tokens": 8, "temperature": 0}
TEXT = {"prompt": "Once", "max_tokens": 4, "return_timing": True, "n": 2}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
REQUESTS: list[tuple[str, str, dict[str, Any]]] = [
    ("post", "/v1/chat/completions", CHAT),
    ("post", "/v1/chat/completions", CHAT | {"return_timing": True, "tools": [TOOL]}),
    ("post", "/v1/completions", TEXT),
    ("post", "/v1/responses", {"input": "What is 12 + 30?", "tools": [TOOL["function"] | {"type": "function"}]}),
    ("post", "/v1/messages", CHAT | {"tools": [{"name": "get_weather", "input_schema": {"type": "object"}}]}),
    ("post", "/v1/messages/count_tokens", CHAT),
    ("post", "/generate", {"text": "Once", "sampling_params": {"max_new_tokens": 2}}),
    ("post", "/generate", {"text": ["Once", "upon"], "sampling_params": {"max_new_tokens": 2}}),
    ("post", "/tokenize", {"prompt": "Once"}),
    ("post", "/detokenize", {"tokens": [5, 6]}),
    ("post", "/flush_cache", {}),
    *[("get", path, {}) for path in ("/v1/models", "/v1/models/{name}", "/health", "/ready", "/health_generate")],
    *[("get", path, {}) for path in ("/server_info", "/model_info", "/engine_view", "/version")],
]


@pytest.fixture
def document(http: httpx.Client) -> dict[str, Any]:
    result: dict[str, Any] = http.get("/openapi.json").json()
    return result


def test_document_describes_every_endpoint(document: dict[str, Any]) -> None:
    operations = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert operations == set(ENDPOINTS)
    text = str(document)
    for name in [part.split("'")[0] for part in text.split("'#/components/schemas/")[1:]]:
        assert name in document["components"]["schemas"]
    chat = document["components"]["schemas"]["ChatCompletionRequest"]
    assert chat["required"] == ["messages"]
    assert {"temperature", "tools", "stream_options"} <= chat["properties"].keys()


def test_every_operation_and_every_field_of_a_request_is_described(document: dict[str, Any]) -> None:
    operations = [o for methods in document["paths"].values() for o in methods.values()]
    assert len({o["operationId"] for o in operations}) == len(operations)
    assert all(o["description"] and o["summary"] for o in operations)
    schemas = document["components"]["schemas"]
    bodies = [o["requestBody"]["content"]["application/json"]["schema"] for o in operations if "requestBody" in o]
    for name in {body["$ref"].rpartition("/")[2] for body in bodies} | {"ChatMessage", "StreamOptions", "InputItem"}:
        bare = [field for field, shape in schemas[name]["properties"].items() if "description" not in shape]
        assert not bare, f"{name}: docs/api.md has no row"


def run_samples(url: str, operation: dict[str, Any]) -> list[str]:
    """Run an operation's commands in a shell, as they are on the page; return the answer of each curl."""
    (sample,) = operation["x-codeSamples"]
    each = "curl() { command curl -sS --fail-with-body --noproxy '*' \"$@\" && echo && echo %; }; set -eo pipefail\n"
    script = each + sample["source"].replace(SAMPLE_URL, url)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"{sample['source']}\n{done.stdout}{done.stderr}"
    assert SAMPLE_URL in sample["source"]
    return done.stdout.split("\n%\n")[:-1]


EMBEDDING_PATHS = ("/v1/embeddings", "/v1/score", "/v1/rerank")  # test_score.py runs their samples
OTHER_PATHS = (*EMBEDDING_PATHS, "lora_adapter")  # and test_adapters.py these


@pytest.mark.parametrize("key", sorted(key for key in ENDPOINTS if not key.endswith(OTHER_PATHS)))
def test_samples_run(server: ServerProcess, document: dict[str, Any], key: str) -> None:
    method, path = key.split()
    answers = run_samples(server.url, document["paths"][path][method.lower()])
    assert all(answers)
    if path == "/metrics":
        return
    endpoint = ENDPOINTS[key]
    msgspec.convert(json.loads(answers[0]), endpoint.response)
    assert len(answers) == 1 + (endpoint.media == "text/event-stream"), "one with a stream, too"
    for stream in answers[1:]:
        # Under load, tokens wait for each other and come in fewer events.
        assert len(re.findall("^data: ", stream, flags=re.M)) >= 2 and '"error":{' not in stream


@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
def test_responses_have_the_documented_shape(http: httpx.Client, method: str, path: str, body: dict[str, Any]) -> None:
    url = path.replace("{name}", "minisgl-demo")
    response = http.post(url, json=body) if method == "post" else http.get(url)
    assert response.status_code == 200, response.text
    kind = ENDPOINTS[f"{method.upper()} {path}"].response
    # A field that is not documented would be lost on the way, one that is missing refused.
    assert msgspec.to_builtins(msgspec.convert(response.json(), kind)) == response.json()


@pytest.mark.parametrize(
    ("method", "path", "content", "headers", "status"),
    [
        ("post", "/v1/chat/completions", "{}", {}, 400),
        ("post", "/v1/completions", "x", {}, 400),
        ("post", "/generate", "{}", {"content-type": "text/plain"}, 415),
        ("post", "/v1/completions", '{"prompt": "x", "model": "other"}', {}, 404),
        ("post", "/tokenize", '{"prompt": "%s"}' % ("x" * 5_000_000), {}, 413),
        ("post", "/v1/embeddings", '{"input": "x", "model": "minisgl-demo"}', {}, 400),
        ("post", "/v1/embeddings", '{"input": "x", "model": "other"}', {}, 404),
        ("post", "/v1/score", '{"text_1": "x", "text_2": "y"}', {}, 400),
        ("post", "/v1/rerank", '{"query": "x", "documents": ["y"]}', {}, 400),
        ("get", "/v1/models/{name}", "", {}, 404),
        ("post", "/v1/responses", '{"input": []}', {}, 400),
        ("get", "/v1/responses/{name}", "", {}, 404),
        ("post", "/v1/messages", '{"messages": [], "max_tokens": 0}', {}, 400),
        ("post", "/v1/messages/count_tokens", '{"messages": [], "model": "other"}', {}, 404),
        ("delete", "/v1/responses/{name}", "", {}, 404),
    ],
)
def test_refusals_are_documented(
    http: httpx.Client,
    document: dict[str, Any],
    method: str,
    path: str,
    content: str,
    headers: dict[str, str],
    status: int,
) -> None:
    headers = {"content-type": "application/json"} | headers
    response = http.request(method, path.replace("{name}", "none"), content=content, headers=headers)
    assert response.status_code == status
    error: Any = msgspec.convert(response.json(), AnthropicErrorResponse if "messages" in path else ErrorResponse).error
    assert error.message
    assert str(status) in document["paths"][path][method]["responses"]
    if status == 400 and path in ("/v1/embeddings", "/v1/score", "/v1/rerank"):
        assert error.code == "unsupported_endpoint" and "does not compute embeddings" in error.message
