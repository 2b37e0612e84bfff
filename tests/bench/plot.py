"""Draws plots with `plot_program.py`, which runs in the peers' environment, as only that has
matplotlib."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from .peers import installed, output_of

PROGRAM = Path(__file__).with_name("plot_program.py")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a plot: its name, and its value at each x."""

    name: str
    values: Sequence[float]


def plot_lines(
    file: Path, title: str, x_name: str, y_name: str, places: Sequence[int], lines: Sequence[Line]
) -> None:
    """Draw lines over the same x values into a PNG. Raises PeerMissing without matplotlib."""
    drawn = {
        "title": title,
        "x": x_name,
        "y": y_name,
        "places": list(places),
        "lines": [asdict(line) for line in lines],
    }
    output_of([installed("python"), "-P", str(PROGRAM), str(file), json.dumps(drawn)])
