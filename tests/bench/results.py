"""`RESULTS.md`: the table of results in the tree, which a complete run brings up to date."""

import re
from collections.abc import Sequence
from pathlib import Path

from .report import Row, cells

PAGE = Path(__file__).with_name("RESULTS.md")

_BEGIN = "<!-- make bench writes the table below -->\n"
_END = "\n<!-- end of the table -->"
_HEAD_LINES = 2


def update(page: Path, rows: Sequence[Row], measured: str) -> None:
    """Write the rows into the page's table; `measured` gives the date and the commit.

    A row replaces that of the same benchmark, unit and peer. Rows of benchmarks that were not run
    stay, and so do those without a new figure. Raises ValueError if the page lacks the two comments
    around the table.
    """
    text = page.read_text(encoding="utf-8")
    page.write_text(updated(text, rows, measured), encoding="utf-8")


def updated(text: str, rows: Sequence[Row], measured: str) -> str:
    """The text of the page with these rows in its table. Raises ValueError as `update`."""
    before, begin, rest = text.partition(_BEGIN)
    old, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError("the page of results has no place for the table")
    head, lines = _split(old)
    table = {_key(line): line for line in lines}
    for row in rows:
        if not row.problems:
            line = _line((*cells(row), measured))
            table[_key(line)] = line
    return "".join((before, begin, *head, *table.values(), end, after))


def _split(table: str) -> tuple[list[str], list[str]]:
    lines = [line + "\n" for line in table.splitlines() if line]
    return lines[:_HEAD_LINES], lines[_HEAD_LINES:]


def _line(values: Sequence[str]) -> str:
    return f"| {' | '.join(value.replace('|', '/') for value in values)} |\n"


def _key(line: str) -> tuple[str, str, str]:
    values = [value.strip() for value in re.split(r"(?<!\\)\|", line)[1:-1]]
    return values[0], values[2], values[4]
