"""The lines of `dlcmd top`, made from the figures of an interval (`mount_figures.py`). Pure."""

from collections.abc import Iterator, Mapping, Sequence

from diesel_fs.mounts.statistics.waits import CAUSE_NAMES
from diesel_fs.names import shown

from .mount_figures import TASK_TIERS, Stats, number_at
from .output import bytes_text

_LABELS = {
    "store": "object store",
    "peer": "nodes of the task",
    "decompression": "decompression",
    "prefetch": "prefetch worker",
    "mount": "the mount itself",
    "metadata": "metadata",
    "reader": "readers at work",
    "idle": "nothing seen",
}
_BAR_CELLS = 30
_BARS = " ▏▎▍▌▋▊▉█"


def short_line(found: Mapping[str, object]) -> str:
    passed_s = number_at(found, "interval_s")
    causes = _shares(found)
    largest = [f"{_LABELS[name]} {share:.0%}" for name, share in causes.items() if share >= 0.005]
    return (
        f"waited {number_at(found, 'waited_s') / passed_s:.0%}"
        f" ({', '.join(largest) or 'nothing seen'});"
        f" {number_at(found, 'requests_per_s'):,.0f} requests/s,"
        f" {bytes_text(number_at(found, 'read_bytes_per_s'))}/s"
    )


def screen(stats: Stats, found: Mapping[str, object], columns: int, rows: int) -> list[str]:
    """The lines are cut to `rows` and `columns`. `found` has the figures of the interval before the
    sample `stats`."""
    lines = [*_head(stats), "", *_wait_lines(found), "", *_rate_lines(found)]
    readers, plans = found["readers"], found["plans"]
    if isinstance(readers, list) and readers:
        lines += ["", *_reader_lines(readers, number_at(found, "interval_s"))]
    if isinstance(plans, list) and plans:
        lines += ["", *_plan_lines(plans)]
    if len(lines) > rows:
        lines = [*lines[: rows - 1], "..."]
    return [line[:columns] for line in lines]


def _head(stats: Stats) -> Iterator[str]:
    yield (
        f"{stats.get('dataset')} version {stats.get('version')} on"
        f" {shown(str(stats.get('mountpoint')).encode('utf-8', 'surrogateescape'))}"
        f" ({stats.get('session')} session, up {number_at(stats, 'uptime_s'):,.0f} s)"
    )


def _shares(found: Mapping[str, object]) -> dict[str, float]:
    passed_s = number_at(found, "interval_s")
    causes = {name: number_at(found, f"causes_s.{name}") for name in reversed(CAUSE_NAMES)}
    causes |= {name: number_at(found, f"{name}_s") for name in ("reader", "idle")}
    return {name: seconds / passed_s for name, seconds in causes.items()}


def _wait_lines(found: Mapping[str, object]) -> Iterator[str]:
    waited = number_at(found, "waited_s") / number_at(found, "interval_s")
    waiting = number_at(found, "waiting")
    yield f"readers waited {waited:.0%} of the time; {waiting:.1f} requests waited on average"
    for name, share in _shares(found).items():
        yield f"  {_LABELS[name]:<18}{share:>5.0%}  {_bar(share)}".rstrip()


def _bar(share: float) -> str:
    eighths = round(min(max(share, 0.0), 1.0) * _BAR_CELLS * 8)
    return _BARS[8] * (eighths // 8) + _BARS[eighths % 8].strip()


def _rate_lines(found: Mapping[str, object]) -> Iterator[str]:
    yield (
        f"requests {number_at(found, 'requests_per_s'):,.0f}/s"
        f"   read {bytes_text(number_at(found, 'read_bytes_per_s'))}/s"
        f"   from the mount's memory {number_at(found, 'reads_per_s.memory'):,.0f}/s"
        f"   fetched {number_at(found, 'reads_per_s.fetched'):,.0f}/s"
        f" ({bytes_text(number_at(found, 'fetched_bytes_per_s'))}/s)"
    )
    tiers = found.get("task_reads_per_s")
    if isinstance(tiers, Mapping):
        rates = [f"{tier} {number_at(tiers, tier):,.0f}/s" for tier in TASK_TIERS]
        yield f"of the task: {'   '.join(rates)}"
    if "resident_bytes" in found:
        yield (
            f"page cache {bytes_text(number_at(found, 'resident_bytes'))} of"
            f" {bytes_text(number_at(found, 'budget_bytes'))}"
            f"   pushed {bytes_text(number_at(found, 'pushed_bytes_per_s'))}/s"
        )


def _reader_lines(readers: Sequence[Mapping[str, object]], passed_s: float) -> Iterator[str]:
    yield f"{'reader':<26}{'waited':>7}{'requests/s':>12}  for"
    for each in readers:
        waited = number_at(each, "waited_s") / passed_s
        causes = {name: number_at(each, f"causes_s.{name}") / passed_s for name in CAUSE_NAMES}
        largest = sorted(causes, key=lambda name: -causes[name])
        text = ", ".join(f"{name} {causes[name]:.0%}" for name in largest if causes[name] >= 0.005)
        rate = number_at(each, "requests_per_s")
        yield f"{_reader_name(each):<26.26}{waited:>7.0%}{rate:>12,.0f}  {text}".rstrip()


def _reader_name(reader: Mapping[str, object]) -> str:
    command = shown(str(reader["command"]).encode("utf-8", "surrogateescape"))
    if reader["rank"] is not None:
        return f"rank {reader['rank']} ({command})"
    return f"process {reader['pid']} ({command})" if reader["pid"] else "not to be seen"


def _plan_lines(plans: Sequence[Mapping[str, object]]) -> Iterator[str]:
    yield f"{'plan':<26}{'epoch':>7}{'position':>12}{'of':>12}{'files/s':>10}"
    for each in plans:
        yield (
            f"{each['stream']!s:<26.26}{each['epoch']!s:>7}{number_at(each, 'position'):>12,.0f}"
            f"{number_at(each, 'length'):>12,.0f}{number_at(each, 'entries_per_s'):>10,.0f}"
        )
