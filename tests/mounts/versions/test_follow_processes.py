"""Mounts that follow: killed processes, and readers during switches."""

import errno
import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from diesel_fs.client.dataset import connect
from diesel_fs.mounts import umount
from diesel_fs.mounts.mountpoints.processes import ends_within
from tests.mounts.dying_daemon import DIES, MOMENT
from tests.mounts.observed import Processes, mounted, mounts_below, noise, put
from tests.mounts.versions.followed_dataset import FILES, FollowedMount
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.fuse

DYING = (sys.executable, "-m", "tests.mounts.dying_daemon")


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
KERNEL = pytest.mark.only_session("kernel")


@pytest.mark.deep
@pytest.mark.parametrize(("moment", "victim"), [
    *(pytest.param("notified", victim, marks=KERNEL)
      for victim in ("worker", "server", "supervisor")),
    *(pytest.param("beneath", victim, marks=NATIVE)
      for victim in ("worker", "server", "supervisor")),
    pytest.param("made", "server", marks=NATIVE),
    *(pytest.param("detached", victim, marks=NATIVE) for victim in ("server", "worker")),
])  # fmt: skip
def test_no_process_hangs_when_one_of_the_mount_is_killed_during_a_switch(
    prepared: FollowedMount, moment: str, victim: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is killed after a part of the notifications, and the server sends the rest for the worker;
    or while there are two trees."""
    followed = prepared
    put(followed.url, many_names(3000, "a"))
    monkeypatch.setenv(DIES, victim)
    monkeypatch.setenv(MOMENT, moment)
    with mounted(followed.request, DYING), reading(followed):
        wait_until(lambda: followed.stats()["residency"])
        pids = Processes.of(followed.at)
        assert len(os.listdir(followed.at / "many")) == 3000
        with connect("ds", followed.url) as dataset:
            dataset.delete("many", recursive=True)
            for name, content in many_names(6000, "b").items():
                dataset.put(content, name)
        assert ends_within(getattr(pids, victim), PATIENCE_S)
        if victim == "worker":
            with connect("ds", followed.url) as dataset:
                followed.wait_for(dataset.version)
            assert len([*map(os.stat, (followed.at / "many").iterdir())]) == 6000
            assert not (followed.at / "many/a00000").exists()
            assert (followed.at / "kept").read_bytes() == FILES["kept"]
            followed.change({"0new": b"0"})
            assert (followed.at / "0new").read_bytes() == b"0"
        else:
            for pid in pids:
                assert ends_within(pid, 5.0)
            with pytest.raises(OSError, match=r".") as raised:
                os.statvfs(followed.at / ".diesel" if followed.is_native else followed.at)
            assert raised.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
            if (moment, victim) == ("beneath", "server"):
                assert mounts_below(followed.at).count(str(followed.at)) == 2
            umount(followed.at, lazy=True)
            assert not mounts_below(followed.at)


@pytest.mark.deep
def test_readers_get_no_error_but_ENOENT_during_switches(followed: FollowedMount) -> None:
    at = followed.at
    followed.change({f"many/s{number}": noise(number, 5000) for number in range(40)})
    wrong: list[object] = []
    stop = threading.Event()

    def read(seed: int) -> None:
        chance = random.Random(seed)
        while not stop.wait(0.001):  # otherwise the put gets little time
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
