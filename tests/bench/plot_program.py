"""Draws lines into a PNG; runs in the peers' environment, which has matplotlib.

python plot_program.py FILE JSON        (`plot.py` makes the JSON)
"""

import json
import sys

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

WIDTH_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 8, 4.5, 110


def main(file: str, text: str) -> None:
    """Draw the plot; both axes are logarithmic."""
    drawn = json.loads(text)
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    axes = figure.add_subplot()
    for line in drawn["lines"]:
        axes.plot(drawn["places"], line["values"], marker="o", label=line["name"])
    axes.set(title=drawn["title"], xlabel=drawn["x"], ylabel=drawn["y"])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(drawn["places"], [str(place) for place in drawn["places"]])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.grid(visible=True, which="major", alpha=0.4)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.savefig(file, dpi=DOTS_PER_INCH, metadata={"Software": None})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
