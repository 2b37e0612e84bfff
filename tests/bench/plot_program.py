"""Draws lines into a PNG; runs in the peers' environment, which has matplotlib.

python plot_program.py FILE JSON        (`plot.py` makes the JSON)
"""

import json
import sys

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

WIDTH_INCHES, HEIGHT_INCHES, DOTS_PER_INCH = 8, 4.5, 110


def main(file: str, text: str) -> None:
    """Draw the plot. Both axes are logarithmic, or with `over_time` both are linear, and the lines
    have no marks. `differences` may be negative, and have marks."""
    drawn = json.loads(text)
    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    axes = figure.add_subplot()
    for line in drawn["lines"]:
        marker = "" if drawn["over_time"] and not drawn["differences"] else "o"
        places, values, errors = drawn["places"], line["values"], line["errors"]
        axes.errorbar(places, values, errors, marker=marker, label=line["name"], capsize=4)
    axes.set(title=drawn["title"], xlabel=drawn["x_name"], ylabel=drawn["y_name"])
    if drawn["over_time"]:
        if not drawn["differences"]:
            axes.set_ylim(bottom=0)
        elif drawn["events"]:
            axes.set_xticks([])  # the events name the positions
    else:
        axes.set_xscale("log", base=2)
        axes.set_yscale("symlog" if drawn["differences"] else "log")  # symlog: linear up to 1
        axes.set_xticks(drawn["places"], [str(place) for place in drawn["places"]])
    for place, what in drawn["events"]:
        axes.axvline(place, color="black", linestyle=":")
        above = axes.get_xaxis_transform()  # x in the data, y in parts of the height
        axes.text(place, 0.98, what, transform=above, fontsize="small", rotation=90, va="top")
    if drawn["differences"]:
        axes.axhline(0, color="black", linewidth=1)
        if not drawn["over_time"]:
            axes.set_yticks([-30, -10, -3, -1, -0.5, 0, 0.5, 1])
    digits = "+.3g" if drawn["differences"] else ",.0f"
    figures = FuncFormatter(lambda value, _: format(value, digits))
    axes.yaxis.set_major_formatter(figures)
    if axes.yaxis.get_minorticklabels():
        axes.yaxis.set_minor_formatter(figures)
    axes.grid(visible=True, which="major", alpha=0.4)
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    figure.savefig(file, dpi=DOTS_PER_INCH, metadata={"Software": None})


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
