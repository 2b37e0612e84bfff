"""An object store with scripted faults, for any test that needs a store.

    with FaultyStore(store, Fault("get", "chunks/", error=ObjectStoreError("503"), times=2)) as s:
        ...

By the end of the `with`, every fault must have hit exactly `times` times: a test whose fault did
not hit proves nothing, so it fails.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from diesel_fs.format.entries import Bytes
from diesel_fs.storage.objects.store import ObjectInfo, ObjectStore, ReadWrapper
from tests.storage.objects.fault_script import FaultScript, PlannedFault

Item = TypeVar("Item")


@dataclass(slots=True)
class Fault(PlannedFault):
    """What happens to the next calls of the method `operation`.

    `act` is called first. `error` is raised before the call's effect, or, with `done`, after it (a
    lost answer). `keep` shortens what a read returns; `flip` flips that bit of it.
    """

    error: Exception | None = None
    done: bool = False
    keep: int | None = None
    flip: int | None = None
    act: Callable[[str], None] | None = None


class FaultyStore(ReadWrapper, FaultScript[Fault]):
    """A store that forwards every call, unless a fault hits it. The first fault that matches a call
    is the one that hits."""

    def __init__(self, inner: ObjectStore, *script: Fault) -> None:
        ReadWrapper.__init__(self, inner)
        FaultScript.__init__(self, *script)
        self.calls: Counter[str] = Counter()

    def _before(self, operation: str, name: str) -> Fault | None:
        with self._script_lock:
            self.calls[operation] += 1
        fault = self.next_fault(operation, name)
        if fault is not None and fault.act is not None:
            fault.act(name)
        if fault is not None and fault.error is not None and not fault.done:
            raise fault.error
        return fault

    def put(self, name: str, parts: Sequence[Bytes]) -> None:
        fault = self._before("put", name)
        super().put(name, parts)
        _after(fault)

    def replace(self, name: str, parts: Sequence[Bytes]) -> None:
        fault = self._before("replace", name)
        super().replace(name, parts)
        _after(fault)

    def get(self, name: str, start: int = 0, length: int | None = None) -> bytearray:
        fault = self._before("get", name)
        content = super().get(name, start, length)
        if fault is not None and fault.keep is not None:
            del content[fault.keep :]
        if fault is not None and fault.flip is not None:
            content[fault.flip // 8] ^= 1 << fault.flip % 8
        _after(fault)
        return content

    def read_into(self, name: str, start: int, buffer: bytearray | memoryview) -> None:
        fault = self._before("read_into", name)
        super().read_into(name, start, buffer)
        if fault is not None and fault.flip is not None:
            memoryview(buffer).cast("B")[fault.flip // 8] ^= 1 << fault.flip % 8
        _after(fault)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        fault = self._before("list", prefix)
        return _shortened(fault, super().list(prefix, after))

    def names(self, prefix: str, after: str = "") -> Iterator[str]:
        fault = self._before("list", prefix)
        return _shortened(fault, super().names(prefix, after))

    def stat(self, name: str) -> ObjectInfo:
        fault = self._before("stat", name)
        info = super().stat(name)
        _after(fault)
        return info

    def delete(self, name: str) -> None:
        fault = self._before("delete", name)
        super().delete(name)
        _after(fault)


def _after(fault: Fault | None) -> None:
    if fault is not None and fault.error is not None and fault.done:
        raise fault.error


def _shortened(fault: Fault | None, items: Iterator[Item]) -> Iterator[Item]:
    for index, item in enumerate(items):
        if fault is not None and index == fault.keep:
            break
        yield item
    _after(fault)
