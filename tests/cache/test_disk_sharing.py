"""`DiskTier`: one folder and several processes, some of which are killed."""

import os
import signal
import time
from pathlib import Path

import numpy as np

from diesel_fs.cache import disk
from diesel_fs.cache.disk import DiskTier
from diesel_fs.cache.tiers import verify_chunk

from .disk_tier import Chunks, content_of, counted, files, idle, put, start_program, tier_at

WRITER = """if True:
    import os, sys, random
    from pathlib import Path
    from uuid import UUID
    from diesel_fs.cache.disk import DiskTier, prepare_cache_folder
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
    """At any time every chunk found is whole, the limit holds, and files of killed writers are
    removed."""
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
    """The tier as in a process that has not checked any chunk yet."""
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
