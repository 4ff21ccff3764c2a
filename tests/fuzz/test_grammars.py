"""Any schema, regex or grammar: it is refused with a sentence, or can be followed."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.core.errors import RequestError
from minisgl.core.params import Grammar
from minisgl.grammar.trial import TriedCompiler
from minisgl.tokenizer.tokenize import load_tokenizer
from support.fuzz import ODD_NUMBERS, TEXTS, VALUES, fuzz

TYPES = st.sampled_from(["integer", "number", "string", "boolean", "null", "array", "object", ["integer", "null"]])
LEAF = st.fixed_dictionaries(
    {},
    optional={
        "type": TYPES,
        "minimum": ODD_NUMBERS,
        "exclusiveMaximum": ODD_NUMBERS,
        "multipleOf": ODD_NUMBERS,
        "minLength": ODD_NUMBERS,
        "maxLength": ODD_NUMBERS,
        "pattern": st.one_of(TEXTS, st.sampled_from(["^a+$", "(?=x)", "x{1000}", "[", r"\d{3}"])),
        "format": st.sampled_from(["date-time", "uuid", "email", "nothing"]),
        "enum": st.lists(VALUES, max_size=3),
        "const": VALUES,
        "$ref": st.sampled_from(["#", "#/$defs/a", "http://localhost/x"]),
        "unheardOf": VALUES,
    },
)
SCHEMAS = st.recursive(
    st.one_of(LEAF, st.booleans()),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "type": TYPES,
            "properties": st.dictionaries(TEXTS, inner, max_size=3),
            "required": st.lists(TEXTS, max_size=2),
            "additionalProperties": inner,
            "items": inner,
            "prefixItems": st.lists(inner, max_size=2),
            "minItems": ODD_NUMBERS,
            "maxItems": ODD_NUMBERS,
            "anyOf": st.lists(inner, max_size=3),
            "oneOf": st.lists(inner, max_size=2),
            "allOf": st.lists(inner, max_size=2),
            "not": inner,
            "$defs": st.fixed_dictionaries({"a": inner}),
        },
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def compiler() -> Iterator[TriedCompiler]:
    tried = TriedCompiler(BUILTIN_MODEL, vocab_size=4096, eos_ids=frozenset({0, 2}))
    yield tried
    tried.close()


def require_refusal(error: RequestError, grammar: Grammar) -> None:
    assert (error.status, error.param) == (400, grammar.param)
    assert str(error) and "\n" not in str(error)


def follow(compiler: TriedCompiler, grammar: Grammar, tokens: int = 40) -> str | None:
    """Follow the grammar over random tokens; return the text if it is complete then, None if not or refused."""
    try:
        matcher = compiler.compile(grammar, ignore_eos=True)
    except RequestError as e:
        require_refusal(e, grammar)
        return None
    rng, ids = random.Random(0), []
    for _ in range(tokens):
        if matcher.is_complete or matcher.error is not None:
            break
        allowed = np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little"))
        if not len(allowed):
            break
        ids.append(int(rng.choice(allowed)))
        matcher.advance(ids[-1])
        matcher.compute_mask(np.empty_like(matcher.mask))
    return load_tokenizer(BUILTIN_MODEL).decode(ids) if matcher.is_complete else None


@fuzz(60)
@given(SCHEMAS)
@example({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)})
@example({"enum": []})
def test_any_schema(compiler: TriedCompiler, schema: Any) -> None:
    text = follow(compiler, Grammar("json_schema", json.dumps(schema), param="schema"))
    if text is not None:
        json.loads(text)


@fuzz(30)
@given(st.one_of(TEXTS, st.text("ab(|)[]{}*+?1,\\^$.", max_size=12)))
def test_any_regex(compiler: TriedCompiler, text: str) -> None:
    follow(compiler, Grammar("regex", text, param="regex"))


@fuzz(30)
@given(st.text('start:"ab"|()*+?\n ', max_size=20).map(lambda rest: f"start: {rest}"))
def test_any_ebnf(compiler: TriedCompiler, text: str) -> None:
    follow(compiler, Grammar("ebnf", text, param="ebnf"))
