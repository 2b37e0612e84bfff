"""The volumes of a pod on a stand-in node: folders that its containers' processes can use.

Kinds: emptyDir, secret, configMap, hostPath, csi (inline), and persistentVolumeClaim bound to a
volume of kind csi or hostPath. A CSI driver is asked as kubelet asks it: with the volume's
attributes, what `podInfoOnMount` adds, the secret of `nodePublishSecretRef`, and a target below the
pod's folder, whose parent exists. The calls and names follow Kubernetes 1.20
(`pkg/volume/csi/csi_mounter.go`).
"""

import base64
import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lightkube import Client
from lightkube.models.core_v1 import KeyToPath, SecretReference, Volume
from lightkube.resources.core_v1 import ConfigMap, PersistentVolume, PersistentVolumeClaim, Pod
from lightkube.resources.core_v1 import Secret as SecretResource

from diesel_fs.system.mountinfo import mounts


class VolumeError(Exception):
    """A volume cannot be made now. The node says so in the pod's status, and tries again."""


@dataclass(frozen=True, slots=True)
class CsiVolume:
    """What kubelet tells a driver in NodePublishVolume."""

    volume_id: str
    target: Path
    attributes: Mapping[str, str]
    secrets: Mapping[str, str]
    read_only: bool
    access_mode: str
    """As in a PersistentVolume, such as `ReadOnlyMany`; empty for an inline volume."""
    mount_flags: tuple[str, ...] = ()


class CsiDriver(Protocol):
    """The node service of a CSI driver, called over whatever it listens on.

    A failed call raises VolumeError, with what the driver said, and is made again.
    """

    def publish(self, volume: CsiVolume) -> None:
        """NodePublishVolume."""

    def unpublish(self, volume_id: str, target: Path) -> None:
        """NodeUnpublishVolume."""


@dataclass(slots=True)
class PodVolumes:
    """The volumes of one pod, in a folder of its own. For one thread."""

    client: Client
    pod: Pod
    folder: Path
    drivers: Mapping[str, CsiDriver]
    folders: dict[str, Path] = field(default_factory=dict)
    """By the volume's name: the folder (or file) of those that have been made."""
    _published: dict[str, tuple[CsiDriver, CsiVolume]] = field(default_factory=dict)

    def make(self) -> None:
        """Make the volumes that are not there yet. Raises VolumeError, ApiError."""
        assert self.pod.spec is not None
        for volume in self.pod.spec.volumes or []:
            if volume.name not in self.folders:
                self.folders[volume.name] = self._made(volume)

    def remove(self) -> None:
        """Unpublish and remove all volumes. Raises VolumeError, and can be called again.

        What a container mounted in its volumes is unmounted, as at the end of its mount namespace;
        in a volume of kind hostPath it stays.
        """
        for name, (driver, volume) in list(self._published.items()):
            driver.unpublish(volume.volume_id, volume.target)
            del self._published[name]
        left = [each.path for each in mounts() if each.path.startswith(f"{self.folder}/")]
        detach = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-uz"]
        for path in reversed(left):
            subprocess.run([*detach, path], check=True, capture_output=True)
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self.folders.clear()

    def _made(self, volume: Volume) -> Path:
        own = self.folder / volume.name
        if volume.emptyDir is not None:
            own.mkdir(parents=True)
        elif volume.secret is not None:
            assert volume.secret.secretName is not None
            found = self.client.get(
                SecretResource, volume.secret.secretName, namespace=self._namespace
            )
            data = {key: base64.b64decode(text) for key, text in (found.data or {}).items()}
            _write_files(own, data, volume.secret.items)
        elif volume.configMap is not None:
            assert volume.configMap.name is not None
            config = self.client.get(ConfigMap, volume.configMap.name, namespace=self._namespace)
            texts = {key: text.encode() for key, text in (config.data or {}).items()}
            _write_files(own, texts, volume.configMap.items)
        elif volume.hostPath is not None:
            return _host_path(volume.hostPath.path, volume.hostPath.type)
        elif volume.csi is not None:
            identity = f"{self._uid}{volume.name}".encode()
            secret = volume.csi.nodePublishSecretRef
            return self._publish(
                volume.name,
                volume.csi.driver,
                CsiVolume(
                    volume_id=f"csi-{hashlib.sha256(identity).hexdigest()}",
                    target=self._target(volume.name),
                    attributes=self._attributes(volume.csi.volumeAttributes, inline=True),
                    secrets=self._secret(secret.name, self._namespace) if secret else {},
                    read_only=bool(volume.csi.readOnly),
                    access_mode="",
                ),
            )
        elif volume.persistentVolumeClaim is not None:
            return self._claimed(volume.name, volume.persistentVolumeClaim.claimName)
        else:
            raise VolumeError(f"volume {volume.name}: this stand-in knows no such kind")
        return own

    def _claimed(self, name: str, claim_name: str) -> Path:
        claim = self.client.get(PersistentVolumeClaim, claim_name, namespace=self._namespace)
        if claim.spec is None or claim.spec.volumeName is None:
            raise VolumeError(f"volume {name}: the claim {claim_name} is not bound")
        spec = self.client.get(PersistentVolume, claim.spec.volumeName).spec
        assert spec is not None
        if spec.hostPath is not None:
            return _host_path(spec.hostPath.path, spec.hostPath.type)
        if spec.csi is None:
            raise VolumeError(f"volume {name}: this stand-in knows no such kind")
        reference: SecretReference | None = spec.csi.nodePublishSecretRef
        return self._publish(
            name,
            spec.csi.driver,
            CsiVolume(
                volume_id=spec.csi.volumeHandle,
                target=self._target(name),
                attributes=self._attributes(spec.csi.volumeAttributes, inline=False),
                secrets=self._secret(reference.name, reference.namespace) if reference else {},
                read_only=bool(spec.csi.readOnly),
                access_mode=(spec.accessModes or [""])[0],
                mount_flags=tuple(spec.mountOptions or ()),
            ),
        )

    def _publish(self, name: str, driver_name: str, volume: CsiVolume) -> Path:
        driver = self.drivers.get(driver_name)
        if driver is None:
            raise VolumeError(f"volume {name}: the node has no CSI driver {driver_name}")
        volume.target.parent.mkdir(parents=True, exist_ok=True)
        self._published[name] = driver, volume  # a publish that failed may have left something
        driver.publish(volume)
        return volume.target

    def _attributes(self, given: dict[str, str] | None, *, inline: bool) -> dict[str, str]:
        assert self.pod.metadata is not None
        assert self.pod.spec is not None
        return {
            **(given or {}),
            "csi.storage.k8s.io/pod.name": self.pod.metadata.name or "",
            "csi.storage.k8s.io/pod.namespace": self._namespace,
            "csi.storage.k8s.io/pod.uid": self._uid,
            "csi.storage.k8s.io/serviceAccount.name": self.pod.spec.serviceAccountName or "",
            "csi.storage.k8s.io/ephemeral": "true" if inline else "false",
        }

    def _secret(self, name: str | None, namespace: str | None) -> dict[str, str]:
        assert name is not None
        data = self.client.get(SecretResource, name, namespace=namespace or self._namespace).data
        return {key: base64.b64decode(text).decode() for key, text in (data or {}).items()}

    def _target(self, name: str) -> Path:
        return self.folder / "kubernetes.io~csi" / name / "mount"

    @property
    def _namespace(self) -> str:
        assert self.pod.metadata is not None
        return self.pod.metadata.namespace or "default"

    @property
    def _uid(self) -> str:
        assert self.pod.metadata is not None
        return self.pod.metadata.uid or ""


def _host_path(path: str, kind: str | None) -> Path:
    if kind == "DirectoryOrCreate":
        Path(path).mkdir(parents=True, exist_ok=True)
    if not Path(path).exists():
        raise VolumeError(f"the host has no {path}")
    return Path(path)


def _write_files(folder: Path, data: Mapping[str, bytes], items: list[KeyToPath] | None) -> None:
    folder.mkdir(parents=True)
    for name, key in [(each.path, each.key) for each in items or ()] or [
        (key, key) for key in data
    ]:
        if key not in data:
            raise VolumeError(f"there is no key {key}")
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        file.write_bytes(data[key])
