"""Measures the disk of a cache's folder at its first use, and keeps the result in the folder.

The result decides whether order logs pay (`../ORDER_LOG.md`, which also has the format of the
file). Any process may ask at any time: one of them measures, under a lock on the file, and the
others wait for it. A result that is damaged or of another format is measured again.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from xxhash import xxh3_64_digest

from ...format.entries import Bytes
from .locks import FILE_FLAGS

SPEED_FILE = ".disk-speed"

_MAGIC, _FORMAT = b"DSLSPEED", 1
_RECORD = struct.Struct("<8sIIQQQ")
_CHECKSUM_BYTES = 8

_TRIAL_FILE = ".disk-trial"
_TRIAL_BYTES, _PIECE_BYTES = 128 << 20, 4 << 20
_FREE_FACTOR = 4  # with less than this many trial files free, nothing is measured
_STEP_S = 0.3  # for each of writing, reading in sequence, and reading at random
_READERS = 8  # at random, at once
_PLACES, _ENDLESS = 1 << 14, 1 << 62


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """How fast a disk writes and reads large pieces, and how many small reads it makes."""

    written_bytes_per_s: int
    read_bytes_per_s: int
    random_reads_per_s: int

    @property
    def log_file_bytes_max(self) -> int:
        """The size from which on files come as fast by a read each as from an order log, which is
        written once and read once."""
        log_bytes_per_s = 1 / (1 / self.written_bytes_per_s + 1 / self.read_bytes_per_s)
        return int(log_bytes_per_s / self.random_reads_per_s)

    def packed(self) -> bytes:
        figures = self.written_bytes_per_s, self.read_bytes_per_s, self.random_reads_per_s
        content = _RECORD.pack(_MAGIC, _FORMAT, 0, *figures)
        return content + xxh3_64_digest(content)[::-1]  # little-endian

    @classmethod
    def parse(cls, content: Bytes) -> "DiskSpeed | None":
        """The result in a file; None if it is damaged, or of another format."""
        if len(content) != _RECORD.size + _CHECKSUM_BYTES:
            return None
        magic, version, _, *figures = _RECORD.unpack_from(content)
        is_sound = xxh3_64_digest(content[: _RECORD.size])[::-1] == content[_RECORD.size :]
        if (magic, version) != (_MAGIC, _FORMAT) or not is_sound or not all(figures):
            return None
        return cls(*figures)


def disk_speed(folder: str, measure: Callable[[str], DiskSpeed] | None = None) -> DiskSpeed | None:
    """The speed of the disk of a cache's folder: from its file, or by `measure` (None:
    `measure_disk`), which takes about a second. None if that fails, as on a full disk."""
    try:
        file = os.open(f"{folder}/{SPEED_FILE}", os.O_RDWR | os.O_CREAT | FILE_FLAGS, 0o600)
    except OSError:
        return None
    try:
        for how in (fcntl.LOCK_SH, fcntl.LOCK_EX):
            fcntl.flock(file, how)  # another process may be measuring
            known = DiskSpeed.parse(os.pread(file, 4096, 0))
            if known is not None:
                return known
        found = (measure or measure_disk)(folder)
        os.ftruncate(file, 0)
        os.pwrite(file, found.packed(), 0)
    except OSError:
        return None
    finally:
        os.close(file)
    return found


def measure_disk(folder: str) -> DiskSpeed:
    """Write a file of up to 128 MiB in a folder, read it past the page cache, and remove it. Raises
    OSError."""
    disk = os.statvfs(folder)
    if disk.f_bavail * disk.f_frsize < _FREE_FACTOR * _TRIAL_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with _trial_file(f"{folder}/{_TRIAL_FILE}-{os.getpid()}") as file:
        piece = mmap.mmap(-1, _PIECE_BYTES)
        piece.write(np.random.default_rng().bytes(_PIECE_BYTES))

        def write(at: int) -> None:
            os.pwrite(file, piece, at * _PIECE_BYTES)
            os.fdatasync(file)

        pieces, write_s = _timed(write, _TRIAL_BYTES // _PIECE_BYTES)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        read, read_s = _timed(lambda at: os.preadv(file, [piece], at * _PIECE_BYTES), pieces)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        pages = pieces * _PIECE_BYTES // mmap.PAGESIZE

        def read_at_random(number: int) -> int:
            page, places = mmap.mmap(-1, mmap.PAGESIZE), np.random.default_rng(number)
            starts = (places.integers(pages, size=_PLACES) * mmap.PAGESIZE).tolist()
            return _timed(lambda at: os.preadv(file, [page], starts[at % _PLACES]), _ENDLESS)[0]

        with ThreadPoolExecutor(_READERS) as readers:
            begun_s = time.monotonic()
            random_reads = sum(readers.map(read_at_random, range(_READERS)))
            random_s = time.monotonic() - begun_s
    return DiskSpeed(
        max(int(pieces * _PIECE_BYTES / write_s), 1),
        max(int(read * _PIECE_BYTES / read_s), 1),
        max(int(random_reads / random_s), 1),
    )


def _timed(step: Callable[[int], object], most: int) -> tuple[int, float]:
    """Call `step` with 0, 1, ... for `_STEP_S`, and `most` times at most. Returns the number of
    calls, and the seconds that they took."""
    begun_s = now_s = time.monotonic()
    count = 0
    while count < most and now_s < begun_s + _STEP_S:
        step(count)
        count += 1
        now_s = time.monotonic()
    return count, max(now_s - begun_s, 1e-9)


@contextlib.contextmanager
def _trial_file(path: str) -> Iterator[int]:
    """A new file without a name, read and written past the page cache if the file system can."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | FILE_FLAGS
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # of a process that was killed
    try:
        file = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        file = os.open(path, flags & ~os.O_EXCL, 0o600)  # the first attempt may have made it
    try:
        os.unlink(path)
        yield file
    finally:
        os.close(file)
