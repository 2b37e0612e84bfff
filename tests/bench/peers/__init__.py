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

TREE = Path(__file__).resolve().parents[3]

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


def python(version: str) -> str:
    """The interpreter of a version such as "3.13": on PATH, or one that pyenv has installed.

    Raises PeerMissing if there is none.
    """
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    installed = sorted(root.glob(f"versions/{version}.*/bin/python{version}"))
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    for candidate in filter(None, [shutil.which(f"python{version}"), *map(str, installed)]):
        # A name on PATH may be a shim without a Python behind it.
        done = subprocess.run([candidate, "-c", code], check=False, capture_output=True, text=True)
        if done.stdout.strip() == version:
            return candidate
    raise PeerMissing(f"there is no Python {version} on PATH or in pyenv")


def python_of_training() -> str:
    """The Python of the peers' environment; ours if the peers are not installed."""
    try:
        return installed("python")
    except PeerMissing:
        return sys.executable


def output_of(command: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    """Run a peer, and return its output."""
    try:
        done = subprocess.run(
            command, env=environment, check=False, capture_output=True, text=True,
            timeout=DEADLINE_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerMissing(str(error)) from error
    if done.returncode:
        reason = done.stderr.strip()[-_REASON_CHARS:]
        raise PeerMissing(f"{command[0]} ended with {done.returncode}: {reason}")
    return done.stdout


def in_peers(program: Path, *words: str, **environment: str) -> str:
    """The last line that a program prints in the peers' environment; the peers print, too."""
    # -P: otherwise the peer may import modules of its folder that have the same names as its own
    command = [installed("python"), "-P", str(program), *words]
    printed = output_of(command, {**os.environ, "PYTHONPATH": str(TREE), **environment})
    return next(reversed(printed.splitlines()), "")
