"""Announces the epochs of one loader of a training process to the mounts that it reads."""

from contextlib import suppress

import numpy as np

from ...errors import UsageError
from ...mounts.plans.control import Control, explicit
from .file_tables import Entries, FileTable, ShownVersion


class LoaderStreams:
    """The streams of one loader: one in each mount that has files of its dataset.

    Positions of the training process count all indices of its order; those of a stream count only
    the files of its mount. Methods raise DieselError: ConflictError where a mount does not show the
    version any more in which the files were found.
    """

    def __init__(self, name: str, controls: "Controls") -> None:
        self._name = name
        self._controls = controls
        self._table = FileTable(0)
        self._epoch = -1
        self._lag_entries = 0
        self._orders: dict[ShownVersion, Entries] = {}  # of the current epoch, as far as known
        self._announced_to: set[ShownVersion] = set()  # where the current epoch is announced
        self._is_planned = False
        self.announced = 0  # entries, of epochs that have begun
        self.planned_epochs = 0  # of which any entry was announced

    def begin(self, table: FileTable, epoch: int, lag_entries: int, indices: Entries) -> None:
        """A new epoch begins, in this order (as far as it is known)."""
        self._table, self._epoch, self._lag_entries = table, epoch, lag_entries
        self._orders, self._is_planned = {}, False
        self._announced_to.clear()
        self.more(indices)

    def foresee(self, table: FileTable, epoch: int, indices: Entries) -> None:
        """A further epoch that will probably come in this order."""
        for shown, entries in table.subset(indices).entries.items():
            files = entries[entries >= 0]
            if shown in self._announced_to and len(files):
                order = explicit(epoch=epoch, entries=files, exact=False)
                self._controls.of(shown).extend(self._name, [order])

    def more(self, indices: Entries) -> None:
        """The current epoch goes on with these."""
        for shown, entries in self._table.subset(indices).entries.items():
            known = self._orders.get(shown)
            self._orders[shown] = entries if known is None else np.concatenate((known, entries))
            self._announce(shown, entries)

    def cut(self, position: int) -> None:
        """From this position on the order was foretold wrong."""
        for shown, known in self._orders.items():
            self._orders[shown] = known[:position]
            self._announced_to.discard(shown)
            self._announce(shown, known[:position])

    def progress(self, position: int) -> None:
        """The loop has received so many indices of the current epoch."""
        for shown in self._announced_to:
            files = int(np.count_nonzero(self._orders[shown][:position] >= 0))
            with suppress(UsageError):  # the mount has seen the end of the epoch already
                self._controls.of(shown).progress(self._name, files, self._epoch)

    def withdraw(self) -> None:
        """The process has ended."""
        for shown in self._announced_to:
            self._controls.of(shown).withdraw(self._name)
        self._announced_to.clear()

    def _announce(self, shown: ShownVersion, entries: Entries) -> None:
        """Announce these entries of the current epoch, or more of them."""
        files = entries[entries >= 0]
        if not len(files):
            return
        order, control = explicit(epoch=self._epoch, entries=files), self._controls.of(shown)
        if shown in self._announced_to:
            control.extend(self._name, [order])
        else:
            control.announce(self._name, [order], lag_entries=self._lag_entries)
            self._announced_to.add(shown)
        self.announced += len(files)
        self.planned_epochs += not self._is_planned
        self._is_planned = True


class Controls:
    """The connections to the mounts' control sockets."""

    def __init__(self) -> None:
        self._controls: dict[ShownVersion, Control] = {}

    def of(self, shown: ShownVersion) -> Control:
        """The connection for plans of this version. Raises DieselError where the mount takes no
        plans."""
        found = self._controls.get(shown)
        if found is None:
            mount, identity, version = shown
            found = Control.connect(mount, identity=identity, version=version)
            if not found.accepts_plans:
                found.close()
                raise UsageError(
                    f"the mount on {mount} takes no plans",
                    advice="mount it with --session native or kernel",
                )
            self._controls[shown] = found
        return found

    def close(self) -> None:
        """Close all connections."""
        for each in self._controls.values():
            each.close()
        self._controls.clear()
