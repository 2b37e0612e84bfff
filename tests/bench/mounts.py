"""Whether something is mounted, asked of the kernel's table: it also knows mounts that died."""

from pathlib import Path


def is_mounted(folder: Path) -> bool:
    """Whether there is a mount at `folder`."""
    return kind_of(folder) != ""


def kind_of(folder: Path) -> str:
    """The type of the file system that is mounted at `folder`; empty where there is none."""
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines():
        _, point, kind, *_ = line.split()
        if point == str(folder):
            return kind
    return ""
