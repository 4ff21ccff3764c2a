"""A checkpoint that says its head is tied and stores another one: both are used, as transformers 5 does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from contract.checkpoints import configurations, save
from contract.harness import MiniEngine, Span
from minisgl.engine.resolve import resolve
from minisgl.models import weight
from minisgl.settings.options import EngineConfig

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
IDS = list(range(3, 40))

Tensors = dict[str, torch.Tensor]


def other_head(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()
    tensors[HEAD][-1, -1] += 8.0  # at the end: every piece is compared


def same_head(tensors: Tensors) -> None:
    tensors[HEAD] = tensors[EMBEDDING].clone()


def only_head(tensors: Tensors) -> None:
    tensors[HEAD] = tensors.pop(EMBEDDING)


@pytest.mark.parametrize("mark", ["qweight", "weight_packed"])
def test_a_quantized_head_is_not_tied(tmp_path: Path, mark: str) -> None:
    save(tmp_path, configurations()["qwen3-tied-wide-heads"])
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {f"lm_head.{mark}": torch.zeros(8, 8).int()}, file)
    assert weight.has_own_head(tmp_path)


@pytest.mark.parametrize(("change", "is_tied"), [(other_head, False), (same_head, True), (only_head, True)])
@pytest.mark.filterwarnings("default")
def test_tying_follows_the_tensors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    change: Callable[[Tensors], None],
    is_tied: bool,
) -> None:
    save(tmp_path, configurations()["qwen3-tied-wide-heads"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    monkeypatch.setattr(weight, "PIECE_BYTES", 1000)
    with caplog.at_level(logging.WARNING):
        spec = resolve(EngineConfig(model=str(tmp_path)), "cpu")
    assert spec.model.tie_word_embeddings is is_tied
    assert ("not tied" in caplog.text) is not is_tied
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        want = theirs(torch.tensor([IDS])).logits[0, -1:]
    logits = MiniEngine.load(tmp_path, config=spec.model).step([Span(0, 0, IDS)])
    assert (logits - want).abs().max() <= 1e-4 * want.abs().max()
