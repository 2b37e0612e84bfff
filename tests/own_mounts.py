"""A mount namespace for a program of a test, without the mounts of other tests.

A new namespace has copies of all mounts. If another test unmounts one meanwhile, it would stay
mounted in the namespace: the daemon of that mount would not end, and `umount` would report that.
"""

import sys
from pathlib import Path

_NOWHERE = Path("/nowhere")

_FORGET_OTHERS = """
import ctypes, os, re, sys
kept = os.fsencode(sys.argv[1]) + b"/"
for line in reversed(open("/proc/self/mountinfo", "rb").read().splitlines()):
    if b" - fuse.diesel " in line or b" - erofs " in line:
        at = re.sub(rb"\\\\([0-7]{3})", lambda each: bytes([int(each[1], 8)]), line.split(b" ")[4])
        if not at.startswith(kept):
            ctypes.CDLL(None).umount2(at, 2)
os.execvp(sys.argv[2], sys.argv[2:])
"""
"""Takes the mounts of datasets out of this namespace (by MNT_DETACH), except those in a folder, and
goes on as another program."""


def own_mounts(*options: str, keep: Path = _NOWHERE) -> list[str]:
    """The words before a program that gets a mount namespace of its own: `unshare` with these
    options, none of which may let mounts propagate from there. Mounts in the folder `keep` are
    there, too."""
    forget = [sys.executable, "-I", "-c", _FORGET_OTHERS, str(keep)]
    return ["unshare", "--mount", *options, "--", *forget]
