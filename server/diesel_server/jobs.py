"""Long work on a dataset that goes on by itself: verify, recover, purge.

Owned here: that there is one of a kind at a time for a dataset (in this worker), that who asks
again waits for the one that is under way, and that it goes on where they have gone. Not owned: the
work. Each job has a thread; who waits looks at it now and then, in the loop.
"""

import logging
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import trio

from diesel_fs.errors import BusyError, DieselError
from diesel_fs.net.messages import Message
from diesel_fs.repository.interface import ReportProgress

from .requests import Reply

log = logging.getLogger("diesel.server")

JOBS_MAX = 4
"""At once in a worker: each reads as fast as the store gives."""

VERIFIES_MAX = 2
"""Of these: any reader may ask for them, and administrators are not to wait for that."""

_LOOK_S = 0.2
_PROGRESS_S = 5.0
"""A client hears something at least so often."""

Work = Callable[[ReportProgress], Message]


@dataclass(slots=True)
class _Job:
    fields: Message
    done: int = 0
    total: int = 0
    over: threading.Event = field(default_factory=threading.Event)
    result: Message | None = None
    error: DieselError | None = None


class Jobs:
    """The jobs of a worker."""

    def __init__(self) -> None:
        self._jobs: dict[tuple[str, str], _Job] = {}

    async def run(
        self, kind: str, name: str, fields: Message, work: Work
    ) -> AsyncGenerator[Reply, None]:
        """How far the job is, again and again, and what it came to.

        Raises what the work raises; BusyError where another such job is under way.
        """
        job = self._jobs.get((kind, name))
        if job is None:
            job = self._begin(kind, name, fields, work)
        elif job.fields != fields:
            raise BusyError(f"another {kind} of {name!r} is under way", advice="try again later")
        said, silent_s = (-1, -1), 0.0
        while not job.over.is_set():
            now = job.done, job.total
            if now != said or silent_s >= _PROGRESS_S:
                yield Reply({"done": now[0], "total": now[1], "more": True})
                said, silent_s = now, 0.0
            await trio.sleep(_LOOK_S)
            silent_s += _LOOK_S
        if job.error is not None:
            raise job.error
        yield Reply({"result": job.result})

    def _begin(self, kind: str, name: str, fields: Message, work: Work) -> _Job:
        verifies = sum(each == "verify" for each, _ in self._jobs)
        if len(self._jobs) >= JOBS_MAX or (kind == "verify" and verifies >= VERIFIES_MAX):
            raise BusyError(
                f"{len(self._jobs)} jobs are under way on this server", advice="try again later"
            )
        job = self._jobs[kind, name] = _Job(fields)
        thread = threading.Thread(
            target=self._work, args=(kind, name, job, work), name=f"{kind} {name}", daemon=True
        )
        thread.start()
        return job

    def _work(self, kind: str, name: str, job: _Job, work: Work) -> None:
        def tell(done: int, total: int) -> None:
            job.done, job.total = done, max(done, total)

        try:
            job.result = work(tell)
        except DieselError as error:
            job.error = error
        except BaseException:
            log.exception("%s of %s failed", kind, name)
            job.error = DieselError(f"internal error: {kind} of {name!r} failed")
        finally:
            del self._jobs[kind, name]
            job.over.set()
