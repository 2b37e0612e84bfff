"""What `dlcmd` prints: results, names, JSON and complaints.

Imports little: every start pays for it. Results go to stdout, everything else to stderr.

JSON: names of entries are text under `path` (`name`, `target`). Where they are not UTF-8, that is a
readable form, and the exact bytes stand beside it in base64, under `path_b64` and so on.
"""

import base64
import json
import os
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime

from diesel_fs.errors import DieselError, PartialError
from diesel_fs.names import shown

from .options import Flags, global_flags

Value = str | int | float | bool | None | Sequence["Value"] | dict[str, "Value"]

STDOUT = "standard output"
"""Its name in errors."""

_PIECE_BYTES = 1 << 16


def say(text: str) -> None:
    """A line about what has been done, unless -q or --json."""
    found = global_flags()
    if not (found.quiet or found.json):
        emit([text.encode("utf-8", "surrogateescape") + b"\n"])


def remark(text: str) -> None:
    """Words beside a result, on stderr, unless -q."""
    if not global_flags().quiet:
        with suppress(OSError, AttributeError, ValueError):
            sys.stderr.write(f"dlcmd: {text}\n")
            sys.stderr.flush()


def say_json(value: object) -> None:
    """A result as one line of JSON."""
    emit([json.dumps(value).encode() + b"\n"])


def emit(pieces: Iterable[bytes | memoryview]) -> None:
    """Bytes to stdout, in large writes. Raises OSError."""
    if sys.stdout is None:
        raise DieselError("standard output is closed")
    sys.stdout.flush()
    waiting = bytearray()
    for piece in pieces:
        if len(piece) >= _PIECE_BYTES:
            _write(waiting)
            waiting.clear()
            _write(piece)
            continue
        waiting += piece
        if len(waiting) >= _PIECE_BYTES:
            _write(waiting)
            waiting.clear()
    _write(waiting)


def _write(data: bytes | bytearray | memoryview) -> None:
    left = memoryview(data)
    try:
        while len(left):
            left = left[os.write(sys.stdout.fileno(), left) :]
    except OSError as error:
        error.filename = STDOUT
        raise


def name_line(name: bytes) -> bytes:
    """A name and a line end: as it is in a pipe, for the program that reads it; on a terminal
    without what could harm it."""
    return (shown(name).encode() if sys.stdout.isatty() else name) + b"\n"


def json_name(name: bytes, key: str = "path") -> dict[str, Value]:
    """A name in JSON (see the module)."""
    try:
        return {key: name.decode()}
    except UnicodeDecodeError:
        return {key: shown(name), f"{key}_b64": base64.b64encode(name).decode()}


def complain(error: DieselError, given: Flags, *, code: int | None = None) -> None:
    """An error as one line on stderr; with --json as an object in another. Never raises."""
    lines = [f"dlcmd: {error}"]
    if given.json:
        described = {
            "error": type(error).__name__,
            "message": error.message,
            "advice": error.advice,
            "exit_code": error.exit_code if code is None else code,
        }
        lines.append(json.dumps(described))
    with suppress(OSError, AttributeError, ValueError):  # nobody is there to hear it
        for line in lines:
            sys.stderr.write(line.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
            sys.stderr.write("\n")
        sys.stderr.flush()


def raise_if_partial(failed: Sequence[tuple[bytes, str]], source: str, verb: str) -> None:
    """Name on stderr what was left out. Raises PartialError where there is any."""
    if not failed:
        return
    with suppress(OSError, AttributeError, ValueError):
        for path, reason in failed:
            sys.stderr.write(f"dlcmd: {shown(path) or source}: {reason}\n")
    entries = "1 entry" if len(failed) == 1 else f"{len(failed):,} entries"
    raise PartialError(f"{entries} could not be {verb}; the rest is done", tuple(failed))


def json_failed(failed: Sequence[tuple[bytes, str]]) -> list[Value]:
    """What was left out, in JSON."""
    return [{**json_name(path), "reason": reason} for path, reason in failed]


def bytes_text(count: float) -> str:
    """A number of bytes, in units of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def count_text(count: int, noun: str) -> str:
    """A number of things."""
    many = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{count:,} {noun if count == 1 else many}"


def time_text(seconds: float) -> str:
    """A time in this machine's zone; seconds since 1970 where no calendar has it."""
    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"@{seconds:.0f}"
