"""A clean Debian, made once by mmdebstrap, and for each test an overlay that is thrown away."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.packages.debian import PYTHON, build_deb
from deploy.packages.dist import TREE

BUILT = TREE / "build" / "packages"

START = r"""
set -eu
mount --make-rprivate /
mount -t tmpfs none $1
mkdir $1/upper $1/work $1/root
mount -t overlay -o lowerdir=$2/root,upperdir=$1/upper,workdir=$1/work none $1/root
for place in dev sys; do mount --rbind /$place $1/root/$place; done
mount -t proc proc $1/root/proc
mount -t tmpfs none $1/root/run
cp -L /etc/resolv.conf $1/root/etc/resolv.conf
mkdir $1/root/packages $1/root/wheels
mount --bind $3 $1/root/packages
mount --bind $2/wheels $1/root/wheels
exec chroot $1/root env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8 \
    DEBIAN_FRONTEND=noninteractive PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels sh -exc "$4"
"""


class CleanRoot:
    """Runs a script in a clean Debian that holds our packages in `/packages`."""

    def __init__(self, folder: Path, packages: Path) -> None:
        self._folder = folder
        self._packages = packages

    def __call__(self, script: str) -> str:
        namespaces = ["--mount", "--pid", "--fork", "--kill-child"]
        done = subprocess.run(
            ["unshare", *namespaces, "sh", "-c", START, "sh",
             self._folder, BUILT, self._packages, script],
            check=False, text=True, timeout=900, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-8000:]
        return done.stdout


def _suite() -> str:
    text = Path("/etc/os-release").read_text(encoding="utf-8")
    return next(
        line.partition("=")[2] for line in text.splitlines() if line.startswith("VERSION_CODENAME=")
    )


@pytest.fixture(scope="session")
def packages() -> Path:
    """The folder with only the sdist, the wheel and the Debian package of this tree; beside it, the
    packages that pip needs."""
    package = build_deb()
    folder = BUILT / "packages"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in (package, *package.parent.glob(f"diesel_fs-{package.name.split('_')[1]}*")):
        shutil.copy(path, folder)
    if not (BUILT / "root").exists():
        new = BUILT / "root.new"
        shutil.rmtree(new, ignore_errors=True)
        command = ["mmdebstrap", "--quiet", "--variant=minbase", _suite(), str(new)]
        subprocess.run(command, check=True)
        new.rename(BUILT / "root")
    _download(next(folder.glob("*.whl")))
    return folder


def _download(wheel: Path) -> None:
    """Download the dependencies of the wheel and of the sdist's build, for the system's Python: the
    clean system has no settings for package sources."""
    resolver = BUILT / "resolver"
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", resolver], check=True, env=clean)
    pip = [sys.executable, "-m", "pip", "--python", f"{resolver}/bin/python", "--quiet"]
    (BUILT / "wheels").mkdir(exist_ok=True)
    options = ["--only-binary", ":all:", "--dest", str(BUILT / "wheels")]
    wanted = [str(wheel), "setuptools>=77"]
    subprocess.run([*pip, "download", *options, *wanted], check=True, env=clean)
    for path in (BUILT / "wheels").glob("diesel_fs-*"):
        path.unlink()


@pytest.fixture
def clean_root(packages: Path, tmp_path: Path) -> CleanRoot:
    folder = tmp_path / "clean"
    folder.mkdir()
    return CleanRoot(folder, packages)
