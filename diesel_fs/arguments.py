"""Checks the arguments of the Python API, and words errors for that API.

Each check returns the value, or raises UsageError with the argument's name (its *word*), but never
with a value of a wrong type, which may be a secret or very long. Messages of the library name
options as `dlcmd` does (`--listen`); `keyword_errors` replaces them by keyword arguments. Pure,
except that `local_path` calls `__fspath__` of objects.
"""

import difflib
import inspect
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import index
from pathlib import Path
from typing import SupportsFloat, SupportsIndex

from .errors import DieselError, UsageError

_KEYWORDS = {
    "--key-file": "key",
    "--task-key-file": "task_key",
    "--cache-size": "cache_bytes",
    "--memory": "memory_bytes",
    "--cool-down": "cool_down_s",
    **{
        f"--{name.replace('_', '-')}": name
        for name in (
            *("user", "task", "rank", "world", "peers", "listen", "advertise", "policy", "evict"),
            *("cache_dir", "cache_layout", "order_log_below", "lrfu_p", "lrfu_step", "peer_tls"),
            *("peers_through_master", "allow_other", "metrics"),
        )
    },
}

_FLAGS = frozenset({"peer_tls", "peers_through_master", "allow_other"})

_OPTION = re.compile(r"(--[a-z]+(?:-[a-z]+)*)(?: ([A-Z][A-Z:]*[0-9]?))?")
"""An option, and the word for its value if there is one: `--listen ADDRESS:0`."""


def in_keywords(text: str) -> str:
    """Replace options of `dlcmd` by keyword arguments, except in command lines."""
    parts = re.split("(`[^`]*`)", text)  # every second part is in backticks
    parts[::2] = [_OPTION.sub(_keyword, part) for part in parts[::2]]
    return "".join(parts)


def _keyword(option: "re.Match[str]") -> str:
    name = _KEYWORDS.get(option[1])
    if name is None:
        return option[0]
    if name in _FLAGS:
        return f"`{name}=True`" + (f" {option[2]}" if option[2] else "")
    return f'`{name}="{option[2]}"`' if option[2] else f"`{name}`"


@contextmanager
def keyword_errors() -> Iterator[None]:
    """Context or decorator: errors name keyword arguments."""
    try:
        yield
    except DieselError as error:
        error.message, error.advice = in_keywords(error.message), in_keywords(error.advice)
        raise


def words_of(signature: inspect.Signature) -> list[str]:
    """The names of the arguments, without `**kwargs`."""
    parameters = signature.parameters.values()
    return [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]


def near_word(word: str, known: Sequence[str]) -> str:
    """The known word that was probably meant, or ""."""
    option = _KEYWORDS.get(f"--{word.replace('_', '-')}")  # `cache_size`, as in `dlcmd`
    if option is not None and option in known:
        return option
    near = difflib.get_close_matches(word, known, 1)
    longer = [each for each in known if each.startswith(f"{word}_")]
    return next(iter([*longer, *near]), "")


def check_words(given: Iterable[str], known: Sequence[str]) -> None:
    for word in given:
        if word not in known:
            near = near_word(word, known)
            raise UsageError(
                f"unknown word {word!r}",
                advice=f"is {near} meant?" if near else f"known: {', '.join(known)}",
            )


def text(word: str, value: object) -> str:
    if not isinstance(value, str):
        raise wrong_type(word, "text", value)
    return value


def flag(word: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(word, "True or False", value)
    return value


def whole_number(word: str, value: object, low: int = 0, high: int | None = None) -> int:
    """`high` None: without end."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise wrong_type(word, "a whole number", value)
    try:
        number = index(value)
    except TypeError:  # an array, for one
        raise wrong_type(word, "a whole number", value) from None
    if number < low or (high is not None and number > high):
        end = "on" if high is None else f"to {high}"
        raise UsageError(f"{word} is a number from {low} {end}, not {_short(number)}")
    return number


def number(word: str, value: object, low: float, high: float | None = None) -> float:
    """`high` None: without end, but finite."""
    if isinstance(value, bool | str | bytes | bytearray) or not isinstance(value, SupportsFloat):
        raise wrong_type(word, "a number", value)
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):  # an array, or a great whole number
        raise wrong_type(word, "a number", value) from None
    if not low <= found <= (sys.float_info.max if high is None else high):
        end = "on" if high is None else f"to {high:g}"
        raise UsageError(f"{word} is a number from {low:g} {end}, not {found:g}")
    return found


def local_path(word: str, value: object) -> Path:
    if isinstance(value, bytes) or not isinstance(value, str | os.PathLike):
        raise wrong_type(word, "a path of this machine (str or os.PathLike)", value)
    path = os.fspath(value)
    if not isinstance(path, str):
        raise wrong_type(word, "a path of this machine (str or os.PathLike)", path)
    try:
        is_path = bool(path) and b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        is_path = False
    if not is_path:
        raise UsageError(f"{word} is a path of this machine, not {path[:80]!r}")
    return Path(path)


def wrong_type(word: str, meant: str, value: object) -> UsageError:
    return UsageError(f"{word} is {meant}, not of type {type(value).__name__}")


def _short(number: int) -> str:
    return str(number) if number.bit_length() < 200 else "a greater one"  # at most 61 digits
