"""Native mounts that follow: one moment for all names, trees in the way, kernels, namespaces."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from diesel_fs.errors import BusyError
from diesel_fs.mounts import umount
from diesel_fs.mounts.mountpoints.processes import ends_within
from diesel_fs.mounts.sessions.native import NativeSession
from diesel_fs.mounts.sessions.session import SessionUnsupported
from diesel_fs.mounts.tree.vfs import STATS_MAX_AGE_S
from diesel_fs.system import syscalls
from tests.mounts.dying_daemon import DIES, MOMENT, PAUSE_S
from tests.mounts.observed import Processes, Program, bound, mounted, mounts_below, noise, put
from tests.mounts.other_kernels import KERNEL
from tests.mounts.versions.followed_dataset import (
    FILES,
    POLL_INTERVAL_S,
    FollowedMount,
    begin,
    tried,
)
from tests.own_mounts import own_mounts
from tests.tiers import fast_first
from tests.unprivileged_user import needs_root
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.fuse, pytest.mark.only_session("native"), needs_root]

OTHER_KERNEL = (sys.executable, "-m", "tests.mounts.dying_daemon")

FILES_EACH = 12

READER = """if True:
    import os, random, sys
    from functools import partial
    from pathlib import Path
    at, files_each, seen, rounds = Path(sys.argv[1]), int(sys.argv[2]), 0, 0

    def read(name, folder):
        with open(name, "rb", opener=lambda name, flags: os.open(name, flags, dir_fd=folder)) as f:
            return f.read()

    while not os.path.exists(f"{at}-stop"):
        folder = os.open(at, os.O_RDONLY | os.O_DIRECTORY)
        number = int(read("number", folder))
        assert number >= seen, (number, seen)  # names never lead back to an earlier version
        seen = number
        assert f"new{number}" in os.listdir(folder)
        assert f"new{number + 1}" not in os.listdir(folder)
        for index in random.sample(range(files_each), files_each // 2):
            expected = random.Random(1000 * number + index).randbytes(3000 * index + 1)
            assert read(f"f{index}", folder) == expected, (number, index)
        os.close(folder)
        assert int((at / "number").read_text()) >= number
        rounds += 1
    print(rounds)
"""


def put_number(followed: FollowedMount, number: int) -> None:
    files = {f"f{i}": noise(1000 * number + i, 3000 * i + 1) for i in range(FILES_EACH)}
    followed.put_together({**files, "number": b"%d" % number, f"new{number}": b""})


@pytest.mark.deep
def test_readers_meet_one_whole_version_at_any_time(followed: FollowedMount) -> None:
    put_number(followed, 0)
    command = [sys.executable, "-c", READER, str(followed.at), str(FILES_EACH)]
    readers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    try:
        for number in range(1, 21):
            put_number(followed, number)
    finally:
        followed.at.with_name("mount-stop").touch()
        output = [reader.communicate(timeout=60) for reader in readers]
    assert [text[1] for text in output] == [""] * len(readers)
    assert all(int(text[0]) > 20 for text in output)
    followed.wait_for_retirement()
    assert len(mounts_below(followed.at)) == 2


def test_a_working_folder_stays_in_the_old_version(followed: FollowedMount) -> None:
    program = """if True:
        import os, sys
        os.chdir(sys.argv[1])
        print("there", flush=True)
        sys.stdin.read()
        print(os.listdir("d"))
        try:
            print(os.getcwd())
        except FileNotFoundError:
            print("no path")
        os.chdir(sys.argv[1])
        print(os.getcwd(), os.listdir("d"))
    """
    with Program(program, followed.at) as inside:
        followed.change({"0new": b"0"}, gone=("d/gone",))
        assert followed.retired_versions()
        output = inside.end()
    assert output.splitlines() == ["['gone', 'kept']", "no path", f"{followed.at} ['kept']"]
    followed.wait_for_retirement()


@pytest.mark.parametrize("what", fast_first(["file", "mapping", "working folder"]))
def test_open_files_of_an_old_version_are_busy(followed: FollowedMount, what: str) -> None:
    program = """if True:
        import mmap, os, sys
        at, what = sys.argv[1:]
        if what == "working folder":
            os.chdir(at)
        else:
            held = os.open(f"{at}/gone", os.O_RDONLY)
        if what == "mapping":
            mapped = mmap.mmap(held, 0, prot=mmap.PROT_READ)
            os.close(held)
        print("held", flush=True)
        sys.stdin.read()
        found = (mapped[:] if what == "mapping" else
            open("gone", "rb").read() if what == "working folder" else os.read(held, 1_000_000))
        print(found.hex())
    """
    pid = Processes.of(followed.at).supervisor
    with Program(program, followed.at, what) as user:
        followed.change({"0new": b"0"}, gone=("gone",))
        time.sleep(STATS_MAX_AGE_S)
        with pytest.raises(BusyError, match=f"processes {user.pid}"):
            umount(followed.at)
        assert (followed.at / "kept").read_bytes() == FILES["kept"]
        umount(followed.at, lazy=True)
        assert mounts_below(followed.at) == []
        assert not ends_within(pid, 2.5)
        assert user.end().strip() == FILES["gone"].hex()
    assert ends_within(pid, PATIENCE_S)


def test_a_mount_in_the_way_postpones_the_switch(followed: FollowedMount, tmp_path: Path) -> None:
    at, other = followed.at, tmp_path / "other"
    other.mkdir()
    for place, trouble in ((at, "another file system"), (at / "d", "is mounted inside")):
        with bound(other, place):
            version = followed.put({"0new": os.fsencode(place)})
            wait_until(partial(followed.warnings, trouble))
            time.sleep(10 * POLL_INTERVAL_S)
            assert followed.warnings(trouble) == 1
            assert os.listdir(place) == []
        followed.wait_for(version)
        assert (at / "0new").read_bytes() == os.fsencode(place)
        wait_until(lambda: followed.follow()["trouble"] == "")


def test_a_bind_mount_keeps_its_version(followed: FollowedMount, tmp_path: Path) -> None:
    with bound(followed.at, tmp_path / "elsewhere", "--make-private") as elsewhere:
        followed.change({"changed": noise(60)}, gone=("gone",))
        followed.change({"changed": noise(61)})
        for name in FILES:
            assert (elsewhere / name).read_bytes() == FILES[name]
        assert (followed.at / "changed").read_bytes() == noise(61)
        wait_until(lambda: len(followed.retired_versions()) == 1)
    followed.wait_for_retirement()


def test_a_mount_namespace_with_propagation_switches_too(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    with bound(shared, shared):
        subprocess.run(["mount", "--make-shared", shared], check=True)
        prepared = begin(shared, "native")
        by = own_mounts("--propagation", "slave", keep=tmp_path)
        with Program("print('there', flush=True); input()", by=by) as other:
            there = Path(f"/proc/{other.pid}/root{prepared.at}")
            with mounted(prepared.request):
                for number in range(2):
                    prepared.change({"changed": noise(62 + number)})
                    assert (there / "changed").read_bytes() == noise(62 + number)
                    assert (there / ".diesel/snapshot").exists()
                prepared.wait_for_retirement()
            assert os.listdir(there) == []


def test_resident_files_survive_a_switch_without_the_store(prepared: FollowedMount) -> None:
    contents = {f"many/{number:03}": noise(number) for number in range(200)}
    contents["large"] = random.Random(3).randbytes(9 << 20)
    put(prepared.url, contents)
    request = replace(prepared.request, policy="oneshot")
    with mounted(request):
        wait_until(lambda: prepared.residency()["oneshot_done_chunks"] > 0)
        done = prepared.residency()["oneshot_chunks"]
        wait_until(lambda: prepared.residency()["oneshot_done_chunks"] == done)
        before = prepared.residency()["fetched_bytes"]

        def attempt(number: int) -> None:
            expected = prepared.residency()["resident_entries"] + 2
            for step in ("a", "b"):
                prepared.change({f"0new{number}{step}": b"first of all"})
            wait_until(lambda: prepared.residency()["resident_entries"] >= expected)
            prepared.wait_for_retirement()
            with prepared.served_by_page_cache():
                for name, content in contents.items():
                    assert (prepared.at / name).read_bytes() == content

        tried(attempt)
        assert prepared.residency()["fetched_bytes"] - before < 1 << 20


# the end of a mount during a switch ----------------------------------------------------------


def umount_by_system(at: Path, pid: int) -> None:
    command = ["umount", "--recursive", str(at)]
    wait_until(lambda: subprocess.run(command, check=False).returncode == 0 or not mounts_below(at))


UNMOUNTS: Mapping[str, Callable[[Path, int], object]] = {
    "dlcmd": lambda at, pid: umount(at),
    "dlcmd --lazy": lambda at, pid: umount(at, lazy=True),
    "dlcmd --force": lambda at, pid: umount(at, force=True),
    "umount": umount_by_system,
    "signal": lambda at, pid: os.kill(pid, signal.SIGTERM),
}


@pytest.mark.parametrize("moment", ["made", "beneath", "detached"])
@pytest.mark.parametrize("how", fast_first(UNMOUNTS))
def test_an_umount_during_a_switch_removes_both_trees(
    prepared: FollowedMount, moment: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A switch is made to take longer here than it does."""
    monkeypatch.setenv(DIES, "nobody")
    monkeypatch.setenv(MOMENT, moment)
    with mounted(prepared.request, OTHER_KERNEL):
        pid = Processes.of(prepared.at).supervisor
        prepared.put({"0new": b"0"})
        wait_until(lambda: prepared.warnings("built the tree") == 2)
        time.sleep(PAUSE_S / 3)
        UNMOUNTS[how](prepared.at, pid)
        wait_until(lambda: mounts_below(prepared.at) == [])
        assert ends_within(pid, PATIENCE_S)
        assert mounts_below(prepared.at) == []


# other kernels, and other chains of images ---------------------------------------------------


def test_a_kernel_that_puts_no_mount_beneath_another_keeps_its_version(
    prepared: FollowedMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KERNEL, "no-mounts-beneath")
    with mounted(prepared.request, OTHER_KERNEL):
        prepared.put({"0new": b"0"})
        wait_until(lambda: prepared.warnings("cannot put a mount beneath"))
        prepared.put({"1new": b"1"})
        time.sleep(10 * POLL_INTERVAL_S)
        assert prepared.warnings("cannot put a mount beneath") == 1
        assert "cannot put a mount beneath" in str(prepared.follow()["trouble"])
        assert not (prepared.at / "0new").exists()
        for name in FILES:
            assert (prepared.at / name).read_bytes() == FILES[name]
        umount(prepared.at)


def test_a_kernel_whose_detached_mounts_are_alone_switches_too(
    prepared: FollowedMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KERNEL, "detached-mounts-are-alone")
    with mounted(prepared.request, OTHER_KERNEL):
        for number in range(3):
            prepared.change({"0new": noise(number)})
            assert (prepared.at / "0new").read_bytes() == noise(number)
            assert ".diesel" not in os.listdir(prepared.at)
        assert len(mounts_below(prepared.at)) == 2
        umount(prepared.at)


def test_auto_is_native_for_a_following_mount_only_if_it_can_switch(
    monkeypatch: pytest.MonkeyPatch, session: str
) -> None:
    assert session == "native"
    release = tuple(int(part) for part in os.uname().release.split(".")[:2])
    assert syscalls.can_mount_beneath() == (release >= (6, 5))
    monkeypatch.setattr(syscalls, "can_mount_beneath", lambda: False)
    NativeSession.check_usable()
    with pytest.raises(SessionUnsupported, match="follow"):
        NativeSession.check_usable(must_switch=True)


@pytest.mark.parametrize("kernel", ["", "no-file-mounts"])
def test_a_version_of_another_chain_has_its_own_content_file(
    prepared: FollowedMount, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    """Here no image can be kept, so each one begins a chain."""
    cache = prepared.at.with_name("cache")
    (cache / "diesel").mkdir(parents=True)
    (cache / "diesel/images").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setenv(KERNEL, kernel)
    with mounted(prepared.request, OTHER_KERNEL):
        held = os.open(prepared.at / "gone", os.O_RDONLY)
        prepared.change({}, gone=("gone",))
        for number in range(4):
            prepared.change({"changed": noise(number), f"new{number}": b"new"})
            assert (prepared.at / "changed").read_bytes() == noise(number)
            assert (prepared.at / "kept").read_bytes() == FILES["kept"]
        os.posix_fadvise(held, 0, 0, os.POSIX_FADV_DONTNEED)
        assert os.pread(held, len(FILES["gone"]) + 1, 0) == FILES["gone"]
        os.close(held)
        prepared.wait_for_retirement()
        assert prepared.warnings("is not kept") > 0
