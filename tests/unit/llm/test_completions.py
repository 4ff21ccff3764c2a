"""Decoding all tokens at the end gives the same text as incremental decoding, byte for byte."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from tokenizers import Tokenizer

from minisgl.core.errors import RequestError
from minisgl.core.message import DetokenizeMsg, Failure, Finished, Started, UserMsg, ids_to_bytes
from minisgl.core.params import SamplingParams
from minisgl.core.plan import FinishReason
from minisgl.llm.completions import Completion, Completions, Listener, Piece, Request
from minisgl.tokenizer.detokenize import DetokenizeManager


def _conftest() -> ModuleType:
    path = Path(__file__).parents[1] / "tokenizer" / "conftest.py"
    spec = importlib.util.spec_from_file_location("tokenizers_for_tests", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MADE = _conftest()


def messages(rng: random.Random, users: list[UserMsg], vocab: int) -> list[DetokenizeMsg]:
    """What a scheduler may say: requests begin and end at different steps, ids that no token has among the tokens."""
    spans = {u.uid: (start := rng.randrange(20), start + rng.randrange(1, 50)) for u in users}
    said = []
    for step in range(max(stop for _, stop in spans.values())):
        now = [u for u in users if spans[u.uid][0] <= step < spans[u.uid][1]]
        rng.shuffle(now)
        started = [
            Started(
                uid=u.uid,
                prompt_tokens=3,
                cached_tokens=u.uid % 3,
                sampling_params=u.sampling_params,
                prompt_ids=u.input_ids,
            )
            for u in now
            if spans[u.uid][0] == step
        ]
        ends = [u.uid for u in now if spans[u.uid][1] == step + 1]
        finished = [
            Finished(uid=uid, reason=FinishReason.LENGTH)
            if rng.random() < 0.5
            else Finished(uid=uid, reason=FinishReason.STOP, has_text=False)
            for uid in ends
        ]
        uids = np.array([u.uid for u in now], "<i8").tobytes()
        said.append(
            DetokenizeMsg(
                uids=uids,
                tokens=ids_to_bytes([rng.randrange(vocab + 5) for _ in now]),
                started=started,
                finished=finished,
            )
        )
    return said


def completions_of(
    tokenizer: Tokenizer, users: list[UserMsg], said: list[DetokenizeMsg], *, streams: bool
) -> list[Completion]:
    heard: dict[int, str] = {}

    def listener(index: int) -> Listener:
        def listen(piece: Piece) -> None:
            heard[index] = heard.get(index, "") + piece.text

        return listen

    detokenizer = DetokenizeManager(tokenizer)
    completions = Completions(detokenizer)
    done = [completions.add(Request([u]), listener(i) if streams else None) for i, u in enumerate(users)]
    assert completions._streams is streams
    for msg in said:
        assert completions.pending > 0
        assert completions.process(msg) == []
    assert completions.pending == 0 and detokenizer.entries == 0
    if streams:
        assert [heard.get(i, "") for i in range(len(users))] == [c.text for c in done]
    return done


@pytest.mark.parametrize("tokenizer", [MADE.byte_level(), MADE.byte_fallback()], ids=["byte-level", "byte-fallback"])
@pytest.mark.parametrize("seed", range(15))
def test_decoding_at_the_end_equals_incremental_decoding(tokenizer: Tokenizer, seed: int) -> None:
    rng = random.Random(seed)
    users = [
        UserMsg(
            uid=70 + i,
            input_ids=ids_to_bytes([rng.randrange(tokenizer.get_vocab_size()) for _ in range(rng.randrange(1, 9))]),
            sampling_params=SamplingParams(skip_special_tokens=rng.random() < 0.5),
        )
        for i in range(rng.randrange(1, 12))
    ]
    said = messages(rng, users, tokenizer.get_vocab_size())
    at_end = completions_of(tokenizer, users, said, streams=False)
    assert at_end == completions_of(tokenizer, users, said, streams=True)
    assert any(c.text for c in at_end)


def test_a_stop_string_needs_incremental_decoding() -> None:
    detokenizer = DetokenizeManager(MADE.byte_level())
    user = UserMsg(uid=1, input_ids=ids_to_bytes([1]), sampling_params=SamplingParams(stop=("fox",)))
    completions = Completions(detokenizer)
    completions.add(Request([user]))
    assert completions._streams


def test_a_failed_request_fails_the_call() -> None:
    for params in (SamplingParams(), SamplingParams(stop=("fox",))):
        completions = Completions(DetokenizeManager(MADE.byte_level()))
        completions.add(Request([UserMsg(uid=1, input_ids=ids_to_bytes([1]), sampling_params=params)]))
        with pytest.raises(RequestError, match="NaN") as failed:
            completions.process(
                DetokenizeMsg(
                    uids=b"",
                    tokens=b"",
                    started=[],
                    finished=[Finished(uid=1, reason=FinishReason.ERROR, failure=Failure(message="NaN"))],
                )
            )
        assert failed.value.status == 500
