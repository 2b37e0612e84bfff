"""Laws of every order: its files, how it is divided into parts, how chunks are grouped."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.errors import UsageError
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.orders.shuffle import chunk_order, chunk_shuffle, full_shuffle
from tests.rows import each_row

from .datasets import dataset, odd_dataset

SMALL = dataset(13, 5)
ODD = odd_dataset()
WIDE = dataset(40, 25)
NUMBERS = st.integers(0, 2**63 - 1)


def names(snapshot: Snapshot, order: "np.typing.NDArray[np.int64]") -> list[str]:
    return [path.decode() for path in snapshot.paths(order)]


def as_torch_cuts(files: int, rank: int, world: int, *, drop_last: bool) -> list[int]:
    """The places that a `DistributedSampler` gives each rank, by its arithmetic, except that a rank
    takes a contiguous piece instead of every `world`-th file."""
    places = list(range(files))
    if drop_last and files % world != 0:
        per_rank = -((world - files) // world)  # math.ceil((files - world) / world)
    else:
        per_rank = -(-files // world)
    total = per_rank * world
    if drop_last:
        places = places[:total]
    else:
        missing = total - len(places)
        if missing <= len(places):
            places += places[:missing]
        else:
            places += (places * -(-missing // len(places)))[:missing]
    assert len(places) == total
    return places[rank * per_rank : (rank + 1) * per_rank]


@given(
    seed=NUMBERS,
    epoch=NUMBERS,
    group_size=st.integers(1, 20),
    world=st.integers(1, 70) | st.integers(71, 300),
    drop_last=st.booleans(),
    snapshot=st.sampled_from([SMALL, ODD]),
)
def test_parts_are_those_of_the_distributed_sampler(
    seed: int, epoch: int, group_size: int, world: int, drop_last: bool, snapshot: Snapshot
) -> None:
    whole = chunk_shuffle(snapshot, seed, epoch, group_size=group_size)
    assert sorted(whole.tolist()) == snapshot.files().tolist()
    parts = []
    for rank in range(world):
        cutting = {"group_size": group_size, "rank": rank, "world": world}
        part = chunk_shuffle(snapshot, seed, epoch, drop_last=drop_last, **cutting)
        assert part.dtype == np.int64
        cut = as_torch_cuts(len(whole), rank, world, drop_last=drop_last)
        assert part.tolist() == whole[cut].tolist()
        parts += part.tolist()
    times = Counter(parts)
    if drop_last:
        assert len(times) == len(parts) == len(whole) // world * world
    else:
        assert set(times) == set(whole.tolist())
        assert len(parts) - len(whole) < world
        assert max(times.values()) - min(times.values()) <= 1


@given(seed=NUMBERS, epoch=NUMBERS, group_size=st.integers(1, 15), position=st.integers(0, 65))
def test_groups_are_whole_chunks(seed: int, epoch: int, group_size: int, position: int) -> None:
    order = chunk_order(SMALL, seed, epoch, group_size=group_size)
    seen: set[int] = set()
    start = 0
    for number, end in enumerate(order.ends.tolist()):
        chunks = set(SMALL.chunk_of(order.indices[start:end]).tolist())
        assert len(chunks) == min(group_size, 13 - number * group_size)
        assert end - start == 5 * len(chunks)
        assert not chunks & seen
        seen |= chunks
        start = end
    assert start == len(order.indices)
    rest = chunk_order(SMALL, seed, epoch, group_size=group_size, position=position)
    assert rest.indices.tolist() == order.indices[position:].tolist()
    ends = [end - position for end in order.ends.tolist() if end > position]
    assert rest.ends.tolist() == ends


@given(seed=NUMBERS, group_size=st.integers(1, 15), world=st.integers(1, 30), data=st.data())
def test_parts_begin_anywhere(seed: int, group_size: int, world: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, world - 1))
    numbers = {"group_size": group_size, "rank": rank, "world": world}
    part = chunk_order(SMALL, seed, 1, **numbers)  # type: ignore[arg-type]  # by name
    position = data.draw(st.integers(0, len(part.indices)))
    rest = chunk_order(SMALL, seed, 1, position=position, **numbers)  # type: ignore[arg-type]  # by name
    assert rest.indices.tolist() == part.indices[position:].tolist()
    for order in (part, rest):
        assert order.ends.tolist() == sorted(set(order.ends.tolist()))
        assert order.ends.tolist()[-1:] == ([len(order.indices)] if len(order.indices) else [])
        assert len(set(order.indices.tolist())) == len(order.indices)  # none twice in a part


def test_every_kind_of_file_occurs_once() -> None:
    expected = ["a/empty", "a/large", "a/small", "b/also empty", "b/deep/er/file", "top"]
    for epoch in range(30):
        order = chunk_order(ODD, 5, epoch, group_size=1)
        assert sorted(names(ODD, order.indices)) == expected
        groups = [set(names(ODD, each)) for each in np.split(order.indices, order.ends)[:-1]]
        assert {"a/empty", "b/also empty"} in groups  # in the chunk of their entries
        assert {"a/large"} in groups  # in the chunk of its first extent alone
        assert {"a/small"} in groups
        assert len(groups) == 4  # two chunks hold no first extent


def test_an_order_of_a_folder_has_only_files_below_it() -> None:
    for path, expected in {
        b"a": ["a/empty", "a/large", "a/small"],
        b"b": ["b/also empty", "b/deep/er/file"],
        b"b/deep": ["b/deep/er/file"],
        b"b/nothing here": [],
        b"a/link": [],
    }.items():
        order = chunk_order(ODD, 1, 2, below=ODD.lookup(path))
        assert sorted(names(ODD, order.indices)) == expected
        assert len(order.ends) == (1 if expected else 0)
    one = chunk_order(WIDE, 1, 2, group_size=10, below=WIDE.lookup(b"d3"))
    assert len(one.ends) == 4  # chunks without files of the folder would not count


def test_an_empty_dataset_has_empty_orders() -> None:
    empty = dataset(0, 0)
    for rank in range(3):
        assert chunk_shuffle(empty, 1, 2, rank=rank, world=3).tolist() == []
    assert full_shuffle(empty, 1, 2).tolist() == []


def test_full_shuffle_is_one_group() -> None:
    order = full_shuffle(WIDE, 1, 2**63 - 1).tolist()
    numpys = np.int64(1), np.int64(2**63 - 1)  # also accepted
    assert order == full_shuffle(WIDE, *numpys).tolist()  # type: ignore[arg-type]
    for group_size, is_same in ((10**6, True), (40, True), (39, False)):
        grouped = chunk_shuffle(WIDE, 1, 2**63 - 1, group_size=group_size)
        assert (grouped.tolist() == order) == is_same


BAD: dict[str, tuple[object, ...]] = {
    "seed": (-1, 2**63, 1.0, True, "1"),
    "epoch": (-1, 2**63, None),
    "group_size": (0, 2**63),
    "world": (0,),
    "rank": (-1, 2),
    "position": (-1, 34),  # each of two ranks has 33 files
    "below": (-1, 10**6),
}


@each_row(("name", "bad"), [(name, bad) for name, values in BAD.items() for bad in values])
def test_numbers_out_of_range_are_refused(name: str, bad: object) -> None:
    unchecked: Callable[..., object] = chunk_shuffle  # type: ignore[explicit-any]  # bad calls
    with pytest.raises(UsageError, match=r"^bad "):
        unchecked(SMALL, **{"seed": 1, "epoch": 2, "world": 2, name: bad})
