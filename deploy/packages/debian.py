"""Builds the Debian package: `python -m deploy.packages.debian` (or `make deb`).

Debian's numpy, redis and pyfuse3 are too old for us, so the package has its own environment in
`/opt/diesel-fs`. Its interpreter is the system's `/usr/bin/python3`, on whose version the package
depends.
"""

import gzip
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import diesel_fs
from dlcmd.mount_helper import CACHE_FOLDER, STATE_FOLDER

from .dist import DIST, TREE, build, main, set_time

PYTHON = Path("/usr/bin/python3")
HOME = Path("/opt/diesel-fs")
"""The units in `deploy/systemd` start programs of this environment."""

LINKS = {
    "usr/bin/dlcmd": "dlcmd",
    "usr/bin/diesel-server": "diesel-server",
    "usr/sbin/mount.diesel": "mount.diesel",
    "usr/sbin/mount.fuse.diesel": "mount.diesel",
    "usr/sbin/umount.diesel": "umount.diesel",
    "usr/sbin/umount.fuse.diesel": "umount.diesel",
}
"""mount(8) looks for `mount.TYPE` in /usr/sbin alone."""

UNUSED = ("bin/activate*", "bin/Activate*", "bin/diesel-csi", "bin/diesel-operator", "share")
"""The package omits these files. The two programs are for containers."""

CONTROL = """\
Package: diesel-fs
Version: {version}
Architecture: {architecture}
Maintainer: The DIESEL-FS developers <diesel-fs@localhost>
Installed-Size: {kib}
Depends: {depends}
Section: utils
Priority: optional
Description: mounts datasets of many small files for training
 DIESEL-FS packs a dataset of millions of small files once into chunks of a few
 MiB, on an object store or in a folder, and mounts it anywhere as a read-only
 folder. Files are in the kernel's page cache before they are read.
 .
 The package has the programs dlcmd and diesel-server, mount.diesel for fstab
 and autofs, and units for systemd. Their Python environment lies in
 /opt/diesel-fs.
"""

COPYRIGHT = """\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: diesel-fs

Files: *
Copyright: the DIESEL-FS developers
License: Apache-2.0
 On Debian systems the text is in /usr/share/common-licenses/Apache-2.0.
Comment:
 The packages in /opt/diesel-fs/lib have licences of their own, which lie in the
 *.dist-info folder of each.
"""

RELOAD = """\
#!/bin/sh
set -e
[ ! -d /run/systemd/system ] || systemctl daemon-reload || true
"""

PRERM = """\
#!/bin/sh
set -e
# Other mounts, made by hand or from fstab, continue until they are unmounted
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then
    systemctl stop diesel-server.service 'diesel-mount@*.service' || true
fi
"""

POSTRM = f"""\
{RELOAD}
[ "$1" != purge ] || rm -rf {STATE_FOLDER} {CACHE_FOLDER}
"""

SCRIPTS = {"postinst": RELOAD, "prerm": PRERM, "postrm": POSTRM}


def build_deb() -> Path:
    """Raises CalledProcessError."""
    _, wheel = build()
    stage = TREE / "build" / "deb"
    shutil.rmtree(stage, ignore_errors=True)
    _make_environment(stage, wheel)
    _add_files(stage)
    architecture = _output("dpkg", "--print-architecture")
    _add_control(stage, architecture)
    package = DIST / f"diesel-fs_{diesel_fs.__version__}_{architecture}.deb"
    command = ["dpkg-deb", "--root-owner-group", "-Zzstd", "--build", str(stage), str(package)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return package


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _make_environment(stage: Path, wheel: Path) -> None:
    """The environment works after it is moved from `stage` to `/`."""
    home = stage / HOME.relative_to("/")
    home.mkdir(parents=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run([PYTHON, "-m", "venv", "--without-pip", home], check=True, env=clean)
    pip = [sys.executable, "-m", "pip", "--python", f"{home}/bin/python", "--quiet"]
    options = ["--no-compile", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", *options, f"{wheel}[pyfuse3]"], check=True, env=clean)
    (stage / "usr").mkdir()
    (home / "share").rename(stage / "usr" / "share")
    for pattern in UNUSED:
        for path in home.glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in [home / "pyvenv.cfg", *(home / "bin").iterdir()]:
        if not path.is_symlink():
            path.write_bytes(path.read_bytes().replace(os.fsencode(home), os.fsencode(HOME)))
    for path in home.rglob("direct_url.json"):  # it names a file of this machine
        path.unlink()
    # Compiled now, since no user may write there (except the tests of other packages);
    # `unchecked`, since the sources never change
    compiling = ["-m", "compileall", "-q", "-x", "/tests/"]
    compiling += ["--invalidation-mode", "unchecked-hash"]
    subprocess.run(
        [PYTHON, *compiling, "-s", stage, "-p", "/", home / "lib"], check=True, env=clean
    )


def _add_files(stage: Path) -> None:
    for place, program in LINKS.items():
        (stage / place).parent.mkdir(parents=True, exist_ok=True)
        (stage / place).symlink_to(HOME / "bin" / program)
    share = stage / "usr" / "share"
    (share / "zsh" / "site-functions").rename(share / "zsh" / "vendor-completions")
    for page in sorted((share / "man").rglob("*.[1-8]")):
        _compress(page)
    units = stage / "usr" / "lib" / "systemd" / "system"
    shutil.copytree(TREE / "deploy" / "systemd", units)
    documents = share / "doc" / "diesel-fs"
    documents.mkdir(parents=True)
    (documents / "copyright").write_text(COPYRIGHT, encoding="utf-8")
    for name in ("README.md", "CHANGELOG.md"):
        shutil.copy(TREE / name, documents)
    shutil.copy(TREE / "deploy" / "README.md", documents / "deploy.md")
    (stage / "etc" / "diesel" / "mounts").mkdir(parents=True)
    for path in stage.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    (stage / "etc" / "diesel" / "mounts").chmod(0o700)


def _compress(page: Path) -> None:
    packed = gzip.compress(page.read_bytes(), mtime=0)
    page.with_name(f"{page.name}.gz").write_bytes(packed)
    page.unlink()


def _add_control(stage: Path, architecture: str) -> None:
    files = [path for path in sorted(stage.rglob("*")) if path.is_file() and not path.is_symlink()]
    control = stage / "DEBIAN"
    control.mkdir()
    text = CONTROL.format(
        version=diesel_fs.__version__,
        architecture=architecture,
        kib=sum(path.stat().st_size for path in files) // 1024,
        depends=", ".join(_depends()),
    )
    (control / "control").write_text(text, encoding="utf-8")
    sums = (f"{_md5(path)}  {path.relative_to(stage)}\n" for path in files)
    (control / "md5sums").write_text("".join(sums), encoding="utf-8")
    for name, script in SCRIPTS.items():
        (control / name).write_text(script, encoding="utf-8")
        (control / name).chmod(0o755)


def _depends() -> Iterator[str]:
    """The C libraries are those that pyfuse3 was compiled against."""
    version = _output(str(PYTHON), "-c", "import sys; print('%d %d' % sys.version_info[:2])")
    major, minor = map(int, version.split())
    yield f"python3 (>= {major}.{minor}~), python3 (<< {major}.{minor + 1}~)"
    c_library = re.match(r"[0-9.]+", _output("dpkg-query", "-Wf", "${Version}", "libc6"))
    assert c_library is not None
    yield f"libc6 (>= {c_library[0]})"
    yield from ("libfuse3-3 | libfuse3-4", "fuse3", "mount")


def _md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()


if __name__ == "__main__":
    set_time()
    main([build_deb()])
