"""Prints results to stdout, and notes and errors to stderr.

In JSON, an entry's path is text under `path` (a link's target under `target`). If it is not UTF-8,
it is escaped there, and `path_b64` (`target_b64`) has its exact bytes in base64.

This module imports little, since every start of `dlcmd` pays for it.
"""

import base64
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime

from diesel_fs.errors import DieselError, PartialError
from diesel_fs.names import shown

from ..args.options import Flags, global_flags

Value = str | int | float | bool | None | Sequence["Value"] | dict[str, "Value"]

STDOUT = "standard output"

_WRITE_BYTES = 1 << 16


def print_line(text: str) -> None:
    """Prints nothing with -q or --json."""
    flags = global_flags()
    if not (flags.quiet or flags.json):
        write_stdout([text.encode("utf-8", "surrogateescape") + b"\n"])


def print_note(text: str) -> None:
    if not global_flags().quiet:
        _write_stderr(f"dlcmd: {text}\n")


def _write_stderr(text: str) -> None:
    """A closed or full stderr loses the text, and the verb goes on."""
    with suppress(OSError, AttributeError, ValueError):
        sys.stderr.write(text.encode("utf-8", "surrogateescape").decode("utf-8", "replace"))
        sys.stderr.flush()


def print_json(value: object) -> None:
    write_stdout([json.dumps(value).encode() + b"\n"])


def print_result(described: Mapping[str, object], text: str) -> None:
    """Prints an object with --json, otherwise a line (none with -q)."""
    if global_flags().json:
        print_json(described)
    else:
        print_line(text)


def is_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], numbers: Sequence[str]
) -> None:
    """Prints a table on a terminal, with the columns `numbers` aligned to the right; otherwise a
    line for each row, separated by tabs, without the columns' names."""
    if is_terminal():
        import rich.box  # noqa: PLC0415  # rich takes 0.1 s to import
        from rich.console import Console  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415

        table = Table(box=rich.box.SIMPLE_HEAD, pad_edge=False)
        for column in columns:
            table.add_column(column, justify="right" if column in numbers else "left", no_wrap=True)
        for row in rows:
            table.add_row(*row)
        Console(markup=False, highlight=False).print(table)
    else:
        write_stdout("\t".join(row).encode() + b"\n" for row in rows)


def write_stdout(pieces: Iterable[bytes | memoryview]) -> None:
    """Raises OSError, and DieselError if stdout is closed."""
    if sys.stdout is None:
        raise DieselError("standard output is closed")
    sys.stdout.flush()
    buffered = bytearray()
    for piece in pieces:
        if len(piece) >= _WRITE_BYTES:
            _write(buffered)
            buffered.clear()
            _write(piece)
            continue
        buffered += piece
        if len(buffered) >= _WRITE_BYTES:
            _write(buffered)
            buffered.clear()
    _write(buffered)


def _write(data: bytes | bytearray | memoryview) -> None:
    left = memoryview(data)
    try:
        while len(left):
            left = left[os.write(sys.stdout.fileno(), left) :]
    except OSError as error:
        error.filename = STDOUT
        raise


def name_line(name: bytes) -> bytes:
    """On a terminal, control characters are escaped; a pipe or file gets the exact bytes."""
    return (shown(name).encode() if is_terminal() else name) + b"\n"


def json_name(name: bytes, key: str = "path") -> dict[str, Value]:
    try:
        return {key: name.decode()}
    except UnicodeDecodeError:
        return {key: shown(name), f"{key}_b64": base64.b64encode(name).decode()}


def print_error(error: DieselError, flags: Flags, *, code: int | None = None) -> None:
    """Prints one line on stderr, and with --json an object in a second line. `code` replaces the
    error's own exit code. Never raises."""
    lines = [f"dlcmd: {error}"]
    if flags.json:
        described = {
            "error": type(error).__name__,
            "message": error.message,
            "advice": error.advice,
            "exit_code": error.exit_code if code is None else code,
        }
        lines.append(json.dumps(described))
    _write_stderr("".join(f"{line}\n" for line in lines))


def raise_if_partial(failed: Sequence[tuple[bytes, str]], source: str, verb: str) -> None:
    """Prints failed entries and reasons on stderr, and raises PartialError if there are any.
    `source` stands for the empty path; `verb` is a participle, such as `written`."""
    if not failed:
        return
    for path, reason in failed:
        _write_stderr(f"dlcmd: {shown(path) or source}: {reason}\n")
    entries = count_text(len(failed), "entry")
    raise PartialError(f"{entries} could not be {verb}; the rest is done", tuple(failed))


def json_failed(failed: Sequence[tuple[bytes, str]]) -> list[Value]:
    return [{**json_name(path), "reason": reason} for path, reason in failed]


def bytes_text(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def count_text(count: int, noun: str) -> str:
    many = noun[:-1] + "ies" if noun.endswith("y") else noun + ("es" if noun[-1] == "s" else "s")
    return f"{count:,} {noun if count == 1 else many}"


def time_text(seconds: float) -> str:
    """Returns `@SECONDS` for a year that the C library cannot write."""
    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"@{seconds:.0f}"
