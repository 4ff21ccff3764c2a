"""The built-in model's answers under fifty JSON schemas are valid, with overlap and in one batch."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from minisgl import LLM, Completion, Grammar, SamplingParams
from minisgl.core.plan import FinishReason
from support.schemas import SCHEMAS

pytestmark = pytest.mark.usefixtures("fixed_costs")

QUICK = ("enum with odd letters", "oneOf by a constant", "definitions", "recursive list", "invoice", "map", "tuple")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(threads=1, num_pages=2000, overlap=True)


def answers(llm: LLM, names: list[str], **fields: Any) -> list[Completion]:
    params = [
        # The penalty keeps this small model from writing digits, or a tree, for ever.
        SamplingParams(
            max_tokens=600,
            frequency_penalty=1.0,
            grammar=Grammar("json_schema", json.dumps(SCHEMAS[name][1])),
            **fields,
        )
        for name in names
    ]
    return llm.chat([[{"role": "user", "content": SCHEMAS[name][0]}] for name in names], params)


def check(names: list[str], done: list[Completion]) -> None:
    for name, one in zip(names, done, strict=True):
        assert one.finish_reason is FinishReason.STOP, (name, one.text)
        validator = jsonschema.Draft202012Validator(SCHEMAS[name][1], format_checker=jsonschema.FormatChecker())
        assert [e.message for e in validator.iter_errors(json.loads(one.text))] == [], (name, one.text)


def test_the_schemas_are_valid_and_fifty() -> None:
    assert len(SCHEMAS) == 50
    for _, schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_answers_are_valid_under_some_schemas(llm: LLM) -> None:
    names = list(QUICK)
    check(names, answers(llm, names, temperature=0))


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{"temperature": 0}, *({"temperature": 1.0, "seed": s} for s in range(6))])
def test_answers_are_valid_under_all_schemas(llm: LLM, fields: dict[str, Any]) -> None:
    names = list(SCHEMAS)
    check(names, answers(llm, names, **fields))
