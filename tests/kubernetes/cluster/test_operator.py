"""The operator, with the rights of its manifests, on a real control plane: real Jobs, real pods."""

import faulthandler
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import yaml
from lightkube import ApiError, Client
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Event, Pod, PodStatus, Secret
from lightkube.types import PatchType

from diesel_kubernetes.names import DRIVER
from diesel_kubernetes.operator.fields import Json, at, fields, items, text, whole
from diesel_kubernetes.operator.resources import condition_of
from tests.cli.conftest import program_environment
from tests.kubernetes.cluster import web
from tests.kubernetes.cluster.containers import Image
from tests.kubernetes.cluster.control_plane import ControlPlane
from tests.kubernetes.cluster.nodes import Node
from tests.kubernetes.cluster.operators import (
    MANIFESTS,
    SYSTEM,
    DatasetResource,
    Operator,
    Resources,
    TrainingJobResource,
    explained,
    install,
    now_s,
    python_environment,
)
from tests.kubernetes.cluster.volumes import CsiVolume, VolumeError
from tests.waiting import wait_until

EXAMPLES = MANIFESTS.parents[1] / "examples/operator"
FILES = {f"images/{number}.jpg": b"%d" % number * 1000 for number in range(20)}


@pytest.fixture(scope="module", autouse=True)
def installed(client: Client) -> None:
    install(client)


@pytest.fixture
def resources(client: Client, namespace: str) -> Resources:
    return Resources(client, namespace)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A folder for a repository."""
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[str]:
    """The address of an archive with `FILES`, on a web server of the test."""
    served = tmp_path / "served"
    for name, content in FILES.items():
        path = tmp_path / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    served.mkdir()
    with tarfile.open(served / "images.tar", "w") as tar:
        tar.add(tmp_path / "files" / "images", "images")

    with web.served(served) as address:
        yield f"{address}/images.tar"


@pytest.fixture
def node(control_plane: ControlPlane, tmp_path: Path) -> Iterator[Node]:
    """A node that runs what the operator's Jobs say."""
    image = {"diesel-fs": Image(python_environment())}
    with Node(
        control_plane,
        f"node-{tmp_path.name[-20:]}".replace("_", "-"),
        tmp_path / "node",
        images=image,
    ) as made:
        yield made


@pytest.fixture
def operator(
    control_plane: ControlPlane, namespace: str, store: Path, tmp_path: Path
) -> Iterator[Operator]:
    made = Operator(control_plane, tmp_path, f"--namespace={namespace}", f"--file-root={tmp_path}")
    with made:
        yield made


def dataset_spec(store: Path, archive: str, **more: object) -> Json:
    """The spec of a Dataset from an archive."""
    return {
        "url": f"file://{store}",
        "source": {"archives": {"urls": [archive]}},
        "preparation": {"jobs": 1},
        **more,
    }


def in_phase(resources: Resources, operator: Operator, name: str, phase: str) -> Json:
    """The status of a Dataset, as soon as it is in a phase."""

    def is_there() -> bool:
        return text(resources.dataset(name), "status", "phase") == phase

    wait_until(is_there, otherwise=lambda: explained(resources, operator))
    return fields(resources.dataset(name), "status")


def reason_of(status: Json) -> str:
    return text(condition_of(status, "Ready"), "reason")


def dlcmd(store: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """What `dlcmd --json` says of the repository."""
    return subprocess.run(
        [sys.executable, "-m", "dlcmd", "--json", f"--url=file://{store}", *arguments],
        env=program_environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def is_gone(resources: Resources, name: str) -> bool:
    """Whether a Dataset is no more."""
    return not resources.dataset(name)


def job_names(client: Client, namespace: str) -> list[str]:
    return [
        str(each.metadata.name) for each in client.list(Job, namespace=namespace) if each.metadata
    ]


def test_a_dataset_becomes_ready(
    client: Client, resources: Resources, operator: Operator, node: Node, store: Path, archive: str
) -> None:
    resources.make_dataset("pets", dataset_spec(store, archive, keep=2))
    status = in_phase(resources, operator, "pets", "Ready")
    stat = json.loads(dlcmd(store, "stat", "pets").stdout)
    for name in ("entries", "files", "bytes", "version"):
        assert status[name] == stat[name], name
    assert status["files"] == len(FILES)
    assert status["bytes"] == sum(map(len, FILES.values()))
    assert condition_of(status, "Ready")["status"] == "True"
    assert "progress" not in status
    events = client.list(
        Event, namespace=resources.namespace, fields={"involvedObject.name": "pets"}
    )
    assert {each.reason for each in events} == {"Running", "Prepared"}
    kept = dlcmd(store, "ls", "pets@").stdout
    assert str(status["version"]) in kept


@pytest.fixture
def bucket_that_refuses() -> Iterator[str]:
    """An S3 service that knows no key."""

    class Refusing(web.QuietHandler):
        def do_GET(self) -> None:
            content = b"<Error><Code>InvalidAccessKeyId</Code><Message>unknown</Message></Error>"
            self.send_response(403)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_HEAD = do_POST = do_PUT = do_GET

    with web.running(Refusing) as address:
        yield address


def test_failures_have_their_reasons(
    client: Client,
    resources: Resources,
    operator: Operator,
    node: Node,
    store: Path,
    archive: str,
    bucket_that_refuses: str,
) -> None:
    """A wrong key, an archive that is not there, a dataset that is not there, a bad spec."""
    metadata = ObjectMeta(name="wrong", namespace=resources.namespace)
    keys = {"AWS_ACCESS_KEY_ID": "nobody", "AWS_SECRET_ACCESS_KEY": "not-the-key"}
    client.create(Secret(metadata=metadata, stringData=keys))
    resources.make_dataset(
        "denied",
        dataset_spec(
            store,
            archive,
            source={"bucket": {"url": "s3://bucket/pets"}},
            secretName="wrong",
            endpoint=bucket_that_refuses,
            region="us-east-1",
        ),
    )
    resources.make_dataset("missing", dataset_spec(store, archive.replace("images", "others")))
    none = store.parent / "none"
    none.mkdir()
    nowhere = {**dataset_spec(store, archive), "url": f"file://{none}"}
    resources.make_dataset("nowhere", {**nowhere, "source": {"existing": {}}})
    resources.make_dataset("elsewhere", {**dataset_spec(store, archive), "url": "file:///etc"})
    wanted = {
        "denied": "Denied",
        "missing": "NotFound",
        "nowhere": "StoreMissing",
        "elsewhere": "InvalidSpec",
    }
    for name, reason in wanted.items():
        status = in_phase(resources, operator, name, "Failed")
        assert reason_of(status) == reason, status
        assert "not-the-key" not in json.dumps(resources.dataset(name))
    assert len(job_names(client, resources.namespace)) == 3  # none was tried again


def test_an_existing_dataset_is_pinned_and_a_changed_one_prepared_again(
    client: Client, resources: Resources, operator: Operator, node: Node, store: Path, archive: str
) -> None:
    resources.make_dataset("pets", dataset_spec(store, archive))
    first = in_phase(resources, operator, "pets", "Ready")
    existing: Json = {"existing": {"version": first["version"]}}
    resources.make_dataset("same", dataset_spec(store, archive, source=existing, dataset="pets"))
    status = in_phase(resources, operator, "same", "Ready")
    assert [status[name] for name in ("version", "files")] == [first["version"], first["files"]]
    resources.make_dataset("absent", dataset_spec(store, archive, source={"existing": {}}))
    assert reason_of(in_phase(resources, operator, "absent", "Failed")) == "NotFound"
    resources.change_dataset("pets", {"refresh": "1"})
    wait_until(
        lambda: (
            whole(resources.dataset("pets"), "status", "observedGeneration") == 2
            and text(resources.dataset("pets"), "status", "phase") == "Ready"
        ),
        otherwise=lambda: explained(resources, operator),
    )
    # Nothing has changed in the archive, so the version is the same, and the old Job is gone
    assert at(resources.dataset("pets"), "status", "version") == first["version"]
    wait_until(lambda: len(job_names(client, resources.namespace)) == 3)


def test_an_operator_that_is_killed_at_each_step_gets_to_the_same_end(
    client: Client,
    control_plane: ControlPlane,
    resources: Resources,
    node: Node,
    store: Path,
    archive: str,
    tmp_path: Path,
) -> None:
    """kill -9 as soon as anything that is seen of the Dataset has changed, until it is gone."""
    namespace = resources.namespace
    options = (f"--namespace={namespace}", f"--file-root={store}")
    kills = 0

    def seen() -> tuple[object, ...]:
        raw = resources.dataset("pets")
        status = fields(raw, "status")
        finalizers = tuple(map(str, items(raw, "metadata", "finalizers")))
        jobs = tuple(sorted(job_names(client, namespace)))
        return text(status, "phase"), reason_of(status), bool(finalizers), jobs

    def differs(before: object, goal: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: seen() != before or goal()

    def run_to(goal: Callable[[], bool]) -> None:
        nonlocal kills
        while not goal():
            with Operator(control_plane, tmp_path, *options) as operator:
                before = seen()
                wait_until(differs(before, goal), otherwise=partial(explained, resources, operator))
                operator.kill()
                kills += 1

    resources.make_dataset("pets", dataset_spec(store, archive, reclaimPolicy="Delete"))
    run_to(lambda: text(resources.dataset("pets"), "status", "phase") == "Ready")
    made = job_names(client, namespace)
    assert len(made) == 1
    assert whole(resources.dataset("pets"), "status", "files") == len(FILES)
    assert dlcmd(store, "stat", "pets").returncode == 0
    resources.delete_dataset("pets")
    run_to(lambda: not resources.dataset("pets"))
    assert kills >= 5
    print(f"killed {kills} times")
    assert dlcmd(store, "stat", "pets").returncode == 10
    wait_until(lambda: not job_names(client, namespace))
    wait_until(lambda: not list(client.list(Pod, namespace=namespace)))
    found = client.list(Event, namespace=namespace, fields={"involvedObject.name": "pets"})
    events = [each.reason for each in found]
    assert sorted(map(str, events)) == sorted(set(map(str, events)))


def test_a_dataset_that_is_deleted_in_the_middle_leaves_nothing(
    client: Client, resources: Resources, operator: Operator, node: Node, store: Path, archive: str
) -> None:
    resources.make_dataset("pets", dataset_spec(store, archive, reclaimPolicy="Delete"))
    resources.make_dataset("kept", dataset_spec(store, archive))
    for name in ("pets", "kept"):
        in_phase(resources, operator, name, "Preparing")
        resources.delete_dataset(name)
    for name in ("pets", "kept"):
        wait_until(
            partial(is_gone, resources, name), otherwise=partial(explained, resources, operator)
        )
    namespace = resources.namespace
    wait_until(lambda: not job_names(client, namespace))
    wait_until(lambda: not list(client.list(Pod, namespace=namespace)))
    assert dlcmd(store, "stat", "pets").returncode in (10, 13)  # 13: there is no repository yet


class CopyingDriver:
    """A CSI driver whose volumes are copies of the dataset, made by `dlcmd get`."""

    def __init__(self) -> None:
        self.volumes: list[CsiVolume] = []

    def publish(self, volume: CsiVolume) -> None:
        given = volume.attributes
        named = f"{given['dataset']}@{given['version']}"
        done = subprocess.run(
            [sys.executable, "-m", "dlcmd", f"--url={given['url']}", "get", named, volume.target],
            env=program_environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise VolumeError(done.stderr)
        self.volumes.append(volume)

    def unpublish(self, volume_id: str, target: Path) -> None:
        shutil.rmtree(target, ignore_errors=True)


def test_a_training_job_waits_for_its_dataset_and_runs_on_the_best_node(
    client: Client,
    control_plane: ControlPlane,
    resources: Resources,
    operator: Operator,
    store: Path,
    archive: str,
    tmp_path: Path,
) -> None:
    """The larger disk has the higher score. The pods read the version that was pinned."""
    results = tmp_path / "results"
    results.mkdir()
    driver = CopyingDriver()
    images = {"diesel-fs": Image(python_environment())}
    namespace = resources.namespace
    script = f'echo "$WORLD_SIZE $(ls /data/images | wc -l)" > {results}/$RANK'
    container: Json = {"name": "train", "image": "diesel-fs", "command": ["sh", "-c", script]}
    spec: Json = {
        "replicas": 1,
        "datasets": [{"name": "pets", "mountPath": "/data"}],
        "template": {"spec": {"containers": [container]}},
    }
    with ExitStack() as stack:
        for name, disk in (("small", "1Gi"), ("large", "1Ti")):
            made = Node(
                control_plane,
                f"{name}-{namespace}",
                tmp_path / name,
                images=images,
                drivers={DRIVER: driver},
                capacity={"ephemeral-storage": disk},
            )
            stack.enter_context(made)
        resources.make_job("train", spec)
        wait_until(lambda: text(resources.job("train"), "status", "phase") == "Pending")
        resources.make_dataset("pets", dataset_spec(store, archive))
        in_phase(resources, operator, "pets", "Ready")
        wait_until(
            lambda: text(resources.job("train"), "status", "phase") == "Succeeded",
            otherwise=lambda: explained(resources, operator),
        )
        assert (results / "0").read_text().split() == ["1", str(len(FILES))]
        status = fields(resources.job("train"), "status")
        order = [text(each, "name").split("-")[0] for each in items(status, "nodes")]
        assert order == ["large", "small"]
        (pod,) = client.list(
            Pod, namespace=namespace, labels={"operator.diesel-fs.dev/training-job": "train"}
        )
        assert pod.spec is not None
        assert pod.spec.nodeName == f"large-{namespace}"
        assert {each.attributes["dataset"] for each in driver.volumes} == {"pets"}

        failing: Json = {**container, "command": ["sh", "-c", "exit 3"]}
        template: Json = {"spec": {"containers": [failing]}}
        resources.make_job("fails", {**spec, "replicas": 2, "template": template})
        wait_until(
            lambda: text(resources.job("fails"), "status", "phase") == "Failed",
            otherwise=lambda: explained(resources, operator),
        )
        message = json.dumps(at(resources.job("fails"), "status", "conditions"))
        assert "exit code 3" in message

        big: Json = {"status": {**fields(resources.dataset("pets"), "status"), "bytes": 2**50}}
        client.patch(
            DatasetResource.Status, "pets", big, namespace=namespace, patch_type=PatchType.MERGE
        )
        resources.make_job("too-big", spec)
        wait_until(
            lambda: text(resources.job("too-big"), "status", "phase") == "Rejected",
            otherwise=lambda: explained(resources, operator),
        )


def test_the_api_server_takes_the_examples_and_refuses_what_the_schema_does(
    client: Client, namespace: str
) -> None:
    for name, kind in (("dataset", DatasetResource), ("trainingjob", TrainingJobResource)):
        (example,) = yaml.safe_load_all((EXAMPLES / f"{name}.yaml").read_text())
        made = client.create(kind.from_dict(example), namespace=namespace)
        assert made["spec"]
        assert dict(made["spec"]).items() >= dict(example["spec"]).items()  # nothing is pruned
    bad: list[Json] = [
        {},
        {"source": {}},
        {"source": {"existing": {}, "bucket": {"url": "s3://b"}}},
        {"source": {"bucket": {"url": "/etc"}}},
        {"source": {"existing": {}}, "url": "s3://user:password@bucket"},
        {"source": {"existing": {}}, "reclaimPolicy": "Sometimes"},
    ]
    for spec in bad:
        made = DatasetResource(metadata=ObjectMeta(name="bad"), spec=spec)
        with pytest.raises(ApiError) as caught:
            client.create(made, namespace=namespace)
        assert caught.value.status.code == 422


COUNT = 1000


def test_a_thousand_datasets(
    client: Client, control_plane: ControlPlane, resources: Resources, tmp_path: Path
) -> None:
    """All Datasets get their Job; then, as Jobs are said to have ended, all become ready.

    No pod runs, since there is no node: the test says that they have ended.
    """
    # A busy machine takes some minutes, so what ends a test that hangs may come later here
    faulthandler.dump_traceback_later(900, exit=True)
    namespace = resources.namespace
    spec: Json = {"url": "s3://bucket/x", "source": {"bucket": {"url": "s3://bucket/y"}}}
    for number in range(COUNT):
        resources.make_dataset(f"d{number}", spec)
    start_s = now_s()

    def until_all(phase: str) -> None:
        """Watch until all Datasets are in a phase."""
        names = set[str]()
        for _, each in client.watch(DatasetResource, namespace=namespace):
            if text(dict(each), "status", "phase") == phase:
                names.add(text(dict(each), "metadata", "name"))
                if len(names) == COUNT:
                    return

    options = (f"--namespace={namespace}",)
    with Operator(control_plane, tmp_path, *options, interval_s=600) as operator:
        until_all("Preparing")
        observed_s, observed_bytes = now_s() - start_s, operator.memory_bytes()
        message = json.dumps({"dataset": {"entries": 1, "files": 1, "bytes": 1, "version": 5}})
        state = {"name": "prepare", "image": "x", "imageID": "", "ready": False, "restartCount": 0,
                 "state": {"terminated": {"exitCode": 0, "message": message}}}  # fmt: skip
        ended: Json = {"status": {"phase": "Succeeded", "containerStatuses": [state]}}
        done = set[str]()
        start_s = now_s()
        for _, pod in client.watch(Pod, namespace=namespace):
            name = str(pod.metadata.name) if pod.metadata else ""
            if name not in done:
                client.patch(PodStatus, name, ended, namespace=namespace)
                done.add(name)
            if len(done) == COUNT:
                break
        until_all("Ready")
        ready_s, ready_bytes = now_s() - start_s, operator.memory_bytes()
    print(
        f"{COUNT} Datasets: all have a Job after {observed_s:.1f} s ({observed_bytes >> 20} MiB);"
        f" all are ready {ready_s:.1f} s later ({ready_bytes >> 20} MiB)"
    )
    assert max(observed_bytes, ready_bytes) < 300 << 20


def test_preparations_have_the_image_of_the_operators_own_pod(
    control_plane: ControlPlane,
    client: Client,
    resources: Resources,
    store: Path,
    archive: str,
    tmp_path: Path,
) -> None:
    """The operator is told the name of its pod alone, and reads the pod with its own rights."""
    pod: Json = {
        "metadata": {"name": "operator-itself", "namespace": SYSTEM},
        "spec": {
            "nodeName": "no-node",  # so nothing runs it
            "containers": [{"name": "operator", "image": "registry.example/diesel-fs:7"}],
        },
    }
    client.create(cast("Pod", Pod.from_dict(pod)))
    namespace = f"--namespace={resources.namespace}"
    try:
        with Operator(
            control_plane, tmp_path, "--pod=operator-itself", namespace, f"--file-root={tmp_path}"
        ) as operator:
            resources.make_dataset("pets", dataset_spec(store, archive))
            wait_until(
                lambda: job_names(client, resources.namespace),
                otherwise=lambda: explained(resources, operator),
            )
        (job,) = client.list(Job, namespace=resources.namespace)
        images = [text(each, "image") for each in items(
            job.to_dict(), "spec", "template", "spec", "containers"
        )]  # fmt: skip
        assert images == ["registry.example/diesel-fs:7"]
    finally:
        client.delete(Pod, "operator-itself", namespace=SYSTEM, grace_period=0)
