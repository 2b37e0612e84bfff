"""Simulates a training job with several policies and orders at once, in several processes.

The processes are spawned: forked ones might hang in threads of a cloud's client. Each gets the
files and the order once, and writes its progress into a shared array.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, MutableSequence, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import TypeVar

from diesel_fs.errors import DieselError
from diesel_fs.forecast.kept import OnProgress
from diesel_fs.forecast.nodes import ForecastJob
from diesel_fs.forecast.reads import ForecastFiles
from diesel_fs.forecast.simulate import Forecast, forecast
from diesel_fs.forecast.smallest import smallest_disk
from diesel_fs.format.snapshot.reader import Indices

from .show.progress import ShowProgress

PARALLEL_READS_MIN = 400_000
"""With fewer reads, further processes take longer to start than they save."""

POLL_S = 0.2

_STEPS = 1000


@dataclass(frozen=True, slots=True)
class Comparison:
    policy: str
    job: ForecastJob

    def run(self, files: ForecastFiles, given: Indices | None, progress: OnProgress) -> Forecast:
        return forecast(self.job, files, self.policy, given=given, progress=progress)

    def size(self, files: ForecastFiles, given: Indices | None, progress: OnProgress) -> int | None:
        """Returns None if no SSD suffices."""
        return smallest_disk(
            self.job, files.bytes, lambda job: replace(self, job=job).run(files, given, progress)
        )


Made = TypeVar("Made")

Task = Callable[[Comparison, ForecastFiles, Indices | None, OnProgress], Made]

Progress = MutableSequence[float]
"""The progress of each comparison, 0 to 1, in shared memory."""

_inputs: list[
    tuple[ForecastFiles, Indices | None, Progress]
] = []  # one item, in a process of the pool


def compare(
    task: "Task[Made]",
    comparisons: Sequence[Comparison],
    files: ForecastFiles,
    given: Indices | None,
    show: ShowProgress,
    *,
    processes: int = 0,
) -> list[Made]:
    """`task` is `Comparison.run` or `Comparison.size`. `given` is the order from the user's list;
    None: the job's own. `processes` 0 means one for each processor, or a single one if there are
    few reads."""
    steps = _STEPS * len(comparisons)
    if not processes:
        reads = sum(each.job.epochs for each in comparisons) * len(files)
        usable = len(os.sched_getaffinity(0)) if reads >= PARALLEL_READS_MIN else 1
        processes = min(usable, len(comparisons))
    if processes == 1:
        found: list[Made] = []
        for each in comparisons:

            def note(part: float) -> None:
                show(int(_STEPS * (len(found) + part)), steps)

            found.append(task(each, files, given, note))
        return found
    context = multiprocessing.get_context("spawn")
    progress = context.Array("d", len(comparisons), lock=False)
    pool = ProcessPoolExecutor(
        processes, context, initializer=_begin_process, initargs=(files, given, progress)
    )
    try:
        futures = [pool.submit(_run_one, task, each, at) for at, each in enumerate(comparisons)]
        while wait(futures, POLL_S).not_done:
            show(int(_STEPS * sum(progress)), steps)
        return [each.result() for each in futures]
    except BrokenProcessPool as error:
        raise DieselError(
            "a process that simulated has ended early, perhaps for want of memory",
            advice="compare fewer policies with --evict, or fewer --epochs",
        ) from error
    finally:
        # The pool does not name its processes, and this program has no other children
        children = {*multiprocessing.active_children()}
        pool.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.terminate()


def _begin_process(files: ForecastFiles, given: Indices | None, progress: Progress) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a word
    _inputs[:] = [(files, given, progress)]


def _run_one(task: "Task[Made]", comparison: Comparison, number: int) -> Made:
    files, given, progress = _inputs[0]

    def note(part: float) -> None:
        progress[number] = part

    return task(comparison, files, given, note)
