"""Which node owns each chunk of a version: a table in memory that the clients of a master map, so
that they can look an owner up without a request.

`PEERS.md`, section 4, has the layout. Only the master writes. During a change, a reader sees each
owner as it was before or after; either is right, as a node that is asked for a chunk that it does
not own any more answers so.
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
    """The table as its master writes it."""

    def __init__(self, chunks: int) -> None:
        size = _HEAD.size + 4 * chunks
        self.descriptor = os.memfd_create("diesel-owners", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """The table for clients, which cannot write to it through this descriptor; -1 after
        `close`."""

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
        """Have clients request the members and the secret again, and read the owners anew."""
        self._generation += 1

    def close(self) -> None:
        """Close the descriptor. Clients keep their mappings. May be called again."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = -1

    def __del__(self) -> None:
        if getattr(self, "descriptor", -1) >= 0:
            os.close(self.descriptor)


class OwnerTableView:
    """The table as a client maps it."""

    def __init__(self, descriptor: int, chunks: int) -> None:
        """Map the table; the caller closes the descriptor. Raises OSError, and CorruptError if the
        table has another size or could shrink."""
        size = _HEAD.size + 4 * chunks
        if os.fstat(descriptor).st_size != size:
            raise CorruptError("a table of owners of another size")
        if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise CorruptError("a table of owners that could shrink")
        self.inode = os.fstat(descriptor).st_ino
        """A number that differs between tables."""

        mapped = memoryview(mmap.mmap(descriptor, size, prot=mmap.PROT_READ))
        self.generation_of = mapped[:8].cast("Q")
        """A view whose only item is `generation`."""

        self.owners: Owners = np.frombuffer(mapped, "<i4", chunks, _HEAD.size)

    @property
    def generation(self) -> int:
        """Grows after each change of owners, members or secret."""
        return self.generation_of[0]
