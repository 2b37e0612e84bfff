"""`DiskTier` in a folder that jobs and processes share: which chunks pins, cool-downs and
references (LRFU) leave, and the files that killed processes leave."""

import os
import random
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest

from diesel_fs.cache.disk import chunks as disk
from diesel_fs.cache.disk.chunks import DiskTier
from diesel_fs.cache.disk.folder import CHUNK_IDLE_S
from diesel_fs.cache.disk.marker import prepare_cache_folder
from diesel_fs.cache.disk.rule import COOL_DOWN_S, EvictionRule
from diesel_fs.cache.policies.lrfu import HOUR_S
from diesel_fs.cache.tiers import ChunkKey, verify_chunk
from diesel_fs.errors import NoSpaceError
from diesel_fs.format.entries import ChunkId

from ..small_disks import small_disk
from .disk_tier import (
    STORE,
    Chunks,
    content_of,
    counted,
    file_of,
    files,
    idle,
    put,
    start_program,
    tier_at,
)

CHUNK_BYTES = 1000
LRFU = EvictionRule(by_references=True)
DAYS_OF_TURNS = int(3 * CHUNK_IDLE_S)
DATASETS = [UUID(int=number) for number in range(1, 5)]


def key_of(dataset: UUID, chunk: int) -> ChunkKey:
    return ChunkKey(dataset, ChunkId(bytes([chunk] * 16)))


def fill(tier: DiskTier, dataset: UUID, count: int) -> None:
    for chunk in range(count):
        put(tier, key_of(dataset, chunk), bytes(CHUNK_BYTES))


def used_file(place: Path, dataset: UUID) -> Path:
    return place / STORE.hex / dataset.hex / ".used"


def cool(place: Path, dataset: UUID) -> None:
    long_ago = time.time() - 2 * COOL_DOWN_S
    os.utime(used_file(place, dataset), (long_ago, long_ago))


def chunks_of(place: Path, dataset: UUID) -> set[int]:
    return {int(path.name[:2], 16) for path in files(place) if path.parent.name == dataset.hex}


@dataclass(slots=True)
class Known:
    chunks: dict[int, int] = field(default_factory=dict)  # the turn of the last use of each
    hours: list[int] = field(default_factory=list)  # of references
    jobs: list[DiskTier] = field(default_factory=list)
    is_cool: bool = False

    def worth(self) -> Decimal:
        """The literal sum of the paper at the hour 24, with a half-life of a day. Hours are below
        24, so two sums are equal only if all references are."""
        return sum(
            (Decimal("0.5") ** (Decimal(24 - hour) / 24) for hour in sorted(self.hours)), Decimal(0)
        )


class SharedFolder:
    """Jobs come and go, and chunks come.

    A job is a tier of its own, as in its own process: locks belong to open files. Time is
    counted in hours of references and in turns of uses.
    """

    def __init__(self, place: Path, limit_chunks: int, rule: EvictionRule) -> None:
        self.place, self.rule = place, rule
        self.known = {dataset: Known() for dataset in DATASETS}
        self.limit_chunks = limit_chunks
        self.hour = self.turn = self.refused = 0
        now_s = time.time()
        self.first_hour_s = (now_s // HOUR_S - 100) * HOUR_S
        self.first_turn_s = now_s - 10_000
        self.tier = self.new_tier()

    def new_tier(self) -> DiskTier:
        limit_bytes = self.limit_chunks * CHUNK_BYTES
        return DiskTier(self.place, STORE, limit_bytes, rule=self.rule)

    def pass_time(self) -> None:
        self.hour = min(self.hour + 1, 23)

    def begin_job(self, dataset: UUID) -> None:
        known, job = self.known[dataset], self.new_tier()
        job.jobs.register(dataset, self.first_hour_s + self.hour * HOUR_S + 1)
        known.jobs.append(job)
        known.hours.append(self.hour)
        known.is_cool = False

    def end_job(self, dataset: UUID) -> None:
        if self.known[dataset].jobs:
            self.known[dataset].jobs.pop().close()

    def cool_down(self, dataset: UUID) -> None:
        if used_file(self.place, dataset).exists():
            cool(self.place, dataset)
            self.known[dataset].is_cool = True

    def age(self, dataset: UUID, chunk: int) -> None:
        """As if a chunk had not been read for days, though its dataset may be in use."""
        if chunk in self.known[dataset].chunks:
            self.turn += 1
            self.known[dataset].chunks[chunk] = self.turn - DAYS_OF_TURNS
            used_s = self.first_turn_s + self.turn - DAYS_OF_TURNS
            os.utime(file_of(self.place, key_of(dataset, chunk)), (used_s, used_s))

    def put_chunk(self, dataset: UUID, chunk: int) -> None:
        known, key = self.known[dataset], key_of(dataset, chunk)
        if chunk in known.chunks:
            assert self.tier.reserve(key, CHUNK_BYTES) is None
            return
        if not known.hours:  # see `test_a_dataset_without_references_counts_one`
            return
        if not self.expect_room(dataset):
            self.refused += 1
            with pytest.raises(NoSpaceError):
                self.tier.reserve(key, CHUNK_BYTES)
            return
        put(self.tier, key, bytes(CHUNK_BYTES))
        self.turn += 1
        known.chunks[chunk] = self.turn
        used_s = self.first_turn_s + self.turn
        os.utime(file_of(self.place, key), (used_s, used_s))

    def expect_room(self, dataset: UUID) -> bool:
        """Evict in the model what must go for a chunk of a dataset. Returns whether that is
        enough."""
        held = sum(len(each.chunks) for each in self.known.values())
        beyond = held + 1 - self.limit_chunks
        if beyond <= 0:
            return True
        eligible = [
            ((known.worth(),) if self.rule.by_references else (), turn, name, chunk)
            for name, known in self.known.items()
            for chunk, turn in known.chunks.items()
            if (known.is_cool and not known.jobs)
            or (turn < 0 and (name == dataset or not known.jobs))
        ]
        # A twentieth of the limit more than is needed is evicted: one more chunk
        for *_, name, chunk in sorted(eligible)[: beyond + 1]:
            del self.known[name].chunks[chunk]
        return len(eligible) >= beyond

    def check(self) -> None:
        for dataset, known in self.known.items():
            assert chunks_of(self.place, dataset) == {*known.chunks}
        total = sum(len(known.chunks) for known in self.known.values())
        assert counted(self.tier) == total * CHUNK_BYTES <= self.limit_chunks * CHUNK_BYTES


@pytest.mark.parametrize("seed", range(9))
def test_jobs_come_and_go_as_in_the_model(place: Path, seed: int) -> None:
    """A dataset has 6 chunks, so it may be larger than the folder."""
    draw = random.Random(seed)
    shared = SharedFolder(place, draw.randint(3, 10), LRFU if seed < 6 else EvictionRule())
    for dataset in DATASETS:
        shared.begin_job(dataset)
    for _ in range(250):
        dataset = draw.choice(DATASETS)
        match draw.choices(range(6), [24, 2, 4, 7, 1, 2])[0]:
            case 0:
                shared.put_chunk(dataset, draw.randrange(6))
            case 1:
                shared.begin_job(dataset)
            case 2:
                shared.end_job(dataset)
            case 3:
                shared.cool_down(dataset)
            case 4:
                shared.age(dataset, draw.randrange(6))
            case _:
                shared.pass_time()
        shared.check()
    assert shared.tier.folder.room_evictions > 10, "else this test shows nothing"
    assert shared.refused > 10


JOB = """if True:
    import sys, time
    from pathlib import Path
    from uuid import UUID
    from diesel_fs.cache.disk.chunks import DiskTier
    from diesel_fs.cache.disk.marker import prepare_cache_folder
    place, store, dataset = sys.argv[1:]
    tier = DiskTier(prepare_cache_folder(Path(place)), UUID(hex=store), None)
    tier.jobs.register(UUID(hex=dataset), time.time())
    print("ready", flush=True)
    sys.stdin.read()
"""


def start_job(place: Path, dataset: UUID) -> "subprocess.Popen[str]":
    return start_program(JOB, str(place), STORE.hex, dataset.hex)


def end_job(process: "subprocess.Popen[str]") -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)


def test_a_dataset_is_pinned_until_its_last_process_is_killed(place: Path) -> None:
    """Whatever the rule of the process that needs room, and though the dataset seems unused."""
    used, newcomer = DATASETS[:2]
    tier = DiskTier(place, STORE, 4 * CHUNK_BYTES)
    other = DiskTier(place, STORE, 4 * CHUNK_BYTES, rule=LRFU)
    fill(tier, used, 4)
    for job in [start_job(place, used) for _ in range(2)]:
        cool(place, used)
        for path in files(place):
            os.utime(path, (1.0, 1.0))  # longer than `CHUNK_IDLE_S` ago, too
        for each in (tier, other):
            with pytest.raises(NoSpaceError):
                each.reserve(key_of(newcomer, 0), CHUNK_BYTES)
            assert each.folder.make_room(newcomer, CHUNK_BYTES) == 0
        assert chunks_of(place, used) == {0, 1, 2, 3}
        end_job(job)
    put(tier, key_of(newcomer, 0), bytes(CHUNK_BYTES))
    assert len(chunks_of(place, used)) == 2
    assert (tier.folder.room_evictions, tier.folder.room_evicted_bytes) == (2, 2 * CHUNK_BYTES)


def test_each_process_applies_its_own_cool_down(place: Path) -> None:
    """The folder keeps none: what the others have named does not count."""
    used, newcomer = DATASETS[:2]
    limit_bytes = 3 * CHUNK_BYTES
    patient = DiskTier(place, STORE, limit_bytes, rule=EvictionRule(cool_down_s=7200))
    eager = DiskTier(place, STORE, limit_bytes, rule=EvictionRule(cool_down_s=0))
    usual = DiskTier(place, STORE, limit_bytes)
    fill(patient, used, 3)
    patient.jobs.register(used, time.time())
    assert eager.folder.make_room(newcomer, CHUNK_BYTES) == 0, "a job uses it"
    assert eager.folder.make_room(used, CHUNK_BYTES) == 0, "it is no use to itself"
    patient.jobs.close()
    assert usual.folder.make_room(newcomer, CHUNK_BYTES) == 0
    os.utime(used_file(place, used), (time.time() - 3600,) * 2)
    assert patient.folder.make_room(newcomer, CHUNK_BYTES) == 0
    assert usual.folder.make_room(newcomer, CHUNK_BYTES) == 2 * CHUNK_BYTES
    os.utime(used_file(place, used))
    assert eager.folder.make_room(newcomer, limit_bytes) == limit_bytes


def test_a_cool_down_of_days_holds_for_chunks_that_nobody_reads(place: Path) -> None:
    used, newcomer = DATASETS[:2]
    week = EvictionRule(cool_down_s=7 * CHUNK_IDLE_S)
    tier = DiskTier(place, STORE, 2 * CHUNK_BYTES, rule=week)
    fill(tier, used, 2)
    for path in (*files(place), used_file(place, used)):
        os.utime(path, (time.time() - 2 * CHUNK_IDLE_S,) * 2)
    assert tier.folder.make_room(newcomer, CHUNK_BYTES) == 0
    assert DiskTier(place, STORE, 2 * CHUNK_BYTES).folder.make_room(newcomer, CHUNK_BYTES) > 0


@pytest.mark.parametrize("counts_by", ["LFU", "LRU"])
def test_jobs_that_name_different_steps_count_and_evict_each_by_its_own(
    place: Path, counts_by: str
) -> None:
    often, lately, newcomer = DATASETS[:3]
    tiers = {
        name: DiskTier(
            place, STORE, 4 * CHUNK_BYTES,
            rule=EvictionRule(by_references=True, lrfu_p=p, lrfu_step=step),
        )
        for name, p, step in (("LFU", 4.0, 0.0), ("LRU", 2.0, 1.0))
    }  # fmt: skip
    now_s = time.time()
    for dataset, hours_ago in ((often, [90, 80, 70]), (lately, [2, 1])):
        fill(tiers["LFU"], dataset, 2)
        for each in hours_ago:
            tiers["LFU"].jobs.register(dataset, now_s - each * HOUR_S)
        tiers["LFU"].jobs.close()
    # The start of this job is the fourth of its dataset, or, by LRU, the only one that still counts
    tiers[counts_by].jobs.register(often, now_s - 60 * HOUR_S)
    tiers[counts_by].jobs.close()
    for dataset in (often, lately):
        cool(place, dataset)

    tiers["LFU"].folder.make_room(newcomer, CHUNK_BYTES // 2)
    left = {name for name in (often, lately) if chunks_of(place, name)}
    assert len(chunks_of(place, often)) == (2 if counts_by == "LFU" else 1)
    assert left == {often, lately}
    tiers["LRU"].folder.make_room(newcomer, 2 * CHUNK_BYTES)
    assert not chunks_of(place, often)
    assert chunks_of(place, lately)


def test_a_lower_limit_leaves_the_chunks_that_jobs_use(place: Path) -> None:
    used, unused = DATASETS[:2]
    tier = DiskTier(place, STORE, 6 * CHUNK_BYTES, rule=LRFU)
    fill(tier, used, 3)
    fill(tier, unused, 3)
    for _ in range(3):
        tier.jobs.register(unused, time.time())
    tier.close()
    tier.jobs.register(used, time.time() - 1000 * HOUR_S)
    DiskTier(place, STORE, 4 * CHUNK_BYTES).close()
    assert (chunks_of(place, used), len(chunks_of(place, unused))) == ({0, 1, 2}, 1)
    lower = DiskTier(place, STORE, 1 * CHUNK_BYTES)
    assert (chunks_of(place, used), chunks_of(place, unused)) == ({0, 1, 2}, set())
    with pytest.raises(NoSpaceError):
        lower.reserve(key_of(unused, 0), CHUNK_BYTES)
    assert lower.folder.free_bytes() == 0
    tier.close()
    DiskTier(place, STORE, 1 * CHUNK_BYTES).close()
    assert len(chunks_of(place, used)) == 1


@pytest.mark.parametrize(
    "content", [b"", b"DIESLRF1", bytes(range(100, 128)), bytes(28), bytes(36), bytes(5000)]
)
def test_a_dataset_without_references_counts_one(place: Path, content: bytes) -> None:
    """An older version, or a crash, leaves none: the last use counts then."""
    plain, twice, once, newcomer = DATASETS
    tier = DiskTier(place, STORE, 3 * CHUNK_BYTES, rule=LRFU)
    now_s = time.time()
    for dataset, references in ((plain, 0), (twice, 2), (once, 1)):
        put(tier, key_of(dataset, 0), bytes(CHUNK_BYTES))
        for _ in range(references):
            tier.jobs.register(dataset, now_s - 48 * HOUR_S)
    tier.close()
    used_file(place, plain).write_bytes(content)
    for dataset in (plain, twice, once):
        cool(place, dataset)
    order = []
    for turn in range(2):  # a twentieth more than is needed is evicted: two at once
        tier.folder.make_room(newcomer, (1 + 2 * turn) * CHUNK_BYTES // 2)
        order.append({each for each in (plain, twice, once) if not chunks_of(place, each)})
    assert order == [{once}, {once, twice}]
    tier.jobs.register(plain, now_s)
    assert len(used_file(place, plain).read_bytes()) == 28


def test_jobs_in_a_folder_that_cannot_be_written_are_no_error(place: Path) -> None:
    tier = DiskTier(place, STORE, 3 * CHUNK_BYTES)
    shutil.rmtree(place)
    tier.jobs.register(DATASETS[0], time.time())
    tier.close()


def test_a_full_disk_takes_a_pin_all_the_same(tmp_path: Path) -> None:
    used, newcomer = DATASETS[:2]
    with small_disk(tmp_path / "disk", "size=256k,mode=700") as point:
        place = prepare_cache_folder(point)
        tier = DiskTier(place, STORE, 4 * CHUNK_BYTES)
        fill(tier, used, 4)
        cool(place, used)
        with suppress(OSError), (point / "lost+found").open("wb", 0) as file:
            file.write(bytes(1 << 20))
        tier.jobs.register(used, time.time())
        assert used_file(place, used).stat().st_size == 0, "there was no room for the reference"
        (point / "lost+found").unlink()
        cool(place, used)
        with pytest.raises(NoSpaceError):
            DiskTier(place, STORE, 4 * CHUNK_BYTES).reserve(key_of(newcomer, 0), CHUNK_BYTES)


# Processes that are killed


WRITER = """if True:
    import os, sys, random
    from pathlib import Path
    from uuid import UUID
    from diesel_fs.cache.disk.chunks import DiskTier
    from diesel_fs.cache.disk.marker import prepare_cache_folder
    from diesel_fs.cache.tiers import ChunkKey
    from diesel_fs.errors import NoSpaceError
    place, source, limit, seed = sys.argv[1:]
    draw = random.Random(int(seed))
    tier = DiskTier(prepare_cache_folder(Path(place)), UUID(int=7), int(limit))
    chunks = {}
    for path in Path(source).iterdir():
        identity, chunk = path.name.split(",")
        chunks[ChunkKey(UUID(hex=identity), bytes.fromhex(chunk))] = path.read_bytes()
    print("ready", flush=True)
    while True:
        key = draw.choice(list(chunks))
        held = tier.find(key)
        if held is not None:
            with held:
                room = bytearray(held.bytes)
                held.read_into(0, memoryview(room))
                assert room == chunks[key]
            if draw.random() < 0.3:
                tier.drop(key)
            continue
        try:
            place = tier.reserve(key, len(chunks[key]))
        except NoSpaceError:
            continue
        if place is not None:
            place.commit(memoryview(chunks[key])) if draw.random() < 0.9 else place.cancel()
"""


def test_J6_a_folder_of_processes_that_are_killed(
    place: Path, chunks: Chunks, tmp_path: Path
) -> None:
    source = tmp_path / "chunks"
    source.mkdir()
    for key, content in chunks.items():
        (source / f"{key.identity.hex},{key.id.hex()}").write_bytes(content)
    limit = 6 * max(map(len, chunks.values()))
    draw = np.random.default_rng(5)

    tier = tier_at(place, limit)
    seen = 0
    for number in range(8):
        pair = [
            start_program(WRITER, str(place), str(source), str(limit), str(2 * number + seed))
            for seed in range(2)
        ]
        until = time.monotonic() + draw.uniform(0.05, 0.4)
        while time.monotonic() < until:
            idle(place)  # else nothing goes
            assert counted(tier) <= limit
            for key in chunks:
                found = content_of(unchecked(tier), key)
                assert found in (None, chunks[key])
                seen += found is not None
        ended = [process.poll() for process in pair]
        for process in pair:
            process.send_signal(signal.SIGKILL)
            assert ended == [None, None], process.communicate(timeout=20)[1]
            process.communicate(timeout=20)
    assert seen > 20, "else this test shows nothing"
    after = tier_at(place, limit)
    assert not [path for path in files(place) if path.name[0] == "."], "files of killed writers"
    assert counted(after) == sum(path.stat().st_size for path in files(place)) <= limit
    for path in files(place):
        key = next(key for key in chunks if path.name == key.id.hex())
        verify_chunk(key, memoryview(path.read_bytes()))


def unchecked(tier: DiskTier) -> DiskTier:
    tier._checked_s.clear()
    return tier


def test_other_processes_see_that_a_reader_waits_for_the_store(place: Path) -> None:
    one, other = tier_at(place), tier_at(place)
    assert not other.others_read()
    one.note_reading(begins=True)
    one.note_reading(begins=True)
    assert other.others_read()
    one.note_reading(begins=False)
    assert other.others_read()
    one.note_reading(begins=False)
    assert not other.others_read()
    one.note_reading(begins=True)
    one.close()
    assert not other.others_read()
    one.note_reading(begins=False)
    other.close()


def test_J6_the_reservation_of_a_dead_writer_is_counted_once(place: Path, chunks: Chunks) -> None:
    key, content = next(iter(chunks.items()))
    dead = tier_at(place)
    reserved = dead.reserve(key, len(content))
    assert isinstance(reserved, disk._FileReservation)
    os.close(reserved._file)  # as a kill does
    tier = tier_at(place)
    for _ in range(3):
        again = tier.reserve(key, len(content))
        assert isinstance(again, disk._FileReservation)
        os.close(again._file)
    assert counted(tier) == len(content)
    put(tier, key, content)
    assert counted(tier) == len(content)
