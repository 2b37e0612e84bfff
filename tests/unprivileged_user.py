"""Runs programs of a test as a user without rights, if the test itself runs as root."""

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

USER = pwd.getpwnam("nobody").pw_uid
"""A user that exists on every system (fusermount3 needs a name) and owns no files."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

_SPAWN = "import json, subprocess, sys; subprocess.run([sys.executable, '-c', ''], check=True)"


def as_user() -> list[str]:
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--"]


def user_python() -> str:
    for path in (sys.executable, f"/usr/bin/python3.{sys.version_info.minor}"):
        question = [*as_user(), path, "-c", _SPAWN]
        with_modules = {**os.environ, "PYTHONPATH": module_path()}
        if (
            subprocess.run(question, check=False, capture_output=True, env=with_modules).returncode
            == 0
        ):
            return path
    pytest.skip("the user may run no Python of this version")


def module_path() -> str:
    tree = str(Path(__file__).parents[1])
    return os.pathsep.join([tree, *(path for path in sys.path if "site-packages" in path)])
