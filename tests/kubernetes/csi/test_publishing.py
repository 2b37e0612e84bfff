"""Publishing over the socket of a running plugin, with real mounts: `VOLUMES.md`, step by step."""

import json
import os
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ParamSpec

import grpc
import pytest

from diesel_kubernetes.csi import csi_pb2 as csi
from tests.rows import each_row
from tests.waiting import wait_until

from .conftest import FILES, MOUNTS_AS_ROOT, put_files, shown
from .plugin import Plugin

pytestmark = MOUNTS_AS_ROOT

P = ParamSpec("P")
Code = grpc.StatusCode


def refused(
    code: grpc.StatusCode, call: Callable[P, object], *args: P.args, **more: P.kwargs
) -> str:
    with pytest.raises(grpc.RpcError) as error:
        call(*args, **more)
    assert isinstance(error.value, grpc.Call)
    assert error.value.code() is code, error.value.details()
    return error.value.details() or ""


def daemon(target: Path) -> int:
    return int(json.loads((target / ".diesel/stats").read_text())["pid"])


def test_a_volume_is_read_only_and_published_once_for_the_same_calls(
    plugin: Plugin, pets: dict[str, str], tmp_path: Path
) -> None:
    """Kubelet publishes again with the current Secret; the mount goes on with the earlier one."""
    kubelet, target = plugin.kubelet, tmp_path / "mount"
    kubelet.publish(target, pets, secrets={"redisPassword": "before"})
    assert shown(target) == FILES
    with pytest.raises(OSError, match="Read-only"):
        (target / "a").write_bytes(b"x")
    found = kubelet.stats(target)
    assert not found.volume_condition.abnormal
    assert found.usage[0].total >= sum(map(len, FILES.values()))
    before = daemon(target)
    for password in ("before", "after"):
        kubelet.publish(target, pets, secrets={"redisPassword": password})
        assert daemon(target) == before
    refused(Code.ALREADY_EXISTS, kubelet.publish, target, {**pets, "umask": "077"})
    assert shown(target) == FILES
    for _ in range(2):
        kubelet.unpublish(target)
        assert not target.exists()
    kubelet.unpublish(tmp_path / "was never there")
    refused(Code.NOT_FOUND, kubelet.stats, target)
    plugin.wait_until_clean()


def test_equal_volumes_share_a_mount_and_tenants_do_not(
    plugin: Plugin, pets: dict[str, str], tmp_path: Path
) -> None:
    """`make bench` has fifty volumes."""
    attributes = {**pets, "session": "kernel"}
    secret = {"redisPassword": "a secret of the team"}
    targets = [tmp_path / str(number) for number in range(5)]
    plugin.kubelet.probe()
    before = sorted(plugin.descriptors())
    with ThreadPoolExecutor() as pool:
        calls = [
            pool.submit(plugin.kubelet.publish, target, attributes, pod=str(number))
            for number, target in enumerate(targets[:3])
        ]
        calls += [
            pool.submit(plugin.kubelet.publish, targets[3], attributes, namespace="others"),
            pool.submit(plugin.kubelet.publish, targets[4], attributes, secrets=secret),
        ]
        for call in calls:
            call.result()
        assert len(plugin.roots) == 3
        assert len({daemon(target) for target in targets[:3]}) == 1
        plugin.kubelet.unpublish(targets[0])
        assert shown(targets[1]) == FILES
        list(pool.map(plugin.kubelet.unpublish, targets[1:]))
    plugin.wait_until_clean()
    assert os.listdir(tmp_path) == []
    wait_until(lambda: sorted(plugin.descriptors()) == before)
    assert os.listdir(plugin.state / "locks") == []


@pytest.mark.deep
def test_a_volume_follows_its_dataset(plugin: Plugin, tmp_path: Path) -> None:
    """A bind shows the switch: such mounts have the kernel session."""
    url, target = (tmp_path / "store").as_uri(), tmp_path / "mount"
    put_files(url, {"a": b"first"})
    plugin.kubelet.publish(target, {"dataset": "pets", "url": url, "follow": "true"})
    assert (target / "a").read_bytes() == b"first"
    put_files(url, {"a": b"second"})
    wait_until(lambda: (target / "a").read_bytes() == b"second", 30.0)
    plugin.kubelet.unpublish(target)


@each_row(
    ("attributes", "code", "message"),
    [
        ({"dataset": "no-such"}, Code.NOT_FOUND, "no-such"),
        ({"url": "diesel://127.0.0.1:1"}, Code.INVALID_ARGUMENT, "user"),
        ({"colour": "red"}, Code.INVALID_ARGUMENT, "'colour'"),
        ({"version": "12"}, Code.NOT_FOUND, "12"),
    ],
)
def test_an_error_has_its_code_and_leaves_nothing(
    plugin: Plugin,
    pets: dict[str, str],
    tmp_path: Path,
    attributes: dict[str, str],
    code: grpc.StatusCode,
    message: str,
) -> None:
    target = tmp_path / "mount"
    assert message in refused(code, plugin.kubelet.publish, target, {**pets, **attributes})
    assert not target.exists()
    plugin.wait_until_clean()


def test_bad_volumes_are_refused(plugin: Plugin, pets: dict[str, str], tmp_path: Path) -> None:
    kubelet, code = plugin.kubelet, Code.INVALID_ARGUMENT
    for target, volume, flag, wanted in (
        (tmp_path / "mount", "", "ro", "names no volume"),
        (tmp_path / "mount", "v", "exec", "'exec'"),
        (Path("relative"), "v", "ro", "target path"),
        (tmp_path / "../mount", "v", "ro", "target path"),
    ):
        assert wanted in refused(code, kubelet.publish, target, pets, volume=volume, flags=(flag,))
    block = csi.NodePublishVolumeRequest(
        volume_id="v",
        target_path=str(tmp_path / "mount"),
        volume_capability=csi.VolumeCapability(block=csi.VolumeCapability.BlockVolume()),
    )
    answer = csi.NodePublishVolumeResponse
    assert "Filesystem" in refused(code, kubelet.call, "Node/NodePublishVolume", block, answer)


def test_other_mounts_at_a_target_stay(
    plugin: Plugin, pets: dict[str, str], tmp_path: Path
) -> None:
    target = tmp_path / "mount"
    target.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "foreign", target], check=True)
    try:
        refused(Code.ALREADY_EXISTS, plugin.kubelet.publish, target, pets)
        assert "tmpfs" in refused(Code.FAILED_PRECONDITION, plugin.kubelet.unpublish, target)
        assert os.path.ismount(target)
    finally:
        subprocess.run(["umount", target], check=True)


def test_a_plugin_answers_while_volumes_wait_for_a_server(plugin: Plugin, tmp_path: Path) -> None:
    """The server accepts and never answers."""
    attributes = {"dataset": "pets", "user": "ann"}
    key = {"key": "diesel-key-1:" + "A" * 43 + "="}
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        attributes["url"] = f"diesel://127.0.0.1:{silent.getsockname()[1]}"
        before, plugin.kubelet.deadline_s = plugin.kubelet.deadline_s, 2.0
        try:
            with ThreadPoolExecutor(30) as pool:
                calls = [
                    pool.submit(plugin.kubelet.publish, tmp_path / str(n), attributes, secrets=key)
                    for n in range(30)
                ]
                for _ in range(5):
                    assert plugin.kubelet.probe()
        finally:
            plugin.kubelet.deadline_s = before
    for call in calls:
        error = call.exception()
        assert isinstance(error, grpc.Call)
        assert error.code() in (Code.DEADLINE_EXCEEDED, Code.UNAVAILABLE)


def test_identity_and_node(plugin: Plugin) -> None:
    call = plugin.kubelet.call
    info = call("Identity/GetPluginInfo", csi.GetPluginInfoRequest(), csi.GetPluginInfoResponse)
    assert info.name == "csi.diesel-fs.dev"
    assert info.vendor_version
    node = call("Node/NodeGetInfo", csi.NodeGetInfoRequest(), csi.NodeGetInfoResponse)
    assert node.node_id == "node-1"
    request = csi.NodeGetCapabilitiesRequest()
    found = call("Node/NodeGetCapabilities", request, csi.NodeGetCapabilitiesResponse)
    assert [each.rpc.type for each in found.capabilities] == [2, 4, 5]
    unknown = "Node/NodeStageVolume"
    refused(Code.UNIMPLEMENTED, call, unknown, csi.ProbeRequest(), csi.ProbeResponse)


def test_probe_reports_the_fault(own_plugin: Plugin) -> None:
    assert own_plugin.kubelet.probe()
    state = own_plugin.state
    subprocess.run(["mount", "--bind", state, state], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", state], check=True)
        assert "cannot write" in refused(Code.PERMISSION_DENIED, own_plugin.kubelet.probe)
    finally:
        subprocess.run(["umount", state], check=True)
    assert own_plugin.kubelet.probe()
