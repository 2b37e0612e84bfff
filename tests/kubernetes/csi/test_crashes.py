"""The state after a kill of the plugin or of a mount, and its repair: the tables of `VOLUMES.md`.

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

from diesel_fs.mounts.mountpoints.processes import descendants_of
from tests.processes import is_running
from tests.tiers import fast_first
from tests.waiting import wait_until

from .conftest import FILES, MOUNTS_AS_ROOT, shown
from .plugin import Plugin
from .test_publishing import Code, daemon, refused

pytestmark = MOUNTS_AS_ROOT

Attributes = dict[str, str]


def kill_mount(target: Path) -> None:
    supervisor = daemon(target)
    for pid in (*descendants_of(supervisor), supervisor):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_mounts_survive_the_plugin_and_the_next_one_ends_unused_ones(
    own_plugin: Plugin, pets: Attributes, tmp_path: Path
) -> None:
    target, second = tmp_path / "mount", tmp_path / "second"
    own_plugin.kubelet.publish(target, pets)
    pid = daemon(target)
    own_plugin.restart(signal.SIGKILL)
    assert shown(target) == FILES
    own_plugin.kubelet.publish(target, pets)
    own_plugin.kubelet.publish(second, pets)
    assert daemon(target) == daemon(second) == pid
    assert own_plugin.end(signal.SIGTERM) == 0
    assert shown(target) == FILES
    own_plugin.start()
    own_plugin.kubelet.unpublish(target)
    assert not target.exists()
    own_plugin.end(signal.SIGKILL)
    os.system(f"umount -l {second}")  # noqa: S605  # as a kubelet that cleans up by itself
    (own_plugin.state / "mounts" / ("0" * 32 + "-1") / "root").mkdir(parents=True)
    own_plugin.start()
    own_plugin.wait_until_clean()


def test_a_kill_while_a_mount_starts_makes_no_second_one(
    own_plugin: Plugin, pets: Attributes, tmp_path: Path
) -> None:
    """The program that starts it goes on, and holds the lock; the next publish waits for it."""
    target = tmp_path / "mount"

    def starting() -> list[int]:
        return [pid for pid, line in own_plugin.processes().items() if "\0dlcmd\0" in line]

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(own_plugin.kubelet.publish, target, pets)
        wait_until(starting)
        (starter,) = starting()
        own_plugin.end(signal.SIGKILL)
        with pytest.raises((grpc.RpcError, ValueError)):  # the channel is closed, too
            call.result()
    assert not target.exists()
    own_plugin.start()
    own_plugin.kubelet.publish(target, pets)
    assert shown(target) == FILES
    assert not is_running(starter)
    assert len(own_plugin.roots) == 1
    own_plugin.kubelet.unpublish(target)


def test_the_next_call_joins_a_mount(own_plugin: Plugin, pets: Attributes, tmp_path: Path) -> None:
    own_plugin.end()
    own_plugin.options = (*own_plugin.options, "--idle=60")  # the last call counts
    own_plugin.start()
    target = tmp_path / "mount"
    own_plugin.kubelet.deadline_s = 0.2
    refused(Code.DEADLINE_EXCEEDED, own_plugin.kubelet.publish, target, pets)
    own_plugin.kubelet.deadline_s = 60
    own_plugin.kubelet.publish(target, pets)
    assert shown(target) == FILES
    assert len(own_plugin.roots) == 1
    own_plugin.kubelet.unpublish(target)
    assert len(own_plugin.roots) == 1  # the next pod of a Job finds it
    own_plugin.end()
    own_plugin.options = own_plugin.options[:-1]
    own_plugin.start()


@pytest.mark.parametrize("session", fast_first(["native", "kernel"]))
def test_a_mount_that_died_is_reported_and_replaced_or_unpublished(
    own_plugin: Plugin, pets: Attributes, tmp_path: Path, session: str
) -> None:
    """Kubelet publishes again by itself (`requiresRepublish`)."""
    kubelet, attributes = own_plugin.kubelet, {**pets, "session": session}
    one, two = targets = [tmp_path / "one", tmp_path / "two"]
    for target in targets:
        kubelet.publish(target, attributes)
    kill_mount(one)
    wait_until(lambda: kubelet.stats(one).volume_condition.abnormal)
    with pytest.raises(OSError) as error:  # noqa: PT011  # the numbers are compared
        (one / ".diesel/stats").read_bytes()
    assert error.value.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.ENOENT)
    kubelet.publish(one, attributes)
    assert shown(one) == FILES
    assert not kubelet.stats(one).volume_condition.abnormal
    assert kubelet.stats(two).volume_condition.abnormal
    kubelet.publish(two, attributes)
    assert daemon(one) == daemon(two)
    with (one / "a").open("rb"):  # a process that still holds a file
        kill_mount(one)
        for target in targets:
            kubelet.unpublish(target)
            assert not target.exists()


def test_one_plugin_a_state_folder(own_plugin: Plugin) -> None:
    second = Plugin(own_plugin.folder, own_plugin.options)
    with pytest.raises(AssertionError, match="another diesel-csi"):
        second.start()
    assert second.process.wait(30) == 11
    assert second.process.stdout is not None
    second.process.stdout.close()
    assert own_plugin.kubelet.probe()
