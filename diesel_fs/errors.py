"""The one error tree. Every failure that a user can meet is a leaf of it.

    DieselError                         exit  errno
    ├── UsageError                         2  EINVAL
    │   └── ConfigError                    2  EINVAL
    ├── PartialError                       3  EIO
    ├── NotFoundError                     10  ENOENT
    │   ├── NoSuchDataset                 10  ENOENT
    │   └── NoSuchPath                    10  ENOENT
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

`exit_code` is what `dlcmd` ends with, `errno` what a mount answers, and `retry` says whether the
same call may succeed later without anybody doing anything. `advice` is what the user can do.
"""

import errno
import os
from contextlib import suppress

DETAIL = "  | "
"""What a line of details begins with."""


class DieselError(Exception):
    """What failed, on what (in the message), and what to do about it (`advice`)."""

    exit_code = 1
    errno = errno.EIO
    retry = False

    details = ""
    """Lines of what is known besides, such as the end of a log. They follow all else."""

    def __init__(self, message: str, *, advice: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice

    def __str__(self) -> str:
        said = f"{self.message}; {self.advice}" if self.advice else self.message
        return "".join([said, *(f"\n{DETAIL}{line}" for line in self.details.splitlines())])


class UsageError(DieselError):
    """The caller asked for something that has no meaning: a bad name, number or combination."""

    exit_code = 2
    errno = errno.EINVAL


class ConfigError(UsageError):
    """A configuration file, environment variable or URL is malformed."""


class PartialError(DieselError):
    """The work was done except for some files, each of which has been named."""

    exit_code = 3

    def __init__(self, message: str, failed: tuple[tuple[bytes, str], ...] = ()) -> None:
        super().__init__(message)
        self.failed = failed


class NotFoundError(DieselError):
    """Something that was named is known not to exist."""

    exit_code = 10
    errno = errno.ENOENT


class NoSuchDataset(NotFoundError):
    """The repository is known to hold no dataset of this name."""


class NoSuchPath(NotFoundError, FileNotFoundError):  # type: ignore[misc]  # errno is the class's
    """The dataset is known to hold no entry of this path.

    It is a FileNotFoundError too, so that code which was written for files goes on as it is.
    """

    def __init__(self, message: str, *, advice: str = "") -> None:
        super().__init__(message, advice=advice)
        self.strerror = os.strerror(self.errno)


class BusyError(DieselError):
    """Somebody else holds it: an open file, a lock, a lease."""

    exit_code = 11
    errno = errno.EBUSY
    retry = True


class PermissionDenied(DieselError):
    """The operating system or the server does not allow it."""

    exit_code = 12
    errno = errno.EACCES


class ConflictError(DieselError):
    """It would overwrite, shadow or contradict what is there."""

    exit_code = 12
    errno = errno.EEXIST


class ObjectStoreError(DieselError):
    """The object store cannot be reached or did not do what it was asked."""

    exit_code = 13
    retry = True


class ObjectMissing(ObjectStoreError):
    """An object that was named is not in the store."""

    retry = False


class ObjectExists(ObjectStoreError):
    """An object of that name exists already; nothing has been written."""

    errno = errno.EEXIST
    retry = False


class ObjectStoreRefused(ObjectStoreError):
    """The object store does not let us in, or not do this: credentials, rights, clocks."""

    retry = False


class MetadataError(DieselError):
    """The metadata store cannot be reached or did not do what it was asked."""

    exit_code = 14
    retry = True


class MetadataBehind(MetadataError):
    """The metadata store does not know all chunks: absence cannot be told from ignorance."""

    retry = False


class FormatError(DieselError):
    """Bytes are not what their format says; `offset` is where in the object, where known."""

    exit_code = 15

    def __init__(self, message: str, *, offset: int = -1, advice: str = "") -> None:
        super().__init__(message, advice=advice)
        self.offset = offset


class TruncatedError(FormatError):
    """The object ends before its own lengths say so."""


class CorruptError(FormatError):
    """A checksum, a length or a field contradicts the rest."""


class ForeignError(FormatError):
    """Intact perhaps, but not ours: another magic, dataset identity or chunk ID."""


class NewerVersionError(FormatError):
    """Written by a newer program: refused, and never treated as damage."""


class NoSpaceError(DieselError):
    """A disk, a quota or a memory limit is full."""

    exit_code = 16
    errno = errno.ENOSPC
    retry = True


class DeadlineError(DieselError):
    """Something did not answer in time."""

    exit_code = 14
    errno = errno.ETIMEDOUT
    retry = True


def error_by_class_name(name: str, message: str, advice: str) -> DieselError:
    """The error that another process of ours had, from its class's name; its nearest ancestor where
    the class is not known here or wants more than words.
    """
    known = [DieselError]
    for kind in known:
        known.extend(kind.__subclasses__())
    found = next((kind for kind in known if kind.__name__ == name), DieselError)
    for ancestor in found.__mro__:
        if issubclass(ancestor, DieselError):
            with suppress(TypeError):
                return ancestor(message, advice=advice)
    return DieselError(message, advice=advice)
