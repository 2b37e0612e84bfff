"""Maps each line of the library to the tests that reach it, by coverage.py, with child processes.

The suite is measured in batches of a few files, so that a run which is cut off can continue later.
Each process measures itself and names the test that it belongs to: the process of the tests by
`chosen.py`, a child by PYTEST_CURRENT_TEST, which it inherits. The measurements of a process are
lost when a signal kills it. A test that fails while it is measured can kill nothing later.
"""

import json
import re
from collections import defaultdict
from itertools import groupby, islice
from pathlib import Path
from typing import NamedTuple

from coverage import Coverage, CoverageData

from .chosen import Line, Order
from .mutants import PACKAGES
from .sandbox import Sandbox, SandboxError, sandbox

FILES_MAX = 6  # in one batch
BATCH_TIMEOUT_S = 3600.0

_CONFIGURATION = """
[run]
context = ${{PYTEST_CURRENT_TEST-}}
data_file = {scratch}/measured/data
parallel = true
core = ctrace
include = {tree}/diesel_fs/*
patch = fork, _exit
sigterm = true
disable_warnings = no-data-collected, module-not-imported, couldnt-parse, no-sysmon, no-ctracer
"""
_IMPORTED = ""
"""The context of code that runs while tests are collected."""
_CONTEXT = re.compile(r"(.*) \((setup|call|teardown)\)", re.DOTALL)


class Batch(NamedTuple):
    name: str
    files: tuple[str, ...]


def interpreter(tree: Path) -> str:
    return str(tree / ".venv" / "bin" / "python")


def run_tests(
    copy: Sandbox, order: Order, environment: dict[str, str], timeout_s: float
) -> tuple[int | None, list[Line]]:
    """Run the tests of an order in a copy of the tree. Returns the exit code and the events."""
    report, file = Path(order["report"]), copy.scratch / "order.json"
    report.unlink(missing_ok=True)
    file.write_text(json.dumps(order), encoding="utf-8")
    program = Path(__file__).with_name("chosen.py")
    command = [interpreter(copy.tree), str(program), str(file)]
    code = copy.run(command, {"CI": "1", **environment}, timeout_s)
    return code, read_report(report)


def read_report(path: Path) -> list[Line]:
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def pytest_arguments(copy: Sandbox, *more: str) -> list[str]:
    return ["-q", "-p", "no:cacheprovider", f"--basetemp={copy.scratch}/t", *more]


def batches(tree: Path, folder: Path, tests: list[str]) -> list[Batch]:
    """The unmeasured test files among some folders and files, or of the whole suite. Files in
    folders that mirror a mutated package come first."""
    with sandbox(tree) as copy:
        arguments = pytest_arguments(copy, "-m", "not bench", "--collect-only", *tests)
        order: Order = {"arguments": arguments, "report": str(copy.scratch / "report")}
        code, lines = run_tests(copy, order, {}, BATCH_TIMEOUT_S)
        if code != 0:
            raise SandboxError(copy.log()[-4000:])
    reports = [read_report(report) for report in folder.glob("*.jsonl")]
    whole = [report for report in reports if any("finished" in line for line in report)]
    known = {file for report in whole for file in _files(report)}
    left = [file for file in _files(lines) if file not in known]
    found = []
    for _, files in groupby(left, lambda file: file.rpartition("/")[0]):
        while some := tuple(islice(files, FILES_MAX)):
            found.append(Batch(some[0].removesuffix(".py").replace("/", "."), some))
    mirrors = tuple(f"tests.{package}." for package in PACKAGES)
    return sorted(found, key=lambda batch: not batch.name.startswith(mirrors))


def _files(report: list[Line]) -> dict[str, None]:
    tests = (test for line in report for test in line.get("collected", ()))
    return dict.fromkeys(test.split("::")[0] for test in tests)


def measure(tree: Path, folder: Path, batch: Batch) -> list[Line]:
    """Measure a batch. Returns the events of its tests."""
    with sandbox(tree) as copy:
        measured = copy.scratch / "measured"
        measured.mkdir()
        measured.chmod(0o1777)  # tests run programs as other users, too
        configuration = copy.scratch / "coveragerc"
        text = _CONFIGURATION.format(scratch=copy.scratch, tree=tree)
        configuration.write_text(text, encoding="utf-8")
        patience = ["-o", "faulthandler_timeout=900"]  # to measure takes time
        order: Order = {
            "arguments": pytest_arguments(copy, "-m", "not bench", *patience, *batch.files),
            "report": str(copy.scratch / "report"),
            "contexts": True,
        }
        environment = {"COVERAGE_PROCESS_START": str(configuration)}
        _, lines = run_tests(copy, order, environment, BATCH_TIMEOUT_S)
        made = copy.scratch / "data"  # coverage finds its parts by this name
        combined = Coverage(data_file=str(made), config_file=False, messages=False)
        combined.combine([str(measured)])
        combined.save()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{batch.name}.data").write_bytes(made.read_bytes())
        # Written last: with this file, the batch counts as measured.
        text = "".join(f"{json.dumps(line)}\n" for line in lines)
        (folder / f"{batch.name}.jsonl").write_text(text, encoding="utf-8")
    return lines


class CoverageMap:
    def __init__(self, folder: Path) -> None:
        self.seconds: dict[str, float] = {}
        """The seconds of each passed test, in the suite's order."""
        self._paths: dict[str, list[tuple[CoverageData, str]]] = defaultdict(list)
        for report in sorted(folder.glob("*.jsonl")):
            for line in read_report(report):
                if line.get("outcome") == "passed":
                    self.seconds[line["ended"]] = line["seconds"]
            data = CoverageData(str(report.with_suffix(".data")))
            data.read()
            for path in data.measured_files():
                file = f"diesel_fs/{path.rpartition('/diesel_fs/')[2]}"
                self._paths[file].append((data, path))
        self._contexts_of: tuple[str, dict[int, set[str]]] = ("", {})
        self._by_file: dict[str, list[str]] = defaultdict(list)
        for test in self.seconds:
            self._by_file[test.split("::")[0]].append(test)

    def covers(self, file: str, line: int) -> bool:
        return any(line in (data.lines(path) or ()) for data, path in self._paths.get(file, ()))

    def tests(self, file: str, line: int) -> dict[str, int]:
        """The tests that may notice a change of a line, with a rank: 0 for those that reach it.

        The rank is 1 for tests in a file that reaches it during a set-up, perhaps for many
        tests. A line that runs when its module is imported matters to each test that runs a
        function of the module: these have the rank 2.
        """
        contexts = self._contexts(file)
        reaching = [_CONTEXT.fullmatch(context) for context in contexts.get(line, ())]
        ranks = {match[1]: 0 for match in reaching if match and match[1] in self.seconds}
        for match in reaching:
            if match and match[2] == "setup":
                for test in self._by_file[match[1].split("::")[0]]:
                    ranks.setdefault(test, 1)
        if not ranks or _IMPORTED in contexts[line]:
            functions = [each for each in contexts.values() if _IMPORTED not in each]
            for context in set().union(*functions):
                match = _CONTEXT.fullmatch(context)
                if match and match[1] in self.seconds:
                    ranks.setdefault(match[1], 2)
        return ranks

    def _contexts(self, file: str) -> dict[int, set[str]]:
        """Contexts by line. Only those of one file are kept: there may be millions."""
        if self._contexts_of[0] != file:
            found: dict[int, set[str]] = defaultdict(set)
            for data, path in self._paths.get(file, ()):
                for line, contexts in data.contexts_by_lineno(path).items():
                    found[line].update(part for each in contexts for part in each.split("|"))
            self._contexts_of = (file, found)
        return self._contexts_of[1]
