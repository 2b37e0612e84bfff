"""The peers: programs that DIESEL-FS is compared with, one module each.

A module raises PeerMissing if its peer cannot run here. The peers' Python packages are installed in
an environment of their own, which `make bench` makes, since they need older libraries than ours.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..samples import PeerMissing

PROGRAMS = Path(sys.prefix) / "peers" / "bin"
DEADLINE_S = 900.0
_REASON_CHARS = 300


def installed(name: str) -> str:
    """The path of a program in the peers' environment."""
    program = PROGRAMS / name
    if not program.exists():
        raise PeerMissing(f"{name} is not in {PROGRAMS.parent}: run `make bench`")
    return str(program)


def system_program(name: str) -> str:
    """The path of a program of the system, which may be one for its administrator."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    if found is None:
        raise PeerMissing(f"there is no {name} here: deploy/prepare.sh bench installs it")
    return found


def output_of(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run a peer, and return what it printed."""
    try:
        done = subprocess.run(
            command,
            env=environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerMissing(str(error)) from error
    if done.returncode:
        reason = done.stderr.strip()[-_REASON_CHARS:]
        raise PeerMissing(f"{command[0]} ended with {done.returncode}: {reason}")
    return done.stdout
