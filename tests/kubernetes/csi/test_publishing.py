"""Publishing over the socket of a running plugin, with real mounts: `VOLUMES.md`, step by step."""

import json
import os
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from diesel_kubernetes.csi import csi_pb2 as csi
from tests.waiting import wait_until

from .conftest import FILES, put_files
from .plugin import Plugin

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root binds mounts"),
]

Code = grpc.StatusCode


def failed(error: "pytest.ExceptionInfo[grpc.RpcError]") -> tuple[grpc.StatusCode, str]:
    """The status with which a call ended."""
    assert isinstance(error.value, grpc.Call)
    return error.value.code(), error.value.details() or ""


def daemon(target: Path) -> int:
    """The process of the mount that a target shows."""
    return int(json.loads((target / ".diesel/stats").read_text())["pid"])


def shown(target: Path) -> dict[str, bytes]:
    """The files at a target."""
    found = [path for path in target.rglob("*") if path.is_file()]
    return {str(path.relative_to(target)): path.read_bytes() for path in found}


def test_a_published_volume_can_be_read_and_not_written(
    plugin: Plugin, store: str, tmp_path: Path
) -> None:
    target = tmp_path / "mount"
    plugin.kubelet.publish(target, {"dataset": "pets", "url": store})
    assert shown(target) == FILES
    with pytest.raises(OSError, match="Read-only"):
        (target / "a").write_bytes(b"x")
    found = plugin.kubelet.stats(target)
    assert not found.volume_condition.abnormal
    assert found.usage[0].total >= sum(map(len, FILES.values()))
    plugin.kubelet.unpublish(target)
    assert not target.exists()
    plugin.wait_until_clean()


def test_the_same_again_is_fine_and_another_volume_is_not(
    plugin: Plugin, store: str, tmp_path: Path
) -> None:
    target, attributes = tmp_path / "mount", {"dataset": "pets", "url": store}
    plugin.kubelet.publish(target, attributes)
    before = daemon(target)
    plugin.kubelet.publish(target, attributes)
    assert daemon(target) == before
    with pytest.raises(grpc.RpcError) as error:
        plugin.kubelet.publish(target, {**attributes, "umask": "077"})
    assert failed(error)[0] is Code.ALREADY_EXISTS
    assert shown(target) == FILES
    for _ in range(2):
        plugin.kubelet.unpublish(target)
    plugin.kubelet.unpublish(tmp_path / "was never there")
    with pytest.raises(grpc.RpcError) as error:
        plugin.kubelet.stats(target)
    assert failed(error)[0] is Code.NOT_FOUND


def test_a_renewed_secret_is_no_other_volume(plugin: Plugin, store: str, tmp_path: Path) -> None:
    """Kubelet publishes again with the Secret of now; the mount goes on with that of before."""
    target, attributes = tmp_path / "mount", {"dataset": "pets", "url": store}
    plugin.kubelet.publish(target, attributes, secrets={"redisPassword": "before"})
    before = daemon(target)
    plugin.kubelet.publish(target, attributes, secrets={"redisPassword": "after"})
    assert daemon(target) == before
    plugin.kubelet.unpublish(target)


def test_equal_volumes_share_a_mount_and_tenants_do_not(
    plugin: Plugin, store: str, tmp_path: Path
) -> None:
    attributes = {"dataset": "pets", "url": store, "session": "kernel"}
    secret = {"redisPassword": "a secret of the team"}
    targets = [tmp_path / str(number) for number in range(5)]
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
    for target in targets[1:]:
        plugin.kubelet.unpublish(target)
    plugin.wait_until_clean()


def test_a_volume_shows_the_version_that_it_names(plugin: Plugin, tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    first = put_files(url, {"a": b"first"})
    put_files(url, {"a": b"second"})
    for attributes, content in (({"version": str(first)}, b"first"), ({}, b"second")):
        plugin.kubelet.publish(tmp_path / "mount", {"dataset": "pets", "url": url, **attributes})
        assert (tmp_path / "mount/a").read_bytes() == content
        plugin.kubelet.unpublish(tmp_path / "mount")


@pytest.mark.deep
def test_a_volume_follows_its_dataset(plugin: Plugin, tmp_path: Path) -> None:
    """A bind shows the switch: such mounts have the kernel session."""

    url = (tmp_path / "store").as_uri()
    put_files(url, {"a": b"first"})
    target = tmp_path / "mount"
    plugin.kubelet.publish(target, {"dataset": "pets", "url": url, "follow": "true"})
    assert (target / "a").read_bytes() == b"first"
    put_files(url, {"a": b"second"})
    wait_until(lambda: (target / "a").read_bytes() == b"second", 30.0)
    plugin.kubelet.unpublish(target)


@pytest.mark.parametrize(
    ("attributes", "code", "said"),
    [
        ({"dataset": "no-such"}, Code.NOT_FOUND, "no-such"),
        ({"dataset": "pets", "url": "diesel://127.0.0.1:1"}, Code.INVALID_ARGUMENT, "user"),
        ({"dataset": "pets", "colour": "red"}, Code.INVALID_ARGUMENT, "'colour'"),
        ({"dataset": "pets", "version": "12"}, Code.NOT_FOUND, "12"),
    ],
)
def test_an_error_has_its_code_and_leaves_nothing(
    plugin: Plugin,
    store: str,
    tmp_path: Path,
    attributes: dict[str, str],
    code: grpc.StatusCode,
    said: str,
) -> None:
    with pytest.raises(grpc.RpcError) as error:
        plugin.kubelet.publish(tmp_path / "mount", {"url": store, **attributes})
    assert failed(error)[0] is code
    assert said in failed(error)[1]
    assert not (tmp_path / "mount").exists()
    plugin.wait_until_clean()


def test_a_request_that_is_no_volume_is_refused(plugin: Plugin, store: str, tmp_path: Path) -> None:
    attributes = {"dataset": "pets", "url": store}
    for target, volume, flag, wanted in (
        (tmp_path / "mount", "", "ro", "names no volume"),
        (tmp_path / "mount", "v", "exec", "'exec'"),
        (Path("relative"), "v", "ro", "target path"),
        (tmp_path / "../mount", "v", "ro", "target path"),
    ):
        with pytest.raises(grpc.RpcError, match=wanted) as error:
            plugin.kubelet.publish(target, attributes, volume=volume, flags=(flag,))
        assert failed(error)[0] is Code.INVALID_ARGUMENT
    block = csi.NodePublishVolumeRequest(
        volume_id="v",
        target_path=str(tmp_path / "mount"),
        volume_capability=csi.VolumeCapability(block=csi.VolumeCapability.BlockVolume()),
    )
    with pytest.raises(grpc.RpcError, match="Filesystem"):
        plugin.kubelet.call("Node/NodePublishVolume", block, csi.NodePublishVolumeResponse)


def test_another_file_system_at_the_target_stays(
    plugin: Plugin, store: str, tmp_path: Path
) -> None:
    target = tmp_path / "mount"
    target.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "foreign", target], check=True)
    try:
        with pytest.raises(grpc.RpcError) as error:
            plugin.kubelet.publish(target, {"dataset": "pets", "url": store})
        assert failed(error)[0] is Code.ALREADY_EXISTS
        with pytest.raises(grpc.RpcError, match="tmpfs") as error:
            plugin.kubelet.unpublish(target)
        assert failed(error)[0] is Code.FAILED_PRECONDITION
        assert os.path.ismount(target)
    finally:
        subprocess.run(["umount", target], check=True)


@pytest.mark.deep
def test_volumes_side_by_side_leave_nothing(plugin: Plugin, store: str, tmp_path: Path) -> None:
    """Five at once, each with a mount of its own; `make bench` has fifty."""
    plugin.kubelet.probe()
    plugin.wait_until_clean()
    before = sorted(plugin.descriptors())
    targets = [tmp_path / str(number) for number in range(5)]
    with ThreadPoolExecutor(len(targets)) as pool:
        for call in [
            pool.submit(
                plugin.kubelet.publish, each, {"dataset": "pets", "url": store, "seed": each.name}
            )
            for each in targets
        ]:
            call.result()
        assert len(plugin.roots) == len(targets)
        assert all(shown(target) == FILES for target in targets)
        for ended in [pool.submit(plugin.kubelet.unpublish, each) for each in targets]:
            ended.result()
    assert os.listdir(tmp_path) == []
    plugin.wait_until_clean()
    assert sorted(plugin.descriptors()) == before
    assert os.listdir(plugin.state / "locks") == []


def test_a_plugin_answers_while_volumes_wait_for_a_server(plugin: Plugin, tmp_path: Path) -> None:
    """A server that accepts and never answers: each call ends at its deadline, Probe at once."""
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
    kubelet = plugin.kubelet
    info = kubelet.call(
        "Identity/GetPluginInfo", csi.GetPluginInfoRequest(), csi.GetPluginInfoResponse
    )
    assert info.name == "csi.diesel-fs.dev"
    assert info.vendor_version
    node = kubelet.call("Node/NodeGetInfo", csi.NodeGetInfoRequest(), csi.NodeGetInfoResponse)
    assert node.node_id == "node-1"
    found = kubelet.call(
        "Node/NodeGetCapabilities",
        csi.NodeGetCapabilitiesRequest(),
        csi.NodeGetCapabilitiesResponse,
    )
    assert [each.rpc.type for each in found.capabilities] == [2, 4, 5]
    with pytest.raises(grpc.RpcError) as error:
        kubelet.call("Node/NodeStageVolume", csi.ProbeRequest(), csi.ProbeResponse)
    assert failed(error)[0] is Code.UNIMPLEMENTED


def test_probe_says_what_is_wrong(own_plugin: Plugin, tmp_path: Path) -> None:
    """The state folder is put on a file system that turns read-only."""
    assert own_plugin.kubelet.probe()
    state = own_plugin.state
    subprocess.run(["mount", "--bind", state, state], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", state], check=True)
        with pytest.raises(grpc.RpcError, match="cannot write") as error:
            own_plugin.kubelet.probe()
        assert failed(error)[0] is Code.PERMISSION_DENIED
    finally:
        subprocess.run(["umount", state], check=True)
    assert own_plugin.kubelet.probe()
