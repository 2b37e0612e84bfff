"""The page of `dlcmd run --report`: how long the loops of a training command waited, and when."""

from collections.abc import Iterable, Sequence
from html import escape

from diesel_fs.torch.planner import Interval, LoopTimes, Summary

_WIDTH, _HEIGHT = 900, 120  # pixels
_BARS = 300
_EPOCHS_MAX = 100

_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 960px; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } code { background: #eee; padding: 0 .3em }
td, th { padding: .2em .9em; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left }
.waited { fill: #c0392b } .computed { fill: #b8c7d3 } text { font-size: 11px; fill: #555 }
"""


def report_page(command: str, code: int, summary: Summary) -> str:
    lines = "".join(f"<li>{escape(line)}</li>" for line in summary.lines(again=True))
    loops = "".join(_loop(each) for each in summary.loops.values())
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>dlcmd run</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>Where the training waited</h1>\n<p><code>{escape(command)}</code> ended with"
        f" exit code {code}.</p>\n<ul>{lines}</ul>\n"
        f"{loops or '<p>No loop over a DataLoader was seen.</p>'}\n</body></html>\n"
    )


def _loop(loop: LoopTimes) -> str:
    epochs = loop.epochs()
    rows = "".join(_row(f"epoch {each.epoch + 1}", each) for each in epochs[-_EPOCHS_MAX:])
    return (
        f"<h2>{escape(loop.name)}</h2>\n{_plot(loop.intervals)}\n"
        "<table><tr><th></th><th>batches</th><th>seconds</th><th>waited</th><th>share</th>"
        f"<th>ms a batch</th><th>of these waited</th></tr>{rows}</table>\n"
    )


def _row(name: str, times: Interval) -> str:
    batches, total_s = times.batches or 1, times.total_s or 1.0
    cells = (
        f"{times.batches:,}", f"{times.total_s:.1f}", f"{times.waited_s:.1f}",
        f"{times.waited_s / total_s:.1%}", f"{1000 * times.total_s / batches:.1f}",
        f"{1000 * times.waited_s / batches:.1f}",
    )  # fmt: skip
    return f"<tr><td>{name}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _plot(intervals: Sequence[Interval]) -> str:
    if not intervals:
        return ""
    start_s = min(each.end_s - each.total_s for each in intervals)
    span_s = max(intervals[-1].end_s - start_s, 1e-3)
    bars = "".join(_bars(_binned(intervals, start_s, span_s), span_s / _BARS))
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT + 20}" role="img" aria-label="share of waiting">'
        f'{bars}<text x="0" y="{_HEIGHT + 14}">{start_s:.0f} s</text>'
        f'<text x="{_WIDTH}" y="{_HEIGHT + 14}" text-anchor="end">{start_s + span_s:.0f} s</text>'
        "</svg><br>dark: waiting for data; light: computing; white: neither, between two epochs"
    )


def _binned(
    intervals: Sequence[Interval], start_s: float, span_s: float
) -> list[tuple[float, float]]:
    bins = [(0.0, 0.0)] * _BARS
    width_s = span_s / _BARS
    for each in intervals:
        if not each.total_s:
            continue
        first = (each.end_s - each.total_s - start_s) / width_s
        last = (each.end_s - start_s) / width_s
        for at in range(max(int(first), 0), min(int(last), _BARS - 1) + 1):
            part = (min(last, at + 1) - max(first, at)) / (last - first)
            waited_s, computed_s = bins[at]
            bins[at] = waited_s + part * each.waited_s, computed_s + part * each.computed_s
    return bins


def _bars(bins: Sequence[tuple[float, float]], width_s: float) -> Iterable[str]:
    step = _WIDTH / _BARS
    for at, times in enumerate(bins):
        top = float(_HEIGHT)
        for name, seconds in zip(("waited", "computed"), times, strict=True):
            height = min(seconds / width_s, 1.0) * _HEIGHT
            height = min(height, top)
            top -= height
            if height > 0:
                yield (
                    f'<rect class="{name}" x="{at * step:.1f}" y="{top:.1f}" width="{step:.1f}"'
                    f' height="{height:.1f}"/>'
                )
