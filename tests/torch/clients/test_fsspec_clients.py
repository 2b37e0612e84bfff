"""Unmodified libraries read datasets by `diesel://`: `fsspec_reads.py`, in their own environment.

That environment has no diesel-fs. So its Python finds diesel-fs and its dependencies after its own
packages, as if they were installed there.
"""

import os
import subprocess
import sysconfig
from pathlib import Path

FOLDER = Path(__file__).parent
TREE = FOLDER.parents[2]
PYTHON = TREE / ".venv" / "clients" / "bin" / "python"
DEADLINE_S = 280


def test_libraries_read_by_fsspec(tmp_path: Path) -> None:
    assert PYTHON.exists(), f"{PYTHON} is missing: run `make test-clients`"
    code = (
        "import sys; sys.path += sys.argv[1:3]; import pytest; sys.exit(pytest.main(sys.argv[3:]))"
    )
    ended = subprocess.run(
        [
            *(PYTHON, "-c", code, sysconfig.get_path("purelib"), TREE, "--noconftest"),
            *("-c", os.devnull, "-p", "no:cacheprovider", "--basetemp", tmp_path / "inner"),
            FOLDER / "fsspec_reads.py",
        ],
        cwd=tmp_path, env={**os.environ, "HF_HOME": str(tmp_path / "home")},
        text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=DEADLINE_S,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout
    assert " passed" in ended.stdout
