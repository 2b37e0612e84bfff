"""Nodes without machines: Node objects that stay ready, and a stand-in for their kubelets.

The scheduler, the controllers and the API server see a node as any other: its capacity and lease,
and pods that become Running, Succeeded or Failed. A `SimulatedNode` runs the commands of its pods'
containers as processes of this machine, with their volumes (`containers.py`).

Missing are init containers and restarts (a pod ends with its containers), probes (a container is
ready when it runs), resource limits, Services and DNS, logs and exec through the API. Each pod has
an address of loopback of its own.

Rule of concurrency: one thread per node looks after its Node object and sees pods come and go; each
pod that runs has a thread of its own. The threads share the client, which allows that.
"""

import datetime as dt
import itertools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from httpx2 import HTTPError
from lightkube import ApiError
from lightkube.models.coordination_v1 import LeaseSpec
from lightkube.models.core_v1 import Container, NodeAddress, NodeCondition, NodeStatus
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import Node as NodeResource
from lightkube.resources.core_v1 import Pod, PodStatus
from lightkube.types import PatchType

from tests.kubernetes.cluster import containers
from tests.kubernetes.cluster.containers import (
    ContainerError,
    CsiDriver,
    Environment,
    PodVolumes,
    VolumeError,
)
from tests.kubernetes.cluster.control_plane import ControlPlane
from tests.waiting import wait_until

LOOK_S = 0.1
"""How often a node looks for its pods. It lists them, since a watch cannot be interrupted."""
LEASE_S = 5.0
"""How often it renews its lease. The controllers miss it after 40 seconds."""
RETRY_S = 0.3
"""The pause before a failed volume or container is tried again."""

NODE_GRACE_S = 10.0
"""The time that processes have after a SIGTERM when their node ends."""
LOOK_AT_PROCESSES_S = 0.02
REMOVE_TRIES = 30

_addresses = (f"127.{64 + n // 65536}.{n // 256 % 256}.{n % 256}" for n in itertools.count(1))


def _now() -> str:
    return dt.datetime.now(dt.UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


class SimulatedNode:
    """A node during the `with`, at whose end the pods' processes end and it is removed.

    `images` has the environment of containers, by the name of the image; `drivers` the CSI
    drivers, by name.
    """

    def __init__(
        self,
        control_plane: ControlPlane,
        name: str,
        folder: Path,
        images: Mapping[str, Environment],
        *,
        drivers: Mapping[str, CsiDriver] | None = None,
    ) -> None:
        self.name = name
        self.folder = folder
        self.images = images
        self.drivers = drivers or {}
        self.client = control_plane.client()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look_after, name=f"node {name}")
        self._runs: dict[str, _PodRun] = {}  # by the pod's UID

    def __enter__(self) -> Self:
        self._register()
        self._thread.start()
        try:
            wait_until(self._is_ready, otherwise=lambda: f"node {self.name} did not become ready")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        for run in self._runs.values():
            run.abandon()
        for run in self._runs.values():
            run.thread.join()
        self.client.delete(Lease, self.name, namespace="kube-node-lease")
        self.client.delete(NodeResource, self.name)
        self.client.close()

    def _is_ready(self) -> bool:
        """Whether pods can be scheduled on it: it has no taint any more."""
        spec = self.client.get(NodeResource, self.name).spec
        return spec is not None and not spec.taints

    def report(self, pod: Pod, status: dict[str, object]) -> None:
        """Does nothing if the pod is gone."""
        name, namespace, _ = _identity(pod)
        ready = status["phase"] == "Running"
        conditions = [
            {"type": "Initialized", "status": "True"},
            {"type": "Ready", "status": str(ready)},
            {"type": "ContainersReady", "status": str(ready)},
        ]
        change = {"status": {"hostIP": "127.0.0.1", "conditions": conditions, **status}}
        with _if_it_is_there():
            self.client.patch(
                PodStatus, name, change, namespace=namespace, patch_type=PatchType.STRATEGIC
            )

    def confirm_deletion(self, pod: Pod) -> None:
        """Report that nothing of a deleted pod is left, so that the API server removes it."""
        name, namespace, _ = _identity(pod)
        with _if_it_is_there():
            self.client.delete(Pod, name, namespace=namespace, grace_period=0)

    def _register(self) -> None:
        capacity = {"cpu": "64", "memory": "256Gi", "pods": "110", "ephemeral-storage": "1Ti"}
        status = NodeStatus(
            addresses=[
                NodeAddress(type="InternalIP", address="127.0.0.1"),
                NodeAddress(type="Hostname", address=self.name),
            ],
            allocatable=capacity,
            capacity=capacity,
            conditions=[NodeCondition(type="Ready", status="True")],
        )
        metadata = ObjectMeta(name=self.name, labels={"kubernetes.io/hostname": self.name})
        self.client.create(NodeResource(metadata=metadata, status=status))
        self.client.create(
            Lease(
                metadata=ObjectMeta(name=self.name, namespace="kube-node-lease"),
                spec=LeaseSpec(holderIdentity=self.name, leaseDurationSeconds=40),
            )
        )

    def _look_after(self) -> None:
        """The thread of the node. While the API server is away, its pods go on."""
        for count in itertools.count():
            with suppress(HTTPError):
                if count % round(LEASE_S / LOOK_S) == 0:
                    renewed = {"spec": {"renewTime": _now()}}
                    self.client.patch(Lease, self.name, renewed, namespace="kube-node-lease")
                self._take_pods()
            if self._stop.wait(LOOK_S):
                return

    def _take_pods(self) -> None:
        bound = self.client.list(Pod, namespace="*", fields={"spec.nodeName": self.name})
        present = {_identity(pod)[2]: pod for pod in bound}
        for uid, pod in present.items():
            assert pod.metadata is not None
            leaving = pod.metadata.deletionTimestamp is not None
            if uid in self._runs:
                if leaving:
                    self._runs[uid].end(pod.metadata.deletionGracePeriodSeconds or 0)
            elif leaving:
                self.confirm_deletion(pod)
            elif not _has_ended(pod):
                self._runs[uid] = _PodRun(self, pod)
        for uid in self._runs.keys() - present.keys():
            self._runs[uid].end(0)  # it may have been deleted by force
            if not self._runs[uid].thread.is_alive():
                del self._runs[uid]


class _PodRun:
    def __init__(self, node: SimulatedNode, pod: Pod) -> None:
        assert pod.spec is not None
        self._node = node
        self._pod = pod
        name, namespace, uid = _identity(pod)
        self._folder = node.folder / uid
        self._volumes = PodVolumes(node.client, pod, self._folder / "volumes", node.drivers)
        self._containers = pod.spec.containers
        self._processes: dict[str, subprocess.Popen[bytes]] = {}  # by the container's name
        self._address = next(_addresses)
        self._leave = threading.Event()  # the pod ends, or the node
        self._abandoned = threading.Event()  # the node ends: nothing is reported any more
        self._grace_s = 0.0
        self.thread = threading.Thread(target=self._run, name=f"pod {namespace}/{name}")
        self.thread.start()

    def end(self, grace_s: float) -> None:
        """Its processes have this number of seconds after a SIGTERM."""
        if not self._leave.is_set():
            self._grace_s = grace_s
            self._leave.set()

    def abandon(self) -> None:
        self._grace_s = NODE_GRACE_S
        self._abandoned.set()
        self._leave.set()

    def _run(self) -> None:
        self._folder.mkdir(parents=True)
        try:
            phase = self._phase_at_end() if self._starts() else None
        finally:
            self._end_processes()
        if phase is not None:
            self._report(phase)
        self._remove_volumes()
        self._leave.wait()  # a pod that has ended is there until a client deletes it
        self._until_reported(lambda: self._node.confirm_deletion(self._pod))

    def _starts(self) -> bool:
        """Return whether volumes and processes could be made before the pod's end began."""
        reported = ""
        while not self._leave.is_set():
            try:
                self._volumes.make()
                for each in self._containers:
                    if each.name not in self._processes:
                        self._processes[each.name] = self._start(each)
            except (VolumeError, ContainerError, HTTPError) as error:
                if str(error) != reported:
                    reported = str(error)
                    self._report("Pending", reported)
            else:
                return True
            self._leave.wait(RETRY_S)
        return False

    def _start(self, container: Container) -> "subprocess.Popen[bytes]":
        image = self._node.images.get(container.image or "")
        if image is None:
            raise ContainerError(f"the node has no image {container.image}")
        own = containers.environment_of(container, self._node.client, self._pod, self._address)
        return containers.start(container, image, own, self._volumes.folders, self._folder)

    def _phase_at_end(self) -> str | None:
        """Return None if the pod's end began before."""
        self._report("Running")
        while not self._leave.wait(LOOK_AT_PROCESSES_S):
            codes = [each.poll() for each in self._processes.values()]
            if None not in codes:
                return "Failed" if any(codes) else "Succeeded"
        return None

    def _report(self, phase: str, message: str = "") -> None:
        status: dict[str, object] = {
            "phase": phase,
            "message": message,
            "podIP": self._address,
            "podIPs": [{"ip": self._address}],
            "containerStatuses": [self._status_of(each) for each in self._containers],
        }
        self._until_reported(lambda: self._node.report(self._pod, status))

    def _status_of(self, container: Container) -> dict[str, object]:
        state: dict[str, object] = {"waiting": {"reason": "ContainerCreating"}}
        process = self._processes.get(container.name)
        if process is not None:
            code = process.poll()
            if code is None:
                state = {"running": {"startedAt": _now()}}
            else:
                ended = {
                    "exitCode": 128 - code if code < 0 else code,
                    "reason": "Error" if code else "Completed",
                    "finishedAt": _now(),
                    "message": containers.last_message(container, code, self._folder),
                }
                state = {"terminated": ended}
        runs = "running" in state
        return {
            "name": container.name,
            "image": container.image or "",
            "imageID": "",
            "ready": runs,
            "started": runs,
            "restartCount": 0,
            "state": state,
        }

    def _until_reported(self, report: Callable[[], None]) -> None:
        while not self._abandoned.is_set():
            try:
                report()
            except HTTPError:
                self._abandoned.wait(RETRY_S)
            else:
                return

    def _end_processes(self) -> None:
        for process in self._processes.values():
            process.terminate()
        until = time.monotonic() + self._grace_s
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _remove_volumes(self) -> None:
        """Try until it succeeds, as kubelet does, or until the node ends."""
        for tries in itertools.count():
            try:
                self._volumes.remove()
            except (VolumeError, OSError):
                if self._abandoned.is_set() and tries > REMOVE_TRIES:
                    raise
                self._abandoned.wait(RETRY_S)
            else:
                return


@contextmanager
def _if_it_is_there() -> Iterator[None]:
    try:
        yield
    except ApiError as error:
        if error.status.code != 404:
            raise


def _has_ended(pod: Pod) -> bool:
    return pod.status is not None and pod.status.phase in ("Succeeded", "Failed")


def _identity(pod: Pod) -> tuple[str, str, str]:
    metadata = pod.metadata
    assert metadata is not None
    assert metadata.name
    assert metadata.namespace
    assert metadata.uid
    return metadata.name, metadata.namespace, metadata.uid
