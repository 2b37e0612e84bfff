"""Rows of the table: our figure, the peer's or a limit, their ratio, and whether the target is met.

Pure: values in, text and plain data out. A ratio is that of the medians; its range over the rounds
stands beside it, since sides of one round were measured next to each other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from .samples import OURS, Measured, NotMeasured, Rounds, Samples

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

LIMIT = "limit"
NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on the ratio of our figure to the other's."""

    ratio: float
    at_most: bool

    def met_by(self, ratio: float) -> bool:
        return ratio <= self.ratio if self.at_most else ratio >= self.ratio


def at_least(ratio: float) -> Target:
    return Target(ratio, at_most=False)


def at_most(ratio: float) -> Target:
    return Target(ratio, at_most=True)


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `other` has the peer's samples, a limit as a single sample, or None."""

    name: str
    unit: str
    ours: Measured
    against: str = ""
    other: Measured | None = None
    target: Target | None = None
    note: str = ""

    @property
    def _both(self) -> tuple[Samples, Samples] | None:
        if isinstance(self.ours, Samples) and isinstance(self.other, Samples):
            return self.ours, self.other
        return None

    @property
    def ratio(self) -> float | None:
        """The ratio of our median to the other's; None without two figures, or for a division by
        0."""
        both = self._both
        return both[0].median / both[1].median if both and all(both[1].values) else None

    @property
    def ratio_range(self) -> tuple[float, float] | None:
        """The least and the greatest ratio over the rounds; a limit is the same in each."""
        both = self._both
        if not both or not all(both[1].values):
            return None
        ours, others = (each.values for each in both)
        if len(others) == 1:
            others *= len(ours)
        ratios = [one / other for one, other in zip(ours, others, strict=True)]
        return min(ratios), max(ratios)

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without a target or without figures."""
        both = self._both
        if self.target is None or both is None:
            return None
        if self.ratio is not None:
            return self.target.met_by(self.ratio)
        if self.target.at_most:  # a limit of 0
            return both[0].median <= 0
        return both[0].median >= 0 if self.against == LIMIT else None

    @property
    def problems(self) -> list[str]:
        """The sides that could not be measured, with the reasons."""
        sides = [("ours", self.ours), (self.against, self.other)]
        return [
            f"{self.name}: {side}: {measured.reason}"
            for side, measured in sides
            if isinstance(measured, NotMeasured)
        ]

    def as_json(self) -> Json:
        spread = self.ratio_range
        return {
            "name": self.name,
            "unit": self.unit,
            "ours": _median(self.ours),
            "ours_samples": _values(self.ours),
            "against": self.against,
            "other": _median(self.other),
            "other_samples": _values(self.other),
            "ratio": self.ratio,
            "ratio_range": None if spread is None else list(spread),
            "target": _target_text(self),
            "met": self.met,
            "note": self.note,
            "not_measured": [*self.problems],
        }


def no_more_than(name: str, unit: str, ours: Measured, limit: float, note: str = "") -> Row:
    """A row with a fixed upper limit."""
    return Row(name, unit, ours, LIMIT, Samples((limit,)), at_most(1), note)


def no_less_than(name: str, unit: str, ours: Measured, limit: float, note: str = "") -> Row:
    """A row with a fixed lower limit."""
    return Row(name, unit, ours, LIMIT, Samples((limit,)), at_least(1), note)


def against(
    rounds: Rounds,
    name: str,
    unit: str,
    targets: Mapping[str, Target | None],
    note: str = "",
    *,
    of: str = "",
    side: str = OURS,
) -> list[Row]:
    """A row for each of these peers: a figure of ours, or of another side, and the same of theirs.
    The figure's name in `rounds` is `of`, or the unit."""
    measured = rounds.of(side, of or unit)
    return [
        Row(name, unit, measured, peer, rounds.of(peer, of or unit), target, note)
        for peer, target in targets.items()
    ]


def worst(measured: Measured) -> Measured:
    """The greatest sample, for a limit that none may exceed."""
    return Samples((max(measured.values),)) if isinstance(measured, Samples) else measured


def failed(name: str, reason: str) -> Row:
    return Row(name, "", NotMeasured(reason))


_HEAD = ("benchmark", "ours", "unit", "peer or limit", "", "ratio", "(range)", "target", "met")
_LEFT = {0, 2, 4}  # columns of words


def table(rows: Sequence[Row]) -> str:
    """The rows as text, with the notes and the failures below."""
    lines = [_HEAD, *map(cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [_line(cells, widths) for cells in lines]
    text.insert(1, "  ".join("-" * width for width in widths))
    notes = []
    for row in rows:
        versus = f" against {row.against}" if row.against not in ("", LIMIT) else ""
        notes += [f"  {row.name}{versus}: {row.note}"] if row.note else []
    problems = [f"  {problem}" for row in rows for problem in row.problems]
    for title, below in (("Notes", notes), ("NOT MEASURED", problems)):
        text += ["", title, *below] if below else []
    return "\n".join(text)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.ljust(width) if column in _LEFT else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()


def cells(row: Row) -> tuple[str, ...]:
    """A row as the words and figures of the table's columns."""
    spread = row.ratio_range
    return (
        row.name,
        _figure(row.ours),
        row.unit,
        "" if row.other is None else _figure(row.other),
        row.against,
        "" if row.ratio is None else _number(row.ratio),
        "" if spread is None or spread[0] == spread[1] else f"({spread[0]:.2f}-{spread[1]:.2f})",
        _target_text(row),
        {True: "yes", False: "NO", None: "" if row.target is None else "?"}[row.met],
    )


def _figure(measured: Measured) -> str:
    return NOT_MEASURED if isinstance(measured, NotMeasured) else _number(measured.median)


def _number(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def _target_text(row: Row) -> str:
    if row.target is None:
        return ""
    sign = "<=" if row.target.at_most else ">="
    if row.against == LIMIT and row.other is not None:
        return f"{sign} {_figure(row.other)}"
    return f"{sign} {_number(row.target.ratio)}x"


def _median(measured: Measured | None) -> float | None:
    return measured.median if isinstance(measured, Samples) else None


def _values(measured: Measured | None) -> Json:
    return list(measured.values) if isinstance(measured, Samples) else None
