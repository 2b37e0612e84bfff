"""Builds the sdist, and from it the wheel: `python -m deploy.packages.dist` (or `make dist`).

The same commit gives the same bytes: all files have the time of the commit, or SOURCE_DATE_EPOCH.
"""

import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import diesel_fs

from .share import write_share

TREE = Path(__file__).resolve().parents[2]
DIST = TREE / "dist"


def set_time() -> int:
    """Sets SOURCE_DATE_EPOCH, unless it is set, to the time of the commit (without git: of
    `pyproject.toml`)."""
    if "SOURCE_DATE_EPOCH" not in os.environ:
        command = ["git", "log", "-1", "--format=%ct"]
        done = subprocess.run(command, cwd=TREE, check=False, capture_output=True, text=True)
        time_s = done.stdout.strip() or str(int((TREE / "pyproject.toml").stat().st_mtime))
        os.environ["SOURCE_DATE_EPOCH"] = time_s
    return int(os.environ["SOURCE_DATE_EPOCH"])


def build() -> tuple[Path, Path]:
    """Returns the sdist and the wheel."""
    time_s = set_time()
    DIST.mkdir(exist_ok=True)
    shutil.rmtree(TREE / "share", ignore_errors=True)
    write_share(TREE / "share")
    _run("-c", "from setuptools.build_meta import build_sdist; build_sdist('dist')")
    sdist = DIST / f"diesel_fs-{diesel_fs.__version__}.tar.gz"
    _repack(sdist, time_s)
    # From the sdist, so that a file missing there is missing in the wheel, too
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--wheel-dir", "dist"]
    _run("-m", "pip", "wheel", *options, str(sdist))
    return sdist, DIST / f"diesel_fs-{diesel_fs.__version__}-py3-none-any.whl"


def _run(*words: str) -> None:
    # Otherwise setuptools would take the tree for an installed package with other metadata
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, *words], cwd=TREE, check=False, env=environment, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode:
        sys.stderr.buffer.write(done.stdout)
        sys.exit(f"{words[0]} {words[1]} failed")


def _repack(archive: Path, time_s: int) -> None:
    """Removes the time, place and user of the tar's making."""
    with tarfile.open(archive) as old:
        members = [(each, old.extractfile(each)) for each in sorted(old, key=lambda m: m.name)]
        content = io.BytesIO()
        with tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as new:
            for member, file in members:
                member.mtime, member.uid, member.gid = time_s, 0, 0
                member.uname = member.gname = "root"
                member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
                member.pax_headers = {}
                new.addfile(member, file)
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", fileobj=packed, mode="wb", mtime=time_s) as zipped:
        zipped.write(content.getvalue())
    archive.write_bytes(packed.getvalue())


def main(built: Sequence[Path]) -> None:
    for path in built:
        print(path.relative_to(TREE))


if __name__ == "__main__":
    main(build())
