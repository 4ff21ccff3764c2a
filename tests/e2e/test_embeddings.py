"""/v1/embeddings of a real server with a tiny embedding checkpoint, through the official client and raw."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import openai
import pytest
import torch
from tokenizers import Tokenizer
from transformers import Qwen3Config

from e2e.harness import ServerProcess, require_no_leak
from e2e.test_fields import Place, bodies
from minisgl.api.protocol import EmbeddingRequest, EmbeddingResponse
from support.embedding_models import EmbeddingModel, save_embedding_model

TEXTS = ["Hello!", "The fox Lily runs through the wood. " * 9, "東京"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> EmbeddingModel:
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.15,
    )
    return save_embedding_model(tmp_path_factory.mktemp("tiny"), config, "last", matryoshka_dimensions=[16, 32])


@pytest.fixture(scope="module")
def server(model: EmbeddingModel) -> Iterator[ServerProcess]:
    flags = ("--model", str(model.folder), "--served-model-name", "tiny", "--num-pages", "256")
    with ServerProcess(*flags, "--max-prefill-length", "64") as server:
        yield server


def ids_of(model: EmbeddingModel, text: str) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(model.folder / "tokenizer.json")).encode(text).ids
    return ids


def assert_close(ours: Any, want: torch.Tensor) -> None:
    assert np.abs(np.array(ours) - want.numpy()).max() < 1e-4


def test_embeddings_equal_the_reference(client: openai.OpenAI, model: EmbeddingModel, server: ServerProcess) -> None:
    """The client asks for base64 by itself; the second text is computed in chunks."""
    answer = client.embeddings.create(model="tiny", input=TEXTS)
    prompts = [ids_of(model, text) for text in TEXTS]
    assert answer.object == "list" and answer.model == "tiny" and [d.index for d in answer.data] == [0, 1, 2]
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, prompts)) > 64
    for data, ids in zip(answer.data, prompts, strict=True):
        assert_close(data.embedding, model.embedding(ids))
    require_no_leak(server)


def test_text_and_its_tokens_have_the_same_embedding(client: openai.OpenAI, model: EmbeddingModel) -> None:
    ids = ids_of(model, TEXTS[1])
    inputs: list[Any] = [TEXTS[1], ids, [ids], [TEXTS[1]]]
    vectors = [client.embeddings.create(model="tiny", input=x).data[0].embedding for x in inputs]
    for vector in vectors:
        assert_close(vector, model.embedding(ids))


def test_encodings(http: httpx.Client) -> None:
    found = {}
    for encoding in ("float", "base64", None):
        body = {"input": TEXTS[0], "encoding_format": encoding, "user": "me"}
        response = http.post("/v1/embeddings", json=body)
        assert response.status_code == 200
        found[encoding] = msgspec.convert(response.json(), EmbeddingResponse).data[0].embedding
    assert found[None] == found["float"]
    assert isinstance(found["base64"], str)
    assert np.frombuffer(base64.b64decode(found["base64"]), "<f4").tolist() == found["float"]


def test_dimensions_cuts_and_normalises(client: openai.OpenAI, model: EmbeddingModel) -> None:
    vector = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=16).data[0].embedding
    assert len(vector) == 16
    assert_close(vector, model.embedding(ids_of(model, TEXTS[0]), 16))
    with pytest.raises(openai.BadRequestError, match="16, 32, 64") as caught:
        client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=17)
    assert caught.value.param == "dimensions"


def test_2048_inputs(client: openai.OpenAI) -> None:
    data = client.embeddings.create(model="tiny", input=[f"number {i}" for i in range(600)]).data
    assert len({tuple(d.embedding) for d in data}) == 600


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["x", ""]}, "input"),
        ({"input": [[1], "x", 3]}, "input"),
        ({"input": [4096]}, "input"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": "many"}, "dimensions"),
        ({"input": "x " * 600}, "input"),
        ({}, "input"),
    ],
)
def test_bad_requests_are_refused(http: httpx.Client, server: ServerProcess, body: dict[str, Any], param: str) -> None:
    response = http.post("/v1/embeddings", json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    require_no_leak(server)


@pytest.mark.parametrize("field", EmbeddingRequest.__struct_fields__)
def test_any_value_gets_an_answer_or_a_refusal(http: httpx.Client, server: ServerProcess, field: str) -> None:
    """Every kind of wrong value in each field: an answer or a refusal."""
    allowed = (200, 400, 404) if field in ("model", "lora_path") else (200, 400)
    for body in bodies(Place("/v1/embeddings", EmbeddingRequest, {"input": "x"}), field):
        response = http.post("/v1/embeddings", content=body, headers={"content-type": "application/json"})
        assert response.status_code in allowed, (body[:200], response.text[:500])
    require_no_leak(server)
    assert "Traceback" not in server.log


def test_embedding_model_generates_no_text(http: httpx.Client) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello"}]}
    for path, body in (
        ("/v1/chat/completions", chat),
        ("/v1/completions", {"prompt": "x"}),
        ("/generate", {"text": "x"}),
    ):
        response = http.post(path, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "unsupported_endpoint"
    assert http.get("/health_generate").json() == {"status": "ok"}
    assert http.get("/model_info").json()["is_generation"] is False
