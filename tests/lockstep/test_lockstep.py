"""Several ranks over gloo, in processes of their own, give the text of one: greedy and with seeds, under traffic."""

from __future__ import annotations

import json
import os
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from minisgl import LLM, SamplingParams
from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.core.errors import InvariantError, RankError
from minisgl.core.message import AbortMsg, UserMsg, ids_from_bytes, ids_to_bytes
from minisgl.core.params import Grammar
from minisgl.core.plan import FinishReason
from support.next_tokens import write_glm

ABORTED = frozenset({2, 5})
OPTIONS = {"threads": 1, "num_pages": 120, "page_size": 4, "max_prefill_length": 40, "max_running_requests": 6}
Requests = list[tuple[list[int], SamplingParams]]


def make_requests(llm: LLM) -> Requests:
    """Prompts with shared beginnings, most of them longer than what a step computes beside others."""
    rng = random.Random(3)
    texts = [f"Once upon a time, there was a {animal} who lived in a small house." * 2 for animal in ("fox", "cat")]
    heads = [llm.tokenizer.tokenizer.encode(text).ids for text in texts]
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.0, "ignore_eos": True},
        {"temperature": 1.0},
        {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
        {"temperature": 0.8, "presence_penalty": 0.5, "logit_bias": ((300, 2.0),), "min_tokens": 5},
    ]
    requests = []
    for i in range(11):
        prompt = heads[i % 2][: rng.randrange(12, 29)] + [rng.randrange(10, 4000) for _ in range(rng.randrange(3))]
        requests.append((prompt, SamplingParams(max_tokens=rng.randrange(4, 14), seed=i, **kinds[i % len(kinds)])))
    return requests


def drive(llm: LLM, requests: Requests, aborts: frozenset[int] = frozenset()) -> dict[int, list[int]]:
    """Tokens by request, which arrive two a step; `aborts` leave after some steps."""
    scheduler, io = llm.scheduler, llm._io
    outputs: dict[int, list[int]] = {uid: [] for uid in range(len(requests))}
    todo, ended, step = list(enumerate(requests)), set[int](), 0
    while todo or io.inbox or scheduler.is_busy:
        for uid, (prompt, params) in todo[:2]:
            io.inbox.append(UserMsg(uid=uid, input_ids=ids_to_bytes(prompt), sampling_params=params))
        del todo[:2]
        if step == 5:
            io.inbox.extend(AbortMsg(uid) for uid in aborts)
        scheduler.step()
        step += 1
        while io.replies:
            msg = io.replies.popleft()
            uids, tokens = np.frombuffer(msg.uids, "<i8").tolist(), ids_from_bytes(msg.tokens).tolist()
            for uid, token in zip(uids, tokens, strict=True):
                outputs[uid].append(token)
            assert all(end.reason is not FinishReason.ERROR for end in msg.finished)
            ended |= {end.uid for end in msg.finished}
    assert ended == outputs.keys()
    return outputs


@pytest.fixture(scope="module")
def requests_and_tokens() -> tuple[Requests, dict[int, list[int]]]:
    """On one rank, each request alone."""
    llm = LLM(speculate="off", **OPTIONS)
    requests = make_requests(llm)
    return requests, {uid: drive(llm, [request])[0] for uid, request in enumerate(requests)}


@pytest.mark.parametrize(("tp", "count"), [(2, 11), pytest.param(4, 7, marks=pytest.mark.slow)])
def test_text_equals_one_rank(tp: int, count: int, requests_and_tokens: tuple[Requests, dict[int, list[int]]]) -> None:
    requests, alone = requests_and_tokens[0][:count], {uid: requests_and_tokens[1][uid] for uid in range(count)}
    with LLM(tp=tp, **OPTIONS) as llm:
        together = drive(llm, requests, ABORTED)
        stats = llm.scheduler.stats
        assert stats.cached_tokens > 0, "no prefix was shared"
        again = drive(llm, requests[:2])
        assert llm.scheduler.cache.available == OPTIONS["num_pages"]
        followers = [*llm.followers._running.values()]
    assert {uid: t for uid, t in together.items() if uid not in ABORTED} == {
        uid: t for uid, t in alone.items() if uid not in ABORTED
    }
    assert all(alone[uid][: len(together[uid])] == together[uid] for uid in ABORTED)
    assert any(len(together[uid]) < len(alone[uid]) for uid in ABORTED)
    assert again == {uid: alone[uid] for uid in range(2)}
    assert [child.process.exitcode for child in followers] == [0] * (tp - 1)


@pytest.mark.parametrize("speculate", [pytest.param("off", marks=pytest.mark.slow), "tree"])
def test_masks_follow_a_step_to_all_ranks(speculate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is told that its engine works while the host plans, as one on a GPU does: steps are launched first.

    A grammar forces tokens: these are drafts, whose masks follow, too.
    """
    grammar, forcing = (
        Grammar("regex", "[a-z ]{3,12}[.!]"),
        Grammar("regex", "one day the (old|young) fox met a cat[.]"),
    )
    kinds: list[dict] = [{"grammar": grammar}, {"grammar": forcing}, {"grammar": grammar, "top_k": 9}, {}]
    requests = [([300 + i, 17, 40], SamplingParams(max_tokens=16, seed=i, **kinds[i % 4])) for i in range(6)]
    llm = LLM(speculate="off", **OPTIONS)
    alone = {uid: drive(llm, [request])[0] for uid, request in enumerate(requests)}
    with LLM(tp=2, speculate=speculate, num_draft_tokens=6, **OPTIONS) as llm:
        sent: list[int] = []
        publish = llm.scheduler.bus.publish_masks
        monkeypatch.setattr(llm.scheduler.bus, "publish_masks", lambda masks: (sent.append(len(masks)), publish(masks)))
        monkeypatch.setattr(llm.scheduler, "depth", 1)
        monkeypatch.setattr(llm.scheduler.engine, "is_async", True)
        assert drive(llm, requests) == alone
        assert (llm.scheduler.stats.accepted_tokens > 5) == (speculate != "off")
    assert len(sent) >= 6 and max(sent) > 1


@pytest.mark.parametrize(
    ("tp", "depth"), [(2, 1), *(pytest.param(*c, marks=pytest.mark.slow) for c in ((2, 0), (4, 1)))]
)
def test_ranks_draft_alike(tp: int, depth: int, requests_and_tokens: tuple[Requests, dict[int, list[int]]]) -> None:
    """Each rank looks up its own drafts, and the invariant mode compares what the ranks have sampled after them."""
    requests, alone = requests_and_tokens
    text = "One day, a fox met a cat. The cat said: one day, a fox met a cat. The cat said: one day"
    with LLM(tp=tp, speculate="ngram", num_draft_tokens=5, **OPTIONS) as llm:
        llm.scheduler.depth = depth
        assert drive(llm, requests) == alone
        repeated = [(llm.get_tokenizer().encode(text), SamplingParams(max_tokens=24, temperature=0.0))]
        drive(llm, repeated)
        assert 0 < llm.scheduler.stats.accepted_tokens < llm.scheduler.stats.drafted_tokens
        assert llm.scheduler.cache.available == OPTIONS["num_pages"]


@pytest.mark.parametrize("kind", [pytest.param("draft", marks=pytest.mark.slow), "eagle3"])
def test_ranks_draft_alike_with_a_model(
    kind: str, requests_and_tokens: tuple[Requests, dict[int, list[int]]], tmp_path: Path
) -> None:
    """Each rank has a shard of the drafter: the built-in model itself, or a head of random weights."""
    requests, alone = requests_and_tokens
    folder = BUILTIN_MODEL if kind == "draft" else random_head(tmp_path)
    with LLM(tp=2, speculate=f"{kind}:{folder}", num_draft_tokens=3, **OPTIONS) as llm:
        llm.scheduler.depth = 1
        assert drive(llm, requests) == alone
        stats = llm.scheduler.stats
        assert stats.drafted_tokens > 50
        assert kind != "draft" or stats.accepted_tokens > 0.9 * stats.drafted_tokens
        assert llm.scheduler.cache.available == OPTIONS["num_pages"]


def test_ranks_draft_alike_with_a_layer_of_the_checkpoint(
    requests_and_tokens: tuple[Requests, dict[int, list[int]]], tmp_path: Path
) -> None:
    """With cached prefixes and chunks; on one rank, nothing is drafted."""
    requests, options = requests_and_tokens[0], {"model": str(write_glm(tmp_path)), "dummy_weight": True, **OPTIONS}
    with LLM(speculate="off", **options) as llm:
        plain = drive(llm, requests)
    with LLM(tp=2, speculate="mtp", num_draft_tokens=3, **options) as llm:
        llm.scheduler.depth = 1
        assert drive(llm, requests) == plain
        assert llm.scheduler.stats.drafted_tokens > 50 and llm.scheduler.stats.cached_tokens > 0
        assert llm.scheduler.cache.available == OPTIONS["num_pages"]


def random_head(folder: Path) -> Path:
    """An EAGLE-3 head for the built-in model."""
    config = json.loads((BUILTIN_MODEL / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 500}
    (folder / "config.json").write_text(json.dumps(config))
    hidden, q, kv, inner = 256, 8 * 64, 4 * 64, config["intermediate_size"]
    shapes = {"fc": (hidden, 3 * hidden), "lm_head": (500, hidden)}
    shapes |= {f"midlayer.self_attn.{n}_proj": (out, 2 * hidden) for n, out in (("q", q), ("k", kv), ("v", kv))}
    shapes |= {"midlayer.self_attn.o_proj": (hidden, q), "midlayer.mlp.down_proj": (hidden, inner)}
    shapes |= {f"midlayer.mlp.{n}_proj": (inner, hidden) for n in ("gate", "up")}
    norms = ("norm", "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm")
    weights = {f"{name}.weight": torch.ones(hidden) for name in norms}
    weights |= {f"{name}.weight": torch.randn(shape) / 16 for name, shape in shapes.items()}
    save_file(weights | {"d2t": 3 * torch.arange(500)}, folder / "model.safetensors")
    return folder


def test_lost_rank_raises_rank_error() -> None:
    with LLM(tp=2, **OPTIONS) as llm:
        (pid,) = llm.followers.pids.values()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RankError):
            llm.generate("Once", SamplingParams(temperature=0, max_tokens=50))
        with pytest.raises(InvariantError, match="make a new one"):
            llm.generate("Once", SamplingParams(temperature=0, max_tokens=5))
