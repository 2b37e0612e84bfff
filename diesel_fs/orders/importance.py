"""Draws which samples an epoch trains on, by their importance, and corrects for the draw.

**I/O-oriented importance sampling** (iCache, HPCA 2023, section III-A): the samples of an epoch are
drawn before it begins, from values that earlier epochs have left, so what is not drawn is not read
either. The rule is that of Selective-Backprop (Jiang et al., "Accelerating Deep Learning by
Focusing on the Biggest Losers", arXiv 1910.00762, section 3), which iCache names as its source. A
sample whose value is greater than that of a share c of all samples is drawn with this probability:

    p = floor + (1 - floor) * c ** beta

The source compares a loss with the last 1,024 losses; here the whole table is at hand. It also
takes the greater of floor and c ** beta, of which this is a smooth form. The mean of c ** beta is
1 / (1 + beta), so beta follows from the share of the samples that an epoch is to have. That does
not depend on the values: an epoch's length is known before its draw.

**The draw** takes each sample at most once, with exactly its probability, and always equally many
samples (systematic sampling; Madow, Annals of Mathematical Statistics 20, 1949): the samples are
laid out in random order, each with the length p, and every mark at u, u + 1, u + 2, ... takes the
sample that it falls on.

**Weights.** A mean over the drawn samples prefers those of high value. Multiplied by `share / p`,
each sample's term counts in the mean, over many draws, as often as in an epoch of all samples.

**Substitution** (iCache, section III-C): a drawn sample of low importance that is not in a cache
may be replaced by one that is, and that the epoch has not drawn. Where the cache has no more of
them, whole *packages* are read: iCache packs such samples into packages of at least 1 MiB, repacks
them as importance changes, what was missed first, and takes samples of the packages that it has
loaded for others. Chunks are such packages already. So some chunks are chosen, those of which most
was drawn first; the samples of low importance that were drawn in other chunks are replaced by what
is left of these. A chunk of mostly important samples is no package: it is read for those, and the
others come with it, so nothing is packed anew.

**Homes** (iCache, section III-E: no sample is held by two nodes). iCache looks up which node has a
sample, and reads it from there. Here each sample has a home node, and those of high importance,
which are kept in memory, are dealt to the ranks there; so they are read where they are kept. Those
of low importance fill the parts up, which stay equally long.

All numbers are drawn by the generator of `shuffle.py`, so the same table gives the same draw on
every machine and with every version of numpy. Pure; safe from any thread.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..format.snapshot.reader import Indices
from .shuffle import random_keys

Values = npt.NDArray[np.float32]
"""The importance of n samples; NaN: not known yet. Others are finite and not negative."""

Mask = npt.NDArray[np.bool_]

SHARE_DEFAULT = 0.5
"""That of Selective-Backprop's rule with the exponent 1. (The authors' scripts have the exponent 3,
a quarter of the samples, and train for more epochs.)"""

HIGH_DIVISOR = 5
"""One in so many samples (a fifth) is of high importance. iCache does not say where it draws the
line. With a third, 1 % less of the samples were in memory where samples are substituted."""
_CHANCE_STEPS = 1 << 20
"""Probabilities are multiples of this part: processors raise to a power with other last digits."""
_MARK = 1 << 32  # a length of 1 in whole numbers: sums of them are exact
# Domains of the generator
_TIES, _PLACES, _MARKS, _REPLACED, _REPLACING, _PACKAGES, _HOMES = range(11, 18)


@dataclass(frozen=True, slots=True)
class DrawRule:
    """How likely samples are drawn (see the module).

    `share`: of the samples that an epoch has, above 0 and at most 1. `floor`: the least probability
    of a sample, from 0 to `share`. Raises UsageError for others.
    """

    share: float = SHARE_DEFAULT
    floor: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UsageError(f"bad share {self.share}: it is above 0 and at most 1")
        if not 0 <= self.floor <= self.share:
            raise UsageError(
                f"bad floor {self.floor}: it is at least 0 and at most the share {self.share:g}"
            )

    def length(self, samples: int) -> int:
        """How many of so many samples an epoch has: at least one, where there is any."""
        return min(max(round(self.share * samples), 1), samples)

    def probabilities(self, values: Values, seed: int, epoch: int) -> npt.NDArray[np.float32]:
        """The probability of each sample, as numbers whose sum is `length` but for rounding.

        Samples without a value count as the most important. Equal values are put into a random
        order, which depends on seed and epoch. Raises UsageError for these out of range.
        """
        count = len(values)
        if not count:
            return np.empty(0, np.float32)
        length = self.length(count)
        share = length / count  # of few samples it is not quite `self.share`
        if share == 1 or share <= self.floor or self.floor == self.share:
            return np.full(count, share, np.float32)
        order = _by_value(values, seed, epoch)
        beta = (1 - self.floor) / (share - self.floor) - 1
        # The last value is 1, so that the sum is never 0, however steep the curve is
        curve = ((np.arange(count) + 0.5) / (count - 0.5)) ** beta
        # The sum of a curve over so many points is not quite its integral.
        curve *= (length - self.floor * count) / float(curve.sum())
        found = np.empty(count, np.float32)
        steps = np.rint((self.floor + curve) * _CHANCE_STEPS)
        found[order] = np.clip(steps, 1, _CHANCE_STEPS) / _CHANCE_STEPS
        return found

    def draw(self, probabilities: npt.NDArray[np.float32], seed: int, epoch: int) -> Indices:
        """The samples that are drawn, ascending: `length` of them, each at most once. Raises
        UsageError for a seed or epoch out of range."""
        count = len(probabilities)
        length = self.length(count)
        if length == count:
            return np.arange(count)
        places = _permutation(_PLACES, count, seed, epoch)
        lengths = np.rint(probabilities[places].astype(np.float64) * _MARK).astype(np.int64)
        ends = _stretched(np.cumsum(lengths), length * _MARK)
        first = int(random_keys(_MARKS, 1, seed, epoch)[0] >> np.uint64(32))
        marks = first + np.arange(length) * _MARK
        # A sample of the length 1 may end where the next mark stands: then it has one all the same.
        taken = np.searchsorted(ends, marks, side="right")
        return np.sort(places[np.minimum(_distinct(taken), count - 1)])


def weights(probabilities: npt.NDArray[np.float32], share: float) -> npt.NDArray[np.float32]:
    """What the terms of drawn samples are multiplied by, for an unbiased mean (see the module)."""
    return (share / np.maximum(probabilities, np.finfo(np.float32).tiny)).astype(np.float32)


def substituted(
    drawn: Indices,
    is_low: Mask,
    is_cached: Mask,
    may_replace: Mask,
    chunks: Indices,
    seed: int,
    epoch: int,
) -> tuple[Indices, Indices]:
    """Which of the drawn samples are replaced, as places in `drawn`, and by which samples (see the
    module).

    The masks and `chunks` have a value for each of the n samples: those of low importance, those in
    the cache, those that may replace others if they are not drawn, and the chunk of each. Samples
    in the cache come first; which are replaced by which is random.
    """
    missed = np.flatnonzero(is_low[drawn] & ~is_cached[drawn])
    missed = missed[_permutation(_REPLACED, len(missed), seed, epoch)]
    is_free = may_replace.copy()
    is_free[drawn] = False
    cached = np.flatnonzero(is_free & is_cached)
    cached = cached[_permutation(_REPLACING, len(cached), seed, epoch)[: len(missed)]]
    by_cache, left = np.split(missed, [len(cached)])
    is_free &= is_low & ~is_cached

    count = int(chunks.max(initial=-1)) + 1
    is_package = 2 * np.bincount(chunks[is_low], minlength=count) >= np.bincount(chunks)
    left = left[is_package[chunks[drawn[left]]]]
    # The packages of which most was drawn; as many as it takes until the samples that they have,
    # drawn or free, are as many as were missed.
    packages = np.flatnonzero(is_package & (np.bincount(chunks[may_replace], minlength=count) > 0))
    packages = packages[_permutation(_PACKAGES, len(packages), seed, epoch)]
    own = np.bincount(chunks[drawn[left]], minlength=count)
    packages = packages[np.argsort(-own[packages], kind="stable")]
    gives = np.cumsum((np.bincount(chunks[is_free], minlength=count) + own)[packages])
    packages = packages[: int(np.searchsorted(gives, len(left))) + 1]
    place = np.full(count, len(packages))
    place[packages] = np.arange(len(packages))
    outside = left[place[chunks[drawn[left]]] == len(packages)]
    others = np.flatnonzero(is_free & (place[chunks] < len(packages)))
    others = others[np.argsort(place[chunks[others]], kind="stable")][: len(outside)]
    return (
        np.concatenate((by_cache, outside[: len(others)])),
        np.concatenate((cached, others)),
    )


def home_nodes(count: int, nodes: int, seed: int) -> Indices:
    """The home of each of so many samples: a node, the same in all epochs."""
    return (random_keys(_HOMES, count, seed, 0) % np.uint64(nodes)).astype(np.int64)


def at_home(samples: Indices, is_high: Mask, home: Indices, per_node: int, nodes: int) -> Indices:
    """Drawn samples, of which each node has the next `per_node` (the last one what is left), in
    another order: those of high importance are with their home node, as far as it has room for
    them. The others stay where they are, unless they make room.

    `is_high` and `home` have a value for each of the n samples.
    """
    wrong = np.flatnonzero(is_high[samples])
    wrong = wrong[home[samples[wrong]] != np.minimum(wrong // per_node, nodes - 1)]
    arriving = samples[wrong[np.argsort(home[samples[wrong]], kind="stable")]]
    first_arriving = np.searchsorted(home[arriving], np.arange(nodes + 1))
    found = samples.copy()
    room, displaced = [], []
    for node in range(nodes):
        begin, end = node * per_node, (node + 1) * per_node if node < nodes - 1 else len(samples)
        places = wrong[np.searchsorted(wrong, begin) : np.searchsorted(wrong, end)]
        new = arriving[first_arriving[node] : first_arriving[node + 1]]
        if len(new) > len(places):
            low = np.flatnonzero(~is_high[samples[begin:end]]) + begin
            low = low[: len(new) - len(places)]
            displaced.append(samples[low])
            places = np.concatenate((places, low))
        count = min(len(places), len(new))
        found[places[:count]] = new[:count]
        room.append(places[count:])
        displaced.append(new[count:])
    found[np.concatenate(room)] = np.concatenate(displaced)
    return found


def is_low(probabilities: npt.NDArray[np.float32]) -> Mask:
    """Which samples are of low importance: those that are not drawn as often as the most important
    fifth of all."""
    if not len(probabilities):
        return np.empty(0, np.bool_)
    place = len(probabilities) - max(len(probabilities) // HIGH_DIVISOR, 1)
    low: Mask = probabilities < np.partition(probabilities, place)[place]
    return low


def _by_value(values: Values, seed: int, epoch: int) -> Indices:
    """The samples by rising values; those without a value last, and equal ones at random."""
    mixed = _permutation(_TIES, len(values), seed, epoch)
    # The bits of numbers that are not negative are in the order of the numbers.
    bits = np.where(np.isnan(values), np.float32(np.inf), values)[mixed].view(np.uint32)
    keys = bits.astype(np.uint64) << np.uint64(32) | np.arange(len(mixed), dtype=np.uint64)
    keys.sort()
    return mixed[(keys & np.uint64(0xFFFFFFFF)).astype(np.int64)]


def _permutation(domain: int, count: int, seed: int, epoch: int) -> Indices:
    """The numbers below `count` in random order. (Keys that are all different have one order,
    whatever the sorting does; and to sort them takes a tenth of an argsort.)"""
    bits = np.uint64(max(count - 1, 1).bit_length())
    keys = random_keys(domain, count, seed, epoch) >> bits << bits
    keys |= np.arange(count, dtype=np.uint64)
    keys.sort()
    return (keys & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)


def _stretched(ends: Indices, total: int) -> Indices:
    """Ends of lengths whose sum shall be `total`, but is a little off by rounding."""
    off = total - int(ends[-1])
    count = len(ends)
    return ends + (np.arange(1, count + 1) * off) // count


def _distinct(taken: Indices) -> Indices:
    """Rising places, each at least one greater than that before it."""
    steps = np.arange(len(taken))
    return np.maximum.accumulate(taken - steps) + steps
