"""Orders that are long or endless: only their beginning is predicted and kept."""

import time
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, RandomSampler

from diesel_fs.torch.hook.diesel_hook import loaders, prediction
from diesel_fs.torch.hook.diesel_hook.files import KnownDataset
from diesel_fs.torch.hook.diesel_hook.link import Link
from diesel_fs.torch.hook.diesel_hook.prediction import DrawnIndices, predict
from tests.examples import examples


def test_the_first_batch_does_not_wait_for_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of the process does not grow with them, either."""
    monkeypatch.setattr(prediction, "DRAWING_S_MAX", 0.05)
    sampler = RandomSampler(range(10), replacement=True, num_samples=10**8)
    begun_s = time.process_time()
    (order,) = predict(BatchSampler(sampler, 4, drop_last=False), 3)
    assert time.process_time() - begun_s < 2, "it took 40 s"
    assert not order.is_whole
    assert len(order.indices) < 10**7
    monkeypatch.setattr(prediction, "DRAWING_S_MAX", 3600.0)
    monkeypatch.setattr(prediction, "ENTRIES_MAX", 5000)
    (order,) = predict(sampler, 3)
    assert 5000 <= len(order.indices) < 7000


class Recorded:
    def __init__(self) -> None:
        self.messages: list[tuple[str, list[int]]] = []

    def send(self, message: dict[str, object], payload: bytes | memoryview = b"") -> None:
        self.messages.append((str(message["do"]), array("q", bytes(payload)).tolist()))

    send_soon = send

    def note(self, text: str) -> None:
        """Ignored."""


@pytest.mark.parametrize("batch", [0, 7])
def test_an_order_that_was_not_predicted_is_announced_as_it_is_drawn(
    monkeypatch: pytest.MonkeyPatch, batch: int
) -> None:
    monkeypatch.setattr(prediction, "ENTRIES_MAX", 1000)
    monkeypatch.setattr(loaders, "_MORE_S", 0.0)
    monkeypatch.setattr(loaders, "_PROGRESS_S", 0.0)
    monkeypatch.setattr(loaders, "_DROPPED_MIN", 100)
    samples = RandomSampler(range(5000))
    sampler = BatchSampler(samples, batch, drop_last=False) if batch else samples
    recorded = Recorded()
    link = cast("Link", recorded)
    watch = cast("loaders.Watch", SimpleNamespace(link=link, ahead=1, end=lambda: None))
    epoch = loaders.LoaderEpoch(
        watch, sampler, KnownDataset(1, (), 5000), loaders._LoaderStream(1, link), 0
    )
    iterator = cast("Iterator[object]", iter(sampler))
    epoch.foresee(iterator)
    drawn: list[int] = []
    for element in iterator:
        epoch.drew(element)
        drawn += element if isinstance(element, list) else [cast("int", element)]
        epoch.received(0.0, time.monotonic())
        assert epoch.position() == len(drawn)
    epoch.send_progress(time.monotonic(), is_over=True)
    kinds = [kind for kind, _ in recorded.messages]
    assert kinds.count("order") == 1
    assert "cut" not in kinds
    announced = [
        index for kind, order in recorded.messages if kind != "progress" for index in order
    ]
    assert announced == drawn
    assert len(drawn) == 5000
    assert len(epoch._drawn.between(0)) < 1000, "the beginning is dropped"


@examples(200)
@given(
    batches=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=5), max_size=30)
    | st.lists(st.integers(0, 99), max_size=60),
    drops=st.lists(st.integers(-1, 40), max_size=5),
)
def test_dropped_batches_keep_places(
    batches: list[list[int]] | list[int], drops: list[int]
) -> None:
    drawn, model, ends = DrawnIndices(), list[int](), [0]
    left = sorted(drops)
    dropped = 0
    for number, element in enumerate(batches, 1):
        assert drawn.append(element)
        model += element if isinstance(element, list) else [cast("int", element)]
        ends.append(len(model))
        while left and left[0] < number:
            dropped = max(dropped, left[0])
            drawn.drop(left.pop(0), 1)
        assert drawn.count == len(model)
        for batch in range(max(dropped, 0), number + 1):
            assert drawn.end_of(batch) == ends[batch]
        assert drawn.end_of(number + 5) == len(model)
        start = ends[max(dropped, 0)]
        assert drawn.between(start).tolist() == model[start:]
