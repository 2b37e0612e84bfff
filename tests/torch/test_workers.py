"""The decision on the number of workers: it keeps the limits, takes no more than needed, and is
steady.
"""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.torch.workers import FetchModel, Measured, WorkerController, WorkerLimits
from tests.rows import each_row

BIG = 1 << 40


def measured(workers: int, fetch_s: float, request_s: float, **named: float) -> Measured:
    return Measured(workers, fetch_s, request_s, named.pop("batch_samples", 32.0), **named)


@given(
    workers=st.integers(0, 64), fetch_s=st.floats(0, 100), request_s=st.floats(0, 100),
    samples=st.floats(0, 1000), worker_bytes=st.floats(0, 1e12), most=st.integers(1, 32),
    memory=st.integers(1, 1 << 40), steps=st.integers(1, 4),
)  # fmt: skip
def test_the_limits_are_kept(
    workers: int, fetch_s: float, request_s: float, samples: float, worker_bytes: float,
    most: int, memory: int, steps: int,
) -> None:  # fmt: skip
    controller = WorkerController(WorkerLimits(most, memory))
    for _ in range(steps):
        workers = controller.decide(
            measured(workers, fetch_s, request_s, batch_samples=samples, worker_bytes=worker_bytes)
        )
        assert 1 <= workers <= most
        assert workers == 1 or workers * worker_bytes <= memory


@each_row(
    ("fetch_s", "request_s", "expected"),
    [(0.8, 0.3, 3), (0.8, 0.1, 9), (0.8, 0.01, 16), (0.8, 9.0, 1), (0.8, 0.0, 16), (0.0, 0.0, 1)],
)
def test_the_first_number_is_dlcaches_rule(fetch_s: float, request_s: float, expected: int) -> None:
    """Time to fetch / time between requests, rounded up, with a tenth to spare; all cores if they
    do not suffice."""
    controller = WorkerController(WorkerLimits(16, BIG))
    assert controller.decide(measured(1, fetch_s, request_s)) == expected


COSTS = st.tuples(st.floats(0.001, 1), st.floats(0, 0.2), st.integers(1, 12))


def cost(base: float, slope: float, knee: int) -> Callable[[int], float]:
    """The true time for a batch: from some number on, workers disturb each other."""
    return lambda workers: base * (1 + slope * max(workers - knee, 0))


@given(numbers=COSTS, request_s=st.floats(0.0005, 2), start=st.integers(1, 12))
def test_it_settles_at_a_number_at_which_the_loop_does_not_wait(
    numbers: tuple[float, float, int], request_s: float, start: int
) -> None:
    """The controller can only measure. It stays at a number that suffices if any does, and that is
    less than twice the needed number."""
    most, fetch = 12, cost(*numbers)
    controller = WorkerController(WorkerLimits(most, BIG))
    workers, seen = start, [start]
    for _ in range(30):
        workers = controller.decide(measured(workers, fetch(workers), request_s))
        seen.append(workers)
    assert len(set(seen[-5:])) == 1, seen
    suffices = [each for each in range(1, most + 1) if fetch(each) <= 0.75 * request_s * each]
    if suffices:
        assert fetch(workers) <= request_s * workers, (seen, suffices)
        assert workers <= 2 * suffices[0]


@given(fetch_s=st.floats(0.01, 1), request_s=st.floats(0.01, 1), noise=st.lists(
    st.floats(0.95, 1.05), min_size=40, max_size=40))  # fmt: skip
def test_noise_leaves_it_at_rest(fetch_s: float, request_s: float, noise: list[float]) -> None:
    controller = WorkerController(WorkerLimits(16, BIG))
    workers, changes = 4, 0
    for each in noise:
        wanted = controller.decide(measured(workers, fetch_s * each, request_s))
        changes += wanted != workers
        workers = wanted
    assert changes <= 6, "it comes to rest, after some tries"


def test_it_follows_when_the_cache_gets_warm_and_cold_again() -> None:
    """It stays within memory, and within the number that reaches the highest rate: beyond that,
    more workers only disturb each other (Lobster)."""
    controller = WorkerController(WorkerLimits(16, BIG))
    workers = 1
    for fetch_s, least, most in ((1.0, 10, 16), (0.05, 1, 2), (1.0, 10, 16)):
        for _ in range(10):
            workers = controller.decide(measured(workers, fetch_s, 0.1))
        assert least <= workers <= most
    workers, controller = 2, WorkerController(WorkerLimits(16, BIG))
    for _ in range(30):
        workers = controller.decide(measured(workers, max(1.0, workers / 6), 0.01))
    assert workers <= 8
    controller = WorkerController(WorkerLimits(16, 1000))
    assert controller.decide(measured(2, 1.0, 0.1, worker_bytes=300)) == 3


def test_each_size_of_samples_has_its_own_curve() -> None:
    model = FetchModel()
    assert model.predict(100, 4) == 0
    model.learn(1000, 2, 0.1)
    model.learn(1000, 4, 0.3)
    model.learn(100_000, 2, 5.0)
    assert model.predict(1000, 1) == pytest.approx(0.1)
    assert model.predict(1000, 3) == pytest.approx(0.2)
    assert model.predict(1000, 6) == pytest.approx(0.5)
    assert model.predict(100_000, 8) == pytest.approx(5.0)
    assert model.predict(70_000, 2) == pytest.approx(5.0), "the nearest size"
    assert model.predict(10, 4) == pytest.approx(0.3)
    model.learn(1000, 2, 0.3)
    assert model.predict(1000, 2) == pytest.approx(0.2)
    assert model.predict(1000, 4) == pytest.approx(0.6), "all numbers move together"
    model.learn(1000, 3, 0.1)
    assert model.predict(1000, 1) == pytest.approx(0.1), "fewer workers are not slower"
    assert model.predict(1000, 4) == pytest.approx(0.3), "the cache has got warm"
