"""Tests of `dlcmd mount`, `umount` and `stats`. `tests/mounts` tests the mounts themselves."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from diesel_fs.errors import DieselError
from diesel_fs.mounts import umount
from diesel_fs.mounts.mountpoints.mountpoint import mounted_at
from dlcmd.show.mount_stats import stats_lines
from tests.own_mounts import own_mounts
from tests.processes import command_lines, is_running
from tests.rows import each_row
from tests.tiers import fast_first
from tests.trees import facts, write
from tests.unprivileged_user import needs_root
from tests.waiting import wait_until

from .conftest import Dlcmd, program_environment


@each_row(
    ("words", "message"),
    [
        *((["--umask", bad], f"bad umask {bad!r}") for bad in ("99", "-1", "0o22", "07777777")),
        (["--memory", "much"], "bad size 'much'"),
        (["--memory", "0"], "--memory 0 leaves no room"),
        (["--memory", "999T"], f"{999 << 40:,} bytes of memory are more than the"),
        (["--session", "none"], "'none' is not one of"),
        (["--offline"], "--offline needs --snapshot"),
        (["--metrics", "99999"], "a port is at most 65535"),
        (["--uid", "nobody of ours"], "there is no user 'nobody of ours'"),
        (["--gid", "4294967295"], "no gid is 4294967295: the greatest is 4294967294"),
        (["--task", ""], "--task: its value is empty"),
        (["--url", "http://host/x"], "known are file, s3, gs, az, diesel, diesel+tls"),
    ],
)
def test_options_are_refused(dlcmd: Dlcmd, tmp_path: Path, words: list[str], message: str) -> None:
    assert message in dlcmd("mount", *words, "pets", tmp_path / "mnt", code=2).err
    assert not (tmp_path / "mnt").exists()


def test_impossible_places_are_errors(dlcmd: Dlcmd, tmp_path: Path) -> None:
    for verb in ("umount", "stats"):
        assert "no mount of a dataset" in dlcmd(verb, tmp_path, code=2).err
    (tmp_path / "file").touch()
    is_root = os.geteuid() == 0
    if not is_root:
        tmp_path.chmod(0o500)
    at, code = (tmp_path / "file/mnt", 2) if is_root else (tmp_path / "mnt", 12)
    assert "cannot make the folder" in dlcmd("mount", "pets", at, code=code).err


@pytest.mark.fuse
def test_a_terminal_shows_the_progress_of_loading(dlcmd: Dlcmd, tmp_path: Path) -> None:
    files = {f"{number}": os.urandom(60_000) for number in range(200)}
    dlcmd("put", "--chunk-size", "256K", write(tmp_path / "src", files), "pets")
    at = tmp_path / "mnt"
    for memory, whole in (("256M", True), ("5M", False)):
        ours, terminal = os.openpty()
        words = ["mount", "--policy", "oneshot", "--memory", memory, "pets", str(at)]
        with subprocess.Popen(
            [sys.executable, "-m", "dlcmd", *words],
            env=program_environment(), stdout=subprocess.PIPE, stderr=terminal,
        ) as process:  # fmt: skip
            os.close(terminal)
            result = b""
            with suppress(OSError):  # EIO, when the other end is closed
                while read := os.read(ours, 1 << 16):
                    result += read
            assert process.wait(60) == 0, result
        os.close(ours)
        assert b"load pets" in result
        assert b"chunks" in result
        described = dlcmd("--json", "stats", at).objects[0]["residency"]
        assert isinstance(described, dict)
        assert (described["oneshot_done_chunks"] == described["oneshot_chunks"]) == whole
        assert whole or not described["has_room"]
        dlcmd("umount", at)


@pytest.mark.fuse
def test_without_pyfuse3_only_its_session_is_missing(
    dlcmd: Dlcmd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wheel is installed without it on a machine that cannot compile pyfuse3."""
    source = put_private(dlcmd, tmp_path)
    (tmp_path / "pyfuse3.py").write_text("raise ModuleNotFoundError('No module named pyfuse3')")
    monkeypatch.syspath_prepend(tmp_path)
    at = tmp_path / "mnt"
    result = dlcmd("mount", "--session", "pyfuse3", "pets", at, code=12).err
    assert "the pyfuse3 session cannot be used: it needs the package pyfuse3 (No module" in result
    assert "libfuse3-dev" in result
    assert "pip install 'diesel_fs-VERSION-py3-none-any.whl[pyfuse3]'" in result
    assert not at.exists()
    for session in ("auto", "kernel"):
        dlcmd("mount", "--session", session, "pets", at)
        assert facts(at) == facts(source)
        dlcmd("umount", at)


def put_private(dlcmd: Dlcmd, tmp_path: Path) -> Path:
    source = write(tmp_path / "src", {"a": b"1", "sub/b": b"2"})
    source.chmod(0o700)
    dlcmd("put", source, "pets")
    return source


OTHER_DEVICE = """
set -e
mount -t tmpfs -o "$1" none "$2"
mknod "$2/fuse" c 10 "$3"
mount --bind "$2/fuse" /dev/fuse
shift 3
exec "$@"
"""
IN_A_CONTAINER = "; a container needs --device /dev/fuse --cap-add SYS_ADMIN"


@pytest.mark.fuse
@needs_root
@each_row(
    ("way", "session", "message"),
    [
        ("nodev 229", "auto", f"cannot open /dev/fuse: Permission denied{IN_A_CONTAINER}"),
        ("dev 254", "kernel", "; `modprobe fuse` as root loads FUSE; a container needs"),
        ("no capability", "auto", IN_A_CONTAINER),
        ("no capability", "native", "the native session cannot be used: it needs root with CAP"),
        ("no capability", "pyfuse3", IN_A_CONTAINER),
    ],
)
def test_H24_on_a_machine_that_forbids_mounting_the_error_has_the_reason(
    dlcmd: Dlcmd, tmp_path: Path, way: str, session: str, message: str
) -> None:
    """A container without the device, without the capability, or without the driver."""
    dlcmd("put", write(tmp_path / "src", {"a": b"1"}), "pets")
    (tmp_path / "dev").mkdir()
    around = ["setpriv", "--bounding-set=-sys_admin", "--"]
    if way != "no capability":
        option, number = way.split()
        device = [option, str(tmp_path / "dev"), number]
        around = [*own_mounts(), "sh", "-c", OTHER_DEVICE, "sh", *device]
    words = ["mount", "--session", session, "pets", str(tmp_path / "mnt")]
    done = subprocess.run(
        [*around, sys.executable, "-m", "dlcmd", *words],
        env=program_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 12, done.stderr
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "mnt").exists()


@pytest.mark.real_start
@pytest.mark.fuse
def test_a_dataset_is_mounted_and_unmounted(dlcmd: Dlcmd, tmp_path: Path) -> None:
    source = put_private(dlcmd, tmp_path)
    folder = tmp_path / "mnt"
    folder.mkdir()
    assert "version 7" in dlcmd("mount", "pets@7", folder, code=10).err
    assert "no dataset 'gone'" in dlcmd("mount", "gone", folder, code=10).err
    assert "did you mean pets?" in dlcmd("mount", "pet", folder, code=10).err
    message = dlcmd("mount", "pets/sub", folder, code=2).err
    assert "it is a path; name the dataset, pets: its folders are in it" in message
    output = dlcmd("mount", "--seed", "4", "--group-size", "3", "pets", folder).out
    assert output == f"pets is mounted on {folder}\n".encode()
    try:
        assert facts(folder) == facts(source)
        assert "is mounted on" in dlcmd("mount", "pets", folder, code=11).err
        (result,) = dlcmd("--json", "stats", folder).objects
        assert result["mountpoint"] == str(folder)
        assert b"mountpoint" in dlcmd("stats", folder).out
        listed = (folder / ".diesel/filelist").read_bytes()
        numbers = ("--seed", "4", "--epoch", "0", "--group-size", "3")
        assert listed == dlcmd("shuffle", "pets", *numbers).out
        assert sorted(listed.split()) == [b"a", b"sub/b"]
        message = dlcmd("umount", "pets", code=2).err
        mounted_on = message.partition("the dataset pets is mounted on ")[2].strip().split(", ")
        assert str(folder) in mounted_on  # other tests may have mounted a dataset of this name
        with (folder / "a").open("rb"):
            assert str(os.getpid()) in dlcmd.program("umount", folder, code=11).err
            assert (folder / "sub/b").read_bytes() == b"2"
    finally:
        dlcmd("umount", folder)
    assert list(folder.iterdir()) == []


STATS = {
    "dataset": "pets",
    "version": 1_700_000_000_000_000,
    "bytes": 5_000_000,
    "uptime_s": 12.34,
    "requests": {"lookup": 4321},
    "residency": {
        "resident_bytes": 4096,
        "store": {"fetched_bytes": 1_200_000},
        "streams": [
            {"name": "a", "epoch": 3, "position": 250, "length": 1000, "entries_per_s": 1234.5},
            {"name": "late", "epoch": 0, "position": 0, "length": 10, "tentative": True},
            {"name": "over", "epoch": -1},
        ],
    },
    "new in a later version": {"some_bytes": 3},
    "empty": {},
}


def test_statistics_are_shown_in_groups_with_units() -> None:
    shown = [" ".join(line.split()) for line in stats_lines(STATS)]
    assert shown == [
        "(counters may be a second old)",
        "dataset pets", "version 1700000000000000", "bytes 5.0 MB", "uptime s 12.3 s", "",
        "requests of the kernel:", "lookup 4,321", "",
        "contents in the kernel's cache:", "resident bytes 4.1 kB",
        "",
        "read from the store to be pushed:", "fetched bytes 1.2 MB", "",
        "plans:", "stream epoch position of files/s", "a 3 250 1,000 25 % 1,234",
        "late 0 0 10 0 % 0 not followed yet", "over - all read", "",
        "new in a later version:", "some bytes 3 B",
    ]  # fmt: skip


@pytest.mark.fuse
def test_a_missing_folder_is_made_and_removed_with_its_mount(dlcmd: Dlcmd, tmp_path: Path) -> None:
    """So are the missing folders above it."""
    dlcmd("put", write(tmp_path / "src", {"a": b"1"}), "pets")
    (tmp_path / "there").mkdir()
    folder = tmp_path / "there/made/mnt"

    def is_gone() -> bool:
        return [*(tmp_path / "there").iterdir()] == []

    def end_by_signal() -> None:
        pid = dlcmd("--json", "stats", folder).objects[0]["pid"]
        os.kill(int(str(pid)), signal.SIGTERM)

    plain = ["umount", "-R"] if os.geteuid() == 0 else ["fusermount3", "-u"]
    ends: list[Callable[[], object]] = [
        lambda: dlcmd("umount", folder),
        end_by_signal,
        lambda: subprocess.run([*plain, folder], check=True),
    ]
    for end in ends:
        dlcmd("mount", "pets", folder)
        assert (folder / "a").read_bytes() == b"1"
        end()
        wait_until(is_gone)
    dlcmd("mount", "pets", folder)
    with (folder / "a").open("rb") as file:
        dlcmd("umount", "--lazy", folder)
        wait_until(is_gone)
        assert file.read() == b"1"
    for missing in ("gone", "pets@7"):
        dlcmd("mount", missing, folder, code=10)
        assert is_gone()
    with dlcmd.start("mount", "-f", "pets", folder) as process:
        wait_until((folder / "a").exists)
        process.terminate()
    assert is_gone()
    dlcmd("mount", "pets", folder)
    (tmp_path / "there/made/other").mkdir()
    dlcmd("umount", folder)
    assert [each.name for each in folder.parent.iterdir()] == ["other"]


def _processes_of(folder: Path) -> list[int]:
    """The mount's daemon and the processes that it has forked; they have its arguments."""
    wanted = {os.fsencode(folder), b"diesel_fs.mounts.daemon.supervisor"}
    found = [pid for pid, line in command_lines() if wanted <= {*line.split(b"\0")}]
    return [pid for pid in found if is_running(pid)]


MOMENTS: dict[str, Callable[[Path], object]] = {
    "the daemon has been started": _processes_of,
    "the daemon has forked": lambda folder: len(_processes_of(folder)) > 1,
    "it is mounted, but not ready": lambda folder: mounted_at(str(folder)),
}


@pytest.mark.fuse
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize(
    ("number", "code"),
    fast_first(
        [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129), (signal.SIGKILL, -9)]
    ),
)
def test_a_mount_that_is_interrupted_leaves_nothing(
    dlcmd: Dlcmd, tmp_path: Path, moment: str, number: signal.Signals, code: int
) -> None:
    dlcmd("put", write(tmp_path / "src", {"a": b"1"}), "pets")
    folder = tmp_path / "made" / "mnt"
    for attempt in range(20):  # it may be ready before it is interrupted
        log = tmp_path / f"log{attempt}"
        with dlcmd.start("mount", "--log-file", log, "pets", folder) as process:
            wait_until(lambda: MOMENTS[moment](folder) or process.poll() is not None)
            process.send_signal(number)
            _, result = process.communicate(timeout=60)
        was_ready = number == signal.SIGKILL and log.exists() and "is mounted on" in log.read_text()
        if process.returncode and not was_ready:
            break
        with suppress(DieselError):
            umount(folder)
        wait_until(lambda: not _processes_of(folder))
    assert process.returncode == code, result
    if number == signal.SIGKILL:  # it can wait for nothing; one look may miss a process that forks
        wait_until(lambda: not any(_processes_of(folder) for _ in range(2)))
    else:
        assert not folder.parent.exists()
    assert _processes_of(folder) == []
    assert mounted_at(str(folder)) is None
    dlcmd("delete-dataset", "--yes", "pets")
    assert list(dlcmd.store.glob("datasets/*/chunks/*/*")) == []


@pytest.mark.fuse
def test_a_mount_of_a_version_that_may_be_old_prints_a_note(dlcmd: Dlcmd, tmp_path: Path) -> None:
    dlcmd("put", write(tmp_path / "source", {"a": b"1"}), "pets")
    for file in dlcmd.store.glob("meta.sqlite*"):
        file.unlink()
    folder = tmp_path / "mount"
    assert "--stale" in dlcmd("mount", "--stale", "refuse", "pets", folder, code=12).err
    result = dlcmd.program("mount", "pets", folder).err
    try:
        assert "the newest snapshot, which is" in result
        (described,) = dlcmd("--json", "stats", folder).objects
        assert str(described["warning"]) in result
        assert "warning" in dlcmd("stats", folder).out.decode()
    finally:
        dlcmd("umount", folder)


def budget_of_master(dlcmd: Dlcmd, at: Path) -> int:
    match dlcmd("--json", "stats", at).objects[0]["task"]:
        case {"node_cache": {"memory_budget_bytes": int(budget)}}:
            return budget
    return 0


@pytest.mark.fuse
def test_H25_a_mount_right_after_another_has_its_own_options(
    dlcmd: Dlcmd, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The master of the former one, which stays for some seconds, makes way, even if the new one
    leaves an option at its default. A master that is in use keeps its options."""
    dlcmd("put", write(tmp_path / "src", {"a": b"1" * 5000}), "pets")
    at, other = tmp_path / "mnt", tmp_path / "other"
    seen = list[int]()
    for words in (["--evict", "lru", "--memory", "200M"], ["--memory", "300M"]):
        dlcmd("mount", "--task", "night", "--rank", "0", "--world", "1", *words, "pets", at)
        assert "ignored" not in caplog.text
        wait_until(lambda: budget_of_master(dlcmd, at))
        seen.append(budget_of_master(dlcmd, at))
        if len(seen) < 2:
            dlcmd("umount", at)
    assert seen[0] < seen[1]
    dlcmd("mount", "--task", "night", "--evict", "lfu", "pets", other)
    assert "--evict: ignored, because this node's master" in caplog.text
    dlcmd("umount", other)
    dlcmd("umount", at)
