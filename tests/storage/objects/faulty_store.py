"""An object store with scripted faults, for any test that needs a store.

    with FaultyStore(store, Fault("get", "chunks/", error=ObjectStoreError("503"), times=2)) as s:
        ...

By the end of the `with`, every fault must have hit exactly `times` times: a test whose fault did
not hit proves nothing, so it fails.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

from diesel_fs.format.entries import Bytes
from diesel_fs.storage.objects.store import ObjectInfo, ObjectStore, ReadWrapper

Item = TypeVar("Item")


@dataclass(slots=True)
class Fault:
    """What happens to the next calls of `operation` on names that contain `where`.

    `act` is called first. `error` is raised before the call's effect, or, with `done`, after it (a
    lost answer). `keep` shortens what a read returns; `flip` flips that bit of it. The first `skip`
    calls that match are left alone.
    """

    operation: str
    where: str = ""
    error: Exception | None = None
    done: bool = False
    keep: int | None = None
    flip: int | None = None
    act: Callable[[str], None] | None = None
    skip: int = 0
    times: int = 1
    seen: int = field(default=0, init=False)
    hits: int = field(default=0, init=False)


class FaultyStore(ReadWrapper):
    """A store that forwards every call, unless a fault hits it. The first fault that matches a call
    is the one that hits."""

    def __init__(self, inner: ObjectStore, *script: Fault) -> None:
        super().__init__(inner)
        self.script = script
        self.calls: dict[str, int] = {}
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            missed = [fault for fault in self.script if fault.hits != fault.times]
            assert not missed, f"faults that did not hit as often as planned: {missed}"

    def _next(self, operation: str, name: str) -> Fault | None:
        with self._lock:
            self.calls[operation] = self.calls.get(operation, 0) + 1
            for fault in self.script:
                if fault.operation != operation or fault.where not in name:
                    continue
                fault.seen += 1
                if fault.seen > fault.skip and fault.hits < fault.times:
                    fault.hits += 1
                    return fault
        return None

    def _before(self, operation: str, name: str) -> Fault | None:
        fault = self._next(operation, name)
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
