"""A master's plan of all readers: streams come once, from senders that may lie, fail and come
again, and become the future of its cache."""

import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import cast
from uuid import UUID

import numpy as np
import numpy.typing as npt
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from trio.testing import MockClock

from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.orders.computed import ComputedOrder
from diesel_fs.orders.plan import Entries
from diesel_fs.peers.node.chunk_future import ChunkFuture
from diesel_fs.peers.node.node_cache import NodeCache
from diesel_fs.peers.plan.future_build import ChunksOfEntries
from diesel_fs.peers.plan.messages import (
    DAMAGED,
    NO_ROOM,
    REFUSED,
    TAKEN,
    UNKNOWN,
    ChunkValues,
    HeldChunks,
    OrderPiece,
    PlanMessage,
    PlannedEpoch,
    PlannedStream,
    Positions,
    StreamEnd,
    order_digest,
    order_pieces,
    plan_body,
)
from diesel_fs.peers.plan.publisher import Announcement, PlanPublisher
from diesel_fs.peers.plan.task_plan import STILL_S, TaskPlan
from tests.examples import examples


class FakeCache:
    def __init__(self) -> None:
        self.uses_future = True
        self.future: ChunkFuture | None = None
        self.futures = 0
        self.held: npt.NDArray[np.bool_] | None = None
        self.values: npt.NDArray[np.float32] | None = None

    @property
    def uses_left(self) -> int:
        return 0 if self.future is None else self.future.uses.left

    def set_future(self, future: ChunkFuture | None) -> None:
        self.future = future
        self.futures += 1

    def set_positions(self, positions: Sequence[int]) -> None:
        if self.future is not None:
            assert len(positions) == self.future.uses.ranks
            for rank, position in enumerate(positions):
                self.future.uses.seek(rank, position)

    def set_held_elsewhere(self, held: npt.NDArray[np.bool_]) -> None:
        self.held = held

    def set_values(self, values: npt.NDArray[np.float32] | None) -> None:
        self.values = values

    def next_chunks(self) -> set[int]:
        assert self.future is not None
        chunks = np.arange(len(self.future.uses))
        return {*chunks[self.future.uses.next_time(chunks) == self.future.uses.now].tolist()}


class Receiver:
    def __init__(self, view: Snapshot, **limits: int) -> None:
        self.view, self.cache = view, FakeCache()
        self.plan = TaskPlan(view, 0, cast(NodeCache, self.cache), **limits)

    def take(self, message: PlanMessage, rank: int = 1, client: int = 0) -> int:
        return self.plan.take(rank, plan_body(message, len(self.view)), client=client)

    def send_order(self, order: Entries) -> PlannedEpoch:
        digest = order_digest(order)
        for piece in order_pieces(order, digest, len(self.view)):
            assert self.take(piece) == TAKEN
        return PlannedEpoch(0, len(order), digest)

    def stream(self, *epochs: PlannedEpoch, key: str = "t") -> PlannedStream:
        numbered = tuple(replace(each, number=at) for at, each in enumerate(epochs))
        return PlannedStream(key, self.view.identity, self.view.version, numbered)


@pytest.fixture
async def here(view: Snapshot) -> AsyncIterator[Receiver]:
    made = Receiver(view)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.plan.run)
        yield made
        nursery.cancel_scope.cancel()


def order_of(view: Snapshot, seed: int) -> Entries:
    files = view.files()
    return np.random.default_rng(seed).permutation(files).astype(np.uint32)


async def test_streams_become_the_future_and_positions_move_it(
    view: Snapshot, here: Receiver, jumping_clock: MockClock
) -> None:
    first, second = order_of(view, 1), order_of(view, 2)
    plain = np.flatnonzero((view.columns.flags & (1 << 25)) == 0)
    assert len(plain)
    assert here.take(here.stream(here.send_order(first))) == TAKEN
    assert here.take(here.stream(here.send_order(second), key="u"), 2) == TAKEN
    await trio.sleep(1)
    assert here.cache.futures == 1, "both at once"
    assert here.cache.next_chunks() == {*view.chunk_of([first[0], second[0]]).tolist()}
    assert here.take(Positions({"t": (0, 50), "none": (0, 3)})) == UNKNOWN
    await trio.sleep(1)
    assert here.cache.future is not None
    assert here.cache.future.uses.position(0) >= 50
    assert here.take(Positions({"t": (7, 3)})) == TAKEN  # beyond its epochs
    await trio.sleep(1)
    assert here.cache.future.uses.position(0) >= len(first)
    assert here.take(Positions({"t": (0, 0)})) == TAKEN  # it begins again
    await trio.sleep(1)
    assert here.cache.future.uses.position(0) == 0
    here.plan.forget(1)
    await trio.sleep(1)
    assert here.cache.future.uses.ranks == 1
    assert here.take(StreamEnd("u"), 2) == TAKEN
    await trio.sleep(1)
    assert here.cache.future is None
    assert here.plan.stats()["streams"] == 0


async def test_a_reader_that_begins_in_the_middle_is_planned_from_there(
    view: Snapshot, here: Receiver, jumping_clock: MockClock
) -> None:
    order = order_of(view, 1)
    stream = replace(here.stream(here.send_order(order)), position=40)
    assert here.take(stream) == TAKEN
    await trio.sleep(1)
    assert here.cache.next_chunks() == {*view.chunk_of([order[40]]).tolist()}
    assert here.take(Positions({"t": (0, 20)})) == TAKEN
    await trio.sleep(2)
    assert here.cache.next_chunks() == {*view.chunk_of([order[20]]).tolist()}
    assert here.cache.futures == 2, "positions before the first future need another one"


async def test_one_more_epoch_of_a_computed_order_is_predicted(
    view: Snapshot, here: Receiver, jumping_clock: MockClock
) -> None:
    order = ComputedOrder(1, 5, 10, rank=1, world=3)
    length = len(order.entries(view))
    following = order.following
    assert following is not None
    epoch = PlannedEpoch(5, length, computed=order)
    stream = PlannedStream("t", view.identity, view.version, (epoch,), 5, 0)
    assert here.take(stream) == TAKEN
    await trio.sleep(1)
    assert here.cache.uses_left >= 2 * length
    assert here.take(Positions({"t": (6, 0)})) == TAKEN
    await trio.sleep(1)
    assert here.cache.next_chunks() == {*view.chunk_of(following.entries(view)[:1]).tolist()}


async def test_a_computed_order_of_another_length_is_left_out(
    view: Snapshot, caplog: pytest.LogCaptureFixture, here: Receiver, jumping_clock: MockClock
) -> None:
    order = ComputedOrder(1, 5, 10)
    for key, length in (("bad", 3), ("good", len(view.files()))):
        epoch = PlannedEpoch(5, length, computed=order)
        stream = PlannedStream(key, view.identity, view.version, (epoch,), 5, 0)
        assert here.take(stream) == TAKEN
    await trio.sleep(1)
    assert here.cache.uses_left >= 2 * len(view.files())
    assert here.plan.stats()["refused"] == 1
    assert "cannot be computed" in caplog.text


async def test_another_version_or_dataset_is_refused_and_logged_once(
    view: Snapshot, caplog: pytest.LogCaptureFixture, here: Receiver, jumping_clock: MockClock
) -> None:
    caplog.set_level(logging.WARNING)
    stream = here.stream(here.send_order(order_of(view, 1)))
    for _ in range(3):
        assert here.take(replace(stream, version=view.version + 1)) == REFUSED
        assert here.take(replace(stream, identity=UUID(int=9))) == REFUSED
    await trio.sleep(1)
    assert here.cache.future is None
    assert here.plan.stats()["refused"] == 6
    assert here.take(stream) == TAKEN, "the same node may have readers of this version, too"
    assert len(caplog.messages) == 1
    assert f"version {view.version + 1} of {view.identity}" in caplog.text
    assert f"version {view.version} of {view.identity}" in caplog.text


async def test_orders_that_contradict_their_announcement_are_refused(view: Snapshot) -> None:
    here = Receiver(view)
    order = order_of(view, 1)
    digest = order_digest(order)
    lie = OrderPiece(bytes(16), len(order), 0, order)
    assert here.take(lie) == DAMAGED
    assert here.take(OrderPiece(digest, len(order), 5, order[5:])) == UNKNOWN
    assert here.take(OrderPiece(digest, len(order), 0, order[:5])) == TAKEN
    assert here.take(OrderPiece(digest, len(order) + 1, 5, order[5:])) == UNKNOWN
    assert here.take(here.stream(PlannedEpoch(0, len(order), digest))) == UNKNOWN
    assert here.plan.take(1, b"\x93") == DAMAGED
    too_many = order.copy()
    too_many[3] = len(view)
    body = plan_body(OrderPiece(digest, len(order), 0, too_many), 1 << 20)
    assert here.plan.take(1, body) == DAMAGED
    epoch = here.send_order(order)
    assert here.take(here.stream(replace(epoch, length=epoch.length - 1))) == DAMAGED
    assert here.take(here.stream(epoch)) == TAKEN


async def test_no_sender_gets_more_room_than_there_is(view: Snapshot) -> None:
    order = order_of(view, 1)
    here = Receiver(view, entries_max=3 * len(order))
    epoch = here.send_order(order)
    assert here.take(here.stream(epoch, epoch)) == TAKEN
    assert here.take(here.stream(epoch, epoch)) == TAKEN, "the same one again"
    assert here.take(here.stream(epoch, epoch, key="u")) == NO_ROOM
    huge = OrderPiece(bytes(16), 1 << 26, 0, order[:1])
    assert here.take(huge) == NO_ROOM
    for seed in range(20):
        piece = OrderPiece(bytes([seed]) * 16, 9, 0, order[:3])
        assert here.take(piece) in (TAKEN, NO_ROOM)
    seeds = [ComputedOrder(seed, 0, 10, world=1 << 20) for seed in range(30)]
    statuses = [
        here.take(here.stream(PlannedEpoch(0, 1, computed=each), key=f"c{each.seed}"))
        for each in seeds
    ]
    assert NO_ROOM in statuses, "each is an order of the whole dataset"
    assert here.plan.stats()["streams"] < 10


async def test_a_stream_that_stands_still_is_left_out_until_it_goes_on(
    view: Snapshot, here: Receiver, jumping_clock: MockClock
) -> None:
    epoch = here.send_order(order_of(view, 1))
    assert here.take(here.stream(epoch)) == TAKEN
    assert here.take(here.stream(epoch, key="still")) == TAKEN
    for position in range(int(STILL_S) + 5):
        await trio.sleep(1)
        here.take(Positions({"t": (0, position)}))
    assert here.plan.stats()["planned_streams"] == 1
    here.take(Positions({"still": (0, 1)}))
    await trio.sleep(1)
    assert here.plan.stats()["planned_streams"] == 2


async def test_clients_of_one_node_may_use_one_name_and_end_alone(view: Snapshot) -> None:
    here = Receiver(view)
    order = order_of(view, 1)
    for client in (1, 11):
        for piece in order_pieces(order, order_digest(order), len(view)):
            assert here.take(piece, 0, client) == TAKEN
        stream = here.stream(PlannedEpoch(0, len(order), order_digest(order)))
        assert here.take(stream, 0, client) == TAKEN
    assert {*here.plan.announcement().streams} == {"1/t", "11/t"}
    here.plan.forget_client(1)
    assert {*here.plan.announcement().streams} == {"11/t"}
    assert here.take(Positions({"t": (0, 1)}), 0, 1) == UNKNOWN


async def test_the_chunks_of_all_other_nodes_are_put_together(
    view: Snapshot, here: Receiver, jumping_clock: MockClock
) -> None:
    count = view.chunk_count
    for rank in (1, 2):
        held = np.arange(count) == rank - 1
        assert here.take(HeldChunks(0, held), rank) == TAKEN
    await trio.sleep(1)
    assert here.cache.held is not None
    assert np.flatnonzero(here.cache.held).tolist() == [0, 1]
    here.plan.forget(1)
    await trio.sleep(1)
    assert np.flatnonzero(here.cache.held).tolist() == [1]


async def test_values_are_added_up(
    view: Snapshot, here: Receiver, jumping_clock: MockClock
) -> None:
    count = view.chunk_count

    def send_values(values: "Sequence[float]", rank: int, client: int = 0, first: int = 0) -> int:
        return here.take(ChunkValues(first, np.array(values, np.float32)), rank, client)

    assert send_values([1] * count, 1) == TAKEN
    assert send_values([0.5] * count, 0, client=7) == TAKEN
    assert send_values([3], 0, client=7, first=count - 1) == TAKEN
    await trio.sleep(1)
    assert here.cache.values is not None
    assert here.cache.values.tolist() == [1.5] * (count - 1) + [4]
    own = here.plan.announcement().values
    assert own is not None
    assert own.tolist() == [0.5] * (count - 1) + [3]
    here.plan.forget(1)
    await trio.sleep(1)
    assert here.cache.values.tolist() == own.tolist()
    here.plan.forget_client(7)
    await trio.sleep(1)
    assert here.cache.values is None
    assert here.plan.announcement().values is None
    assert [send_values([1], 1, client) for client in range(300)] == [TAKEN] * 256 + [NO_ROOM] * 44


async def test_another_version_forgets_all(view: Snapshot) -> None:
    here = Receiver(view)
    stream = here.stream(here.send_order(order_of(view, 1)))
    assert here.take(stream) == TAKEN
    here.plan.switch_version(view)
    assert here.take(Positions({"t": (0, 1)})) == UNKNOWN
    assert here.take(stream) == UNKNOWN, "its order means nothing any more"


def test_files_in_several_chunks_use_each_of_them(view: Snapshot) -> None:
    chunks = ChunksOfEntries(view)
    order = order_of(view, 3)
    units, ends = chunks.units(order)
    assert ends is not None
    begin = 0
    for entry, end in zip(order.tolist(), ends.tolist(), strict=True):
        expected = [extent.chunk for extent in view.extents(entry)]
        assert units[begin:end].tolist() == (expected or units[begin:end].tolist())
        begin = end
    assert begin == len(units)
    assert (chunks.read_bytes <= chunks.live_bytes).all()


KEYS = st.sampled_from("ab")
EVENTS = st.one_of(
    st.tuples(st.just("set"), KEYS, st.lists(st.integers(0, 4), max_size=3, unique=True)),
    st.tuples(st.just("move"), KEYS, st.integers(0, 4), st.integers(0, 400)),
    st.tuples(st.just("drop"), KEYS),
    st.tuples(st.just("chunk"), st.integers(0, 9)),
    st.tuples(st.just("lose"), st.integers(0, 6)),  # the connection, after this number of messages
    st.tuples(st.just("restart")),  # the receiver has lost its state
)


@examples(60)
@given(events=st.lists(EVENTS, max_size=12))
async def test_after_any_failures_the_receiver_has_the_whole_plan(
    view: Snapshot, events: list[tuple[object, ...]]
) -> None:
    here = Receiver(view)
    orders = [order_of(view, seed) for seed in range(3)]
    by_digest = {order_digest(each): each for each in orders}
    publisher = PlanPublisher(len(view))
    streams: dict[str, PlannedStream] = {}
    held = np.zeros(view.chunk_count, np.bool_)
    values = np.zeros(view.chunk_count, np.float32)

    def news(most: int) -> bool:
        plan = Announcement(streams, lambda epoch: by_digest.get(epoch.digest), values, held)
        talk = publisher.news(plan)
        status: int | None = TAKEN
        try:
            body = next(talk)
            for _ in range(most):
                status = here.plan.take(1, body)
                body = talk.send(status)
            talk.send(None)
        except StopIteration:
            return status == TAKEN
        return False

    for event in events:
        match event:
            case "set", str(key), list(numbers):
                epochs = [
                    PlannedEpoch(number, len(orders[0]), order_digest(orders[number % 3]))
                    if number < 3
                    else PlannedEpoch(number, len(orders[0]), computed=ComputedOrder(1, number, 9))
                    for number in sorted(numbers)
                ]
                streams[key] = PlannedStream(key, view.identity, view.version, tuple(epochs))
            case "move", str(key), int(epoch), int(position) if key in streams:
                streams[key] = replace(streams[key], at_epoch=epoch, position=position)
            case "drop", str(key):
                streams.pop(key, None)
            case "chunk", int(chunk):
                held = held ^ (np.arange(view.chunk_count) == chunk % view.chunk_count)
                values = np.where(held, chunk, values).astype(np.float32)
            case "lose", int(count):
                news(count)
            case ("restart",):
                here.plan.forget(1)
                here.plan._orders.clear()
    for _ in range(32):
        news(1000)
    assert news(1000)
    known = {key: each.stream for (_, key), each in here.plan._streams.items()}
    assert known.keys() == streams.keys()
    for key, stream in streams.items():
        stored = known[key]
        assert stored.epochs[len(stored.epochs) - len(stream.epochs) :] == stream.epochs
        assert (stored.at_epoch, stored.position) == (stream.at_epoch, stream.position)
    assert (here.plan._held[1] == held).all()
    assert (here.plan._values[1, 0] == values).all()


async def test_an_order_is_sent_once_and_again_only_if_it_changed(view: Snapshot) -> None:
    here = Receiver(view)
    orders = [order_of(view, seed) for seed in range(3)]
    by_digest = {order_digest(each): each for each in orders}
    publisher = PlanPublisher(len(view))
    sent: list[int] = []

    def news(*numbers: int, position: int = 0) -> int:
        epochs = tuple(
            PlannedEpoch(at, len(orders[at]), order_digest(orders[at])) for at in numbers
        )
        stream = PlannedStream("t", view.identity, view.version, epochs, numbers[0], position)
        plan = Announcement({"t": stream}, lambda epoch: by_digest.get(epoch.digest))
        talk = publisher.news(plan)
        sent.clear()
        try:
            body = next(talk)
            while True:
                sent.append(len(body))
                body = talk.send(here.plan.take(1, body))
        except StopIteration:
            return len(sent)

    assert news(0, 1) == 3, "two orders of one piece each, and the stream"
    assert news(0, 1) == 0
    assert news(0, 1, position=5) == 1
    assert news(1) == 1, "the first epoch was read, as a position shows"
    assert news(1, 2) == 2, "one more order"
    here.plan.forget(1)
    assert news(1, 2, position=3) == 1, "the receiver answers that it does not know the stream"
    assert news(1, 2, position=3) == 3, "and gets everything again"
