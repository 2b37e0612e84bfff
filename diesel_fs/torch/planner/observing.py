"""Learns which files the samples of a dataset open, and compares them with the planned files.

A dataset may list its files, and yet keep them in memory after the first epoch, read them from one
archive, open other files besides, or list other files in each epoch. A plan of files that are never
read costs the store's bandwidth and the mount's memory, so it is worse than no plan. The hooks
report the files that some samples have opened (`../hook/diesel_hook/learning.py`). Some of these
samples are *checked*: their reports are complete, so they show which planned files were opened.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .file_tables import (
    Entries,
    FileTable,
    MountedFiles,
    SampleFiles,
    SampleTable,
    ShownVersion,
    resolved,
    scattered,
)

Paths = Sequence[bytes]
Places = dict[ShownVersion, tuple[Entries, Entries]]
"""The opened or planned files by mount, and for each file the place of its sample in a list of
samples."""

CHECKS_MIN, CHECKS_MAX = 12, 24
"""A plan is judged by the latest checked samples, from `CHECKS_MIN` to `CHECKS_MAX` of them. A
process checks 16 samples when an epoch begins, so one epoch is enough, whatever earlier epochs have
shown."""


class _Check(NamedTuple):
    """The numbers of files of one checked sample."""

    planned: int
    opened: int
    """Planned files that were opened."""
    others: int
    """Opened files of mounts that were not planned."""


class ObservedTable:
    """The files of a dataset's samples: those that it lists, and those that its samples open.

    A sample that was not observed yet has its listed files. An observed sample has its listed
    files, then the other files that it has opened. A plan has failed once checked samples have
    opened less than half of their planned files. Then the list is given up, and only opened files
    are planned, which are *learned* from then on. If these fail, too, or the samples open no files
    of mounts, the table stays empty.
    """

    def __init__(self, name: str, size: int, listed: FileTable | None = None) -> None:
        self.size = size
        self.name = name
        self.listed = listed
        self.learned = FileTable(size)
        self.failures = 0
        self._for_all_ranks = listed
        self._is_seen = np.zeros(size, np.bool_)
        self._checks: deque[_Check] = deque(maxlen=CHECKS_MAX)
        self._is_given_up = False

    def take(self, indices: Entries) -> dict[ShownVersion, SampleFiles]:
        if self._is_given_up:
            return {}
        if self.listed is None:
            return self.learned.take(indices)
        at, is_inside = resolved(indices, self.size)
        is_seen = np.zeros(len(indices), np.bool_)
        is_seen[is_inside] = self._is_seen[at[is_inside]]
        if not is_seen.any():
            return self.listed.take(indices)
        taken: dict[ShownVersion, list[tuple[Entries, SampleFiles]]] = {}
        for table, mask in ((self.learned, is_seen), (self.listed, ~is_seen)):
            [places] = np.nonzero(mask)
            for shown, files in table.take(indices[places]).items():
                taken.setdefault(shown, []).append((places, files))
        return {shown: scattered(parts, len(indices)) for shown, parts in taken.items()}

    def for_all_ranks(self) -> SampleTable:
        return self.learned if self._for_all_ranks is None else self._for_all_ranks

    def add(
        self,
        files: MountedFiles,
        samples: Entries,
        is_checked: npt.NDArray[np.bool_],
        counts: Entries,
        paths: Paths,
        cwd: str,
    ) -> str:
        """Record opened files, as a hook reports them.

        The first `counts[0]` of `paths` are those of `samples[0]`, and so on; `is_checked` has a
        flag for each sample, and relative paths begin at `cwd`. Returns a note for the user if a
        plan has failed, otherwise "". Raises ValueError for malformed arguments.
        """
        if (counts < 0).any() or int(counts.sum()) != len(paths):
            raise ValueError("the numbers of files and of paths differ")
        if np.any((samples < 0) | (samples >= self.size)):
            raise ValueError("a sample is beyond the end of its dataset")
        if self._is_given_up:
            return ""
        found = FileTable(len(samples))
        files.find(found, np.repeat(np.arange(len(samples)), counts).tolist(), paths, cwd)
        opened = _placed(found.take(np.arange(len(samples))))
        for check in self._compared(samples, is_checked, opened):
            self._checks.append(check)
        self._learn(samples, opened)
        return self._judged()

    def _compared(
        self, samples: Entries, is_checked: npt.NDArray[np.bool_], opened: Places
    ) -> list[_Check]:
        if not is_checked.any():
            return []
        count = len(samples)
        [rows] = np.nonzero(is_checked)
        planned, kept, others = (np.zeros(count, np.int64) for _ in range(3))
        taken = self.take(samples[rows])
        for shown, (entries, places) in _placed(taken).items():
            planned += np.bincount(rows[places], minlength=count)
            is_opened = _is_in((entries, rows[places]), opened.get(shown, _NOTHING))
            kept += np.bincount(rows[places[is_opened]], minlength=count)
        for _, places in opened.values():
            others += np.bincount(places, minlength=count)
        columns = (planned[rows], kept[rows], others[rows] - kept[rows])
        checks = [_Check(*row) for row in zip(*(each.tolist() for each in columns), strict=True)]
        return [each for each in checks if each.planned]

    def _learn(self, samples: Entries, opened: Places) -> None:
        """Enter the opened files of samples that were not observed before."""
        is_new = np.zeros(len(samples), np.bool_)
        is_new[np.unique(samples, return_index=True)[1]] = True
        is_new &= ~self._is_seen[samples]
        more, listed = opened, {}
        if self.listed is not None:
            listed = _placed(self.listed.take(samples))
            more = {
                shown: (entries[is_more], places[is_more])
                for shown, (entries, places) in opened.items()
                for is_more in [~_is_in((entries, places), listed.get(shown, _NOTHING))]
            }
            is_new &= _has_any(more, len(samples))  # without other files, the list is enough
        for found in (listed, more):
            for shown, (entries, places) in found.items():
                mine = is_new[places]
                self.learned.add(shown, samples[places[mine]], entries[mine])
        self._is_seen[samples[is_new]] = True

    def _judged(self) -> str:
        """Give up a plan that has failed. Returns a note for the user, or ""."""
        planned = sum(each.planned for each in self._checks)
        if len(self._checks) < CHECKS_MIN or 2 * sum(e.opened for e in self._checks) >= planned:
            return ""
        failed = [each for each in self._checks if each.opened < each.planned]
        opens_others = 2 * sum(each.others > 0 for each in failed) >= len(failed)
        self._checks.clear()
        self.failures += 1
        if self.listed is not None and opens_others:
            self.listed, self.learned = None, FileTable(self.size)
            self._is_seen[:] = False
            return f"{self.name} opens other files than those that it lists: they are learned"
        self._is_given_up = True
        if opens_others:
            return f"{self.name} opens other files in each epoch: nothing is planned for it"
        return (
            f"{self.name} does not open most of its files, as if it kept them in memory or read"
            " them from elsewhere: nothing is planned for it"
        )

    def describe(self) -> str:
        """A note for the user about the learned files; "" if there is nothing to say."""
        found = self.learned.found
        if self._is_given_up or (self.listed is not None and not found):
            return ""
        if not found:
            return f"{self.name} opened no visible file of a mount: nothing is planned for it"
        each = self.learned.files / found
        samples = f"{found:,} of {self.size:,} samples"
        return f"learned which files {self.name} reads: those of {samples}" + (
            f", {each:.3g} files each" if each > 1 else ""
        )


_NOTHING = np.empty(0, np.int64), np.empty(0, np.int64)


def _placed(taken: dict[ShownVersion, SampleFiles]) -> Places:
    """The same files, each with the place of its sample."""
    return {
        shown: (
            files.entries.astype(np.int64),
            np.repeat(np.arange(len(files.ends)), np.diff(files.ends, prepend=0)),
        )
        for shown, files in taken.items()
    }


def _is_in(some: tuple[Entries, Entries], others: tuple[Entries, Entries]) -> npt.NDArray[np.bool_]:
    """For each of some files: whether the others have it for the same sample."""
    one, other = (places << 32 | entries for entries, places in (some, others))
    return np.isin(one, other)


def _has_any(opened: Places, count: int) -> npt.NDArray[np.bool_]:
    """For each of `count` samples: whether it has a file."""
    found = np.zeros(count, np.bool_)
    for _, places in opened.values():
        found[places] = True
    return found
