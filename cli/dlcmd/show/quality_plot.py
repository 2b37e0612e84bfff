"""Draws how well orders mix, over the size of their groups, as an SVG. Pure.

Colours work on light and dark backgrounds.
"""

import math
from html import escape

from diesel_fs.orders.quality import OrderQuality, QualityReport

from .output import bytes_text

_WIDTH, _HEIGHT = 760, 430
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 150, 50, 90  # margins
_LINE, _END = "#2f7ed8", "#888888"
_PERCENT_STEP = 20
_TEXT_HEIGHT = 15


def quality_svg(report: QualityReport, title: str) -> str:
    """Plots how many fully shuffled files a batch is worth, in percent, and the memory of the
    order. Dashed lines show no shuffle and full shuffle."""
    sizes = list(report.by_group_size)
    shown = [*sizes, max(report.chunks, *sizes)]
    lowest, highest = math.log(shown[0]), math.log(max(shown[-1], shown[0] + 1))

    def x(size: int) -> float:
        wide = _WIDTH - _LEFT - _RIGHT
        return _LEFT + wide * (math.log(size) - lowest) / max(highest - lowest, 1e-9)

    def y(percent: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * min(percent, 110) / 110

    parts = [_text(_LEFT, 24, title, size=15)]
    for percent in range(0, 101, _PERCENT_STEP):
        parts.append(_rule(y(percent), "0.25"))
        parts.append(_text(_LEFT - 8, y(percent) + 4, f"{percent} %", anchor="end"))
    below = -float(_TEXT_HEIGHT)
    for name, end in (("full shuffle", report.full), ("no shuffle", report.packed)):
        at = y(worth_percent(end))
        parts.append(_rule(at, "1", stroke=_END, dash="6 4"))
        below = max(at + 4, below + _TEXT_HEIGHT)
        label = f"{name}, {bytes_text(end.memory_bytes)}"
        parts.append(_text(_WIDTH - _RIGHT + 8, below, label))
    points = [(x(size), y(worth_percent(each))) for size, each in report.by_group_size.items()]
    path = " ".join(f"{across:.1f},{down:.1f}" for across, down in points)
    parts.append(f'<polyline points="{path}" fill="none" stroke="{_LINE}" stroke-width="2"/>')
    for (across, down), (size, each) in zip(points, report.by_group_size.items(), strict=True):
        tooltip = (
            f"G = {size}: {worth_percent(each):.0f} % of a batch, {bytes_text(each.memory_bytes)}"
        )
        parts.append(
            f'<circle cx="{across:.1f}" cy="{down:.1f}" r="4" fill="{_LINE}">'
            f"<title>{tooltip}</title></circle>"
        )
        parts.append(_text(across, _HEIGHT - _BOTTOM + 18, f"{size}", anchor="middle"))
        memory = bytes_text(each.memory_bytes)
        parts.append(_text(across, _HEIGHT - _BOTTOM + 36, memory, anchor="middle", size=10))
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    axis = f"chunks in a group (of {report.chunks:,}), and the memory of two groups"
    parts.append(_text(middle, _HEIGHT - 22, axis, anchor="middle"))
    what = f"worth of a batch of {report.batch_files} files, in fully shuffled files"
    parts.append(_text(_LEFT, _TOP - 8, what, size=11))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}"'
        f' width="{_WIDTH}" height="{_HEIGHT}" font-family="sans-serif" fill="#777777">'
        f"<title>{_shown(title)}</title>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def worth_percent(quality: OrderQuality) -> float:
    """A batch is worth this many fully shuffled files, in percent of its files
    (`orders/quality.py`); 100 if all batches have the same classes."""
    return 100 / max(quality.design_effect or 1.0, 1e-9)


def _shown(text: str) -> str:
    return escape(
        "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)
    )


def _text(x: float, y: float, text: str, *, anchor: str = "start", size: int = 12) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}"'
    return f"<text {place}>{_shown(text)}</text>"


def _rule(y: float, opacity: str, *, stroke: str = _END, dash: str = "") -> str:
    return (
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{stroke}"'
        f' stroke-opacity="{opacity}" stroke-dasharray="{dash}"/>'
    )
