"""Native mounts and the system's own tools: umount(8), df, find, bind mounts, containers."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from diesel_fs.errors import BusyError, UsageError
from diesel_fs.mounts import mount, stats, umount
from diesel_fs.mounts.mountpoint import mounted_at
from diesel_fs.mounts.processes import children_of, ends_within
from diesel_fs.system import syscalls
from tests.mounts.conftest import PROGRAM, LiveMount, mounting, request_for
from tests.mounts.observed import is_gone
from tests.own_mounts import own_mounts
from tests.unprivileged_user import needs_root
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.fuse, needs_root]


@pytest.fixture
def native(source: Path, tmp_path: Path) -> Iterator[LiveMount]:
    """A native mount with a folder in it."""
    (source / "folder").mkdir()
    (source / "folder" / "file").write_bytes(b"in it")
    with mounting(source, tmp_path / "mount", "native") as mounted:
        yield mounted


def processes_of(mounted: LiveMount) -> list[int]:
    return [mounted.pid, *children_of(mounted.pid)]


def lines_of(place: Path) -> list[str]:
    """The lines of mountinfo of mounts at and below a place."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if line.split()[4].startswith(str(place))]


def run(*command: object) -> "subprocess.CompletedProcess[str]":
    """Runs a tool of the system; the test is skipped where there is none."""
    words = list(map(str, command))
    if shutil.which(words[0]) is None:
        pytest.skip(f"there is no {words[0]}")
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, cwd="/")


def serves(at: Path) -> bool:
    """Whether everything of the mount is there, and `.diesel` is listed nowhere."""
    return (
        (at / "b").read_bytes() == b"beta"
        and os.listdir(at) == ["a", "b", "folder"]
        and json.loads((at / ".diesel" / "stats").read_bytes())["session"] == "native"
    )


def test_umount_8_says_that_it_is_busy_and_changes_nothing(native: LiveMount) -> None:
    """Because of the mount on `.diesel`."""
    found = run("umount", native.at)
    assert found.returncode == 32
    assert "target is busy" in found.stderr
    assert serves(native.at)
    assert len(lines_of(native.at)) == 2


@pytest.mark.parametrize("option", ["-R", "-l"])
def test_umount_8_with_an_option_ends_everything(native: LiveMount, option: str) -> None:
    """`umount -R` and `umount -l` take both mounts away, and the processes end by themselves."""
    pids = processes_of(native)
    found = run("umount", option, native.at)
    assert found.returncode == 0, found.stderr
    assert not lines_of(native.at)
    for pid in pids:
        wait_until(lambda pid=pid: is_gone(pid))  # type: ignore[misc]  # mypy cannot infer a lambda with defaults


def test_a_mount_is_unmounted_innermost_first(native: LiveMount) -> None:
    """As systemd does it at shutdown. Between, the tree goes on serving."""
    pids = processes_of(native)
    assert run("umount", native.at / ".diesel").returncode == 0
    assert (native.at / "b").read_bytes() == b"beta"
    assert (native.at / "a").read_bytes() == b"alpha" * 1000
    assert not any(map(is_gone, pids))
    assert run("umount", native.at).returncode == 0
    for pid in pids:
        wait_until(lambda pid=pid: is_gone(pid))  # type: ignore[misc]  # mypy cannot infer a lambda with defaults


@pytest.mark.parametrize("again", ["umount", "mount"])
def test_a_tree_whose_hidden_folder_was_unmounted_is_unmounted(
    native: LiveMount, again: str
) -> None:
    """By `umount`, and by mounting there again."""
    pids = processes_of(native)
    syscalls.umount2(str(native.at / ".diesel"))
    assert mounted_at(str(native.at)) is not None
    if again == "umount":
        umount(native.at)
        assert not lines_of(native.at)
    else:
        mount(request_for(native.source, native.at, "native"), program=PROGRAM)
        assert serves(native.at)
        assert stats(native.at)["pid"] not in pids
        assert len(lines_of(native.at)) == 2
    for pid in pids:
        wait_until(lambda pid=pid: is_gone(pid))  # type: ignore[misc]  # mypy cannot infer a lambda with defaults


@pytest.mark.parametrize("way", ["umount -R", "umount", "force"])
def test_a_folder_that_was_made_for_the_mount_is_removed_with_it(
    source: Path, tmp_path: Path, way: str
) -> None:
    at = tmp_path / "made" / "for" / "it"
    mount(request_for(source, at, "native"), program=PROGRAM)
    pid = int(str(stats(at)["pid"]))
    if way == "umount -R":
        assert run("umount", "-R", at).returncode == 0
        assert ends_within(pid, PATIENCE_S)
    else:
        umount(at, force=way == "force")
    assert not (tmp_path / "made").exists()


def test_the_mount_on_the_hidden_folder_is_no_mount_of_its_own(native: LiveMount) -> None:
    with pytest.raises(UsageError, match=f"it belongs to the mount on {native.at}$"):
        umount(native.at / ".diesel")
    assert serves(native.at)


HOLD = """if True:
    import mmap, os, sys
    {hold}
    print("held", flush=True)
    sys.stdin.read()
"""

# The last two hold the mount in a way that is found only by trying to unmount it.
HOLDING = {
    "a file in the hidden folder": "file = open('{at}/.diesel/stats')",
    "the hidden folder as working folder": "os.chdir('{at}/.diesel')",
    "a mapped file": "file = open('{at}/a', 'rb'); "
    "held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ); file.close()",
    "a mapped file of the hidden folder": "file = open('{at}/.diesel/snapshot', 'rb'); "
    "held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ); file.close()",
}


@contextmanager
def holding(hold: str) -> Iterator["subprocess.Popen[str]"]:
    """A process that uses a mount."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD.format(hold=hold)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


@pytest.mark.parametrize("way", HOLDING)
def test_a_busy_mount_stays_with_its_hidden_folder(native: LiveMount, way: str) -> None:
    """`umount` names the process, and takes nothing away: `.diesel` is found by name, and listed
    nowhere, also after the kernel has forgotten what names it can."""
    before = len(lines_of(native.at))
    with holding(HOLDING[way].format(at=native.at)) as holder:
        for _ in range(3):
            with pytest.raises(BusyError, match=f"held by processes {holder.pid};"):
                umount(native.at)
            assert serves(native.at)
        if way == "a mapped file":
            Path("/proc/sys/vm/drop_caches").write_text("2")
            assert serves(native.at)
        assert len(lines_of(native.at)) == before
    umount(native.at)
    assert ends_within(native.pid, 0)
    assert not lines_of(native.at)


def test_a_mount_in_which_another_one_is_mounted_is_busy(native: LiveMount) -> None:
    assert run("mount", "-t", "tmpfs", "none", native.at / "folder").returncode == 0
    try:
        with pytest.raises(BusyError, match="or another mount"):
            umount(native.at)
        assert serves(native.at)
    finally:
        assert run("umount", native.at / "folder").returncode == 0
    umount(native.at)
    assert not lines_of(native.at)


def test_two_umounts_at_once_leave_nothing(native: LiveMount) -> None:
    """The slower one may find nothing, but does no harm."""
    command = [
        sys.executable,
        "-c",
        "import sys; from diesel_fs.mounts import umount; umount(sys.argv[1])",
    ]
    both = [
        subprocess.Popen([*command, native.at], stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    complaints = [process.communicate(timeout=60)[1] for process in both]
    assert 0 in [process.returncode for process in both], complaints
    assert not lines_of(native.at)
    assert ends_within(native.pid, PATIENCE_S)


# Tools ------------------------------------------------------------------------------------------


def test_tools_that_stay_on_one_file_system_see_all_and_no_hidden_folder(
    native: LiveMount,
) -> None:
    names = ["", "/a", "/b", "/folder", "/folder/file"]
    found = run("find", native.at, "-xdev")
    assert found.stdout.split() == [f"{native.at}{name}" for name in names]
    assert run("find", native.at).stdout == found.stdout
    assert run("du", "-x", "-b", native.at / "a").stdout.split()[0] == "5000"
    listed = run("du", "-x", "-a", native.at).stdout
    assert ".diesel" not in listed


def test_rsync_copies_all_and_no_hidden_folder(native: LiveMount, tmp_path: Path) -> None:
    found = run("rsync", "-x", "-a", f"{native.at}/", tmp_path / "copy")
    assert found.returncode == 0, found.stderr
    assert sorted(os.listdir(tmp_path / "copy")) == ["a", "b", "folder"]
    assert (tmp_path / "copy" / "a").read_bytes() == b"alpha" * 1000


def test_df_and_findmnt_name_the_dataset(native: LiveMount) -> None:
    """The tree is one mount, and the hidden folder is another one below it."""
    shown = run("df", "--output=source,fstype,target", native.at / "b").stdout.splitlines()[1]
    assert shown.split() == ["folder@7", "erofs", str(native.at)]
    columns = ("-n", "-r", "-o", "SOURCE,FSTYPE,TARGET")
    found = run("findmnt", *columns, "--target", native.at / "b").stdout.split()
    assert found == ["folder@7", "erofs", str(native.at)]
    tree = run("findmnt", *columns, "--submounts", native.at).stdout.splitlines()
    assert tree[1:] == [f"folder@7 fuse.diesel {native.at}/.diesel"]


@pytest.mark.parametrize("command", [["fuser", "-m"], ["lsof", "-t"]])
def test_fuser_and_lsof_find_who_uses_a_mount(native: LiveMount, command: Sequence[str]) -> None:
    with holding(f"file = open('{native.at}/a')") as holder:
        assert str(holder.pid) in run(*command, native.at).stdout.split()


# Bind mounts, mount namespaces ------------------------------------------------------------------


@pytest.fixture
def second(tmp_path: Path) -> Iterator[Path]:
    """A second place, with nothing mounted there at the end."""
    at = tmp_path / "second"
    at.mkdir()
    yield at
    while lines_of(at):
        run("umount", "-R", "-l", at)


def test_a_bind_mount_shows_the_tree_with_an_empty_hidden_folder(
    native: LiveMount, second: Path
) -> None:
    """It keeps the mount alive, and is ended by `umount`."""
    assert run("mount", "--bind", native.at, second).returncode == 0
    assert (second / "a").read_bytes() == b"alpha" * 1000
    assert os.listdir(second) == ["a", "b", "folder"]
    assert os.listdir(second / ".diesel") == []
    assert stats(second)["pid"] == native.pid
    pids = processes_of(native)
    umount(native.at)
    assert not lines_of(native.at)
    assert (second / "b").read_bytes() == b"beta"
    assert not any(map(is_gone, pids))
    umount(second)
    for pid in pids:
        wait_until(lambda pid=pid: is_gone(pid))  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
    assert not lines_of(second)


def test_a_recursive_bind_mount_shows_the_hidden_folder_too(
    native: LiveMount, second: Path
) -> None:
    assert run("mount", "--rbind", native.at, second).returncode == 0
    assert serves(second)
    umount(second)
    assert not lines_of(second)
    assert serves(native.at)


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


class Other:
    """A process in another mount namespace, which gets the mounts of a shared folder."""

    def __init__(self, at: Path) -> None:
        self.process = subprocess.Popen(
            [
                *own_mounts("--propagation=slave", keep=at.parent),
                *(sys.executable, "-c", IN_ANOTHER, at),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd="/",
        )
        assert self._answer() == "there"

    def _answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def asked(self, question: str) -> str:
        """The answer to a question of `IN_ANOTHER`."""
        assert self.process.stdin is not None
        print(question, file=self.process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """Ends the process, and with it the namespace."""
        self.process.kill()
        self.process.communicate(timeout=60)


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Path]:
    """A folder whose mounts come to other mount namespaces, too."""
    folder = tmp_path / "shared"
    folder.mkdir()
    assert run("mount", "-t", "tmpfs", "none", folder).returncode == 0
    assert run("mount", "--make-shared", folder).returncode == 0
    yield folder
    assert run("umount", "-R", "-l", folder).returncode == 0


@pytest.mark.parametrize("before", [True, False])
def test_mounts_come_to_other_namespaces_and_go_from_them(
    source: Path, shared: Path, before: bool
) -> None:
    """Whether the namespace was made before the mount or after it. A file that is open there keeps
    the mount busy here, and everything stays in both."""
    at = shared / "mount"
    other = Other(at) if before else None
    try:
        with mounting(source, at, "native") as mounted:
            other = other or Other(at)
            assert other.asked("read") == "beta True"
            assert other.asked("list") == "2"
            assert other.asked("hold") == "held"
            with pytest.raises(BusyError, match=f"held by processes {other.process.pid};"):
                umount(at)
            assert json.loads((at / ".diesel" / "stats").read_bytes())
            assert os.listdir(at) == ["a", "b"]
            assert other.asked("read") == "beta True"
            assert other.asked("list") == "2"
            assert other.asked("release") == "released"
            umount(at)
            assert other.asked("list") == "0"
            assert ends_within(mounted.pid, PATIENCE_S)
    finally:
        if other is not None:
            other.close()
