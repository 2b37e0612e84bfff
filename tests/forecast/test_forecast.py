"""The forecast against naive simulations that share no code with it, known theory, and sums."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from diesel_fs.errors import UsageError
from diesel_fs.forecast.kept import DISK, MEMORY, NAMES, PEER, STORE
from diesel_fs.forecast.nodes import ForecastJob, ForecastNode, ForecastStore, Shuffle
from diesel_fs.forecast.reads import ForecastFiles, cut_epoch, epoch_order
from diesel_fs.forecast.report import ForecastOptions, commands, described, recommended
from diesel_fs.forecast.simulate import Forecast, forecast
from diesel_fs.forecast.smallest import RUNS_MAX, smallest_disk, stalls
from diesel_fs.orders.shuffle import ChunkedFiles
from tests.examples import examples
from tests.orders.datasets import odd_dataset
from tests.rows import each_row

PAGE = 4096


def made_files(sizes: Sequence[int], per_chunk: int) -> ForecastFiles:
    """Files of these sizes, `per_chunk` in each chunk, one after the other from byte 4096 on."""
    size = np.array(sizes, np.int64)
    chunk = np.arange(len(size)) // per_chunk
    end = np.cumsum(size)
    begin = end - size
    offset = begin - begin[chunk * per_chunk] + PAGE
    chunk_bytes = (np.bincount(chunk, size) + PAGE).astype(np.uint64)
    ids = np.random.default_rng(3).integers(0, 256, (len(chunk_bytes), 16), np.uint8)
    chunked = ChunkedFiles(np.arange(len(size)), chunk, ids)
    return ForecastFiles(chunked, offset, size, (-(-size // PAGE)).astype(np.uint32), chunk_bytes)


@dataclass(frozen=True)
class Setting:
    """A small job of one node with a cache that keeps files and pushes of one file each."""

    sizes: list[int]
    order: list[int]
    ranks: int
    batch: int
    workers: int
    epochs: int
    window: int
    memory: int

    @property
    def parts(self) -> list[list[int]]:
        count = len(self.sizes)
        length = -(-count // self.ranks)
        return [
            [self.order[(rank * length + place) % count] for place in range(length)]
            for rank in range(self.ranks)
        ]


Load = tuple[int, int, int, bool]
"""Epoch, rank, place, and whether the file is kept."""


@st.composite
def small_settings(draw: st.DrawFn) -> Setting:
    sizes = draw(st.lists(st.integers(1, 20_000), min_size=1, max_size=12))
    order = draw(st.permutations(range(len(sizes))))
    limits = [(1, 3), (1, 4), (0, 2), (1, 3), (0, 60_000), (0, 80_000)]
    return Setting(sizes, order, *(draw(st.integers(*each)) for each in limits))


RATE, LATENCY_S, IMAGES_PER_S = 1e6, 0.005, 100.0


def naive(setting: Setting, policy: str) -> list[tuple[int, float, int]]:
    """Return for each epoch the kept files, its seconds, and the files that were on time.
    Everything is computed file by file."""
    parts = setting.parts
    length = len(parts[0])
    loads: list[Load] = []
    cache: list[int] = []  # the longest unread first
    for epoch in range(setting.epochs):
        for place in range(length):
            for rank in range(setting.ranks):
                file = parts[rank][place]
                loads.append((epoch, rank, place, file in cache))
                if file in cache:
                    if policy == "lru":
                        cache.remove(file)
                        cache.append(file)
                    continue
                size = setting.sizes[file]
                if policy == "lru" and size <= setting.memory:
                    while sum(setting.sizes[each] for each in cache) + size > setting.memory:
                        cache.pop(0)
                if sum(setting.sizes[each] for each in cache) + size <= setting.memory:
                    cache.append(file)

    def pages(load: Load) -> int:
        _, rank, place, is_kept = load
        return 0 if is_kept else -(-setting.sizes[parts[rank][place]] // PAGE) * PAGE

    arrived: dict[tuple[int, int, int], float] = {}
    now, free_at, begun = 0.0, 0.0, 0
    results = []
    for epoch in range(setting.epochs):
        began, on_time, kept = now, 0, 0
        for start in range(0, length, setting.batch):
            end = min(start + setting.batch, length)
            ahead = min(start + 2 * setting.workers * setting.batch, length)
            read = sum(pages(load) for load in loads if load[:1] < (epoch,))
            read += sum(pages(load) for load in loads if load[0] == epoch and load[2] < ahead)
            room = setting.window + read
            if any(load[3] for load in loads):  # kept files that no read finds again lend memory
                room += setting.memory - of_use(loads, setting, epoch, start)
            while begun < len(loads):
                epoch_of, _, place, is_kept = loads[begun]
                has_room = sum(pages(load) for load in loads[: begun + 1]) <= room
                is_needed = epoch_of < epoch or (epoch_of == epoch and place < end)
                if not has_room and not is_needed:
                    break
                file = parts[loads[begun][1]][place]
                seconds = 0.0 if is_kept else max(
                    setting.sizes[file] / RATE, (LATENCY_S + setting.sizes[file] / 1e8) / 64
                )  # fmt: skip
                if free_at < now or now == 0 == begun:
                    free_at = now + (0.0 if is_kept else LATENCY_S)
                free_at += seconds
                arrived[loads[begun][:3]] = 0.0 if is_kept else free_at
                begun += 1
            waits = []
            for rank in range(setting.ranks):
                times = [arrived[epoch, rank, place] for place in range(start, end)]
                on_time += sum(time <= now for time in times)
                waits.append(max(max(times) - now, 0.0))
            now += max(waits) + (end - start) / IMAGES_PER_S
        kept = sum(load[3] for load in loads if load[0] == epoch)
        results.append((kept, now - began, on_time))
    return results


def of_use(loads: list[Load], setting: Setting, epoch: int, start: int) -> int:
    """The bytes that are kept in an iteration, from a read before or in it to a later read."""

    def iteration(load: Load) -> tuple[int, int]:
        return load[0], load[2] // setting.batch

    parts, now, total = setting.parts, (epoch, start // setting.batch), 0
    before: dict[int, tuple[int, int]] = {}
    for load in loads:
        file = parts[load[1]][load[2]]
        if load[3] and before[file] <= now < iteration(load):
            total += setting.sizes[file]
        before[file] = iteration(load)
    return total


@examples(150)
@given(setting=small_settings(), policy=st.sampled_from(["lru", "none"]))
def test_it_equals_a_naive_simulation(setting: Setting, policy: str) -> None:
    files = made_files(setting.sizes, len(setting.sizes))
    node = ForecastNode(setting.window, setting.memory, push_bytes_per_s=1e15)
    job = ForecastJob(
        node, ForecastStore(LATENCY_S, RATE), ranks=setting.ranks, batch=setting.batch,
        workers=setting.workers, images_per_s=IMAGES_PER_S, epochs=setting.epochs,
    )  # fmt: skip
    order = np.array(setting.order)
    reads = [
        cut_epoch(job, files, epoch_order(job, files, epoch, order), push_files=1)
        for epoch in range(job.epochs)
    ]
    found = forecast(job, files, policy, reads=reads, layout="files")
    total = reads[0].push_of.size
    for epoch, (kept, seconds, on_time) in zip(found.epochs, naive(setting, policy), strict=True):
        assert epoch.files == (kept, 0, 0, total - kept)
        assert epoch.seconds == pytest.approx(seconds)
        assert round(epoch.on_time * total) == on_time


@examples(100)
@given(
    sizes=st.lists(st.integers(0, 9000), min_size=1, max_size=40), per_chunk=st.integers(1, 6),
    memory=st.integers(0, 60_000), disk=st.integers(0, 60_000), seed=st.integers(0, 99),
)  # fmt: skip
def test_chunks_that_come_first_are_fetched_whole_and_the_others_read_past_the_cache(
    sizes: list[int], per_chunk: int, memory: int, disk: int, seed: int
) -> None:
    """With the policy none and all files in one push, which is small enough for one."""
    files = made_files(sizes, per_chunk)
    job = ForecastJob(ForecastNode(1 << 40, memory, disk), batch=7, epochs=2, seed=seed)
    first, second = forecast(job, files, "none").epochs
    assert second.written_bytes == 0
    chunks = [sizes[at : at + per_chunk] for at in range(0, len(sizes), per_chunk)]
    free, counts, kept = [memory, disk], [0, 0, 0, 0], 0
    for chunk in chunks:
        used = PAGE + sum(chunk)
        tier = next((tier for tier in (MEMORY, DISK) if used <= free[tier]), STORE)
        if sum(chunk) and tier != STORE:
            free[tier] -= used
            kept += 1
        counts[tier] += sum(map(bool, chunk))
    order = cut_epoch(job, files, epoch_order(job, files, 0))
    if kept and len(order.rank) == 1:  # otherwise chunks come in the order of their
        assert second.files == tuple(counts)
        assert first.store_requests == sum(any(chunk) for chunk in chunks)


@each_row("nodes", [1, 3])
@each_row("shuffle", ["full", "chunk"])
@each_row("policy", NAMES)
def test_all_reads_come_from_somewhere(policy: str, shuffle: Shuffle, nodes: int) -> None:
    rng = np.random.default_rng(5)
    files = made_files(rng.integers(1, 50_000, 900).tolist(), 12)
    data = files.bytes
    node = ForecastNode(data // 10, data // 8, data // 4)
    job = ForecastJob(node, nodes=nodes, ranks=2, batch=8, shuffle=shuffle, group_size=4)
    found = forecast(job, files, policy)
    assert found == forecast(job, files, policy)
    for number, epoch in enumerate(found.epochs):
        order = epoch_order(job, files, number)
        assert sum(epoch.files) == order.size
        assert sum(epoch.bytes) == int(files.stored[order].sum())
        assert epoch.store_bytes >= epoch.bytes[STORE] * (nodes == 1)
        assert epoch.store_requests <= epoch.files[STORE] + len(files.chunk_bytes) * nodes
        assert 0 <= epoch.on_time <= 1
        assert len(epoch.stall_s) == job.world
        assert epoch.compute_s <= epoch.seconds
        assert max(epoch.stall_s) <= epoch.seconds - epoch.compute_s + 1e-9
        assert epoch.files[PEER] == 0 or nodes > 1
    assert sum(found.epochs[0].files[:3]) < sum(found.later.files[:3]) + len(files) // 3


def test_a_task_whose_caches_hold_all_reads_each_chunk_once() -> None:
    files = made_files([30_000] * 600, 10)
    share = int(files.chunk_bytes.sum())
    job = ForecastJob(ForecastNode(1 << 24, share), nodes=4, ranks=2, batch=10)
    first, *later = forecast(job, files, "lru").epochs
    assert (first.store_bytes, first.store_requests) == (share, 60)
    for epoch in later:
        assert (epoch.store_bytes, epoch.store_requests, epoch.files[STORE]) == (0, 0, 0)
        assert epoch.files[PEER] == pytest.approx(450, abs=60)  # three of four owners are others


def test_owners_fetch_at_the_same_time() -> None:
    """In a full shuffle the first pushes of the first rank need nearly all chunks; each node
    fetches its own, over its own link."""
    files = made_files([100_000] * 8_000, 20)
    node = ForecastNode(1 << 30, 1 << 30, push_bytes_per_s=1e12, network_bytes_per_s=1e12)
    store = ForecastStore(0.0, 1e8, connection_bytes_per_s=1e12)
    for nodes in (1, 4):
        job = ForecastJob(node, store, nodes=nodes, images_per_s=1e9, epochs=1)
        [epoch] = forecast(job, files, "plan").epochs
        assert epoch.seconds == pytest.approx(8.0 / nodes, rel=0.25)


def kept_in_random_order(policy: str, part: float) -> float:
    files = made_files([1000] * 4000, 4000)
    job = ForecastJob(ForecastNode(1 << 20, int(4_000_000 * part)), ranks=4, batch=10)
    return forecast(job, files, policy, layout="files").later.kept


def test_kept_files_in_random_order_match_the_theory() -> None:
    """None can keep more than cache over data. LRU keeps a file if fewer other files than the cache
    holds were read since; the places of a file in two epochs are uniform and independent."""
    for part in (0.2, 0.5):
        assert kept_in_random_order("none", part) == pytest.approx(part, abs=0.001)
        assert part - 0.02 < kept_in_random_order("plan", part) <= part + 0.001
        x = np.random.default_rng(1).random((2, 200_000))
        distinct = (1 - x[0]) + x[1] * x[0]
        lru = np.mean(distinct < part)
        assert kept_in_random_order("lru", part) == pytest.approx(lru, abs=0.03)


@each_row("shuffle", ["full", "chunk"])
@each_row("nodes", [1, 4])
def test_plan_reads_only_bytes_that_the_cache_cannot_keep(shuffle: Shuffle, nodes: int) -> None:
    """The caches of real nodes do so, too (`tests/peers/test_planned_nodes.py`): with memory for
    half of the dataset, about half of it comes from the store in each epoch."""
    files = made_files([100_000] * 8_000, 20)
    total = 8_000 * 100_000
    node = ForecastNode(total // 16, total // 2 // nodes)
    store = ForecastStore(0.005, 1e8)
    job = ForecastJob(
        node, store, nodes=nodes, ranks=2, epochs=3, shuffle=shuffle, group_size=10, batch=16
    )
    found = forecast(job, files, "plan")
    for epoch in found.epochs[1:]:
        assert epoch.store_bytes / total == pytest.approx(0.5, abs=0.04)


def test_an_order_log_holds_the_first_bytes_of_the_next_order() -> None:
    files = made_files([1000] * 500, 20)
    for part in (0.0, 0.3, 2.0):
        capacity = int(part * files.bytes)
        found = forecast(
            ForecastJob(ForecastNode(1 << 20, 0, capacity), ranks=2, batch=5), files, "order"
        )
        first, *later = found.epochs
        assert first.files == (0, 0, 0, 500)
        for epoch in later:
            held = min(capacity, files.bytes)
            assert epoch.bytes == (0, held, 0, files.bytes - held)
            assert epoch.written_bytes == held


def test_no_ranks_wait_if_all_is_fast_and_all_do_if_the_store_is_slow() -> None:
    files = made_files([10_000] * 400, 40)
    fast = ForecastJob(
        ForecastNode(1 << 24), ForecastStore(1e-6), ranks=4, batch=10, images_per_s=100
    )
    epoch = forecast(fast, files, "none").later
    assert epoch.seconds == pytest.approx(epoch.compute_s) == 1.0
    assert epoch.on_time == 1.0
    assert epoch.stalled == pytest.approx(0)
    slow = replace(fast, store=ForecastStore(0.0, 1e6))
    assert forecast(slow, files, "none").later.seconds == pytest.approx(4.0, rel=0.05)


@given(needed=st.integers(0, 40_000), data=st.integers(1, 100_000), nodes=st.integers(1, 5))
@examples(60)
def test_the_smallest_cache_is_found_in_few_runs(needed: int, data: int, nodes: int) -> None:
    files = made_files([1000], 1)
    job = ForecastJob(ForecastNode(1 << 20), nodes=nodes)
    template = forecast(replace(job, nodes=1), files, "none")
    runs = []

    def run(wanted: ForecastJob) -> Forecast:
        runs.append(wanted.node.disk_bytes)
        wait_s = 0.0 if wanted.node.disk_bytes >= needed else 1.0
        later = replace(template.later, compute_s=1.0, seconds=1.0 + wait_s)
        return replace(template, epochs=(later,))

    found = smallest_disk(job, data, run)
    assert len(runs) <= RUNS_MAX
    whole = -(-data // nodes) + -(-data // nodes) // 8
    sizes = [whole * step // 31 for step in range(32)]
    assert found == next((size for size in sizes if size >= needed), None)


def test_the_smallest_cache_of_a_job_equals_that_of_trying_all() -> None:
    files = made_files([20_000] * 300, 30)
    store = ForecastStore(0.0, 3e6)
    job = ForecastJob(ForecastNode(1 << 22), store, ranks=2, batch=10, images_per_s=100)

    def run(wanted: ForecastJob) -> Forecast:
        return forecast(wanted, files, "none")

    found = smallest_disk(job, files.bytes, run)
    whole = files.bytes + files.bytes // 8
    tried = [whole * step // 31 for step in range(32)]
    with_disk = {size: replace(job, node=replace(job.node, disk_bytes=size)) for size in tried}
    enough = [size for size in tried if not stalls(run(with_disk[size]))]
    assert found == enough[0] > 0
    hopeless = replace(job, node=replace(job.node, disk_read_bytes_per_s=1e3))
    assert smallest_disk(hopeless, files.bytes, run) is None


def test_the_cheapest_of_the_fastest_is_recommended() -> None:
    files = made_files([1000] * 10, 5)
    made = forecast(ForecastJob(ForecastNode(1 << 20)), files, "lru")

    def variant(seconds: float, requests: int, written: int) -> Forecast:
        epoch = replace(made.later, seconds=seconds, store_requests=requests, written_bytes=written)
        return replace(made, epochs=(epoch,))

    fast, cheap = variant(10.0, 9000, 0), variant(10.1, 1000, 5)
    slow, quiet = variant(11.0, 0, 0), variant(10.15, 1000, 1)
    assert recommended([slow, fast, cheap]) is cheap
    assert recommended([cheap, quiet, slow]) is quiet
    assert described(cheap)["seconds"] == 10.1


def test_the_commands_can_be_pasted() -> None:
    files = made_files([1000] * 10, 5)
    options = ForecastOptions("pets@7", "4G", "9G")
    for job, policy, mount, run in (
        (
            ForecastJob(ForecastNode(1 << 20, 0, 9 << 30)), "order",
            "--cache-layout order --cache-dir /var/cache/diesel --cache-size 9G", "--shuffle full",
        ),
        (
            ForecastJob(ForecastNode(1 << 20, 1 << 20), nodes=2, shuffle="chunk", group_size=30),
            "plan",
            '--evict plan --task "$JOB" --rank "$NODE" --world 2',
            "--shuffle chunk --group-size 30",
        ),
    ):  # fmt: skip
        assert commands(forecast(job, files, policy), options) == [
            f"dlcmd mount pets@7 /mnt/pets@7 --memory 4G {mount}",
            f"dlcmd run --ahead 1 {run} -- python train.py",
        ]


def test_odd_files_can_be_planned() -> None:
    files = ForecastFiles.of(odd_dataset())
    for policy in NAMES:
        epoch = forecast(ForecastJob(ForecastNode(1 << 20, 1 << 20), batch=2), files, policy).later
        assert sum(epoch.bytes) == files.bytes


@each_row(
    "bad",
    [
        {"nodes": 0}, {"ranks": -1}, {"nodes": 1 << 20, "ranks": 2}, {"batch": 0}, {"workers": -1},
        {"epochs": 0}, {"seed": -1}, {"group_size": 0}, {"images_per_s": 0.0},
        {"images_per_s": float("nan")}, {"images_per_s": float("inf")},
    ],
)  # fmt: skip
def test_bad_jobs_are_refused(bad: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        ForecastJob(ForecastNode(1 << 20), **bad)  # type: ignore[arg-type]
    for store in (ForecastStore(-1.0), ForecastStore(0.0, 0.0), ForecastStore(price_per_1000=-1.0)):
        with pytest.raises(UsageError):
            ForecastJob(ForecastNode(1), store)
    for node in (
        ForecastNode(-1), ForecastNode(1, -1), ForecastNode(1, disk_bytes=-1),
        ForecastNode(1, push_bytes_per_s=0.0), ForecastNode(1, network_request_s=-1.0),
    ):  # fmt: skip
        with pytest.raises(UsageError):
            ForecastJob(node)
    with pytest.raises(UsageError):
        forecast(ForecastJob(ForecastNode(1)), made_files([1], 1), "fifo")
