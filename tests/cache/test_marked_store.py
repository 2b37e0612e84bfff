"""`MarkedStore` marks all its reads for the observer of a mount's waits."""

import inspect
from unittest.mock import Mock

from diesel_fs.cache.waiting import MarkedStore, WaitCause, observer_set
from diesel_fs.storage.objects.store import FastReads
from tests.rows import each_row

PUBLIC = [name for name in vars(FastReads) if not name.startswith("_")]
WITHOUT_WAITING = ("read_nowait", "can_pin_nowait", "chunk_reader")


@each_row("name", PUBLIC)
def test_every_way_to_read_is_forwarded_and_marked_if_it_may_wait(name: str) -> None:
    """A method that was added to `FastReads` and forgotten in the marked store fails."""
    inner, observer = Mock(), Mock()
    inner.fast_reads.read_ranges.return_value = inner.fast_reads.read_parts.return_value = iter([1])
    reads = MarkedStore(inner, WaitCause.STORE).fast_reads
    member = getattr(FastReads, name)
    if not callable(member):
        assert getattr(reads, name) is getattr(inner.fast_reads, name)
        return
    arguments = [object() for _ in [*inspect.signature(member).parameters][1:]]
    with observer_set(observer):
        found = getattr(reads, name)(*arguments)
        if name in ("read_ranges", "read_parts"):
            assert list(found) == [1]
    getattr(inner.fast_reads, name).assert_called_once_with(*arguments)
    assert bool(observer.method_calls) == (name not in WITHOUT_WAITING)
    assert observer.enter.call_count == observer.leave.call_count
