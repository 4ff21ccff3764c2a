"""Unknown fields, also inside known objects: those that would change the answer are refused, the others are reported.

`settings/fields.toml` has the names of other servers; docs/api.md shows them.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Final

import msgspec

from minisgl.api import protocol as p
from minisgl.errors import RequestError, near_miss, unsupported
from minisgl.settings.foreign import field_names

logger = logging.getLogger(__name__)

_TABLE: Final = field_names()
# Fields that are not implemented and would change the answer -> the values that change nothing, as null does.
FOREIGN: Final[dict[str, Any]] = dict.fromkeys(_TABLE["refused"], ()) | _TABLE["neutral"]
ALIASES: Final[dict[str, str]] = _TABLE["aliases"]
HARMLESS: Final = frozenset(_TABLE["harmless"])  # without an effect in any server
INSTEAD: Final[dict[str, str]] = ALIASES | _TABLE["instead"]
_CHATS: Final = (p.ChatCompletionRequest, p.ResponsesRequest, p.MessagesRequest)
GENERATION: Final[tuple[type[msgspec.Struct], ...]] = (*_CHATS, p.CompletionRequest, p.GenerateRequest)
ABSENT: Final = {kind: frozenset[str](_TABLE["absent"].get(kind.__name__, ())) for kind in GENERATION}
# Fields of the endpoints that generate text -> the values that change nothing where a field is unknown.
ELSEWHERE: Final = {
    name: (*_TABLE["elsewhere"].get(name, ()), False, "", [], {})
    for kind in GENERATION
    for name in ABSENT[kind].union(kind.__struct_fields__)
}
MAX_UNKNOWN: Final = 128  # names in objects at one path
MAX_REPORTED: Final = 16  # names in the header; each with at most MAX_NAME characters
MAX_NAME: Final = 64
CLOSE: Final = 0.84  # the least similarity of a misspelt name to its field
NULL: Final = b"null"

_logged: set[str] = set()

Fields = dict[str, msgspec.Raw]
_Scalar = str | int | float | bool | None
_VALUES: Final = msgspec.json.Decoder(Fields | list[Fields | list[msgspec.Raw] | _Scalar] | _Scalar)


def with_our_names(body: bytes, kind: type[msgspec.Struct]) -> tuple[bytes, dict[str, str]]:
    """Return the JSON `body` of a `kind` without aliases, and the client's names of the fields that had one.

    Raises `RequestError` (400) for a field that is given twice. A body that is no JSON object is returned as it is.
    """
    names: dict[str, str] = {}
    try:
        given = msgspec.json.decode(body, type=Fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body, names
    known = _objects_of(kind)[""]
    for name in [n for n in given if n not in known and ALIASES.get(n) in known and bytes(given[n]) != NULL]:
        ours = ALIASES[name]
        if bytes(given.get(ours, NULL)) != NULL:
            raise RequestError(f"{name} and {names.get(ours, ours)} exclude each other", param=name)
        names[ours] = name
        given[ours] = given.pop(name)
    return (msgspec.json.encode(given) if names else body), names


def ignored_fields(body: bytes, kind: type[msgspec.Struct], refuses: bool) -> list[str]:
    """Return the names in the JSON `body`, which is a `kind`, that have no effect: dotted paths without indices.

    Raises `RequestError` (400) for a name that has an effect in other servers, that misspells a field, or, with
    `refuses`, that is not a field.
    """
    objects = _objects_of(kind)
    ignored: set[str] = set()
    for path, found in _levels([("", msgspec.Raw(body))], "", objects):
        unknown = set[str]().union(*(given for _, given in found)) - objects[path]
        if len(unknown) > MAX_UNKNOWN:
            raise RequestError(f"there are more than {MAX_UNKNOWN} names that are not fields", param=path or None)
        for where, given in found if unknown else ():
            for name in sorted(unknown.intersection(given)):
                full, value = _join(path, name), bytes(given[name])
                key = full.removeprefix("sampling_params.")  # its fields are those of a chat
                if value == NULL or _changes_nothing(key, value, kind):
                    continue
                if key not in HARMLESS or key in ABSENT.get(kind, ()):
                    _require_unknown(key, _join(where, name)[:MAX_NAME], value, kind, objects[path], refuses)
                ignored.add(full)
                unknown.discard(name)
    return sorted(ignored)


def told(names: Iterable[str]) -> list[str]:
    """Return `names` without an effect as a header can have them: sorted, printable, and not too many. Log new ones."""
    shown = sorted({_printable(name) for name in names})[:MAX_REPORTED]
    for name in shown:
        if name not in _logged and len(_logged) < 1000:
            _logged.add(name)
            logger.info("clients send %r, which has no effect", name)
    return shown


def unread_kwargs(kwargs: dict[str, Any] | None, variables: frozenset[str], refuses: bool) -> list[str]:
    """Return the names in `chat_template_kwargs` that are not `variables` of the template.

    Raises `RequestError` (400) for a name that misspells a variable, or, with `refuses`, for any such name.
    """
    unread = sorted((kwargs or {}).keys() - variables)[:MAX_REPORTED]
    for name in unread:
        close = near_miss(name[:MAX_NAME], variables, CLOSE)
        if close or refuses:
            hint = f"; did you mean {close}?" if close else " (--unknown-fields refuse)"
            raise unsupported(f"{name[:MAX_NAME]} is not a variable of the chat template{hint}", "chat_template_kwargs")
    return [f"chat_template_kwargs.{_printable(name)}" for name in unread]


def _printable(name: str) -> str:
    return "".join(c if c.isascii() and c.isprintable() else "?" for c in name[:MAX_NAME])


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


@cache
def _objects_of(kind: type[msgspec.Struct]) -> dict[str, frozenset[str]]:
    """Return the names of the fields of each object in a `kind`, by path."""
    objects = {path: frozenset(names) for path, names in _TABLE["objects"].items()}

    def add(type_: msgspec.inspect.Type, path: str) -> None:
        match type_:
            case msgspec.inspect.StructType(cls=cls, fields=fields):
                objects[path] = objects.get(path, frozenset()) | {*cls.__struct_fields__} - ABSENT.get(cls, frozenset())
                for field in fields:
                    add(field.type, _join(path, field.name))
            case msgspec.inspect.UnionType(types=types):
                for member in types:
                    add(member, path)
            case msgspec.inspect.ListType(item_type=item):
                add(item, path)

    add(msgspec.inspect.type_info(kind), "")
    return objects


def _levels(
    values: list[tuple[str, msgspec.Raw]], path: str, objects: Mapping[str, frozenset[str]]
) -> Iterator[tuple[str, list[tuple[str, Fields]]]]:
    """Yield each path to objects whose fields are known, with these objects and their paths with indices.

    A body may have a million objects, so each level is decoded as a whole.
    """
    found: list[tuple[str, Fields]] = []
    for where, value in values:
        match _objects_in(value):
            case dict(given):
                found.append((where, given))
            case list(items):
                found += [(f"{where}[{i}]", item) for i, item in enumerate(items) if item and isinstance(item, dict)]
    yield path, found
    for name in sorted(objects[path]):
        if (inner := _join(path, name)) in objects:
            inside = [(_join(where, name), given[name]) for where, given in found if name in given]
            yield from _levels(inside, inner, objects)


def _objects_in(value: msgspec.Raw) -> Any:
    try:
        return _VALUES.decode(value)
    except msgspec.ValidationError:
        return None  # a number beyond float64, which no object's place may have


def _changes_nothing(name: str, value: bytes, kind: type[msgspec.Struct]) -> bool:
    """Return whether the JSON `value` means the same as null in the unknown field `name`."""
    same = FOREIGN[name] if name in FOREIGN else ELSEWHERE.get(name, ()) if kind in GENERATION else ()
    value = value if value.startswith(b'"') else value.translate(None, b" \t\r\n")
    return value in map(msgspec.json.encode, (*same, *(float(v) for v in same if type(v) is int)))


def _require_unknown(
    name: str, where: str, value: bytes, kind: type[msgspec.Struct], known: frozenset[str], refuses: bool
) -> None:
    """Raise `RequestError` for a name that is known elsewhere, misspells one of `known`, or with `refuses`."""
    absent = ABSENT.get(kind, frozenset())
    use = INSTEAD.get(name, "")
    use = INSTEAD.get(use, "") if use in absent else use
    is_other = use.isidentifier() and use not in known | _objects_of(kind)[""]
    hint = f"; use {use}" if use and not is_other else ""
    why = ""
    if name in absent:
        why = f"={value[:60].decode(errors='replace')} is not supported{hint}"
    elif name in FOREIGN or name in ALIASES:
        why = f" is not supported{hint}"
    elif name in _objects_of(kind).get("sampling_params", ()):
        why = " belongs in sampling_params"
    elif kind in GENERATION and name in ELSEWHERE:
        why = f" is not a field of this endpoint{hint}"
    elif close := _misspelt(name.rpartition(".")[2], known):
        why = f" is not a field; did you mean {close}?"
    elif refuses:
        why = " is not a field (--unknown-fields refuse)"
    if why:
        raise unsupported(where + why, where)


def _misspelt(name: str, known: Collection[str]) -> str | None:
    """Return the name in `known` that `name` probably means: a near miss, or the same words in camel case."""
    known = [*known, *(alias for alias, ours in ALIASES.items() if ours in known)]
    words = {k.replace("_", ""): k for k in known}
    return words.get(name.lower().replace("_", "").replace("-", "")) or near_miss(name[:MAX_NAME], known, CLOSE)
