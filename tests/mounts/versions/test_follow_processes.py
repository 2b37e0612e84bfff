"""Mounts that follow: killed processes, readers during switches, and one fetch of a snapshot."""

import errno
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from diesel_fs.client.dataset import connect
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.mounts import umount
from diesel_fs.mounts.processes import ends_within
from diesel_fs.repository.local import LocalRepository
from diesel_fs.system.mountinfo import mounts
from tests.mounts.dying_daemon import DIES, MOMENT
from tests.mounts.observed import mounted, noise
from tests.mounts.versions.followed_dataset import FILES, FollowedMount
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.fuse

DYING = (sys.executable, "-m", "tests.mounts.dying_daemon")


def processes(followed: FollowedMount) -> dict[str, int]:
    """The process IDs of the mount, by name."""
    if followed.request.session != "pyfuse3":
        wait_until(lambda: followed.stats()["residency"])
    stats = followed.stats()
    residency = stats.get("residency")
    found = {"supervisor": stats["pid"], "server": stats["server_pid"]}
    if isinstance(residency, dict) and "pid" in residency:
        found["worker"] = residency["pid"]
    return {name: pid for name, pid in found.items() if isinstance(pid, int)}


def many_names(count: int, letter: str) -> dict[str, bytes]:
    return {f"many/{letter}{number:05}": b"" for number in range(count)}


READERS = """if True:
    import os, sys, random
    at = sys.argv[1]
    while not os.path.exists(at + "-stop"):
        try:
            for name in random.sample(os.listdir(at + "/many"), 50):
                with open(f"{at}/many/{name}", "rb") as file:
                    file.read()
        except FileNotFoundError:
            pass
        except OSError:
            break
"""


@contextmanager
def reading(followed: FollowedMount) -> Iterator[None]:
    """Processes that list, look up and read meanwhile; none of them may hang."""
    command = [sys.executable, "-c", READERS, str(followed.at)]
    readers = [subprocess.Popen(command) for _ in range(2)]
    try:
        yield
    finally:
        followed.at.with_name("mount-stop").touch()
        for reader in readers:
            try:
                reader.wait(10)
            finally:
                reader.kill()


NATIVE = pytest.mark.only_session("native")
FUSE = pytest.mark.only_session("kernel", "pyfuse3")
KERNEL = pytest.mark.only_session("kernel")  # pyfuse3 has no worker


@pytest.mark.deep
@pytest.mark.parametrize(("moment", "victim"), [
    pytest.param("told", "worker", marks=KERNEL),
    *(pytest.param("told", victim, marks=FUSE) for victim in ("server", "supervisor")),
    *(pytest.param("beneath", victim, marks=NATIVE)
      for victim in ("worker", "server", "supervisor")),
    pytest.param("made", "server", marks=NATIVE),
    *(pytest.param("detached", victim, marks=NATIVE) for victim in ("server", "worker")),
])  # fmt: skip
def test_no_process_hangs_when_one_of_the_mount_is_killed_during_a_switch(
    prepared: FollowedMount, moment: str, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed after a part of the notifications, and the server sends the rest for the worker;
    or while there are two trees. Then one umount takes all away.
    """
    followed = prepared
    with connect("ds", followed.url) as dataset:
        for name, content in many_names(3000, "a").items():
            dataset.put(content, name)
    monkeypatch.setenv(DIES, victim)
    monkeypatch.setenv(MOMENT, moment)
    with mounted(followed.request, DYING), reading(followed):
        pids = processes(followed)
        assert len(os.listdir(followed.at / "many")) == 3000
        with connect("ds", followed.url) as dataset:
            dataset.delete("many", recursive=True)
            for name, content in many_names(6000, "b").items():
                dataset.put(content, name)
        assert ends_within(pids[victim], PATIENCE_S)
        if victim == "worker":
            with connect("ds", followed.url) as dataset:
                followed.wait_for(dataset.version)
            assert len([*map(os.stat, (followed.at / "many").iterdir())]) == 6000
            assert not (followed.at / "many/a00000").exists()
            assert (followed.at / "kept").read_bytes() == FILES["kept"]
            followed.change({"0new": b"0"})
            assert (followed.at / "0new").read_bytes() == b"0"
        else:
            for pid in pids.values():
                assert ends_within(pid, 5.0)
            with pytest.raises(OSError, match=r".") as raised:
                os.statvfs(followed.at / ".diesel" if followed.is_native else followed.at)
            assert raised.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
            if (moment, victim) == ("beneath", "server"):
                assert sum(each.path == str(followed.at) for each in mounts()) == 2
            umount(followed.at, lazy=True)
            assert not any(each.path.startswith(str(followed.at)) for each in mounts())


@pytest.mark.deep
def test_readers_get_no_error_but_ENOENT_during_switches(followed: FollowedMount) -> None:
    """Half of the names come and go; an open file is read whole, from one version."""
    at = followed.at
    followed.change({f"many/s{number}": noise(number, 5000) for number in range(40)})
    wrong: list[object] = []
    stop = threading.Event()

    def read(seed: int) -> None:
        chance = random.Random(seed)
        while not stop.wait(0.001):  # else three threads leave the one that puts little time
            number = chance.randrange(40)
            try:
                content = (at / f"many/s{number}").read_bytes()
                if content not in (noise(number, 5000), noise(100 + number, 6000)):
                    wrong.append((number, len(content)))
            except FileNotFoundError:
                if number < 20:
                    wrong.append(number)
            except OSError as error:
                wrong.append(error)

    readers = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for reader in readers:
        reader.start()
    try:
        for step in range(6):
            odd = step % 2
            files = {
                f"many/s{number}": noise(100 * (1 - odd) + number, 5000 + 1000 * (1 - odd))
                for number in range(40)
            }
            gone = tuple(f"many/s{number}" for number in range(20, 40, 2) if odd)
            followed.change({name: files[name] for name in files if name not in gone}, gone=gone)
    finally:
        stop.set()
        for reader in readers:
            reader.join(20)
    assert not wrong


OPENERS = """if True:
    import os, sys, time
    from diesel_fs.repository.local import LocalRepository
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.001)
    with LocalRepository.open(sys.argv[1]) as repository:
        view = repository.view("ds")
        print(view.version, view.lookup(b"kept"), view.entry_count)
"""


@pytest.mark.only_session("kernel")
def test_many_processes_open_one_snapshot_at_once(
    prepared: FollowedMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nodes do whose cache folder is on a shared file system. All get the version, and one whole
    copy of it is left.
    """
    cache = prepared.at.with_name("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    go = prepared.at.with_name("go")
    command = [sys.executable, "-c", OPENERS, prepared.url, str(go)]
    openers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(12)]
    go.touch()
    found = {opener.communicate(timeout=60)[0] for opener in openers}
    assert [opener.returncode for opener in openers] == [0] * len(openers)
    with LocalRepository.open(prepared.url) as repository:
        view = repository.view("ds")
        assert found == {f"{view.version} {view.lookup(b'kept')} {view.entry_count}\n"}
        identity = view.identity
    kept = [path for path in cache.rglob("*") if path.is_file()]
    assert [path.name.split(".")[0] for path in kept] == [f"{identity.hex}-{view.version:016x}"]
    Snapshot(kept[0].read_bytes())


@pytest.mark.only_session("kernel")
def test_a_node_fetches_a_snapshot_once(
    prepared: FollowedMount, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second mount uses the node's copy, so it works where the store's snapshot is damaged."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(prepared.at.with_name("cache")))
    request = replace(prepared.request, follow=False)
    store = Path(prepared.url.removeprefix("file://"))
    with mounted(request):
        assert (prepared.at / "kept").read_bytes() == FILES["kept"]
    snapshots = [path for path in store.rglob("*") if path.parent.name == "snapshots"]
    assert snapshots
    for path in snapshots:
        path.write_bytes(b"damaged")
    for database in store.glob("meta.sqlite*"):
        database.unlink()
    with mounted(request):
        assert (prepared.at / "kept").read_bytes() == FILES["kept"]
