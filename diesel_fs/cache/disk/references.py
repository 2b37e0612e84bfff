"""The file `.used` of a dataset in a cache's folder: how often and how lately
jobs have used the dataset.

The file has 28 bytes, or none before the first job: `DIESLRF2`, two little-endian doubles and the
CRC-32 of all this. The doubles are the dataset's CRF (`policies/lrfu.py`) at its last reference
(start of a job), and the time of that reference in hours since 1970. Other content, as older
versions wrote it, counts as one reference at the file's mtime. The file is written in place, since
jobs hold locks on it. Older programs that do not know the content keep it.
"""

import math
import os
import struct
import zlib
from dataclasses import dataclass

from ..policies.lrfu import hour_of
from .locks import FILE_FLAGS

USED = ".used"
_MAGIC = b"DIESLRF2"
_RECORD = struct.Struct("<8sddI")
_HOUR_MAX = 1e9  # a greater one is damage


@dataclass(frozen=True, slots=True)
class References:
    crf: float = 1.0
    hour: float = 0.0

    @classmethod
    def parse(cls, content: bytes) -> "References | None":
        """None if `content` is not a sound record."""
        if len(content) != _RECORD.size:
            return None
        magic, crf, hour, checksum = _RECORD.unpack(content)
        is_sound = magic == _MAGIC and checksum == zlib.crc32(content[:-4])
        if is_sound and 1 <= crf < math.inf and abs(hour) < _HOUR_MAX:
            return cls(crf, hour)
        return None

    def packed(self) -> bytes:
        content = _RECORD.pack(_MAGIC, self.crf, self.hour, 0)[:-4]
        return content + zlib.crc32(content).to_bytes(4, "little")


def read_references(file: int) -> References:
    """Without a sound record, the file's last use (mtime) counts as one reference. Raises
    OSError."""
    found = References.parse(os.pread(file, _RECORD.size + 1, 0))
    return References(hour=hour_of(os.fstat(file).st_mtime)) if found is None else found


def write_references(path: str, references: References) -> None:
    """Raises OSError."""
    file = os.open(path, os.O_WRONLY | FILE_FLAGS)
    try:
        os.pwrite(file, references.packed(), 0)
        os.ftruncate(file, _RECORD.size)  # the old content may have been longer
    finally:
        os.close(file)
