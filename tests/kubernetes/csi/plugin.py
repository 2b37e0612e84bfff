"""Runs the node plugin as a program, and calls it over its socket as kubelet does."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from diesel_fs.system.mountinfo import mounts
from diesel_kubernetes.csi import csi_pb2 as csi
from diesel_kubernetes.names import POD_NAME, POD_NAMESPACE
from tests.cli.conftest import program_environment
from tests.processes import command_lines, open_files
from tests.waiting import wait_until

DEADLINE_S = 60.0

_Response = TypeVar("_Response", bound=Message)


@dataclass(slots=True)
class Kubelet:
    """Errors are `grpc.RpcError`."""

    channel: grpc.Channel
    deadline_s: float = DEADLINE_S

    def call(self, method: str, request: Message, answer: type[_Response]) -> _Response:
        """Call a method by its full name, such as `Identity/Probe`."""
        ask = self.channel.unary_unary(
            f"/csi.v1.{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        found: _Response = ask(request, timeout=self.deadline_s, wait_for_ready=True)
        return found

    def publish(
        self,
        target: Path,
        attributes: Mapping[str, str],
        *,
        secrets: Mapping[str, str] | None = None,
        namespace: str = "team",
        pod: str = "pod",
        flags: tuple[str, ...] = (),
        volume: str = "volume",
    ) -> None:
        capability = csi.VolumeCapability(
            mount=csi.VolumeCapability.MountVolume(mount_flags=flags),
            access_mode=csi.VolumeCapability.AccessMode(mode="SINGLE_NODE_WRITER"),
        )
        request = csi.NodePublishVolumeRequest(
            volume_id=volume,
            target_path=str(target),
            volume_capability=capability,
            secrets=secrets,
            volume_context={**attributes, POD_NAMESPACE: namespace, POD_NAME: pod},
        )
        self.call("Node/NodePublishVolume", request, csi.NodePublishVolumeResponse)

    def unpublish(self, target: Path, volume: str = "volume") -> None:
        request = csi.NodeUnpublishVolumeRequest(volume_id=volume, target_path=str(target))
        self.call("Node/NodeUnpublishVolume", request, csi.NodeUnpublishVolumeResponse)

    def stats(self, target: Path) -> csi.NodeGetVolumeStatsResponse:
        request = csi.NodeGetVolumeStatsRequest(volume_id="volume", volume_path=str(target))
        return self.call("Node/NodeGetVolumeStats", request, csi.NodeGetVolumeStatsResponse)

    def probe(self) -> bool:
        found = self.call("Identity/Probe", csi.ProbeRequest(), csi.ProbeResponse)
        return found.ready.value


@dataclass(slots=True)
class Plugin:
    """Its state folder outlives the process."""

    folder: Path
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    process: "subprocess.Popen[bytes]" = field(init=False)
    kubelet: Kubelet = field(init=False)

    @property
    def state(self) -> Path:
        return self.folder / "state"

    @property
    def log(self) -> Path:
        return self.folder / "plugin.log"

    def start(self) -> None:
        """Start the process, in a process group of its own, and wait until it listens."""
        socket = self.folder / "csi.sock"
        command = [sys.executable, "-m", "diesel_kubernetes.csi", f"--endpoint=unix://{socket}"]
        command += [f"--state={self.state}", "--node=node-1", *self.options]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**program_environment(), **self.environment},
                process_group=0,
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(b"diesel-csi listens"), self.log.read_text()
        self.kubelet = Kubelet(grpc.insecure_channel(f"unix:{socket}"))

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Returns its exit code."""
        self.kubelet.channel.close()
        os.killpg(self.process.pid, number)
        code = self.process.wait(DEADLINE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    @property
    def roots(self) -> list[str]:
        """The paths of the plugin's own mounts, without `.diesel` in them."""
        place = f"{self.state}/mounts/"
        return [each.path for each in mounts() if re.fullmatch(f"{place}[^/]+/root", each.path)]

    def processes(self) -> dict[int, str]:
        """The processes of mounts: all with the state folder in their arguments, without the
        plugin."""
        return {
            pid: line.decode(errors="replace")
            for pid, line in command_lines()
            if str(self.state).encode() in line and pid != self.process.pid
        }

    def descriptors(self) -> list[str]:
        return open_files(self.process.pid)

    def wait_until_clean(self) -> None:
        """Wait until no mount, no process of one and no folder of one is left."""
        wait_until(lambda: not self.roots, 300.0, otherwise=lambda: f"still mounted: {self.roots}")
        wait_until(lambda: not os.listdir(self.state / "mounts"))
        wait_until(lambda: not self.processes(), otherwise=lambda: f"run: {self.processes()}")

    def restart(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.end(number)
        self.start()


@contextmanager
def running_plugin(
    folder: Path, *options: str, environment: Mapping[str, str] | None = None
) -> Iterator[Plugin]:
    folder.mkdir(exist_ok=True)
    plugin = Plugin(folder, options, environment or {})
    plugin.start()
    try:
        yield plugin
    finally:
        if plugin.process.poll() is None:
            plugin.end()
