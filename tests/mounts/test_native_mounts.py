"""Native mounts and the system's own tools: umount(8), df, find, bind mounts, containers."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from diesel_fs.errors import BusyError, UsageError
from diesel_fs.mounts import mount, stats, umount
from diesel_fs.mounts.mountpoints.mountpoint import mounted_at
from diesel_fs.mounts.mountpoints.processes import ends_within
from diesel_fs.system import syscalls
from tests.mounts.conftest import PROGRAM, LiveMount, mounting, request_for
from tests.mounts.observed import Processes, Program, holding, is_gone, mounts_below
from tests.own_mounts import own_mounts
from tests.unprivileged_user import needs_root
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.fuse, needs_root]


@pytest.fixture
def native(source: Path, tmp_path: Path) -> Iterator[LiveMount]:
    (source / "folder").mkdir()
    (source / "folder" / "file").write_bytes(b"in it")
    with mounting(source, tmp_path / "mount", "native") as mounted:
        yield mounted


def run(*command: object) -> "subprocess.CompletedProcess[str]":
    words = list(map(str, command))
    if shutil.which(words[0]) is None:
        pytest.skip(f"there is no {words[0]}")
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, cwd="/")


def serves(at: Path) -> bool:
    return (
        (at / "b").read_bytes() == b"beta"
        and os.listdir(at) == ["a", "b", "folder"]
        and json.loads((at / ".diesel" / "stats").read_bytes())["session"] == "native"
    )


def test_umount_8_finds_the_mount_busy_and_takes_it_away_innermost_first(native: LiveMount) -> None:
    """The mount on `.diesel` makes it busy. systemd unmounts in the same way at shutdown."""
    pids = Processes.of(native.at)
    found = run("umount", native.at)
    assert found.returncode == 32
    assert "target is busy" in found.stderr
    assert serves(native.at)
    assert len(mounts_below(native.at)) == 2
    assert run("umount", native.at / ".diesel").returncode == 0
    assert (native.at / "b").read_bytes() == b"beta"
    assert (native.at / "a").read_bytes() == b"alpha" * 1000
    assert not any(map(is_gone, pids))
    assert run("umount", native.at).returncode == 0
    pids.wait_for_their_end()


@pytest.mark.parametrize("option", ["-R", "-l"])
def test_umount_8_with_an_option_ends_everything(native: LiveMount, option: str) -> None:
    pids = Processes.of(native.at)
    found = run("umount", option, native.at)
    assert found.returncode == 0, found.stderr
    assert not mounts_below(native.at)
    pids.wait_for_their_end()


@pytest.mark.parametrize("again", ["umount", "mount"])
def test_a_tree_without_its_hidden_folder_is_unmounted(native: LiveMount, again: str) -> None:
    pids = Processes.of(native.at)
    syscalls.umount2(str(native.at / ".diesel"))
    assert mounted_at(str(native.at)) is not None
    if again == "umount":
        umount(native.at)
        assert not mounts_below(native.at)
    else:
        mount(request_for(native.source, native.at, "native"), program=PROGRAM)
        assert serves(native.at)
        assert stats(native.at)["pid"] not in pids
        assert len(mounts_below(native.at)) == 2
    pids.wait_for_their_end()


def test_a_mount_in_which_another_one_is_mounted_is_busy(native: LiveMount) -> None:
    assert run("mount", "-t", "tmpfs", "none", native.at / "folder").returncode == 0
    try:
        with pytest.raises(BusyError, match="or another mount"):
            umount(native.at)
        assert serves(native.at)
    finally:
        assert run("umount", native.at / "folder").returncode == 0
    with pytest.raises(UsageError, match=f"it belongs to the mount on {native.at}$"):
        umount(native.at / ".diesel")
    assert serves(native.at)
    umount(native.at)
    assert not mounts_below(native.at)


def test_two_umounts_at_once_take_everything_away(native: LiveMount) -> None:
    program = "import sys; from diesel_fs.mounts import umount; umount(sys.argv[1])"
    both = [
        subprocess.Popen([sys.executable, "-c", program, native.at], stderr=subprocess.PIPE)
        for _ in range(2)
    ]
    complaints = [process.communicate(timeout=60)[1] for process in both]
    assert 0 in [process.returncode for process in both], complaints
    assert not mounts_below(native.at)
    assert ends_within(native.pid, PATIENCE_S)


# Tools ------------------------------------------------------------------------------------------


def test_tools_see_all_and_no_hidden_folder(native: LiveMount, tmp_path: Path) -> None:
    names = ["", "/a", "/b", "/folder", "/folder/file"]
    found = run("find", native.at, "-xdev")
    assert found.stdout.split() == [f"{native.at}{name}" for name in names]
    assert run("find", native.at).stdout == found.stdout
    assert run("du", "-x", "-b", native.at / "a").stdout.split()[0] == "5000"
    assert ".diesel" not in run("du", "-x", "-a", native.at).stdout
    copied = run("rsync", "-x", "-a", f"{native.at}/", tmp_path / "copy")
    assert copied.returncode == 0, copied.stderr
    assert sorted(os.listdir(tmp_path / "copy")) == ["a", "b", "folder"]
    assert (tmp_path / "copy" / "a").read_bytes() == b"alpha" * 1000


def test_tools_name_the_dataset_and_its_users(native: LiveMount) -> None:
    shown = run("df", "--output=source,fstype,target", native.at / "b").stdout.splitlines()[1]
    assert shown.split() == ["folder@7", "erofs", str(native.at)]
    columns = ("-n", "-r", "-o", "SOURCE,FSTYPE,TARGET")
    found = run("findmnt", *columns, "--target", native.at / "b").stdout.split()
    assert found == ["folder@7", "erofs", str(native.at)]
    tree = run("findmnt", *columns, "--submounts", native.at).stdout.splitlines()
    assert tree[1:] == [f"folder@7 fuse.diesel {native.at}/.diesel"]
    with holding(f"file = open('{native.at}/a')") as holder:
        for command in (["fuser", "-m"], ["lsof", "-t"]):
            assert str(holder.pid) in run(*command, native.at).stdout.split()


# Bind mounts, mount namespaces ------------------------------------------------------------------


@pytest.fixture
def second(tmp_path: Path) -> Iterator[Path]:
    at = tmp_path / "second"
    at.mkdir()
    yield at
    while mounts_below(at):
        run("umount", "-R", "-l", at)


def test_a_bind_mount_shows_the_tree_with_no_hidden_files(native: LiveMount, second: Path) -> None:
    assert run("mount", "--rbind", native.at, second).returncode == 0
    assert serves(second)
    umount(second)
    assert not mounts_below(second)
    assert serves(native.at)
    assert run("mount", "--bind", native.at, second).returncode == 0
    assert (second / "a").read_bytes() == b"alpha" * 1000
    assert os.listdir(second) == ["a", "b", "folder"]
    assert os.listdir(second / ".diesel") == []
    assert stats(second)["pid"] == native.pid
    pids = Processes.of(native.at)
    umount(native.at)
    assert not mounts_below(native.at)
    assert (second / "b").read_bytes() == b"beta"
    assert not any(map(is_gone, pids))
    umount(second)
    pids.wait_for_their_end()
    assert not mounts_below(second)


IN_ANOTHER = """if True:
    import os, sys
    at = sys.argv[1]
    print("there", flush=True)
    for line in sys.stdin:
        match line.strip():
            case "read":
                print(open(at + "/b").read(), os.path.exists(at + "/.diesel/stats"), flush=True)
            case "list":
                print(sum(at in line for line in open("/proc/self/mountinfo")), flush=True)
            case "hold":
                held = open(at + "/a")
                print("held", flush=True)
            case "release":
                held.close()
                print("released", flush=True)
"""


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "shared"
    folder.mkdir()
    assert run("mount", "-t", "tmpfs", "none", folder).returncode == 0
    assert run("mount", "--make-shared", folder).returncode == 0
    yield folder
    assert run("umount", "-R", "-l", folder).returncode == 0


@pytest.mark.parametrize("before", [True, False])
def test_mounts_reach_and_leave_other_namespaces(source: Path, shared: Path, before: bool) -> None:
    """The namespace may be made before the mount or after it."""
    at = shared / "mount"
    at.mkdir()
    by = own_mounts("--propagation=slave", keep=shared)
    with ExitStack() as stack:
        if before:
            other = stack.enter_context(Program(IN_ANOTHER, at, by=by))
        mounted = stack.enter_context(mounting(source, at, "native"))
        if not before:
            other = stack.enter_context(Program(IN_ANOTHER, at, by=by))
        assert (other.ask("read"), other.ask("list")) == ("beta True", "2")
        assert other.ask("hold") == "held"
        with pytest.raises(BusyError, match=f"held by processes {other.pid};"):
            umount(at)
        assert json.loads((at / ".diesel" / "stats").read_bytes())
        assert os.listdir(at) == ["a", "b"]
        assert (other.ask("read"), other.ask("list")) == ("beta True", "2")
        assert other.ask("release") == "released"
        umount(at)
        assert other.ask("list") == "0"
        assert ends_within(mounted.pid, PATIENCE_S)
