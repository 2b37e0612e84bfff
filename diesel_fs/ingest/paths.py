"""Converts between paths below a source and paths in the dataset."""

from ..errors import UsageError
from ..format.entries import check_path, join, path_fault

RESERVED_NAME = b".diesel"
"""A mount's own folder, at the root of a dataset."""


def target_path(target: bytes, path: bytes) -> bytes:
    return join(target, path) if path else target


def source_path(target: bytes, path: bytes) -> bytes:
    return path[len(target) + 1 :] if target else path


def is_reserved(path: bytes) -> bool:
    return path.startswith(RESERVED_NAME) and path.split(b"/", 1)[0] == RESERVED_NAME


def check_not_reserved(path: bytes) -> None:
    if is_reserved(path):
        raise UsageError("`.diesel` at the root of a dataset is the mount's own folder")


def check_file_target(path: bytes) -> None:
    """Raises UsageError if no file can be put at this path of a dataset."""
    check_path(path)
    if not path:
        raise UsageError("a file needs a name in the dataset")
    check_not_reserved(path)


def refusal_reason(path: bytes) -> str:
    """Empty if something can be put at this path of a dataset."""
    if fault := path_fault(path):
        return f"refused: its name has {fault}"
    if is_reserved(path):
        return "refused: it is the name of a mount's own folder"
    return ""
