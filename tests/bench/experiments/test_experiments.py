"""The experiments' own arithmetic, and that they measure every row."""

import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.rows import each_row

from ..test_bench import SMALL, rows_of
from ..workbench import Workbench
from . import access, accuracy, lobster, lrfu, plan_costs, small_images


@pytest.mark.bench
def test_the_study_of_accuracy_compares_every_order_with_full_shuffle(tmp_path: Path) -> None:
    """With 200 images and 2 seeds: the figures mean nothing, but all are there."""
    rows = rows_of(tmp_path, "accuracy")
    shares = [row for row in rows if row["unit"] == accuracy.PERCENT]
    assert len(shares) == len(accuracy.LAYOUTS) * len(accuracy.GROUP_SIZES)
    assert all(0 <= row["ours"] <= 100 and row["against"] == accuracy.FULL for row in shares)
    # 200 images are few chunks: any group of at least as many is a full shuffle.
    largest = [row for row in shares if row["name"].endswith("G = 100")]
    assert all(row["ours"] == row["other"] for row in largest)
    assert len(rows) == len(shares) + 4


@pytest.mark.bench
@pytest.mark.fuse
def test_the_benchmarks_of_importance_measure_every_row(tmp_path: Path) -> None:
    """With tiny inputs: the figures mean nothing, but all are there."""
    rows = rows_of(tmp_path, "importance")
    names = [row["name"] for row in rows]
    assert sum(name.startswith("accuracy with 50%") for name in names) == 8
    assert sum(name.startswith("accuracy with 30%") for name in names) == 4
    for what, caches in {"CIFAR-10": 4, "ImageNet": 1}.items():
        some = [row for row in rows if row["name"].startswith(f"samples of {what} in memory")]
        assert len(some) == 5 * caches
        assert all(0 <= row["ours"] <= 1 for row in some if row["unit"] == "of 1")
    assert sum(name.startswith("epochs of") for name in names) == 3 * 3 + 2
    assert sum(name.startswith("importance of") for name in names) == 5
    assert sum(name.startswith("two jobs") for name in names) == 2 + 2
    assert len(rows) == 8 + 4 + 20 + 5 + 2 + 2 + 11 + 5


@each_row("made", [small_images.made_images, small_images.made_long_tail])
def test_images_are_the_same_each_time(made: Callable[[int, int], small_images.Pixels]) -> None:
    pixels = made(20, 1)
    assert pixels.shape == (20, small_images.SIDE, small_images.SIDE, small_images.CHANNELS)
    assert (pixels == made(20, 1)).all()
    assert (pixels != made(20, 2)).any()


def test_a_paired_difference_has_the_interval_of_students_t() -> None:
    """Differences 1, 2, 3: mean 2, deviation 1; t(0.975, 2) = 4.303."""
    difference = accuracy.Difference.of([11, 22, 33], [10, 20, 30])
    assert (difference.mean, difference.deviation) == (2, 1)
    assert difference.half_width == pytest.approx(4.303 / 3**0.5)
    assert difference.farthest == difference.highest == pytest.approx(2 + 4.303 / 3**0.5)


def test_images_survive_a_tar(tmp_path: Path) -> None:
    pixels = small_images.made_images(20, 1)
    with (tmp_path / "tar").open("wb") as file:
        small_images.write_tar(file, pixels, np.arange(20)[::-1].copy())
    with tarfile.open(tmp_path / "tar") as archive:
        members = archive.getmembers()
        contents = [archive.extractfile(member) for member in members]
        read = [small_images.decoded(each.read()) for each in contents if each is not None]
    assert members[0].name == small_images.path_of(19, 9)
    assert (np.stack(read) == pixels[::-1]).all()


@pytest.mark.bench
@pytest.mark.fuse
def test_the_access_to_a_store_has_every_row(tmp_path: Path) -> None:
    """With tiny inputs: the figures mean nothing, but all are there."""
    if os.geteuid():
        pytest.skip("only root can make native mounts")
    rows = rows_of(tmp_path, "access-time")
    assert [row["against"] for row in rows] == [access.OBJECTS] * 8
    rows = rows_of(tmp_path, "access-sessions")
    assert [row["against"] for row in rows] == ["limit", *access.OTHERS * 2] * 4
    assert all(row["ours"] > 0 and row["other"] for row in rows)


@pytest.mark.bench
@pytest.mark.fuse
def test_the_costs_of_a_plan_have_every_row(tmp_path: Path) -> None:
    """With tiny inputs: the figures mean nothing, but all are there."""
    if os.geteuid():
        pytest.skip("only root can make native mounts")
    rows = rows_of(tmp_path, "plan-bytes")
    assert len(rows) == 5 * len(plan_costs.SETTINGS)
    for unit in ("MB", "requests"):
        some = [row for row in rows if row["unit"] == unit]
        assert all(row["ours"] > 0 and row["other"] for row in some)
    rows = rows_of(tmp_path, "plan-overhead")
    assert [row["against"] for row in rows] == [plan_costs.PLAIN] * 2


def plainly_fetched(order: list[int], room: int) -> list[bool]:
    """The result of `fetches_of_min`, with a search for the next use of each file in memory."""
    here, fetched = set[int](), list[bool]()
    for place, file in enumerate(order):
        fetched.append(file not in here)
        here.add(file)
        later = order[place + 1 :]
        if len(here) > room:
            here.remove(max(here, key=lambda each: later.index(each) if each in later else np.inf))
    return fetched


@each_row("room", [1, 3, 10])
def test_belady_fetches_as_a_search_for_the_farthest_use_does(room: int) -> None:
    rng = np.random.default_rng(room)
    for _ in range(20):
        epochs = np.concatenate([rng.permutation(8) for _ in range(4)])
        for order in (epochs, rng.integers(0, 8, 40)):
            found = plan_costs.fetches_of_min(order, room)
            assert sum(found) == sum(plainly_fetched(order.tolist(), room))
    assert sum(plan_costs.fetches_of_min(epochs, 10)) == 8


def test_an_order_is_that_of_the_sums_of_its_files() -> None:
    order = np.random.default_rng(0).permutation(SMALL.files)
    sums = SMALL.file_sums()[order]
    assert (plan_costs.order_of(sums, SMALL) == order).all()
    with pytest.raises(AssertionError, match="not a file of the dataset"):
        plan_costs.order_of(sums + 1, SMALL)


def test_the_tables_of_lobster_are_simulated(tmp_path: Path) -> None:
    """In small: the model of NoPFS gets the paper's figure, and nothing keeps more than fits."""
    bench = Workbench(tmp_path, 1, 50)
    rows = {
        (row.name.rpartition("GPUs, ")[2], row.against): row for row in lobster.hit_ratios(bench)
    }
    nopfs = rows["NoPFS, on time", lobster.THE_PAPER].ratio
    assert nopfs is not None
    assert abs(nopfs - 1) < 0.05
    assert rows["plan, kept", "limit"].met
    assert rows["plan, on time", "NoPFS here"].ratio is not None
    imbalanced = lobster.imbalance(Workbench(tmp_path, 1, 100))
    assert all(row.ratio is None or row.ratio > 0 for row in imbalanced)
    speeds = lobster.speed(Workbench(tmp_path, 1, 2000))
    assert [row.unit for row in speeds] == ["s of a processor"] * 4


def plainly_prepared_s(workload: lrfu.Workload, blocks: lrfu.Blocks, policy: str) -> float:
    """The result of `Workload.prepared_s`, computed block by block, with the literal sum of
    DLCache."""
    here, total_s = set[int](), 0.0
    references: dict[int, list[float]] = {}
    for number, start in enumerate(workload.starts):
        now, wanted = number * lrfu.GAP_HOURS, start.blocks.tolist()
        total_s += sum(float(blocks.cost_s[each]) for each in wanted if each not in here)
        here.update(wanted)

        def key(each: int, now: float = now) -> tuple[float, ...]:
            byte_cost_s = float(blocks.cost_s[each] / blocks.bytes[each])
            if policy == "LRU":
                return (references[each][-1],)
            crf = round(sum(0.5 ** ((now - at) / 24) for at in references[each]), 9)
            costs = (byte_cost_s,) if policy == lrfu.COST_AWARE else ()
            return crf, *costs, references[each][-1]

        for victim in sorted(here - {*wanted}, key=lambda each: (*key(each), each)):
            if sum(float(blocks.bytes[each]) for each in here) <= workload.storage_bytes:
                break
            here.remove(victim)
        for each in wanted:
            references.setdefault(each, []).extend([now] * start.jobs)
    return total_s


@each_row("policy", [lrfu.OURS, lrfu.COST_AWARE, "LRU"])
def test_the_simulated_storage_of_lrfu_equals_a_sum_block_by_block(policy: str) -> None:
    rng = np.random.default_rng(7)
    sizes = rng.integers(1, 9, 12).astype(np.float64)
    blocks = lrfu.Blocks(sizes, rng.random(12), np.split(np.arange(12), 4))
    found = []
    for seed in range(40):
        drawn = rng.integers(0, 4, 10)
        starts = [lrfu.Start(blocks.of_dataset[each], int(rng.integers(1, 4))) for each in drawn]
        workload = lrfu.Workload(starts, float(rng.integers(24, 40)), [seed])
        found.append(workload.prepared_s(blocks, lrfu.POLICIES[policy]))
        assert found[-1] == pytest.approx(plainly_prepared_s(workload, blocks, policy))
    assert len({round(each, 6) for each in found}) > 20
