"""Turns JSON of the Kubernetes API into dataclasses, and dataclasses into JSON. Pure.

The field `node_name` of a dataclass is the JSON field `nodeName`. All fields have defaults, which
`decode` uses if a field is missing or has another type: an object that somebody wrote without the
schemas must not stop the operator. `encode` leaves out None and empty strings.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from functools import cache
from types import UnionType
from typing import TypeVar, cast, get_args, get_origin, get_type_hints

Json = dict[str, object]

_ACRONYMS = {"ip": "IP"}
"""The API writes these parts of names in capitals, as in `podIP`."""

T = TypeVar("T")
_Reader = Callable[[object], object]


def decode(kind: type[T], raw: object) -> T:
    """Uses all defaults if `raw` is no JSON object."""
    given = raw if isinstance(raw, Mapping) else {}
    made = kind()
    for name, key, read in _readers(kind):  # type: ignore[arg-type]  # a class is hashable
        found = read(given[key]) if key in given else None
        if found is not None:
            object.__setattr__(made, name, found)  # frozen, but nobody else has it yet
    return made


@cache
def _readers(kind: type) -> list[tuple[str, str, _Reader]]:
    hints = get_type_hints(kind)
    return [(each.name, _key(each.name), _reader(hints[each.name])) for each in fields(kind)]


@cache
def _key(name: str) -> str:
    first, *others = name.split("_")
    return first + "".join(_ACRONYMS.get(each, each.capitalize()) for each in others)


def _reader(hint: object) -> _Reader:
    """A function that turns JSON into a value of the type `hint`; None for JSON of another type.

    Hints are int, str, bool, dataclasses, `dict` (an object with any values), `Mapping` (an object,
    of which only texts are kept), tuples of these or of `object` (any JSON), and `X | None` for any
    of these.
    """
    if get_origin(hint) is UnionType:
        (hint,) = (each for each in get_args(hint) if each is not type(None))
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is int:
        return lambda value: None if isinstance(value, bool) else _of(int, value)
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda value: decode(hint, value) if isinstance(value, Mapping) else None
    if origin is tuple and arguments[0] is object:
        return lambda value: tuple(value) if isinstance(value, list) else None
    if origin is tuple:
        return _list_reader(_reader(arguments[0]))
    if origin is dict:
        return _json
    if origin is not None:
        return _texts
    return lambda value: _of(cast("type", hint), value)


def _of(kind: type, value: object) -> object:
    return value if isinstance(value, kind) else None


def _list_reader(read: _Reader) -> _Reader:
    def read_all(value: object) -> object:
        if not isinstance(value, list):
            return None
        return tuple(found for each in value if (found := read(each)) is not None)

    return read_all


def _json(value: object) -> Json | None:
    if not isinstance(value, Mapping):
        return None
    return {str(name): each for name, each in value.items()}


def _texts(value: object) -> dict[str, str] | None:
    found = _json(value)
    if found is None:
        return None
    return {name: each for name, each in found.items() if isinstance(each, str)}


def encode(value: object) -> Json:
    made: Json = {}
    for each in fields(value):  # type: ignore[arg-type]  # callers give dataclasses
        found = _encoded(getattr(value, each.name))
        if found is not None and found != "":
            made[_key(each.name)] = found
    return made


def _encoded(value: object) -> object:
    if isinstance(value, tuple):
        return [_encoded(each) for each in value]
    if isinstance(value, Mapping):
        return dict(value)
    return encode(value) if is_dataclass(value) else value


def seconds_of(time: str) -> float:
    """Parses 2026-01-31T12:00:00Z; "" gives 0.0."""
    return datetime.fromisoformat(time).timestamp() if time else 0.0


def time_of(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
