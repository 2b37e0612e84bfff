"""Options that set the fields of a request: a dataclass of the library, or of a verb.

`options_of` gives a command an option for each named field. The command gets the values in one
dict, from which `made` makes the request. So a new option is a field and a line in the verb.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial, wraps
from typing import ParamSpec, TypeVar

from .options import option

Values = dict[str, object]

_Request = TypeVar("_Request")
_P = ParamSpec("_P")


@dataclass(frozen=True, slots=True)
class FieldOption:
    """`name` (without dashes) replaces the field's name."""

    help: str
    name: str = ""
    short: str = ""
    type: object = None
    metavar: str | None = None
    default: object = None
    shows_default: bool = False
    """If False, an option that is not given is left out of the dict, so the field keeps its own
    default."""
    multiple: bool = False
    required: bool = False


def options_of(
    request: type[object], into: str, **options: FieldOption
) -> Callable[[Callable[_P, None]], Callable[_P, None]]:
    """Adds an option for each named field of the dataclass `request`, in this order. A bool becomes
    a flag. The command gets the values in the dict `into`, which several decorators may fill."""
    defaults = {each.name: each.default for each in fields(request)}  # type: ignore[arg-type]  # a dataclass

    def decorate(command: Callable[_P, None]) -> Callable[_P, None]:
        @wraps(command)
        def collected(*words: _P.args, **given: _P.kwargs) -> None:
            values = given.setdefault(into, {})
            assert isinstance(values, dict)
            values |= {name: each for name in options if (each := given.pop(name)) is not None}
            command(*words, **given)

        with_options: Callable[_P, None] = collected
        for field, each in reversed(options.items()):
            is_flag = isinstance(defaults[field], bool)
            default = defaults[field] if each.default is None else each.default
            name = each.name or field.replace("_", "-")
            names = [*filter(None, [each.short]), f"--{name}", field]
            described = partial(
                option, *names, type=each.type, metavar=each.metavar, help=each.help,
                is_flag=is_flag, multiple=each.multiple, required=each.required,
            )  # fmt: skip
            if is_flag or each.shows_default:  # to click, a default of None is one, too
                described = partial(described, default=default, show_default=each.shows_default)
            with_options = described()(with_options)
        return with_options

    return decorate


def made(request: type[_Request], given: Mapping[str, object], **others: object) -> _Request:
    """Raises what the constructor of `request` raises."""
    return request(**{**given, **others})
