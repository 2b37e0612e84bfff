"""Each transition of a TrainingJob, as decisions about objects of the cluster."""

from collections.abc import Mapping, Sequence
from fractions import Fraction

from diesel_kubernetes.csi.volumes import VolumeLimits, parse_volume
from diesel_kubernetes.names import POD_NAME, POD_NAMESPACE
from diesel_kubernetes.operator.api_objects import ClusterNode, Pod, PodSpec
from diesel_kubernetes.operator.decoding import decode
from diesel_kubernetes.operator.placement import STORAGE, NodeState
from diesel_kubernetes.operator.resources import DatasetObject, TrainingStatus
from diesel_kubernetes.operator.training import (
    TrainingDecision,
    TrainingSituation,
    decide,
    pod_requests,
    survey,
)
from tests.kubernetes.fields import Json, at, fields, items, text, texts
from tests.rows import each_row

from .made import DEFAULTS, NOW_S, dataset, node_object, training_job

READY: Json = {"phase": "Ready", "observedGeneration": 1, "bytes": 1000, "version": 7}


def node(name: str, free: int = 10**9, **labels: str) -> NodeState:
    return NodeState(name, f"host-{name}", labels, {STORAGE: Fraction(free), "cpu": Fraction(4)})


NODES = (node("a", 10**6), node("b", 10**9))


def decided(
    spec: Json | None = None,
    status: TrainingStatus | None = None,
    *,
    datasets: Sequence[DatasetObject] = (dataset(status=READY),),
    pods: Sequence[Json] = (),
    nodes: Sequence[NodeState] | None = NODES,
) -> TrainingDecision:
    found = {each.name: each for each in datasets}
    given = tuple(decode(Pod, each) for each in pods)
    there = None if nodes is None else tuple(nodes)
    seen = training_job(spec, status)
    return decide(TrainingSituation(seen, found, given, NOW_S, there), DEFAULTS)


def admitted(spec: Json | None = None, url: str = "diesel+tls://host:1") -> TrainingStatus:
    made = dataset({"url": url, "secretName": "account"}, READY)
    decision = decided(spec, datasets=[made])
    assert decision.status.phase == "Starting", decision.status
    return decision.status


def pods_of(decision: TrainingDecision) -> list[Json]:
    return [each for each in decision.create if each["kind"] == "Pod"]


def names(status: TrainingStatus) -> list[str]:
    return [each.name for each in status.nodes or ()]


def in_phase(pods: Sequence[Json], *phases: str) -> list[Json]:
    return [{**pod, "status": {"phase": phase}} for pod, phase in zip(pods, phases, strict=True)]


def reason_of(status: TrainingStatus, kind: str) -> str:
    return status.condition(kind).reason


@each_row(
    ("found", "reason"),
    [
        ([], "DatasetMissing"),
        ([dataset(status=READY, deleted=True)], "DatasetMissing"),
        ([dataset()], "DatasetNotReady"),
        ([dataset(status={**READY, "phase": "Preparing"})], "DatasetNotReady"),
        ([dataset(status=READY, generation=2)], "DatasetNotReady"),
        ([dataset(status={**READY, "phase": "Failed"})], "DatasetFailed"),
    ],
)
def test_a_job_waits_until_its_dataset_is_ready(found: list[DatasetObject], reason: str) -> None:
    decision = decided(datasets=found)
    assert decision.status.phase == "Pending"
    assert reason_of(decision.status, "DatasetsReady") == reason
    assert not decision.create
    assert [each["reason"] for each in decision.events] == [reason]


def test_nodes_are_chosen_when_the_datasets_are_ready_and_before_a_pod_is_made() -> None:
    assert decided(nodes=None).wants_survey
    assert not decided(datasets=[], nodes=None).wants_survey
    decision = decided()
    assert not decision.create
    assert decision.again_s == 0
    assert names(decision.status) == ["b", "a"]
    assert decision.status.volumes[0].attributes["version"] == "7"


def test_a_job_whose_datasets_cannot_fit_is_refused() -> None:
    """The nodes have 1,001 million bytes free for 2,000 million. Blocks in memory count for the
    score, and not for the storage."""

    def big(**held: object) -> list[DatasetObject]:
        nodes = [{"name": "a", "state": "Active", "share": 100, **held}] if held else []
        return [dataset(status={**READY, "bytes": 2 * 10**9, "nodes": nodes})]

    refused = decided(datasets=big()).status
    assert not decided(status=refused, datasets=big()).create
    always = decided({"admission": "Always"}, datasets=big(keeps=False)).status
    assert names(always) == ["a", "b"]
    assert reason_of(always, "Admitted") == "NotChecked"
    for held, phase, reason in (
        ({}, "Rejected", "NoSpace"),
        ({"keeps": False}, "Rejected", "NoSpace"),
        ({"keeps": True}, "Starting", "Fits"),
        ({"keeps": True, "diskShare": 49}, "Rejected", "NoSpace"),
        ({"keeps": True, "diskShare": 50}, "Starting", "Fits"),
    ):
        status = decided(datasets=big(**held)).status
        assert (status.phase, reason_of(status, "Admitted")) == (phase, reason), held


def test_all_pods_are_made_at_once_with_ranks_and_volumes() -> None:
    spec: Json = {"datasets": [{"name": "pets", "mountPath": "/data", "options": {"memory": "2G"}}]}
    service, *pods = decided(spec, admitted(spec)).create
    assert service["kind"] == "Service"
    assert [at(pod, "metadata", "name") for pod in pods] == ["train-0", "train-1"]
    for rank, pod in enumerate(pods):
        container = fields(pod, "spec", "containers", 0)
        env = {text(each, "name"): text(each, "value") for each in items(container, "env")}
        master = "train-0.train-ranks"
        wanted = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": master}
        assert wanted.items() <= env.items()
        assert at(container, "volumeMounts", 0, "mountPath") == "/data"
        csi = fields(pod, "spec", "volumes", 0, "csi")
        assert csi["nodePublishSecretRef"] == {"name": "account"}
        given = {POD_NAME: f"train-{rank}", POD_NAMESPACE: "default"}
        volume = parse_volume({**texts(csi, "volumeAttributes"), **given}, {}, VolumeLimits())
        assert volume.named == "pets@7"
        options = {"--task=train-01234567", f"--rank={rank}", "--world=2", "--memory=2147483648"}
        assert options <= set(volume.options)
        preferred = "preferredDuringSchedulingIgnoredDuringExecution"
        order = [
            (at(each, "preference", "matchExpressions", 0, "values", 0), at(each, "weight"))
            for each in items(pod, "spec", "affinity", "nodeAffinity", preferred)
        ]
        assert order == [("host-b", 100), ("host-a", 50)]
        assert at(pod, "spec", "affinity", "podAntiAffinity")


def test_a_template_keeps_its_own_fields() -> None:
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    template: Json = {
        "metadata": {"labels": {"team": "x"}, "annotations": {"note": "y"}},
        "spec": {
            "restartPolicy": "OnFailure",
            "containers": [
                {"name": "a", "env": [{"name": "RANK", "value": "mine"}], "futureField": {"x": 1}},
                {"name": "b", "volumeMounts": [{"name": "own", "mountPath": "/own"}]},
            ],
            "initContainers": [{"name": "i"}],
            "volumes": [{"name": "own", "emptyDir": {}}],
            "affinity": {"nodeAffinity": {required: {"x": 1}}},
        },
    }
    spec: Json = {"template": template}
    pod = pods_of(decided(spec, admitted(spec)))[0]
    assert texts(pod, "metadata", "labels")["team"] == "x"
    assert at(pod, "spec", "restartPolicy") == "OnFailure"
    env = items(pod, "spec", "containers", 0, "env")
    assert [text(each, "value") for each in env if text(each, "name") == "RANK"] == ["mine"]
    assert at(pod, "spec", "containers", 0, "futureField") == {"x": 1}
    assert len(items(pod, "spec", "containers", 1, "volumeMounts")) == 2
    assert len(items(pod, "spec", "initContainers", 0, "volumeMounts")) == 1
    assert len(items(pod, "spec", "volumes")) == 2
    assert at(pod, "spec", "affinity", "nodeAffinity", required) == {"x": 1}


@each_row(
    ("url", "task", "secret"),
    [
        ("diesel+tls://host:1", True, "account"),
        ("diesel://host:1", True, "train-task-0"),
        ("s3://bucket/x?meta=redis://host", True, "account"),
        ("file:///data/store", False, "account"),
    ],
)
def test_a_task_has_its_own_key_if_no_secret_gives_one(url: str, task: bool, secret: str) -> None:
    decision = decided(status=admitted(url=url))
    csi = fields(pods_of(decision)[0], "spec", "volumes", 0, "csi")
    assert ("task" in texts(csi, "volumeAttributes")) == task
    assert at(csi, "nodePublishSecretRef", "name") == secret
    made = {each.secret_name for each in decision.key_secrets}
    assert made == {secret} - {"account"}


def test_a_job_runs_and_succeeds_and_leaves_only_pods_that_ended() -> None:
    status = admitted(url="diesel://host:1")
    pods = pods_of(decided(status=status))
    for phases, phase, running in (
        (("Running", "Pending"), "Starting", 1),
        (("Running", "Running"), "Running", 2),
        (("Succeeded", "Running"), "Running", 1),
        (("Succeeded", "Succeeded"), "Succeeded", 0),
    ):
        status = decided(status=status, pods=in_phase(pods, *phases)).status
        assert (status.phase, status.running) == (phase, running)
    assert status.condition("Finished").holds
    decision = decided(status=status, pods=in_phase(pods, "Succeeded", "Succeeded"))
    assert decision.delete_pods == ()
    assert decision.delete_secrets == ("train-task-0",)
    assert decision.delete_services == ("train-ranks",)
    assert (decision.create, decision.events) == ((), ())


def test_a_pod_that_fails_restarts_all_then_fails_the_job() -> None:
    spec: Json = {"restarts": 1}
    status = admitted(spec)
    failed = in_phase(pods_of(decided(spec, status)), "Running", "Failed")
    decision = decided(spec, status, pods=failed)
    assert (decision.status.restarts, decision.delete_pods) == (1, ())  # first it is counted
    status = decision.status
    decision = decided(spec, status, pods=failed)
    assert decision.delete_pods == ("train-0", "train-1")
    assert not decision.create
    new = pods_of(decided(spec, status))
    assert len(new) == 2
    failed = in_phase(new, "Running", "Failed")
    ended = {"name": "train", "state": {"terminated": {"exitCode": 3, "reason": "Error"}}}
    failed[1]["status"] = {"phase": "Failed", "containerStatuses": [ended]}
    status = decided(spec, status, pods=failed).status
    assert status.phase == "Failed"
    finished = status.condition("Finished")
    assert finished.reason == "PodFailed"
    assert "train ended with exit code 3 Error" in finished.message
    assert decided(spec, status, pods=failed).delete_pods == ("train-0",)


@each_row(
    ("spec", "field"),
    [
        ({"replicas": 0}, "spec.replicas"),
        ({"template": {"spec": {"containers": []}}}, "containers"),
        ({"template": {"spec": {"containers": [{}], "restartPolicy": "Always"}}}, "restartPolicy"),
        ({"datasets": [{"name": "pets", "mountPath": "data"}]}, "mountPath"),
        ({"datasets": [{"name": "pets", "mountPath": "/d", "options": {"task": "x"}}]}, "task"),
        ({"datasets": [{"name": "pets", "mountPath": "/d", "options": {"x": "x"}}]}, "options"),
        ({"datasets": [{"name": "pets", "mountPath": f"/{n}"} for n in "ab"]}, "name"),
    ],
)
def test_a_senseless_spec_is_refused_by_name(spec: Json, field: str) -> None:
    status = decided(spec).status
    assert status.phase == "Failed"
    assert field in status.condition("Admitted").message


def test_selectors_of_datasets_and_template_both_hold() -> None:
    placed = [dataset({"placement": {"nodeSelector": {"disk": "ssd"}}}, READY)]
    nodes = [node("a", disk="ssd"), node("b"), node("c", disk="hdd")]
    status = decided(datasets=placed, nodes=nodes).status
    assert names(status) == ["a"]
    pod = pods_of(decided(status=status))[0]
    assert texts(pod, "spec", "nodeSelector") == {"disk": "ssd"}
    contrary: Json = {"template": {"spec": {"containers": [{}], "nodeSelector": {"disk": "hdd"}}}}
    assert decided(contrary, datasets=placed, nodes=nodes).status.phase == "Failed"


def test_a_survey_counts_the_remaining_room_of_nodes() -> None:
    def pod(phase: str) -> Pod:
        resources = {"requests": {"cpu": "500m"}, "limits": {STORAGE: "100", "cpu": "2"}}
        spec = {"nodeName": "a", "containers": [{"resources": resources}] * 2}
        return decode(Pod, {"spec": spec, "status": {"phase": phase}})

    def held(name: str, state: str, **more: object) -> DatasetObject:
        status = {"bytes": 300, "nodes": [{"name": "a", "state": state, "share": 50, **more}]}
        return dataset(status=status, name=name)

    (only,) = survey(
        [
            decode(ClusterNode, node_object("a", storage="1000")),
            decode(ClusterNode, node_object("lost", ready="Unknown")),
            decode(ClusterNode, node_object("closed", unschedulable=True)),
        ],
        [pod("Running"), pod("Succeeded")],
        [
            held("own", "Cached", keeps=True),
            held("idle", "Cached", keeps=True),
            held("in part", "Cached", keeps=True, diskShare=10),
            held("busy", "Active", keeps=True),
            held("memory", "Active"),
        ],
        ["uid-of-own"],
    )
    assert only.name == "a"
    assert only.requested == {"pods": 1, "cpu": 1, STORAGE: 200}
    assert only.free_bytes == 1000 - 200 - 3 * 150 - 30
    assert only.preemptible_bytes == 150 + 30
    assert only.has_room({"cpu": Fraction(3)})
    assert not only.has_room({"cpu": Fraction(3), "nvidia.com/gpu": Fraction(1)})


def test_a_pod_requests_its_containers_together_or_its_largest_init_container() -> None:
    def container(cpu: str) -> Mapping[str, object]:
        return {"resources": {"requests": {"cpu": cpu}}}

    containers = [container("1"), container("500m")]
    assert pod_requests(decode(PodSpec, {"containers": containers})) == {"cpu": Fraction(3, 2)}
    pod: Json = {"containers": containers, "initContainers": [container("2")]}
    assert pod_requests(decode(PodSpec, pod)) == {"cpu": 2}


def test_versions_are_pinned_at_admission() -> None:
    status = admitted()
    pods = in_phase(pods_of(decided(status=status))[:1], "Running")
    newer = dataset(status={**READY, "version": 8})
    for found in ([newer], []):
        (pod,) = pods_of(decided(status=status, datasets=found, pods=pods))
        assert at(pod, "metadata", "name") == "train-1"
        volume = texts(pod, "spec", "volumes", 0, "csi", "volumeAttributes")
        assert volume["version"] == "7"
