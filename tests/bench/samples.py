"""Repeats measurements of two or more sides (ours and peers) in turns, and takes the medians.

The sides alternate within a round, and each round starts with another side. So a drift of the
machine (its disk, its neighbours, its clock) affects all sides alike.
"""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Side = Callable[[], Mapping[str, float]]
"""One run of one side: it makes its preparations, and returns its figures by name."""

OURS = "ours"


class PeerMissing(Exception):
    """A peer is not installed, or did not work here; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Samples:
    """The figures of one side for one quantity, round by round."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def map(self, convert: Callable[[float], float]) -> "Samples":
        return Samples(tuple(map(convert, self.values)))


@dataclass(frozen=True, slots=True)
class NotMeasured:
    """Stands for the samples of a peer that is missing."""

    reason: str

    def map(self, convert: Callable[[float], float]) -> "NotMeasured":
        return self


Measured: TypeAlias = Samples | NotMeasured


@dataclass(frozen=True, slots=True)
class Rounds:
    """The figures of all sides and rounds of a benchmark."""

    runs: Mapping[str, Sequence[Mapping[str, float]]]
    missing: Mapping[str, NotMeasured]

    def of(self, side: str, quantity: str) -> Measured:
        """The samples of a figure of one side; all sides have equally many."""
        if side in self.missing:
            return self.missing[side]
        return Samples(tuple(run[quantity] for run in self.runs[side]))

    def ours(self, quantity: str) -> Measured:
        return self.of(OURS, quantity)


def alternate(rounds: int, sides: Mapping[str, Side]) -> Rounds:
    """Run each side `rounds` times, in turns. A missing peer is left out from then on."""
    names = list(sides)
    runs: dict[str, list[Mapping[str, float]]] = {name: [] for name in names}
    missing: dict[str, NotMeasured] = {}
    for number in range(rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            if name in missing:
                continue
            try:
                runs[name].append(sides[name]())
            except PeerMissing as error:
                missing[name] = NotMeasured(str(error))
                progress(f"NOT MEASURED: {name}: {error}")
            else:
                shown = ", ".join(f"{key} {value:.4g}" for key, value in runs[name][-1].items())
                progress(f"{number + 1}/{rounds} {name}: {shown}")
    return Rounds(runs, missing)


def repeat(rounds: int, ours: Side) -> Rounds:
    """Run our side alone, for figures that have fixed limits."""
    return alternate(rounds, {OURS: ours})


def progress(text: str) -> None:
    """Print a line of progress to stderr; stdout has only the table."""
    print(f"  {text}", file=sys.stderr, flush=True)
