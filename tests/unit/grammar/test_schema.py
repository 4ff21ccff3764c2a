"""JSON Schemas of pydantic 2, zod 4 and others are followed exactly, or a keyword is refused by name."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import random
import re
import uuid
from typing import Annotated, Any, Generic, Literal, NamedTuple, Optional, TypeVar

import jsonschema
import numpy as np
import pydantic
import pydantic.networks
import pytest
from pydantic import Field, TypeAdapter

from minisgl.checkpoint.hf import BUILTIN_MODEL
from minisgl.core.errors import RequestError
from minisgl.core.params import Grammar
from minisgl.grammar.compiler import GrammarCompiler, TokenMatcher
from minisgl.grammar.lookaround import plain_patterns
from minisgl.tokenizer.folder import load_tokenizer

VOCAB, EOS = 4100, 2
TOKENIZER = load_tokenizer(BUILTIN_MODEL)
COMPILER = GrammarCompiler(BUILTIN_MODEL, VOCAB, frozenset({EOS}))
MODES: tuple[Literal["validation", "serialization"], ...] = ("validation", "serialization")
DRAFTS = {"draft-7": jsonschema.Draft7Validator, "draft-4": jsonschema.Draft4Validator}
DRAFTS["openapi"] = jsonschema.Draft4Validator
CLOSING = [TOKENIZER.token_to_id(text) for text in ('"', "]", "}")]
ZOD: dict[str, Any] = json.loads((pathlib.Path(__file__).parents[2] / "support" / "zod_schemas.json").read_text())
# What no text can match, or what a grammar cannot check.
REFUSED = {
    "never": "allows nothing",
    "xorobj draft-2020-12 input": "oneOf",
    "null openapi-3.0": "nsatisfiable",
    "set": "uniqueItems at #",
}


def compiled(schema: Any) -> TokenMatcher:
    return COMPILER.compile(Grammar("json_schema", json.dumps(schema)), False)


def accepts(schema: Any, value: Any) -> bool:
    matcher = compiled(schema)
    for token in TOKENIZER.encode(json.dumps(value, ensure_ascii=False), add_special_tokens=False).ids:
        if not np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")[token]:
            return False
        matcher.advance(token)
        COMPILER.compute_masks([matcher])
    return matcher.is_complete or bool(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")[EOS])


def generate(schema: Any, rng: random.Random) -> str | None:
    """Return a random text of the schema, or None if it does not end."""
    matcher, tokens = compiled(schema), list[int]()
    for count in range(60):
        allowed = np.flatnonzero(np.unpackbits(matcher.mask.view(np.uint8), bitorder="little")).tolist()
        if matcher.is_complete or (EOS in allowed and rng.random() < 0.3):
            return str(TOKENIZER.decode(tokens))
        closing = [token for token in CLOSING if count > 12 and token in allowed]
        tokens.append((closing or [rng.choice([token for token in allowed if token != EOS])])[0])
        matcher.advance(tokens[-1])
        COMPILER.compute_masks([matcher])
        assert matcher.error is None
    return None


class Color(enum.Enum):
    RED = "red"
    TWO = 2


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Pair(NamedTuple):
    a: int
    b: str = "x"


@dataclasses.dataclass
class Point:
    x: float
    label: Optional[str] = None  # noqa: UP045


class Cat(pydantic.BaseModel):
    """A model with a default tag, which pydantic does not require."""

    kind: Literal["cat"] = "cat"
    lives: Annotated[int, Field(ge=1, le=9, description="left")] = 9


class Dog(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["dog", "puppy"]
    friends: list[Cat | Dog] = []


T = TypeVar("T")


class Box(pydantic.BaseModel, Generic[T]):
    content: T
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]


TYPES: list[Any] = [
    str, int, float, bool, bytes, None, Any, object, complex, list, dict, tuple, set, frozenset, collections.deque,
    datetime.date, datetime.datetime, datetime.time, datetime.timedelta, decimal.Decimal, uuid.UUID, pathlib.Path,
    re.Pattern, ipaddress.IPv4Address, ipaddress.IPv4Interface, ipaddress.IPv4Network, ipaddress.IPv6Address,
    ipaddress.IPv6Interface, ipaddress.IPv6Network, list[int], dict[str, int], dict[int, str], dict[uuid.UUID, int],
    dict[Literal["a", "b"], int], dict[Literal["a"], int], dict[Color, int], tuple[int, ...], tuple[int, str],
    int | str, Literal[1, "a", None, True], collections.Counter[str], collections.defaultdict[str, list[int]],
    Annotated[decimal.Decimal, Field(max_digits=5, decimal_places=2)], Annotated[decimal.Decimal, Field(ge=0)],
    Annotated[float, Field(multiple_of=0.01)], Annotated[int, Field(ge=-(2**63), le=2**63 - 1)],
    Annotated[int, Field(ge=0, lt=2**64)], Annotated[str, Field(pattern="^[a-z]+$", min_length=2, max_length=5)],
    Annotated[list[int], Field(min_length=1, max_length=2)], Color, Level, Pair, Point, Cat, Dog, Box[int],
    Box[list[Dog]], *(getattr(pydantic.types, name) for name in pydantic.types.__all__),
    *(getattr(pydantic.networks, name) for name in pydantic.networks.__all__),
]  # fmt: skip


def pydantic_schemas() -> dict[str, Any]:
    schemas: dict[str, str] = {}
    for kind in TYPES:
        for mode in MODES:
            try:
                schema = TypeAdapter(kind).json_schema(mode=mode)
            except (pydantic.errors.PydanticUserError, TypeError, ImportError):
                continue  # no type of its own, or without a schema
            name = "set" if "uniqueItems" in schema else str(getattr(kind, "__name__", kind))
            schemas.setdefault(json.dumps(schema), name)
    return {f"{name} {i}": json.loads(text) for i, (text, name) in enumerate(schemas.items())}


@pytest.mark.parametrize("source", ["zod", "pydantic"])
def test_schemas_of_libraries_are_followed_or_named(source: str) -> None:
    schemas = ZOD if source == "zod" else pydantic_schemas()
    assert len(schemas) > 80
    rng, ended = random.Random(0), 0
    for name, schema in schemas.items():
        refusal = next((why for key, why in REFUSED.items() if f"{name} ".startswith(f"{key} ")), None)
        if refusal is not None:
            with pytest.raises(RequestError, match=refusal):
                compiled(schema)
            continue
        text = generate(schema, rng)
        if text is None or "\\p{" in str(schema):  # Python has no such classes
            continue
        ended += 1
        draft = next((draft for name_of, draft in DRAFTS.items() if name_of in name), jsonschema.Draft202012Validator)
        validator = draft(schema)
        assert [e.message for e in validator.iter_errors(json.loads(text))] == [], (name, text)
    assert ended > 0.8 * len(schemas)


PETS = {
    "Cat": {"type": "object", "properties": {"kind": {"const": "cat"}}, "required": ["kind"]},
    "Dog": {"type": "object", "properties": {"kind": {"enum": ["dog", "puppy"]}}, "additionalProperties": False},
}
INTEGERS = {"type": "object", "additionalProperties": {"type": "integer"}}
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
DURATION = r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
EXACT: list[tuple[Any, list[Any], list[Any]]] = [
    # formats and other annotations
    ({"type": "string", "format": "path", "minLength": 2}, ["ab", "é/"], ["a", 1]),
    ({"type": "string", "format": "date", "pattern": "^2024"}, ["2024-02-29"], ["2023-01-01", "2024"]),
    ({"default": {"not": 3}, "examples": [{"uniqueItems": True}], "x-a": 1, "type": "null"}, [None], [1]),
    ({"$schema": "https://example.com/x", "$id": "a b", "nullable": True, "type": "integer"}, [1], [None]),
    (True, [1, {"a": None}], []),
    ({"contentEncoding": "base64", "contentSchema": {"not": {}}, "type": "string", "deprecated": True}, ["a"], [1]),
    # names that are no keywords
    (
        {"type": "object", "properties": {"not": {"type": "null"}, "$ref": {}, "format": {}}},
        [{"not": None, "$ref": 1}],
        [{"not": 1}],
    ),
    ({"enum": [{"uniqueItems": True}, {"not": 1}]}, [{"uniqueItems": True}, {"not": 1}], [{"not": 2}]),
    # names of properties
    (INTEGERS | {"propertyNames": {"type": "string"}}, [{}, {"a": 1}], [{"a": "x"}]),
    (
        INTEGERS | {"propertyNames": {"enum": ["a", "b"]}, "required": ["b"]},
        [{"b": 1}, {"a": 1, "b": 2}],
        [{}, {"b": 1, "c": 1}],
    ),
    (INTEGERS | {"propertyNames": {"const": "a"}}, [{}, {"a": 1}], [{"b": 1}]),
    (INTEGERS | {"propertyNames": {"pattern": r"^k\d+$"}}, [{}, {"k1": 1, "k22": 2}], [{"k": 1}, {"k1": "x"}]),
    (INTEGERS | {"propertyNames": {"minLength": 2, "maxLength": 3.0}}, [{"ab": 1}], [{"a": 1}, {"abcd": 1}]),
    (
        INTEGERS | {"propertyNames": {"pattern": "^a"}, "properties": {"a": {}, "b": {}}},
        [{"a": "x", "ab": 1}],
        [{"b": 1}, {"ab": ""}],
    ),
    (INTEGERS | {"propertyNames": {"$ref": "#/$defs/E"}, "$defs": {"E": {"enum": ["a", 2]}}}, [{"a": 1}], [{"b": 1}]),
    ({"type": "object", "propertyNames": False}, [{}], [{"a": 1}]),
    # numbers
    ({"type": "array", "minItems": 1.0, "maxItems": 2.0}, [[1], [1, 2]], [[], [1, 2, 3]]),
    ({"type": "string", "maxLength": 1e12}, ["abc"], [1]),
    (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        [2**62, -(2**62), 2**53 + 1],
        [2**63, -(2**63) - 1],
    ),
    ({"type": "integer", "minimum": 0, "exclusiveMaximum": 2**64}, [0, 2**62], [-1, 2**64]),
    ({"type": "integer", "exclusiveMaximum": 2**62}, [2**62 - 1024], [2**62]),
    ({"type": "integer", "maximum": 2**60 + 1}, [2**60], [2**60 + 2]),
    ({"type": "number", "minimum": -3.4e38, "maximum": 3.4e38}, [-1.5, 10**15], ["a"]),
    ({"type": "number", "multipleOf": 0.01}, [0.1, 1.23, 5], [0.001]),
    ({"minimum": 1, "exclusiveMinimum": True, "type": "integer"}, [2], [1]),
    ({"const": 2**60}, [2**60], [2**60 + 1]),
    # trivial cases
    (
        {"not": False, "uniqueItems": False, "dependentRequired": {}, "unevaluatedProperties": True, "then": {}},
        [1, {}],
        [],
    ),
    ({"anyOf": [{"not": {}}, {"type": "null"}]}, [None], [1]),
    ({"type": "object", "properties": {"a": {"not": True}}}, [{}, {"b": 1}], [{"a": 1}]),
    ({"type": "array", "uniqueItems": True, "maxItems": 1}, [[], [1]], [[1, 1]]),
    ({"items": [{"type": "null"}], "additionalItems": False, "type": "array"}, [[], [None]], [[1], [None, 1]]),
    # references and alternatives
    ({"$ref": "#/$defs/List[My é<>]", "$defs": {"List[My é<>]": {"type": "null"}}}, [None], [1]),
    ({"$ref": "#/$defs/a~1b%20", "$defs": {"a/b ": {"type": "null"}}}, [None], [1]),
    (
        {"$ref": "#/components/schemas/A", "components": {"schemas": {"A": {"type": "string", "format": "x"}}}},
        ["a"],
        [1],
    ),
    (
        {"type": "object", "properties": {"n": {"nullable": True, "allOf": [{"$ref": "#"}]}}},
        [{"n": {"n": {}}}],
        [{"n": 1}],
    ),
    (
        {
            "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
            "discriminator": {"propertyName": "kind"},
            "$defs": PETS,
        },
        [{"kind": "cat"}, {"kind": "puppy"}],
        [{"kind": "cow"}, {}],
    ),
    (
        {"oneOf": [{"$ref": "#/$defs/Cat"}, {"type": ["null", "integer"]}], "$defs": PETS},
        [None, 3, {"kind": "cat"}],
        ["a"],
    ),
    # look-ahead
    ({"type": "string", "pattern": DECIMAL}, ["1.5", "-.5", "007", "+1."], ["", "-", ".", "1.5.", "a"]),
    ({"type": "string", "pattern": DURATION}, ["P1W", "P1DT2H", "P1Y2M", "PT1,5S"], ["P", "PT", "P1DT", "P1W1D", "1D"]),
    ({"type": "string", "pattern": r"^(?=.*\d)(?=.*[a-z])(?!.*\s).{3,5}$"}, ["ab1", "é1a🙂"], ["abc", "1a", "a 1b"]),
    ({"type": "string", "pattern": "(?!a)b"}, ["ab", 'é"b\n'], ["aa", ""]),
    (INTEGERS | {"propertyNames": {"pattern": "^a(?!b)"}}, [{"a": 1, "ac": 1}], [{"ab": 1}, {"b": 1}]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), EXACT, ids=str)
def test_schemas_allow_exactly_what_is_valid(schema: Any, good: list[Any], bad: list[Any]) -> None:
    assert [value for value in good + bad if accepts(schema, value)] == good


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        (False, "the schema allows nothing"),
        (
            {"properties": {"a": {"items": {"uniqueItems": True}}}},
            "uniqueItems at #/properties/a/items is not supported",
        ),
        ({"x-guidance": {"lenient": True}, "contains": {}}, "contains at # is not supported"),
        ({"anyOf": [{}, {"not": {"type": "null"}}]}, "not at #/anyOf/1 is not supported"),
        ({"$defs": {"a": {"if": {"type": "null"}, "then": False}}}, r"if at #/\$defs/a is not supported"),
        ({"dependentRequired": {"a": ["b"]}}, "dependentRequired at #"),
        ({"unevaluatedProperties": False}, "unevaluatedProperties at #"),
        ({"$dynamicRef": "#a"}, r"\$dynamicRef at #"),
        ({"propertyNames": {"pattern": "a", "minLength": 2}}, "propertyNames at #"),
        ({"items": {"minItems": 1.5}}, "minItems at #/items must be a non-negative integer"),
        ({"minLength": 10**12}, "minLength at # cannot be reached"),
        ({"type": "number", "minimum": 1e20}, "minimum at # is 1e.20, which cannot be held exactly"),
        ({"type": "integer", "maximum": -(2**63)}, "maximum at # is -9223372036854775808, which"),
        ({"enum": ["a", {"b": [2**53 + 1]}]}, "enum at # has 9007199254740993"),
        ({"const": 1e300}, "const at # has 1e.300"),
        ({"properties": {"a": 5}}, "#/properties/a must be a schema, not 5"),
        ({"properties": []}, "properties at # has a value of the wrong type"),
        ({"pattern": "(?<!a)b"}, "pattern at # is not supported: .*[(][?]<!a"),
        ({"pattern": "^((?!ab).)*$"}, "pattern at # is not supported: a look-ahead or anchor that repeats"),
        ({"pattern": r"^(?!.*\bfoo)a"}, "pattern at # is not supported"),
        ({"pattern": "^(?!.{0,120}a)b"}, "more than 100 states"),
        ({"pattern": "(?=a)^"}, "pattern at # is not supported"),
        ({"pattern": "a(?=b"}, "a parenthesis is not closed"),
    ],
    ids=str,
)
def test_the_rest_is_refused_with_keyword_and_path(schema: Any, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        compiled(schema)


@pytest.mark.parametrize(
    "pattern",
    [
        DECIMAL,
        DURATION,
        r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$",
        r"^(?=.{1,253}\.?$)[a-z](?:[a-z-]{0,61}[a-z])?(?:\.[a-z]{1,63})*\.?$",
        "^(?!admin$|root$)[a-z]+$",
        "foo(?!bar)",
        "^(?!(?:abc|abd))[^c]*$|^c(?=a)",
        r"^(?:(?=a)\w|b){1,2}$",
        r"^\$?(?!0\d)\d{1,3}(,\d{3})*(\.\d\d)?$",
        r"^(?!.*[\s\D]{2})[^\W_]+[\S]$",
        "^(?:a(?=b)|b(?=a|$))?(?:a|b)$",
    ],
)
def test_patterns_without_look_ahead_match_the_same_texts(pattern: str) -> None:
    """All short texts of the characters in the pattern, and random ones."""
    rng = random.Random(0)
    letters = sorted({*re.sub(r"\\.|[][(){}?*+|^$]", "", pattern), *"ab0. "})
    plain = [
        re.compile(re.sub(r"\\u\{(\w+)\}", lambda u: rf"\U{int(u[1], 16):08x}", p)) for p in plain_patterns(pattern)
    ]
    texts = ["", *letters, *(a + b for a in letters for b in letters)]
    texts += ["".join(rng.choices(letters, k=rng.randint(3, 8))) for _ in range(3000)]
    expected = re.compile(pattern, re.ASCII)
    for text in texts:
        assert all(p.search(text) for p in plain) == (expected.search(text) is not None), text
