"""docs/api.md has a row for every route and request field; compare its tables with the code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from starlette.routing import Route

from e2e.test_fields import PLACES
from minisgl.api.app import create_app, served_routes
from minisgl.api.requests import SamplingDefaults, ServedModel
from minisgl.core.params import Limits
from minisgl.settings.options import ServerArgs

MODEL = ServedModel("m", Limits(max_model_len=100, vocab_size=50), SamplingDefaults())
TESTS = Path(__file__).parents[2]
PAGE = TESTS.parent / "docs" / "api.md"
ROW = re.compile(r"^\| (`.*?) \| (.*) \| (.*) \|$")
CODE = re.compile(r"`([^`]*)`")
GENERIC = {"e2e/test_fields"}  # its fields are the code's


def rows() -> Iterator[tuple[str, list[str], str, list[str]]]:
    """(heading, the names in the first column, what we do, the tests) of every row of every table with tests."""
    heading = ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        elif (row := ROW.match(line)) is not None:
            yield heading, CODE.findall(row[1]), row[2], CODE.findall(row[3])


def is_named(kind: type) -> bool:
    """Whether a type has rows of its own."""
    return kind is not msgspec.Struct and not kind.__name__.startswith("_")


def kinds() -> dict[str, type[msgspec.Struct]]:
    """The types of all request bodies by name, with their bases and the types inside them."""
    found: dict[str, type[msgspec.Struct]] = {}

    def add(kind: Any) -> None:
        if isinstance(kind, msgspec.inspect.StructType):
            own = [c for c in kind.cls.__mro__ if issubclass(c, msgspec.Struct) and is_named(c)]
            found.update({c.__name__: c for c in own})
            for field in kind.fields:
                add(field.type)
        elif isinstance(kind, msgspec.inspect.UnionType):
            for member in kind.types:
                add(member)
        elif isinstance(kind, msgspec.inspect.ListType):
            add(kind.item_type)

    for endpoint in served_routes(ServerArgs(), MODEL).endpoints:
        if endpoint.request is not None:
            add(msgspec.inspect.type_info(endpoint.request))
    return found


def own_fields(kind: type[msgspec.Struct]) -> list[str]:
    inherited = {f for base in kind.__bases__ if is_named(base) for f in getattr(base, "__struct_fields__", ())}
    return [f for f in kind.__struct_fields__ if f not in inherited]


KINDS = kinds()
FIELDS = [
    (kind.__name__, field)
    for heading, (field, *_), *_ in rows()
    if (kind := KINDS.get("".join(CODE.findall(heading)))) is not None
]


def test_every_field_has_one_row() -> None:
    code = sorted((name, field) for name, kind in KINDS.items() for field in own_fields(kind))
    assert sorted(FIELDS) == code


def test_every_type_is_tried_with_wrong_values() -> None:
    tried = {place.kind.__name__ for place in PLACES}
    assert tried | {base.__name__ for place in PLACES for base in place.kind.__mro__} >= KINDS.keys() >= tried


def test_every_route_has_one_row() -> None:
    routes = {
        f"{method} {route.path}"
        for route in create_app(ServerArgs(), MODEL).routes
        if isinstance(route, Route)
        for method in (route.methods or set()) - {"HEAD"}  # as GET
    }
    table = [name for heading, names, *_ in rows() if heading == "Endpoints" for name in names]
    assert sorted(table) == sorted(routes)


def test_named_tests_exist_and_mention_the_field() -> None:
    for heading, names, _, tests in rows():
        assert tests, (heading, names)
        mentions = []
        for test in tests:
            file = TESTS / f"{test}.py"
            assert file.is_file(), (heading, names, test)
            words = [name.partition(" ")[2].partition("{")[0] or name for name in names]
            found = any(re.search(rf"(?<![\w/]){re.escape(word)}(?!\w)", file.read_text()) for word in words)
            mentions.append(found or test in GENERIC)
        # Client tests mention a path by the method they call, and a field by its name.
        assert any(mentions) if heading == "Endpoints" else all(mentions), (heading, names, tests, mentions)
