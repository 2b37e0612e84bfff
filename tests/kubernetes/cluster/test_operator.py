"""The operator, with the rights of its manifests, on a real control plane: real Jobs, real pods."""

import faulthandler
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from lightkube import ApiError, Client
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Event, Pod, PodStatus
from lightkube.types import PatchType

from tests.cli.conftest import program_environment
from tests.deploy.manifests import KUBERNETES, read
from tests.kubernetes.cluster.conftest import served_archive
from tests.kubernetes.cluster.containers import Environment
from tests.kubernetes.cluster.control_plane import ControlPlane
from tests.kubernetes.cluster.nodes import SimulatedNode
from tests.kubernetes.cluster.operators import (
    OWN_IMAGE,
    SYSTEM,
    DatasetResource,
    Operator,
    Resources,
    TrainingJobResource,
)
from tests.kubernetes.fields import Json, condition_of, fields, items, text, whole
from tests.waiting import wait_until

FILES = {f"images/{number}.jpg": b"%d" % number * 1000 for number in range(20)}

pytestmark = pytest.mark.usefixtures("installed")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


@pytest.fixture
def archive(tmp_path: Path) -> Iterator[str]:
    with served_archive(tmp_path, "images.tar", FILES) as address:
        yield address


@pytest.fixture
def node(
    control_plane: ControlPlane, images: dict[str, Environment], tmp_path: Path
) -> Iterator[None]:
    name = f"node-{tmp_path.name[-20:]}".replace("_", "-")
    with SimulatedNode(control_plane, name, tmp_path / "node", images):
        yield


@pytest.fixture
def operator(
    control_plane: ControlPlane, resources: Resources, tmp_path: Path
) -> Iterator[Operator]:
    """The operator. It gets only the name of its pod, and reads that pod's image with its own
    rights: its Jobs have the same one."""
    pod: Json = {
        "metadata": {"name": "operator-itself", "namespace": SYSTEM},
        "spec": {
            "nodeName": "no-node",  # so nothing runs it
            "containers": [{"name": "operator", "image": OWN_IMAGE}],
        },
    }
    resources.client.create(cast("Pod", Pod.from_dict(pod)))
    options = (f"--namespace={resources.namespace}", f"--file-root={tmp_path}")
    try:
        with Operator(control_plane, tmp_path, "--pod=operator-itself", *options) as made:
            yield made
    finally:
        with suppress(ApiError):  # the cluster itself deletes a pod on a node that does not exist
            resources.client.delete(Pod, "operator-itself", namespace=SYSTEM, grace_period=0)


def dataset_spec(store: Path, archive: str, **more: object) -> Json:
    return {
        "url": f"file://{store}",
        "source": {"archives": {"urls": [archive]}},
        "preparation": {"jobs": 1},
        **more,
    }


def reason_of(status: Json) -> str:
    return text(condition_of(status, "Ready"), "reason")


def dlcmd(store: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "dlcmd", "--json", f"--url=file://{store}", *arguments],
        env=program_environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def job_names(resources: Resources) -> list[str]:
    found = resources.client.list(Job, namespace=resources.namespace)
    return [str(each.metadata.name) for each in found if each.metadata]


def events_of_pets(resources: Resources) -> list[str]:
    found = resources.client.list(
        Event, namespace=resources.namespace, fields={"involvedObject.name": "pets"}
    )
    return sorted(str(each.reason) for each in found)


@pytest.mark.usefixtures("node")
def test_a_dataset_becomes_ready_is_pinned_and_is_prepared_again(
    resources: Resources, operator: Operator, store: Path, archive: str
) -> None:
    resources.make_dataset("pets", dataset_spec(store, archive, keep=2))
    status = resources.dataset_in("Ready", "pets", operator)
    stat = json.loads(dlcmd(store, "stat", "pets").stdout)
    for name in ("entries", "files", "bytes", "version"):
        assert status[name] == stat[name], name
    assert status["files"] == len(FILES)
    assert status["bytes"] == sum(map(len, FILES.values()))
    assert condition_of(status, "Ready")["status"] == "True"
    assert "progress" not in status
    assert set(events_of_pets(resources)) == {"Prepared", "Running"}
    assert str(status["version"]) in dlcmd(store, "ls", "pets@").stdout

    existing: Json = {"existing": {"version": status["version"]}}
    resources.make_dataset("same", dataset_spec(store, archive, source=existing, dataset="pets"))
    same = resources.dataset_in("Ready", "same", operator)
    assert [same[name] for name in ("version", "files")] == [status["version"], status["files"]]
    resources.make_dataset("absent", dataset_spec(store, archive, source={"existing": {}}))
    assert reason_of(resources.dataset_in("Failed", "absent", operator)) == "NotFound"
    resources.make_dataset("missing", dataset_spec(store, archive.replace("images", "others")))
    assert reason_of(resources.dataset_in("Failed", "missing", operator)) == "NotFound"
    resources.client.patch(
        DatasetResource,
        "pets",
        {"spec": {"refresh": "1"}},
        namespace=resources.namespace,
        patch_type=PatchType.MERGE,
    )
    resources.wait(
        lambda: whole(resources.dataset("pets"), "status", "observedGeneration") == 2, operator
    )
    # The archive is unchanged, so the version is the same, and the old Job is gone. No failed Job
    # was tried again.
    assert resources.dataset_in("Ready", "pets", operator)["version"] == status["version"]
    wait_until(lambda: len(job_names(resources)) == 4)
    for job in resources.client.list(Job, namespace=resources.namespace):
        container = fields(job.to_dict(), "spec", "template", "spec", "containers", 0)
        assert container["image"] == OWN_IMAGE


@pytest.mark.usefixtures("node")
def test_an_operator_that_is_killed_at_each_step_gets_to_the_same_end(
    control_plane: ControlPlane, resources: Resources, store: Path, archive: str, tmp_path: Path
) -> None:
    """kill -9 after each visible change of the Dataset, until it is gone."""
    options = (f"--namespace={resources.namespace}", f"--file-root={store}")
    kills = 0

    def seen() -> tuple[object, ...]:
        raw = resources.dataset("pets")
        status = fields(raw, "status")
        finalizers = tuple(map(str, items(raw, "metadata", "finalizers")))
        jobs = tuple(sorted(job_names(resources)))
        return text(status, "phase"), reason_of(status), bool(finalizers), jobs

    def differs(before: object, goal: Callable[[], bool]) -> bool:
        return seen() != before or goal()

    def run_to(goal: Callable[[], bool]) -> None:
        nonlocal kills
        while not goal():
            with Operator(control_plane, tmp_path, *options) as operator:
                resources.wait(partial(differs, seen(), goal), operator)
                operator.kill()
                kills += 1

    resources.make_dataset("pets", dataset_spec(store, archive, reclaimPolicy="Delete"))
    run_to(lambda: text(resources.dataset("pets"), "status", "phase") == "Ready")
    assert len(job_names(resources)) == 1
    assert whole(resources.dataset("pets"), "status", "files") == len(FILES)
    assert dlcmd(store, "stat", "pets").returncode == 0
    resources.client.delete(DatasetResource, "pets", namespace=resources.namespace)
    run_to(lambda: not resources.dataset("pets"))
    assert kills >= 5
    print(f"killed {kills} times")
    assert dlcmd(store, "stat", "pets").returncode == 10
    wait_until(lambda: not job_names(resources))
    wait_until(lambda: not list(resources.client.list(Pod, namespace=resources.namespace)))
    events = events_of_pets(resources)
    assert events == sorted(set(events))


def test_the_api_server_checks_objects_by_the_schema(resources: Resources) -> None:
    client, namespace = resources.client, resources.namespace
    for name, kind in (("dataset", DatasetResource), ("trainingjob", TrainingJobResource)):
        (example,) = read(KUBERNETES / f"examples/operator/{name}.yaml")
        made = client.create(kind.from_dict(example), namespace=namespace)
        assert made["spec"]
        assert dict(made["spec"]).items() >= fields(example, "spec").items()  # nothing is pruned
    bad: list[Json] = [
        {},
        {"source": {}},
        {"source": {"existing": {}, "bucket": {"url": "s3://b"}}},
        {"source": {"bucket": {"url": "/etc"}}},
        {"source": {"existing": {}}, "url": "s3://user:password@bucket"},
        {"source": {"existing": {}}, "reclaimPolicy": "Sometimes"},
    ]
    for spec in bad:
        with pytest.raises(ApiError) as caught:
            resources.make_dataset("bad", spec)
        assert caught.value.status.code == 422


COUNT = 1000


def test_a_thousand_datasets(
    client: Client, control_plane: ControlPlane, resources: Resources, tmp_path: Path
) -> None:
    """No pod runs, since there is no node: the test marks the Jobs as ended."""
    # On a busy machine this takes some minutes, so the time limit of a test is later here
    faulthandler.dump_traceback_later(900, exit=True)
    namespace = resources.namespace
    spec: Json = {"url": "s3://bucket/x", "source": {"bucket": {"url": "s3://bucket/y"}}}
    for number in range(COUNT):
        resources.make_dataset(f"d{number}", spec)

    def until_all(phase: str, operator: Operator) -> None:
        """The operator's memory must be bounded then."""
        start_s, names = time.monotonic(), set[str]()
        for _, each in client.watch(DatasetResource, namespace=namespace):
            if text(dict(each), "status", "phase") == phase:
                names.add(text(dict(each), "metadata", "name"))
                if len(names) == COUNT:
                    break
        print(f"{COUNT} Datasets: all are {phase} after {time.monotonic() - start_s:.1f} s")
        assert operator.memory_bytes() < 300 << 20

    option = f"--namespace={namespace}"
    with Operator(control_plane, tmp_path, option, interval_s=600) as operator:
        until_all("Preparing", operator)
        message = json.dumps({"dataset": {"entries": 1, "files": 1, "bytes": 1, "version": 5}})
        state = {"name": "prepare", "image": "x", "imageID": "", "ready": False, "restartCount": 0,
                 "state": {"terminated": {"exitCode": 0, "message": message}}}  # fmt: skip
        ended: Json = {"status": {"phase": "Succeeded", "containerStatuses": [state]}}
        done = set[str]()
        for _, pod in client.watch(Pod, namespace=namespace):
            name = str(pod.metadata.name) if pod.metadata else ""
            if name not in done:
                client.patch(PodStatus, name, ended, namespace=namespace)
                done.add(name)
            if len(done) == COUNT:
                break
        until_all("Ready", operator)
