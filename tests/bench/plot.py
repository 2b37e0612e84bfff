"""Draws plots with `plot_program.py`, which runs in the peers' environment: only that has
matplotlib.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .dlcmd import TREE
from .peers import installed, output_of
from .samples import PeerMissing, Rounds, Samples, progress
from .workbench import Workbench

PROGRAM = Path(__file__).with_name("plot_program.py")
TRIED = TREE / "build"
"""The folder for plots of runs with one round or small inputs, and of those that lack a peer; the
plots beside this module show medians of full runs."""


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot of the sides of a benchmark over x values. Its axes are logarithmic, or with
    `over_time` linear. The y axis of `differences` goes through 0: linear up to 1, and logarithmic
    beyond. `events` are x values that have a name."""

    name: str  # of its file
    title: str
    x_name: str
    y_name: str
    places: Sequence[float]
    over_time: bool = False
    differences: bool = False
    events: Sequence[tuple[float, str]] = ()

    @property
    def quantities(self) -> list[str]:
        """The names of the figures that each side has measured, one for each x value."""
        return [str(place) for place in self.places]


@dataclass(frozen=True, slots=True)
class Line:
    """The line of one side: a value for each x value, and its error if known."""

    name: str
    values: Sequence[float]
    errors: Sequence[float] | None = None


def plot_medians(bench: Workbench, plot: Plot, rounds: Rounds, shown: Mapping[str, str]) -> None:
    """Draw the median of each figure, for the measured sides of `shown`, under the names that
    `shown` gives."""
    lines = []
    for side, name in shown.items():
        measured = [rounds.of(side, quantity) for quantity in plot.quantities]
        medians = [each.median for each in measured if isinstance(each, Samples)]
        if len(medians) == len(measured):
            lines.append(Line(name, medians))
    is_whole = bench.rounds > 1 and bench.divisor == 1 and len(lines) == len(shown)
    draw(plot, lines, is_whole=is_whole)


def draw(plot: Plot, lines: Sequence[Line], *, is_whole: bool) -> None:
    """Draw lines, into the bench's folder if the run `is_whole`. Without matplotlib there is no
    plot, and a message."""
    file = (PROGRAM.parent if is_whole else TRIED) / f"{plot.name}.png"
    file.parent.mkdir(exist_ok=True)
    drawn = json.dumps({**asdict(plot), "lines": [asdict(line) for line in lines]})
    try:
        output_of([installed("python"), "-P", str(PROGRAM), str(file), drawn])
    except PeerMissing as error:
        progress(f"NOT PLOTTED: {error}")
    else:
        progress(f"plotted as {file}")
