"""Runs probes of stores, mounts and disks side by side, each with a time limit.

A probe may never return, so each has a daemon thread, which is left behind when its time is over.
Findings that it has emitted by then count.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from diesel_fs.errors import DieselError

from ..main import as_diesel_error
from .findings import Finding, State

Emit = Callable[[Finding], None]

LIMIT_S = 12.0
"""An object store may need some seconds for its first answers; nobody waits for a doctor for a
minute."""


@dataclass(frozen=True, slots=True)
class Probe:
    """`check` is the name of findings about errors, `late_cure` the advice if the time is over."""

    check: str
    what: str
    """The name in messages, such as `the store at s3://...`."""
    work: Callable[[Emit], None]
    late_cure: str
    limit_s: float = LIMIT_S
    worst: State = "fault"
    """`warning` is for a thing that the user did not name."""

    def findings(self, found: Sequence[Finding], *, is_late: bool) -> list[Finding]:
        """Adds a fault if the probe is late. No finding is worse than `worst`."""
        findings = [*found]
        if is_late:
            text = f"{self.what} has not answered within {self.limit_s:.0f} s"
            findings.append(Finding(self.check, "fault", text, self.late_cure))
        return [
            replace(each, state=self.worst) if each.state == "fault" else each for each in findings
        ]


def run_probes(probes: Sequence[Probe]) -> list[Finding]:
    """Each warning that the library logs meanwhile is a finding, too."""
    found: list[list[Finding]] = [[] for _ in probes]
    threads = [
        threading.Thread(target=_run, args=(probe, each.append), daemon=True)
        for probe, each in zip(probes, found, strict=True)
    ]
    begun_s = time.monotonic()
    with _Warnings() as warnings:
        for probe, thread, each in zip(probes, threads, found, strict=True):
            try:
                thread.start()
            except (RuntimeError, MemoryError):  # this user's processes, or memory, are at a limit
                each.append(_not_started(probe))
        for probe, thread in zip(probes, threads, strict=True):
            if thread.ident is not None:
                thread.join(max(0.0, begun_s + probe.limit_s - time.monotonic()))
    findings: list[Finding] = []
    for probe, thread, each in zip(probes, threads, found, strict=True):
        findings += probe.findings(each, is_late=thread.is_alive())
    return findings + [Finding("log", "warning", text) for text in warnings.texts]


def _run(probe: Probe, emit: Emit) -> None:
    try:
        probe.work(emit)
    except DieselError as error:
        emit(failed(probe.check, error))
    except OSError as error:
        emit(failed(probe.check, as_diesel_error(error)))
    except MemoryError:
        emit(_not_started(probe))
    except Exception as error:
        text = f"unexpected {type(error).__name__}: {error}"
        emit(Finding(probe.check, "fault", text, "this is a bug: report it"))


def _not_started(probe: Probe) -> Finding:
    text = f"{probe.what} cannot be examined: there is no memory or no process left"
    cure = "raise the limits of memory and processes (`ulimit -v`, `ulimit -u`, pids.max)"
    return Finding(probe.check, "fault", text, cure)


def failed(check: str, error: DieselError, cure: str = "") -> Finding:
    """The error's own advice wins over `cure`."""
    cure = error.advice or cure or _CURE_BY_CODE.get(error.exit_code, _CURE)
    return Finding(check, "fault", error.message, cure)


_CURE = "`dlcmd doctor --bundle FILE.tar.gz` packs what helps others to find the cause"


_CURE_BY_CODE = {
    12: "give this user the right, or run the job as a user who has it",
    13: "check the address, the network and the credentials of the object store",
    16: "free some space there, or raise its limit (of a Redis: maxmemory)",
    14: "check that the metadata store or server runs, and that its address is right",
}


class _Warnings(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self._logger = logging.getLogger("diesel")

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self.texts:
            self.texts.append(text)

    def __enter__(self) -> "_Warnings":
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
