"""All errors of DIESEL-FS. Every failure that a user can meet is a class of this tree.

    DieselError                         exit  errno
    ├── UsageError                         2  EINVAL
    │   ├── ConfigError                    2  EINVAL
    │   └── IsAFolder                      2  EISDIR
    ├── PartialError                       3  EIO
    ├── NotFoundError                     10  ENOENT
    │   ├── NoSuchDataset                 10  ENOENT
    │   ├── NoSuchPath                    10  ENOENT
    │   │   └── NotAFolder                10  ENOTDIR
    │   └── NoSuchFile                    10  ENOENT
    ├── BusyError                         11  EBUSY
    ├── PermissionDenied                  12  EACCES
    ├── ConflictError                     12  EEXIST
    ├── ObjectStoreError                  13  EIO
    │   ├── ObjectMissing                 13  EIO
    │   ├── ObjectExists                  13  EEXIST
    │   └── ObjectStoreRefused            13  EIO
    ├── MetadataError                     14  EIO
    │   └── MetadataBehind                14  EIO
    ├── FormatError                       15  EIO
    │   ├── TruncatedError                15  EIO
    │   ├── CorruptError                  15  EIO
    │   ├── ForeignError                  15  EIO
    │   └── NewerVersionError             15  EIO
    ├── NoSpaceError                      16  ENOSPC
    └── DeadlineError                     14  ETIMEDOUT

Each class has the exit code of `dlcmd`, the errno that a mount returns, and `retry`: whether the
same call may succeed later although nobody changes anything.
"""

import errno
import os
from contextlib import suppress

DETAIL = "  | "
"""The prefix of each line of `DieselError.details`."""


class DieselError(Exception):
    """`message` names the failure and its object, `advice` a remedy."""

    exit_code = 1
    errno = errno.EIO
    retry = False

    details = ""
    """More lines for the user, such as the end of a log."""

    def __init__(self, message: str, *, advice: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice

    def __str__(self) -> str:
        text = f"{self.message}; {self.advice}" if self.advice else self.message
        return "\n".join([text, *(f"{DETAIL}{line}" for line in self.details.splitlines())])


class UsageError(DieselError):
    """The request has no meaning: a bad name, number or combination."""

    exit_code = 2
    errno = errno.EINVAL


class ConfigError(UsageError):
    """A configuration file, environment variable or URL is malformed."""


class IsAFolder(UsageError, IsADirectoryError):
    """The path names a folder, and the call is about files."""

    errno = errno.EISDIR

    def __init__(self, message: str, *, advice: str = "") -> None:
        super().__init__(message, advice=advice)
        self.strerror = os.strerror(self.errno)


class PartialError(DieselError):
    """The work was done except for some files, which were named to the user."""

    exit_code = 3

    def __init__(
        self, message: str, failed: tuple[tuple[bytes, str], ...] = (), *, advice: str = ""
    ) -> None:
        super().__init__(message, advice=advice)
        self.failed = failed


class NotFoundError(DieselError):
    """The named thing does not exist; it is not merely unreachable."""

    exit_code = 10
    errno = errno.ENOENT


class NoSuchDataset(NotFoundError):
    """The repository holds no dataset of this name."""


class NoSuchPath(NotFoundError, FileNotFoundError):  # type: ignore[misc]  # errno is the class's
    """The dataset holds no entry with this path. As a FileNotFoundError, it fits code for files."""

    def __init__(self, message: str, *, advice: str = "") -> None:
        super().__init__(message, advice=advice)
        self.strerror = os.strerror(self.errno)


class NotAFolder(NoSuchPath, NotADirectoryError):
    """The path continues below a file or a link."""

    errno = errno.ENOTDIR


class NoSuchFile(NotFoundError, FileNotFoundError):  # type: ignore[misc]  # errno is the class's
    """A local file is missing."""

    def __init__(self, message: str, *, advice: str = "") -> None:
        super().__init__(message, advice=advice)
        self.strerror = os.strerror(self.errno)


class BusyError(DieselError):
    """Another process holds an open file, a lock or a lease that is needed."""

    exit_code = 11
    errno = errno.EBUSY
    retry = True


class PermissionDenied(DieselError):
    """The operating system or the server does not allow it."""

    exit_code = 12
    errno = errno.EACCES


class ConflictError(DieselError):
    """The operation would overwrite, shadow or contradict something that exists."""

    exit_code = 12
    errno = errno.EEXIST


class ObjectStoreError(DieselError):
    """The object store cannot be reached, or a request to it failed."""

    exit_code = 13
    retry = True


class ObjectMissing(ObjectStoreError):
    """The object store works, but holds no object of this name."""

    retry = False


class ObjectExists(ObjectStoreError):
    """An object of that name exists; nothing has been written."""

    errno = errno.EEXIST
    retry = False


class ObjectStoreRefused(ObjectStoreError):
    """The object store refuses access: bad credentials, missing rights, or a wrong clock."""

    retry = False


class MetadataError(DieselError):
    """The metadata store cannot be reached, or a request to it failed."""

    exit_code = 14
    retry = True


class MetadataBehind(MetadataError):
    """The metadata store lacks some chunks, so it cannot tell whether something exists."""

    retry = False


class FormatError(DieselError):
    """Bytes contradict their format, at `offset` of the object (-1: unknown)."""

    exit_code = 15

    def __init__(self, message: str, *, offset: int = -1, advice: str = "") -> None:
        super().__init__(message, advice=advice)
        self.offset = offset


class TruncatedError(FormatError):
    """The object is shorter than its own lengths require."""


class CorruptError(FormatError):
    """A checksum, a length or a field contradicts the rest."""


class ForeignError(FormatError):
    """The object has another magic number, dataset identity or chunk ID than expected."""


class NewerVersionError(FormatError):
    """A newer program wrote the object, which is never treated as damaged."""


class NoSpaceError(DieselError):
    """A disk, a quota or a memory limit is full."""

    exit_code = 16
    errno = errno.ENOSPC
    retry = True


class DeadlineError(DieselError):
    """A server, a store or a program did not answer in time."""

    exit_code = 14
    errno = errno.ETIMEDOUT
    retry = True


def error_by_class_name(name: str, message: str, advice: str) -> DieselError:
    """The error that another process reported. An unknown class becomes DieselError; one whose
    constructor needs other arguments becomes its nearest ancestor that does not."""
    known = [DieselError]
    for kind in known:  # the list grows while it is read
        known.extend(kind.__subclasses__())
    named = next((kind for kind in known if kind.__name__ == name), DieselError)
    for ancestor in named.__mro__:
        if issubclass(ancestor, DieselError):
            with suppress(TypeError):
                return ancestor(message, advice=advice)
    return DieselError(message, advice=advice)
