"""A table of the owners of all chunks, in memory that a master's clients map, so that they look up
an owner without a request. `PEERS.md`, section 4, has the layout.

Only the master writes. During a change, a reader sees each owner as it was before or after. Both
are safe: a node that is asked for a chunk that it no longer owns says so.
"""

import fcntl
import mmap
import os
import struct

import numpy as np
import numpy.typing as npt

from ...errors import CorruptError

_HEAD = struct.Struct("<QII")  # generation, chunks, 0
_F_SEAL_FUTURE_WRITE = 0x10  # not in Python's `fcntl`
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE

Owners = npt.NDArray[np.int32]
"""The rank of each chunk's owner; -1: none."""


class OwnerTable:
    def __init__(self, chunks: int) -> None:
        size = _HEAD.size + 4 * chunks
        self.descriptor = os.memfd_create("diesel-owners", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """Clients cannot write through it; -1 after `close`."""

        os.ftruncate(self.descriptor, size)
        self._map = mmap.mmap(self.descriptor, size)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
        self._generation = np.frombuffer(self._map, "<u8", 1)
        self._owners = np.frombuffer(self._map, "<i4", chunks, _HEAD.size)
        self._map[8:12] = struct.pack("<I", chunks)
        self._owners[:] = -1

    def set_owners(self, owners: npt.NDArray[np.int64]) -> None:
        self._owners[:] = owners
        self.bump_generation()

    def bump_generation(self) -> None:
        """Have clients request members and secret again, and read the owners anew."""
        self._generation += 1

    def close(self) -> None:
        """Clients keep their mappings. May be called again."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def __del__(self) -> None:
        if getattr(self, "descriptor", -1) >= 0:
            os.close(self.descriptor)


class OwnerTableView:
    def __init__(self, descriptor: int, chunks: int) -> None:
        """The caller closes the descriptor. Raises OSError; CorruptError if the table has another
        size or could shrink."""
        size = _HEAD.size + 4 * chunks
        if os.fstat(descriptor).st_size != size:
            raise CorruptError("a table of owners of another size")
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise CorruptError("a table of owners that could shrink")
        self.inode = os.fstat(descriptor).st_ino
        """Differs between tables."""

        mapped = memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ))
        self.generation_of = mapped[:8].cast("Q")
        """Its only item is `generation`."""

        self.owners: Owners = np.frombuffer(mapped, "<i4", chunks, _HEAD.size)

    @property
    def generation(self) -> int:
        """Grows after each change of owners, members or secret."""
        return self.generation_of[0]
