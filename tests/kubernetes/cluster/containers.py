"""What the process of a container is given: its command, environment and paths.

There are no images and no mount namespaces here: a container's process runs in the file system of
the host, as the user of the test. So that it finds its volumes, each `mountPath` in its command, in
its arguments and in the values of its environment is replaced by the volume's folder. A path that a
program has built in (`/var/run/secrets/...`) is not.
"""

import base64
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lightkube import ApiError, Client
from lightkube.models.core_v1 import Container, EnvVarSource
from lightkube.resources.core_v1 import ConfigMap, Pod, Secret

_REFERENCE = re.compile(r"\$(?:\$|\(([A-Za-z_][A-Za-z0-9_.-]*)\))")
_FIELD_OF_MAP = re.compile(r"metadata\.(labels|annotations)\['([^']*)'\]")


class ContainerError(Exception):
    """A container cannot be started as it is described."""


@dataclass(frozen=True, slots=True)
class Image:
    """What stands in for an image: how its program is started, and in which environment."""

    environment: Mapping[str, str]
    entry_point: Sequence[str] = ()


def expand(text: str, environment: Mapping[str, str]) -> str:
    """Put variables in place of `$(NAME)`, as kubelet does; `$$` is a dollar sign.

    An unknown name stays as it is.
    """

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


def mount_paths(container: Container, volumes: Mapping[str, Path]) -> dict[str, Path]:
    """The folder of the host for each path at which a container has a volume."""
    return {
        each.mountPath: volumes[each.name] / (each.subPath or "")
        for each in container.volumeMounts or ()
    }


@dataclass(frozen=True, slots=True)
class PodFields:
    """Answers what the environment of a container refers to."""

    client: Client
    pod: Pod
    addresses: Mapping[str, str]

    def environment(self, container: Container) -> dict[str, str]:
        """The variables of a container. Raises ContainerError, and ApiError where a Secret or a
        ConfigMap is missing."""
        found: dict[str, str] = {}
        for each in container.envFrom or ():
            prefix = each.prefix or ""
            if each.secretRef is not None:
                found |= {
                    prefix + key: text for key, text in self._secret(each.secretRef.name).items()
                }
            if each.configMapRef is not None:
                config = self._config(each.configMapRef.name)
                found |= {prefix + key: text for key, text in config.items()}
        for variable in container.env or ():
            if variable.valueFrom is not None:
                try:
                    found[variable.name] = self._value(variable.valueFrom)
                except (ContainerError, ApiError):
                    if not _is_optional(variable.valueFrom):
                        raise
            else:
                found[variable.name] = expand(variable.value or "", found)
        return found

    def _value(self, source: EnvVarSource) -> str:
        if source.secretKeyRef is not None:
            return _item(self._secret(source.secretKeyRef.name), source.secretKeyRef.key)
        if source.configMapKeyRef is not None:
            return _item(self._config(source.configMapKeyRef.name), source.configMapKeyRef.key)
        if source.fieldRef is not None:
            return self._field(source.fieldRef.fieldPath)
        raise ContainerError("this stand-in does not know such a source of a variable")

    def _field(self, path: str) -> str:
        metadata, spec = self.pod.metadata, self.pod.spec
        assert metadata is not None
        assert spec is not None
        known = {
            "metadata.name": metadata.name,
            "metadata.namespace": metadata.namespace,
            "metadata.uid": metadata.uid,
            "spec.nodeName": spec.nodeName,
            "spec.serviceAccountName": spec.serviceAccountName,
            **self.addresses,
        }
        if match := _FIELD_OF_MAP.fullmatch(path):
            texts = (metadata.labels if match[1] == "labels" else metadata.annotations) or {}
            return str(texts.get(match[2], ""))
        if path not in known:
            raise ContainerError(f"this stand-in does not know the field {path}")
        return known[path] or ""

    def _secret(self, name: str | None) -> dict[str, str]:
        data = self.client.get(Secret, name or "", namespace=self._namespace).data or {}
        return {key: base64.b64decode(text).decode() for key, text in data.items()}

    def _config(self, name: str | None) -> dict[str, str]:
        return dict(self.client.get(ConfigMap, name or "", namespace=self._namespace).data or {})

    @property
    def _namespace(self) -> str | None:
        assert self.pod.metadata is not None
        return self.pod.metadata.namespace


def _is_optional(source: EnvVarSource) -> bool:
    reference = source.secretKeyRef or source.configMapKeyRef
    return reference is not None and bool(reference.optional)


def _item(data: Mapping[str, str], key: str) -> str:
    if key not in data:
        raise ContainerError(f"there is no key {key}")
    return data[key]


def start(
    container: Container,
    image: Image,
    environment: Mapping[str, str],
    volumes: Mapping[str, Path],
    folder: Path,
) -> "subprocess.Popen[bytes]":
    """Start the process of a container. What it writes is added to a log in the pod's folder.

    It leads a session of its own, and ends with the thread that called this.
    """
    paths = mount_paths(container, volumes)
    if container.terminationMessagePath:
        paths[container.terminationMessagePath] = _message_file(container, folder)
    own = {name: translate(text, paths) for name, text in environment.items()}
    words = [*(container.command or image.entry_point), *(container.args or ())]
    if not words:
        raise ContainerError(f"no program is known for the image {container.image}")
    command = [translate(expand(word, environment), paths) for word in words]
    where = Path(translate(container.workingDir, paths)) if container.workingDir else folder
    try:
        with (folder / f"{container.name}.log").open("ab") as log:
            return subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],
                env={**image.environment, **own},
                cwd=where,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except OSError as error:
        raise ContainerError(f"{command[0]} cannot be started: {error}") from error


def _message_file(container: Container, folder: Path) -> Path:
    return folder / f"{container.name}.message"


def termination_message(container: Container, folder: Path) -> str:
    """What a container that has ended has written to its `terminationMessagePath`."""
    try:
        content = _message_file(container, folder).read_bytes()
    except OSError:
        return ""
    return content[:4096].decode(errors="replace")
