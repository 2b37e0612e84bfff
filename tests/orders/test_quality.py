"""Laws of the measures of orders, against slow arithmetic and known layouts."""

from collections import Counter
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.errors import UsageError
from diesel_fs.format.entries import Kind
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.orders.quality import (
    BATCH_FILES,
    OrderQuality,
    QualityReport,
    class_of_files,
    compare_group_sizes,
    design_effect,
)
from diesel_fs.orders.shuffle import chunk_order, full_shuffle
from tests.format.snapshot.oracle import OwnEntry, build
from tests.rows import each_row

from .datasets import dataset, odd_dataset, stored_part


def slow_design_effect(classes: list[int], order: list[int], batch_files: int) -> float | None:
    """The definition, in exact fractions, with dictionaries."""
    total = len(classes)
    part = {each: Fraction(count, total) for each, count in Counter(classes).items()}
    spread = 1 - sum(share**2 for share in part.values())
    if batch_files >= total or not spread:
        return None
    deviations = []
    for start in range(0, len(order) - batch_files + 1, batch_files):
        drawn = Counter(classes[place] for place in order[start : start + batch_files])
        shares = {each: Fraction(drawn[each], batch_files) for each in part}
        deviations.append(sum((shares[each] - part[each]) ** 2 for each in part))
    expected = spread / batch_files * Fraction(total - batch_files, total - 1)
    return float(sum(deviations) / len(deviations) / expected)


def sorted_dataset(chunks: int, per_chunk: int, chunks_per_class: int) -> Snapshot:
    """Files `train/cC/N` and, in the last chunk, `val/v`: the files of a class are neighbours in
    chunks."""
    state = {
        b"train/c%02d/deep/%05d" % (chunk // chunks_per_class, chunk * per_chunk + place): OwnEntry(
            Kind.FILE, parts=(stored_part(chunk + 1, place),)
        )
        for chunk in range(chunks)
        for place in range(per_chunk)
    }
    state[b"val/v"] = OwnEntry(Kind.FILE, parts=(stored_part(chunks, per_chunk),))
    return Snapshot(build(None, state, list(range(1, chunks + 1))))


SORTED = sorted_dataset(40, 100, 5)
MIXED = dataset(40, 100, folders=8)


@given(data=st.data())
def test_the_design_effect_equals_its_definition(data: st.DataObject) -> None:
    classes = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=60))
    order = data.draw(st.lists(st.integers(0, len(classes) - 1), min_size=1, max_size=80))
    batch_files = data.draw(st.integers(1, len(order)))
    found = design_effect(np.array(classes), np.array(order), batch_files)
    expected = slow_design_effect(classes, order, batch_files)
    assert found == (expected if expected is None else pytest.approx(expected, abs=1e-9))


def test_a_class_is_the_folder_below_the_measured_one() -> None:
    for below in (b"", b"train"):
        files = SORTED.walk(SORTED.index_of(below))
        files = files[SORTED.stat_many(files).kind == Kind.FILE]
        classes = class_of_files(SORTED, files, SORTED.index_of(below))
        top = [b"/".join(path.split(b"/")[: 2 if below else 1]) for path in SORTED.paths(files)]
        assert SORTED.paths(classes) == top
    odd = odd_dataset()
    found = dict(
        zip(odd.paths(odd.files()), odd.paths(class_of_files(odd, odd.files())), strict=True)
    )
    assert found[b"b/deep/er/file"] == b"b"
    assert found[b"top"] == b""


@pytest.mark.parametrize(("snapshot", "below"), [(SORTED, b"train"), (MIXED, b"")])
def test_a_report_equals_slow_arithmetic(snapshot: Snapshot, below: bytes) -> None:
    top = snapshot.index_of(below)
    report = compare_group_sizes(snapshot, 1, 2, 7, below=top)
    assert (report.files, report.chunks, report.classes) == (4000, 40, 8)
    assert (report.batch_files, list(report.by_group_size)) == (BATCH_FILES, [1, 3, 7, 10, 30])
    chunk = snapshot.chunk_of(np.arange(len(snapshot))).tolist()
    names = [path.removeprefix(below).lstrip(b"/").split(b"/")[0]
             for path in snapshot.paths(np.arange(len(snapshot)))]  # fmt: skip
    for size in report.by_group_size:
        quality = report.by_group_size[size]
        order = chunk_order(snapshot, 1, 2, group_size=size, below=top)
        entries = order.indices.tolist()
        everything = sorted(entries)
        classes = [sorted(set(names)).index(names[entry]) for entry in everything]
        places = [everything.index(entry) for entry in entries]
        expected = slow_design_effect(classes, places, BATCH_FILES)
        assert quality.design_effect == pytest.approx(expected)
        batches = [
            entries[at : at + BATCH_FILES] for at in range(0, 4000 - BATCH_FILES, BATCH_FILES)
        ]
        in_batch = [len({chunk[entry] for entry in batch}) for batch in batches]
        assert quality.chunks_in_batch == pytest.approx(sum(in_batch) / len(in_batch))
        bounds = [0, *order.ends.tolist()]
        groups = [{chunk[entry] for entry in entries[a:b]} for a, b in pairwise(bounds)]
        sums = [sum(int(snapshot.chunk_sizes[each]) for each in group) for group in groups]
        pairs = [one + other for one, other in zip(sums, [*sums[1:], 0], strict=True)]
        assert quality.memory_bytes == max(pairs)
    assert report.full.memory_bytes == int(snapshot.chunk_sizes.sum())


def test_orders_are_judged_by_how_they_mix() -> None:
    report = compare_group_sizes(SORTED, 1, 2, 20, below=SORTED.index_of(b"train"))
    orders = report.packed, *(report.by_group_size[size] for size in (1, 3, 10, 30))
    effects = [each.design_effect or 0 for each in orders]
    assert effects[0] > 100
    assert effects[1] > 20
    assert effects == sorted(effects, reverse=True)
    assert 0.5 < (report.full.design_effect or 0) < 1.5
    assert report.recommended is None
    assert compare_group_sizes(MIXED, 1, 2, 20).recommended == 1
    assert compare_group_sizes(SORTED, 1, 2, 20).classes == 2  # `train` and `val`


@each_row(
    ("effects", "full", "recommended"),
    [([30.0, 5.0, 3.9, 1.2], 1.0, 10), ([30.0, 9.0, 6.0, 5.0], 1.0, None),
     ([30.0, 9.0, 6.0, 5.0], 5.5, 30), ([None] * 4, None, None)],
)  # fmt: skip
def test_the_smallest_group_that_mixes_well_is_recommended(
    effects: list[float | None], full: float | None, recommended: int | None
) -> None:
    """Or one that mixes as well as a full shuffle, if that happens to be worse."""
    sizes = zip((1, 3, 10, 30), effects, strict=True)
    by_size = {size: OrderQuality(1, 1.0, effect) for size, effect in sizes}
    ends = OrderQuality(1, 1.0, 50.0), OrderQuality(1, 1.0, full)
    report = QualityReport(1000, 40, 8, 125, ends[0], by_size, ends[1])
    assert report.recommended == recommended


def test_the_parts_of_ranks_are_measured_separately() -> None:
    report = compare_group_sizes(MIXED, 1, 2, 4, rank=1, world=4)
    order = chunk_order(MIXED, 1, 2, group_size=4, rank=1, world=4)
    assert report.files == len(order.indices) == 1000
    assert report.batch_files == 125
    chunk = MIXED.chunk_of(order.indices).reshape(-1, 125)
    expected = np.mean([len(set(batch.tolist())) for batch in chunk])
    assert report.by_group_size[4].chunks_in_batch == pytest.approx(expected)


def test_small_and_empty_datasets_are_measured() -> None:
    few = compare_group_sizes(dataset(3, 2), 1, 2, 100)
    assert (few.files, few.batch_files, list(few.by_group_size)) == (6, 1, [1, 100])
    assert few.by_group_size[100] == few.full
    empty = compare_group_sizes(Snapshot(build(None, {}, [])), 1, 2, 100)
    assert (empty.files, empty.chunks, empty.full.design_effect) == (0, 0, None)
    assert empty.recommended is None
    odd = compare_group_sizes(odd_dataset(), 1, 2, 1)
    assert odd.files == len(full_shuffle(odd_dataset(), 1, 2)) == 6


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(UsageError, match="group size"):
        compare_group_sizes(MIXED, 1, 2, 0)
    with pytest.raises(UsageError, match="rank"):
        compare_group_sizes(MIXED, 1, 2, 1, rank=2, world=2)
