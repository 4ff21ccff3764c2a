"""A named backend that cannot be had is replaced, and one warning says why."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch

from minisgl.attention.backend import Attention, AttentionBackend, MixerSpec, ReferenceAttention
from minisgl.attention.selection import ATTENTION, Requirements, resolve_attention
from minisgl.core.errors import ConfigError
from minisgl.core.registry import Registry
from minisgl.core.specs import GroupedQuery
from minisgl.ops.table import resolve_ops

KIND = GroupedQuery(16, 8, 128, 1.0)
SPEC = MixerSpec("cuda", torch.bfloat16, KIND, 128)
NINJA = "Ninja build failed. Ninja output:\n[1/9] nvcc x.cu\nx.cu(7): error: no such thing\nninja: build stopped"


class Broken(AttentionBackend):
    """Its kernels do not compile."""

    name = "broken"

    def __init__(self, *args: Any) -> None:
        raise RuntimeError(NINJA)

    def prepare(self, *args: Any) -> None: ...


class Host(ReferenceAttention):
    """Plans on the host, where the lengths of rows with drafts are not known."""

    name = "host"


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry[type[AttentionBackend]]:
    """The real one, with two backends in front that can never be had."""
    known = ATTENTION._entries
    monkeypatch.setattr(ATTENTION, "_entries", {})
    ATTENTION.add("broken", f"{__name__}:Broken")
    ATTENTION.add("missing", "no.such.module:Backend", Requirements(module="no_such_module", extra="none").refusal)
    ATTENTION._entries.update(known)
    return ATTENTION


def resolve(choice: str, max_queries: int = 1) -> Attention:
    spec = MixerSpec("cpu", torch.float32, GroupedQuery(4, 2, 8, 1.0), 4, max_queries=max_queries)
    attention, other = resolve_attention(choice, [spec, spec], resolve_ops("cpu"))  # one warning for both
    assert attention.name == other.name and attention.decode is not other.decode
    return attention


@pytest.mark.parametrize(
    ("choice", "name", "warnings"),
    [
        ("missing", "cpu", ["missing: no_such_module is not installed; pip install 'minisgl[none]'"]),
        ("broken", "cpu", ["broken: RuntimeError: x.cu(7): error: no such thing"]),
        ("triton", "cpu", ["triton: device cpu is not one of cuda"]),
        ("fa3", "cpu", ["fa3: device cpu is not one of cuda"]),
        ("auto", "cpu", ["broken: RuntimeError: x.cu(7): error: no such thing"]),
        ("reference", "reference", []),
        ("cpu", "cpu", []),
        ("missing,cpu", "cpu", ["missing: "]),
        ("reference,missing", "reference,cpu", ["missing: "]),
        ("missing,fi", "cpu", ["fi: ", "missing: "]),
    ],
)
def test_unusable_backends_fall_back_with_a_warning(
    choice: str,
    name: str,
    warnings: list[str],
    registry: Registry[type[AttentionBackend]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    if choice not in ("broken", "auto"):
        monkeypatch.delitem(registry._entries, "broken")
    monkeypatch.setattr(logging.getLogger("minisgl"), "propagate", True)
    backend = resolve(choice)
    assert backend.name == name
    messages = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(messages) == len(warnings)
    for message, warning in zip(messages, warnings, strict=True):
        assert message.startswith("using attention backend cpu instead of ") and warning in message


def test_warning_names_each_failed_backend(caplog: pytest.LogCaptureFixture):
    assert resolve("missing").name == "cpu"
    (record,) = caplog.records
    assert "missing: no_such_module" in record.getMessage() and "broken: RuntimeError" in record.getMessage()


def test_fallback_and_named_backend_are_built_once():
    attention = resolve("cpu,missing")
    assert attention.prefill is attention.decode


def test_unknown_name_is_refused_before_any_backend_is_built(caplog: pytest.LogCaptureFixture):
    with pytest.raises(ConfigError, match="unknown attention backend 'fancy'"):
        resolve("broken,fancy")
    assert not caplog.records


def test_error_lists_all_reasons_if_no_backend_works(registry: Registry[type[AttentionBackend]]):
    for name in ("cpu", "reference"):
        del registry._entries[name]
    with pytest.raises(ConfigError, match=r"broken: RuntimeError: .*; missing: no_such_module .*; triton: device cpu"):
        resolve("auto")


def test_optional_backends_name_their_requirements(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("minisgl.attention.selection.find_spec", lambda module: None)
    assert ATTENTION.refusal("fi", SPEC) == "flashinfer is not installed; pip install 'minisgl[fi]'"
    assert ATTENTION.refusal("fa3", SPEC) == "fa3_fwd is not installed; pip install 'minisgl[fa3]'"
    monkeypatch.setattr("minisgl.attention.selection.find_spec", lambda module: object())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert ATTENTION.refusal("fi", SPEC) is None
    assert ATTENTION.refusal("fa3", SPEC) == "compute capability 9.0 is needed, this GPU has 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert ATTENTION.refusal("fa3", SPEC) is None
    small = MixerSpec("cuda", torch.bfloat16, KIND, 64)
    assert ATTENTION.refusal("fa3", small) == "page size 64 is not one of 128, 256, 512, 1024"
    windowed = replace(SPEC, kind=replace(KIND, window=512))
    assert ATTENTION.refusal("fi", windowed) is None
    assert ATTENTION.refusal("fa3", windowed) == "sliding windows are not supported"
    for name in ("fi", "fa3"):
        assert ATTENTION.refusal(name, replace(SPEC, kind=replace(KIND, softcap=50.0))) is None
        with_sinks = replace(SPEC, kind=replace(KIND, has_sinks=True))
        assert ATTENTION.refusal(name, with_sinks) == "attention sinks are not supported"


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ("host", "host,cpu"),
        ("host,cpu", "host,cpu"),
        ("reference,host", "reference,cpu"),
        ("cpu", "cpu"),
    ],
)
def test_with_drafts_a_backend_that_knows_lengths_on_the_device_decodes(
    choice: str, name: str, registry: Registry[type[AttentionBackend]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delitem(registry._entries, "broken")
    registry.add("host", f"{__name__}:Host", Requirements(drafts=False).refusal)
    assert resolve(choice, max_queries=5).name == name
    assert resolve(choice, max_queries=1).name == choice
