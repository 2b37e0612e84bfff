"""Paths below a source, paths in the dataset, and which of the latter cannot be put to."""

from ..errors import UsageError
from ..format.entries import check_path, join, path_fault

RESERVED_NAME = b".diesel"
"""The name of a mount's own folder, at the root of a dataset."""


def target_path(target: bytes, path: bytes) -> bytes:
    """Where what lies at `path` below the source goes in the dataset; the source goes to
    `target`."""
    return join(target, path) if path else target


def source_path(target: bytes, path: bytes) -> bytes:
    """The path below the source of what lies at `path` (at or below `target`) in the dataset."""
    return path[len(target) + 1 :] if target else path


def is_reserved(path: bytes) -> bool:
    """Whether a path of the dataset is the mount's own folder, or lies in it."""
    return path.startswith(RESERVED_NAME) and path.split(b"/", 1)[0] == RESERVED_NAME


def check_not_reserved(path: bytes) -> None:
    """Raise UsageError where `is_reserved`."""
    if is_reserved(path):
        raise UsageError("`.diesel` at the root of a dataset is the mount's own folder")


def check_file_target(path: bytes) -> None:
    """Raise UsageError where no file can be put at a path."""
    check_path(path)
    if not path:
        raise UsageError("a file needs a name in the dataset")
    check_not_reserved(path)


def refusal_reason(path: bytes) -> str:
    """Why nothing can be put at a path because of its name, or the empty string."""
    if fault := path_fault(path):
        return f"refused: its name has {fault}"
    if is_reserved(path):
        return "refused: it is the name of a mount's own folder"
    return ""
