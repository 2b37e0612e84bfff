"""`dlcmd run` lets no more workers of a loader work at once than the processors can use, and says
how many would be enough."""

import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch.utils.data._utils import fetch as torch_fetch

from diesel_fs.torch.hook.diesel_hook import pace
from diesel_fs.torch.planner.summary import Interval, MeasuredWorkers, Summary
from tests.rows import each_row

CONTEXT = multiprocessing.get_context("fork")
WORKERS = 6


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine has fewer processors than a loader has workers."""
    monkeypatch.setattr(pace, "cores_of_rank", lambda: 2.0)


class _Dataset:
    """Counts its readers. A sample is ready when `opened` is set."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.begun = threading.Semaphore(0)

    def __getitem__(self, index: int) -> int:
        self.begun.release()
        self.opened.wait(60)
        return index


def test_the_measurements_of_a_worker_stand_for_all_of_its_batches() -> None:
    """Most batches are not measured, since that takes time."""
    paced = pace.Pace(CONTEXT, WORKERS, WORKERS)
    kind = type("Fetcher", (torch_fetch._MapDatasetFetcher,), {})
    dataset = _Dataset()
    dataset.opened.set()
    pace.TurnTaker(paced.shared, 2).install(kind)
    fetcher = kind(dataset, True, list, False)
    paced.begin_epoch()
    begun_s = time.perf_counter()
    for batch in range(1, 501):
        fetcher.fetch([batch])
        found = paced.measured()["fetched"]
        assert isinstance(found, int)
        assert abs(found - batch) <= 6
    fetch_s = paced.measured()["fetch_s"]
    assert isinstance(fetch_s, float)
    assert 0 < fetch_s < 2 * (time.perf_counter() - begun_s)


class _Workers:
    """Threads in the place of worker processes: each reads one batch by torch's own fetcher."""

    def __init__(self, shared: pace.Turns, dataset: _Dataset) -> None:
        self.results: list[object] = []
        self._threads = [
            threading.Thread(target=self._read, args=[shared, dataset, worker])
            for worker in range(WORKERS)
        ]
        for each in self._threads:
            each.start()

    def _read(self, shared: pace.Turns, dataset: _Dataset, worker: int) -> None:
        kind = type("Fetcher", (torch_fetch._MapDatasetFetcher,), {})
        pace.TurnTaker(shared, worker).install(kind)
        self.results.append(kind(dataset, True, list, False).fetch([worker]))

    def join(self) -> None:
        for each in self._threads:
            each.join(60)


@contextmanager
def _working(paced: pace.Pace) -> Iterator[tuple[_Dataset, _Workers]]:
    dataset = _Dataset()
    workers = _Workers(paced.shared, dataset)
    try:
        yield dataset, workers
    finally:
        dataset.opened.set()
        workers.join()
    assert sorted(map(repr, workers.results)) == [f"[{worker}]" for worker in range(WORKERS)]


def _begun(dataset: _Dataset) -> int:
    """How many samples have begun without the end of another one."""
    count = 0
    while dataset.begun.acquire(timeout=5 if count < 2 else 0.3):
        count += 1
    return count


def test_only_so_many_workers_work_at_once_and_all_batches_come() -> None:
    with _working(pace.Pace(CONTEXT, WORKERS, 2)) as (dataset, _):
        assert _begun(dataset) == 2


def test_workers_with_a_processor_each_take_no_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "cores_of_rank", lambda: float(WORKERS))
    with _working(pace.Pace(CONTEXT, WORKERS, 1)) as (dataset, _):
        assert _begun(dataset) == WORKERS


def test_turns_that_are_taken_away_end_when_they_are_given_back() -> None:
    paced = pace.Pace(CONTEXT, WORKERS, WORKERS)
    with _working(paced) as (dataset, _):
        assert _begun(dataset) == WORKERS
        measure(paced, fetch_s=1.0, cpu_s=1.0, cores=2)
        paced.tune()
    assert paced.at_once == 3
    with _working(paced) as (dataset, _):
        assert _begun(dataset) == 3
        measure(paced, fetch_s=1.0, cpu_s=0.01, cores=2)
        paced.tune()
        assert _begun(dataset) == WORKERS - 3, "workers that wait for files are woken"


def measure(paced: pace.Pace, *, fetch_s: float, cpu_s: float, cores: float) -> None:
    """As if workers had prepared ten batches, since the epoch began."""
    paced.begin_epoch()
    values, paced.cores = paced.shared.measured, cores
    for at, value in enumerate((10, 10 * fetch_s, 10 * cpu_s)):
        values[at] += value


def test_a_worker_whose_turn_never_comes_goes_on() -> None:
    """The workers that had all turns were killed."""
    paced = pace.Pace(CONTEXT, WORKERS, 1)
    assert paced.shared.turns.acquire(timeout=0)
    dataset = _Dataset()
    dataset.opened.set()
    kind = type("Fetcher", (torch_fetch._MapDatasetFetcher,), {})
    pace.TurnTaker(paced.shared, 0, turn_s=0.01).install(kind)
    fetcher = kind(dataset, True, list, False)
    assert [fetcher.fetch([at]) for at in range(3)] == [[0], [1], [2]]
    paced.shared.turns.release()


@each_row(
    "fetch_s, cpu_s, cores, useful",
    [
        (0.1, 0.1, 2, 3),  # all workers compute
        (0.1, 0.01, 2, 30),  # they mostly wait for files
        (0.1, 0.4, 8, 3),  # each keeps several processors busy
        (0.1, 0.1, 0.5, 1),
    ],
)
def test_the_number_of_turns_keeps_the_processors_busy(
    fetch_s: float, cpu_s: float, cores: float, useful: int
) -> None:
    assert pace.useful_workers(fetch_s, cpu_s, cores) == useful


def advice(workers: MeasuredWorkers, *, waited_s: float, step_s: float) -> str:
    summary = Summary()
    loop = Interval(0, 100.0, 100, waited_s, 100 * step_s)
    summary.add("7.1", loop, workers)
    return "\n".join(line for line in summary.lines() if "workers" in line)


@each_row(
    "at_once, cpu_s, waited_s, step_s, wanted",
    [
        (4, 0.1, 20.0, 0.1, "num_workers=11 would be enough"),
        (4, 0.5, 20.0, 0.1, "num_workers=8 would be enough"),  # with which the cores are busy
        (4, 1.0, 20.0, 0.1, "more would not help"),
        (4, 0.1, 3.0, 0.9, ""),
        (4, 0.1, 60.0, 0.1, ""),  # most of that is no worker's time
        (2, 1.0, 20.0, 0.1, "so 2 of them worked at a time"),
    ],
)
def test_the_user_learns_how_many_workers_are_enough(
    at_once: int, cpu_s: float, waited_s: float, step_s: float, wanted: str
) -> None:
    """A worker takes a second for a batch, on 4 processors."""
    measured = MeasuredWorkers(4, at_once, 4.0, 100, 100.0, 100 * cpu_s)
    found = advice(measured, waited_s=waited_s, step_s=step_s)
    assert wanted in found
    assert bool(found) == bool(wanted)
