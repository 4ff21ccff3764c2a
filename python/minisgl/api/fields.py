"""The one reader of request bodies: types, other names of our fields, and unknown fields, also inside known objects.

Unknown fields that would change the answer are refused, the others are reported.
`settings/fields.toml` has the names of other servers; docs/api.md shows them.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from minisgl.api import protocol as p
from minisgl.core.errors import RequestError, near_miss, unsupported
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
MAX_UNKNOWN: Final = 128  # different names
MAX_REPORTED: Final = 16  # names in the header; each with at most MAX_NAME characters
MAX_NAME: Final = 64
CLOSE: Final = 0.84  # the least similarity of a misspelt name to its field

_logged: set[str] = set()

T = TypeVar("T", bound=msgspec.Struct)


class Body(NamedTuple, Generic[T]):
    """A request as its client wrote it: `names` maps our fields to the client's names, `ignored` have no effect."""

    request: T
    names: dict[str, str]
    ignored: list[str]


def read_body(body: bytes, kind: type[T], refuses: bool = False) -> Body[T]:
    """Decode the JSON `body` as a `kind`. Raises `RequestError` (400) naming the invalid field.

    `refuses` is `--unknown-fields refuse`. Integers may have any size or be written as 3.0; numbers beyond float64
    become its largest.
    """
    names: dict[str, str] = {}

    def read(given: Any) -> T:
        names.update(rename_aliases(given, kind))
        request = msgspec.convert(given, kind)
        ignored.extend(ignored_fields(given, kind, refuses))
        if isinstance(request, p.ChatCompletionRequest | p.TokenizeRequest) and request.messages is not None:
            pairs = zip(request.messages, given["messages"], strict=True)
            messages = [p.GivenMessage(**msgspec.structs.asdict(m) | {"given": sent}) for m, sent in pairs]
            request = msgspec.structs.replace(request, messages=messages)
        return request

    ignored: list[str] = []
    try:
        try:
            request = read(msgspec.json.decode(body))
        except msgspec.ValidationError as e:
            if "out of range" not in str(e) and "got `float`" not in str(e):
                raise
            request = read(_WHOLE.decode(body))
    except RequestError as e:
        raise e.named(names) from e
    except msgspec.ValidationError as e:
        error = RequestError(_readable(str(e)), param=_field_of(str(e)), code="invalid_type")
        raise error.named(names) from e
    except (ValueError, RecursionError) as e:
        raise RequestError(f"the body is not valid JSON: {e}", code="invalid_json") from e
    return Body(request, names, ignored)


def _whole_number(text: str) -> int | float:
    number = max(-sys.float_info.max, min(float(text), sys.float_info.max))
    return int(number) if number.is_integer() else number


_WHOLE: Final = msgspec.json.Decoder(float_hook=_whole_number)


def _field_of(error: str) -> str | None:
    """Return the path of the field that a msgspec error names, such as "messages[2].content"."""
    found = re.search(r"at `\$\.?([^`]+)`", error), re.search(r"missing required field `(\w+)`", error)
    return re.sub(r"(\[[^]]*\])+$", "", ".".join(match[1] for match in found if match)) or None


def _readable(error: str) -> str:
    return error.replace(" - at `$.", " at `").replace(" - at `$`", "")


def rename_aliases(given: Any, kind: type[msgspec.Struct], path: str = "") -> dict[str, str]:
    """Give aliases in `given`, the object at `path` in a `kind`, our names. Return our name -> the client's for each.

    Raises `RequestError` (400) for a field that has two values.
    """
    names: dict[str, str] = {}
    fields = given if isinstance(given, dict) else {}
    known = _objects_of(kind).get(path, frozenset())
    for name in [n for n, value in fields.items() if n not in known and ALIASES.get(n) in known and value is not None]:
        ours, value = ALIASES[name], fields.pop(name)
        full = _join(path, name)
        if fields.get(ours) not in (None, value):
            raise RequestError(f"{full} and {names.get(ours, ours)} exclude each other", param=full)
        names[ours] = full
        fields[ours] = value
    return names if path else names | rename_aliases(fields.get("sampling_params"), kind, "sampling_params")


def ignored_fields(body: Any, kind: type[msgspec.Struct], refuses: bool) -> list[str]:
    """Return the names in `body`, a `kind` in JSON's types, that have no effect: dotted paths without indices.

    Raises `RequestError` (400) for a name that has an effect in other servers, that misspells a field, or, with
    `refuses`, that is not a field.
    """
    objects = _objects_of(kind)
    ignored: set[str] = set()
    for path, found in _levels([("", body)], "", objects):
        for where, given in found:
            for name in sorted(given.keys() - objects[path]):
                full, value = _join(path, name), given[name]
                key = full.removeprefix("sampling_params.")  # its fields are those of a chat
                if full in ignored or value is None or _changes_nothing(key, value, kind):
                    continue
                if key not in HARMLESS or key in ABSENT.get(kind, ()):
                    _require_unknown(key, _join(where, name)[:MAX_NAME], value, kind, objects[path], refuses)
                ignored.add(full)
                if len(ignored) > MAX_UNKNOWN:
                    raise RequestError(f"there are more than {MAX_UNKNOWN} names that are not fields")
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
    values: list[tuple[str, Any]], path: str, objects: Mapping[str, frozenset[str]]
) -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """Yield each path to objects whose fields are known, with these objects and their paths with indices."""
    found = [(where, value) for where, value in values if isinstance(value, dict)]
    for where, value in values:
        if isinstance(value, list):
            found += [(f"{where}[{i}]", item) for i, item in enumerate(value) if isinstance(item, dict) and item]
    yield path, found
    for name in sorted(objects[path]):
        if (inner := _join(path, name)) in objects:
            inside = [(_join(where, name), given[name]) for where, given in found if name in given]
            yield from _levels(inside, inner, objects)


def _changes_nothing(name: str, value: Any, kind: type[msgspec.Struct]) -> bool:
    """Return whether `value` means the same as null in the unknown field `name`."""
    same = FOREIGN[name] if name in FOREIGN else ELSEWHERE.get(name, ()) if kind in GENERATION else ()
    return any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in same)


def _require_unknown(
    name: str, where: str, value: Any, kind: type[msgspec.Struct], known: frozenset[str], refuses: bool
) -> None:
    """Raise `RequestError` for a name that is known elsewhere, misspells one of `known`, or with `refuses`."""
    absent = ABSENT.get(kind, frozenset())
    use = INSTEAD.get(name, "")
    use = INSTEAD.get(use, "") if use in absent else use
    is_other = use.isidentifier() and use not in known | _objects_of(kind)[""]
    hint = f"; use {use}" if use and not is_other else ""
    why = ""
    if name in absent:
        why = f"={json.dumps(value)[:60]} is not supported{hint}"
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
