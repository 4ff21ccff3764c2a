"""Incremental text: byte-exact, stop strings, one terminal reply."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from minisgl.core.errors import ConfigError
from minisgl.core.message import (
    CONTEXT_TOKENS,
    DetokenizeMsg,
    Failure,
    Finished,
    Started,
    UserReply,
    ids_from_bytes,
    ids_to_bytes,
)
from minisgl.core.params import SamplingParams
from minisgl.core.plan import FinishReason
from minisgl.tokenizer.detokenize import DetokenizeManager
from minisgl.tokenizer.text import StopMatcher, TextDecoder, TokenBytes


def _conftest() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tokenizers_for_tests", Path(__file__).parent / "conftest.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MADE = _conftest()
BYTE_LEVEL: Tokenizer = MADE.byte_level()
BYTE_FALLBACK: Tokenizer = MADE.byte_fallback()


def step(tokens: dict[int, int], started: list[Started], finished: list[Finished]) -> DetokenizeMsg:
    return DetokenizeMsg(
        uids=np.array(list(tokens), "<i8").tobytes(),
        tokens=ids_to_bytes(list(tokens.values())),
        started=started,
        finished=finished,
    )


def stream(
    tokenizer: Tokenizer,
    ids: list[int],
    stop: tuple[str, ...] = (),
    *,
    prompt: list[int] | None = None,
    echo: bool = False,
    skip_special: bool = True,
    shown: tuple[str, ...] = (),
    end: FinishReason = FinishReason.LENGTH,
    has_text: bool = True,
) -> list[UserReply]:
    """The replies to a request that produces `ids`, as a scheduler would say it; checks the one-terminal rule."""
    manager = DetokenizeManager(tokenizer)
    params = SamplingParams(stop=stop, skip_special_tokens=skip_special, shown_tokens=shown, echo=echo)
    context = ids_to_bytes(prompt or [])
    replies: list[UserReply] = []
    for i, token in enumerate(ids):
        start = Started(uid=7, prompt_tokens=3, cached_tokens=1, sampling_params=params, prompt_ids=context)
        started = [start] if i == 0 else []
        finished = [Finished(uid=7, reason=end, has_text=has_text)] if i == len(ids) - 1 else []
        new, aborts = manager.detokenize(step({7: token}, started, finished))
        replies += new
        assert aborts == [] or (new[-1].finish_reason is FinishReason.STOP and not finished)
    assert [r.finish_reason is not None for r in replies] == [False] * (len(replies) - 1) + [True]
    shown = ids_from_bytes(b"".join(r.output_ids for r in replies)).tolist()
    assert shown == ids[: replies[-1].completion_tokens]
    assert manager.entries == 0
    return replies


def text_of(replies: list[UserReply]) -> str:
    return "".join(r.text for r in replies)


@settings(max_examples=300)
@given(st.lists(st.integers(0, 420), min_size=1, max_size=60), st.booleans())
def test_increments_of_any_tokens_add_up(ids: list[int], skip: bool) -> None:
    """Also ids that the tokenizer lacks, special tokens and broken UTF-8 anywhere."""
    text = text_of(stream(BYTE_LEVEL, ids, skip_special=skip))
    assert text == BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    assert text == DetokenizeManager(BYTE_LEVEL).decode(ids, SamplingParams(skip_special_tokens=skip), [])


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK])
def test_some_special_tokens_are_shown(tokenizer: Tokenizer) -> None:
    """Whole and in increments; no others."""
    added = tokenizer.get_added_tokens_decoder()
    special = {token.content: i for i, token in added.items() if token.special}
    assert len(special) > 1
    for shown in special:
        params = SamplingParams(shown_tokens=(shown, "no token"))
        ids = [*special.values(), *tokenizer.encode("a", add_special_tokens=False).ids, *special.values()]
        replies = stream(tokenizer, ids, shown=params.shown_tokens)
        text = DetokenizeManager(tokenizer).decode(ids, params, [])
        assert "".join(r.text for r in replies) == text
        assert {name for name in special if name in text} == {shown} and text.count(shown) == 2


@settings(max_examples=300)
@given(st.text(min_size=1, max_size=40))
def test_increments_of_any_text_add_up(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        ids = tokenizer.encode(text).ids
        if ids:
            assert text_of(stream(tokenizer, ids)) == tokenizer.decode(ids)
            assert DetokenizeManager(tokenizer).decode(ids, SamplingParams(), []) == tokenizer.decode(ids)


@settings(max_examples=300)
@given(st.text(min_size=1, max_size=40), st.integers(0, 80), st.booleans())
def test_a_completion_continues_its_prompt(text: str, cut: int, skip: bool) -> None:
    """Wherever the tokens are cut, inside a character too; the stream, the whole text and `echo` agree."""
    for tokenizer in (BYTE_LEVEL, BYTE_FALLBACK):
        bos = [tokenizer.token_to_id("<s>")] if tokenizer is BYTE_FALLBACK else []
        ids = bos + tokenizer.encode(text).ids
        prompt, completion = ids[:cut], ids[cut:]
        if not completion:
            continue
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        echoed = text_of(stream(tokenizer, completion, prompt=prompt, echo=True, skip_special=skip))
        alone = text_of(stream(tokenizer, completion, prompt=prompt[-CONTEXT_TOKENS:], skip_special=skip))
        decoder = TextDecoder(TokenBytes(tokenizer))
        shown = "".join(decoder.feed(token) for token in prompt if not (skip and token in (1, 2)))
        assert echoed == whole == shown + alone
        assert alone == DetokenizeManager(tokenizer).decode(
            completion, SamplingParams(skip_special_tokens=skip), prompt
        )


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.CTC(), decoders.BPEDecoder(), None])
def test_other_decoders_are_refused(decoder: decoders.Decoder | None) -> None:
    tokenizer = Tokenizer.from_str(BYTE_LEVEL.to_str())
    tokenizer.decoder = decoder
    with pytest.raises(ConfigError, match=rf"has the decoder {type(decoder).__name__ if decoder else None}"):
        DetokenizeManager(tokenizer)


def test_the_first_space_of_a_completion_is_kept() -> None:
    the, world = BYTE_FALLBACK.encode("the world").ids[:1], BYTE_FALLBACK.encode("world").ids
    assert text_of(stream(BYTE_FALLBACK, world, prompt=[1, *the])) == " world"
    assert text_of(stream(BYTE_FALLBACK, world, prompt=[1])) == "world"  # at the start of a text


def test_half_a_character_is_never_shown() -> None:
    text = "a🙂你好é🇩🇪👩‍👩‍👧 b"
    ids = BYTE_LEVEL.encode(text).ids
    replies = stream(BYTE_LEVEL, ids)
    assert text_of(replies) == text
    assert not any("\ufffd" in r.text for r in replies)
    assert len(replies) == len(ids)  # a token without text is a reply too


def test_an_incomplete_character_is_shown_at_the_end() -> None:
    ids = BYTE_LEVEL.encode("x🙂").ids
    assert text_of(stream(BYTE_LEVEL, ids[:-1])) == BYTE_LEVEL.decode(ids[:-1])


def test_a_long_run_of_broken_bytes_is_shown_in_time() -> None:
    ids = [3 + 0xFF] * 200
    replies = stream(BYTE_FALLBACK, ids)
    assert text_of(replies) == "\ufffd" * 200
    assert sum(bool(r.text) for r in replies) > 2


def test_a_hidden_last_token_is_counted() -> None:
    ids = [*BYTE_LEVEL.encode("hello").ids, 2]
    replies = stream(BYTE_LEVEL, ids, skip_special=False, end=FinishReason.STOP, has_text=False)
    assert text_of(replies) == "hello"
    assert replies[-1].completion_tokens == len(ids)
    assert (replies[-1].prompt_tokens, replies[-1].cached_tokens) == (3, 1)


@settings(max_examples=400)
@given(
    st.text(alphabet="ab🙂", min_size=1, max_size=30),
    st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_stop_strings_cut_the_text(text: str, stops: list[str]) -> None:
    replies = stream(BYTE_LEVEL, BYTE_LEVEL.encode(text).ids, tuple(stops))
    ends = [(text.find(s) + len(s), -len(s), s) for s in stops if s in text]
    if not ends:
        assert text_of(replies) == text
        assert replies[-1].finish_reason is FinishReason.LENGTH
    else:
        end, _, stop = min(ends)  # the first to be complete; the longest of those that end together
        assert text_of(replies) == text[: end - len(stop)]
        assert replies[-1].finish_reason is FinishReason.STOP
        assert replies[-1].stop_reason == stop


def test_a_stop_matcher_holds_back_only_partial_matches() -> None:
    matcher = StopMatcher(["abac"])
    assert matcher.feed("xxab") == ("xx", None)
    assert matcher.feed("a") == ("", None)
    assert matcher.feed("b") == ("ab", None)
    assert matcher.feed("z") == ("abz", None)
    assert matcher.flush() == ""


def test_a_stop_string_may_be_shown() -> None:
    matcher = StopMatcher(["abac", "ba"], include_stop=True)
    assert [matcher.feed("xxa"), matcher.feed("bc"), matcher.feed("b")] == [("xx", None), ("abc", None), ("", None)]
    assert matcher.feed("axx") == ("ba", "ba")


def test_a_stop_string_aborts_once_and_drops_later_tokens() -> None:
    manager = DetokenizeManager(BYTE_LEVEL)
    a, b = BYTE_LEVEL.encode("a").ids[0], BYTE_LEVEL.encode("b").ids[0]
    assert (
        manager.detokenize(
            step(
                {1: a},
                [Started(uid=1, prompt_tokens=1, cached_tokens=0, sampling_params=SamplingParams(stop=("b",)))],
                [],
            )
        )[1]
        == []
    )
    replies, aborts = manager.detokenize(step({1: b}, [], []))
    assert [r.finish_reason for r in replies] == [FinishReason.STOP]
    assert aborts == [1]
    assert manager.detokenize(step({1: a}, [], [])) == ([], [])  # it was in flight
    assert manager.detokenize(step({}, [], [Finished(uid=1, reason=FinishReason.ABORT)])) == ([], [])
    assert manager.entries == 0


def test_requests_may_end_without_tokens() -> None:
    manager = DetokenizeManager(BYTE_LEVEL)
    full = Failure(message="full", code="queue_full", status=429)
    refused = Finished(uid=5, reason=FinishReason.ERROR, failure=full)
    replies, aborts = manager.detokenize(step({}, [], [refused, Finished(uid=6, reason=FinishReason.ABORT)]))
    assert aborts == []
    assert [(r.uid, r.finish_reason, r.failure) for r in replies] == [
        (5, FinishReason.ERROR, full),
        (6, FinishReason.ABORT, None),
    ]


def test_a_stop_token_is_reported_as_the_reason() -> None:
    manager = DetokenizeManager(BYTE_LEVEL)
    finished = Finished(uid=1, reason=FinishReason.STOP, has_text=False, stop_reason=65)
    replies, _ = manager.detokenize(
        step({1: 65}, [Started(uid=1, prompt_tokens=1, cached_tokens=0, sampling_params=SamplingParams())], [finished])
    )
    assert replies[0].stop_reason == 65
    assert replies[0].text == ""


def test_a_decoding_failure_affects_one_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = DetokenizeManager(BYTE_LEVEL)
    a = BYTE_LEVEL.encode("a").ids[0]
    manager.detokenize(
        step(
            {1: a, 2: a},
            [
                Started(uid=1, prompt_tokens=1, cached_tokens=0, sampling_params=SamplingParams()),
                Started(uid=2, prompt_tokens=1, cached_tokens=0, sampling_params=SamplingParams()),
            ],
            [],
        )
    )
    monkeypatch.setattr(manager._outputs[1], "_decode", lambda token: 1 / 0)
    replies, aborts = manager.detokenize(step({1: a, 2: a}, [], []))
    assert [(r.uid, r.finish_reason, r.text) for r in replies] == [(1, FinishReason.ERROR, ""), (2, None, "a")]
    assert aborts == [1]


def test_a_request_goes_on_behind_the_tokens_of_a_lost_replica() -> None:
    """What arrives too late from the lost one is dropped, and a stopped request waits for no end from there."""
    manager = DetokenizeManager(BYTE_LEVEL)
    ids = BYTE_LEVEL.encode("Hello, world. Stop here.", add_special_tokens=False).ids
    whole = "".join(r.text for r in stream(BYTE_LEVEL, ids))
    params = SamplingParams(skip_special_tokens=True)
    begun = Started(uid=7, prompt_tokens=3, cached_tokens=1, sampling_params=params)
    stops = Started(uid=8, prompt_tokens=3, cached_tokens=1, sampling_params=SamplingParams(stop=("H",)))

    def said(msg: DetokenizeMsg, incarnation: int) -> str:
        replies, _ = manager.detokenize(msgspec.structs.replace(msg, incarnation=incarnation))
        return "".join(r.text for r in replies if r.uid == 7)

    text = said(step({7: ids[0], 8: ids[0]}, [begun, stops], []), incarnation=0)
    assert manager.entries == 2  # 8 has ended here by its stop string, but not in the scheduler
    manager.ignore(0)
    assert manager.entries == 1
    late = [Finished(uid=7, reason=FinishReason.LENGTH)]
    assert said(step({7: ids[1]}, [], late), incarnation=0) == ""
    for token in ids[1:-1]:
        text += said(step({7: token}, [], []), incarnation=3)
    text += said(step({7: ids[-1]}, [], late), incarnation=3)
    assert text == whole
    assert (manager.entries, manager.dropped) == (0, 0)
