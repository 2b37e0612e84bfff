"""The command `diesel-csi`: it reads the options, and serves until SIGTERM."""

import logging
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

import diesel_fs
from diesel_fs.errors import DieselError, UsageError
from diesel_fs.settings import parse_size

from .mounter import Mounter, ProcessMounter
from .node import NodeVolumes

try:
    from .service import CsiServices, GrpcServer
except ModuleNotFoundError as error:
    raise SystemExit(
        f"diesel-csi: the Python package {error.name} is missing; run"
        " `pip install 'diesel_fs-VERSION-py3-none-any.whl[kubernetes]'`"
    ) from None
from .state import StateFolder
from .volumes import VolumeLimits

if TYPE_CHECKING:
    from .reporter import NodeReporter

PREFIX = "DIESEL_CSI"

CONTAINER = "plugin"


@dataclass(frozen=True, slots=True)
class PluginOptions:
    endpoint: str
    node: str
    state: Path
    url: str
    idle: float
    starts: int
    memory_max: int
    file_root: tuple[str, ...]
    cache_root: str
    cache_size_max: int
    mounter: str
    namespace: str
    image: str
    pod: str
    pod_cpu: str
    pod_memory: str


def size(text: str) -> int:
    return parse_size(text)


@click.command(
    context_settings={"auto_envvar_prefix": PREFIX, "help_option_names": ["-h", "--help"]}
)
@click.version_option(diesel_fs.__version__, prog_name="diesel-csi")
@click.option(
    "--endpoint",
    metavar="URL",
    default="unix:///csi/csi.sock",
    show_default=True,
    help="Socket at which kubelet and the sidecars call.",
)
@click.option(
    "--node",
    metavar="NAME",
    default=socket.gethostname,
    show_default="the host's name",
    help="Name of the node, as the cluster knows it.",
)
@click.option(
    "--state",
    type=click.Path(path_type=Path),
    metavar="DIR",
    default=Path("/var/lib/diesel-csi"),
    show_default=True,
    help="Folder of this node for mounts, their sockets and snapshots. In a container it"
    " has the same path as on the node.",
)
@click.option(
    "--url",
    metavar="URL",
    default="",
    help="The repository of volumes that name none: diesel+tls://host:9300, ...",
)
@click.option(
    "--idle",
    type=click.FloatRange(0),
    metavar="SECONDS",
    default=60.0,
    show_default=True,
    help="How long a mount that no pod uses is kept for the next one.",
)
@click.option(
    "--starts",
    type=click.IntRange(1, 64),
    metavar="N",
    default=4,
    show_default=True,
    help="How many mounts may start at once; others wait.",
)
@click.option(
    "--memory-max",
    type=size,
    metavar="SIZE",
    default="4G",
    show_default=True,
    help="Memory for contents of a volume: the most that a volume may request, and the default.",
)
@click.option(
    "--file-root",
    multiple=True,
    metavar="DIR",
    help="Folder of the node below which volumes may name a repository by file://; may be"
    " given several times.  [default: volumes may not]",
)
@click.option(
    "--cache-root",
    metavar="DIR",
    default="",
    help="Folder on a fast local disk below which volumes may keep chunks (cacheDir). In a"
    " container it has the same path as on the node.  [default: volumes may not]",
)
@click.option(
    "--cache-size-max",
    type=size,
    metavar="SIZE",
    default="0",
    help="How large the cache of one volume may get.  [default: half of what is free]",
)
@click.option(
    "--mounter",
    type=click.Choice(["process", "pod"]),
    default="process",
    show_default=True,
    help="How a mount runs: as a process beside this one (if this program is a service of the"
    " system), or as a pod (if this program runs in a pod itself).",
)
@click.option(
    "--namespace",
    metavar="NAME",
    default="diesel-system",
    show_default=True,
    help="Namespace of mount pods, and of the ConfigMap that reports what this node holds.",
)
@click.option(
    "--image",
    metavar="NAME",
    default="",
    help="Image of mount pods, which has dlcmd.  [default with --mounter pod: that of --pod]",
)
@click.option(
    "--pod",
    metavar="NAME",
    default="",
    help="The pod in which this program runs, in that namespace: mount pods get the image of its"
    " container `plugin`.",
)
@click.option(
    "--pod-cpu",
    metavar="QUANTITY",
    default="100m",
    show_default=True,
    help="Processors that a mount pod requests.",
)
@click.option(
    "--pod-memory",
    metavar="QUANTITY",
    default="256Mi",
    show_default=True,
    help="Memory that a mount pod requests. Its limit is that for contents, and 512Mi.",
)
def program(**given: object) -> None:
    """Mount datasets as volumes of pods: the node plugin of the CSI driver csi.diesel-fs.dev.

    One runs on each node, as root. Every option may also stand in the environment (--memory-max as
    DIESEL_CSI_MEMORY_MAX). Mounts have processes of their own, and outlive this one.

    \b
    Example, without a cluster:
      diesel-csi --endpoint unix:///run/csi.sock --state /var/lib/diesel-csi --file-root /data
    """
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s diesel-csi %(levelname)s %(message)s",
    )
    serve(PluginOptions(**given))  # type: ignore[arg-type]  # click gives them as objects


def serve(options: PluginOptions) -> None:
    """Serves until SIGTERM or SIGINT. Mounts go on afterwards."""
    limits = VolumeLimits(
        url=options.url,
        file_roots=options.file_root,
        cache_root=options.cache_root.rstrip("/"),
        memory_bytes_max=options.memory_max,
        cache_bytes_max=options.cache_size_max,
    )
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    folder = StateFolder(options.state)
    mounter: Mounter = ProcessMounter(folder)
    reporter = None
    if options.mounter == "pod":
        mounter, reporter = _in_pods(options, folder, limits)
    mounter.tidy()
    volumes = NodeVolumes(folder, mounter, limits, idle_s=options.idle, starts_max=options.starts)
    server = GrpcServer(CsiServices(volumes, folder, options.node), options.endpoint)
    if reporter is not None:
        reporter.start()
    click.echo(f"diesel-csi listens at {options.endpoint}")
    ending.wait()
    if reporter is not None:
        reporter.close()
    server.stop()
    volumes.close()
    folder.close()


def _in_pods(
    options: PluginOptions, folder: StateFolder, limits: VolumeLimits
) -> "tuple[Mounter, NodeReporter]":
    if not options.image and not options.pod:
        raise UsageError(
            "--mounter pod needs --image or --pod", advice="name an image that has dlcmd"
        )
    from lightkube import Client  # noqa: PLC0415  # takes long to import

    from ..api import image_in_pod  # noqa: PLC0415
    from .holdings import NodeHoldings  # noqa: PLC0415
    from .pods import PodMounter, PodOptions  # noqa: PLC0415
    from .reporter import NodeReporter  # noqa: PLC0415

    node, namespace = options.node, options.namespace
    client = Client(namespace=namespace)
    image = options.image or image_in_pod(client, options.pod, CONTAINER)
    pods = PodOptions(node, namespace, image, options.pod_cpu, options.pod_memory)
    holdings = NodeHoldings(folder, limits.cache_root)
    reporter = NodeReporter(client, node, namespace, holdings.measure, pod=options.pod)
    return PodMounter(folder, client, pods), reporter


def main() -> None:
    try:
        program.main(standalone_mode=False)
    except click.exceptions.Exit as ended:
        sys.exit(ended.exit_code)
    except click.ClickException as error:
        click.echo(f"diesel-csi: {error.format_message()}", err=True)
        sys.exit(UsageError.exit_code)
    except DieselError as error:
        click.echo(f"diesel-csi: {error}", err=True)
        sys.exit(error.exit_code)
