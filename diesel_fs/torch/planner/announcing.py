"""Announces the epochs of one loader of a training process to the mounts that it reads."""

from contextlib import suppress

import numpy as np

from ...errors import UsageError
from ...mounts.plans.control import Control, explicit
from .file_tables import Entries, FileTable


class LoaderStreams:
    """The streams of one loader: one in each mount that has files of its dataset.

    Positions of the training process count all indices of its order; those of a stream count only
    the files of its mount.
    """

    def __init__(self, name: str, controls: "Controls") -> None:
        self._name = name
        self._controls = controls
        self._table = FileTable(0)
        self._epoch = -1
        self._lag_entries = 0
        self._orders: dict[str, list[Entries]] = {}  # by mount, of the current epoch
        self._is_planned = False  # whether any of this epoch is announced
        self.announced = 0  # entries, of epochs that have begun
        self.planned_epochs = 0  # of which any entry was announced

    def begin(self, table: FileTable, epoch: int, lag_entries: int, indices: Entries) -> None:
        """A new epoch begins, in this order (as far as it is known). Raises DieselError."""
        self._table, self._epoch, self._lag_entries = table, epoch, lag_entries
        self._orders = {}
        self._is_planned = False
        for mount, entries in _in_mounts(table, indices).items():
            self._orders[mount] = [entries]
            self._announce(mount)

    def foresee(self, table: FileTable, epoch: int, indices: Entries) -> None:
        """A further epoch that will probably come in this order. Raises DieselError."""
        for mount, entries in _in_mounts(table, indices).items():
            files = entries[entries >= 0]
            if mount in self._orders and len(files):
                order = explicit(epoch=epoch, entries=files, exact=False)
                self._controls.of(mount).extend(self._name, [order])

    def more(self, indices: Entries) -> None:
        """The current epoch goes on with these. Raises DieselError."""
        for mount, entries in _in_mounts(self._table, indices).items():
            known = self._orders.setdefault(mount, [])
            known.append(entries)
            files = entries[entries >= 0]
            if not len(files):
                continue
            if sum(len(each) for each in known) == len(entries):
                self._announce(mount)
            else:
                order = explicit(epoch=self._epoch, entries=files)
                self._controls.of(mount).extend(self._name, [order])
                self._count(len(files))

    def cut(self, position: int) -> None:
        """From this position on the order was foretold wrong. Raises DieselError."""
        for mount, known in self._orders.items():
            self._orders[mount] = [np.concatenate(known)[:position]]
            self._announce(mount)

    def progress(self, position: int) -> None:
        """The loop has received so many indices of the current epoch. Raises DieselError."""
        for mount, known in self._orders.items():
            read = np.concatenate(known)[:position] if len(known) > 1 else known[0][:position]
            control = self._controls.of(mount)
            with suppress(UsageError):  # the mount has seen the end of the epoch already
                control.progress(self._name, int(np.count_nonzero(read >= 0)), self._epoch)

    def withdraw(self) -> None:
        """The process has ended. Raises DieselError."""
        for mount in self._orders:
            self._controls.of(mount).withdraw(self._name)
        self._orders = {}

    def _announce(self, mount: str) -> None:
        entries = np.concatenate(self._orders[mount])
        files = entries[entries >= 0]
        if not len(files):
            return
        order = explicit(epoch=self._epoch, entries=files)
        control = self._controls.of(mount)
        control.announce(self._name, [order], lag_entries=self._lag_entries)
        self._count(len(files))

    def _count(self, files: int) -> None:
        self.announced += files
        self.planned_epochs += not self._is_planned
        self._is_planned = True


class Controls:
    """The connections to the mounts' control sockets."""

    def __init__(self) -> None:
        self._controls: dict[str, Control] = {}

    def of(self, mount: str) -> Control:
        """The connection to a mount. Raises DieselError where it takes no plans."""
        found = self._controls.get(mount)
        if found is None:
            found = Control.connect(mount)
            if not found.accepts_plans:
                found.close()
                raise UsageError(
                    f"the mount on {mount} takes no plans",
                    advice="mount it with --session native or kernel",
                )
            self._controls[mount] = found
        return found

    def forget(self) -> None:
        """Connect anew when a mount is needed again."""
        for each in self._controls.values():
            each.close()
        self._controls.clear()


def _in_mounts(table: FileTable, indices: Entries) -> dict[str, Entries]:
    """For each mount, the entries of these indices in it (negative: none)."""
    return table.subset(indices).entries
