"""Log-probabilities against a slow reference in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl.core.layout import Flag
from minisgl.core.plan import StepResult
from minisgl.ops import sampling

TOP = StepResult.TOP


def reference(row: np.ndarray) -> np.ndarray:
    """log softmax in float64, straight from the definition."""
    x = row.astype(np.float64)
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def token_logprobs(logits: torch.Tensor, tokens: torch.Tensor, wanted: bool = True) -> torch.Tensor:
    return sampling.token_logprobs(logits, tokens, torch.full_like(tokens, Flag.LOGPROBS if wanted else 0))


def unpacked(scores: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the tokens [N], ids of the likeliest [TOP, N], theirs [TOP, N]."""
    x = np.ascontiguousarray(scores.numpy())
    return x[0].view(np.float32), x[1 : 1 + TOP], x[1 + TOP :].view(np.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pass_logits", [1 << 24, 700])
def test_equals_the_reference(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, pass_logits: int) -> None:
    monkeypatch.setattr(sampling, "LOGPROBS_CHUNK", pass_logits)  # 700 = two rows at once
    g = torch.Generator().manual_seed(1)
    logits = (torch.randn(7, 300, generator=g) * 5).to(dtype)
    tokens = torch.randint(0, 300, (7,), generator=g, dtype=torch.int32)
    scores = token_logprobs(logits, tokens)
    assert scores.shape == (StepResult.WIDTH, 7) and scores.dtype is torch.int32
    own, ids, values = unpacked(scores)
    for i in range(7):
        want = reference(logits[i].float().numpy())
        assert own[i] == pytest.approx(want[tokens[i]], abs=2e-5)
        np.testing.assert_allclose(values[:, i], np.sort(want)[::-1][:TOP], atol=2e-5)
        np.testing.assert_allclose(want[ids[:, i]], values[:, i], atol=2e-5)
        assert len(set(ids[:, i].tolist())) == TOP
        assert torch.equal(token_logprobs(logits[i : i + 1], tokens[i : i + 1])[:, 0], scores[:, i])
    assert not token_logprobs(logits, tokens, wanted=False).any()


def test_small_vocabulary_and_certain_tokens() -> None:
    logits = torch.full((1, 5), float("-inf"))
    logits[0, 3] = 2.0
    own, ids, values = unpacked(token_logprobs(logits, torch.tensor([3], dtype=torch.int32)))
    assert own.tolist() == [0.0]
    assert ids[0, 0] == 3 and values[0, 0] == 0.0
    assert np.isneginf(values[1:5, 0]).all()
    assert not values[5:].any() and not ids[5:].any()
