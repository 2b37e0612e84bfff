"""Odd fields in requests, and odd files at targets: the status that CSI names, over the socket."""

import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from diesel_kubernetes.csi import csi_pb2 as csi
from diesel_kubernetes.names import POD_NAMESPACE

from .conftest import FILES, MOUNTS_AS_ROOT, shown
from .plugin import Plugin

pytestmark = MOUNTS_AS_ROOT

Code = grpc.StatusCode
Modes = csi.VolumeCapability.AccessMode

BAD_IDS = ["", "v" * 129, "\u00e9" * 65]
GOOD_IDS = ["v" * 128, "\u00e9" * 64, "a/../b", "two words\n"]


def bad_targets(plugin: Plugin, folder: Path) -> Iterator[str]:
    """The last ones lie in the plugin's own folder."""
    yield from ("", "/", "relative", "./x", f"{folder}/../x", f"{folder}/./x", f"{folder}//x")
    yield from (f"{folder}/x/", f"{folder}/a\0b", f"{folder}/{'n' * 256}", "/a" * 2048)
    yield from (f"{folder}/{'n' * 256}/x", str(plugin.state), str(plugin.state.parent))
    yield from (f"{plugin.state}/{name}" for name in ("x", "mounts", "mounts/x/root", "cache"))
    yield f"{folder}/to_state/mounts"


def capability(**more: object) -> csi.VolumeCapability:
    """The capability that kubelet sends for a folder that one node writes to."""
    return csi.VolumeCapability(
        mount=csi.VolumeCapability.MountVolume(**more),  # type: ignore[arg-type]  # its fields
        access_mode=Modes(mode=Modes.SINGLE_NODE_WRITER),
    )


def status(plugin: Plugin, method: str, **fields: object) -> grpc.StatusCode:
    request = getattr(csi, f"{method}Request")(**fields)
    try:
        plugin.kubelet.call(f"Node/{method}", request, getattr(csi, f"{method}Response"))
    except grpc.RpcError as error:
        ended = error
    else:
        return Code.OK
    assert isinstance(ended, grpc.Call)
    assert ended.details()
    return ended.code()


@pytest.fixture
def folder(plugin: Plugin, tmp_path: Path) -> Path:
    (tmp_path / "to_state").symlink_to(plugin.state)
    return tmp_path


def test_D2_bad_fields_are_invalid_args(plugin: Plugin, pets: dict[str, str], folder: Path) -> None:
    good: dict[str, object] = {
        "volume_id": "v", "target_path": str(folder / "at"), "volume_context": pets,
        "volume_capability": capability(),
    }  # fmt: skip
    many = {f"name{number}": "x" * 100 for number in range(50)}
    bad: dict[str, list[object]] = {
        "volume_id": [*BAD_IDS],
        "target_path": [*bad_targets(plugin, folder)],
        "volume_context": [
            {}, many, {**pets, "colour": "red"}, {**pets, "url": f"{pets['url']}\0"},
            {**pets, "user": "a\0"}, {**pets, "endpoint": "http://host/\0"},
            {**pets, "dataset": ".."},
            {**pets, "region": "x" * 5000}, {**pets, POD_NAMESPACE: "../other"},
            {**pets, POD_NAMESPACE: "a\0b"}, {**pets, "endpoint": f"http://h/{'x' * 5000}"},
        ],
        "secrets": [{"no-such": "x"}, {"key": "a\0b"}, {"key": "x" * 20_000}],
        "volume_capability": [
            None, csi.VolumeCapability(), csi.VolumeCapability(mount={}),
            capability(fs_type="x" * 129), capability(mount_flags=["exec"]),
            capability(mount_flags=["ro\0"]),
            capability(volume_mount_group="g" * 129),
            csi.VolumeCapability(block={}, access_mode=Modes(mode=Modes.SINGLE_NODE_WRITER)),
            *(csi.VolumeCapability(mount={}, access_mode={"mode": mode}) for mode in (0, 99, -1)),
        ],
    }  # fmt: skip
    for field, values in bad.items():
        for value in values:
            code = status(plugin, "NodePublishVolume", **{**good, field: value})
            assert code is Code.INVALID_ARGUMENT, (field, value)
    for value in bad["target_path"]:
        fields = {"volume_id": "v", "target_path": value}
        assert status(plugin, "NodeUnpublishVolume", **fields) is Code.INVALID_ARGUMENT, value
        fields = {"volume_id": "v", "volume_path": value}
        assert status(plugin, "NodeGetVolumeStats", **fields) is Code.INVALID_ARGUMENT, value
    at = str(folder / "at")
    for bad_id in BAD_IDS:
        fields = {"volume_id": bad_id, "target_path": at}
        assert status(plugin, "NodeUnpublishVolume", **fields) is Code.INVALID_ARGUMENT, bad_id
        fields = {"volume_id": bad_id, "volume_path": at}
        assert status(plugin, "NodeGetVolumeStats", **fields) is Code.INVALID_ARGUMENT, bad_id
    for good_id in GOOD_IDS:
        assert status(plugin, "NodeUnpublishVolume", volume_id=good_id, target_path=at) is Code.OK
    assert os.listdir(folder) == ["to_state"]
    assert not plugin.roots, "a mount was started needlessly"


def test_D2_files_at_a_target_stay(plugin: Plugin, pets: dict[str, str], folder: Path) -> None:
    outside = folder / "outside"
    outside.mkdir()
    (folder / "file").write_bytes(b"kept")
    (folder / "full").mkdir()
    (folder / "full/file").write_bytes(b"kept")
    (folder / "link").symlink_to(outside)
    (folder / "broken").symlink_to("nowhere")
    (folder / "circle").symlink_to("circle")
    fields = {"volume_id": "v", "volume_context": pets, "volume_capability": capability()}
    before = sorted(str(path) for path in folder.rglob("*"))
    for name in ("file", "full", "link", "broken", "circle"):
        at = {"target_path": str(folder / name)}
        code = status(plugin, "NodeUnpublishVolume", volume_id="v", **at)
        assert code is Code.FAILED_PRECONDITION, name
        code = status(plugin, "NodePublishVolume", **fields, **at)
        assert code is Code.FAILED_PRECONDITION, name
        code = status(plugin, "NodeGetVolumeStats", volume_id="v", volume_path=str(folder / name))
        assert code is Code.NOT_FOUND, name
    for name in ("none/at", "none/none/at", "file/at", "broken/at", "circle/at"):
        at = {"target_path": str(folder / name)}
        assert status(plugin, "NodeUnpublishVolume", volume_id="v", **at) is Code.OK, name
        code = status(plugin, "NodePublishVolume", **fields, **at)
        assert code is Code.FAILED_PRECONDITION, name
    assert sorted(str(path) for path in folder.rglob("*")) == before
    assert (folder / "file").read_bytes() == (folder / "full/file").read_bytes() == b"kept"
    assert not plugin.roots, "a mount was started needlessly"


def test_D2_a_target_is_one_place_in_any_spelling(
    plugin: Plugin, pets: dict[str, str], folder: Path
) -> None:
    (folder / "pods/at").mkdir(parents=True)
    (folder / "link").symlink_to("pods")
    fields = {"volume_id": "v", "volume_context": pets}
    for mode in [each for each in Modes.Mode.values() if each]:
        for name in ("pods/at", "link/at"):
            code = status(
                plugin, "NodePublishVolume", **fields, target_path=str(folder / name),
                volume_capability=csi.VolumeCapability(mount={}, access_mode={"mode": mode}),
            )  # fmt: skip
            assert code is Code.OK, (mode, name)
    assert shown(folder / "pods/at") == FILES
    at = str(folder / "pods/at")
    assert Path("/proc/self/mountinfo").read_text().count(f" {at} ") == 1
    other = {**fields, "volume_context": {**pets, "umask": "077"}}
    code = status(
        plugin, "NodePublishVolume", **other, target_path=at, volume_capability=capability()
    )
    assert code is Code.ALREADY_EXISTS
    for _ in range(2):
        link = str(folder / "link/at")
        assert status(plugin, "NodeUnpublishVolume", volume_id="v", target_path=link) is Code.OK
    assert os.listdir(folder / "pods") == []
    plugin.wait_until_clean()
