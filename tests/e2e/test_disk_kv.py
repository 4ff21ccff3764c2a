"""A server that is killed leaves its K/V pages to the next one."""

from __future__ import annotations

from pathlib import Path

from e2e.harness import ServerProcess, eventually

BODY = {"prompt": "The fox ran over the hill and saw a bird. " * 30, "max_tokens": 8, "temperature": 0}


def test_the_next_server_finds_the_pages(tmp_path: Path) -> None:
    option = f"--disk-kv={tmp_path}:100M"
    with ServerProcess(option) as server, server.client() as http:
        first = http.post("/v1/completions", json=BODY).json()
        assert eventually(lambda: server.metrics()["kv_tier_pages_held"] > 10), "nothing is written in idle time"
        server.kill()
    with ServerProcess(option) as server, server.client() as http:
        second = http.post("/v1/completions", json=BODY).json()
        assert second["choices"][0]["text"] == first["choices"][0]["text"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 200
        assert server.metrics()["kv_tier_lost_total"] == 0
