"""Matchers over the built-in tokenizer: allowed tokens, complete texts, refused grammars."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from minisgl.api.parsers.tools import TOOL_FORMS
from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.errors import RequestError
from minisgl.grammar.compiler import GrammarCompiler, TokenMatcher
from minisgl.params import Grammar, GrammarKind, Limits, SamplingParams, validate_sampling
from minisgl.tokenizer.folder import load_tokenizer

VOCAB, EOS = 4100, 2  # four tokens that the tokenizer does not have: models pad their vocabulary
TOKENIZER = load_tokenizer(BUILTIN_MODEL)
COMPILER = GrammarCompiler(BUILTIN_MODEL, VOCAB, frozenset({EOS}))
SPECIAL = [0, 1, 2]


def compiled(kind: GrammarKind, text: str, *, ignore_eos: bool = False, after: str = "") -> TokenMatcher:
    return COMPILER.compile(Grammar(kind, text, after=after), ignore_eos)


def advance(matcher: TokenMatcher, token: int) -> None:
    matcher.advance(token)
    COMPILER.compute_masks([matcher])
    if matcher.error is not None:
        raise matcher.error


def allowed(matcher: TokenMatcher) -> list[int]:
    bits = np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")
    assert len(matcher.mask) == -(-VOCAB // 32)
    return np.flatnonzero(bits).tolist()


def accepts(matcher: TokenMatcher, text: str, tokenizer: Tokenizer = TOKENIZER) -> bool:
    """Whether `text` is whole; each of its tokens must be allowed in its turn."""
    for token in tokenizer.encode(text, add_special_tokens=False).ids:
        if token not in allowed(matcher):
            return False
        advance(matcher, token)
    return EOS in allowed(matcher) or matcher.is_complete


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_schema", SCHEMA, '{"name": "Anna <|im_end> grün 🙂", "age": -12}', '{"name": "Anna", "age": "12"}'),
        ("json_schema", SCHEMA, '{"name": "", "age": 0}', '{"name": "Anna"}'),
        ("json_schema", SCHEMA, '{"name": "x", "age": 7}', '{"name":  "x", "age": 7}'),
        ("json_schema", "{}", "[null, 1.5]", "[nul]"),
        ("regex", "[0-9]{3}-[a-f]+", "123-cafe", "123-cafx"),
        ("choice", '["red", "gr\\u00fcn", "a\\"b\\\\n"]', "grün", "green"),
        ("choice", '["red", "a\\"b\\\\n"]', 'a"b\\n', "a"),
        ("ebnf", 'root ::= "a" root | "b" [x-z]{2}', "aabxz", "aab"),
        ("ebnf", 'start: "<" NAME ">"\nNAME: /[a-z]+/', "<ab>", "<AB>"),
    ],
)
def test_matchers_allow_valid_text_only(kind: GrammarKind, text: str, good: str, bad: str) -> None:
    assert accepts(compiled(kind, text), good)
    assert not accepts(compiled(kind, text), bad)


def test_special_and_unknown_tokens_are_never_allowed() -> None:
    matcher = compiled("json_schema", '{"type": "string"}')
    advance(matcher, TOKENIZER.encode('"').ids[0])
    assert not set(allowed(matcher)) & {*SPECIAL, *range(4096, VOCAB)}
    assert len(allowed(matcher)) > 3000


def test_eos_is_allowed_only_where_the_text_may_end() -> None:
    matcher = compiled("regex", "a+b?")
    assert EOS not in allowed(matcher)
    advance(matcher, TOKENIZER.encode("a").ids[0])
    assert EOS in allowed(matcher) and not matcher.is_complete
    advance(matcher, TOKENIZER.encode("b").ids[0])
    assert allowed(matcher) == [EOS] and matcher.is_complete
    never = compiled("regex", "a+b?", ignore_eos=True)
    advance(never, TOKENIZER.encode("a").ids[0])
    assert EOS not in allowed(never)


def test_a_grammar_may_begin_behind_the_reasoning() -> None:
    for kind, text, good in (("json_schema", SCHEMA, '{"name": "x", "age": 7}'), ("regex", "[0-9]+", "12")):
        free = "Let me see: <think> it </thinks> or so.\n</think>"
        assert accepts(compiled(kind, text, after="</think>"), free + good)  # type: ignore[arg-type]
        assert not accepts(compiled(kind, text, after="</think>"), free + "x")  # type: ignore[arg-type]
        assert not accepts(compiled(kind, text, after="</think>"), good)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("regex", "[a", "unclosed"),
        ("regex", "", "empty text"),
        ("ebnf", "root ::= ((((", "Expected"),
        ("ebnf", "start: unknown", "unknown"),
        ("json_schema", "{", "truncated"),
        ("json_schema", '{"type": "objekt"}', "objekt"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"$ref": "https://example.com/schema"}', "not present"),
        ("json_schema", '{"enum": []}', "nsatisfiable"),
        ("json_schema", '{"type":"array","items":' * 5000 + "{}" + "}" * 5000, "recursion"),
    ],
)
def test_invalid_grammars_are_refused_with_the_reason(kind: GrammarKind, text: str, why: str) -> None:
    with pytest.raises(RequestError, match=why) as e:
        compiled(kind, text)
    assert e.value.status == 400 and e.value.param == "grammar" and len(e.value.message) < 500


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("ebnf", "\n" * 16_000),
        ("ebnf", "root ::= " + "(" * 10_000),
        ("ebnf", "root ::= " + '"a" ' * 4000),
        ("ebnf", "root::=" + " " * 16_000 + "x"),
        ("ebnf", "#" * 16_000),
        ("ebnf", ("a ::= b\n") * 2000),
        ("ebnf", "root ::= " + "[" * 16_000),
        ("ebnf", "start: " + "(" * 8000 + '"a"' + ")" * 8000),
        ("regex", "((a{1,1000}){1,1000}){1,1000}"),
        ("regex", "(a|b|ab)*" * 1800),
        ("json_schema", json.dumps({"pattern": "(a|b|ab)*" * 10_000})),
        ("regex", "(x+x+)+y"),
        ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(8000)]})),
        (
            "json_schema",
            json.dumps({"type": "object", "properties": {f"p{i}": {"pattern": "^(a|b){1,50}$"} for i in range(2000)}}),
        ),
    ],
)
def test_expensive_grammars_compile_within_bounds(kind: GrammarKind, text: str) -> None:
    """As long as is allowed, and as bad as we could think of."""
    validate_sampling(SamplingParams(grammar=Grammar(kind, text)), Limits(max_model_len=9, vocab_size=9))
    started = time.process_time()
    with contextlib.suppress(RequestError):
        compiled(kind, text)
    assert time.process_time() - started < 6  # the longest takes 1.5 s


FUNCTIONS: list[dict[str, Any]] = [
    {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"$ref": "#/$defs/City"}},
     "required": ["city"], "additionalProperties": False, "$defs": {"City": {"type": "string"}}}},
    {"name": 'odd "name"'},
]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "one", "two"),
    [
        (
            "hermes",
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
            '\n<tool_call>\n{"name": "odd \\"name\\"", "arguments": {}}\n</tool_call>',
        ),
        (
            "llama3",
            '{"name": "get_weather", "parameters": {"city": "Paris"}}',
            '; {"name": "odd \\"name\\"", "parameters": {"a": [1]}}',
        ),
    ],
)
def test_tool_calls_follow_their_form(form: str, one: str, two: str) -> None:
    for is_single in (False, True):
        grammar = TOOL_FORMS[form].grammar(FUNCTIONS, is_single)

        def takes(text: str, grammar: Grammar = grammar) -> bool:
            return accepts(COMPILER.compile(grammar, False), text)

        assert takes(one)
        assert takes(one + two) != is_single
        assert not takes("Hello")
        assert not takes(one.replace("Paris", "Paris\n"))
        assert not takes(one.replace("city", "town"))
        assert not takes(one.replace("get_weather", "get_time"))


def test_tool_calls_behind_a_special_token(tmp_path: Any) -> None:
    tokenizer = load_tokenizer(BUILTIN_MODEL)
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    compiler = GrammarCompiler(tmp_path, VOCAB, frozenset({EOS}))
    matcher = compiler.compile(TOOL_FORMS["mistral"].grammar(FUNCTIONS, False), False)
    assert allowed(matcher) == [tokenizer.token_to_id("[TOOL_CALLS]")]
    calls = '{"name": "get_weather", "arguments": {"city": "Paris"}}, {"name": "odd \\"name\\"", "arguments": {}}'
    assert accepts(matcher, f"[TOOL_CALLS][{calls}]", tokenizer)


def test_a_grammar_that_becomes_too_large_is_refused_with_its_field() -> None:
    matcher = compiled("regex", "((a{1000}){1000}){1000}")

    def follow() -> None:
        for _ in range(1000):
            advance(matcher, allowed(matcher)[-1])

    with pytest.raises(RequestError, match=r"cannot be followed|masks take") as e:
        follow()
    assert (e.value.param, e.value.code) == ("grammar", "invalid_grammar")


def test_masks_in_parallel_equal_masks_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By threads, where there are cores for them; one that cannot be followed costs no other."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    texts = ["[a-z ]{20}", "a+b?", "[0-9]{2,5}", "(ab)*c", "[^x]+"]
    alone, together = ([compiled("regex", text) for text in texts] for _ in range(2))
    one = compiled("regex", "[a-z ]{20}")
    COMPILER.compute_masks([one])
    assert "_executor" not in COMPILER.__dict__, "a trial, which has one matcher, has no memory for threads"
    monkeypatch.setitem(COMPILER.__dict__, "_executor", GrammarCompiler._executor.func(COMPILER))
    for _ in range(5):
        for a, b in zip(alone, together, strict=True):
            token = allowed(a)[len(allowed(a)) // 2]
            b.advance(token)
            advance(a, token)
        COMPILER.compute_masks(together)
        assert [m.error for m in together] == [None] * len(texts)
        assert [allowed(m) for m in together] == [allowed(m) for m in alone]
    together[1].advance(TOKENIZER.encode("z").ids[0])
    COMPILER.compute_masks(together)
    errors = [m.error for m in together]
    assert [error is not None for error in errors] == [False, True, False, False, False]
    assert "cannot be followed" in str(errors[1])


@pytest.mark.parametrize("keyword", ["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf"])
@pytest.mark.parametrize("value", [1e30, -(2**63), 2**53 + 1])
@pytest.mark.parametrize("kind", ["integer", "number"])
def test_numbers_that_cannot_be_held_exactly_are_refused_by_keyword(keyword: str, value: float, kind: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": kind, keyword: value}}}
    with pytest.raises(RequestError, match=f"{keyword} .* cannot be held exactly"):
        compiled("json_schema", json.dumps(schema))


def test_nesting_is_bounded() -> None:
    compiled("json_schema", '{"items":' * 99 + '{"type": "integer"}' + "}" * 99)
    with pytest.raises(RequestError, match="more than 200 levels"):
        compiled("json_schema", '{"items":' * 300 + "{}" + "}" * 300)


@pytest.mark.parametrize("text", ['{"name": "Bob", "age": 31}', '{"name": "", "age": -7}'])
def test_masks_along_drafts_are_those_of_sampled_tokens(text: str) -> None:
    tokens = np.array(TOKENIZER.encode(text, add_special_tokens=False).ids, np.int32)
    plain, drafted = compiled("json_schema", SCHEMA), compiled("json_schema", SCHEMA)
    for start in range(0, len(tokens), 5):
        drafts = tokens[start : start + 5]
        assert drafted.count_allowed(np.append(drafts, EOS)) == len(drafts)
        masks = drafted.along(drafts)
        for token, mask in zip(drafts.tolist(), masks, strict=True):
            advance(plain, token)
            drafted.advance(token)
            assert not drafted.is_stale
            assert (mask == plain.mask).all() and (drafted.mask == plain.mask).all()
            assert drafted.is_complete == plain.is_complete
    assert plain.is_complete


def test_a_draft_that_is_not_sampled_leaves_no_trace() -> None:
    matcher = compiled("json_schema", SCHEMA)
    forced = matcher.forced()
    assert TOKENIZER.decode(forced.tolist()) == '{"name":'
    wrong = np.array([*forced[:1], 5, 6], np.int32)
    assert matcher.count_allowed(wrong) == 1 and len(matcher.along(wrong)) == 3
    for token in forced.tolist():
        advance(matcher, token)
    assert matcher.error is None and not len(matcher.forced())
    matcher.along(np.array(TOKENIZER.encode(' "a', add_special_tokens=False).ids, np.int32))
    assert accepts(matcher, ' "b", "age": 3}')
