"""The interface of a table of accounts, and the table in a file.

A lost table counts as empty: nobody has access. `dlcmd recover` does not touch it; an export is its
backup. Any thread and process. The file is open during a call only.
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

from ...errors import BusyError, DieselError, MetadataError, NoSpaceError, PermissionDenied
from ...system.atomic_file import fsync_folder
from ..objects.folder import object_temporary_name
from .account import TEXT_BYTES_MAX, Accounts, accounts_text, parse_accounts

FILE = "accounts"
"""Beside the chunks of a repository in a folder. Its lock is `accounts.lock`."""

NO_TOKEN = b""

_LOCK_S = 10.0
_POLL_S = 0.02
_NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT})
_NOT_ALLOWED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP})


@dataclass(frozen=True, slots=True)
class AccountState:
    """All accounts at one moment. `token` differs between any two states; it is `NO_TOKEN` only if
    the table was never written, or was lost."""

    token: bytes = NO_TOKEN
    accounts: Accounts = field(default_factory=dict)


class AccountTable(ABC):
    """The accounts of one repository. All methods raise MetadataError if the table cannot be
    reached, PermissionDenied, NoSpaceError, CorruptError."""

    @abstractmethod
    def read(self) -> AccountState:
        """All accounts, before or after a change that is under way, never in between."""

    @abstractmethod
    def token(self) -> bytes:
        """The current state's token; cheaper than `read` if the table is in a Redis."""

    @abstractmethod
    def change(self, edit: Callable[[Accounts], Accounts]) -> Accounts:
        """Replace the accounts by `edit` of the current ones, and return them.

        Atomic. `edit` may be called several times; if it raises, nothing changes. After another
        error, the change may have been made or not. On return it is as durable as the store can
        make it.
        """

    @abstractmethod
    def close(self) -> None:
        """Repeatable."""


class AccountFile(AccountTable):
    """The text of `account.py` in a file that only its owner can read.

    The file belongs to the owner of its folder even if root writes it, so that the server can read
    a table that an administrator has written.
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
            # O_NONBLOCK: a pipe under this name must not hang the reader
            fd = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            if not self.path.parent.is_dir():
                raise
            return AccountState()
        with open(fd, "rb") as file:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_mode & 0o022:
                raise PermissionDenied(
                    f"{self.path} is not used, since other users can write to it",
                    advice=f"check its content, then run: chmod 600 {self.path}",
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
                        raise BusyError(
                            f"{self.path} is being changed by another process", advice="try again"
                        ) from None
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
