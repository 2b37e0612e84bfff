"""A TrainingJob from end to end: the operator, the CSI driver, mount pods and the task's cache.

Real are the control plane, the operator and the driver (each with the rights of its manifests), the
server, its Redis, the bucket, the FUSE mounts and the masters of the task. A stand-in takes the
place of kubelet and of the container engine, so both nodes are this machine.
"""

import hashlib
import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import boto3
import grpc
import pytest
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.core_v1 import Pod, Secret, Service

from diesel_kubernetes.names import DRIVER, POD_NAME, POD_NAMESPACE
from diesel_kubernetes.operator.objects import LABEL_TRAINING
from tests.kubernetes.cluster.conftest import served_archive
from tests.kubernetes.cluster.containers import CsiVolume, Environment, VolumeError
from tests.kubernetes.cluster.control_plane import ControlPlane
from tests.kubernetes.cluster.nodes import SimulatedNode
from tests.kubernetes.cluster.operators import DRIVER_ACCOUNT, IMAGE, SYSTEM, Operator, Resources
from tests.kubernetes.csi.plugin import Plugin, running_plugin
from tests.kubernetes.fields import Json, at, fields, items, text, whole
from tests.server.program import Server, new_repository
from tests.storage.metadata.redis_servers import RedisServer
from tests.storage.objects.s3_server import Server as Bucket
from tests.storage.objects.s3_server import s3_server
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.usefixtures("installed"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root binds mounts"),
]

PETS = {f"{n % 7}/{n:03}.jpg": random.Random(n).randbytes(200_000) for n in range(200)}
BIRDS = {f"{n % 3}/{n:02}.jpg": random.Random(-n).randbytes(5_000) for n in range(30)}

RANK_OF_A_TASK = """
import hashlib, json, os, pathlib, sys, time
result, go = map(pathlib.Path, sys.argv[1:3])
found = {}
for epoch in range(2):
    for place in sys.argv[3:]:
        for path in sorted(pathlib.Path(place).rglob("*")):
            if path.is_file():
                found[f"{place}:{path.relative_to(place)}"] = hashlib.sha256(
                    path.read_bytes()
                ).hexdigest()
report = {"environment": {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")},
        "places": sys.argv[3:], "found": found}
made = result.with_suffix(".new")
made.write_text(json.dumps(report))
made.rename(result)
while not go.exists():
    time.sleep(0.05)
"""


@contextmanager
def volume_errors() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        raise VolumeError(str(error)) from error


class PluginDriver:
    """The driver as a node's kubelet calls it: over the socket of the plugin's program."""

    def __init__(self, plugin: Plugin) -> None:
        self.plugin = plugin

    def publish(self, volume: CsiVolume) -> None:
        given = volume.attributes
        with volume_errors():
            self.plugin.kubelet.publish(
                volume.target,
                given,
                secrets=volume.secrets,
                namespace=given[POD_NAMESPACE],
                pod=given[POD_NAME],
                volume=volume.volume_id,
            )

    def unpublish(self, volume_id: str, target: Path) -> None:
        with volume_errors():
            self.plugin.kubelet.unpublish(target, volume_id)


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    with s3_server(tmp_path) as server:
        client = boto3.client(
            "s3",
            endpoint_url=server.environ["AWS_ENDPOINT_URL"],
            region_name=server.environ["AWS_REGION"],
            aws_access_key_id=server.environ["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=server.environ["AWS_SECRET_ACCESS_KEY"],
        )
        for name, content in BIRDS.items():
            client.put_object(Bucket=server.bucket, Key=f"birds/{name}", Body=content)
        yield server


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[str]:
    with served_archive(tmp_path, "pets.tar.gz", PETS) as address:
        yield address


@pytest.fixture
def address() -> Iterator[str]:
    """An address of this machine at which nodes reach each other: loopback is none."""
    address = "198.18.77.1"  # in a range for tests of networks
    subprocess.run(["ip", "address", "replace", f"{address}/32", "dev", "lo"], check=True)
    yield address
    subprocess.run(["ip", "address", "delete", f"{address}/32", "dev", "lo"], check=True)


@contextmanager
def node_with_driver(
    control_plane: ControlPlane, name: str, folder: Path, images: Mapping[str, Environment]
) -> Iterator[Plugin]:
    folder.mkdir()
    options = ("--idle=0", "--mounter=pod", f"--namespace={SYSTEM}", f"--image={IMAGE}")
    kubeconfig = {"KUBECONFIG": str(control_plane.kubeconfig_of(SYSTEM, DRIVER_ACCOUNT))}
    with (
        running_plugin(
            folder / "plugin", f"--node={name}", *options, environment=kubeconfig
        ) as plugin,
        SimulatedNode(
            control_plane, name, folder / "node", images, drivers={DRIVER: PluginDriver(plugin)}
        ),
    ):
        try:
            yield plugin
            plugin.wait_until_clean()
        except BaseException:
            plugin.end(signal.SIGKILL)  # otherwise it waits for mounts, and hides the failure
            raise


def check_shared(places: list[str]) -> None:
    """The mounts are one task, and each chunk was fetched from the store by one of its nodes."""

    def figures() -> list[Json]:
        stats = [json.loads((Path(place) / ".diesel/stats").read_bytes()) for place in places]
        return [fields(each, "task") for each in stats]

    wait_until(
        lambda: all(whole(each, "chunks_from_peers") for each in figures()),
        otherwise=lambda: json.dumps(figures()),
    )
    seen = figures()
    assert len({text(each, "name") for each in seen}) == 1
    assert [whole(each, "members") for each in seen] == [2, 2]
    shares = [whole(each, "node_cache", "share_chunks") for each in seen]
    assert sum(shares) > 4
    assert [whole(each, "chunks_from_store") for each in seen] == shares


def test_ranks_read_through_the_driver_and_share_their_cache(
    control_plane: ControlPlane,
    resources: Resources,
    images: dict[str, Environment],
    archive: str,
    bucket: Bucket,
    address: str,
    tmp_path: Path,
) -> None:
    """One dataset is from an archive, one from a bucket. The plugins are killed while the ranks
    run; the mounts go on."""
    client, namespace = resources.client, resources.namespace
    results, go = tmp_path / "results", tmp_path / "go"
    results.mkdir()
    repository = (tmp_path / "store").as_uri()
    with ExitStack() as stack:
        redis = stack.enter_context(RedisServer(tmp_path / "redis"))
        root = new_repository(f"{repository}?meta={redis.url}")["root"]
        options = ("--insecure", "--store", repository, "--meta", redis.url)
        listen = f"{address}:0"
        server = stack.enter_context(Server(tmp_path / "server", *options, listen=listen))
        account = {"user": "root", "key": root.key_text}
        keys = {
            name: bucket.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        }
        for name, content in (("account", account), ("both", {**account, **keys})):
            metadata = ObjectMeta(name=name, namespace=namespace)
            client.create(Secret(metadata=metadata, stringData=content))
        plugins = [
            stack.enter_context(
                node_with_driver(control_plane, f"node-{each}-{namespace}", tmp_path / each, images)
            )
            for each in "ab"
        ]
        operator = stack.enter_context(
            Operator(control_plane, tmp_path, f"--namespace={namespace}")
        )
        command = ["python", "-c", RANK_OF_A_TASK, f"{results}/$(RANK)", str(go), "/pets", "/birds"]
        train = {"name": "train", "image": IMAGE, "command": command}
        job: Json = {
            "replicas": 2,
            "datasets": [{"name": name, "mountPath": f"/{name}"} for name in ("pets", "birds")],
            "template": {"spec": {"containers": [train]}},
        }
        resources.make_job("train", job)
        resources.job_in("Pending", "train", operator)
        made: Json = {"url": server.url, "preparation": {"jobs": 1}}
        of_archive: Json = {"secretName": "account", "source": {"archives": {"urls": [archive]}}}
        resources.make_dataset("pets", {**made, **of_archive})
        of_bucket: Json = {
            "secretName": "both",
            "source": {"bucket": {"url": f"s3://{bucket.bucket}/birds"}},
            "endpoint": bucket.environ["AWS_ENDPOINT_URL"],
            "region": bucket.environ["AWS_REGION"],
        }
        resources.make_dataset("birds", {**made, **of_bucket})
        resources.wait(lambda: len(list(results.glob("[01]"))) == 2, operator, 180.0)
        for name, files in (("pets", PETS), ("birds", BIRDS)):
            status = fields(resources.dataset(name), "status")
            assert status["files"] == len(files)
            assert status["bytes"] == sum(map(len, files.values()))
        reports = [json.loads((results / str(rank)).read_text()) for rank in range(2)]
        for rank, report in enumerate(reports):
            pets, birds = report["places"]
            assert report["found"] == {
                f"{place}:{path}": hashlib.sha256(data).hexdigest()
                for place, files in ((pets, PETS), (birds, BIRDS))
                for path, data in files.items()
            }
            assert report["environment"] == {"RANK": str(rank), "WORLD_SIZE": "2"}
        pods = client.list(Pod, namespace=namespace, labels={LABEL_TRAINING: "train"})
        assert len({pod.spec.nodeName for pod in pods if pod.spec}) == 2
        check_shared([report["places"][0] for report in reports])

        for plugin in plugins:
            plugin.restart()
        for report in reports:
            assert (Path(report["places"][0]) / next(iter(PETS))).read_bytes()

        def shares_are_measured() -> bool:
            nodes = items(resources.dataset("pets"), "status", "nodes")
            measured = [each for each in nodes if at(each, "measured") and whole(each, "share")]
            return len(measured) == len(nodes) == 2

        # A plugin reports when it starts; it finds the mounts of an earlier one
        resources.wait(shares_are_measured, operator)
        go.touch()
        resources.job_in("Succeeded", "train", operator)
        wait_until(lambda: not list(client.list(Service, namespace=namespace)))
        assert {
            each.metadata.name
            for each in client.list(Secret, namespace=namespace)
            if each.metadata and each.type == "Opaque"
        } == {"account", "both"}
