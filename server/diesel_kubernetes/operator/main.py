"""The command `diesel-operator`: it reads the options, and serves until SIGTERM."""

import asyncio
import logging
import sys

import click

import diesel_fs
from diesel_fs.errors import DieselError, UsageError

from .specs import Defaults

PREFIX = "DIESEL_OPERATOR"

IMAGE = "diesel-fs"
"""The command in `deploy/Dockerfile` builds this image."""

CONTAINER = "operator"


@click.command(
    context_settings={"auto_envvar_prefix": PREFIX, "help_option_names": ["-h", "--help"]}
)
@click.version_option(diesel_fs.__version__, prog_name="diesel-operator")
@click.option(
    "--namespace",
    multiple=True,
    metavar="NAME",
    help="Serve this namespace; may be given several times.  [default: all]",
)
@click.option(
    "--image",
    metavar="NAME",
    default="",
    help="Image of the pods that prepare datasets. It has dlcmd and this package.  [default: that"
    f" of --pod, else {IMAGE}]",
)
@click.option(
    "--pod",
    metavar="NAME",
    default="",
    help="The pod in which this program runs: pods that prepare datasets get the image of its"
    " container `operator`.",
)
@click.option(
    "--url",
    metavar="URL",
    default="",
    help="The repository of Datasets that name none: diesel+tls://host:9300, ...",
)
@click.option(
    "--file-root",
    multiple=True,
    metavar="DIR",
    help="Folder that all nodes have, as a mount of NFS, below which Datasets may name a"
    " repository by file://.  [default: Datasets may not]",
)
@click.option(
    "--interval",
    type=click.FloatRange(0.1),
    metavar="SECONDS",
    default=10.0,
    show_default=True,
    help="The pause between two requests for a preparation's progress. Reports of nodes are read"
    " once in three of these.",
)
@click.option(
    "--driver-namespace",
    metavar="NAME",
    default="diesel-system",
    show_default=True,
    help="Namespace of the CSI driver, in which each node reports what it holds of datasets. If"
    " empty, this is estimated from the nodes on which pods ran.",
)
@click.option(
    "--workers",
    type=click.IntRange(1, 64),
    metavar="N",
    default=8,
    show_default=True,
    help="How many objects are handled at once.",
)
@click.option(
    "--liveness",
    metavar="URL",
    default="",
    help="Where this program answers that it is alive, as http://0.0.0.0:8080/healthz.",
)
def program(
    namespace: tuple[str, ...], image: str, pod: str, url: str, file_root: tuple[str, ...],
    interval: float, driver_namespace: str, workers: int, liveness: str,
) -> None:  # fmt: skip
    """Make Datasets and run TrainingJobs: the operator of DIESEL-FS for Kubernetes.

    A Dataset names a source: a bucket, archives, or an existing dataset. A Job makes the dataset,
    and the Dataset's status shows its progress. A TrainingJob is a Pod template and the Datasets
    that it reads; its pods start when these are ready, on the nodes that suit them best. Every
    option may also stand in the environment (--image as DIESEL_OPERATOR_IMAGE).

    The cluster is that in which the program runs, or that of KUBECONFIG. All state is in the
    cluster: the program may be killed at any time.

    \b
    Examples:
      diesel-operator --image registry.example/diesel-fs --liveness http://0.0.0.0:8080/healthz
      KUBECONFIG=~/.kube/config diesel-operator --namespace training
    """
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s diesel-operator %(levelname)s %(message)s",
    )
    for noisy in ("httpx2", "httpx", "kopf.objects"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    # kopf takes 0.5 s to import, for which --help need not wait
    from .handlers import serve  # noqa: PLC0415

    if not image and pod:
        from lightkube import Client  # noqa: PLC0415

        from ..api import image_in_pod  # noqa: PLC0415

        with Client() as client:
            image = image_in_pod(client, pod, CONTAINER)
    image = image or IMAGE
    defaults = Defaults(image=image, url=url, file_roots=tuple(file_root))
    click.echo(f"diesel-operator serves {', '.join(namespace) or 'all namespaces'}")
    asyncio.run(
        serve(
            defaults,
            namespace,
            interval_s=interval,
            workers=workers,
            liveness=liveness,
            driver_namespace=driver_namespace,
        )
    )


def main() -> None:
    try:
        program.main(standalone_mode=False)
    except click.exceptions.Exit as ended:
        sys.exit(ended.exit_code)
    except click.ClickException as error:
        click.echo(f"diesel-operator: {error.format_message()}", err=True)
        sys.exit(UsageError.exit_code)
    except DieselError as error:
        click.echo(f"diesel-operator: {error}", err=True)
        sys.exit(error.exit_code)
