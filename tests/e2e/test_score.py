"""/v1/score and /v1/rerank: the cosines of the vectors that /v1/embeddings returns."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from e2e.harness import ServerProcess, require_no_leak
from e2e.test_embeddings import model, server  # noqa: F401  (fixtures)
from e2e.test_openapi import EMBEDDING_PATHS, ENDPOINTS, run_samples
from minisgl.api.protocol import RerankResponse, ScoreResponse

TEXTS = ["Hello!", "A fox runs through the wood.", "東京", "Hello!"]


def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = http.post(path, json={"model": "tiny", "user": "u"} | body)
    assert response.status_code == 200, response.text
    result: dict[str, Any] = response.json()
    kind = {"/v1/score": ScoreResponse, "/v1/rerank": RerankResponse}[path]
    assert msgspec.to_builtins(msgspec.convert(result, kind)) == result
    return result


@pytest.fixture
def cosines(http: httpx.Client) -> Any:
    """[4, 4]"""
    data = http.post("/v1/embeddings", json={"input": TEXTS}).json()["data"]
    vectors = np.array([d["embedding"] for d in data])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors @ vectors.T


def test_scores_are_cosines(http: httpx.Client, cosines: Any) -> None:
    one = post(http, "/v1/score", text_1=TEXTS[0], text_2=TEXTS)
    assert [d["index"] for d in one["data"]] == [0, 1, 2, 3]
    assert np.abs([d["score"] for d in one["data"]] - cosines[0]).max() < 1e-4
    pairs = post(http, "/v1/score", text_1=TEXTS[:2], text_2=TEXTS[1:3])["data"]
    assert np.abs([d["score"] for d in pairs] - np.array([cosines[0, 1], cosines[1, 2]])).max() < 1e-4
    assert post(http, "/v1/score", text_1="Hello!", text_2="Hello!")["data"][0]["score"] == pytest.approx(1)
    assert one["usage"]["prompt_tokens"] == one["usage"]["total_tokens"] > 0


@pytest.mark.parametrize("path", EMBEDDING_PATHS)
def test_samples_run(server: ServerProcess, http: httpx.Client, path: str) -> None:  # noqa: F811
    (answer,) = run_samples(server.url, http.get("/openapi.json").json()["paths"][path]["post"])
    msgspec.convert(json.loads(answer), ENDPOINTS[f"POST {path}"].response)


def test_documents_are_ranked(http: httpx.Client, cosines: Any) -> None:
    documents: list[Any] = [TEXTS[1], {"text": TEXTS[2]}, TEXTS[3]]
    results = post(http, "/v1/rerank", query=TEXTS[0], documents=documents)["results"]
    assert [r["index"] for r in results] == np.argsort(-cosines[0, 1:]).tolist() and results[0]["index"] == 2
    for r in results:
        assert r["relevance_score"] == pytest.approx(cosines[0, 1 + r["index"]], abs=1e-4)
        assert r["document"] == {"text": TEXTS[1 + r["index"]]}
    best = post(http, "/v1/rerank", query=TEXTS[0], documents=documents, top_n=1, return_documents=False)["results"]
    assert best == [{"index": 2, "relevance_score": pytest.approx(results[0]["relevance_score"], abs=1e-6)}]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/v1/score", {"text_1": [], "text_2": []}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": ["", "b"]}, "text_2"),
        ("/v1/score", {"text_1": "", "text_2": ["a", "b"]}, "text_1"),
        ("/v1/score", {"text_1": "a " * 9000, "text_2": ["a", "b"]}, "text_1"),
        ("/v1/score", {"text_1": "a", "text_2": ["b", "a " * 9000]}, "text_2"),
        ("/v1/rerank", {"query": "", "documents": ["a"]}, "query"),
        ("/v1/rerank", {"query": "a", "documents": []}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": [{"image": "b"}]}, "documents"),
        ("/v1/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
    ],
)
def test_bad_requests_are_refused(http: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    response = http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_nothing_leaks(server: ServerProcess) -> None:  # noqa: F811
    require_no_leak(server)
