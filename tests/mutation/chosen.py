"""`python chosen.py ORDER`: pytest, with the tests that a file lists; it reports how each one
ended.

It imports nothing of this tree, because it runs in copies of the tree, and in older trees, which
have no `tests.mutation`.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import NotRequired, TypedDict

import pytest


class Order(TypedDict):
    arguments: list[str]
    """pytest's."""
    report: str
    """The path of the report: a `Line` of JSON each."""
    tests: NotRequired[list[str]]
    """Run only these of the collected tests, in this order."""
    stop_after_s: NotRequired[float]
    """No test starts after this time."""
    contexts: NotRequired[bool]
    """Whether to tell coverage, which is already running, which test it measures."""


class Line(TypedDict, total=False):
    collected: list[str]
    started: str
    ended: str
    outcome: str
    seconds: float
    finished: int
    stopped: bool


class Chosen:
    """The plugin: it chooses tests, watches the budget, tells coverage the current test, and
    reports."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._outcome, self._seconds = "passed", 0.0
        self._deadline = time.monotonic() + order.get("stop_after_s", float("inf"))
        self._stopped = False
        self._context = ""
        if order.get("contexts"):
            os.register_at_fork(after_in_child=self._tell_coverage)

    def _report(self, line: Line) -> None:
        with Path(self._order["report"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _tell_coverage(self) -> None:
        if self._order.get("contexts"):
            from coverage import Coverage  # noqa: PLC0415  # only a run that measures needs it

            measuring = Coverage.current()
            if measuring is not None:
                measuring.switch_context(self._context)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if "tests" in self._order:
            rank = {test: number for number, test in enumerate(self._order["tests"])}
            chosen = [item for item in items if item.nodeid in rank]
            items[:] = sorted(chosen, key=lambda item: rank[item.nodeid])
        self._report({"collected": [item.nodeid for item in items]})

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._report({"ended": report.nodeid, "outcome": "failed", "seconds": 0.0})

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        if time.monotonic() > self._deadline:
            self._stopped = True
            item.session.shouldstop = "the budget is spent"
            return True  # in place of running the test
        self._outcome, self._seconds = "passed", 0.0
        self._report({"started": item.nodeid})
        return None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._phase(item, "setup")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._phase(item, "call")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self._phase(item, "teardown")

    def _phase(self, item: pytest.Item, when: str) -> None:
        # The form of PYTEST_CURRENT_TEST, from which child processes learn it.
        self._context = f"{item.nodeid} ({when})".replace("\x00", "(null)")
        self._tell_coverage()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds += report.duration
        if not report.passed and self._outcome != "failed":
            self._outcome = report.outcome
        if report.when == "teardown":
            seconds = round(self._seconds, 3)
            self._report({"ended": report.nodeid, "outcome": self._outcome, "seconds": seconds})

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self._report({"finished": int(exitstatus), "stopped": self._stopped})


if __name__ == "__main__":
    order: Order = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    sys.path[0] = str(Path.cwd())  # as `python -m pytest` does
    sys.exit(pytest.main(order["arguments"], plugins=[Chosen(order)]))
