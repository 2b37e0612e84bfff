"""The command, environment, paths and volumes of a container's process.

There are no images and no mount namespaces here: a container's process runs in the file system of
the host, as the user of the test, with the environment that stands in for its image. So that it
finds its volumes, each `mountPath` in its command, in its arguments and in the values of its
environment is replaced by the volume's folder.

Volumes are emptyDir, hostPath, secret (by which admission gives a pod the token of its
ServiceAccount) and csi (inline). A CSI driver gets the calls that kubelet makes: with the
volume's attributes, those that `podInfoOnMount` adds, the secret of `nodePublishSecretRef`, and a
target in an existing folder below the pod's. The calls and names follow Kubernetes 1.20
(`pkg/volume/csi/csi_mounter.go`).
"""

import base64
import hashlib
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lightkube import ApiError, Client
from lightkube.models.core_v1 import Container, CSIVolumeSource, EnvVarSource, Volume
from lightkube.resources.core_v1 import Pod, Secret

_REFERENCE = re.compile(r"\$(?:\$|\(([A-Za-z_][A-Za-z0-9_.-]*)\))")

Environment = Mapping[str, str]


class ContainerError(Exception):
    """A container cannot be started as it is described."""


def expand(text: str, environment: Environment) -> str:
    """Put variables in place of `$(NAME)`, as kubelet does; `$$` is a dollar sign. An unknown name
    stays."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        return "$" if name is None else environment.get(name, match[0])

    return _REFERENCE.sub(value, text)


def translate(text: str, paths: Mapping[str, Path]) -> str:
    """Put folders of the host in place of paths in the container, the longest ones first."""
    for path in sorted(paths, key=len, reverse=True):
        pattern = rf"(?<![\w.-]){re.escape(path.rstrip('/'))}(?![\w.-])"
        text = re.sub(pattern, str(paths[path]).replace("\\", r"\\"), text)
    return text


def secret_of(client: Client, name: str | None, namespace: str | None) -> dict[str, str]:
    data = client.get(Secret, name or "", namespace=namespace).data or {}
    return {key: base64.b64decode(text).decode() for key, text in data.items()}


def environment_of(container: Container, client: Client, pod: Pod, address: str) -> dict[str, str]:
    """The variables of a container. Raises ContainerError, and ApiError if a Secret is missing."""
    assert pod.metadata is not None
    namespace = pod.metadata.namespace
    found: dict[str, str] = {}

    def value(source: EnvVarSource) -> str:
        if source.secretKeyRef is not None:
            data = secret_of(client, source.secretKeyRef.name, namespace)
            if source.secretKeyRef.key not in data:
                raise ContainerError(f"there is no key {source.secretKeyRef.key}")
            return data[source.secretKeyRef.key]
        if source.fieldRef is not None and source.fieldRef.fieldPath == "status.podIP":
            return address
        raise ContainerError("this stand-in does not know such a source of a variable")

    for each in container.envFrom or ():
        if each.secretRef is not None:
            found |= secret_of(client, each.secretRef.name, namespace)
    for variable in container.env or ():
        if variable.valueFrom is None:
            found[variable.name] = expand(variable.value or "", found)
            continue
        try:
            found[variable.name] = value(variable.valueFrom)
        except (ContainerError, ApiError):
            reference = variable.valueFrom.secretKeyRef
            if reference is None or not reference.optional:
                raise
    return found


def start(
    container: Container,
    image: Environment,
    environment: Environment,
    volumes: Mapping[str, Path],
    folder: Path,
) -> "subprocess.Popen[bytes]":
    """Start the process of a container. Its output is appended to a log in the pod's folder.

    It leads a session of its own, and ends with the thread that called this.
    """
    paths = {each.mountPath: volumes[each.name] for each in container.volumeMounts or ()}
    if container.terminationMessagePath:
        paths[container.terminationMessagePath] = _message_file(container, folder)
    own = {name: translate(text, paths) for name, text in environment.items()}
    words = [*(container.command or ()), *(container.args or ())]
    command = [translate(expand(word, environment), paths) for word in words]
    try:
        with (folder / f"{container.name}.log").open("ab") as log:
            return subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env={**image, **own},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except OSError as error:
        raise ContainerError(f"{command[0]} cannot be started: {error}") from error


def _message_file(container: Container, folder: Path) -> Path:
    return folder / f"{container.name}.message"


def last_message(container: Container, exit_code: int, folder: Path) -> str:
    """Return the content of its `terminationMessagePath`, or the end of its log."""
    try:
        found = _message_file(container, folder).read_bytes()[:4096]
    except OSError:
        found = b""
    if not found and exit_code and container.terminationMessagePolicy == "FallbackToLogsOnError":
        found = (folder / f"{container.name}.log").read_bytes()[-2048:]
    return found.decode(errors="replace")


class VolumeError(Exception):
    """A volume cannot be made now. The node reports it in the pod's status, and tries again."""


@dataclass(frozen=True, slots=True)
class CsiVolume:
    volume_id: str
    target: Path
    attributes: Mapping[str, str]
    secrets: Mapping[str, str]


class CsiDriver(Protocol):
    """The node service of a CSI driver.

    A failed call raises VolumeError, with the driver's message, and is made again.
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
    _published: dict[str, tuple[CsiDriver, CsiVolume]] = field(default_factory=dict)

    def make(self) -> None:
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
