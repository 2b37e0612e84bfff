"""Mounts that are pods: in a cluster, each mount has a pod of its own (a *mount pod*).

So a mount outlives the plugin's pod, and has its own limits and log. The pod mounts below the state
folder, from which the mount propagates to the node and the plugin. It gets a volume's secrets by a
Secret, which the plugin deletes as soon as the mount works. The pod owns the Secret, so the cluster
deletes it if the plugin cannot. Any thread.
"""

import logging
import os
import select
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from lightkube import Client
from lightkube.core.client import LabelSelector
from lightkube.resources.core_v1 import Pod, Secret
from lightkube.types import PatchType

from diesel_fs.errors import DeadlineError, DieselError, NotFoundError
from diesel_fs.system.mountinfo import mounts, topmost_at

from ..api import api_errors
from ..names import LABEL_MOUNT, LABEL_NODE, label_value
from .mounter import START_DEADLINE_S, detach_dead, mount_arguments
from .program import error_of_exit, mount_environment
from .state import StateFolder
from .targets import lives
from .volumes import Volume

log = logging.getLogger("diesel.csi")

POD_CHECK_S = 1.0
"""The pause between two looks at the pod; the kernel reports the mount itself."""

END_DEADLINE_S = 60.0
"""A mount pod is killed 30 s after SIGTERM."""

END_CHECK_S = 0.25

OVERHEAD_BYTES = 512 << 20
"""A mount's three processes, and tables of large datasets, need this beside contents."""


@dataclass(frozen=True, slots=True)
class PodOptions:
    """The common parts of all mount pods. They request `cpu` and `memory`, in the notation of
    Kubernetes."""

    node: str
    namespace: str
    image: str
    cpu: str = "100m"
    memory: str = "256Mi"
    priority_class: str = "system-node-critical"


def pod_name(name: str) -> str:
    return f"diesel-mount-{name}"


def pod_manifest(
    volume: Volume, name: str, state: StateFolder, options: PodOptions
) -> dict[str, object]:
    """The manifest has no secret value, only the Secret's name."""
    folder = state.folder(name)
    environment = mount_environment(volume, folder, state.cache)
    # The mount propagates to the node from its own folder; the pod sees no other mounts
    places = [
        (str(folder), "Bidirectional", False, "Directory"),
        (str(state.cache), "None", False, "Directory"),
    ]
    if volume.cache_dir:
        places.append((volume.cache_dir, "None", False, "DirectoryOrCreate"))
    if volume.file_folder:
        places.append((volume.file_folder, "HostToContainer", True, "Directory"))
    command = ["dlcmd", "mount", "--foreground", *mount_arguments(volume), "--"]
    container = {
        "name": "mount",
        "image": options.image,
        "command": [*command, volume.named, state.root(name)],
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        # The mount propagates out of the container only if it is privileged
        "securityContext": {"privileged": True, "runAsUser": 0},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "resources": {
            "requests": {"cpu": options.cpu, "memory": options.memory},
            "limits": {"memory": str(volume.memory_bytes + OVERHEAD_BYTES)},
        },
        "volumeMounts": [
            {
                "name": f"place-{number}",
                "mountPath": path,
                "mountPropagation": propagation,
                "readOnly": read_only,
            }
            for number, (path, propagation, read_only, _) in enumerate(places)
        ],
    }
    if volume.secrets:
        container["envFrom"] = [{"secretRef": {"name": pod_name(name)}}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": _metadata(name, options),
        "spec": {
            "nodeName": options.node,
            "restartPolicy": "Never",  # a new mount has a new pod, and is bound again
            "terminationGracePeriodSeconds": 30,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "priorityClassName": options.priority_class,
            "tolerations": [{"operator": "Exists"}],
            "containers": [container],
            "volumes": [
                {"name": f"place-{number}", "hostPath": {"path": path, "type": kind}}
                for number, (path, _, _, kind) in enumerate(places)
            ],
        },
    }


def _metadata(name: str, options: PodOptions) -> dict[str, object]:
    return {
        "name": pod_name(name),
        "namespace": options.namespace,
        "labels": {
            "app.kubernetes.io/name": "diesel-mount",
            LABEL_MOUNT: name,
            LABEL_NODE: label_value(options.node),
        },
    }


class PodMounter:
    def __init__(self, state: StateFolder, client: Client, options: PodOptions) -> None:
        self._state = state
        self._client = client
        self._options = options

    def start(self, volume: Volume, name: str, lock: int) -> None:
        """Unlike in `Mounter.start`, nothing inherits the lock: if this plugin is killed, the next
        one deletes the pod if its mount does not work."""
        named = pod_name(name)
        with api_errors():
            if volume.secrets:
                metadata = _metadata(name, self._options)
                secret = {"metadata": metadata, "stringData": {**volume.secrets}}
                self._client.create(cast("Secret", Secret.from_dict(secret)))
            try:
                manifest = pod_manifest(volume, name, self._state, self._options)
                made = self._client.create(cast("Pod", Pod.from_dict(manifest)))
                if volume.secrets:
                    self._give_secret_to(named, made)
                self._wait_until_mounted(volume, name)
            finally:
                if volume.secrets:
                    self._delete_secret(named)

    def end(self, name: str) -> None:
        """Deletes the pod, which unmounts on SIGTERM, and waits for its end."""
        named, until_s = pod_name(name), time.monotonic() + END_DEADLINE_S
        with api_errors():
            with suppress(NotFoundError), api_errors():
                self._client.delete(Pod, named)
            self._delete_secret(named)
            while self._pod(named) is not None:
                if time.monotonic() > until_s:
                    raise DeadlineError(f"the mount pod {named} has not ended")
                threading.Event().wait(END_CHECK_S)
        detach_dead(self._state.root(name))

    def tidy(self) -> None:
        """Deletes the pods of mounts without a folder, and the Secrets that a killed plugin
        left."""
        names = {pod_name(name) for name in self._state.names()}
        labels: LabelSelector = {LABEL_NODE: label_value(self._options.node)}
        with api_errors():
            for pod in self._client.list(Pod, labels=labels):
                if pod.metadata and pod.metadata.name not in names:
                    with suppress(NotFoundError), api_errors():
                        self._client.delete(Pod, str(pod.metadata.name))
            for secret in self._client.list(Secret, labels=labels):
                if secret.metadata:
                    self._delete_secret(str(secret.metadata.name))

    def _give_secret_to(self, named: str, pod: Pod) -> None:
        uid = pod.metadata.uid if pod.metadata else None
        owner = {"apiVersion": "v1", "kind": "Pod", "name": named, "uid": uid}
        patch = {"metadata": {"ownerReferences": [owner]}}
        self._client.patch(Secret, named, patch, patch_type=PatchType.MERGE)

    def _delete_secret(self, named: str) -> None:
        try:
            with api_errors():
                self._client.delete(Secret, named)
        except NotFoundError:
            pass
        except DieselError as error:
            log.warning("cannot delete the Secret %s, which its pod owns: %s", named, error)

    def _pod(self, named: str) -> Pod | None:
        try:
            with api_errors():
                return self._client.get(Pod, named)
        except NotFoundError:
            return None

    def _wait_until_mounted(self, volume: Volume, name: str) -> None:
        """Returns when the mount has propagated to this process and works. Raises the error of the
        mount if its pod ends, and DeadlineError."""
        root, named = self._state.root(name), pod_name(name)
        until_s, why = time.monotonic() + START_DEADLINE_S, "it has not been started"
        changes = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
        try:
            watched = select.poll()
            watched.register(changes, select.POLLPRI)
            while time.monotonic() < until_s:
                # The tree of a native mount is there a moment before it answers
                if topmost_at(root, mounts()) is not None and lives(root):
                    return
                why = _progress(self._pod(named), named)
                watched.poll(POD_CHECK_S * 1000)
        finally:
            os.close(changes)
        raise DeadlineError(
            f"the mount pod {named} for {volume.named} does not work after {START_DEADLINE_S:g} s:"
            f" {why}",
            advice=f"kubectl -n {self._options.namespace} describe pod {named}",
        )


def _progress(pod: Pod | None, named: str) -> str:
    """Returns why the mount does not work yet. Raises the mount's error if the pod has ended."""
    if pod is None:
        raise DieselError(f"the mount pod {named} was deleted")
    status = pod.status
    for container in (status.containerStatuses or []) if status else []:
        state = container.state
        if state and state.terminated:
            raise error_of_exit("mount", state.terminated.exitCode, state.terminated.message or "")
        if state and state.waiting:
            return f"{state.waiting.reason} {state.waiting.message or ''}".strip()
    if status and status.phase in ("Failed", "Succeeded"):
        raise DieselError(
            f"the mount pod {named} was not started: {status.reason} {status.message or ''}"
        )
    return f"it is {status.phase}" if status and status.phase else "it has not been started"
