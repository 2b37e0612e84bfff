"""Names as people give and see them: what a dataset may be called, and how a path is shown.

Pure, and without numpy: `dlcmd mount` needs this much of the names and is to start fast. The rules
for paths are in `entries.py`.
"""

import re

from .errors import UsageError

_VERSION = re.compile(r"[1-9]\d{0,18}", re.ASCII)

DATASET_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def check_dataset_name(name: str) -> str:
    """`name` itself. Raises UsageError: a name becomes part of keys and paths."""
    if not DATASET_NAME.fullmatch(name):
        raise UsageError(
            f"bad dataset name {name!r}",
            advice="a name is a letter or digit, then up to 62 letters, digits, '.', '_' or '-'",
        )
    return name


def parse_versioned_name(text: str) -> tuple[str, int]:
    """The name of a dataset, and a version of it: `DATASET@VERSION`, or 0 for the current one.

    Raises UsageError.
    """
    name, at, version = text.partition("@")
    check_dataset_name(name)
    if not at:
        return name, 0
    if not _VERSION.fullmatch(version):
        raise UsageError(
            f"bad version in {text!r}", advice=f"`dlcmd ls {name}@` lists those that are kept"
        )
    return name, int(version)


def shown(path: bytes) -> str:
    """A path for people: control characters and bytes that are not UTF-8 are escaped."""
    text = path.decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
