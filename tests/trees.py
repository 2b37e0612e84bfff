"""Makes trees of files for tests, and compares two trees.

The comparison shares no code with the product: it uses only system calls.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

Facts = dict[bytes, tuple[object, ...]]


def facts(top: Path, *, times: bool = True) -> Facts:
    """Return kind, mode, mtime, and content or target, by path."""
    found: Facts = {}
    for path, status in _walk(os.fsencode(top)):
        mtime_ns = status.st_mtime_ns if times else 0
        relative = os.path.relpath(path, os.fsencode(top))
        if stat.S_ISLNK(status.st_mode):
            found[relative] = ("link", mtime_ns, os.readlink(path))
        elif stat.S_ISDIR(status.st_mode):
            found[relative] = ("folder", stat.S_IMODE(status.st_mode) & 0o777, mtime_ns)
        elif stat.S_ISREG(status.st_mode):
            with open(path, "rb") as file:
                content = file.read()
            found[relative] = ("file", stat.S_IMODE(status.st_mode) & 0o777, mtime_ns, content)
    return found


def _walk(top: bytes) -> Iterator[tuple[bytes, os.stat_result]]:
    status = os.lstat(top)
    yield top, status
    if stat.S_ISDIR(status.st_mode):
        for name in sorted(os.listdir(top)):
            yield from _walk(os.path.join(top, name))


def write(top: Path, files: dict[str, bytes]) -> Path:
    top.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return top


def odd_tree(top: Path) -> Path:
    """Make entries with every odd name, kind, mode and time that a dataset can hold."""
    write(
        top,
        {
            "plain.txt": b"plain",
            "empty": b"",
            "sub/deeper/file": b"deep",
            "-rf": b"leading dash",
            " space ": b"spaces",
            "new\nline": b"newline",
            "tab\t\x1b[31m": b"escape",
            "caf\u00e9": b"NFC",
            "cafe\u0301": b"NFD",
            "n" * 255: b"longest name",
            "zeros": bytes(100_000),
        },
    )
    raw = os.fsencode(top)
    with open(raw + b"/\xff\xfe not utf-8", "wb") as file:
        file.write(b"bytes")
    (top / "nothing here").mkdir()
    for name, target in {
        "relative": "plain.txt",
        "dangling": "no such file",
        "absolute": "/etc/hostname",
        "outside": "../../outside",
        "folder link": "sub",
    }.items():
        (top / name).symlink_to(target)
    os.symlink(b"\xff target", raw + b"/odd target")
    (top / "plain.txt").chmod(0o640)
    (top / "empty").chmod(0o4755)
    (top / "sub").chmod(0o1750)
    os.utime(top / "plain.txt", ns=(0, -1_234_567_890_123_456_789))
    os.utime(top / "empty", ns=(0, 5_000_000_000_123_456_789))
    os.utime(top / "sub", ns=(0, 1))
    return top
