"""`mount -t diesel`: mount(8) and umount(8) of this machine start our programs, with fstab.

They run in namespaces of their own, in which `/usr/sbin` has the programs and `/var` is a copy.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from diesel_fs.errors import UsageError
from dlcmd.mount_helper import dlcmd_options, mount_options, mount_program, split_options
from tests.own_mounts import own_mounts
from tests.processes import children
from tests.rows import each_row
from tests.tiers import fast_first
from tests.trees import write
from tests.unprivileged_user import needs_root
from tests.waiting import wait_until

from .conftest import program_environment

SETUP = r"""
set -eu
mount --make-rprivate /
mount -t proc proc /proc
for place in /usr/sbin /var; do
    mkdir -p $1/upper$place $1/work$place
    mount -t overlay -o lowerdir=$place,upperdir=$1/upper$place,workdir=$1/work$place none $place
done
mount -t tmpfs none /run
mkdir /run/mount
cp $1/programs/* /usr/sbin
ln -s umount.diesel /usr/sbin/umount.fuse.diesel
touch $1/ready
exec sleep infinity
"""

AUTOMOUNT = r"""
import fcntl, os, struct, subprocess, sys

at, options = sys.argv[1:]
requests, end = os.pipe()
autofs = f"fd={end},pgrp={os.getpgrp()},minproto=5,maxproto=5,indirect"
mount = ["mount", "-i", "-t", "autofs", "-o", autofs, "test", at]
subprocess.run(mount, check=True, pass_fds=[end])
os.close(end)
root = os.open(at, os.O_RDONLY)
command = ["cat", f"{at}/pets/train/1.txt"]  # of another process group, which autofs stops
reader = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
packet = os.read(requests, 1024)
_, kind, token = struct.unpack_from("=iiI", packet)
*_, length = struct.unpack_from("=IQIIIII", packet, 12)
name = packet[44 : 44 + length].decode()
os.mkdir(f"{at}/{name}")
subprocess.run(["mount", "-t", "diesel", name, f"{at}/{name}", "-o", options], check=True)
fcntl.ioctl(root, 0x9360, token)  # AUTOFS_IOC_READY
print("read:", reader.communicate()[0].decode())
subprocess.run(["umount", f"{at}/{name}"], check=True)
os.close(root)
subprocess.run(["umount", at], check=True)
"""
"""A small automounter: it mounts the first name that a process looks up."""


class Machine:
    """Runs commands as at boot: as root, with next to nothing in the environment."""

    def __init__(self, pid: int, folder: Path) -> None:
        self._pid = pid
        self.folder = folder
        self.url = f"url={(folder / 'store').as_uri()}"

    def __call__(self, *command: str | Path, code: int = 0) -> str:
        enter = ["nsenter", f"--target={self._pid}", "--mount", "--pid", "--wd=/"]
        done = subprocess.run(
            [*enter, *command],
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}, check=False, text=True, timeout=100,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert done.returncode == code, (command, done.stdout)
        return done.stdout

    def fstab(self, *lines: str) -> Path:
        path = self.folder / "fstab"
        path.write_text("".join(f"{line} 0 0\n" for line in lines), encoding="utf-8")
        return path

    def made(self, name: str) -> Path:
        path = self.folder / "at" / name
        path.mkdir(parents=True, exist_ok=True)
        return path


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    folder = tmp_path_factory.mktemp("machine")
    (folder / "programs").mkdir()
    for name, function in (("mount.diesel", "main"), ("umount.diesel", "umount_main")):
        code = f"from dlcmd.mount_helper import {function}; {function}()"
        path = f"PYTHONPATH={shlex.quote(program_environment()['PYTHONPATH'])}"
        words = shlex.join([sys.executable, "-c", code])
        (folder / "programs" / name).write_text(f'#!/bin/sh\n{path} exec {words} "$@"\n')
        (folder / "programs" / name).chmod(0o755)
    source = write(folder / "source", {"train/1.txt": b"one", "tool": b"#!/bin/sh\necho ran\n"})
    (source / "tool").chmod(0o755)
    subprocess.run(
        [sys.executable, "-m", "dlcmd", "-q", "put", source, "pets"], check=True, timeout=100,
        env=program_environment() | {"DIESEL_URL": (folder / "store").as_uri()},
    )  # fmt: skip
    # A temporary folder may lie on an overlay, which cannot be the upper folder of another one
    own = Path("/dev/shm") / f"diesel-test-{os.getpid()}"
    start = 'mount -t tmpfs none "$1" && cp -r "$2"/programs "$1" && exec sh -c "$3" sh "$1"'
    own.mkdir()
    command = [*own_mounts("--pid", "--fork", "--kill-child"), "sh", "-c", start, "sh"]
    with subprocess.Popen([*command, own, folder, SETUP], stdin=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: process.poll() is not None or children(process.pid))
            [pid] = children(process.pid)
            ready = Path(f"/proc/{pid}/root{own}/ready")
            wait_until(lambda: process.poll() is not None or ready.exists())
            assert process.poll() is None
            yield Machine(pid, folder)
        finally:
            process.kill()
    own.rmdir()


boots = [pytest.mark.fuse, needs_root]


@pytest.fixture(params=fast_first(["native", "kernel"]))
def session(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class TestMount:
    pytestmark = boots

    def test_mount_and_umount(self, machine: Machine, session: str) -> None:
        at = machine.made(session)
        options = f"{machine.url},session={session},allow_other,memory=64M,_netdev,x-foo,nofail"
        machine("mount", "-t", "diesel", "pets", at, "-o", options)
        assert machine("cat", at / "train/1.txt") == "one"
        assert machine(at / "tool") == "ran\n"
        assert machine("findmnt", "-no", "SOURCE", at).startswith("pets@")
        assert machine("df", "--output=source", at).splitlines()[1].startswith("pets@")
        busy = machine("sh", "-c", f"cd {at} && umount {at}", code=32)
        assert f"{at} is held by processes" in busy
        machine("umount", at)
        machine("mountpoint", "-q", at, code=32)
        assert "supervisor" not in machine("ps", "-eo", "args")
        assert machine("cat", "/run/mount/utab") == ""

    def test_fstab_and_the_places_of_files(self, machine: Machine) -> None:
        at = machine.made("fstab")
        fstab = machine.fstab(
            f"pets {at} diesel {machine.url},memory=64M,nofail,_netdev",
            f"pets {machine.made('not')} diesel {machine.url},noauto",
        )
        machine("mount", "-a", "-T", fstab)
        assert "already mounted" in machine("mount", "-a", "-T", fstab)
        assert machine("cat", at / "train/1.txt") == "one"
        assert machine("ls", "-A", machine.folder / "at" / "not") == ""
        assert "mount-pets-" in machine("ls", "/var/lib/diesel-mount/diesel")
        assert "snapshots" in machine("ls", "/var/cache/diesel-mount/diesel")
        machine("umount", "-l", at)
        machine("mountpoint", "-q", at, code=32)

    def test_fstab_may_forbid_running_programs(self, machine: Machine, session: str) -> None:
        at = machine.made("noexec")
        options = f"{machine.url},session={session},user"  # that implies noexec
        machine("mount", "-t", "diesel", "pets", at, "-o", options)
        machine("sh", "-c", f"{at}/tool", code=126)
        assert "noexec" in machine("findmnt", "-no", "VFS-OPTIONS", at)
        machine("umount", at)

    def test_the_environment_comes_from_a_file_of_root(self, machine: Machine) -> None:
        at, file = machine.made("environment"), machine.folder / "pets.env"
        url = (machine.folder / "store").as_uri()
        file.write_text(f"# as for systemd\n\nDIESEL_URL='{url}'\n", encoding="utf-8")
        words: list[str | Path] = ["mount", "-t", "diesel", "pets", at, "-o", f"env-file={file}"]
        file.chmod(0o644)
        assert f"chmod 600 {file}" in machine(*words, code=32)
        file.chmod(0o600)
        machine(*words)
        assert machine("cat", at / "train/1.txt") == "one"
        machine("umount", at)
        file.write_text("DIESEL_URL\n", encoding="utf-8")
        assert "not NAME=value" in machine(*words, code=1)

    def test_a_mount_that_autofs_has_ordered(self, machine: Machine) -> None:
        """autofs admits only the automounter's process group, so the daemon is in that one."""
        command = ["setsid", "--wait", sys.executable, "-c", AUTOMOUNT]
        output = machine(*command, machine.made("autofs"), f"{machine.url},memory=64M")
        assert output == "read: one\n"

    @each_row(
        ("device", "options", "code", "message"),
        [
            ("gone", "", 32, "no dataset 'gone'"),
            ("a b", "", 1, "bad dataset name"),
            ("pets", "memroy=1G", 1, "unknown mount option 'memroy'; did you mean memory?"),
            ("pets", "memory=x", 1, "bad size 'x'"),
            ("pets", "memory", 1, "bad mount option 'memory'; write memory=VALUE"),
            ("pets", "follow=1", 1, "bad mount option 'follow=1'; write follow"),
            ("pets", "follow,noexec", 1, "noexec and follow exclude each other"),
            ("pets", "url=diesel://a", 1, "no user"),
            ("pets", "env-file=/gone", 1, "cannot read the environment in /gone"),
        ],
    )
    def test_an_error_has_the_exit_code_of_mount(
        self, machine: Machine, device: str, options: str, code: int, message: str
    ) -> None:
        given, at = ",".join(filter(None, [machine.url, options])), machine.made("bad")
        assert message in machine("mount", "-t", "diesel", device, at, "-o", given, code=code)
        assert "nothing is mounted there" in machine("umount.diesel", at, code=1)

    def test_a_fake_mount_checks_the_options_alone(self, machine: Machine) -> None:
        at = machine.made("fake")
        words: list[str | Path] = ["mount", "-f", "-t", "diesel", "pets", at, "-o"]
        machine(*words, "memroy=1G", code=1)
        machine(*words, "memroy=1G", "-s")
        machine("mountpoint", "-q", at, code=32)
        assert "bad size 'much'" in machine(*words, "memory=much,umask=999", code=1)


def test_every_option_of_dlcmd_mount_is_a_mount_option() -> None:
    """A mount cannot be changed."""
    given = 'rw,url="diesel://a:1,b:2",username=me,group_size=7,follow,user=joe,nosuid,x-a.b=c'
    assert dlcmd_options(split_options(given), sloppy=False) == [
        "--url=diesel://a:1,b:2", "--user=me", "--group-size=7", "--follow"
    ]  # fmt: skip
    names = mount_options()
    assert {"session", "task", "cache-dir", "allow-other", "key-file", "log-file"} <= set(names)
    assert not {"foreground", "json", "help", "user"} & set(names)
    text = CliRunner().invoke(mount_program, ["--help"]).output
    assert [name for name in [*names, "env-file=FILE"] if f"  {name}" not in text] == []
    with pytest.raises(UsageError, match="cannot be remounted"):
        dlcmd_options(["remount", "ro"], sloppy=False)
