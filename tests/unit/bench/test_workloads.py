"""The offline workloads are the published ones, and the named shapes are models that the engine knows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minisgl.core.errors import ConfigError
from minisgl.models.model_config import ModelConfig
from minisgl.tokenizer.tokenize import TokenizeManager
from minisgl.tools.bench.shapes import SHAPES, shape_options
from minisgl.tools.bench.workloads import WORKLOADS, OfflineArgs, Workload, make_workloads


def make_workload(name: str, vocab_size: int, **sizes: int) -> Workload:
    (workload,) = make_workloads(OfflineArgs(workload=name, **sizes), vocab_size)  # type: ignore[arg-type]
    return workload


def test_workload_a_is_the_public_benchmark() -> None:
    a = make_workload("a", 151936)
    assert (len(a.requests), a.prompt_tokens, a.output_tokens) == (256, 142_827, 133_966)
    assert max(item.output_len for item in a.requests) == 1024  # so 1,023 decode steps
    assert max(max(item.prompt) for item in a.requests) == 10_000
    small = make_workload("a", 4096)
    assert [(len(i.prompt), i.output_len) for i in small.requests] == [
        (len(i.prompt), i.output_len) for i in a.requests
    ]
    assert max(max(item.prompt) for item in small.requests) < 4096


@pytest.mark.parametrize(
    ("name", "requests", "tokens_in", "tokens_out"),
    [("batch64", 64, 8192, 16384), ("single", 1, 128, 256), ("prefill", 16, 16384, 16), ("shared", 128, 131072, 8192)],
)
def test_sizes(name: str, requests: int, tokens_in: int, tokens_out: int) -> None:
    workload = make_workload(name, 4096)
    assert (len(workload.requests), workload.prompt_tokens, workload.output_tokens) == (requests, tokens_in, tokens_out)


@pytest.mark.parametrize("name", WORKLOADS)
def test_sizes_scale_and_warm_up_is_different(name: str) -> None:
    workload = make_workload(name, 100, num_prompts=3, input_len=20, output_len=18)
    assert len(workload.requests) == 3 and workload.longest == 38
    warm = workload.warm_up(100)
    for item, other in zip(workload.requests, warm.requests, strict=True):
        assert len(item.prompt) == len(other.prompt) and other.output_len == 16
        assert all(a != b for a, b in zip(item.prompt, other.prompt, strict=True))


def test_the_shared_workload_shares() -> None:
    first, second, *_ = make_workload("shared", 4096).requests
    assert first.prompt[:896] == second.prompt[:896] and first.prompt[896:] != second.prompt[896:]


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("b", {}, "--workload 'b' is unknown; known: a, batch64"),
        ("a", {"num_prompts": 0}, "--num-prompts"),
        ("single", {"output_len": 1}, "at least 2"),
    ],
)
def test_bad_workloads_are_refused(name: str, sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_workload(name, 4096, **sizes)


# As published: the embedding twice unless tied.
PARAMETERS = {
    "qwen3-10m": 10.49e6,
    "qwen3-0.6b": 0.596e9,
    "qwen3-8b": 8.19e9,
    "qwen3-14b": 14.77e9,
    "qwen3-32b": 32.76e9,
    "qwen3-30b-a3b": 30.53e9,
    "llama-3.1-8b": 8.03e9,
    "llama-3.1-70b": 70.55e9,
    "gpt-oss-20b": 20.91e9,
    "gemma-3-12b": 11.77e9,
    "gemma-3-27b": 27.01e9,
    "glm-4.7-flash": 29.94e9,  # as "30B" is published, without the layer that predicts further tokens
    "qwen3.5-0.8b": 0.752e9,  # the text part without its layer for drafts; published are 0.8B and 35B
    "qwen3.5-35b-a3b": 34.66e9,
    "gemma-4-12b": 11.9e9,  # not published: Gemma 3 12B's sizes with Gemma 4's heads
}
ROPES = {
    "glm": "default",
    "llama": "llama3",
    "qwen3": "default",
    "gemma-3": "linear",
    "gemma-4": "proportional",
    "gpt": "yarn",
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_the_real_models(name: str) -> None:
    with shape_options(name, {"threads": 1}) as options:
        folder = Path(options["model"])
        config = ModelConfig.from_hf(json.loads((folder / "config.json").read_text()))
        TokenizeManager(folder)
        assert options["dummy_weight"] and options["threads"] == 1 and folder.name == name
    assert not folder.exists()
    assert config.num_weights == pytest.approx(PARAMETERS[name], rel=2e-3)
    assert (
        config.rope.type == next(rope for start, rope in ROPES.items() if name.startswith(start))
        and config.dtype == "bfloat16"
    )


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="known: qwen3-"), shape_options("gpt-5", {}):
        pass
    with pytest.raises(ConfigError, match="not both"), shape_options("qwen3-8b", {"model": "x"}):
        pass
    with shape_options(None, {"model": "x"}) as options:
        assert options == {"model": "x"}
