"""The ledger of a node's cache: random operations against a model that only adds up."""

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diesel_fs.peers.node.ledger import BUDGET_RETRY_S
from diesel_fs.peers.node.sealed_memory import SealedMemory
from tests.examples import examples

from .ledgers import ids, make_ledger, memory, sizes

NAMES = st.integers(0, 9)
VERSIONS = st.lists(NAMES, min_size=1, max_size=8, unique=True)


class LedgerMachine(RuleBasedStateMachine):
    """Chunks are named by numbers that no version changes; the model counts bytes by names."""

    @initialize(names=VERSIONS)
    def start(self, names: list[int]) -> None:
        self.names = names
        self.ledger, _ = make_ledger(names, 10_000, queue_bytes=500)
        self.here: dict[int, SealedMemory] = {}
        self.written: set[int] = set()
        self.queue: list[int] = []
        self.reserved: list[int] = []
        self.pinned: dict[tuple[int, int], list[SealedMemory]] = {}  # by pinner and number

    def size(self, name: int) -> int:
        return 100 + 10 * name

    @rule(at=NAMES)
    def insert(self, at: int) -> None:
        number = at % len(self.names)
        if (name := self.names[number]) not in self.here:
            self.here[name] = memory(self.size(name))
            self.ledger.insert(number, self.here[name])

    @rule(at=NAMES)
    def drop(self, at: int) -> None:
        number = at % len(self.names)
        if self.here.pop(self.names[number], None) is not None:
            self.ledger.drop(number)

    @rule(at=NAMES)
    def write(self, at: int) -> None:
        self.written.add(self.names[at % len(self.names)])
        self.ledger.record_written(at % len(self.names))

    @rule(at=NAMES)
    def erase(self, at: int) -> None:
        self.written.discard(self.names[at % len(self.names)])
        self.ledger.record_erased(at % len(self.names))

    @rule(at=NAMES)
    def enqueue(self, at: int) -> None:
        number = at % len(self.names)
        name = self.names[number]
        fits = sum(map(self.size, [*self.queue, name])) <= 500
        assert self.ledger.takes(self.size(name)) == fits
        if fits and name not in self.queue and name not in self.written:
            self.queue.append(name)
        self.ledger.enqueue(number, memoryview(bytes(self.size(name))))

    @precondition(lambda self: self.queue)
    @rule()
    def dequeue(self) -> None:
        name = self.queue.pop(0)
        number, content = next(iter(self.ledger.queue.items()))
        assert self.names[number] == name, "the first comes first"
        self.ledger.dequeue(number, content)

    @rule(name=NAMES)
    def reserve(self, name: int) -> None:
        self.reserved.append(self.size(name))
        self.ledger.reserve(self.size(name))

    @precondition(lambda self: self.reserved)
    @rule()
    def release(self) -> None:
        self.ledger.release(self.reserved.pop())

    @rule(pinner=st.integers(0, 1), at=NAMES)
    def pin(self, pinner: int, at: int) -> None:
        number = at % len(self.names)
        found = self.here.get(self.names[number])
        if found is not None:
            self.ledger.pins.pin(pinner, number, found)
            mine = self.pinned.setdefault((pinner, number), [])
            if found not in mine:
                mine.append(found)

    @rule(pinner=st.integers(0, 1))
    def unpin_all(self, pinner: int) -> None:
        self.ledger.unpin(pinner, None)
        self.pinned = {key: each for key, each in self.pinned.items() if key[0] != pinner}

    @rule(names=VERSIONS)
    def switch_version(self, names: list[int]) -> None:
        before = self.ledger.switch_version(ids(names), sizes(names))
        assert [-1 if was < 0 else self.names[was] for was in before] == [
            name if name in self.names else -1 for name in names
        ]
        self.names = names
        self.here = {name: each for name, each in self.here.items() if name in names}
        self.written &= set(names)
        self.queue = [name for name in self.queue if name in names]

    @invariant()
    def every_fact_agrees(self) -> None:
        ledger, names = self.ledger, self.names
        here = set(self.here)
        assert {names[each] for each in ledger.views} == here
        assert {names[each] for each in np.flatnonzero(ledger.present)} == here
        assert {names[each] for each in ledger.tables.memory.sizes} == here
        assert {names[each] for each in np.flatnonzero(ledger.on_disk)} == self.written
        assert {names[each] for each in ledger.tables.disk.sizes} == self.written
        assert [names[each] for each in ledger.queue] == self.queue
        held = {name for number, name in enumerate(names) if ledger.holds(number)}
        assert held == here | self.written | set(self.queue)
        pinned = {each for some in self.pinned.values() for each in some}
        dropped = sum(each.bytes for each in pinned if each not in self.here.values())
        used = sum(map(self.size, here)) + dropped + sum(self.reserved)
        assert ledger.used_bytes == used
        assert ledger.pins.bytes == sum(each.bytes for each in pinned)
        stats = ledger.stats()
        assert stats["disk_queued_bytes"] == sum(map(self.size, self.queue))
        assert stats["held_bytes"] == sum(map(self.size, here | self.written))


def test_any_operations_agree_with_a_model_that_adds_up() -> None:
    LedgerMachine.TestCase.settings = examples(100)
    LedgerMachine.TestCase().runTest()


def test_a_refusing_machine_shrinks_the_budget_twice_and_only_for_a_while() -> None:
    ledger, clock = make_ledger([0, 1, 2], 1000)
    ledger.insert(0, memory(100))
    assert ledger.shrink_budget() == 100
    assert ledger.budget_bytes == 100, "the chunks in memory"
    ledger.shrink_budget()
    assert ledger.budget_bytes == 0, "no chunk leaves for one that cannot come"
    clock.now_s += BUDGET_RETRY_S
    assert ledger.budget_bytes == 1000


def test_a_disk_that_rests_holds_nothing_and_takes_nothing() -> None:
    ledger, clock = make_ledger([0, 1], 1000, queue_bytes=500)
    ledger.record_written(0)
    assert ledger.is_readable(0)
    assert ledger.takes(100)
    ledger.disk_rests_until_s = 30.0
    assert not ledger.is_readable(0)
    assert not ledger.readable.any()
    assert not ledger.takes(100)
    clock.now_s = 30.0
    assert ledger.is_readable(0)
    ledger.disk_writes_rest_until_s = 60.0
    assert not ledger.takes(100)
    assert ledger.is_readable(0)
