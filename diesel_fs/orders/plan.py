"""Plans: the files that each reader will read, in order, announced before it reads them.

A *stream* is one reader; it has *epochs*, each with its entries (indices of files in the snapshot)
in order. A *plan* is all streams that are announced to a mount. Plans come over the control socket
or from lists of files (`mounts/plans/`); the mount's prefetch planner loads files in their order.

All are immutable values, with private, read-only copies of their arrays.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import UsageError
from .computed import ComputedOrder

Entries: TypeAlias = npt.NDArray[np.uint32]
"""Entry indices have 4 bytes each, as in a snapshot."""

NO_ENTRIES: Entries = np.empty(0, np.uint32)

EntryOrder: TypeAlias = "Sequence[int] | npt.NDArray[np.int64] | npt.NDArray[np.uint32]"

Bounds: TypeAlias = npt.NDArray[np.int64]
"""The position after the last entry of each batch of an epoch, ascending."""

FileMask: TypeAlias = npt.NDArray[np.bool_]
"""For each entry: whether it is a file."""

STREAM_NAME = re.compile(r"[A-Za-z0-9._:-]{1,64}")

STREAMS_MAX = 64
"""The most streams of a plan: enough for 16 ranks of a node, their validation sets and some other
jobs. Each decision of the planner looks at every stream."""

EPOCH_ENTRIES_MAX = 1 << 26
"""More than 50 times the files of ImageNet-1K; 256 MB."""

EPOCHS_MAX = 8
"""The most epochs of one stream at a time, including the current one."""

PLAN_ENTRIES_MAX = 1 << 27
"""The most entries of all streams together, counted in each epoch: 512 MB."""

EPOCH_NUMBER_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Epoch:
    """The reads of one stream in one epoch. Raises UsageError for malformed arrays.

    `entries` may leave files out and repeat them. `exact` is False for a prediction, which may be
    replaced when the epoch begins. `bounds` is None if the batches are not known. `computed` has
    parameters that give exactly these entries; None if the order cannot be computed.
    """

    number: int
    entries: Entries
    exact: bool = True
    bounds: Bounds | None = None
    computed: ComputedOrder | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.number <= EPOCH_NUMBER_MAX:
            raise UsageError(f"bad epoch number {self.number}")
        object.__setattr__(self, "entries", _own_entries(self.entries))
        if self.bounds is not None:
            object.__setattr__(self, "bounds", _bounds(self.bounds, len(self.entries)))

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def batch_entries_max(self) -> int:
        """The size of the largest batch; 0 if the batches are not known."""
        if self.bounds is None or not len(self.bounds):
            return 0
        return int(np.diff(self.bounds, prepend=0).max())

    def appended(self, more: "Epoch") -> "Epoch":
        bounds = None
        if self.bounds is not None and more.bounds is not None:
            bounds = np.concatenate([self.bounds, more.bounds + len(self)])
        entries = np.concatenate([self.entries, more.entries])
        return Epoch(self.number, entries, self.exact and more.exact, bounds)

    def replaced(self, position: int, rest: "Epoch") -> "Epoch":
        """This epoch up to `position`, then `rest`."""
        bounds = None
        if rest.bounds is not None and self.bounds is not None:
            before = self.bounds[self.bounds <= position]
            bounds = np.concatenate([before, rest.bounds + position])
        entries = np.concatenate([self.entries[:position], rest.entries])
        return Epoch(self.number, entries, rest.exact, bounds)


@dataclass(frozen=True, slots=True, eq=False)
class Stream:
    """One reader and its epochs, by rising number. Raises UsageError for bad values.

    `tentative`: a program has read a list of these files, which does not prove that it will read
    the files in that order. `lag_entries`: how many entries apart in the order the workers of this
    reader may be (workers x prefetch x batch); 0 if not known.
    """

    name: str
    epochs: tuple[Epoch, ...]
    tentative: bool = False
    lag_entries: int = 0

    def __post_init__(self) -> None:
        if not STREAM_NAME.fullmatch(self.name):
            raise UsageError(
                f"bad stream name {self.name!r}",
                advice="a name is 1 to 64 letters, digits, '.', '_', ':' or '-'",
            )
        if len(self.epochs) > EPOCHS_MAX:
            raise UsageError(
                f"stream {self.name} has {len(self.epochs)} epochs (at most {EPOCHS_MAX})",
                advice="announce later epochs when earlier ones have been read",
            )
        numbers = [epoch.number for epoch in self.epochs]
        if any(one >= other for one, other in pairwise(numbers)):
            raise UsageError(f"the epochs of stream {self.name} do not rise: {numbers}")
        if not 0 <= self.lag_entries <= EPOCH_ENTRIES_MAX:
            raise UsageError(f"bad lag {self.lag_entries} of stream {self.name}")

    def epoch(self, number: int) -> Epoch:
        """Raises UsageError if there is none."""
        for epoch in self.epochs:
            if epoch.number == number:
                return epoch
        raise UsageError(f"stream {self.name} has no epoch {number}")

    def extended(self, epochs: Sequence[Epoch]) -> "Stream":
        """Add epochs. If the first has the number of this stream's last epoch, its entries are
        appended to that epoch."""
        own, more = list(self.epochs), list(epochs)
        if own and more and own[-1].number == more[0].number:
            own[-1] = own[-1].appended(more.pop(0))
        return replace(self, epochs=(*own, *more))

    def replaced(self, epoch: Epoch, position: int = 0) -> "Stream":
        """Replace the epoch of the same number, from `position` on. Raises UsageError if there is
        no such epoch or position."""
        old = self.epoch(epoch.number)
        if not 0 <= position <= len(old):
            raise UsageError(f"epoch {old.number} of stream {self.name} has no position {position}")
        new = old.replaced(position, epoch) if position else epoch
        return replace(self, epochs=tuple(new if each is old else each for each in self.epochs))


def check_plan(
    streams: Collection[Stream],
    new_epochs: Sequence[Epoch],
    is_file: FileMask,
    *,
    entries_max: int = PLAN_ENTRIES_MAX,
) -> None:
    """Check all streams of a plan after a change that adds `new_epochs`. Raises UsageError if the
    plan is beyond the limits above, or a new epoch names an entry that is no file."""
    if len(streams) > STREAMS_MAX:
        raise UsageError(
            f"{len(streams) - 1} streams are announced (at most {STREAMS_MAX})",
            advice="withdraw one first",
        )
    for epoch in new_epochs:
        if not len(epoch):
            continue
        if (last := int(epoch.entries.max())) >= len(is_file):
            raise UsageError(f"epoch {epoch.number} names entry {last} of {len(is_file)}")
        files = is_file[epoch.entries]
        if not files.all():
            position = int(np.argmin(files))
            raise UsageError(
                f"epoch {epoch.number} names entry {epoch.entries[position]} (position {position}):"
                " no file"
            )
    total = sum(len(epoch) for stream in streams for epoch in stream.epochs)
    if total > entries_max:
        raise UsageError(f"the plan has {total} positions (at most {entries_max})")


def _own_entries(entries: EntryOrder) -> Entries:
    array = np.asarray(entries)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and len(array)):
        raise UsageError("an order is one row of entry indices")
    if len(array) > EPOCH_ENTRIES_MAX:
        raise UsageError(f"an epoch of {len(array)} entries (at most {EPOCH_ENTRIES_MAX})")
    if len(array) and (int(array.min()) < 0 or int(array.max()) >= 1 << 32):
        raise UsageError("an order names an entry that is not 0 to 2^32 - 1")
    if array.dtype == np.uint32 and array.flags.owndata and not array.flags.writeable:
        return array  # a copy that was made here
    own = array.astype(np.uint32)
    own.flags.writeable = False
    return own


def _bounds(bounds: "Sequence[int] | Bounds", length: int) -> Bounds:
    array = np.asarray(bounds)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and len(array)):
        raise UsageError("batch bounds are one row of positions")
    if len(array) > length:
        raise UsageError(f"{len(array)} batches of {length} entries")
    own = array.astype(np.int64)
    if len(own) and (own[0] <= 0 or own[-1] > length or (np.diff(own) <= 0).any()):
        raise UsageError("batch bounds do not rise within the epoch")
    own.flags.writeable = False
    return own
