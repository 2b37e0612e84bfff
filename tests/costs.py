"""Counts the costs of each test, and prints which folders and tests take the time of a run.

A pytest plugin (`tests/conftest.py` loads it) adds to each test's report the processor time of
the test with all processes that it started, and the numbers of programs, mounts, processes that
import torch, and servers that it started. `pytest --junitxml=FILE` keeps them; `python -m
tests.costs FILE` prints them by folder and by kind of cost, with the slowest tests. `.ci/run`
prints that for each run.

Processor time is read from a control group that each pytest process makes for itself. If it may
not make one, only processes that have ended are counted.

Counts hardly depend on how busy the machine is, so they guard the suite against growth:
`tests/budget.json` has the limits of each folder in the fast tier, and `python -m tests.costs
--check FILE` fails beyond them. `--write` writes the table anew, with some room for tests that
start programs until something has happened. Programs that are started by a test's programs and
daemons are only in the processor time.
"""

import argparse
import json
import math
import os
import re
import resource
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from diesel_fs.system.daemons import DETACH

PROPERTY = "costs"
"""The name of the property of a report that holds the counts, as JSON."""

BUDGET = Path(__file__).with_name("budget.json")
BUDGETED = ("programs", "mounts", "torch")
SLOWEST = 20

_GROUPS = ("/sys/fs/cgroup/cpuacct", "/sys/fs/cgroup")  # version 1, then version 2
_SERVERS = ("redis-server", "moto", "swift", "memcached")
_PROBE = ["-I", "-S", "-c"]
_EXAMPLES = re.compile(r"(\d+) passing, (\d+) failing, and (\d+) invalid test cases")
_TORCH = re.compile(r"^\s*(?:import|from) torch\b", re.MULTILINE)


# counting -----------------------------------------------------------------------------------------


class Counts(Counter[str]):
    """The numbers of things that this process has started; an audit hook counts them."""

    def hear(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "subprocess.Popen":
            command = arguments[1]
            words = [os.fsdecode(each) for each in command] if isinstance(command, Sequence) else []
            self.add(words)
        elif event in ("os.fork", "os.forkpty"):
            self["forks"] += 1
        elif event == "time.sleep" and isinstance(arguments[0], int | float):
            self["slept_ms"] += round(arguments[0] * 1000)

    def add(self, words: Sequence[str]) -> None:
        is_python = any(Path(word).name.startswith("python") for word in words[:6])
        if words[1:4] == _PROBE and words[1:5] != [*DETACH]:
            self["probes"] += 1  # of a mount: the longer a test waits, the more
            return
        self["programs" if is_python else "other programs"] += 1
        if _mounts(words):
            self["mounts"] += 1
        if any(name in word for word in words[:8] for name in _SERVERS):
            self["servers"] += 1
        if is_python and any(_imports_torch(word) for word in words[1:6]):
            self["torch"] += 1


def _mounts(words: Sequence[str]) -> bool:
    is_daemon = any(
        word.startswith(("diesel_fs.mounts.daemon.supervisor", "tests.mounts.")) for word in words
    )
    return is_daemon or ("mount" in words and "dlcmd" in words)


def _imports_torch(word: str) -> bool:
    if word.startswith("torch.") or _TORCH.search(word):
        return True
    try:
        return word.endswith(".py") and bool(_TORCH.search(Path(word).read_text("utf-8")))
    except OSError:
        return False


def _own_cpu_s() -> float:
    mine, others = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return mine.ru_utime + mine.ru_stime + others.ru_utime + others.ru_stime


class ProcessorTime:
    """The processor time of this process and all that it started, from a control group."""

    def __init__(self) -> None:
        self._group: Path | None = None
        for mounted in map(Path, _GROUPS):
            group = mounted / f"diesel-tests-{os.getpid()}"
            with suppress(OSError):
                group.mkdir()
                if (group / "cpuacct.usage").exists() or (group / "cpu.stat").exists():
                    (group / "cgroup.procs").write_text(str(os.getpid()))
                    self._group = group
                    return
                group.rmdir()

    def seconds(self) -> float:
        if self._group is None:
            return _own_cpu_s()
        try:
            return int((self._group / "cpuacct.usage").read_text()) / 1e9
        except FileNotFoundError:
            text = (self._group / "cpu.stat").read_text(encoding="ascii")
            return int(text.split("usage_usec", 1)[1].split()[0]) / 1e6

    def close(self) -> None:
        """Leave the group, and remove it unless a process that was left behind is in it."""
        if self._group is not None:
            with suppress(OSError):
                (self._group.parent / "cgroup.procs").write_text(str(os.getpid()))
                self._group.rmdir()


class CostsPlugin:
    """Adds the cost of its three phases to each test's report."""

    def __init__(self) -> None:
        self.counts = Counts()
        self._time = ProcessorTime()
        self._before = (0.0, 0.0, self.counts.copy())
        sys.addaudithook(self.counts.hear)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._before = (self._time.seconds(), _own_cpu_s(), self.counts.copy())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        assert isinstance(report, pytest.TestReport)
        if report.when == "teardown":
            all_s, own_s, before = self._before
            costs: dict[str, float] = dict(self.counts - before)
            costs["cpu_s"] = round(self._time.seconds() - all_s, 4)
            costs["own_cpu_s"] = round(_own_cpu_s() - own_s, 4)
            costs["examples"] = examples(getattr(item, "hypothesis_statistics", ""))
            report.user_properties.append((PROPERTY, json.dumps(costs)))
        return report

    def pytest_unconfigure(self) -> None:
        self._time.close()


def examples(statistics: str) -> int:
    return sum(int(number) for row in _EXAMPLES.findall(statistics) for number in row)


# reading ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TestCosts:
    """One test: its name, its seconds, and its other costs."""

    name: str
    wall_s: float
    costs: Mapping[str, float]

    @property
    def folder(self) -> str:
        """The folder under `tests` that the test is in, as `peers` or `mounts/prefetch`."""
        return self.name.partition("::")[0].partition("/")[2].rpartition("/")[0] or "."


def read(junit: Path) -> list[TestCosts]:
    found = []
    for case in ET.parse(junit).iter("testcase"):  # noqa: S314  # our own file
        properties = {each.get("name"): each.get("value") for each in case.iter("property")}
        costs = json.loads(properties.get(PROPERTY) or "{}")
        path, _, rest = case.get("classname", "").partition(".test_")
        module, *classes = rest.split(".")
        words = [f"{path.replace('.', '/')}/test_{module}.py", *classes, case.get("name", "")]
        found.append(TestCosts("::".join(words), float(case.get("time", 0)), costs))
    return found


def by_folder(tests: Iterable[TestCosts]) -> dict[str, Counter[str]]:
    """The sums of each folder, and its number of tests (`tests`)."""
    sums: dict[str, Counter[str]] = {}
    for each in tests:
        row = sums.setdefault(each.folder, Counter())
        row.update({"tests": 1, "wall_s": each.wall_s})
        row.update(each.costs)
    return dict(sorted(sums.items(), key=lambda row: -row[1]["cpu_s"]))


_COLUMNS = (
    ("tests", "tests"), ("wall", "wall_s"), ("cpu", "cpu_s"), ("own", "own_cpu_s"),
    ("others", "others_s"), ("python", "programs"), ("other", "other programs"),
    ("forks", "forks"), ("probes", "probes"), ("mounts", "mounts"), ("torch", "torch"),
    ("servers", "servers"), ("slept", "slept_s"), ("examples", "examples"),
)  # fmt: skip


def table(tests: Sequence[TestCosts]) -> str:
    rows = by_folder(tests)
    rows["all"] = sum(rows.values(), Counter())
    lines = ["folder".ljust(24) + "".join(title.rjust(9) for title, _ in _COLUMNS)]
    for folder, row in rows.items():
        row["others_s"] = row["cpu_s"] - row["own_cpu_s"]
        row["slept_s"] = row["slept_ms"] / 1000  # type: ignore[assignment]
        lines.append(folder.ljust(24) + "".join(f"{row[key]:9.0f}" for _, key in _COLUMNS))
    lines.append(
        "(seconds; own: of pytest and of programs that ended; others: of daemons that were left)"
    )
    lines.append("")
    for each in sorted(tests, key=lambda test: -test.costs.get("cpu_s", 0))[:SLOWEST]:
        lines.append(f"{each.costs.get('cpu_s', 0):8.1f} s cpu {each.wall_s:7.1f} s  {each.name}")
    return "\n".join(lines)


def beyond(tests: Iterable[TestCosts], budget: Mapping[str, Mapping[str, int]]) -> list[str]:
    return [
        f"{folder} starts {row[kind]:.0f} {kind}, the budget is {allowed}"
        for folder, row in by_folder(tests).items()
        for kind in BUDGETED
        if row[kind] > (allowed := budget.get(folder, {}).get(kind, 0))
    ]


def _with_room(count: float) -> int:
    return math.ceil(count * 1.1) + 2 if count else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.costs", description=__doc__.split("\n")[0]
    )
    parser.add_argument("junit", type=Path, help="the file of pytest --junitxml")
    parser.add_argument("--check", action="store_true", help="fail where a folder starts too much")
    parser.add_argument("--write", action="store_true", help="write the budget anew")
    options = parser.parse_args(arguments)
    tests = read(options.junit)
    if options.write:
        rows = by_folder(tests)
        budget = {
            folder: {kind: _with_room(rows[folder][kind]) for kind in BUDGETED}
            for folder in sorted(rows)
        }
        BUDGET.write_text(json.dumps(budget, indent=1) + "\n", encoding="utf-8")
        return 0
    print(table(tests))
    if not options.check:
        return 0
    found = beyond(tests, json.loads(BUDGET.read_text("utf-8")))
    print(*found, sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
