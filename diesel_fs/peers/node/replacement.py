"""Which chunk makes room for which, in a node's memory and on its disk (`PEERS.md`, section 2).
Does no I/O and never waits.

A chunk that misses is kept in free room, or in room that chunks of other nodes take. To replace a
chunk of this node, it must be worth it (`cache/policies/admission.py`), and the eviction policy
must agree. If the coming reads are known, the policy `plan` decides instead (`chunk_future.py`).

Chunks of other nodes are replaced first, unless no other node has them and some reader needs them.
On the disk, chunks that are also in memory come next. Then the policy chooses.

The methods only decide; `take` alone carries a decision out. All calls come from one trio loop.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...cache.policies.admission import SkiRentalAdmission
from ...cache.policies.costs import ReadCosts
from ...cache.policies.eviction import UnitValues
from ...cache.policies.replacement import Shortage
from ...format.entries import ChunkId
from ...orders.future import Units
from ..wire import Sizes
from .chunk_future import ChunkFuture
from .ledger import Ledger, Mask

PENDING_HITS_MAX = 1024
"""Hits collected before they are passed to the policy, which takes a millisecond."""

PINNED_PASSED_MAX = 64
"""A decision by the plan, made at each miss, passes over at most this number of pinned chunks."""

SSD_COSTS = ReadCosts(0.0002, 1e-9)
"""Rough costs of any SSD, only to compare reads of parts with reads of whole chunks."""

UsesMin = Callable[[Sequence[int]], int]
"""Returns how many reads of the new chunk make up for its fetch if it replaces these chunks."""


class Placement(NamedTuple):
    to_memory: bool
    """If false, it goes through the queue to the disk."""
    victims: Sequence[int] = ()


TO_DISK = Placement(to_memory=False)


class Replacement:
    def __init__(self, ledger: Ledger, costs: ReadCosts) -> None:
        """`costs` are of a fetch from the store."""
        self._ledger, self._costs, self._counts = ledger, costs, ledger.counts
        self.admission = SkiRentalAdmission(ledger.sizes, costs.read_s, ledger.room.memory_bytes)
        """Decides about chunks from the store; `disk_admission` about those from the disk."""
        self.disk_admission = SkiRentalAdmission(
            ledger.sizes, SSD_COSTS.read_s, ledger.room.memory_bytes
        )
        self.future: ChunkFuture | None = None
        self._bypassed: set[tuple[int, bool]] = set()
        """Chunks that may replace no other, by the coming reads; each with whether it is on the
        disk. Such a decision takes 100 us, and stays the same until a reader or a chunk moves."""
        self._hits: list[int] = []
        self._hit_bytes = 0

    # Reads

    def record_hits(self, chunks: Sequence[int], size: int) -> None:
        self._hits += chunks
        self._hit_bytes += size
        if len(self._hits) > PENDING_HITS_MAX:
            self.flush_hits()

    def record_absent(self, chunk: int) -> None:
        self.flush_file_reads()
        self.flush_hits()
        self._ledger.tables.memory.record_access(chunk)
        self._ledger.tables.disk.record_access(chunk)

    def record_disk_read(self, chunk: int, size: int) -> None:
        self.disk_admission.record_unserved(size)
        self.admission.record_hits((chunk,), size)

    def record_lent(self, chunk: int) -> None:
        """A reader reads a whole chunk from its file."""
        size = self._ledger.sizes[chunk]
        self.record_absent(chunk)
        self.disk_admission.record_miss(chunk, size)
        self.record_disk_read(chunk, size)

    def record_arrival(self, chunk: int) -> None:
        self.admission.reset_misses(chunk)
        self.disk_admission.reset_misses(chunk)

    def flush_hits(self) -> None:
        """Pass the collected hits, and those of the data plane, to the policy and both admissions;
        needed before a policy decides."""
        ledger = self._ledger
        for chunks, size in ledger.table.take_reads():
            self._hits += chunks
            self._hit_bytes += size
        if not self._hits:
            return
        if not ledger.share_fits:
            for chunk in self._hits:
                ledger.tables.memory.record_access(chunk)
            self.admission.record_hits(self._hits, self._hit_bytes)
            if ledger.has_disk:
                self.disk_admission.record_hits(self._hits, self._hit_bytes)
        self._counts["memory_reads"] += len(self._hits)
        self._counts["memory_read_bytes"] += self._hit_bytes
        self._hits.clear()
        self._hit_bytes = 0

    def flush_file_reads(self) -> None:
        """Pass on the data plane's reads of lent files (`chunk_table.py`)."""
        ledger = self._ledger
        for chunk, size in ledger.table.take_file_reads():
            self.flush_hits()
            ledger.tables.memory.record_access(chunk)
            if ledger.on_disk[chunk]:
                ledger.tables.disk.record_access(chunk)
            self._counts["disk_reads"] += 1
            self._counts["disk_bytes"] += size
            self.disk_admission.record_miss(chunk, size)
            self.record_disk_read(chunk, size)

    # What will be read

    @property
    def uses_future(self) -> bool:
        return self._ledger.tables.memory.uses_future

    def set_future(self, future: ChunkFuture | None) -> None:
        self.future = future
        self._bypassed.clear()
        for policy in (self._ledger.tables.memory, self._ledger.tables.disk):
            policy.set_future(None if future is None else future.uses)

    def set_values(self, values: UnitValues | None) -> None:
        for policy in (self._ledger.tables.memory, self._ledger.tables.disk):
            policy.set_values(values)

    def note_passed(self, chunks: Units) -> None:
        self._bypassed.clear()
        for policy in (self._ledger.tables.memory, self._ledger.tables.disk):
            policy.note_passed(chunks)

    def switch_version(self, ids: Sequence[ChunkId], sizes: Sizes) -> list[int]:
        """As `Ledger.switch_version`. Forgets the future, which is of one version."""
        self.flush_hits()
        before = self._ledger.switch_version(ids, sizes)
        self.admission.switch_version(self._ledger.sizes, before)
        self.disk_admission.switch_version(self._ledger.sizes, before)
        self.future = None
        self._bypassed.clear()
        return before

    # Decisions

    def may_lend(self, chunk: int) -> bool:
        """Whether a reader that keeps the content itself may read a whole chunk from its file. Such
        a read costs as much as loading the chunk, so the second one brings it to memory (ski
        rental). If the coming reads are known, they decide instead."""
        return self.future is None and not self.disk_admission.is_paid(chunk)

    def place(
        self, chunk: int, wanted_bytes: int, *, from_disk: bool, is_new: bool
    ) -> Placement | None:
        """A place for an absent chunk that a caller wants; None if it should not come. `from_disk`:
        it comes from this node's disk. `is_new`: this miss was not counted yet."""
        admission = self.disk_admission if from_disk else self.admission
        if is_new:
            admission.record_miss(chunk, wanted_bytes)
        placement = self.place_free(chunk, may_go_to_disk=not from_disk)
        if placement is not None:
            return placement
        is_decided = (chunk, from_disk) in self._bypassed
        if not is_decided:
            is_decided, placement = self._place_by_plan(chunk, from_disk=from_disk)
        if is_decided:
            replaces = placement is not None
            if not replaces:
                self._bypassed.add((chunk, from_disk))
            self._counts["plan_replacements" if replaces else "plan_bypassed"] += is_new or replaces
            return placement
        if not admission.has_credit(chunk, wanted_bytes):
            return None
        placement = self._place_by_admission(chunk, admission, may_go_to_disk=not from_disk)
        if placement is not None:
            admission.charge(chunk, wanted_bytes)
        return placement

    def place_free(self, chunk: int, *, may_go_to_disk: bool = True) -> Placement | None:
        """A place that costs none of this node's chunks."""
        victims = self._memory_victims(chunk, has_credit=False)
        if victims is not None:
            return Placement(to_memory=True, victims=victims)
        ledger = self._ledger
        if may_go_to_disk and ledger.owned[chunk] and ledger.has_disk_room(ledger.sizes[chunk]):
            return TO_DISK
        return None

    def place_ahead(self, chunk: int) -> Placement | None:
        """A place for a chunk that no caller wants yet, instead of chunks needed later."""
        _, placement = self._place_by_plan(chunk, from_disk=False, is_ahead=True)
        self._counts["plan_replacements"] += placement is not None
        return placement

    def _place_by_admission(
        self, chunk: int, admission: SkiRentalAdmission, *, may_go_to_disk: bool
    ) -> Placement | None:
        victims = self._memory_victims(chunk, has_credit=True)
        if victims is not None and admission.is_worth_more(chunk, victims):
            return Placement(to_memory=True, victims=victims)
        if not may_go_to_disk or not self._ledger.owned[chunk]:
            return None
        victims = self._disk_victims_by_policy(chunk)
        is_worth = victims is not None and admission.is_worth_more(chunk, victims)
        return TO_DISK if is_worth else None

    def _place_by_plan(
        self, chunk: int, *, from_disk: bool, is_ahead: bool = False
    ) -> tuple[bool, Placement | None]:
        """Whether the coming reads decide about an absent chunk of this node (if not, admission
        does), and its place if they let it replace others."""
        future, ledger = self.future, self._ledger
        if future is None or not ledger.owned[chunk]:
            return False, None
        cost = SSD_COSTS.read_s if from_disk else self._costs.read_s

        def uses_min(replaced: Sequence[int]) -> int:
            sizes = [ledger.sizes[each] for each in replaced]
            size = ledger.sizes[chunk]
            return future.uses_min(chunk, sizes, size, cost, is_stored=not from_disk)

        replaces, victims = self._planned_victims(chunk, uses_min)
        if replaces is None:
            return False, None
        if replaces:
            return True, Placement(to_memory=True, victims=victims)
        if from_disk or is_ahead:
            return True, None
        on_disk = self._disk_victims_by_policy(chunk)
        replaces = on_disk is not None and (
            not on_disk or bool(ledger.tables.disk.replaces(chunk, on_disk, uses_min(on_disk)))
        )
        return True, TO_DISK if replaces else None

    def take(self, chunk: int, placement: Placement) -> None:
        """Drop the victims (this node's own are enqueued for the disk), and reserve the room."""
        ledger = self._ledger
        self._bypassed.clear()
        size = ledger.sizes[chunk]
        for victim in placement.victims:
            self._counts["evictions"] += 1
            if ledger.owned[victim]:
                ledger.enqueue(victim, ledger.views[victim])
            ledger.drop(victim)
        if placement.to_memory:
            ledger.reserve(size)
        else:
            ledger.reserve_queue(size)

    # Victims in memory

    def _memory_victims(self, chunk: int, *, has_credit: bool) -> list[int] | None:
        """The chunks that an absent one would replace; None if it should not come. Without
        `has_credit` (`cache/policies/admission.py`), only chunks of other nodes are replaced.
        Revokes pinned chunks that it would have chosen."""
        self.flush_hits()
        ledger, policy = self._ledger, self._ledger.tables.memory
        size, is_mine, budget_bytes = ledger.sizes[chunk], ledger.owned[chunk], ledger.budget_bytes
        if size > budget_bytes:
            return None
        free_bytes = budget_bytes - ledger.used_bytes
        if not is_mine:
            free_bytes -= ledger.absent_bytes  # this node's own come first
        shortage = Shortage[int](size - free_bytes, ledger.excess_chunks)
        room_bytes = free_bytes
        if not shortage.is_met and (is_mine or has_credit):
            shortage.choose(self._unneeded_copies(), self._bytes_of, self._revokes_pinned)
            room_bytes = size - shortage.bytes
        if not shortage.is_met and is_mine and has_credit:
            shortage.choose(policy.eviction_order(), self._bytes_of, self._revokes_pinned)
            room_bytes = max(free_bytes, 0)
        if not shortage.is_met or not policy.admits(chunk, size, room_bytes):
            return None
        return shortage.victims

    def _planned_victims(self, chunk: int, uses_min: UsesMin) -> tuple[bool | None, list[int]]:
        """Whether the policy lets an absent chunk of this node replace others in memory (None: it
        cannot tell), and which ones. Pinned chunks are passed over, and revoked only if the chunk
        may replace them."""
        self.flush_hits()
        ledger, policy = self._ledger, self._ledger.tables.memory
        size, budget_bytes = ledger.sizes[chunk], ledger.budget_bytes
        if size > budget_bytes:
            return None, []
        pinned: list[int] = []

        def is_pinned(other: int) -> bool:
            if ledger.pins.is_pinned(ledger.memories[other]):
                pinned.append(other)
                return True
            return False

        missing_bytes = size - (budget_bytes - ledger.used_bytes)
        shortage = Shortage[int](missing_bytes, ledger.excess_chunks)
        order = policy.eviction_order()
        may_pass = takewhile(lambda _: len(pinned) <= PINNED_PASSED_MAX, order)
        has_room = shortage.choose(may_pass, self._bytes_of, is_pinned)
        victims = shortage.victims
        wanted = victims if has_room else [*victims, *pinned]
        replaces = policy.replaces(chunk, wanted, uses_min(wanted))
        if replaces:
            for each in pinned:
                ledger.pins.revoke(ledger.memories[each])
        return (replaces, victims) if has_room or replaces is None else (False, [])

    def _unneeded_copies(self) -> list[int]:
        copies = np.flatnonzero(self._ledger.present & ~self._ledger.owned)
        if len(copies):
            copies = copies[~self._are_last_copies(copies)]
        found: list[int] = copies.tolist()
        return found

    def _are_last_copies(self, chunks: npt.NDArray[np.int64]) -> Mask:
        """Whether some reader needs the chunk and, as far as known, no other node has it."""
        if self.future is None:
            return np.zeros(len(chunks), np.bool_)
        needed, elsewhere = self.future.needed(chunks), self._ledger.held_elsewhere
        return needed if elsewhere is None else needed & ~elsewhere[chunks]

    def _bytes_of(self, chunk: int) -> int:
        return self._ledger.memories[chunk].bytes

    def _revokes_pinned(self, chunk: int) -> bool:
        """Whether a chunk is pinned, and so frees nothing now; it is revoked."""
        pins, memory = self._ledger.pins, self._ledger.memories[chunk]
        pins.revoke(memory)
        return pins.is_pinned(memory)

    # Victims on the disk

    def disk_victims(self, size: int, evictable: Mask | None = None) -> list[int] | None:
        """Chunks that leave for `size` bytes; None if even all would not suffice. With `evictable`,
        only chunks in it leave, and they are returned even if they do not suffice."""
        ledger = self._ledger
        first = self._first_on_disk() if evictable is None else evictable
        shortage = Shortage[int](size - ledger.disk_room_bytes)
        candidates = np.flatnonzero(ledger.on_disk & first).tolist()
        shortage.choose(candidates, ledger.sizes.__getitem__)
        if evictable is not None:
            return shortage.victims
        order = ledger.tables.disk.eviction_order()
        return shortage.victims if shortage.choose(order, ledger.sizes.__getitem__) else None

    def may_write(self, chunk: int, victims: Collection[int]) -> bool:
        """Whether the coming reads allow a chunk of the queue to replace `victims`."""
        replaced = self._beyond_first(victims)
        return not replaced or self._ledger.tables.disk.replaces(chunk, replaced) is not False

    def _disk_victims_by_policy(self, chunk: int) -> list[int] | None:
        """The chunks that the policy would have `chunk` replace, without those that leave first in
        any case; None if `chunk` would not be written."""
        ledger = self._ledger
        size = ledger.sizes[chunk]
        if not ledger.takes(size) or not ledger.tables.disk.admits(
            chunk, size, ledger.disk_room_bytes
        ):
            return None
        victims = self.disk_victims(size)
        return None if victims is None else self._beyond_first(victims)

    def _beyond_first(self, victims: Collection[int]) -> list[int]:
        first = self._first_on_disk()
        return [each for each in victims if not first[each]]

    def _first_on_disk(self) -> Mask:
        """Chunks that leave before the policy decides: those of other nodes, except last copies
        that are needed, and those that are also in memory."""
        ledger = self._ledger
        first = ~ledger.owned
        copies = np.flatnonzero(first & ledger.on_disk)
        first[copies[self._are_last_copies(copies)]] = False
        return first | ledger.present
