"""Tables of accounts: the interface, and the table in a file.

Owns: the contract words (in `AccountTable`), the file and its lock. Does not own: what an account
is and what a change means (`accounts.py`), the table in Redis (`redis.py`).

Accounts are not derived: nothing makes them again, so a table that has gone is an empty one, which
lets nobody in, and `recover` leaves them alone. Exports are their backup.

Concurrency: any thread, any process; nothing is open between calls to a file.
"""

import errno
import fcntl
import os
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from diesel_fs.errors import BusyError, DieselError, MetadataError, NoSpaceError, PermissionDenied
from diesel_fs.storage.accounts.account import (
    TEXT_BYTES_MAX,
    Accounts,
    accounts_text,
    parse_accounts,
)

from ...system.atomic_file import fsync_folder
from ..objects.folder import object_temporary_name

FILE = "accounts"
"""Beside the chunks, where the metadata are embedded; and `accounts.lock`."""

NO_TOKEN = b""

_LOCK_S = 10.0
_POLL_S = 0.02
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_NOT_ALLOWED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP})


@dataclass(frozen=True, slots=True)
class AccountState:
    """All accounts at one moment. `token` names the state; it is `NO_TOKEN` where there never was a
    table, or where it was lost (one whose last user was removed has a token).
    """

    token: bytes = NO_TOKEN
    accounts: Accounts = field(default_factory=dict)


class AccountTable(ABC):
    """The accounts of one repository.

    Errors, of all methods: MetadataError where it cannot be reached, PermissionDenied,
    NoSpaceError, CorruptError.
    """

    @abstractmethod
    def read(self) -> AccountState:
        """All accounts, of one moment: never half of a change."""

    @abstractmethod
    def token(self) -> bytes:
        """The token of the state: another after every change. Cheaper than `read`."""

    @abstractmethod
    def change(self, edit: Callable[[Accounts], Accounts]) -> Accounts:
        """Make `edit` of the accounts, and they are what it gave; they come back.

        Atomic, and one after the other: what `edit` gets is what its result replaces. It may be
        called several times; where it raises, nothing changes. Durable on return, as far as the
        store is. Other errors leave it unknown whether the change was made.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of what is open. Repeatable."""


class AccountFile(AccountTable):
    """A table in a file of its owner's alone: the text of `accounts.py`.

    It belongs to whoever owns its folder, also where root writes it, so that the server can read
    what an administrator has made.
    """

    def __init__(self, path: Path, *, lock_s: float = _LOCK_S) -> None:
        self.path = path
        self._lock_s = lock_s

    def __repr__(self) -> str:
        return f"AccountFile({self.path})"

    def read(self) -> AccountState:
        with self._errors():
            return self._read()

    def token(self) -> bytes:
        return self.read().token

    def change(self, edit: Callable[[Accounts], Accounts]) -> Accounts:
        with self._errors(), self._locked():
            accounts = edit(self._read().accounts)
            self._write(accounts_text(accounts).encode())
            return accounts

    def close(self) -> None:
        pass

    def _read(self) -> AccountState:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            if not self.path.parent.is_dir():
                raise
            return AccountState()
        with open(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o022:
                raise PermissionDenied(
                    f"others can write to {self.path}: it is not believed",
                    advice=f"look at it, then chmod 600 {self.path}",
                )
            content = file.read(TEXT_BYTES_MAX + 1)
        token = blake2b(content, digest_size=16).digest()
        try:
            return AccountState(token, parse_accounts(content))
        except DieselError as error:
            error.message = f"{self.path}: {error.message}"
            raise

    def _write(self, content: bytes) -> None:
        folder = os.stat(self.path.parent)
        temporary = self.path.with_name(object_temporary_name())
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(fd, "wb") as file:
                if os.geteuid() == 0:
                    os.fchown(fd, folder.st_uid, folder.st_gid)
                file.write(content)
                file.flush()
                os.fsync(fd)
            os.rename(temporary, self.path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
        fsync_folder(self.path.parent)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        path = self.path.with_name(f"{self.path.name}.lock")
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o600)
        try:
            if os.geteuid() == 0:
                folder = os.stat(self.path.parent)
                os.fchown(fd, folder.st_uid, folder.st_gid)
            deadline = time.monotonic() + self._lock_s
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise BusyError(f"somebody else changes {self.path}") from None
                    time.sleep(_POLL_S)
            yield
        finally:
            os.close(fd)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            message = f"{self.path}: {error.strerror}"
            if error.errno in _NO_SPACE:
                raise NoSpaceError(message) from error
            if error.errno in _NOT_ALLOWED:
                raise PermissionDenied(message) from error
            raise MetadataError(message) from error
