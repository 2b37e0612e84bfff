"""Draws the samples of an epoch by their importance, and corrects for the draw.

**I/O-oriented importance sampling** (iCache, HPCA 2023, section III-A): the samples of an epoch are
drawn before it begins, from the values of earlier epochs, so samples that are not drawn are not
read. The rule is that of Selective-Backprop (Jiang et al., "Accelerating Deep Learning by Focusing
on the Biggest Losers", arXiv 1910.00762, section 3), iCache's source. A sample whose value is
greater than that of a share c of all samples is drawn with this probability:

    p = floor + (1 - floor) * c ** beta

Selective-Backprop compares a loss with the last 1,024 losses, not with those of all samples, and
takes the greater of floor and c ** beta, of which this formula is a smooth form. The mean of
c ** beta is 1 / (1 + beta), so beta follows from the floor and the share of samples in an epoch.
Neither depends on the values, so an epoch's length is known before its draw.

**The draw** is systematic (Madow, Annals of Mathematical Statistics 20, 1949): the samples lie in
random order, each with the length p, and the marks at u, u + 1, u + 2, ... take the samples on
which they fall. So each sample is drawn at most once, with exactly its probability.

**Weights.** A mean over the drawn samples prefers those of high value. Multiplied by `share / p`,
each sample's term counts, over many draws, as often as in an epoch of all samples.

**Substitution** (iCache, section III-C): a drawn sample of low importance that is not in a cache
may be replaced by a cached sample that was not drawn. When the cache has no more such samples,
iCache takes substitutes from *packages* of at least 1 MiB, which it repacks as importance changes.
Here chunks are the packages, and nothing is repacked: the chunks with the most drawn samples are
chosen, and their other samples replace drawn samples of low importance in other chunks. A chunk of
mostly important samples is not used as a package.

**Homes** (iCache, section III-E: no two nodes hold one sample). iCache reads a sample from the node
that has it. Here each sample has a home node. Samples of high importance, which are kept in memory,
go to the ranks of their home; the others fill the parts up to equal lengths.

All numbers are drawn by the generator of `shuffle.py`, so every machine draws the same. Pure; safe
from any thread.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from ..format.snapshot.reader import Indices
from .shuffle import random_keys

Values = npt.NDArray[np.float32]
"""The importance of n samples, finite and not negative; NaN if not known yet."""

Mask = npt.NDArray[np.bool_]

SHARE_DEFAULT = 0.5
"""The fraction of samples that Selective-Backprop draws with beta = 1. (The authors' scripts have
beta = 3, thus a quarter of the samples, and more epochs.)"""

HIGH_DIVISOR = 5
"""A fifth of the samples is of high importance; iCache names no limit. With a third, 1 % fewer
samples were in memory under substitution."""
_CHANCE_STEPS = 1 << 20
"""Probabilities are rounded to multiples of 1 / `_CHANCE_STEPS`, since processors differ in the
last digits of powers."""
_MARK = 1 << 32  # stands for a probability of 1, so that sums of whole numbers are exact
# Domains of `random_keys`
_TIES, _PLACES, _MARKS, _REPLACED, _REPLACING, _PACKAGES, _HOMES = range(11, 18)


@dataclass(frozen=True, slots=True)
class DrawRule:
    """How the samples of an epoch are drawn.

    `share`: the fraction of samples in an epoch, above 0 and at most 1. `floor`: the least
    probability of a sample, from 0 to `share`. Raises UsageError for other numbers.
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
        """The number of samples in an epoch."""
        return min(max(round(self.share * samples), 1), samples)

    def probabilities(self, values: Values, seed: int, epoch: int) -> npt.NDArray[np.float32]:
        """The probability of each sample to be drawn; their sum is `length`, up to rounding.
        Samples without a value count as the most important. Equal values get a random order. Raises
        UsageError for a seed or epoch out of range."""
        count = len(values)
        if not count:
            return np.empty(0, np.float32)
        length = self.length(count)
        share = length / count  # for few samples not quite `self.share`
        if share == 1 or share <= self.floor or self.floor == self.share:
            return np.full(count, share, np.float32)
        order = _by_value(values, seed, epoch)
        beta = (1 - self.floor) / (share - self.floor) - 1
        # The last value is 1, so that the sum is never 0, however steep the curve
        curve = ((np.arange(count) + 0.5) / (count - 0.5)) ** beta
        # The sum of a curve over points is not quite its integral
        curve *= (length - self.floor * count) / float(curve.sum())
        found = np.empty(count, np.float32)
        steps = np.rint((self.floor + curve) * _CHANCE_STEPS)
        found[order] = np.clip(steps, 1, _CHANCE_STEPS) / _CHANCE_STEPS
        return found

    def draw(self, probabilities: npt.NDArray[np.float32], seed: int, epoch: int) -> Indices:
        """Draw `length` samples by the result of `probabilities`. Returns their numbers, ascending.
        Raises UsageError for a seed or epoch out of range."""
        count = len(probabilities)
        length = self.length(count)
        if length == count:
            return np.arange(count)
        places = _permutation(_PLACES, count, seed, epoch)
        lengths = np.rint(probabilities[places].astype(np.float64) * _MARK).astype(np.int64)
        ends = _stretched(np.cumsum(lengths), length * _MARK)
        first = int(random_keys(_MARKS, 1, seed, epoch)[0] >> np.uint64(32))
        marks = first + np.arange(length) * _MARK
        # Stretching may put two marks into a sample of the length 1; it still takes only one
        taken = np.searchsorted(ends, marks, side="right")
        return np.sort(places[np.minimum(_distinct(taken), count - 1)])


def weights(probabilities: npt.NDArray[np.float32], share: float) -> npt.NDArray[np.float32]:
    """The factor of each drawn sample's loss with which the mean is unbiased. `share` is the
    fraction of all samples that was drawn."""
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
    """Choose the drawn samples that others shall replace. Returns two arrays of equal length:
    places in `drawn`, and the substitutes of the samples there.

    The masks and `chunks` have a value for each sample of the dataset. `may_replace` says whether a
    sample may replace others if it is not drawn. Cached samples are used before others.
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
    # Choose the packages with the most drawn samples, until their samples, drawn or free, are as
    # many as the missed ones
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
    """The home node of each sample, the same in all epochs."""
    return (random_keys(_HOMES, count, seed, 0) % np.uint64(nodes)).astype(np.int64)


def at_home(samples: Indices, is_high: Mask, home: Indices, per_node: int, nodes: int) -> Indices:
    """Reorder drawn samples so that those of high importance are in the part of their home node, as
    far as the part has room. Other samples change places only to make room.

    The part of the first node is the first `per_node` of `samples`, and so on; the last node's part
    is the remainder. `is_high` and `home` have a value for each sample of the dataset.
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
    """For each sample: whether it is less probable than all of the most important fifth."""
    if not len(probabilities):
        return np.empty(0, np.bool_)
    place = len(probabilities) - max(len(probabilities) // HIGH_DIVISOR, 1)
    low: Mask = probabilities < np.partition(probabilities, place)[place]
    return low


def _by_value(values: Values, seed: int, epoch: int) -> Indices:
    """Samples without a value come last. Equal values are in random order."""
    mixed = _permutation(_TIES, len(values), seed, epoch)
    # As integers, the bits of non-negative floats have the same order
    bits = np.where(np.isnan(values), np.float32(np.inf), values)[mixed].view(np.uint32)
    keys = bits.astype(np.uint64) << np.uint64(32) | np.arange(len(mixed), dtype=np.uint64)
    keys.sort()
    return mixed[(keys & np.uint64(0xFFFFFFFF)).astype(np.int64)]


def _permutation(domain: int, count: int, seed: int, epoch: int) -> Indices:
    """The numbers below `count` in random order. They are the lower bits of the sorted keys, so all
    keys differ, every sort gives the same result, and it takes a tenth of an argsort's time."""
    bits = np.uint64(max(count - 1, 1).bit_length())
    keys = random_keys(domain, count, seed, epoch) >> bits << bits
    keys |= np.arange(count, dtype=np.uint64)
    keys.sort()
    return (keys & ((np.uint64(1) << bits) - np.uint64(1))).astype(np.int64)


def _stretched(ends: Indices, total: int) -> Indices:
    """Spread the rounding error of the sum over the ends, so that the last is `total`."""
    off = total - int(ends[-1])
    count = len(ends)
    return ends + (np.arange(1, count + 1) * off) // count


def _distinct(taken: Indices) -> Indices:
    """Raise the elements of an ascending array as little as makes them all different."""
    steps = np.arange(len(taken))
    return np.maximum.accumulate(taken - steps) + steps
