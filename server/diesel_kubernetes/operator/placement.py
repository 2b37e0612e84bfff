"""Decides on which nodes a training job should run, and whether its datasets fit. Pure.

The score of a node is that of DLCache (section III-B), and admission is its algorithm 1. Both count
*blocks*: parts of datasets in nodes' caches. Fractions are exact, so equal nodes have equal scores.
`OPERATOR.md` defines free storage, and how blocks are counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

BLOCK_BYTES = 4 << 20

Amounts = Mapping[str, Fraction]
"""Each amount is in the resource's own unit (`cpu`, `nvidia.com/gpu`)."""

STORAGE = "ephemeral-storage"


@dataclass(frozen=True, slots=True)
class NodeState:
    name: str
    hostname: str
    labels: Mapping[str, str]
    allocatable: Amounts
    requested: Amounts = field(default_factory=dict)
    cached_bytes: int = 0
    preemptible_bytes: int = 0
    """This part of `cached_bytes` may be evicted: no pod reads these datasets, and the job does not
    need them."""

    @property
    def free_bytes(self) -> int:
        """`OPERATOR.md` defines free storage."""
        left = self.allocatable.get(STORAGE, Fraction()) - self.requested.get(STORAGE, Fraction())
        return max(0, int(left) - self.cached_bytes)

    def has_room(self, requests: Amounts) -> bool:
        """Whether the node has the requested resources free: I(i, j) of DLCache."""
        return all(
            amount <= self.allocatable.get(name, Fraction()) - self.requested.get(name, Fraction())
            for name, amount in requests.items()
            if amount
        )

    def matches(self, selector: Mapping[str, str]) -> bool:
        return all(self.labels.get(name) == value for name, value in selector.items())


@dataclass(frozen=True, slots=True)
class Holding:
    content_bytes: int
    shares: Mapping[str, Fraction] = field(default_factory=dict)
    """Shares are numbers from 0 to 1, by the node's name."""

    @property
    def blocks(self) -> int:
        """The number of the dataset's blocks: D of DLCache."""
        return max(1, -(-self.content_bytes // BLOCK_BYTES))

    @property
    def cached_share(self) -> Fraction:
        """The share that the nodes have together: K/D of DLCache."""
        return min(Fraction(1), sum(self.shares.values(), Fraction()))


@dataclass(frozen=True, slots=True)
class Scored:
    node: NodeState
    score: Fraction


def score(*, has_room: bool, k: Fraction, cached: Fraction, d: int, alpha: Fraction) -> Fraction:
    """The score of node i for job j (DLCache, section III-B):
    score(i, j) = I(i, j) + (k + alpha * (D - K)) / D.

    `has_room` is I. The job's datasets have `d` (D) blocks, of which `k` lie on the node and
    `cached` (K) on any node. `alpha` is the node's part of all free storage.
    """
    return has_room + (k + alpha * (d - cached)) / d


def in_order(
    nodes: Sequence[NodeState], holdings: Sequence[Holding], requests: Amounts
) -> list[Scored]:
    """Sorts by decreasing score, then by name. The blocks of several datasets count together."""
    free_bytes = sum(each.free_bytes for each in nodes)
    d = sum(each.blocks for each in holdings) or 1
    cached = sum((each.cached_share * each.blocks for each in holdings), Fraction())
    scored = []
    for node in nodes:
        held = (each.shares.get(node.name, Fraction()) * each.blocks for each in holdings)
        k = min(sum(held, Fraction()), Fraction(d))
        alpha = Fraction(node.free_bytes, free_bytes) if free_bytes else Fraction()
        room = node.has_room(requests)
        scored.append(Scored(node, score(has_room=room, k=k, cached=cached, d=d, alpha=alpha)))
    return sorted(scored, key=lambda each: (-each.score, each.node.name))


@dataclass(frozen=True, slots=True)
class Admission:
    """The figures are sums over nodes. `needed_bytes` are in no cache yet."""

    needed_bytes: int
    free_bytes: int
    preemptible_bytes: int

    @property
    def fits(self) -> bool:
        """The condition of DLCache's algorithm 1, line 3."""
        return self.needed_bytes <= self.free_bytes + self.preemptible_bytes


def admission(nodes: Sequence[NodeState], holdings: Sequence[Holding]) -> Admission:
    """`preemptible_bytes` of the nodes must not count the job's own datasets (`holdings`)."""
    needed = sum(
        int(each.content_bytes * (1 - each.cached_share)) for each in holdings if each.content_bytes
    )
    return Admission(
        needed_bytes=needed,
        free_bytes=sum(each.free_bytes for each in nodes),
        preemptible_bytes=sum(each.preemptible_bytes for each in nodes),
    )
