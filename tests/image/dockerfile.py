"""Runs the steps of a Dockerfile without a container engine, as root.

`FROM` names an image that must be pulled. A root that debootstrap makes once takes its place, with
Debian's Python in `/usr/local`, the place of Python in the images of Python. Each stage is an
overlay over that root; each of its commands runs in a mount namespace of its own, so no mount is
left. The network is the machine's, and pip is configured as on the machine. Instructions that this
module does not know are errors.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

SUITE = "trixie"
"""The release of Debian under `python:3.13-slim`."""

PACKAGES = "python3,python3-venv,ca-certificates"
FROM_PYTHON = re.compile(r"python:3\.\d+-slim")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

# The mounts of a container engine, and the machine's own settings of the network and of pip
_ENTER = r"""
set -eu
mount --make-rprivate /
mkdir -p "$MERGED"
mount -t overlay -o "lowerdir=$LOWER,upperdir=$UPPER,workdir=$WORK" none "$MERGED"
mount -t proc proc "$MERGED/proc"
mount -t tmpfs none "$MERGED/dev"
for device in null zero full random urandom fuse; do
    if [ -e "/dev/$device" ]; then
        touch "$MERGED/dev/$device"
        mount --bind "/dev/$device" "$MERGED/dev/$device"
    fi
done
ln -s /proc/self/fd "$MERGED/dev/fd"
for file in $FILES; do
    if [ -f "$file" ] && [ -f "$MERGED$file" ]; then
        mount --bind "$(readlink -f "$file")" "$MERGED$file"
    fi
done
for pair in $BINDS; do
    if [ -d "${pair%%=*}" ]; then mkdir -p "$MERGED${pair#*=}"; else touch "$MERGED${pair#*=}"; fi
done
for place in $WRITABLE; do mkdir -p "$MERGED$place"; done
if [ -n "$READ_ONLY" ]; then
    mount -o remount,ro,bind "$MERGED" 2>/dev/null || mount -o remount,ro "$MERGED"
    for place in $WRITABLE; do mount -t tmpfs -o mode=1777 none "$MERGED$place"; done
fi
for pair in $BINDS; do mount --bind "${pair%%=*}" "$MERGED${pair#*=}"; done
exec "$@"
"""
_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/pip.conf")
_AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")
_AUTHORITIES_INSIDE = "/dev/authorities-of-the-machine"  # no step of an image writes there


class ImageError(Exception):
    """A step failed, or is not known."""


class Instruction(NamedTuple):
    """One instruction of a Dockerfile: `RUN`, and the text after it."""

    name: str
    text: str


def parse(text: str) -> list[Instruction]:
    """The instructions of a Dockerfile. Raises ImageError for one that this module cannot run."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    found: list[Instruction] = []
    for line in filter(str.strip, joined.splitlines()):
        name, _, rest = line.strip().partition(" ")
        if name not in Stage.KNOWN:
            raise ImageError(f"unknown instruction {name}")
        if not found and name != "FROM":
            raise ImageError(f"{name} stands before FROM")
        found.append(Instruction(name, rest.strip()))
    return found


def make_base(folder: Path) -> Path:
    root, made = folder / SUITE, folder / f"{SUITE}.made"
    if made.exists():
        return root
    shutil.rmtree(root, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    targets = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    mirrors = subprocess.run(targets, check=True, capture_output=True, text=True).stdout.split()
    options = ["--variant=minbase", f"--include={PACKAGES}"]
    _check("debootstrap", *options, SUITE, str(root), mirrors[0])
    _check("chroot", str(root), "/usr/bin/python3", "-m", "venv", "/usr/local")
    _check("chroot", str(root), "apt-get", "clean")
    (root / "etc/pip.conf").touch()
    made.touch()
    return root


def _variables(given: Mapping[str, str] | Mapping[Path, str]) -> list[str]:
    return [f"{name}={value}" for name, value in given.items()]


def _check(*command: str) -> None:
    done = subprocess.run(
        command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        stdin=subprocess.DEVNULL, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
    )  # fmt: skip
    if done.returncode != 0:
        raise ImageError(f"{shlex.join(command)} failed:\n{done.stdout[-4000:]}")


@dataclass(slots=True)
class Stage:
    """A stage of a build, and the image that it has become. For one thread."""

    KNOWN = ("FROM", "WORKDIR", "COPY", "RUN", "USER", "EXPOSE", "STOPSIGNAL", "ENTRYPOINT")

    folder: Path
    lower: tuple[Path, ...]
    """The layers below it, the uppermost first."""
    user: str = "0:0"
    workdir: str = "/"
    entry_point: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("upper", "work", "merged"):
            (self.folder / name).mkdir(parents=True)

    def command(
        self,
        *words: str,
        user: str | None = None,
        environment: Mapping[str, str] | None = None,
        binds: Mapping[Path, str] | None = None,
        writable: Sequence[str] | None = None,
    ) -> list[str]:
        """The command that runs a command in this image, as its user or another one.

        `binds`: paths of the machine, and their paths in the image. `writable`: the root is
        read-only except for these folders, which are empty.
        """
        variables = _variables({"PATH": PATH, **(environment or {})})
        inside = ["env", "-i", *variables, "sh", "-c", 'cd "$0" && exec "$@"', self.workdir]
        merged = str(self.folder / "merged")
        chroot = ["chroot", f"--userspec={user or self.user}", merged, *inside, *words]
        return self._in_namespace(chroot, binds or {}, writable)

    def _in_namespace(
        self,
        words: Sequence[str],
        binds: Mapping[Path, str] = MappingProxyType({}),
        writable: Sequence[str] | None = None,
    ) -> list[str]:
        given = {
            "MERGED": str(self.folder / "merged"),
            "LOWER": ":".join(map(str, self.lower)),
            "UPPER": str(self.folder / "upper"),
            "WORK": str(self.folder / "work"),
            "FILES": " ".join(_FILES),
            "BINDS": " ".join(_variables(binds)),
            "READ_ONLY": "" if writable is None else "1",
            "WRITABLE": " ".join(writable or ()),
        }
        return ["unshare", "--mount", "env", *_variables(given), "sh", "-c", _ENTER, "sh", *words]

    def perform(self, step: Instruction, stages: Mapping[str, "Stage"], context: Path) -> None:
        """Run an instruction other than FROM. Raises ImageError."""
        match step.name:
            case "WORKDIR":
                self.workdir = step.text
                _check(*self._in_namespace(["mkdir", "-p", self._inside(step.text)]))
            case "USER":
                self.user = step.text
            case "ENTRYPOINT":
                self.entry_point = json.loads(step.text)
            case "COPY":
                self._copy(shlex.split(step.text), stages, context)
            case "RUN":
                pip = {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
                environment = {**pip, "DEBIAN_FRONTEND": "noninteractive", "HOME": "/root"}
                binds = {}
                if _AUTHORITIES.exists():
                    binds[_AUTHORITIES] = environment["PIP_CERT"] = _AUTHORITIES_INSIDE
                _check(*self.command("sh", "-c", step.text, environment=environment, binds=binds))
            case _:  # EXPOSE, STOPSIGNAL: for an engine
                pass

    def _inside(self, path: str) -> str:
        return f"{self.folder / 'merged'}/{os.path.join(self.workdir, path).lstrip('/')}"

    def _copy(self, words: list[str], stages: Mapping[str, "Stage"], context: Path) -> None:
        origin = context
        if words[0].startswith("--from="):
            origin = stages[words.pop(0).removeprefix("--from=")].folder / "upper"
        *sources, target = words
        for source in sources:
            path = origin / source.lstrip("/")
            if not path.exists():
                raise ImageError(f"COPY: there is no {source}")
            script = 'cp "$1" "$2"'
            if path.is_dir():  # its content, as Docker does
                script = (
                    'mkdir -p "$2" && tar -C "$1" --exclude=__pycache__ -c . | '
                    'tar -C "$2" -x --no-same-owner'
                )
            copying = ["sh", "-ec", script, "sh", str(path), self._inside(target)]
            _check(*self._in_namespace(copying))


def build(
    dockerfile: str, context: Path, folder: Path, images: Mapping[str, Stage] | None = None
) -> Stage:
    """Run all steps of a Dockerfile; the image is the last stage.

    `images`: existing images by the names that FROM may have. Raises ImageError.
    """
    stages: dict[str, Stage] = {}
    current: Stage | None = None
    for step in parse(dockerfile):
        if step.name != "FROM":
            assert current is not None  # `parse` has checked it
            current.perform(step, stages, context)
            continue
        image, *alias = step.text.split(" AS ")
        name = alias[0] if alias else str(len(stages))
        below = (images or {}).get(image)
        if below is not None:
            lower = (below.folder / "upper", *below.lower)
            current = Stage(folder / name, lower, below.user, below.workdir, below.entry_point)
        elif FROM_PYTHON.fullmatch(image):
            current = Stage(folder / name, (make_base(folder.parent / "base"),))
        else:
            raise ImageError(f"no stand-in is known for the image {image}")
        stages[name] = current
    assert current is not None
    return current
