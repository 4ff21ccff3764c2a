"""/tokenize, /detokenize and the probe against the real server with the built-in model."""

from __future__ import annotations

import httpx

from e2e.harness import ServerProcess, eventually, require_no_leak


def test_tokenize_counts_the_tokens_of_the_engine(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Repeat exactly: grün 🙂 你好"}]
    tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    body = {"messages": messages, "temperature": 0}
    by_messages = http.post("/v1/chat/completions", json=body).json()
    by_tokens = http.post("/v1/completions", json={"prompt": tokens, "temperature": 0}).json()
    assert by_messages["usage"]["prompt_tokens"] == by_tokens["usage"]["prompt_tokens"] == len(tokens)
    assert by_messages["choices"][0]["message"]["content"] == by_tokens["choices"][0]["text"]
    assert "你好" in http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]


def test_probe_leaks_nothing(server: ServerProcess, http: httpx.Client) -> None:
    before = server.metrics()["generation_tokens_total"]
    assert http.get("/health_generate").status_code == 200
    assert eventually(lambda: server.metrics()["generation_tokens_total"] > before)
    require_no_leak(server)


def test_reset_prefix_cache(server: ServerProcess, http: httpx.Client) -> None:
    http.post("/v1/completions", json={"prompt": "Once upon a time " * 20, "max_tokens": 4})
    assert eventually(lambda: server.metrics()["kv_pages_evictable"] > 0)
    assert http.post("/reset_prefix_cache", json={}).status_code == 200
    assert eventually(lambda: server.metrics()["kv_pages_evictable"] == 0)
