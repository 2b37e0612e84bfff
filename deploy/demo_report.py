"""The page that `make demo` leaves: commands, rates, and whether the training waited."""

import base64
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT, _MARGIN = 420, 160, 40  # of a plot, in pixels

_STYLE = """
:root { color-scheme: light dark; --line: #2a6fb0; --soft: #8884 }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2em auto; padding: 0 1em }
h1 { margin-bottom: 0 } figure { display: inline-block; margin: 1em 1em 1em 0; max-width: 100% }
table { border-collapse: collapse } td, th { padding: .2em .9em; text-align: right;
border-bottom: 1px solid var(--soft) } td:first-child, th:first-child { text-align: left }
svg { max-width: 100% } pre { overflow: auto }
svg text { font-size: 11px; fill: currentColor; opacity: .7 }
polyline { fill: none; stroke: var(--line); stroke-width: 2 } circle { fill: var(--line) }
.grid { stroke: var(--soft) } .waited { fill: #c0392b } .computed { fill: #8fa9bd }
img { max-width: 100%; border: 1px solid var(--soft) } code { background: var(--soft) }
"""


@dataclass(frozen=True, slots=True)
class Epoch:
    files_per_s: float
    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True)
class Demo:
    commands: Sequence[str]
    files: int
    size_bytes: int
    put_files_per_s: float
    epochs: Sequence[Epoch]
    waiting_page: str
    """Empty without a report."""
    screenshot: bytes
    """Empty without a browser."""


def demo_page(demo: Demo) -> str:
    rates = [each.files_per_s for each in demo.epochs]
    accuracies = [each.accuracy for each in demo.epochs]
    rows = "".join(
        f"<tr><td>{number}</td><td>{each.files_per_s:,.0f}</td><td>{each.loss:.3f}</td>"
        f"<td>{each.accuracy:.3f}</td></tr>"
        for number, each in enumerate(demo.epochs, 1)
    )
    packed = f"{demo.files:,} images ({demo.size_bytes / 1e6:,.1f} MB) were packed at"
    packed += f" {demo.put_files_per_s:,.0f} files/s, mounted, and trained on with torchvision's"
    packed += " <code>ImageFolder</code>; the originals were deleted before. This was typed:"
    heads = "<th>epoch</th><th>files/s</th><th>loss</th><th>held-out accuracy</th>"
    parts = [
        f"<p>{packed}</p>",
        f"<pre>{escape(chr(10).join(demo.commands))}</pre>",
        "<h2>The training</h2>",
        _plot("files a second, with training", rates, max(rates, default=1.0)),
        _plot("held-out accuracy", accuracies, 1.0),
        f"<table><tr>{heads}</tr>{rows}</table>",
    ]
    if demo.waiting_page:
        body = demo.waiting_page.partition("<body>")[2].partition("</body>")[0]
        parts.append(re.sub(r"(</?h)([12])", lambda tag: f"{tag[1]}{int(tag[2]) + 1}", body))
    if demo.screenshot:
        encoded = base64.b64encode(demo.screenshot).decode()
        parts.append(
            "<h2>What the dashboard showed meanwhile</h2>"
            f'<img alt="the page of dlcmd dashboard" src="data:image/png;base64,{encoded}">'
        )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>DIESEL-FS demo</title><style>{_STYLE}</style></head><body>\n"
        "<h1>DIESEL-FS demo</h1>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _plot(title: str, values: Sequence[float], top: float) -> str:
    step = (_WIDTH - 2 * _MARGIN) / max(len(values) - 1, 1)
    points = [
        (_MARGIN + number * step, _HEIGHT - 20 - (_HEIGHT - 40) * value / top)
        for number, value in enumerate(values)
    ]
    grid = "".join(
        f'<line class="grid" x1="{_MARGIN}" x2="{_WIDTH - _MARGIN}" y1="{y}" y2="{y}"/>'
        f'<text x="{_MARGIN - 4}" y="{y + 4}" text-anchor="end">{_short(top * share)}</text>'
        for share in (0.0, 0.5, 1.0)
        for y in [_HEIGHT - 20 - (_HEIGHT - 40) * share]
    )
    names = "".join(
        f'<text x="{x:.0f}" y="{_HEIGHT - 4}" text-anchor="middle">{number}</text>'
        for number, (x, _) in enumerate(points, 1)
    )
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points)
    return (
        f'<figure><figcaption>{title}</figcaption><svg width="{_WIDTH}" height="{_HEIGHT}"'
        f' viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{title}, by epoch">'
        f'{grid}<polyline points="{line}"/>{dots}{names}</svg></figure>'
    )


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"
