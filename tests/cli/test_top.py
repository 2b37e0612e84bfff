"""The view that `dlcmd top` makes of two samples. `tests/mounts/test_wait_reports.py` runs it on
mounts.
"""

import json
import re
from pathlib import Path

import pytest

from diesel_fs.mounts.statistics.waits import CAUSE_NAMES
from dlcmd.show.mount_figures import interval, number_at
from dlcmd.show.mount_stats import stats_lines
from dlcmd.show.mount_top import screen, short_line
from tests.rows import each_row
from tests.trees import write

from .conftest import Dlcmd

OWN = 77


def figures(seconds: float, cause: str = "store", requests: int = 0) -> dict[str, object]:
    causes = {name: seconds if name == cause else 0.0 for name in CAUSE_NAMES}
    return {
        "waited_s": seconds, "causes_s": causes, "requests_s": dict(causes), "waiting": 0,
        "requests": requests,
    }  # fmt: skip


def sample(
    clock_s: float, waited_s: float = 0.0, position: int = 0, **requests: int
) -> dict[str, object]:
    readers: list[dict[str, object]] = [
        {"rank": 0, "pid": 5, "command": "python"},
        {"rank": None, "pid": 6, "command": "cat\x1b[31m"},
        {"rank": None, "pid": OWN, "command": "dlcmd"},
    ]
    counts = [requests.get(name, 0) for name in ("rank", "cat", "own")]
    return {
        "dataset": "pets", "version": 7, "mountpoint": "/mnt", "session": "native",
        "uptime_s": clock_s,
        "reads": {"bytes": 1000 * position, "hits": position, "misses": 1},
        "cache": {"fetched_bytes": 0},
        "residency": {
            "resident_bytes": 10**6, "budget_bytes": 10**9, "pushed_bytes": 5,
            "streams": [
                {"name": "run:1", "epoch": 0, "position": position, "length": 100,
                 "entries_per_s": 5.0}
            ],
        },
        "waits": {
            "clock_s": clock_s,
            **figures(waited_s),
            "readers": [
                {**each, **figures(waited_s if count else 0.0, requests=count)}
                for each, count in zip(readers, counts, strict=True)
            ],
        },
    }  # fmt: skip


def test_the_remainder_of_an_interval_belongs_to_readers_that_were_seen() -> None:
    """A request shows a reader, or the position of a plan; the samples themselves do not."""
    first = sample(100.0)
    found = interval(first, sample(102.0, 0.5, rank=40), own_pid=OWN)
    assert (found["interval_s"], found["waited_s"], found["waiting"]) == (2.0, 0.5, 0.25)
    assert (found["reader_s"], found["idle_s"], found["requests_per_s"]) == (1.5, 0.0, 20.0)
    found = interval(first, sample(102.0, position=10), own_pid=OWN)
    assert (found["reader_s"], found["idle_s"], found["read_bytes_per_s"]) == (2.0, 0.0, 5000.0)
    found = interval(first, sample(102.0, 0.5, own=3), own_pid=OWN)
    assert (found["reader_s"], found["idle_s"], found["readers"]) == (0.0, 1.5, [])
    before, after = sample(100.0, 9.0, position=50, rank=1000), sample(101.0, 0.0, rank=3)
    found = interval(before, after, own_pid=OWN)  # of counters that begin again
    assert (found["waited_s"], found["read_bytes_per_s"], found["requests_per_s"]) == (0, 0, 0)
    assert interval(before, {"waits": {"clock_s": 101.0}}, own_pid=OWN)["readers"] == []


def test_the_view_shows_causes_readers_and_plans() -> None:
    found = interval(sample(100.0), sample(101.0, 0.25, position=10, rank=9, cat=2), own_pid=OWN)
    text = "\n".join(screen(sample(101.0), found, 100, 40))
    for line in (
        "pets version 7 on /mnt (native session, up 101 s)",
        "readers waited 25% of the time; 0.2 requests waited on average",
        "object store        25%  ███████▌",
        "readers at work     75%  ██████████████████████▌",
        "page cache 1.0 MB of 1.0 GB",
        "rank 0 (python)               25%           9  store 25%",
        "run:1                           0          10         100         5",
    ):
        assert line in text, text
    assert "\x1b" not in text
    small = screen(sample(101.0), found, 20, 5)
    assert len(small) == 5
    assert max(map(len, small)) <= 20
    assert short_line(found) == (
        "waited 25% (object store 25%, readers at work 75%); 11 requests/s, 10.0 kB/s"
    )
    shown = list(stats_lines(sample(100.0, 2.5, rank=1234)))
    assert "how long readers have waited:" in shown
    assert "  rank 0 python: 1,234 requests, waited 2.5 s" in shown


@each_row(
    ("words", "message"),
    [
        ([], "is no mount of a dataset: nothing is mounted there"),
        (["--interval", "0"], "0.1<=x<=3600"),
        (["--interval", "nan"], "is no number"),
        (["--count", "0"], "x>=1"),
    ],
)
def test_bad_uses_of_top(dlcmd: Dlcmd, tmp_path: Path, words: list[str], message: str) -> None:
    assert message in dlcmd("top", *words, tmp_path, code=2).err


@pytest.mark.fuse
def test_mount_prints_the_address_of_its_metrics(dlcmd: Dlcmd, tmp_path: Path) -> None:
    dlcmd("put", write(tmp_path / "src", {"a": b"1"}), "pets")
    at = tmp_path / "mnt"
    assert "HOST:PORT" in dlcmd("mount", "--metrics", "here", "pets", at, code=2).err
    output = dlcmd("mount", "--metrics", "0", "pets", at).out.decode()
    try:
        found = re.fullmatch(rf"pets is mounted on {at}; metrics at (http://\S+/metrics)\n", output)
        assert found, output
        assert dlcmd("--json", "stats", at).objects[0]["metrics"] == found[1]
    finally:
        dlcmd("umount", at)


@each_row("number", ["1e999", "-Infinity", "NaN", "1" + 400 * "0", '"7"', "null"])
def test_a_senseless_number_counts_as_missing(number: str) -> None:
    """The program of another user's mount may write anything into its statistics."""
    assert number_at(json.loads(f'{{"waits": {{"clock_s": {number}}}}}'), "waits.clock_s") == 0.0
