"""The volumes of a pod on a stand-in node: folders that its containers' processes can use.

Kinds: emptyDir, hostPath, secret (by which admission gives a pod the token of its ServiceAccount)
and csi (inline). A CSI driver is asked as kubelet asks it: with the volume's attributes, what
`podInfoOnMount` adds, the secret of `nodePublishSecretRef`, and a target below the pod's folder,
whose parent exists. The calls and names follow Kubernetes 1.20 (`pkg/volume/csi/csi_mounter.go`).
"""

import hashlib
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lightkube import Client
from lightkube.models.core_v1 import CSIVolumeSource, Volume
from lightkube.resources.core_v1 import Pod

from tests.kubernetes.cluster.containers import secret_of


class VolumeError(Exception):
    """A volume cannot be made now. The node says so in the pod's status, and tries again."""


@dataclass(frozen=True, slots=True)
class CsiVolume:
    """What kubelet tells a driver in NodePublishVolume. It is read-only."""

    volume_id: str
    target: Path
    attributes: Mapping[str, str]
    secrets: Mapping[str, str]


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
    """By the volume's name: the folder of those that have been made."""
    _published: dict[str, tuple[CsiDriver, CsiVolume]] = field(default_factory=dict)

    def make(self) -> None:
        """Make the volumes that are not there yet. Raises VolumeError, ApiError."""
        assert self.pod.spec is not None
        for volume in self.pod.spec.volumes or []:
            if volume.name not in self.folders:
                self.folders[volume.name] = self._made(volume)

    def remove(self) -> None:
        """Unpublish and remove all volumes. Raises VolumeError, and can be called again."""
        for name, (driver, volume) in list(self._published.items()):
            driver.unpublish(volume.volume_id, volume.target)
            del self._published[name]
        if self.folder.exists():
            shutil.rmtree(self.folder)

    def _made(self, volume: Volume) -> Path:
        own = self.folder / volume.name
        if volume.emptyDir is not None:
            own.mkdir(parents=True)
            return own
        if volume.secret is not None:
            content = secret_of(self.client, volume.secret.secretName, self._namespace)
            own.mkdir(parents=True)
            for name, text in content.items():
                (own / name).write_text(text)
            return own
        if volume.hostPath is not None:
            path = Path(volume.hostPath.path)
            if volume.hostPath.type == "DirectoryOrCreate":
                path.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                raise VolumeError(f"the host has no {path}")
            return path
        if volume.csi is not None:
            return self._publish(volume.name, volume.csi)
        raise VolumeError(f"volume {volume.name}: this stand-in knows no such kind")

    def _publish(self, name: str, source: CSIVolumeSource) -> Path:
        metadata, spec = self.pod.metadata, self.pod.spec
        assert metadata is not None
        assert spec is not None
        driver = self.drivers.get(source.driver)
        if driver is None:
            raise VolumeError(f"volume {name}: the node has no CSI driver {source.driver}")
        secret = source.nodePublishSecretRef
        volume = CsiVolume(
            volume_id=f"csi-{hashlib.sha256(f'{metadata.uid}{name}'.encode()).hexdigest()}",
            target=self.folder / "kubernetes.io~csi" / name / "mount",
            attributes={
                **(source.volumeAttributes or {}),
                "csi.storage.k8s.io/pod.name": metadata.name or "",
                "csi.storage.k8s.io/pod.namespace": self._namespace,
                "csi.storage.k8s.io/pod.uid": metadata.uid or "",
                "csi.storage.k8s.io/serviceAccount.name": spec.serviceAccountName or "",
                "csi.storage.k8s.io/ephemeral": "true",
            },
            secrets=secret_of(self.client, secret.name, self._namespace) if secret else {},
        )
        volume.target.parent.mkdir(parents=True, exist_ok=True)
        self._published[name] = driver, volume  # a publish that failed may have left something
        driver.publish(volume)
        return volume.target

    @property
    def _namespace(self) -> str:
        assert self.pod.metadata is not None
        return self.pod.metadata.namespace or "default"
