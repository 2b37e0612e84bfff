"""The laws of every object store (`ObjectStore`'s docstrings), checked on each kind of store.

A new kind of store is one more parameter of the fixture `store`.
"""

import array
import inspect
import random
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from diesel_fs.errors import (
    ObjectExists,
    ObjectMissing,
    ObjectStoreError,
    TruncatedError,
    UsageError,
)
from diesel_fs.format.object_names import OBJECT_NAME, STORE_MARKER
from diesel_fs.storage.objects.cloud.proxy import CloudProxy
from diesel_fs.storage.objects.cloud.store import open_cloud
from diesel_fs.storage.objects.folder import FolderStore
from diesel_fs.storage.objects.store import (
    ObjectStore,
    ReadWrapper,
    StoreWrapper,
    batched_parts,
    parse_marker,
)
from tests.examples import examples
from tests.rows import each_row
from tests.storage.objects.faulty_store import Fault, FaultyStore
from tests.storage.objects.s3_server import Server
from tests.storage.objects.scripted_store import DATASET, LEASE, chunk
from tests.tiers import fast_first

ALPHABET = "-0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(params=fast_first(["folder", "cloud", "wrapped", "proxy"], 2))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ObjectStore]:
    made: ObjectStore
    if request.param == "cloud":
        server: Server = request.getfixturevalue("s3")
        made = open_cloud(server.place(), create=True, environ=server.environ)
    elif request.param == "proxy":
        server = request.getfixturevalue("s3")
        with pytest.MonkeyPatch.context() as patch:
            for name, text in server.environ.items():
                patch.setenv(name, text)
            made = CloudProxy.open(server.place(), create=True)
    else:
        made = FolderStore.create(tmp_path / "store")
        if request.param == "wrapped":
            made = StoreWrapper(made)
    yield made
    assert not [*made.housekeeping.leftovers()], "a method left a temporary behind"


many_examples = examples(25, suppress=(HealthCheck.function_scoped_fixture,))
object_names = st.from_regex(OBJECT_NAME, fullmatch=True).filter(lambda name: name != STORE_MARKER)


def reads(store: ObjectStore, name: str) -> list[Callable[[], object]]:
    return [
        lambda: store.get(name),
        lambda: store.read_into(name, 0, bytearray(1)),
        lambda: store.fast_reads.read(name, 0, 0),
        lambda: store.fast_reads.read(name, 0, 1),
        lambda: store.stat(name),
    ]


def test_get_returns_the_bytes_of_the_put(store: ObjectStore) -> None:
    numbers = array.array("I", range(1000))
    parts: list[bytes | bytearray | memoryview] = [
        *(b"head", bytearray(b"er"), b"", memoryview(numbers), memoryview(b"xtailx")[1:-1]),
        *(bytes([n % 251]) * (n % 7) for n in range(5000)),
    ]
    store.put(chunk("a"), parts)
    assert store.get(chunk("a")) == b"header" + numbers.tobytes() + b"tail" + b"".join(parts[5:])


@each_row("parts", [[], [b""], [b"", b""]])
def test_an_empty_object_is_an_object(store: ObjectStore, parts: list[bytes]) -> None:
    store.delete(chunk("a"))
    store.put(chunk("a"), parts)
    assert store.get(chunk("a")) == b""
    assert store.stat(chunk("a")).bytes == 0
    assert chunk("a") in store.housekeeping.names("")


def test_put_never_overwrites(store: ObjectStore) -> None:
    store.put(chunk("a"), [b"first"])
    with pytest.raises(ObjectExists):
        store.put(chunk("a"), [b"second"])
    assert store.get(chunk("a")) == b"first"


def test_replace_creates_and_overwrites_leases_only(store: ObjectStore) -> None:
    store.replace(LEASE, [b"one"])
    store.replace(LEASE, [b"t", b"wo"])
    assert store.get(LEASE) == b"two"
    for name in (chunk("a"), STORE_MARKER, f"{DATASET}/DATASET"):
        with pytest.raises(UsageError):
            store.replace(name, [b""])


def test_a_missing_object_is_object_missing(store: ObjectStore) -> None:
    store.put(chunk("a"), [b"x"])
    for name in (chunk("b"), chunk("ab"), LEASE):
        for read in reads(store, name):
            with pytest.raises(ObjectMissing):
                read()


def test_delete_is_idempotent(store: ObjectStore) -> None:
    store.delete(chunk("a"))
    store.put(chunk("a"), [b"x"])
    store.put(chunk("b"), [b"y"])
    store.delete(chunk("a"))
    store.delete(chunk("a"))
    assert [*store.housekeeping.names(DATASET)] == [chunk("b")]
    store.put(chunk("a"), [b"again"])
    assert store.get(chunk("a")) == b"again"


def test_the_marker_is_an_object_that_stays(store: ObjectStore) -> None:
    assert [*store.housekeeping.names("")] == [STORE_MARKER]
    with pytest.raises(ObjectExists):
        store.put(STORE_MARKER, [b"{}"])
    with pytest.raises(UsageError):
        store.delete(STORE_MARKER)
    assert parse_marker(store.get(STORE_MARKER)) == store.store_id


@each_row(
    "name",
    [
        "",
        "/etc/passwd",
        "../outside",
        f"{DATASET}/../../outside",
        f"{DATASET}/chunks/aaaa/../aaaa/aaaa",
        f"{DATASET}/chunks/abcd/" + "x" * 22,
        f"{chunk('a')}\n",
        f"{chunk('a')}\0",
        f"{DATASET}/chunks/aaaa/.tmp-host-1-0123456789abcdef",
        "meta.sqlite",
        "DATASETS",
    ],
)
def test_names_outside_the_grammar_are_refused(store: ObjectStore, name: str) -> None:
    changes: list[Callable[[], object]] = [
        lambda: store.put(name, [b"x"]),
        lambda: store.delete(name),
    ]
    for call in (*reads(store, name), *changes):
        with pytest.raises(UsageError):
            call()


@each_row("prefix", ["../", "/", f"{DATASET}/../", "elsewhere/"])
def test_prefixes_outside_the_grammar_are_refused(store: ObjectStore, prefix: str) -> None:
    for listing in (store.list, store.housekeeping.names):
        with pytest.raises(UsageError):
            [*listing(prefix)]


@given(name=object_names, content=st.binary(max_size=100))
@many_examples
def test_every_name_of_the_grammar_works(store: ObjectStore, name: str, content: bytes) -> None:
    store.delete(name)
    store.put(name, [content])
    assert store.get(name) == content
    assert [info.bytes for info in store.list(name) if info.name == name] == [len(content)]


@given(
    content=st.binary(max_size=50), start=st.integers(0, 60), length=st.none() | st.integers(0, 60)
)
@many_examples
def test_a_range_is_exact_or_an_error(
    store: ObjectStore, content: bytes, start: int, length: int | None
) -> None:
    store.delete(chunk("r"))
    store.put(chunk("r"), [content])
    buffer = bytearray(7 if length is None else length)
    if start + (length or 0) > len(content):
        with pytest.raises(TruncatedError):
            store.get(chunk("r"), start, length)
    else:
        end = len(content) if length is None else start + length
        assert store.get(chunk("r"), start, length) == content[start:end]
    if start + len(buffer) > len(content):
        with pytest.raises(TruncatedError):
            store.read_into(chunk("r"), start, buffer)
        with pytest.raises(TruncatedError):
            store.fast_reads.read(chunk("r"), start, len(buffer))
    else:
        assert (
            store.fast_reads.read(chunk("r"), start, len(buffer))
            == content[start : start + len(buffer)]
        )
        store.read_into(chunk("r"), start, memoryview(buffer))
        assert buffer == content[start : start + len(buffer)]


def test_negative_and_huge_ranges_are_refused(store: ObjectStore) -> None:
    """A huge length takes no memory."""
    store.put(chunk("a"), [b"x"])
    with pytest.raises(TruncatedError) as caught:
        store.get(chunk("a"), 0, 1 << 60)
    assert caught.value.offset == 1
    for start, length in ((-1, None), (0, -1), (-5, 5)):
        with pytest.raises(UsageError):
            store.get(chunk("a"), start, length)


def test_a_listing_is_in_byte_order_from_a_name_on(store: ObjectStore) -> None:
    draw = random.Random(7)
    names = [chunk("".join(draw.choices(ALPHABET, k=6))) for _ in range(100)]
    names += [chunk(text) for text in ("A", "a", "_", "-", "aaaa", "aaab", "0")]
    names += [f"{DATASET}/DATASET", f"{DATASET}/snapshots/{3:016x}", LEASE, "deleted/" + "0" * 32]
    names += [f"datasets/{'0e' * 16}/DATASET", f"datasets/{'10' * 16}/DATASET", STORE_MARKER]
    for name in names:
        if name != STORE_MARKER:
            store.put(name, [name.encode()])
    expected = sorted(names, key=str.encode)
    listed = [*store.list("")]
    assert [info.name for info in listed] == expected
    assert all(info.bytes == len(info.name) for info in listed if info.name != STORE_MARKER)
    prefixes = ["", "d", "datasets", "datasets/", DATASET, f"{DATASET}/chunks/", chunk("a")[:-9]]
    afters = ["", "d", "datasets", *expected[::9], f"{DATASET}/chunks/aaaa", chunk("zzzz"), "zz"]
    for prefix in prefixes:
        for after in afters:
            wanted = [name for name in expected if name.startswith(prefix) and name > after]
            assert [*store.housekeeping.names(prefix, after)] == wanted, (prefix, after)
            assert [info.name for info in store.list(prefix, after)] == wanted, (prefix, after)


def test_the_listing_of_an_unused_prefix_is_empty(store: ObjectStore) -> None:
    assert [*store.list(f"{DATASET}/chunks/")] == []
    assert [*store.housekeeping.names("deleted/")] == []
    assert [*store.housekeeping.foreign()] == []


def test_a_listing_outlives_deletions(store: ObjectStore) -> None:
    names = [chunk(text) for text in ("aaaa1", "aaaa2", "bbbb1", "cccc1")]
    for name in names:
        store.put(name, [b"x"])
    listing = store.list(f"{DATASET}/chunks/")
    assert next(listing).name == names[0]
    for name in names[:3]:
        store.delete(name)
    assert names[3] in [info.name for info in listing]


def test_stat_agrees_with_the_listing(store: ObjectStore) -> None:
    store.put(chunk("a"), [b"12345"])
    info = store.stat(chunk("a"))
    assert info.bytes == 5
    assert info.modified_ns > 1_500_000_000 * 10**9
    assert [*store.list(chunk("a"))] == [info]


def test_exactly_one_of_several_putters_of_one_name_wins(store: ObjectStore) -> None:
    store.put(chunk("first"), [b"x"])
    if getattr(getattr(store, "inner", None), "supports_conditional_put", None) is False:
        pytest.skip("this server knows no conditional requests, which `CloudStore.put` explains")
    putters = 8
    start = threading.Barrier(putters)

    def put(name: str, number: int) -> int:
        start.wait()
        try:
            store.put(name, [bytes([number]) * 1000] * 20)
        except ObjectExists:
            return 0
        return number

    for turn in range(10):
        name = chunk(f"race{turn}")
        with ThreadPoolExecutor(putters) as pool:
            won = [*filter(None, pool.map(put, [name] * putters, range(1, putters + 1)))]
        assert len(won) == 1
        assert store.get(name) == bytes(won) * 20000


def test_readers_of_a_lease_see_one_version(store: ObjectStore, pool: ThreadPoolExecutor) -> None:
    store.replace(LEASE, [b"0" * 50_000])
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            content = store.get(LEASE)
            assert (len(content), len(set(content))) == (50_000, 1), "torn"

    reading = pool.submit(read)
    try:
        for number in range(30):
            store.replace(LEASE, [b"%d" % (number % 10) * 25_000] * 2)
    finally:
        done.set()
    reading.result()


def test_a_fault_hits_its_operation_and_name(store: ObjectStore) -> None:
    lost = ObjectStoreError("the answer was lost")
    script = (
        Fault("put", "chunks/", error=lost, done=True),
        Fault("get", flip=9, skip=1),
        Fault("read_into", flip=0),
        Fault("list", keep=1),
    )
    with FaultyStore(store, *script) as faulty:
        with pytest.raises(ObjectStoreError, match="lost"):
            faulty.put(chunk("a"), [b"\0\0"])
        faulty.put(chunk("b"), [b"\0\0"])
        assert faulty.get(chunk("a")) == b"\0\0"
        assert faulty.get(chunk("a")) == b"\0\x02"
        buffer = bytearray(2)
        faulty.read_into(chunk("a"), 0, buffer)
        assert buffer == b"\x01\0"
        assert [*faulty.housekeeping.names(DATASET)] == [chunk("a")]
        assert len([*faulty.housekeeping.names(DATASET)]) == 2
    assert faulty.calls == {"put": 2, "get": 2, "read_into": 1, "list": 2}


def test_a_fault_that_does_not_hit_fails_the_test(store: ObjectStore) -> None:
    faulty = FaultyStore(store, Fault("get", error=ObjectStoreError("never")))
    with pytest.raises(AssertionError, match="did not hit"), faulty:
        pass


def test_stores_have_different_uuids(tmp_path: Path) -> None:
    first, second = FolderStore.create(tmp_path / "1"), FolderStore.create(tmp_path / "2")
    assert isinstance(first.store_id, uuid.UUID)
    assert first.store_id != second.store_id


@given(st.lists(st.integers(0, 12)), st.integers(1, 4), st.integers(1, 20))
def test_parts_go_together_up_to_limits(sizes: list[int], count_max: int, bytes_max: int) -> None:
    parts = [("x", number, size) for number, size in enumerate(sizes)]
    found = [*batched_parts(parts, count_max, bytes_max)]
    assert [part for some in found for part in some] == parts
    for some, following in pairwise([*found, []]):
        total = sum(size for _, _, size in some)
        assert 1 <= len(some) <= count_max
        assert total <= bytes_max or len(some) == 1
        if following:
            assert len(some) == count_max or total + following[0][2] > bytes_max


PUBLIC = [name for name in vars(ObjectStore) if not name.startswith("_")]


@each_row("name", PUBLIC)
def test_a_wrapper_forwards_each_method_and_flag(name: str) -> None:
    """A method or flag that was added to `ObjectStore` and forgotten in `StoreWrapper` fails."""
    member, inner = vars(ObjectStore)[name], Mock()
    wrapper = StoreWrapper(inner)
    assert name in vars(StoreWrapper)
    if isinstance(member, property):
        assert getattr(wrapper, name) is getattr(inner, name)
        return
    signature = inspect.signature(member)
    arguments = [object() for _ in [*signature.parameters][1:]]
    result = getattr(wrapper, name)(*arguments)
    getattr(inner, name).assert_called_once_with(*arguments)
    assert result is (None if signature.return_annotation is None else getattr(inner, name)())


def test_reads_of_a_read_wrapper_all_go_through_its_read_into() -> None:
    """Otherwise a retry, a fault or a count that a wrapper puts into `read_into` is bypassed."""

    class Filling(ReadWrapper):
        def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
            memoryview(buffer)[:] = b"r" * len(buffer)

    inner = Mock(fast_reads=Mock(batches_reads=True))
    store = Filling(inner)
    room, buffer = bytearray(4), bytearray(2)
    ranges = store.fast_reads.read_ranges("x", [(0, 1), (5, 3)], memoryview(room))
    assert [bytes(each) for each in ranges] == [b"r", b"rrr"]
    assert [bytes(each) for each in store.fast_reads.read_parts([("x", 0, 2), ("y", 1, 1)])] == [
        b"rr",
        b"r",
    ]
    assert store.fast_reads.read("x", 5, 3) == b"rrr"
    store.fast_reads.read_uncached("x", 0, buffer)
    assert buffer == b"rr"
    assert not store.fast_reads.batches_reads
    assert inner.method_calls == []
