"""Rewrites JSON Schemas (2020-12, and what earlier drafts wrote) into what llguidance compiles exactly.

A keyword that is always true is left out, one that others can express is replaced, and the rest is refused with its
path. Annotations are left out: among them are formats that llguidance does not know (2020-12, section 7).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nextafter
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, unquote

from minisgl.grammar.lookaround import plain_patterns

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_DEPTH: Final = 200  # levels of schemas
MAX_EXACT: Final = 2**53  # up to which llguidance, which computes with doubles, compares numbers exactly
MAX_INTEGER: Final = 2**63 - 1024  # the same for integers that are doubles: the largest one in 64 bits
MAX_COUNT: Final = 2**31  # no answer is as long
FORMATS: Final = frozenset(
    ["date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"]
)
ALWAYS: Final[tuple[Any, ...]] = (True, {})

Schema = dict[str, Any]


def exact_schema(schema: Any) -> Schema:
    """Return a schema with the same valid values, in fewer keywords. Raises `ValueError` with a keyword and its path.

    Bounds beyond `MAX_EXACT`, for integers `MAX_INTEGER`, become these: the values are fewer there, and valid.
    """
    exact = _rewrite(schema, schema, "#", 0)
    if exact is False:
        raise ValueError("the schema allows nothing")
    return {} if exact is True else exact


def _rewrite(schema: Any, root: Any, path: str, depth: int) -> Any:
    """Return what `exact_schema` does, or a boolean, for the schema at `path` in `root`."""
    if depth > MAX_DEPTH:
        raise ValueError(f"the schema is nested more than {MAX_DEPTH} levels deep")
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise ValueError(f"{path} must be a schema, not {str(schema)[:40]}")
    exact: Schema = {}
    for name, value in schema.items():
        if (rewrite := _KEYWORDS.get(name)) is not None:
            keyword = _Keyword(name, value, schema, root, path, depth)
            try:
                part = rewrite(keyword)
                exact |= part | ({"allOf": exact.get("allOf", []) + part["allOf"]} if "allOf" in part else {})
            except (AttributeError, TypeError) as e:
                raise keyword.error("has a value of the wrong type") from e
    return exact["allOf"][0] if exact.keys() == {"allOf"} and len(exact["allOf"]) == 1 else exact


@dataclass(frozen=True, slots=True)
class _Keyword:
    """A keyword in `schema`, which is at `path` in `root`. Each method but the first ones returns what replaces it."""

    name: str
    value: Any
    schema: Schema
    root: Any
    path: str
    depth: int

    def error(self, why: str) -> ValueError:
        return ValueError(f"{self.name} at {self.path} {why}")

    def child(self, schema: Any, *names: object) -> Any:
        path = "/".join(map(str, (self.path, *(names or [self.name]))))
        return _rewrite(schema, self.root, path, self.depth + 1)

    def keep(self) -> Schema:
        return {self.name: self.value}

    def uri(self) -> Schema:
        return {self.name: quote(str(self.value), safe="%#/:?=&;@,+$!*()~'")}

    def schemas(self) -> Schema:
        if isinstance(self.value, list):
            return {self.name: [self.child(one, self.name, i) for i, one in enumerate(self.value)]}
        return {self.name: self.child(self.value)}

    def schemas_by_name(self) -> Schema:
        return {self.name: {name: self.child(one, self.name, name) for name, one in self.value.items()}}

    def one_of(self) -> Schema:
        """Become `anyOf` if no two options hold together, by type or by a property such as OpenAPI's discriminator."""
        discriminator = self.schema.get("discriminator")
        tag = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        facts = [self._facts(option, tag) for option in self.value]
        for name in set.intersection(*map(set, facts)) if facts else ():
            if sum(len(fact[name]) for fact in facts) == len(set.union(*(fact[name] for fact in facts))):
                any_of = {"anyOf": self.schemas()[self.name]}
                if name and any(name not in self._resolve(option).get("required", ()) for option in self.value):
                    return {"allOf": [any_of, {"required": [name]}]}
                return {"allOf": [any_of]} if "anyOf" in self.schema else any_of
        return self.schemas()

    def _facts(self, option: Any, tag: str | None) -> dict[str, set[str]]:
        """Return the types of values of an option (""), and the texts that a required property may have."""
        option = self._resolve(option)
        types = option.get("type", [])
        types = {"number" if t == "integer" else str(t) for t in (types if isinstance(types, list) else [types])}
        facts = {"": types} if types else {}
        properties = option.get("properties")
        if types == {"object"} and isinstance(properties, dict):
            for name in {tag, *option.get("required", ())} & properties.keys():
                value = self._resolve(properties[name])
                texts = value.get("enum", [value["const"]] if "const" in value else [])
                if texts and all(isinstance(text, str) for text in texts):
                    facts[name] = set(texts)
        return facts

    def _resolve(self, schema: Any) -> Schema:
        for _ in range(8):
            if not isinstance(schema, dict) or not str(ref := schema.get("$ref", "")).startswith("#/"):
                break
            schema = self.root
            for name in ref[2:].split("/"):
                name = unquote(name).replace("~1", "/").replace("~0", "~")
                schema = schema.get(name) if isinstance(schema, dict) else None
        return schema if isinstance(schema, dict) else {}

    def data(self) -> Schema:
        parts = [self.value]
        while parts:
            match part := parts.pop():
                case dict() | list():
                    parts += part.values() if isinstance(part, dict) else part
                case int() | float() if abs(part) > MAX_INTEGER or (isinstance(part, int) and int(float(part)) != part):
                    raise self.error(f"has {part}, which cannot be held exactly")
        return self.keep()

    def bound(self) -> Schema:
        value, is_integer = self.value, self.schema.get("type") == "integer"
        if not isinstance(value, int | float) or abs(value) <= MAX_EXACT:
            return self.keep()
        sign = 1 if self.name.endswith("aximum") else -1
        if value * sign < 0:
            raise self.error(f"is {value}, which cannot be held exactly: its magnitude is above 2**53")
        nearest = float(min(abs(value), MAX_INTEGER if is_integer else MAX_EXACT))
        if nearest > abs(value) or (nearest > MAX_EXACT and self.name.startswith("exclusive")):
            nearest = nextafter(nearest, 0)
        return {self.name: sign * int(nearest)}

    def count(self) -> Schema:
        if not isinstance(self.value, int | float) or self.value < 0 or self.value % 1:
            raise self.error(f"must be a non-negative integer, not {str(self.value)[:40]}")
        if self.value >= MAX_COUNT and self.name.startswith("min"):
            raise self.error("cannot be reached")
        return {self.name: int(self.value)} if self.value < MAX_COUNT else {}

    def format(self) -> Schema:
        return self.keep() if self.value in FORMATS else {}

    def pattern(self) -> Schema:
        try:
            patterns = plain_patterns(self.value)
        except ValueError as e:
            raise self.error(f"is not supported: {e}") from e
        return {"pattern": patterns[0]} if len(patterns) == 1 else {"allOf": [{"pattern": one} for one in patterns]}

    def property_names(self) -> Schema:
        names = self.child(self._resolve(self.value) if isinstance(self.value, dict) else self.value)
        if isinstance(names, bool):
            names = {} if names else {"enum": []}
        names = {k: v for k, v in names.items() if k != "format" and (k, v) != ("type", "string")}
        match list(names.items()):
            case []:
                return {}
            case [("enum" | "const", texts)]:
                texts = texts if isinstance(texts, list) else [texts]
                allowed: Schema = {"properties": {text: True for text in texts if isinstance(text, str)}}
            case [("pattern", pattern)]:
                allowed = {"patternProperties": {pattern: True}}
            case _ if names.keys() <= {"minLength", "maxLength"}:
                lengths = f"{names.get('minLength', 0)},{names.get('maxLength', '')}"
                allowed = {"patternProperties": {f"^(?s:.{{{lengths}}})$": True}}
            case _:
                raise self.error("is not supported")
        return {"allOf": [allowed | {"additionalProperties": False}]}

    def negation(self) -> Schema:
        negated = self.child(self.value)
        if negated not in (False, *ALWAYS):
            raise self.error("is not supported")
        return {"allOf": [negated is False]}

    def unless_trivial(self) -> Schema:
        if self.value in _TRIVIAL[self.name] or (self.name == "uniqueItems" and self.schema.get("maxItems") in (0, 1)):
            return {}
        raise self.error("is not supported")


_TRIVIAL: Final[dict[str, tuple[Any, ...]]] = {
    "uniqueItems": (False,),
    **dict.fromkeys(["unevaluatedItems", "unevaluatedProperties"], ALWAYS),
    **dict.fromkeys(["dependencies", "dependentRequired", "dependentSchemas"], ({},)),
    **dict.fromkeys(["$dynamicRef", "$recursiveRef", "contains", "if"], ()),
}
_METHODS: Final[dict[Callable[[_Keyword], Schema], str]] = {
    _Keyword.keep: "multipleOf required type",
    _Keyword.uri: "$anchor $id $ref",
    _Keyword.schemas: "additionalItems additionalProperties allOf anyOf components items prefixItems",
    _Keyword.schemas_by_name: "$defs definitions patternProperties properties schemas",
    _Keyword.one_of: "oneOf",
    _Keyword.data: "const enum",
    _Keyword.bound: "minimum maximum exclusiveMinimum exclusiveMaximum",
    _Keyword.count: "minItems maxItems minLength maxLength minProperties maxProperties",
    _Keyword.format: "format",
    _Keyword.pattern: "pattern",
    _Keyword.property_names: "propertyNames",
    _Keyword.negation: "not",
    _Keyword.unless_trivial: " ".join(_TRIVIAL),
}
_KEYWORDS: Final = {name: method for method, names in _METHODS.items() for name in names.split()}
