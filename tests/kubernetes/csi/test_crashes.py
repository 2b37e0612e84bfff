"""What a kill of the plugin, or of a mount, leaves, and who cleans it: the tables of `VOLUMES.md`.

A restart of the plugin kills its whole process group: mounts must not be part of it.
"""

import errno
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from diesel_fs.mounts.processes import descendants_of
from tests.cli.conftest import is_running
from tests.tiers import fast_first
from tests.waiting import wait_until

from .conftest import FILES
from .plugin import Plugin
from .test_publishing import Code, daemon, failed, shown

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root binds mounts"),
]


def kill_mount(target: Path) -> None:
    """Kill all processes of the mount that a target shows, at once."""
    supervisor = daemon(target)
    for pid in (*descendants_of(supervisor), supervisor):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def starting(plugin: Plugin) -> list[int]:
    """The programs that start mounts now."""
    return [pid for pid, line in plugin.processes().items() if "\0dlcmd\0" in line]


def test_mounts_survive_a_kill_of_the_plugin(
    own_plugin: Plugin, store: str, tmp_path: Path
) -> None:
    target, attributes = tmp_path / "mount", {"dataset": "pets", "url": store}
    own_plugin.kubelet.publish(target, attributes)
    pid = daemon(target)
    own_plugin.restart(signal.SIGKILL)
    assert shown(target) == FILES
    own_plugin.kubelet.publish(target, attributes)
    own_plugin.kubelet.publish(tmp_path / "second", attributes)
    assert daemon(target) == daemon(tmp_path / "second") == pid
    assert own_plugin.end(signal.SIGTERM) == 0
    assert shown(target) == FILES
    own_plugin.start()
    for each in (target, tmp_path / "second"):
        own_plugin.kubelet.unpublish(each)
        assert not each.exists()


def test_what_nobody_shows_any_more_is_ended_by_the_next_plugin(
    own_plugin: Plugin, store: str, tmp_path: Path
) -> None:
    target = tmp_path / "mount"
    own_plugin.kubelet.publish(target, {"dataset": "pets", "url": store})
    own_plugin.end(signal.SIGKILL)
    os.system(f"umount -l {target}")  # noqa: S605  # as a kubelet that cleans up by itself
    (own_plugin.state / "mounts" / ("0" * 32 + "-1") / "root").mkdir(parents=True)
    own_plugin.start()
    own_plugin.wait_until_clean()


def test_a_kill_while_a_mount_starts_makes_no_second_one(
    own_plugin: Plugin, store: str, tmp_path: Path
) -> None:
    """The program that starts it goes on, and holds the lock; the next publish waits for it."""
    target, attributes = tmp_path / "mount", {"dataset": "pets", "url": store}
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(own_plugin.kubelet.publish, target, attributes)
        wait_until(lambda: starting(own_plugin))
        (starter,) = starting(own_plugin)
        own_plugin.end(signal.SIGKILL)
        with pytest.raises((grpc.RpcError, ValueError)):  # the channel is closed, too
            call.result()
    assert not target.exists()
    own_plugin.start()
    own_plugin.kubelet.publish(target, attributes)
    assert shown(target) == FILES
    assert not is_running(starter)
    assert len(own_plugin.roots) == 1
    own_plugin.kubelet.unpublish(target)


def test_a_late_mount_is_joined_by_the_next_call(
    own_plugin: Plugin, store: str, tmp_path: Path
) -> None:
    own_plugin.end()
    own_plugin.options = (*own_plugin.options, "--idle=60")  # the last one counts
    own_plugin.start()
    target, attributes = tmp_path / "mount", {"dataset": "pets", "url": store}
    own_plugin.kubelet.deadline_s = 0.2
    with pytest.raises(grpc.RpcError) as error:
        own_plugin.kubelet.publish(target, attributes)
    assert failed(error)[0] is Code.DEADLINE_EXCEEDED
    own_plugin.kubelet.deadline_s = 60
    own_plugin.kubelet.publish(target, attributes)
    assert shown(target) == FILES
    assert len(own_plugin.roots) == 1
    own_plugin.kubelet.unpublish(target)
    assert len(own_plugin.roots) == 1  # the next pod of a Job finds it
    own_plugin.end()
    own_plugin.options = own_plugin.options[:-1]
    own_plugin.start()


@pytest.mark.parametrize("session", fast_first(["native", "kernel"]))
def test_a_mount_that_died_is_reported_and_replaced(
    own_plugin: Plugin, store: str, tmp_path: Path, session: str
) -> None:
    """Kubelet publishes again by itself (`requiresRepublish`)."""
    attributes = {"dataset": "pets", "url": store, "session": session}
    targets = [tmp_path / "one", tmp_path / "two"]
    for target in targets:
        own_plugin.kubelet.publish(target, attributes)
    kill_mount(targets[0])
    wait_until(lambda: own_plugin.kubelet.stats(targets[0]).volume_condition.abnormal)
    with pytest.raises(OSError) as error:  # noqa: PT011  # the numbers are compared
        (targets[0] / ".diesel/stats").read_bytes()
    assert error.value.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.ENOENT)
    own_plugin.kubelet.publish(targets[0], attributes)
    assert shown(targets[0]) == FILES
    assert not own_plugin.kubelet.stats(targets[0]).volume_condition.abnormal
    assert own_plugin.kubelet.stats(targets[1]).volume_condition.abnormal
    own_plugin.kubelet.publish(targets[1], attributes)
    assert daemon(targets[0]) == daemon(targets[1])
    for target in targets:
        own_plugin.kubelet.unpublish(target)


def test_a_dead_mount_is_unpublished(own_plugin: Plugin, store: str, tmp_path: Path) -> None:
    target = tmp_path / "mount"
    own_plugin.kubelet.publish(target, {"dataset": "pets", "url": store})
    with (target / "a").open("rb"):  # a process that still holds a file
        kill_mount(target)
        own_plugin.kubelet.unpublish(target)
        assert not target.exists()
    own_plugin.wait_until_clean()


def test_one_plugin_a_state_folder(own_plugin: Plugin) -> None:
    second = Plugin(own_plugin.folder, own_plugin.options)
    with pytest.raises(AssertionError, match="another diesel-csi"):
        second.start()
    assert second.process.wait(30) == 11
    assert second.process.stdout is not None
    second.process.stdout.close()
    assert own_plugin.kubelet.probe()
