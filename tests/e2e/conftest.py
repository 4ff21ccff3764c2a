"""One real server on the built-in model for all modules that do not harm it."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest

from e2e.harness import ServerProcess
from minisgl.checkpoint.hf import BUILTIN_MODEL


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    if not (BUILTIN_MODEL / "model.safetensors").is_file():
        pytest.skip("the built-in model is not there yet")
    with ServerProcess("--num-pages", "1024", "--view-texts") as server:
        yield server


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, http_client=httpx.Client(trust_env=False)
    ) as client:
        yield client
