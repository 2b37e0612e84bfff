"""Which node of a task keeps which chunk: a pure function of the chunks' IDs and sizes and of the
live nodes, so every master computes the same owners. Any thread.

Each chunk prefers nodes by a score that depends on the chunk and the node alone (highest random
weight: Thaler and Ravishankar, 1998). If each chunk got its first choice, shares would differ by
chance: by a third if a node has a hundred chunks. So chunks *propose* to nodes in the order of
their scores, and a node keeps the proposals with the highest scores that fit its capacity (deferred
acceptance: Gale and Shapley, 1962). Then a node with too few bytes takes chunks that prefer it next
from nodes that have enough.

If a node leaves, its chunks propose to other nodes, and few of these nodes' own chunks move. If it
comes back, it has the same chunks as before.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

CAPACITY, FLOOR, ENOUGH = 1.08, 0.93, 0.95
"""Bytes of a node, in units of an equal share: the most that it may have, the least that it should
have, and the least that stays when another node takes chunks. Values nearer to 1 move more chunks
when a node leaves: of 1,000 nodes with 350 chunks each, 1.2 shares move with these values, 1.6 with
1.05 and 0.95, and 3 if shares are to differ by 1 %."""

_STORED_PREFERENCES = 8  # nodes that each chunk prefers; few chunks ever need more
_BLOCK_SCORES = 1 << 21  # computed at once: limits the memory

_FACTORS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_SHIFT = np.uint64(33)

Rows = npt.NDArray[np.int64]
Nodes = npt.NDArray[np.int64]
Scores = npt.NDArray[np.uint64]


class Ownership:
    """For any set of live nodes among `world` nodes."""

    def __init__(self, ids: Sequence[bytes], sizes: npt.NDArray[np.uint64], world: int) -> None:
        halves = np.frombuffer(b"".join(ids), "<u8").reshape(-1, 2)
        self._hashes = _mix(_mix(halves[:, 0]) ^ halves[:, 1])
        self._sizes = sizes.astype(np.float64)
        self._node_hashes = _mix(np.arange(1, world + 1, dtype=np.uint64))
        self._stored = min(_STORED_PREFERENCES, world)
        # The nodes that each chunk prefers, best first, and their scores
        self._nodes = np.empty((len(ids), self._stored), np.int32)
        self._scores = np.empty((len(ids), self._stored), np.uint64)
        for rows in self._blocks(np.arange(len(ids))):
            scores = self._score(rows)
            best = np.argpartition(scores, world - self._stored, axis=1)[:, world - self._stored :]
            of_best = np.take_along_axis(scores, best, axis=1)
            order = np.argsort(of_best, axis=1)[:, ::-1]
            self._nodes[rows] = np.take_along_axis(best, order, axis=1)
            self._scores[rows] = np.take_along_axis(of_best, order, axis=1)

    def owners(self, living: npt.NDArray[np.bool_]) -> Nodes:
        """The owner of each chunk, if `living` are the live nodes; -1 if no node lives."""
        count = len(self._hashes)
        owner = np.full(count, -1, np.int64)
        if not living.any() or not count:
            return owner
        capacity = self._sizes.sum() / np.count_nonzero(living) * CAPACITY
        score = np.full(count, np.iinfo(np.uint64).max, np.uint64)
        free = np.arange(count)
        rejected: list[Rows] = []
        while len(free):
            owner[free], score[free] = self._propose(free, score[free], living)
            rejected.append(free[owner[free] < 0])
            proposed = np.unique(owner[free[owner[free] >= 0]])
            free = self._reject(np.flatnonzero(np.isin(owner, proposed)), owner, score, capacity)
            owner[free] = -1
        self._place_rest(np.concatenate(rejected), owner, living)
        self._fill(owner, living)
        return owner

    def _propose(
        self, rows: Rows, below: Scores, living: npt.NDArray[np.bool_]
    ) -> tuple[Nodes, Scores]:
        """Each chunk's most preferred live node (-1: none) with a score less than `below`, and that
        score."""
        eligible = living[self._nodes[rows]] & (self._scores[rows] < below[:, None])
        first = eligible.argmax(axis=1)
        at = np.arange(len(rows))
        nodes = np.where(eligible[at, first], self._nodes[rows, first], -1).astype(np.int64)
        scores = np.where(eligible[at, first], self._scores[rows, first], 0).astype(np.uint64)
        unknown = np.flatnonzero(nodes < 0) if self._stored < len(self._node_hashes) else at[:0]
        for some in self._blocks(unknown):
            every = self._score(rows[some])
            every[:, ~living] = 0
            every[every >= below[some, None]] = 0
            best = every.argmax(axis=1)
            scores[some] = every[np.arange(len(some)), best]
            nodes[some] = np.where(scores[some] > 0, best, -1)
        return nodes, scores

    def _reject(self, rows: Rows, owner: Nodes, score: Scores, capacity: float) -> Rows:
        """The chunks that their nodes reject, as chunks with higher scores fill the capacity."""
        rows = rows[np.lexsort((~score[rows], owner[rows]))]
        at = owner[rows]
        sizes = self._sizes[rows]
        total = np.cumsum(sizes)
        starts = np.flatnonzero(np.diff(at, prepend=-1))
        before = np.repeat(total[starts] - sizes[starts], np.diff(starts, append=len(rows)))
        return rows[(total - before > capacity) & (total - before > sizes)]  # the first always fits

    def _place_rest(self, rows: Rows, owner: Nodes, living: npt.NDArray[np.bool_]) -> None:
        """Give each chunk that all nodes have rejected (it fits in none) to the node with the
        fewest bytes."""
        held = np.bincount(owner[owner >= 0], self._sizes[owner >= 0], len(living))
        held[~living] = np.inf
        for row in rows[np.lexsort((self._hashes[rows], -self._sizes[rows]))].tolist():
            owner[row] = held.argmin()
            held[owner[row]] += self._sizes[row]

    def _fill(self, owner: Nodes, living: npt.NDArray[np.bool_]) -> None:
        """Move chunks to nodes with too few bytes from nodes with enough; those that prefer the
        node most move first."""
        held = np.bincount(owner, self._sizes, len(living))
        share = held.sum() / np.count_nonzero(living)
        low = np.flatnonzero(living & (held < FLOOR * share))
        rows, place = np.nonzero(np.isin(self._nodes, low))
        nodes = self._nodes[rows, place]
        order = np.lexsort((~self._scores[rows, place], place, nodes))
        rows, nodes = rows[order], nodes[order]
        for node in low[np.argsort(held[low], kind="stable")].tolist():
            start, end = np.searchsorted(nodes, [node, node + 1]).tolist()
            for row in rows[start:end].tolist():
                if held[node] >= FLOOR * share:
                    break
                size, giver = self._sizes[row], owner[row]
                if giver != node and held[giver] - size >= ENOUGH * share:
                    held[giver] -= size
                    held[node] += size
                    owner[row] = node

    def _score(self, rows: Rows) -> Scores:
        return _mix(self._hashes[rows, None] ^ self._node_hashes[None, :])

    def _blocks(self, rows: Rows) -> list[Rows]:
        step = max(1, _BLOCK_SCORES // len(self._node_hashes))
        return [rows[start : start + step] for start in range(0, len(rows), step)]


def _mix(values: Scores) -> Scores:
    """MurmurHash3's finaliser: each bit of the result depends on all bits."""
    mixed = values ^ (values >> _SHIFT)
    for factor in _FACTORS:
        mixed = mixed * factor
        mixed ^= mixed >> _SHIFT
    return mixed
