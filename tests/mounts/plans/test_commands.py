"""`PlanCommands`: exact fields, one version alone, and the streams of lists."""

import itertools
from collections.abc import Sequence

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.errors import ConflictError, CorruptError, UsageError
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts.daemon.prefetch_worker import planner_for
from diesel_fs.mounts.plans.commands import (
    FINISHED_S,
    LIST_STREAMS_MAX,
    PREDICT_ENTRIES_MIN,
    PlanCommands,
)
from diesel_fs.mounts.plans.control import drawn, explicit
from diesel_fs.mounts.plans.control_wire import CHECK_ENTRIES_MAX, pack_entries
from diesel_fs.mounts.prefetch.decisions import Drop, Idle, Push, Sample, StreamStats
from diesel_fs.net.messages import DEPTH_MAX, ITEMS_MAX, Message, Value, parse_error, unpack
from diesel_fs.orders.shuffle import chunk_shuffle, full_shuffle
from tests.orders.datasets import dataset
from tests.rows import each_row

SNAPSHOT = dataset(6, 50)
OF_VERSION: Message = {"identity": str(SNAPSHOT.identity), "version": SNAPSHOT.version}


class Bench:
    """`PlanCommands` with a real `PrefetchPlanner`; decisions are reported as done at once."""

    def __init__(self, snapshot: Snapshot = SNAPSHOT) -> None:
        self.snapshot = snapshot
        self.residency = planner_for(snapshot, 1 << 30, "on-demand")
        self.messages = PlanCommands(snapshot, self.residency)
        self.now_s = 1.0

    def ask(self, **message: Value) -> Message:
        answer = self.messages.answer(message, self.now_s)
        if (error := parse_error(answer)) is not None:
            raise error
        return answer

    def settle(self) -> list[int]:
        pushed: list[int] = []
        for _ in range(1000):
            match self.residency.next(self.now_s):
                case Push() as push:
                    pushed += push.entries.tolist()
                    self.residency.pushed(push, push.entries, [], self.now_s)
                case Drop() as drop:
                    self.residency.dropped(drop)
                case Sample(entries):
                    self.residency.sampled(entries, np.ones(len(entries), np.bool_))
                case Idle():
                    return pushed
                case other:
                    raise AssertionError(other)
        raise AssertionError("it never rests")

    def stream(self, name: str) -> StreamStats | None:
        found = self.residency.stats()["streams"]
        return next((each for each in found if each["name"] == name), None)


def floats(*values: float) -> bytes:
    return np.array(values, "<f4").tobytes()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def announce(**changed: Value) -> Message:
    epochs: list[Value] = [explicit(epoch=0, entries=SNAPSHOT.files()[:20])]
    return {"do": "announce", "stream": "s", **OF_VERSION, "epochs": epochs, **changed}


def test_an_announced_order_is_pushed(bench: Bench) -> None:
    files = SNAPSHOT.files()[::-1]
    assert bench.ask(**announce(epochs=[explicit(epoch=0, entries=files)])) == {"entries": 300}
    assert sorted(bench.settle()) == sorted(files.tolist())
    answer = bench.ask(do="resident", **OF_VERSION, **pack_entries(files))
    assert answer["count"] == 300
    bitmap = answer["bitmap"]
    assert isinstance(bitmap, bytes)
    assert np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little")[:300].all()
    bench.ask(do="progress", stream="s", position=120)
    bench.ask(do="progress", stream="s", position=150, epoch=0)
    found = bench.stream("s")
    assert found is not None
    assert found["position"] == 150
    bench.ask(do="extend", stream="s", **OF_VERSION, epochs=[drawn(epoch=1, seed=3)])
    bench.ask(
        do="replace", stream="s", position=5, **OF_VERSION, **explicit(epoch=1, entries=files[:7])
    )
    bench.ask(do="value", **OF_VERSION, **pack_entries(files[:3]), importance=0.5)
    bench.ask(do="withdraw", stream="s")
    assert bench.stream("s") is None
    streams = bench.ask(do="stats")["residency"]
    assert isinstance(streams, dict)
    assert streams["streams"] == []


def test_a_plan_may_give_batches_and_a_lag(bench: Bench) -> None:
    files = SNAPSHOT.files()[:20]
    epoch = explicit(epoch=0, entries=files, bounds=[8, 16, 20])
    bench.ask(**announce(epochs=[epoch], lag_entries=300))
    stream = bench.residency.views.plan["s"]
    assert stream.lag_entries == 300
    assert stream.epoch(0).batch_entries_max == 8
    with pytest.raises(UsageError, match="bounds"):
        bench.ask(**announce(epochs=[explicit(epoch=0, entries=files, bounds=[8, 21])]))


@pytest.mark.parametrize(
    "epoch",
    [
        drawn(epoch=3, seed=4, group_size=2, rank=1, world=3),
        drawn(epoch=3, seed=4, kind="full", drop_last=True, rank=6, world=7),
    ],
)
def test_an_epoch_by_parameters_is_drawn_as_by_the_library(bench: Bench, epoch: Message) -> None:
    if epoch["kind"] == "full":
        order = full_shuffle(SNAPSHOT, 4, 3, drop_last=True, rank=6, world=7)
    else:
        order = chunk_shuffle(SNAPSHOT, 4, 3, group_size=2, rank=1, world=3)
    bench.ask(**announce(epochs=[epoch]))
    drawn_there = bench.residency.views.plan["s"].epoch(3).entries
    assert drawn_there.tolist() == order.tolist()


def test_a_plan_for_another_version_is_refused_and_both_are_named(bench: Bench) -> None:
    for change in ({"version": SNAPSHOT.version + 1}, {"identity": "another"}):
        (wanted,) = change.values()
        with pytest.raises(ConflictError) as raised:
            bench.ask(**announce(**change))
        own = OF_VERSION[next(iter(change))]
        assert str(wanted) in raised.value.message
        assert str(own) in raised.value.message
    for do in ("extend", "replace", "value", "resident", "check"):
        with pytest.raises(ConflictError):
            bench.ask(do=do, stream="s", **{**OF_VERSION, "version": SNAPSHOT.version + 1})
    assert bench.stream("s") is None


ENTRIES = pack_entries([1, 2])
LONG: list[Value] = [drawn(epoch=each, seed=1) for each in range(9)]


@each_row(
    "changed",
    [
        {"do": 3}, {"do": "missed"}, {"do": "announce "}, {"stream": 1}, {"stream": ""},
        {"stream": "a b"}, {"stream": "x" * 65}, {"version": True}, {"version": "7"},
        {"version": 7.0}, {"version": -1}, {"identity": b"x"}, {"color": 1}, {"tentative": 1},
        {"lag_entries": -1}, {"lag_entries": 1 << 40}, {"epochs": {}}, {"epochs": [1]},
        {"epochs": LONG}, {"epochs": [{}]}, {"epochs": [{"epoch": 0}]},
        {"epochs": [{"epoch": 0, **ENTRIES, "more": 1}]},
        {"epochs": [{"epoch": -1, **ENTRIES}]}, {"epochs": [{"epoch": True, **ENTRIES}]},
        {"epochs": [{"epoch": 0, **ENTRIES, "width": 3}]},
        {"epochs": [{"epoch": 0, **ENTRIES, "width": 2}]},
        {"epochs": [{"epoch": 0, "entries": b"123"}]},
        {"epochs": [{"epoch": 0, "entries": "text"}]},
        {"epochs": [{"epoch": 0, "entries": b"\xff\xff\xff\xff"}]},
        {"epochs": [{"epoch": 0, "entries": b"\xff\xff\xff\x7f"}]},
        {"epochs": [{"epoch": 0, "entries": b"\0\0\0\0"}]},  # the root is no file
        {"epochs": [{"epoch": 0, **ENTRIES, "exact": 1}]},
        {"epochs": [{"epoch": 0, **ENTRIES, "bounds": b"1"}]},
        {"epochs": [{"epoch": 0, **ENTRIES, "bounds": bytes(8)}]},
        {"epochs": [{**drawn(epoch=0, seed=1), "kind": "other"}]},
        {"epochs": [{**drawn(epoch=0, seed=1), "kind": 1}]},
        {"epochs": [{**drawn(epoch=0, seed=1), "seed": -1}]},
        {"epochs": [{**drawn(epoch=0, seed=1), "seed": 1 << 63}]},
        {"epochs": [{**drawn(epoch=0, seed=1), "rank": 1}]},
        {"epochs": [{**drawn(epoch=0, seed=1), "world": 0}]},
        {"epochs": [{**drawn(epoch=0, seed=1), "world": 1 << 40}]},
        {"epochs": [{**drawn(epoch=0, seed=1), "below": 1 << 30}]},
        {"epochs": [{**drawn(epoch=0, seed=1), "below": 0.5}]},
        {"epochs": [{**drawn(epoch=0, seed=1), "entries": b""}]},
        {"epochs": [{**drawn(epoch=0, seed=1), "group_size": 0}]},
        {"epochs": [drawn(epoch=1, seed=1), drawn(epoch=0, seed=1)]},
    ],
)  # fmt: skip
def test_N3_bad_messages_are_refused_and_change_nothing(bench: Bench, changed: Message) -> None:
    with pytest.raises(UsageError):
        bench.ask(**{**announce(), **changed})
    assert bench.residency.stats()["streams"] == []
    assert bench.settle() == []


@each_row("importance", [float("nan"), float("inf"), -1.0, "1", None, True])
def test_N3_an_importance_is_a_finite_number(bench: Bench, importance: Value) -> None:
    with pytest.raises(UsageError):
        bench.ask(do="value", **OF_VERSION, **ENTRIES, importance=importance)


@each_row(
    ("change", "match"),
    [
        ({"importances": floats(1, float("nan"))}, "bad importance nan"),
        ({"importances": floats(1, float("inf"))}, "bad importance inf"),
        ({"importances": floats(-0.5, 1)}, "bad importance -0.5"),
        ({"importances": floats(1)}, "4 bytes for each of 2 entries"),
        ({"importances": floats(1, 2) + b"x"}, "4 bytes for each of 2 entries"),
        ({"entries": b"\xff\xff\x00\x00" * 2}, "no entry"),
        ({"job": "j" * 65}, "bad job"),
        ({"benefit": -1.0}, "benefit -1"),
        ({"benefit": float("nan")}, "finite"),
        ({"version": 10**6}, "version"),
    ],
)
def test_N3_a_hostile_list_of_importances_changes_nothing(change: Message, match: str) -> None:
    bench = Bench()
    files = SNAPSHOT.files()[:2]
    good: Message = {
        "do": "value", **OF_VERSION, **pack_entries(files), "importances": floats(1, 2),
    }  # fmt: skip
    assert bench.ask(**{**good, "job": "a", "benefit": 2.0}) == {"jobs": 1}
    before = bench.residency.stats()
    kind = ConflictError if "version" in change else UsageError
    with pytest.raises(kind, match=match):
        bench.ask(**{**good, **change})
    assert bench.residency.stats() == before
    assert bench.ask(**{**good, "job": "b"}) == {"jobs": 2}


# bytes --------------------------------------------------------------------------------------------


def nested(depth: int) -> Message:
    found: Message = {}
    for _ in range(depth):
        found = {"a": found}
    return found


@each_row(
    "body",
    [
        b"", b"\x01", b"\xc1", b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\x91\xc0",
        b"\x81\xa1a", b"\x81\xa1a\x01\x01", b"\x82\xa1a\x01\xa1a\x02", b"\x81\x01\x01",
        b"\x81\xa1\xff\x01", b"\x81\xa1a\xa1\xff", b"\x81\xa1a\xc6\xff\xff\xff\xff",
        b"\x81\xa1a\xd4\x01\x01", b"\x81\xa1a\xd6\xff\0\0\0\0", b"\x81\xc4\x01a\x01",
        b"\x81\xa1a" + b"\x91" * 100_000 + b"\xc0", msgpack.packb(nested(DEPTH_MAX + 1)),
        msgpack.packb({"a": [0] * ITEMS_MAX}), b"\xde\xff\xff", b"\x8f" * 1_000_000,
    ],
)  # fmt: skip
def test_N1_N2_N3_N4_bytes_that_are_not_a_message_are_refused(body: bytes) -> None:
    with pytest.raises(CorruptError):
        unpack(body)


def test_a_message_at_the_limits_is_accepted() -> None:
    deep = nested(DEPTH_MAX - 1)
    assert unpack(msgpack.packb(deep)) == deep
    full: Message = {"a": [None] * (ITEMS_MAX - 5), "b": {}}
    assert unpack(msgpack.packb(full)) == full
    assert unpack(msgpack.packb({"a": bytes(1 << 20)})) == {"a": bytes(1 << 20)}


@given(st.binary(max_size=300))
def test_any_bytes_give_a_message_or_one_error(body: bytes) -> None:
    try:
        found = unpack(body)
    except CorruptError:
        return
    assert unpack(msgpack.packb(found)) == found or "nan" in repr(found)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)
NAMES = st.sampled_from(
    "do stream identity version epochs epoch entries width kind seed rank world position bounds"
    " tentative lag_entries importance exact list node below".split()
)


@given(st.dictionaries(NAMES, VALUES | st.sampled_from(["announce", "replace", "value"])))
def test_any_message_is_answered(message: Message) -> None:
    """Handlers raise nothing but named errors."""
    body = msgpack.packb(message)
    try:
        read = unpack(body)
    except CorruptError:
        return
    answer = Bench().messages.answer({**read, **OF_VERSION}, 1.0)
    assert isinstance(answer, dict)
    assert parse_error(answer) is None or set(answer) == {"error", "message", "advice"}


# lists --------------------------------------------------------------------------------------------


def read_list(bench: Bench, epoch: int, stream: str = "filelist") -> None:
    bench.ask(do="list read", stream=stream, list=f"seed=1,epoch={epoch},group=2")


def looked_up(bench: Bench) -> Value:
    return bench.ask(do="list looked up", stream="filelist")["epoch"]


def follow(bench: Bench, epoch: int) -> None:
    bench.settle()
    for entry in chunk_shuffle(bench.snapshot, 1, epoch, group_size=2).tolist():
        bench.residency.opened(entry, bench.now_s)
    bench.now_s += 0.5


def test_the_next_list_continues_the_stream(bench: Bench) -> None:
    assert looked_up(bench) == -1
    for epoch in range(5):
        read_list(bench, epoch)
        assert looked_up(bench) == epoch
        read_list(bench, epoch)  # by another worker: nothing changes
        found = bench.stream("filelist")
        assert found is not None
        assert (found["epoch"], found["tentative"]) == (epoch, epoch == 0)
        follow(bench, epoch)
        assert looked_up(bench) == epoch + 1


def test_the_next_epoch_is_predicted_and_its_list_confirms_it() -> None:
    bench = Bench(dataset(10, PREDICT_ENTRIES_MIN // 10 + 1))
    orders = [chunk_shuffle(bench.snapshot, 1, epoch, group_size=2) for epoch in range(2)]
    read_list(bench, 0)
    bench.settle()
    bench.messages.predict_next_epochs(bench.now_s + 2)
    announced = bench.residency.views.plan
    assert len(announced["filelist"].epochs) == 1, "no reader follows it yet"
    middle = len(orders[0]) // 2 + 600
    for entry in orders[0][:middle].tolist():
        bench.residency.opened(entry, bench.now_s)
    bench.messages.predict_next_epochs(bench.now_s + 4)
    first, second = bench.residency.views.plan["filelist"].epochs
    assert (first.number, second.number, second.exact) == (0, 1, False)
    assert second.entries.tolist() == orders[1].tolist()
    assert looked_up(bench) == 0
    bench.settle()
    for entry in orders[0][middle:].tolist():
        assert looked_up(bench) == 0
        bench.residency.opened(entry, bench.now_s)
    assert looked_up(bench) == 1
    read_list(bench, 1)
    follow(bench, 1)
    assert looked_up(bench) == 2


def test_a_list_that_is_read_again_after_its_end_is_announced_again(bench: Bench) -> None:
    read_list(bench, 0)
    follow(bench, 0)
    read_list(bench, 0)
    found = bench.stream("filelist")
    assert found is not None
    assert (found["epoch"], found["position"], found["tentative"]) == (0, 0, True)


def test_an_ended_stream_gives_up_its_memory_and_keeps_its_epoch(bench: Bench) -> None:
    read_list(bench, 0)
    follow(bench, 0)
    bench.messages.predict_next_epochs(bench.now_s + 1)
    bench.messages.predict_next_epochs(bench.now_s + 3 + FINISHED_S)
    assert bench.stream("filelist") is None
    assert looked_up(bench) == 1
    read_list(bench, 1)
    assert looked_up(bench) == 1
    follow(bench, 1)
    assert looked_up(bench) == 2


def test_lists_leave_streams_for_announced_plans(bench: Bench) -> None:
    for number in range(3 * LIST_STREAMS_MAX):
        read_list(bench, 0, f"shuffle:{number}")
    names = {each["name"] for each in bench.residency.stats()["streams"]}
    last = itertools.islice(range(3 * LIST_STREAMS_MAX), 2 * LIST_STREAMS_MAX, None)
    assert names == {f"shuffle:{number}" for number in last}


def test_check_queries_the_kernel_about_pushed_files_that_are_not_watched(bench: Bench) -> None:
    """Opening a watched file would look like a reader's open."""
    checked: list[int] = []

    def ask_kernel(entries: Sequence[int]) -> list[bool]:
        checked.extend(entries)
        return [entry % 2 == 0 for entry in entries]

    bench.messages = PlanCommands(bench.snapshot, bench.residency, ask_kernel)
    files = bench.snapshot.files()
    few = pack_entries(files[:60])
    assert not any(bits_of(bench.ask(do="check", **OF_VERSION, **few)))
    assert checked == []
    bench.ask(do="announce", stream="s", **OF_VERSION, epochs=[{"epoch": 0, **pack_entries(files)}])
    bench.settle()
    watched = {int(files[0]), int(files[-1]), *files[::256].tolist()}
    found = bits_of(bench.ask(do="check", **OF_VERSION, **few))
    assert sorted(checked) == sorted({*files[:60].tolist()} - watched)
    expected = [entry % 2 == 0 or entry in watched for entry in files[:60].tolist()]
    assert found == expected
    assert bits_of(bench.ask(do="resident", **OF_VERSION, **few)) == expected
    many = pack_entries(np.zeros(CHECK_ENTRIES_MAX + 1, np.int64))
    with pytest.raises(UsageError, match="4097 entries to check"):
        bench.ask(do="check", **OF_VERSION, **many)


def bits_of(answer: Message) -> list[bool]:
    bitmap, count = answer["bitmap"], answer["count"]
    assert isinstance(bitmap, bytes)
    assert isinstance(count, int)
    return [bool(bitmap[at // 8] >> at % 8 & 1) for at in range(count)]
