"""Finds another Python on this machine, in which ordinary code runs."""

import os
import shutil
import subprocess
from pathlib import Path

from ..samples import PeerMissing


def python(version: str) -> str:
    """The interpreter of a version such as "3.13": on PATH, or one that pyenv has installed.

    Raises PeerMissing where there is none.
    """
    root = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    installed = sorted(root.glob(f"versions/{version}.*/bin/python{version}"))
    for candidate in [shutil.which(f"python{version}"), *map(str, installed)]:
        if candidate is not None and _runs(candidate, version):
            return candidate
    raise PeerMissing(f"there is no Python {version} on PATH or in pyenv")


def _runs(candidate: str, version: str) -> bool:
    """Whether it is this version: a name on PATH may be a shim without a Python behind it."""
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    done = subprocess.run([candidate, "-c", code], check=False, capture_output=True, text=True)
    return done.stdout.strip() == version
