"""Jobs: long work on a dataset (verify, recover, purge) that goes on when its client has gone.

A worker has at most one job of a kind for a dataset; a second request joins it. Each job has a
thread of its own, whose progress waiting requests poll.
"""

import logging
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import trio

from diesel_fs.errors import BusyError, DieselError
from diesel_fs.net.messages import Message
from diesel_fs.repository.interface import ReportProgress

from .dispatcher import Reply

log = logging.getLogger("diesel.server")

JOBS_MAX = 4
"""Few, since each job reads as fast as the store delivers."""

VERIFIES_MAX = 2
"""Any reader may start a `verify`, so this leaves room for the jobs of administrators."""

_POLL_S = 0.2
_PROGRESS_S = 5.0
"""A client gets a reply at least this often, even without progress."""

Work = Callable[[ReportProgress], Message]
"""Runs in the job's thread, and returns the result."""


@dataclass(slots=True)
class _RunningJob:
    """The unit of `done` and `total` depends on the kind of job."""

    fields: Message  # of the request that started it
    done: int = 0
    total: int = 0
    over: threading.Event = field(default_factory=threading.Event)
    result: Message | None = None
    error: DieselError | None = None


class JobTable:
    def __init__(self) -> None:
        self._jobs: dict[tuple[str, str], _RunningJob] = {}

    async def run(
        self, kind: str, name: str, fields: Message, work: Work
    ) -> AsyncGenerator[Reply, None]:
        """Yields progress, and at last the result.

        Raises the errors of the work; BusyError if a job of this kind with other `fields` is under
        way on the dataset, or if too many jobs are.
        """
        job = self._jobs.get((kind, name))
        if job is None:
            job = self._begin(kind, name, fields, work)
        elif job.fields != fields:
            raise BusyError(f"another {kind} of {name!r} is under way", advice="try again later")
        reported, silent_s = (-1, -1), 0.0
        while not job.over.is_set():
            progress = job.done, job.total
            if progress != reported or silent_s >= _PROGRESS_S:
                yield Reply({"done": progress[0], "total": progress[1], "more": True})
                reported, silent_s = progress, 0.0
            await trio.sleep(_POLL_S)
            silent_s += _POLL_S
        if job.error is not None:
            raise job.error
        yield Reply({"result": job.result})

    def _begin(self, kind: str, name: str, fields: Message, work: Work) -> _RunningJob:
        verifies = sum(each == "verify" for each, _ in self._jobs)
        if len(self._jobs) >= JOBS_MAX or (kind == "verify" and verifies >= VERIFIES_MAX):
            raise BusyError(
                f"{len(self._jobs)} jobs are under way on this server", advice="try again later"
            )
        job = self._jobs[kind, name] = _RunningJob(fields)
        thread = threading.Thread(
            target=self._work, args=(kind, name, job, work), name=f"{kind} {name}", daemon=True
        )
        thread.start()
        return job

    def _work(self, kind: str, name: str, job: _RunningJob, work: Work) -> None:
        def report(done: int, total: int) -> None:
            job.done, job.total = done, max(done, total)

        try:
            job.result = work(report)
        except DieselError as error:
            job.error = error
        except BaseException:
            log.exception("%s of %s failed", kind, name)
            job.error = DieselError(f"internal error: {kind} of {name!r} failed")
        finally:
            del self._jobs[kind, name]
            job.over.set()
