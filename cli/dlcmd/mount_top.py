"""What `dlcmd top` shows: the difference of two samples of a mount's statistics, and its lines.

The mount counts since it began (`waits` in its statistics; diesel_fs/mounts/SEMANTICS.md says what
is counted), so two samples give one interval exactly. What is left of an interval, in which nothing
waited, belongs to the readers themselves if any was seen in it, else to nobody. Pure functions.
"""

from collections.abc import Iterator, Mapping, Sequence

from diesel_fs.mounts.waits import CAUSE_NAMES
from diesel_fs.names import shown

from .output import bytes_text

Stats = Mapping[str, object]

TASK_TIERS = ("mapped", "local", "peer", "store")

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


def interval(before: Stats, after: Stats, *, own_pid: int) -> dict[str, object]:
    """What happened between two samples: an object for `--json`. Times are in seconds.

    `own_pid` is the group of processes that takes the samples, which counts as no reader. The two
    samples were taken at different times.
    """
    passed_s = _number(after, "waits.clock_s") - _number(before, "waits.clock_s")

    def rate(path: str) -> float:
        return round(_difference(before, after, path) / passed_s, 3)

    causes_s = _causes_s(before, after, "waits.causes_s")
    waited_s = min(sum(causes_s.values()), passed_s)
    requests_s = _causes_s(before, after, "waits.requests_s")
    readers = [each for each in _readers(before, after, passed_s) if each["pid"] != own_pid]
    streams = list(_streams(before, after))
    is_seen = waited_s > 0 and any(each["requests_per_s"] for each in readers)
    is_seen = is_seen or any(each["moved"] for each in streams)
    left_s = round(passed_s - waited_s, 6)
    result: dict[str, object] = {
        "interval_s": round(passed_s, 6),
        "waited_s": round(waited_s, 6),
        "causes_s": causes_s,
        "reader_s": left_s if is_seen else 0.0,
        "idle_s": 0.0 if is_seen else left_s,
        "waiting": round(sum(requests_s.values()) / passed_s, 3),
        "requests_per_s": round(sum(map(_requests, readers)), 3),
        "read_bytes_per_s": rate("reads.bytes"),
        "reads_per_s": {"memory": rate("reads.hits"), "fetched": rate("reads.misses")},
        "fetched_bytes_per_s": rate("cache.fetched_bytes"),
    }
    if isinstance(_at(after, "residency"), Mapping):
        result |= {
            "pushed_bytes_per_s": rate("residency.pushed_bytes"),
            "resident_bytes": int(_number(after, "residency.resident_bytes")),
            "budget_bytes": int(_number(after, "residency.budget_bytes")),
        }
    if isinstance(_at(after, "task.client"), Mapping):
        tiers = {tier: rate(f"task.client.{tier}_reads") for tier in TASK_TIERS}
        result["task_reads_per_s"] = tiers
    plans = [{key: value for key, value in each.items() if key != "moved"} for each in streams]
    return {**result, "readers": readers, "plans": plans}


def short_line(found: Mapping[str, object]) -> str:
    """An interval as one line, for an output that is no terminal."""
    passed_s = _number(found, "interval_s")
    causes = _shares(found)
    largest = [f"{_LABELS[name]} {share:.0%}" for name, share in causes.items() if share >= 0.005]
    return (
        f"waited {_number(found, 'waited_s') / passed_s:.0%}"
        f" ({', '.join(largest) or 'nothing seen'});"
        f" {_number(found, 'requests_per_s'):,.0f} requests/s,"
        f" {bytes_text(_number(found, 'read_bytes_per_s'))}/s"
    )


def screen(stats: Stats, found: Mapping[str, object], columns: int, rows: int) -> list[str]:
    """The lines of the live view of an interval, as many and as long as the terminal takes."""
    lines = [*_head(stats), "", *_wait_lines(found), "", *_rate_lines(found)]
    readers, plans = found["readers"], found["plans"]
    if isinstance(readers, list) and readers:
        lines += ["", *_reader_lines(readers, _number(found, "interval_s"))]
    if isinstance(plans, list) and plans:
        lines += ["", *_plan_lines(plans)]
    if len(lines) > rows:
        lines = [*lines[: rows - 1], "..."]
    return [line[:columns] for line in lines]


def _head(stats: Stats) -> Iterator[str]:
    yield (
        f"{stats.get('dataset')} version {stats.get('version')} on"
        f" {shown(str(stats.get('mountpoint')).encode('utf-8', 'surrogateescape'))}"
        f" ({stats.get('session')} session, up {_number(stats, 'uptime_s'):,.0f} s)"
    )


def _shares(found: Mapping[str, object]) -> dict[str, float]:
    """The part of the interval that each cause has; all add up to 1."""
    passed_s = _number(found, "interval_s")
    causes = {name: _number(found, f"causes_s.{name}") for name in reversed(CAUSE_NAMES)}
    causes |= {name: _number(found, f"{name}_s") for name in ("reader", "idle")}
    return {name: seconds / passed_s for name, seconds in causes.items()}


def _wait_lines(found: Mapping[str, object]) -> Iterator[str]:
    waited = _number(found, "waited_s") / _number(found, "interval_s")
    waiting = _number(found, "waiting")
    yield f"readers waited {waited:.0%} of the time; {waiting:.1f} requests waited on average"
    for name, share in _shares(found).items():
        yield f"  {_LABELS[name]:<18}{share:>5.0%}  {_bar(share)}".rstrip()


def _bar(share: float) -> str:
    eighths = round(min(max(share, 0.0), 1.0) * _BAR_CELLS * 8)
    return _BARS[8] * (eighths // 8) + _BARS[eighths % 8].strip()


def _rate_lines(found: Mapping[str, object]) -> Iterator[str]:
    yield (
        f"requests {_number(found, 'requests_per_s'):,.0f}/s"
        f"   read {bytes_text(_number(found, 'read_bytes_per_s'))}/s"
        f"   from the mount's memory {_number(found, 'reads_per_s.memory'):,.0f}/s"
        f"   fetched {_number(found, 'reads_per_s.fetched'):,.0f}/s"
        f" ({bytes_text(_number(found, 'fetched_bytes_per_s'))}/s)"
    )
    tiers = found.get("task_reads_per_s")
    if isinstance(tiers, Mapping):
        rates = [f"{tier} {_number(tiers, tier):,.0f}/s" for tier in TASK_TIERS]
        yield f"of the task: {'   '.join(rates)}"
    if "resident_bytes" in found:
        yield (
            f"page cache {bytes_text(_number(found, 'resident_bytes'))} of"
            f" {bytes_text(_number(found, 'budget_bytes'))}"
            f"   pushed {bytes_text(_number(found, 'pushed_bytes_per_s'))}/s"
        )


def _reader_lines(readers: Sequence[Mapping[str, object]], passed_s: float) -> Iterator[str]:
    yield f"{'reader':<26}{'waited':>7}{'requests/s':>12}  for"
    for each in readers:
        waited = _number(each, "waited_s") / passed_s
        causes = {name: _number(each, f"causes_s.{name}") / passed_s for name in CAUSE_NAMES}
        largest = sorted(causes, key=lambda name: -causes[name])
        text = ", ".join(f"{name} {causes[name]:.0%}" for name in largest if causes[name] >= 0.005)
        rate = _number(each, "requests_per_s")
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
            f"{each['stream']!s:<26.26}{each['epoch']!s:>7}{_number(each, 'position'):>12,.0f}"
            f"{_number(each, 'length'):>12,.0f}{_number(each, 'entries_per_s'):>10,.0f}"
        )


def _readers(before: Stats, after: Stats, passed_s: float) -> Iterator[dict[str, object]]:
    """What each reader did in the interval; readers of which nothing came are left out."""
    earlier = {_key(each): each for each in _list(before, "waits.readers")}
    for each in _list(after, "waits.readers"):
        old = earlier.get(_key(each), {})
        requests = _difference(old, each, "requests")
        if requests or _number(each, "waiting"):
            yield {
                "rank": each["rank"],
                "pid": each["pid"],
                "command": each["command"],
                "requests_per_s": round(requests / passed_s, 3),
                "waited_s": round(_difference(old, each, "waited_s"), 6),
                "causes_s": _causes_s(old, each, "causes_s"),
            }


def _key(reader: Mapping[str, object]) -> tuple[object, object]:
    """What tells a reader from others: its rank, else its process."""
    rank = reader["rank"]
    return rank, None if rank is not None else reader["pid"]


def _streams(before: Stats, after: Stats) -> Iterator[dict[str, object]]:
    earlier = {each["name"]: each for each in _list(before, "residency.streams")}
    for each in _list(after, "residency.streams"):
        old = earlier.get(each["name"], {})
        place = each["epoch"], each["position"]
        yield {
            "stream": each["name"],
            "epoch": each["epoch"] if _number(each, "epoch") >= 0 else None,
            "position": each["position"],
            "length": each["length"],
            "entries_per_s": round(_number(each, "entries_per_s"), 3),
            "moved": bool(old) and (old["epoch"], old["position"]) != place,
        }


def _causes_s(before: Stats, after: Stats, path: str) -> dict[str, float]:
    return {name: round(_difference(before, after, f"{path}.{name}"), 6) for name in CAUSE_NAMES}


def _difference(before: Stats, after: Stats, path: str) -> float:
    """How much a counter has grown. One that began again (as the prefetch worker's) has not."""
    return max(_number(after, path) - _number(before, path), 0.0)


def _requests(reader: Mapping[str, object]) -> float:
    return _number(reader, "requests_per_s")


def _at(stats: Stats, path: str) -> object:
    found: object = stats
    for name in path.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _number(stats: Stats, path: str) -> float:
    """The number at a path of names, with dots between; 0 where there is none."""
    found = _at(stats, path)
    return float(found) if isinstance(found, int | float) else 0.0


def _list(stats: Stats, path: str) -> list[Mapping[str, object]]:
    found = _at(stats, path)
    return [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []
