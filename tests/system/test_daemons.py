"""The error of a daemon that does not start: its own, or one with the last lines of its log."""

import json
import logging
import os
import select
import sys
import time
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path

import pytest

from diesel_fs.errors import (
    BusyError,
    DeadlineError,
    DieselError,
    MetadataError,
    NoSuchDataset,
    PermissionDenied,
    UsageError,
)
from diesel_fs.system import daemons
from diesel_fs.system.daemons import LOG_LINES_SHOWN, add_log_tail
from tests.rows import each_row

LOG = b"2026-01-01 INFO starts\n2026-01-01 ERROR what failed; what to do\n  | of another's log\n"


def shown(error: DieselError, log: bytes = LOG, start: int = 0) -> str:
    add_log_tail(error, BytesIO(log), start)
    return str(error)


@each_row("kind", [DieselError, DeadlineError])
def test_the_end_of_the_log_follows_the_advice(kind: type[DieselError]) -> None:
    error = kind("what failed", advice="what to do")
    lines = "\n  | 2026-01-01 INFO starts\n  | of another's log"
    assert shown(error) == f"what failed; what to do{lines}"
    assert (error.message, error.advice) == ("what failed", "what to do")
    assert shown(kind("what"), b"early\nlate\n", 6) == "what\n  | late"
    assert shown(kind("what"), b"") == "what"
    many = b"".join(b"%d\n" % i for i in range(100))
    assert len(shown(kind("what"), many).splitlines()) == 1 + LOG_LINES_SHOWN


@each_row("kind", [BusyError, MetadataError, NoSuchDataset, PermissionDenied, UsageError])
def test_an_error_that_explains_itself_has_no_log_lines(kind: type[DieselError]) -> None:
    assert shown(kind("what failed", advice="what to do")) == "what failed; what to do"


def test_a_program_that_ends_without_a_report_is_an_error_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", "import sys; sys.exit('a word for the log alone')"]
    with daemons.log_file(log) as file:
        with pytest.raises(DieselError) as ended:
            daemons.start(
                command, b"", file, logging.getLogger("x"), daemon_name="it", deadline_s=30
            )
        add_log_tail(ended.value, file, 0)
    assert str(ended.value) == "it did not come up\n  | a word for the log alone"


class Reporting:
    """A daemon that reports these lines, each some seconds after the previous one, by its own
    clock."""

    def __init__(self, *lines: tuple[float, dict[str, object]]) -> None:
        self.lines = [*lines]
        self.now_s = 0.0
        self.reader, self._writer = os.pipe()

    def monotonic(self) -> float:
        return self.now_s

    def select(
        self, read: list[object], _: object, __: object, wait_s: float
    ) -> tuple[list[object], list[object], list[object]]:
        after_s, line = self.lines[0]
        if after_s > wait_s:
            self.now_s += wait_s
            return [], [], []
        self.now_s += after_s
        del self.lines[0]
        os.write(self._writer, json.dumps(line).encode() + b"\n")
        return read, [], []


@each_row(
    ("lines", "shown"),
    [
        ([(50, {"step": "trying a"}), (50, {"step": "trying b"}), (50, {"ready": True})], ""),
        ([(70, {"ready": True})], "it did not come up within 60 s"),
        (
            [(50, {"step": "trying a"}), (70, {"ready": True})],
            "it did not come up and has been trying a for 60 s",
        ),
        (
            [(50, {"warning": "slow"}), (50, {"warning": "slow"}), (0, {"ready": True})],
            "it did not come up within 60 s",
        ),
    ],
)
def test_each_step_of_a_daemon_has_its_time(
    lines: list[tuple[float, dict[str, object]]], shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning is no step."""
    daemon = Reporting(*lines)
    monkeypatch.setattr(time, "monotonic", daemon.monotonic)
    monkeypatch.setattr(select, "select", daemon.select)
    with open(daemon.reader, "rb", buffering=0) as file:
        report = daemons._Report(file, "it")
        late = pytest.raises(DeadlineError, match=f"^{shown}$") if shown else nullcontext()
        with late:
            report.wait_until_ready(logging.getLogger("x"), 60.0)
