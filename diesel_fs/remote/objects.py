"""The chunks of datasets behind a server, with the interface of an object store.

When `put` returns, the server has checked the chunk, stored it durably and committed it. Callers
check the bytes that they read. A server does not list, replace or delete objects for its clients,
so these methods raise UsageError, except that `replace` and `delete` work for leases.

Usable from several threads and in forked children.
"""

import json
import time
from collections.abc import Iterator, Sequence
from uuid import UUID

import numpy as np

from ..errors import CorruptError, UsageError
from ..format.chunk import PREAMBLE_BYTES, parse_preamble
from ..format.chunk_id import id_seconds
from ..format.entries import Bytes, ChunkId
from ..format.object_names import LEASE_NAME, chunk_of_object, identity_of_object
from ..net.client import RpcClient
from ..net.messages import Message
from ..settings import READ_DEADLINE_S
from ..storage.objects.store import (
    FastReads,
    Housekeeping,
    ObjectInfo,
    ObjectStore,
    Part,
    batched_parts,
    check_range,
)
from .values import PARTS_MAX, parts_message

_REQUEST_BYTES = 16 << 20
"""A request of `read_parts` this long uses a network link fully, and is soon received."""

_SLOWEST_BYTES_PER_S = 1 << 20  # the minimum rate that deadlines assume
_PUT_S = 60.0  # the time that a server may wait for its stores
_SECOND_NS = 1_000_000_000


class RemoteObjects(ObjectStore):
    fork_safe = True

    def __init__(self, link: RpcClient) -> None:
        self._link = link

    @property
    def store_id(self) -> UUID:  # type: ignore[override]  # it is an attribute elsewhere
        """Connects if no server has answered yet."""
        return self._link.store_id

    @property
    def fast_reads(self) -> FastReads:
        return _ServerReads(self)

    @property
    def housekeeping(self) -> Housekeeping:
        raise _not_for_clients("keeps its store in order itself, and lists no objects")

    def put(self, name: str, parts: Sequence[Bytes]) -> None:
        identity, _ = _parse_name(name)
        message: Message = {"do": "put", "identity": identity.bytes}
        total = sum(len(part) for part in parts)
        self._link.call(message, parts, deadline_s=_PUT_S + total / _SLOWEST_BYTES_PER_S)

    def replace(self, name: str, parts: Sequence[Bytes]) -> None:
        _check_lease(name)
        content = b"".join(parts)
        try:
            lease = json.loads(content)
            version, until = int(lease["version"]), float(lease["until"])
        except (ValueError, KeyError, TypeError):
            raise UsageError(f"{name} does not hold a lease") from None
        self._lease(name, version, max(until - time.time(), 1.0))

    def delete(self, name: str) -> None:
        _check_lease(name)
        self._lease(name, 0, 0)

    def _lease(self, name: str, version: int, seconds: float) -> None:
        """If `seconds` is 0, the lease ends."""
        identity = identity_of_object(name)
        assert identity is not None
        message: Message = {
            "do": "lease",
            "identity": identity.bytes,
            "lease": name.rpartition("/")[2],
            "version": version,
            "seconds": int(seconds),
        }
        self._link.call(message)

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytearray:
        check_range(name, start, length)
        if length is None:
            length = max(self.stat(name).bytes - start, 0)
        content = bytearray(length)
        self.read_into(name, start, content)
        return content

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        check_range(name, start, len(buffer))
        identity, chunk = _parse_name(name)
        self._read(identity, [(chunk, start, len(buffer))], memoryview(buffer))

    def _read(
        self,
        identity: UUID,
        parts: Sequence[tuple[ChunkId, int, int]],
        buffer: memoryview,
        *,
        fresh: bool = False,
    ) -> None:
        """Read `parts` (chunk, start, size) into `buffer` one after the other; with `fresh` past
        the server's caches."""
        message: Message = {
            "do": "read",
            "identity": identity.bytes,
            "parts": parts_message(parts),
            "fresh": fresh,
        }
        deadline_s = READ_DEADLINE_S + len(buffer) / _SLOWEST_BYTES_PER_S
        answer = self._link.call(message, room=buffer, deadline_s=deadline_s)
        if len(answer.payload) != len(buffer):
            raise CorruptError(f"the server sent {len(answer.payload)} of {len(buffer)} bytes")

    def stat(self, name: str) -> ObjectInfo:
        identity, chunk = _parse_name(name)
        front = self.get(name, 0, PREAMBLE_BYTES)
        preamble = parse_preamble(bytes(front), identity=identity, id=chunk)
        return ObjectInfo(name, preamble.object_bytes, id_seconds(chunk) * _SECOND_NS)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        raise _not_for_clients("lists no objects")


class _ServerReads(FastReads):
    _store: RemoteObjects

    batches_reads = True

    def read_uncached(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        check_range(name, start, len(buffer))
        identity, chunk = _parse_name(name)
        part = chunk, start, len(buffer)
        self._store._read(identity, [part], memoryview(buffer), fresh=True)

    def read_ranges(
        self, name: str, ranges: Sequence[tuple[int, int]], room: memoryview
    ) -> Iterator[memoryview]:
        yield from self.read_parts([(name, start, size) for start, size in ranges])

    def read_parts(self, parts: Sequence[Part]) -> Iterator[memoryview]:
        for batch in batched_parts(parts, PARTS_MAX, _REQUEST_BYTES):
            yield from self._read_batch(batch)

    def _read_batch(self, parts: Sequence[Part]) -> Iterator[memoryview]:
        parsed = {name: _parse_name(name) for name, _, _ in parts}
        identities = {identity for identity, _ in parsed.values()}
        if len(identities) != 1:
            raise UsageError("parts of several datasets at once")
        buffer = np.empty(sum(size for _, _, size in parts), np.uint8).data
        self._store._read(
            identities.pop(),
            [(parsed[name][1], start, size) for name, start, size in parts],
            buffer,
        )
        at = 0
        for _, _, size in parts:
            yield buffer[at : at + size].toreadonly()
            at += size


def _check_lease(name: str) -> None:
    if not LEASE_NAME.fullmatch(name):
        raise _not_for_clients("replaces and deletes no objects but leases")


def _parse_name(name: str) -> tuple[UUID, ChunkId]:
    identity, chunk = identity_of_object(name), chunk_of_object(name)
    if identity is None or chunk is None:
        raise UsageError(f"{name!r} is not the name of a chunk")
    return identity, chunk


def _not_for_clients(what: str) -> UsageError:
    return UsageError(f"a server {what} for its clients", advice="ask an administrator")
