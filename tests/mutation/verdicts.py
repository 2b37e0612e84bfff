"""Decides whether the tests kill a mutant, and compares two runs on the same mutants.

The tests that reach the changed line run until one fails, those in the folder that mirrors the
module first, as long as the budget of a mutant allows. A test that kills is run again, alone: if
the kill is not repeated, it does not count, and the next tests run.
"""

import json
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from .chosen import Order
from .coverage_map import CoverageMap, pytest_arguments, run_tests
from .mutants import Mutant
from .sandbox import Sandbox, sandbox

TIERS: dict[str, list[str]] = {"fast": [], "all": ["-m", "not bench"]}
"""The arguments that choose the tests; the fast ones are those of pyproject.toml."""

STAGES = (3, 15)
"""The numbers of test files that run first, and next, each group in a pytest of its own: most
mutants die early, and collecting all tests takes longer than running a few.
"""

HANG_FACTOR = 8
HANG_S_MIN = 60.0
"""A test hangs if it takes this many times its usual time, and at least this long."""

KILLED = ("killed", "timed out")


@dataclass(frozen=True, slots=True)
class Verdict:
    mutant: Mutant
    status: str
    """`killed`; `timed out`, if a test hung, which kills too; `survived` all tests that reach it;
    `unfinished`, if it survived until the budget was spent; `flaky`, if a kill was not repeated.
    """
    by: str
    """The test that killed."""
    ran: int
    of: int
    """The number of tests that ran, among those that reach the line."""
    seconds: float


def judge(
    tree: Path,
    mutant: Mutant,
    tests: list[str],
    usual_s: Mapping[str, float],
    tier: str,
    budget_s: float,
) -> Verdict:
    """Run tests on a mutant. `usual_s` has the time that each of them takes without it."""
    began = time.monotonic()
    changed = mutant.applied((tree / mutant.file).read_text(encoding="utf-8"))
    ran, flaky = 0, ""

    def verdict(status: str, by: str = "") -> Verdict:
        took = round(time.monotonic() - began, 1)
        return Verdict(mutant, status, by, ran, len(tests), took)

    with sandbox(tree, {mutant.file: changed}) as copy:
        for stage in _stages(tests):
            while stage:
                left_s = budget_s - (time.monotonic() - began)
                if left_s <= 0:
                    return verdict("unfinished")
                outcome = _run(copy, stage, usual_s, tier, left_s)
                ran += outcome.ran
                if outcome.status == "unfinished":
                    return verdict("unfinished")
                if outcome.status == "survived":
                    break
                if outcome.by not in stage:  # a module cannot be imported, or pytest itself ended
                    return verdict(outcome.status, outcome.by)
                again = _run(copy, [outcome.by], usual_s, tier, budget_s)
                if again.status in KILLED:
                    return verdict(outcome.status, outcome.by)
                flaky = outcome.by
                stage = stage[stage.index(flaky) + 1 :]
    return verdict("flaky", flaky) if flaky else verdict("survived")


class _Outcome(NamedTuple):
    status: str
    by: str
    ran: int


def _run(
    copy: Sandbox, tests: Sequence[str], usual_s: Mapping[str, float], tier: str, budget_s: float
) -> _Outcome:
    hang_s = max(HANG_S_MIN, HANG_FACTOR * max(usual_s[test] for test in tests))
    files = dict.fromkeys(test.split("::")[0] for test in tests)
    hang = ["-o", f"faulthandler_timeout={hang_s}", "-o", "faulthandler_exit_on_timeout=true"]
    order: Order = {
        "arguments": pytest_arguments(copy, "-x", *hang, *TIERS[tier], *files),
        "report": str(copy.scratch / "report"),
        "tests": list(tests),
        "stop_after_s": budget_s,
    }
    code, lines = run_tests(copy, order, {}, budget_s + 2 * hang_s)
    ran = sum("started" in line for line in lines)
    for line in lines:
        if line.get("outcome") == "failed":
            return _Outcome("killed", line["ended"], ran)
    end = lines[-1] if lines else {}
    if end.get("stopped"):
        return _Outcome("unfinished", "", ran)
    if end.get("finished") in (0, 5):  # 5: this tier has none of these tests
        return _Outcome("survived", "", ran)
    log = copy.log()
    hung = code is None or "Timeout (" in log
    last = end.get("started") or f"exit code {code}: {log[-300:]}"
    return _Outcome("timed out" if hung else "killed", last, ran)


def _stages(tests: list[str]) -> Iterator[list[str]]:
    by_file: dict[str, list[str]] = defaultdict(list)
    for test in tests:
        by_file[test.split("::")[0]].append(test)
    files = list(by_file)
    for first, last in zip((0, *STAGES), (*STAGES, len(files)), strict=True):
        yield [test for file in files[first:last] for test in by_file[file]]


def in_order(mutant: Mutant, measured: CoverageMap) -> list[str]:
    """The tests that may kill a mutant: files near its module first, then those with fast tests."""
    ranks = measured.tests(mutant.file, mutant.line)
    files: dict[str, list[str]] = defaultdict(list)
    for test in measured.seconds:  # the order of the suite, which keeps what modules set up
        if test in ranks:
            files[test.split("::")[0]].append(test)

    def place(file: str) -> tuple[float, ...]:
        mean_s = sum(measured.seconds[test] for test in files[file]) / len(files[file])
        return -_nearness(file, mutant.file), min(ranks[test] for test in files[file]), mean_s

    return [test for file in sorted(files, key=place) for test in files[file]]


def _nearness(test_file: str, module: str) -> int:
    """Return the number of common folders, and whether the files share the name."""
    tests, modules = test_file.split("/")[1:], module.split("/")[1:]
    common = 0
    while common < min(len(tests), len(modules)) - 1 and tests[common] == modules[common]:
        common += 1
    return 2 * common + (modules[-1].removesuffix(".py") in tests[-1])


def read_verdicts(path: Path) -> dict[Mutant, Verdict]:
    """The verdicts of a run, which may have been cut off."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    found = {}
    for line in text.split("\n")[:-1]:
        fields = json.loads(line)
        mutant = Mutant(**fields.pop("mutant"))
        found[mutant] = Verdict(mutant, **fields)
    return found


def as_line(verdict: Verdict) -> str:
    return json.dumps(asdict(verdict)) + "\n"


def table(verdicts: Iterable[Verdict]) -> str:
    """A row per package, and every mutant that was not killed."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    alive = []
    for verdict in sorted(verdicts, key=lambda each: (each.mutant.file, each.mutant.line)):
        for row in (verdict.mutant.package, "all"):
            counts[row]["mutants"] += 1
            counts[row][verdict.status] += 1
        if verdict.status not in KILLED:
            tests = f"{verdict.ran} of {verdict.of} tests"
            alive.append(
                f"{verdict.status} ({tests}{verdict.by and ', '}{verdict.by}): {verdict.mutant}"
            )
    columns = ("mutants", *KILLED, "survived", "unfinished", "flaky")
    total = counts.pop("all", Counter())
    figures = {**counts, "all": total}.items()
    rows = [[name, *(str(count[column]) for column in columns)] for name, count in figures]
    rows = [["package", *columns], *rows]
    lines = ["".join(f"{cell:<12}" for cell in row).rstrip() for row in rows]
    return "\n".join([*lines, *([""] if alive else []), *alive])


def differences(
    first: dict[Mutant, Verdict], second: dict[Mutant, Verdict]
) -> tuple[list[Mutant], list[Mutant], int, int]:
    """For the mutants in both runs: those that only the first killed, those that only the second
    killed, and the numbers that the first one and both killed."""
    by_first, by_second = (
        [each for each in first if each in second and run[each].status in KILLED]
        for run in (first, second)
    )
    lost = [mutant for mutant in by_first if mutant not in by_second]
    won = [mutant for mutant in by_second if mutant not in by_first]
    return lost, won, len(by_first), len(by_first) - len(lost)
