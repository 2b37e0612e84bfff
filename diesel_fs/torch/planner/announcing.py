"""Announces the epochs of one loader of a training process to the mounts that it reads."""

from contextlib import suppress

from ...errors import DieselError, UsageError
from ...mounts.plans.control import Control, explicit
from .file_tables import Entries, FileTable, SampleFiles, SampleTable, ShownVersion


class LoaderStreams:
    """The streams of one loader: one in each mount that has files of its dataset.

    The training process counts positions in indices of samples; a stream counts only the files of
    its mount. The public methods raise DieselError if a mount refuses an announcement, and
    ConflictError if it no longer shows the version in which the files were found.
    """

    def __init__(self, name: str, controls: "Controls") -> None:
        self._name = name
        self._controls = controls
        self._table: SampleTable = FileTable(0)
        self.epoch = -1
        self._lag_entries = 0
        self._orders: dict[ShownVersion, SampleFiles] = {}  # of the current epoch, as far as known
        self._announced_to: set[ShownVersion] = set()  # the mounts that know the current epoch
        self._is_planned = False
        self._failures = 0  # the table's `failures` when the epoch began
        self.announced = 0  # the number of announced entries, in epochs that have begun
        self.planned_epochs = 0  # the number of these epochs with at least one announced entry

    def begin(self, table: SampleTable, epoch: int, lag_entries: int, indices: Entries) -> None:
        """An epoch begins. `indices` are its order as far as it is known. The workers may read up
        to `lag_entries` places apart in this order."""
        self._table, self.epoch, self._lag_entries = table, epoch, lag_entries
        self._orders, self._is_planned, self._failures = {}, False, table.failures
        before, self._announced_to = self._announced_to, set()
        try:
            self.more(indices)
        finally:
            for shown in before - self._announced_to:
                with suppress(DieselError):  # the mount is gone, or no longer knows the stream
                    self._controls.of(shown).withdraw(self._name)

    def foresee(self, table: SampleTable, epoch: int, indices: Entries) -> None:
        """Announce a further epoch, which will probably have this order."""
        if self._has_failed():
            return
        for shown, files in table.take(indices).items():
            if shown in self._announced_to and len(files.entries):
                order = explicit(epoch=epoch, entries=files.entries, exact=False)
                self._controls.of(shown).extend(self._name, [order])

    def more(self, indices: Entries) -> None:
        """Announce that the current epoch continues with these indices."""
        if self._has_failed():
            return
        for shown, files in self._table.take(indices).items():
            known = self._orders.get(shown)
            self._orders[shown] = files if known is None else known.then(files)
            self._announce(shown, files)

    def cut(self, position: int) -> None:
        """Withdraw the announced order of the current epoch from this position on."""
        if self._has_failed():
            return
        for shown, known in self._orders.items():
            self._orders[shown] = left = known.first(position)
            self._announced_to.discard(shown)
            self._announce(shown, left)

    def progress(self, position: int) -> None:
        """Tell the mounts that the loop has received the samples before this position."""
        if self._has_failed():
            self.withdraw()
        for shown in self._announced_to:
            files = len(self._orders[shown].first(position).entries)
            with suppress(UsageError):  # the mount has seen the end of the epoch already
                self._controls.of(shown).progress(self._name, files, self.epoch)

    def withdraw(self) -> None:
        """End all streams of this loader."""
        for shown in self._announced_to:
            self._controls.of(shown).withdraw(self._name)
        self._announced_to.clear()

    def _has_failed(self) -> bool:
        """Whether the samples did not open the files that were planned for this epoch. Then nothing
        more of the epoch is announced; the next epoch may have other files."""
        return self._table.failures > self._failures

    def _announce(self, shown: ShownVersion, files: SampleFiles) -> None:
        if not len(files.entries):
            return
        order = explicit(epoch=self.epoch, entries=files.entries)
        control = self._controls.of(shown)
        if shown in self._announced_to:
            control.extend(self._name, [order])
        else:
            control.announce(self._name, [order], lag_entries=self._lag_entries)
            self._announced_to.add(shown)
        self.announced += len(files.entries)
        self.planned_epochs += not self._is_planned
        self._is_planned = True


class Controls:
    """The control connections of the planner to mounts, one for each version that a mount shows."""

    def __init__(self) -> None:
        self._controls: dict[ShownVersion, Control] = {}

    def of(self, shown: ShownVersion) -> Control:
        """The connection to a mount, which is made at the first call. Raises DieselError if the
        mount is gone, shows another version, or accepts no plans."""
        found = self._controls.get(shown)
        if found is None:
            mount, identity, version = shown
            found = Control.connect(mount, identity=identity, version=version)
            if not found.accepts_plans:
                found.close()
                raise UsageError(
                    f"the mount on {mount} takes no plans",
                    advice="mount it again: its prefetch worker does not run",
                )
            self._controls[shown] = found
        return found

    @property
    def mounts(self) -> set[str]:
        return {shown.mount for shown in self._controls}

    def close(self) -> None:
        for each in self._controls.values():
            each.close()
        self._controls.clear()
