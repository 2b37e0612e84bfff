"""Tests of the unit of a mount, run by a real systemd in namespaces of its own.

The system's files and settings are read-only or copies there. This systemd has our units, and empty
units of the names that ours need; the machine's own units would change what other processes see.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from diesel_fs.system.mountinfo import mounts
from tests.own_mounts import own_mounts
from tests.unprivileged_user import needs_root
from tests.waiting import wait_until

from .test_deploy import DEPLOY

pytestmark = [pytest.mark.deep, pytest.mark.fuse, needs_root]

SYSTEMD = Path("/usr/lib/systemd/systemd")

MACHINE = r"""
set -eu
mount --make-rprivate /
mount -t proc proc /proc
mount --bind /proc/sys /proc/sys
mount -o remount,ro,bind /proc/sys
umount -l /sys/fs/cgroup
mount -t cgroup2 none /sys/fs/cgroup
mount -t tmpfs none /mnt
for place in etc var opt; do
    mkdir /mnt/$place /mnt/.work-$place
    mount -t overlay -o lowerdir=/$place,upperdir=/mnt/$place,workdir=/mnt/.work-$place none /$place
done
mount -t tmpfs none /run
mkdir -p /run/units /etc/diesel/mounts /opt/diesel-fs/bin /var/source
cp "$1"/systemd/* /run/units
for unit in basic sysinit shutdown network-online multi-user machine; do
    printf '[Unit]\nDefaultDependencies=no\n' >/run/units/$unit.target
done
printf '#!/bin/sh\nexec %s "$@"\n' "$2" >/opt/diesel-fs/bin/dlcmd
chmod 755 /opt/diesel-fs/bin/dlcmd
mount -o remount,ro,bind /
echo content >/var/source/file
HOME=/var /opt/diesel-fs/bin/dlcmd --url file:///var/store put -q /var/source pets
for name in pets gone; do
    printf '%s\n' DATASET=$name MOUNTPOINT=/var/mounts/$name DIESEL_URL=file:///var/store \
        'OPTIONS=--memory 64M --allow-other' >/etc/diesel/mounts/$name.env
done
exec env -i container=test SYSTEMD_UNIT_PATH=/run/units PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    "$3" --system --unit=machine.target --log-target=console --show-status=no
"""


class Machine:
    def __init__(self, pid: int) -> None:
        self._pid = pid

    def __call__(self, *command: str) -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", f"--target={self._pid}", "--mount", "--pid", "--ipc", "--uts"]
        return subprocess.run(
            [*enter, "--cgroup", *command],
            check=False, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def state(self, unit: str) -> dict[str, str]:
        lines = self("systemctl", "show", unit).stdout.splitlines()
        return {name: value for name, _, value in (line.partition("=") for line in lines)}


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    groups = [Path(each.path) for each in mounts() if each.kind == "cgroup2"]
    if not (SYSTEMD.exists() and groups and shutil.which("nsenter")):
        pytest.skip("no systemd, no control groups of version 2, or no nsenter here")
    group = groups[0] / f"diesel-test-{os.getpid()}"
    group.mkdir()
    inside = own_mounts("--pid", "--fork", "--cgroup", "--uts", "--ipc", "--kill-child")
    dlcmd = Path(sys.executable).with_name("dlcmd")
    start = f'echo $$ >{group}/cgroup.procs; exec "$@"'
    with subprocess.Popen(
        ["sh", "-c", start, "sh", *inside, "sh", "-c", MACHINE, "sh", DEPLOY, dlcmd, SYSTEMD],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            wait_until(lambda: process.poll() is not None or children.read_text())
            found = Machine(int(children.read_text()))
            up = ("systemctl", "is-active", "--quiet", "machine.target")
            wait_until(lambda: process.poll() is not None or found(*up).returncode == 0)
            assert process.poll() is None, process.stdout and process.stdout.read()
            yield found
        finally:
            process.kill()
    for folder, _, _ in os.walk(group, topdown=False):
        wait_until(lambda folder=folder: _removed(folder))  # type: ignore[misc]  # mypy cannot infer a lambda with defaults


def _removed(group: str) -> bool:
    with suppress(OSError):  # a process in it is still ending
        os.rmdir(group)
        return True
    return False


def test_the_unit_is_active_when_reads_work_and_leaves_nothing(machine: Machine) -> None:
    unit = "diesel-mount@pets"
    started = machine("systemctl", "start", unit)
    assert started.returncode == 0, started.stderr
    assert machine("cat", "/var/mounts/pets/file").stdout == "content\n"
    assert machine.state(unit)["ActiveState"] == "active"
    assert machine("systemctl", "stop", unit).returncode == 0
    assert machine("ls", "/var/mounts").returncode == 2, "the folder that it made is there still"
    assert machine.state(unit)["Result"] == "success"


def test_the_unit_of_a_mount_that_was_killed_mounts_again(machine: Machine) -> None:
    unit = "diesel-mount@pets"
    machine("systemctl", "start", unit)
    first = machine.state(unit)["MainPID"]
    machine("kill", "-9", first)
    wait_until(lambda: machine.state(unit)["NRestarts"] == "1")
    wait_until(lambda: machine.state(unit)["ActiveState"] == "active")
    assert machine("cat", "/var/mounts/pets/file").stdout == "content\n"
    assert machine("systemctl", "stop", unit).returncode == 0


def test_the_unit_of_a_missing_dataset_fails_and_is_not_started_again(machine: Machine) -> None:
    unit = "diesel-mount@gone"
    assert machine("systemctl", "start", unit).returncode == 1
    state = machine.state(unit)
    assert (state["ActiveState"], state["ExecMainStatus"]) == ("failed", "10")
    assert state["NRestarts"] == "0"
    assert machine("ls", "/var/mounts/gone").returncode == 2
