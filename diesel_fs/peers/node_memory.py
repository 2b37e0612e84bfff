"""What a node has in memory of a dataset: which chunks, and for which others they go.

Owned here: the budget, who goes for whom, what the policy hears, and what readers have borrowed.
Not owned: how chunks come and whether they are worth it (`node_cache.py`), the memory
(`memory.py`). One trio loop, in which nothing here waits.

The budget is for what stands here, is on its way, or is lent. What this node does not own comes
where its own share has room beside it, and goes first; then goes what the policy says. What is lent
is asked back instead, and goes when it is returned: it takes its room until then anyway, and
serves. Bytes that are being sent when their chunk goes are not counted. Where the machine has no
memory, descriptors or mappings, the budget is what is here, for a while.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import trio

from ..cache.policy import Accessed, Evicted, EvictionPolicy, Inserted
from .pin_table import PinTable
from .sealed_memory import SealedMemory, sealed_memories_max

log = logging.getLogger("diesel.task")

BUDGET_RETRY_S = 60.0
"""Before a machine that refused memory is asked for as much again."""

PENDING_HITS_MAX = 1024
"""Uses that the policy has not heard of yet: to hear of them takes a millisecond, at
once."""

Mask = npt.NDArray[np.bool_]


class NodeMemory:
    """The chunks of one version of a dataset that are in memory."""

    def __init__(
        self,
        sizes: Sequence[int],
        budget_bytes: int,
        policy: EvictionPolicy,
        *,
        on_evict: Callable[[int, memoryview], None],
        on_hits: Callable[[Sequence[int], int], None],
    ) -> None:
        """`on_evict` hears of what goes for others; `on_hits` of the chunks that reads were served
        from, and of how many bytes these were in all."""
        self.views: dict[int, memoryview] = {}  # what a request that hits looks at
        self.present: Mask = np.zeros(len(sizes), np.bool_)
        self.owned: Mask = np.zeros(len(sizes), np.bool_)
        self.counts: Counter[str] = Counter()
        self.budget_bytes_max = budget_bytes
        self._budget_bytes = budget_bytes
        self._count_max = sealed_memories_max()
        self._sizes = sizes
        self._policy = policy
        self._on_evict = on_evict
        self._on_hits = on_hits
        self._memories: dict[int, SealedMemory] = {}
        self._held_bytes = self._pinned_evicted_bytes = self._reserved_bytes = (
            self._reserved_count
        ) = 0
        self._pins = PinTable()
        self._hits: list[int] = []
        self._hit_bytes = 0
        self._shrunk_until_s = math.inf
        self._warned: set[type] = set()
        self._fits = True
        self._warn_of_limits()

    # Reading

    def find(self, chunk: int) -> memoryview | None:
        """A chunk, noted as used."""
        view = self.views.get(chunk)
        if view is not None:
            self.record_hits((chunk,), 0)
        return view

    def find_parts(self, parts: npt.NDArray[np.uint32]) -> list[memoryview] | None:
        """Parts (chunk, start, bytes), where the chunks of all are here."""
        views, found = self.views, []
        for chunk, start, size in parts.tolist():
            view = views.get(chunk)
            if view is None:
                return None
            found.append(view[start : start + size])
        self.record_hits(parts[:, 0].tolist(), int(parts[:, 2].sum()))
        return found

    def record_hits(self, chunks: Sequence[int], size: int) -> None:
        """So many reads were served from here, of so many bytes in all."""
        self._hits += chunks
        self._hit_bytes += size
        if len(self._hits) > PENDING_HITS_MAX:
            self.flush_hits()

    def record_access(self, chunk: int) -> None:
        """Somebody wants a chunk that is not here."""
        self.flush_hits()
        self._policy.on_event(Accessed(chunk))

    def flush_hits(self) -> None:
        """Tell of uses and hits; before the policy hears or is asked anything else."""
        if self._hits:
            if not self._fits:
                for chunk in self._hits:
                    self._policy.on_event(Accessed(chunk))
                self._on_hits(self._hits, self._hit_bytes)
            self.counts["memory_reads"] += len(self._hits)
            self.counts["memory_read_bytes"] += self._hit_bytes
            self._hits.clear()
            self._hit_bytes = 0

    # Room

    def find_victims(self, chunk: int, *, has_credit: bool) -> list[int] | None:
        """Who goes for a chunk that is not here: where it is not paid for, what is not this node's;
        else what the policy gives up, too. None where that is not enough, or not worth it.

        What is lent among these is asked back.
        """
        self.flush_hits()
        if trio.current_time() >= self._shrunk_until_s:
            self._budget_bytes, self._shrunk_until_s = self.budget_bytes_max, math.inf
        size, is_mine = self._sizes[chunk], bool(self.owned[chunk])
        left_bytes = self._budget_bytes - self.used_bytes
        if not is_mine:
            left_bytes -= self._absent_bytes()
        free_bytes, missing = max(left_bytes, 0), size - left_bytes
        too_many = len(self._memories) + self._reserved_count + 1 - self._count_max
        if size > self._budget_bytes:
            return None
        victims: list[int] = []
        if (missing > 0 or too_many > 0) and (is_mine or has_credit):
            for other in np.flatnonzero(self.present & ~self.owned).tolist():
                if missing <= 0 and too_many <= 0:
                    break
                if self._can_go(other):
                    victims.append(other)
                    missing -= self._sizes[other]
                    too_many -= 1
        if missing <= 0 and too_many <= 0:
            room_bytes = size - missing
        elif has_credit and is_mine:
            more = self._victims(missing, too_many, {*victims})
            if more is None:
                return None
            victims += more
            room_bytes = free_bytes
        else:
            return None
        return victims if self._policy.admits(chunk, size, room_bytes) else None

    def reserve(self, chunk: int, victims: Iterable[int]) -> None:
        """These go, and the chunk comes."""
        for victim in victims:
            self.counts["evictions"] += 1
            if self.owned[victim]:
                self._on_evict(victim, self.views[victim])
            self.drop(victim)
        self._reserved_count += 1
        self._reserved_bytes += self._sizes[chunk]

    def release_reservation(self, size: int) -> None:
        """A chunk of this size that was expected has come, or does not."""
        self._reserved_count -= 1
        self._reserved_bytes -= size

    def insert(self, chunk: int, memory: SealedMemory) -> None:
        """It is here."""
        self.flush_hits()
        self._memories[chunk], self.views[chunk] = memory, memory.view
        self.present[chunk] = True
        self._held_bytes += memory.bytes
        self._policy.on_event(Inserted(chunk, memory.bytes))

    def drop(self, chunk: int) -> None:
        """It is not here any more."""
        memory = self._memories.pop(chunk)
        del self.views[chunk]
        self.present[chunk] = False
        self._held_bytes -= memory.bytes
        self._policy.on_event(Evicted(chunk))
        if self._pins.is_pinned(memory):
            self._pins.revoke(memory)
            self._pinned_evicted_bytes += memory.bytes
        memory.close()

    def shrink_budget(self, error: Exception) -> None:
        """The machine has no memory, descriptor, mapping or thread for another chunk.

        Once more, and nothing comes, so that nothing goes for what does not come.
        """
        here_bytes = self._held_bytes + self._pinned_evicted_bytes
        is_first = self._budget_bytes == self.budget_bytes_max
        self._budget_bytes = min(here_bytes, self.budget_bytes_max - 1) if is_first else 0
        self._shrunk_until_s = trio.current_time() + BUDGET_RETRY_S
        self.counts["refused"] += 1
        if type(error) not in self._warned:
            self._warned.add(type(error))
            log.warning(
                "this node holds %s bytes for now, of the %s that it may: %s",
                f"{here_bytes:,}", f"{self.budget_bytes_max:,}", error,
            )  # fmt: skip

    @property
    def used_bytes(self) -> int:
        """What counts in the budget."""
        return self._held_bytes + self._pinned_evicted_bytes + self._reserved_bytes

    def _absent_bytes(self) -> int:
        """What this node owns and has not: it is to have room when it comes, also where all that is
        here has been lent."""
        absent = self.owned & ~self.present
        return int(np.asarray(self._sizes, np.int64)[absent].sum())

    def _victims(self, size: int, count: int, others: set[int]) -> list[int] | None:
        """What the policy gives up beside the others; None where that is not enough."""
        wanted, asked = size, -1
        while True:
            victims: list[int] = []
            freed_bytes = 0
            chosen = self._policy.victims(max(wanted, 1))
            for each in chosen:
                if each not in others and self._can_go(each):
                    victims.append(each)
                    freed_bytes += self._sizes[each]
                    if freed_bytes >= size and len(victims) >= count:
                        return victims
            if len(chosen) == asked:
                return None
            wanted, asked = 2 * max(wanted, 1 << 20), len(chosen)

    def _can_go(self, chunk: int) -> bool:
        """Whether its room is free when it has gone; what is lent is asked back."""
        memory = self._memories[chunk]
        self._pins.revoke(memory)
        return not self._pins.is_pinned(memory)

    def set_owned(self, mine: Mask) -> None:
        """These are this node's."""
        self.owned = mine
        share_bytes = int(np.asarray(self._sizes, np.int64)[mine].sum())
        chunks = int(np.count_nonzero(mine))
        # Then nothing of it ever goes for another, and nobody needs to hear of uses
        self._fits = share_bytes <= self.budget_bytes_max and chunks <= self._count_max

    def _warn_of_limits(self) -> None:
        total_bytes = sum(self._sizes)
        chunks = len(self._sizes) * min(self.budget_bytes_max / max(total_bytes, 1), 1.0)
        if chunks > self._count_max:
            log.warning(
                "the memory of this node has room for %s chunks, and no more than %s can be held:"
                " raise the limits of descriptors (ulimit -n) and of mappings (sysctl"
                " vm.max_map_count), or put the dataset in larger chunks",
                f"{int(chunks):,}", f"{self._count_max:,}",
            )  # fmt: skip

    # Lending

    def pin(self, borrower: int, chunk: int) -> int | None:
        """The descriptor of a chunk; None where it is not here, or asked back."""
        memory = self._memories.get(chunk)
        if memory is None or self._pins.is_revoked(memory):
            return None
        self._pins.pin(borrower, chunk, memory)
        self.record_hits((chunk,), memory.bytes)
        return memory.descriptor

    def unpin(self, borrower: int, chunks: Iterable[int]) -> None:
        """A borrower returns chunks."""
        self._release_unpinned(self._pins.unpin(borrower, chunks))

    def unpin_all(self, borrower: int) -> None:
        """A borrower has ended."""
        self._release_unpinned(self._pins.unpin_all(borrower))

    def revoked(self, borrower: int) -> list[int]:
        """What a borrower should return."""
        return self._pins.revoked(borrower)

    def _release_unpinned(self, memories: Iterable[SealedMemory]) -> None:
        for memory in memories:
            if memory.descriptor < 0:  # it has gone before
                self._pinned_evicted_bytes -= memory.bytes

    # The whole

    def switch_version(self, sizes: Sequence[int], before: Sequence[int]) -> None:
        """These are the chunks now; `before` has the number that each had, or -1."""
        self.flush_hits()
        after = {was: now for now, was in enumerate(before) if was >= 0}
        for chunk in [chunk for chunk in self._memories if chunk not in after]:
            self.drop(chunk)
        # The policy hears of them in the order in which it would have given them up
        kept = dict.fromkeys([*self._policy.victims(self._held_bytes + 1), *self._memories])
        for chunk in kept:
            self._policy.on_event(Evicted(chunk))
        self._sizes = sizes
        self._memories = {after[chunk]: self._memories[chunk] for chunk in kept}
        self.views = {chunk: memory.view for chunk, memory in self._memories.items()}
        self.present = np.zeros(len(sizes), np.bool_)
        for chunk, memory in self._memories.items():
            self.present[chunk] = True
            self._policy.on_event(Inserted(chunk, memory.bytes))
        self.set_owned(np.array([was >= 0 and self.owned[was] for was in before], np.bool_))

    def memory_of(self, chunk: int) -> SealedMemory | None:
        """Where a chunk is."""
        return self._memories.get(chunk)

    def stats(self) -> dict[str, int]:
        """What is here, and counts since the start."""
        self.flush_hits()
        return {
            **{name: self.counts[name] for name in _COUNTS},
            "memory_bytes": self._held_bytes,
            "memory_chunks": len(self._memories),
            "memory_budget_bytes": self._budget_bytes,
            "memory_used_bytes": self.used_bytes,
            "lent_bytes": self._pins.bytes,
        }

    def close(self) -> None:
        """Let go of all. What others have stays valid."""
        for chunk in [*self._memories]:
            self.drop(chunk)


_COUNTS = ("memory_reads", "memory_read_bytes", "evictions", "refused")
