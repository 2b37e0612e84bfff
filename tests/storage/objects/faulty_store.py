"""An object store with scripted faults, for any test that needs a store.

with FaultyStore(store, Fault("get", "chunks/", error=ObjectStoreError("503"), times=2)) as s:
    ...
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from diesel_fs.format.entries import Bytes
from diesel_fs.storage.objects.store import (
    Housekeeping,
    Leftover,
    ObjectInfo,
    ObjectStore,
    ReadWrapper,
    StoreWrapper,
)
from tests.storage.objects.fault_script import FaultScript, PlannedFault


@dataclass(slots=True)
class Fault(PlannedFault):
    """A fault of the next calls of the method `operation`.

    `act` is called first. `error` is raised before the call's effect, or, with `done`, after it (a
    lost answer). `keep` shortens the result of a read; `flip` flips that bit of it.
    """

    error: Exception | None = None
    done: bool = False
    keep: int | None = None
    flip: int | None = None
    act: Callable[[str], None] | None = None


class ListedHousekeeping(Housekeeping):
    """The housekeeping of a wrapped store; names come from the wrapper's own `list`."""

    _store: StoreWrapper

    def leftovers(self, prefix: str = "") -> Iterator[Leftover]:
        return self._store.inner.housekeeping.leftovers(prefix)

    def discard(self, leftover: Leftover) -> None:
        self._store.inner.housekeeping.discard(leftover)

    def foreign(self, prefix: str = "") -> Iterator[str]:
        return self._store.inner.housekeeping.foreign(prefix)


class FaultyStore(ReadWrapper, FaultScript[Fault]):
    def __init__(self, inner: ObjectStore, *script: Fault) -> None:
        ReadWrapper.__init__(self, inner)
        FaultScript.__init__(self, *script)
        self.calls: Counter[str] = Counter()

    @contextmanager
    def _call(self, operation: str, name: str) -> Iterator[Fault]:
        with self._script_lock:
            self.calls[operation] += 1
        fault = self.next_fault(operation, name) or Fault(operation)
        if fault.act is not None:
            fault.act(name)
        if fault.error is not None and not fault.done:
            raise fault.error
        yield fault
        if fault.error is not None:
            raise fault.error

    @property
    def housekeeping(self) -> Housekeeping:
        return ListedHousekeeping(self)

    def put(self, name: str, parts: Sequence[Bytes]) -> None:
        with self._call("put", name):
            super().put(name, parts)

    def replace(self, name: str, parts: Sequence[Bytes]) -> None:
        with self._call("replace", name):
            super().replace(name, parts)

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytearray:
        with self._call("get", name) as fault:
            content = super().get(name, start, length)
            del content[len(content) if fault.keep is None else fault.keep :]
            _flip(content, fault)
        return content

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        with self._call("read_into", name) as fault:
            super().read_into(name, start, buffer)
            _flip(memoryview(buffer).cast("B"), fault)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        with self._call("list", prefix) as fault:
            yield from islice(super().list(prefix, after), fault.keep)

    def stat(self, name: str) -> ObjectInfo:
        with self._call("stat", name):
            return super().stat(name)

    def delete(self, name: str) -> None:
        with self._call("delete", name):
            super().delete(name)


def _flip(content: bytearray | memoryview, fault: Fault) -> None:
    if fault.flip is not None:
        content[fault.flip // 8] ^= 1 << fault.flip % 8
