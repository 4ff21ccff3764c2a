"""The draft head in training: its drafts are those of the engine, and it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from minisgl import LLM, SamplingParams
from minisgl.engine.drafting import Drafting
from minisgl.tokenizer.folder import load_tokenizer
from training import head as head_module
from training.export import load
from training.head import LAYERS, Head, draft_vocabulary, export
from training.model import Model, Muon

pytestmark = pytest.mark.usefixtures("fixed_costs")

MODEL = Path(__file__).parents[3] / "python/minisgl/demo/model"
PROMPTS = ("The little fox", "Anna lives in Oslo and", "Count: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11")


@pytest.fixture(scope="module")
def model() -> Model:
    return load(MODEL).requires_grad_(False)


@pytest.fixture(scope="module")
def head(model: Model) -> Head:
    """A head with random weights, and its own vocabulary of 300 tokens."""
    torch.manual_seed(0)
    head = Head(model, torch.randperm(model.shape.vocab)[:300].sort().values)
    for p in head.parameters():
        p.data = (2 * p).bfloat16().float()  # as the file has them
    return head


def hidden_states(model: Model, head: Head, texts: list[list[int]], count: int) -> list[Tensor]:
    """The hidden states [T, hidden] of each draft, of packed texts."""
    ids = torch.tensor([token for text in texts for token in text])
    positions = torch.cat([torch.arange(len(text)) for text in texts])
    starts = torch.tensor([0, *(len(text) for text in texts)]).cumsum(0).int()
    states = torch.cat([model.outputs(ids, positions, starts)[i] for i in LAYERS], -1)
    cos, sin = model.cos[positions], model.sin[positions]
    with torch.no_grad():
        return [*head.unrolled(states, model.embed[ids.roll(-1)], cos, sin, starts, count)]


def test_the_engine_drafts_what_training_computes(
    model: Model, head: Head, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(head, model.shape, tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 2_000_000
    seen: list[tuple[list[int], list[int]]] = []
    complete = Drafting.complete

    def spy(drafting: Drafting, batch: Any) -> Any:
        for row, count in zip(batch.drafts.rows.tolist(), batch.drafts.counts.tolist(), strict=True):
            ids = drafting.history[row, : int(drafting.lengths[row])].tolist()
            seen.append((ids, drafting.drafts[row, :count].tolist()))
        return complete(drafting, batch)

    # Op by op: there the head is not rounded.
    options = {"dtype": "float32", "attention_backend": "cpu", "num_pages": 512}
    with LLM(str(MODEL), speculate=f"eagle3:{tmp_path}", **options) as llm:
        monkeypatch.setattr(Drafting, "complete", spy)  # after the start, which times steps with drafts
        llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    assert len(seen) > 20 and max(len(drafts) for _, drafts in seen) == 4
    for ids, drafts in seen:
        states = hidden_states(model, head, [ids + drafts], len(drafts))
        first = len(ids) - 2  # this slot reads the newest token
        computed = [int(head.draft_ids[head.logits(x[first + k]).argmax()]) for k, x in enumerate(states)]
        assert drafts == computed


def test_documents_do_not_see_each_other(model: Model, head: Head) -> None:
    texts = [[*range(5, 25)], [*range(300, 330)], [*range(70, 84)]]
    packed = hidden_states(model, head, texts, 3)
    for k, states in enumerate(packed):
        for text, part in zip(texts, states.split([len(text) for text in texts]), strict=True):
            alone = hidden_states(model, head, [text], 3)[k]
            # The last slot reads a token that no document has; before slot k there is no chain.
            torch.testing.assert_close(part[k:-1], alone[k:-1], rtol=1e-4, atol=1e-4)


def test_windows_bound_the_slots_that_attend_to_each_other(
    model: Model, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = [*range(5, 69)]
    whole = hidden_states(model, head, [text], 2)
    monkeypatch.setattr(head_module, "WINDOW", 32)
    cut = hidden_states(model, head, [text], 2)
    for k in (0, 1):
        torch.testing.assert_close(cut[k][k:32], whole[k][k:32], rtol=1e-4, atol=1e-4)
        assert (cut[k][32:] - whole[k][32:]).abs().max() > 0.01


@pytest.mark.slow
def test_a_head_learns_a_text(model: Model) -> None:
    torch.manual_seed(0)
    head = Head(model, draft_vocabulary(MODEL / "tokenizer.json", 1, 4096, tokens=1 << 14))
    text = "Once there was a small fox who lived near a river. Every morning the fox counted the boats and the birds."
    ids = torch.tensor(load_tokenizer(MODEL).encode(text).ids)
    batch = (ids, torch.arange(len(ids)), torch.tensor([0, len(ids)], dtype=torch.int32), ids.roll(-1))
    vectors = [p for name, p in head.named_parameters() if p.ndim == 1 or name == "lm_head.weight"]
    known = {id(p) for p in vectors}
    optimizers = [torch.optim.AdamW(vectors, 0.006), Muon([p for p in head.parameters() if id(p) not in known], 0.03)]
    losses = []
    for _ in range(18):
        loss, right = head.loss(model, *batch, count=3)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    assert right.min() > 0.5


def test_a_batch_without_an_answer_changes_nothing(model: Model, head: Head) -> None:
    ids = torch.arange(20)
    batch = (ids, ids, torch.tensor([0, 20], dtype=torch.int32), torch.full((20,), -100))
    loss, right = head.loss(model, *batch, count=3)
    loss.backward()
    assert loss == 0 and not right.any()
    assert all(not p.grad.any() for p in head.parameters() if p.grad is not None)
    head.zero_grad()
