"""One real server on the built-in model for all modules that do not harm it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from e2e.harness import OURS, ServerProcess
from minisgl.checkpoint.hf import BUILTIN_MODEL


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    if not (BUILTIN_MODEL / "model.safetensors").is_file():
        pytest.skip("the built-in model is not there yet")
    with ServerProcess("--num-pages", "1024", "--view-texts", python=OURS) as server:
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


@pytest.fixture(scope="session")
def special(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The built-in model with markers of calls and reasoning that are special tokens, and a switch for reasoning."""
    folder: Path = tmp_path_factory.mktemp("special")
    for file in BUILTIN_MODEL.iterdir():
        (folder / file.name).symlink_to(file)
    template, tokenizer = ((folder / name).read_text() for name in ("chat_template.jinja", "tokenizer.json"))
    data = json.loads(tokenizer.replace("tool_response>", "think>"))
    for token in data["added_tokens"]:
        token["special"] = True
    switch = "{%- if add_generation_prompt and thinking -%}<think>{%- endif -%}{#- </think> -#}"
    for name, text in (("chat_template.jinja", template + switch), ("tokenizer.json", json.dumps(data))):
        (folder / name).unlink()
        (folder / name).write_text(text)
    with ServerProcess(str(folder), "--served-model-name", "minisgl-demo") as server:
        yield server


@pytest.fixture
def thinker(special: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{special.url}/v1", api_key="none", max_retries=0) as client:
        yield client
