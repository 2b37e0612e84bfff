"""Converts between paths below a source and paths in the dataset, and refuses some of the
latter."""

from ..errors import UsageError
from ..format.entries import check_path, join, path_fault

RESERVED_NAME = b".diesel"
"""The name of a mount's own folder, at the root of a dataset."""


def target_path(target: bytes, path: bytes) -> bytes:
    """The dataset path of the entry at `path` below the source, if the source goes to `target`."""
    return join(target, path) if path else target


def source_path(target: bytes, path: bytes) -> bytes:
    """The path below the source of a dataset path at or below `target`."""
    return path[len(target) + 1 :] if target else path


def is_reserved(path: bytes) -> bool:
    """Whether a dataset path is the mount's own folder, or lies in it."""
    return path.startswith(RESERVED_NAME) and path.split(b"/", 1)[0] == RESERVED_NAME


def check_not_reserved(path: bytes) -> None:
    """Raise UsageError if `is_reserved`."""
    if is_reserved(path):
        raise UsageError("`.diesel` at the root of a dataset is the mount's own folder")


def check_file_target(path: bytes) -> None:
    """Raise UsageError if no file can be put at a path."""
    check_path(path)
    if not path:
        raise UsageError("a file needs a name in the dataset")
    check_not_reserved(path)


def refusal_reason(path: bytes) -> str:
    """The reason why a path cannot be put to because of its name, or the empty string."""
    if fault := path_fault(path):
        return f"refused: its name has {fault}"
    if is_reserved(path):
        return "refused: it is the name of a mount's own folder"
    return ""
