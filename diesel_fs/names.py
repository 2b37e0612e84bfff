"""Parses names of datasets (`NAME`, `NAME@VERSION`), and shows names and paths to users.

Pure, and without numpy, which would slow the start of `dlcmd mount`. The rules for paths in a
dataset are in `format/entries.py`.
"""

import re

from .errors import UsageError

_VERSION = re.compile(r"[1-9]\d{0,18}", re.ASCII)

SHOWN_CHARS = 300
"""Messages cut paths and names at this length."""

DATASET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def check_dataset_name(name: str) -> str:
    """Return `name`. Raises UsageError if it is not allowed: it becomes part of keys and paths."""
    dataset, slash, _ = name.partition("/")
    if slash and DATASET_NAME.fullmatch(dataset):
        raise UsageError(
            f"bad dataset name {cut(name)!r}: it is a path",
            advice=f"name the dataset, {dataset}: its folders are in it",
        )
    if not DATASET_NAME.fullmatch(name):
        raise UsageError(
            f"bad dataset name {cut(name)!r}",
            advice="a name is a letter or digit, then up to 62 letters, digits, '.', '_' or '-'",
        )
    return name


def parse_versioned_name(text: str) -> tuple[str, int]:
    """The dataset and the version in `DATASET@VERSION`; 0 is the current one. Raises UsageError."""
    if not isinstance(text, str):  # from a Python program
        raise UsageError(
            f"a dataset is named by text, not by a value of type {type(text).__name__}"
        )
    name, at, version = text.partition("@")
    check_dataset_name(name)
    if not at:
        return name, 0
    if not _VERSION.fullmatch(version):
        raise UsageError(
            f"bad version in {cut(text)!r}",
            advice=f"`dlcmd ls {name}@` lists the versions that are kept",
        )
    return name, int(version)


def cut(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


def shown(path: bytes) -> str:
    """A path as text for messages: control characters and bytes that are not UTF-8 are escaped."""
    text = path.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
