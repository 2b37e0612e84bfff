"""Facts about processes in tests, from `/proc`."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def state_of(pid: int) -> str:
    """Return Z for a zombie, and the empty string if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_running(pid: int) -> bool:
    """Whether a process runs. A zombie, which its parent has not reaped, does not."""
    return state_of(pid) not in ("", "Z")


def children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def command_lines() -> Iterator[tuple[int, bytes]]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield int(path.parent.name), path.read_bytes()


def open_files(pid: int) -> list[str]:
    found: list[str] = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(path))
    return found


def resident_bytes(pid: int, kind: str = "RssAnon") -> int:
    """A process's memory; by default without the files that it maps (`VmRSS` includes them)."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition(f"{kind}:")[2].split()[0]) << 10
