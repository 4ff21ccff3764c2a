"""A server that is killed leaves its K/V pages to the next one."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import ServerProcess, eventually

BODY: dict[str, Any] = {"prompt": "The fox ran over the hill and saw a bird. " * 30, "max_tokens": 8, "temperature": 0}


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


@pytest.mark.slow
def test_requests_go_to_the_replica_whose_disk_has_their_prefix(tmp_path: Path) -> None:
    """After a restart of the server, and of one replica. Without a reason, a request goes to the first replica."""
    bodies = [BODY | {"prompt": f"Story {i}. {BODY['prompt']}"} for i in range(2)]

    def complete(server: ServerProcess, body: dict[str, Any]) -> tuple[str, int]:
        with server.client() as http:
            said = http.post("/v1/completions", json=body).json()
        return said["choices"][0]["text"], said["usage"]["prompt_tokens_details"]["cached_tokens"]

    def known(server: ServerProcess) -> list[int]:
        """How many pages the router knows of each replica."""
        return [replica["cached_prefixes"] for replica in server.info()["replicas"]]

    def held(server: ServerProcess) -> list[int]:
        """How many pages the disk of each replica has."""
        return [replica["stats"]["tiers"][0]["pages_held"] for replica in server.info()["replicas"]]

    options = "--dp", "2", f"--disk-kv={tmp_path}:200M", "--threads", "1"
    with ServerProcess(*options) as server:
        with ThreadPoolExecutor() as pool:
            first = pool.submit(complete, server, bodies[0] | {"max_tokens": 1000, "ignore_eos": True})
            assert eventually(lambda: server.info()["replicas"][0]["requests"] == 1)
            texts = {1: complete(server, bodies[1])[0]}
            first.result()
        assert eventually(lambda: min(held(server)) > 10), "each replica has computed a prompt"
        server.kill()
    with ServerProcess(*options) as server:
        assert eventually(lambda: min(known(server)) > 10)
        for number in (1, 0):
            text, cached = complete(server, bodies[number])
            assert cached > 200, number
            assert text == texts.setdefault(number, text)
        before = server.info()["processes"]["minisgl-DP1-TP0-scheduler"]
        os.kill(before, signal.SIGKILL)
        assert eventually(lambda: server.info()["processes"].get("minisgl-DP1-TP0-scheduler", before) != before)
        assert eventually(lambda: len(known(server)) == 2 and known(server)[1] > 10)
        assert complete(server, bodies[1]) == (texts[1], cached)
        assert eventually(lambda: server.info()["replicas"][1]["stats"]["tiers"][0]["loaded"] > 10)
