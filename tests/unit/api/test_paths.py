"""A path that does not exist: the 404 names the one that is meant, and that one exists."""

from __future__ import annotations

import pytest
from starlette.routing import Route

from minisgl.api.app import create_app
from minisgl.api.requests import SamplingDefaults, ServedModel
from minisgl.api.routes import ELSEWHERE, unknown_path
from minisgl.core.params import Limits
from minisgl.settings.options import ServerArgs

APP = create_app(ServerArgs(), ServedModel("m", Limits(max_model_len=100, vocab_size=50), SamplingDefaults()))
PATHS = [route.path for route in APP.routes if isinstance(route, Route)]


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/response", "/v1/responses"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/deployments/x/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/v1/completion", "/v1/completions"),
        ("/v1/engines/davinci/completions", "/v1/completions"),
        ("/models", "/v1/models"),
        ("/embeddings", "/v1/embeddings"),
        ("/metric", "/metrics"),
        *ELSEWHERE.items(),
    ],
)
def test_the_path_that_is_meant_is_named(path: str, meant: str) -> None:
    assert unknown_path(path, PATHS).endswith(f" here; use {meant}")
    assert meant in (*PATHS, "/openapi.json") and path not in PATHS


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/files", "/favicon.ico", "/" + "x" * 10_000])
def test_other_paths_lead_to_the_list(path: str) -> None:
    message = unknown_path(path, PATHS)
    assert message.endswith(" here; /openapi.json lists the paths") and len(message) < 200
