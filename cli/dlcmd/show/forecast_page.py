"""The page of `dlcmd forecast --html`: reads and waits of each policy and order, as bars. Pure."""

from collections.abc import Sequence
from html import escape

from diesel_fs.forecast.kept import TIERS
from diesel_fs.forecast.report import UNITS
from diesel_fs.forecast.simulate import Forecast

from .forecast import ForecastResult
from .output import bytes_text

_WIDTH, _BAR, _GAP = 860, 18, 8  # pixels
_LEFT, _RIGHT, _TOP = 130, 150, 34
_RANKS_MAX = 64

_STYLE = """
body { font: 15px/1.5 sans-serif; max-width: 960px; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 } code { background: #eee; padding: 0 .3em }
td, th { padding: .2em .7em; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left } text { font-size: 12px; fill: #555 }
"""

_TIER_COLOURS = ("#27ae60", "#2f7ed8", "#8e6bbf", "#c0392b")
_COMPUTE, _STALL = "#b8c7d3", "#c0392b"

_Bars = Sequence[tuple[str, Sequence[float], str]]


def forecast_page(result: ForecastResult) -> str:
    forecasts, best, dataset = result.forecasts, result.best, result.options.dataset
    # The last epoch stands for all but the first
    later = [(f"{each.job.shuffle}, {each.policy}", each.later) for each in forecasts]
    times = [
        (name, (each.compute_s, each.seconds - each.compute_s), f"{each.seconds:,.1f} s")
        for name, each in later
    ]
    tiers = [
        (name, [100 * count / max(sum(each.files), 1) for count in each.files],
         f"{100 * each.on_time:.1f} % on time")
        for name, each in later
    ]  # fmt: skip
    store = [
        (name, [float(each.store_bytes)],
         f"{bytes_text(each.store_bytes)}, {each.store_requests:,} requests")
        for name, each in later
    ]  # fmt: skip
    ranks = [
        (f"rank {rank}", [stall_s], f"{stall_s:,.2f} s")
        for rank, stall_s in enumerate(best.later.stall_s[:_RANKS_MAX])
    ]
    plots = [
        _plot("seconds of a later epoch: computing, and waiting", times, (_COMPUTE, _STALL)),
        _plot(f"where files come from, in percent: {', '.join(TIERS)}", tiers, _TIER_COLOURS),
        # These bars are bytes, not stalls: only the colour is the same
        _plot("bytes that are read from the store in a later epoch", store, (_STALL,)),
        _plot(
            f"seconds that each rank waits ({best.job.shuffle}, {best.policy})", ranks, (_STALL,)
        ),
    ]
    code = "".join(f"<p><code>{escape(line)}</code></p>" for line in result.commands)
    assumed = f"<p>Assumed: {escape(', '.join(result.assumed))}.</p>" if result.assumed else ""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>dlcmd forecast {escape(dataset)}</title><style>{_STYLE}</style></head><body>\n"
        f"<h1>What training on {escape(dataset)} will read and wait for</h1>\n"
        f"<p>Recommended: {escape(best.policy)} in {best.job.shuffle} order.</p>{code}\n"
        f"{''.join(plots)}\n{_table(forecasts, result.sizes)}\n{assumed}\n</body></html>\n"
    )


def _table(forecasts: Sequence[Forecast], smallest: Sequence[int | None]) -> str:
    head = ("order, policy", "keeps", "first epoch", "later epochs", "stalled", "from the store",
            "requests", "written to SSDs", *(["smallest SSD"] if smallest else []))  # fmt: skip
    rows = []
    for at, each in enumerate(forecasts):
        later = each.later
        cells = [
            f"{each.job.shuffle}, {each.policy}",
            UNITS[each.layout],
            f"{each.epochs[0].seconds:,.1f} s",
            f"{later.seconds:,.1f} s",
            f"{100 * later.stalled:.1f} %",
            bytes_text(later.store_bytes),
            f"{later.store_requests:,}",
            bytes_text(later.written_bytes),
        ]
        if smallest:
            least = smallest[at]
            cells.append("none" if least is None else bytes_text(least))
        rows.append("".join(f"<td>{escape(cell)}</td>" for cell in cells))
    heads = "".join(f"<th>{name}</th>" for name in head)
    return f"<table><tr>{heads}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _plot(title: str, bars: _Bars, colours: Sequence[str]) -> str:
    longest = max((sum(pieces) for _, pieces, _ in bars), default=0.0) or 1.0
    height = _TOP + len(bars) * (_BAR + _GAP) + _GAP
    parts = [f'<text x="0" y="18">{escape(title)}</text>']
    for number, (name, pieces, behind) in enumerate(bars):
        top, left = _TOP + number * (_BAR + _GAP), float(_LEFT)
        middle = top + _BAR * 0.75
        parts.append(
            f'<text x="{_LEFT - 8}" y="{middle:.1f}" text-anchor="end">{escape(name)}</text>'
        )
        for piece, colour in zip(pieces, colours, strict=False):
            wide = (_WIDTH - _LEFT - _RIGHT) * max(piece, 0.0) / longest
            parts.append(
                f'<rect x="{left:.1f}" y="{top}" width="{wide:.1f}" height="{_BAR}"'
                f' fill="{colour}"><title>{piece:,.6g}</title></rect>'
            )
            left += wide
        parts.append(f'<text x="{left + 6:.1f}" y="{middle:.1f}">{escape(behind)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}"'
        f' height="{height}" font-family="sans-serif"><title>{escape(title)}</title>'
        f"{''.join(parts)}</svg>\n"
    )
