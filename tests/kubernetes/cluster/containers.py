"""What the process of a container is given: its command, environment and paths.

There are no images and no mount namespaces here: a container's process runs in the file system of
the host, as the user of the test, with the environment that stands in for its image. So that it
finds its volumes, each `mountPath` in its command, in its arguments and in the values of its
environment is replaced by the volume's folder.
"""

import base64
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from lightkube import ApiError, Client
from lightkube.models.core_v1 import Container, EnvVarSource
from lightkube.resources.core_v1 import Pod, Secret

_REFERENCE = re.compile(r"\$(?:\$|\(([A-Za-z_][A-Za-z0-9_.-]*)\))")

Environment = Mapping[str, str]


class ContainerError(Exception):
    """A container cannot be started as it is described."""


def expand(text: str, environment: Environment) -> str:
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


def secret_of(client: Client, name: str | None, namespace: str | None) -> dict[str, str]:
    """The content of a Secret. Raises ApiError where there is none."""
    data = client.get(Secret, name or "", namespace=namespace).data or {}
    return {key: base64.b64decode(text).decode() for key, text in data.items()}


def environment_of(container: Container, client: Client, pod: Pod, address: str) -> dict[str, str]:
    """The variables of a container. Raises ContainerError, and ApiError where a Secret is
    missing."""
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
    """Start the process of a container. What it writes is added to a log in the pod's folder.

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
    """What the pod's status quotes of a container that has ended: what it has written to its
    `terminationMessagePath`, or the end of its log."""
    try:
        found = _message_file(container, folder).read_bytes()[:4096]
    except OSError:
        found = b""
    if not found and exit_code and container.terminationMessagePolicy == "FallbackToLogsOnError":
        found = (folder / f"{container.name}.log").read_bytes()[-2048:]
    return found.decode(errors="replace")
