"""Reads fields of manifests and of objects of the API: nested dictionaries and lists.

A field that is missing, or has another type, counts as empty.
"""

from collections.abc import Mapping

Json = dict[str, object]
"""An object of the API, or a part of one."""


def at(value: object, *path: str | int) -> object:
    """Return None if nothing is there."""
    for key in path:
        if isinstance(value, Mapping) and isinstance(key, str):
            value = value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and -len(value) <= key < len(value):
            value = value[key]
        else:
            return None
    return value


def text(value: object, *path: str | int) -> str:
    """Return the empty string if no text is there."""
    found = at(value, *path)
    return found if isinstance(found, str) else ""


def whole(value: object, *path: str | int, default: int = 0) -> int:
    found = at(value, *path)
    return found if isinstance(found, int) and not isinstance(found, bool) else default


def flag(value: object, *path: str | int, default: bool = False) -> bool:
    found = at(value, *path)
    return found if isinstance(found, bool) else default


def fields(value: object, *path: str | int) -> Json:
    """Return an empty object if none is there."""
    found = at(value, *path)
    return {str(key): each for key, each in found.items()} if isinstance(found, Mapping) else {}


def texts(value: object, *path: str | int) -> dict[str, str]:
    found = fields(value, *path)
    return {name: each for name, each in found.items() if isinstance(each, str)}


def items(value: object, *path: str | int) -> list[object]:
    """Return an empty list if none is there."""
    found = at(value, *path)
    return list(found) if isinstance(found, list) else []


def condition_of(status: Json, kind: str) -> Json:
    found = [fields(each) for each in items(status, "conditions") if at(each, "type") == kind]
    return found[0] if found else {}
