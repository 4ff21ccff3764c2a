"""The limits of `minisgl verify`, and the settings that it refuses; tests/e2e/test_verify.py runs it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from contract.checkpoints import configurations, save
from contract.harness import MiniEngine
from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.core.errors import ConfigError
from minisgl.engine.resolve import resolve
from minisgl.llm.completions import Completion
from minisgl.settings.options import EngineConfig
from minisgl.tools.verify.checks import FLOAT32_LIMIT, HALF_FACTOR, WAYS, Reference, Texts, check_logits, compare
from minisgl.tools.verify.command import make_texts
from minisgl.tools.verify.texts import check_texts


def exact_and_off(*relative: float) -> tuple[list[tuple[list[int], torch.Tensor]], Reference]:
    """Logits with errors of `relative` times the largest logit, and the exact reference."""
    want = torch.tensor([[1.0, -2.0, 0.5]] * len(relative))
    sequence = list(range(len(relative)))
    cases = []
    for i, off in enumerate(relative):
        cases.append((sequence[: i + 1], want[i] + torch.tensor([0.0, 0.0, off * 2.0])))
    return cases, Reference([sequence], [want])


def test_float32_is_held_to_its_limit_at_every_prefix() -> None:
    cases, exact = exact_and_off(0, 0.9 * FLOAT32_LIMIT)
    result, worst = check_logits("prefill", cases, exact, None)
    assert result.passed and result.name == "prefill = transformers"
    assert worst == pytest.approx(0.9 * FLOAT32_LIMIT, rel=1e-2)
    cases, exact = exact_and_off(0, 0, 0, 1.1 * FLOAT32_LIMIT)
    assert not check_logits("prefill", cases, exact, None)[0].passed


@pytest.mark.parametrize(("ours", "passed"), [(0.02, True), (0.99 * HALF_FACTOR * 0.02, True), (0.04, False)])
def test_other_dtypes_are_held_to_the_error_of_transformers(ours: float, passed: bool) -> None:
    cases, exact = exact_and_off(ours, ours)
    their_cases, _ = exact_and_off(0.01, 0.03)
    theirs = Reference(exact.sequences, [torch.stack([logits for _, logits in their_cases])])
    assert check_logits("decode", cases, exact, theirs)[0].passed == passed


def test_nan_logits_fail() -> None:
    cases, exact = exact_and_off(0, float("nan"))
    assert not check_logits("decode", cases, exact, None)[0].passed


@pytest.mark.parametrize(
    ("file", "old", "new", "wrong"),
    [
        ("tokenizer.json", "", "", set()),
        ("tokenizer.json", '"add_prefix_space": false', '"add_prefix_space": true', {"tokens"}),
        ("tokenizer.json", '"special": true', '"special": false', {"text"}),
        ("chat_template.jinja", "<|im_end|>", "<|im_end|> ", {"chats"}),
        ("chat_template.jinja", "<|im_end|>", "{% foo %}", {"chats"}),
    ],
)
@pytest.mark.filterwarnings("default")
def test_texts_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, old: str, new: str, wrong: set[str]
) -> None:
    """transformers reads the built-in model; we read it with a change."""
    from transformers import AutoTokenizer

    judge = AutoTokenizer.from_pretrained(BUILTIN_MODEL)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda folder, **_: judge)
    folder = Path(shutil.copytree(BUILTIN_MODEL, tmp_path / "model"))
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new))
    results = check_texts(folder)
    assert {r.name.removesuffix(" = transformers") for r in results if not r.passed} == wrong


def test_tokenizers_that_transformers_cannot_load_are_not_compared(tmp_path: Path) -> None:
    assert {result.passed for result in check_texts(tmp_path)} == {None}


def completion(*tokens: int) -> Completion:
    return Completion([1, 2, 3], token_ids=list(tokens))


def test_outputs_may_differ_only_at_a_tie() -> None:
    asked: list[tuple[list[int], int, int]] = []

    def gap(prefix: list[int], one: int, other: int) -> float:
        asked.append((prefix, one, other))
        return 0.01

    prompts = [[1, 2, 3], [4, 5, 6]]
    base, other = [completion(7, 8, 9), completion(7, 7, 7)], [completion(7, 5, 1), completion(7, 7, 7)]
    result = compare("cached = cold", prompts, base, other, gap, tie=0.02)
    assert result.passed and "1 identical" in result.figure and "1.0e-02 apart" in result.figure
    assert asked == [([1, 2, 3, 7], 8, 5)], "tokens after the first difference are not compared"
    assert not compare("cached = cold", prompts, base, other, gap, tie=0.005).passed
    assert compare("cached = cold", prompts, base, base, gap, tie=0.0).figure == "2 identical"


@pytest.mark.parametrize(
    ("name", "few"), [("qwen3-tied-wide-heads", {"prefill": 3}), ("qwen3.5", {"prefill": 9, "prefix hit": 20})]
)
def test_every_way_gives_logits_of_prefixes_of_the_texts(tmp_path: Path, name: str, few: dict[str, int]) -> None:
    """A block has a page, or two slots of recurrent states; with `few` a way ends with advice."""
    save(tmp_path, configurations()[name])
    ids = list(range(150))
    texts = Texts(ids[:96], ids[50:70], ids[20:60], shared=64)
    for name, way in WAYS.items():
        cases = way(MiniEngine.load(tmp_path), texts)
        assert len(cases) >= 5, name
        for prefix, logits in cases:
            assert any(sequence[: len(prefix)] == prefix for sequence in texts.sequences) and logits.shape == (160,)
    for name, count in few.items():
        with pytest.raises(ConfigError, match="KV cache is too small"):
            WAYS[name](MiniEngine.load(tmp_path, num_pages=count), texts)


def test_texts_must_fit_into_the_context() -> None:
    spec = resolve(EngineConfig(), "cpu")
    texts = make_texts(spec, 192)
    assert len(texts.a) == 192 and texts.shared == 144 and len({tuple(s) for s in texts.sequences}) == 4
    assert max(map(max, texts.sequences)) < spec.model.vocab_size
    with pytest.raises(ConfigError, match="do not fit into the context of 4096"):
        make_texts(spec, 4080)
    with pytest.raises(ConfigError, match="too short to share a page of 128"):
        make_texts(replace(spec, page_size=128), 100)
