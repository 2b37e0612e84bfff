"""Each transition of a TrainingJob, as decisions about what the cluster has."""

from collections.abc import Mapping, Sequence
from fractions import Fraction

from diesel_kubernetes.csi.volumes import Limits, parse_volume
from diesel_kubernetes.names import POD_NAME, POD_NAMESPACE
from diesel_kubernetes.operator.fields import Json, at, fields, items, text, texts
from diesel_kubernetes.operator.placement import STORAGE, NodeState
from diesel_kubernetes.operator.resources import Object, condition_of
from diesel_kubernetes.operator.training import (
    Decision,
    Situation,
    decide,
    pod_requests,
    survey,
)
from tests.rows import each_row

from .made import DEFAULTS, NOW_S, dataset, node_object, training_job

READY: Json = {"phase": "Ready", "observedGeneration": 1, "bytes": 1000, "version": 7}


def node(name: str, free: int = 10**9, **labels: str) -> NodeState:
    """A node with so many bytes free."""
    return NodeState(name, f"host-{name}", labels, {STORAGE: Fraction(free), "cpu": Fraction(4)})


NODES = (node("a", 10**6), node("b", 10**9))


def situation(
    seen: Object,
    datasets: Sequence[Object] = (dataset(status=READY),),
    pods: Sequence[Json] = (),
    nodes: Sequence[NodeState] | None = NODES,
) -> Situation:
    """What the cluster has of a TrainingJob."""
    found = {each.name: each.raw for each in datasets}
    return Situation(seen, found, tuple(pods), NOW_S, None if nodes is None else tuple(nodes))


def step(status: Json, spec: Json | None = None, pods: Sequence[Json] = ()) -> Decision:
    """The decision after a status was written."""
    return decide(situation(training_job(spec, status), pods=pods), DEFAULTS)


def admitted(spec: Json | None = None, **more: str) -> Json:
    """The status of a job that was admitted."""
    made = dataset({"url": more.get("url", "diesel+tls://host:1"), "secretName": "account"}, READY)
    decision = decide(situation(training_job(spec), [made]), DEFAULTS)
    assert decision.status["phase"] == "Starting", decision.status
    return decision.status


def pods_of(decision: Decision) -> list[Json]:
    return [each for each in decision.create if each["kind"] == "Pod"]


def names(found: Sequence[object]) -> list[str]:
    return [text(each, "name") for each in found]


def in_phase(pods: Sequence[Json], *phases: str) -> list[Json]:
    """Pods with these phases."""
    return [{**pod, "status": {"phase": phase}} for pod, phase in zip(pods, phases, strict=True)]


def reason_of(status: Json, kind: str) -> str:
    return text(condition_of(status, kind), "reason")


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
def test_a_job_waits_until_its_dataset_is_ready(found: list[Object], reason: str) -> None:
    decision = decide(situation(training_job(), found), DEFAULTS)
    assert decision.status["phase"] == "Pending"
    assert reason_of(decision.status, "DatasetsReady") == reason
    assert not decision.create
    assert [each["reason"] for each in decision.events] == [reason]


def test_nodes_are_looked_at_only_when_the_datasets_are_ready_and_before_a_pod_is_made() -> None:
    """What is decided is in the status then."""
    assert decide(situation(training_job(), nodes=None), DEFAULTS).wants_survey
    assert not decide(situation(training_job(), [], nodes=None), DEFAULTS).wants_survey
    decision = decide(situation(training_job()), DEFAULTS)
    assert not decision.create
    assert decision.again_s == 0
    assert names(items(decision.status, "nodes")) == ["b", "a"]
    assert at(decision.status, "volumes", 0, "attributes", "version") == "7"


def test_a_job_whose_datasets_cannot_fit_is_refused() -> None:
    big = dataset(status={**READY, "bytes": 2 * 10**9})
    decision = decide(situation(training_job(), [big]), DEFAULTS)
    assert decision.status["phase"] == "Rejected"
    assert reason_of(decision.status, "Admitted") == "NoSpace"
    assert not decide(situation(training_job(status=decision.status), [big]), DEFAULTS).create
    always = decide(situation(training_job({"admission": "Always"}), [big]), DEFAULTS)
    assert always.status["phase"] == "Starting"
    assert reason_of(always.status, "Admitted") == "NotChecked"


def test_blocks_in_memory_count_for_the_score_and_not_for_the_storage() -> None:
    """The nodes have 1,001 million bytes free for 2,000 million."""

    def decided(admission: str, **held: object) -> Decision:
        nodes = [{"name": "a", "state": "Active", "share": 100, **held}]
        big = dataset(status={**READY, "bytes": 2 * 10**9, "nodes": nodes})
        return decide(situation(training_job({"admission": admission}), [big]), DEFAULTS)

    in_memory = decided("Always", keeps=False)
    assert names(items(in_memory.status, "nodes")) == ["a", "b"]
    for phase, held in (
        ("Rejected", {"keeps": False}),
        ("Starting", {"keeps": True}),
        ("Rejected", {"keeps": True, "diskShare": 49}),
        ("Starting", {"keeps": True, "diskShare": 50}),
    ):
        assert decided("Storage", **held).status["phase"] == phase, held


def test_all_pods_are_made_at_once_with_ranks_and_volumes() -> None:
    spec: Json = {"datasets": [{"name": "pets", "mountPath": "/data", "options": {"memory": "2G"}}]}
    decision = step(admitted(spec), spec)
    service, *pods = decision.create
    assert service["kind"] == "Service"
    assert [at(pod, "metadata", "name") for pod in pods] == ["train-0", "train-1"]
    for rank, pod in enumerate(pods):
        container = fields(pod, "spec", "containers", 0)
        env = {text(each, "name"): text(each, "value") for each in items(container, "env")}
        assert env["RANK"] == str(rank)
        assert env["WORLD_SIZE"] == "2"
        assert env["MASTER_ADDR"] == "train-0.train-ranks"
        assert at(container, "volumeMounts", 0, "mountPath") == "/data"
        csi = fields(pod, "spec", "volumes", 0, "csi")
        assert csi["nodePublishSecretRef"] == {"name": "account"}
        given = {POD_NAME: f"train-{rank}", POD_NAMESPACE: "default"}
        volume = parse_volume({**texts(csi, "volumeAttributes"), **given}, {}, Limits())
        assert volume.named == "pets@7"
        assert {"--task=train-01234567", f"--rank={rank}", "--world=2"} <= set(volume.options)
        assert "--memory=2147483648" in volume.options
        preferred = "preferredDuringSchedulingIgnoredDuringExecution"
        order = [
            (at(each, "preference", "matchExpressions", 0, "values", 0), at(each, "weight"))
            for each in items(pod, "spec", "affinity", "nodeAffinity", preferred)
        ]
        assert order == [("host-b", 100), ("host-a", 50)]
        assert at(pod, "spec", "affinity", "podAntiAffinity")


def test_a_template_keeps_what_it_has() -> None:
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
    pod = pods_of(step(admitted(spec), spec))[0]
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
def test_a_task_has_a_key_of_its_own_only_where_nobody_else_gives_it(
    url: str, task: bool, secret: str
) -> None:
    status = admitted(url=url)
    decision = step(status)
    csi = fields(pods_of(decision)[0], "spec", "volumes", 0, "csi")
    assert ("task" in texts(csi, "volumeAttributes")) == task
    assert at(csi, "nodePublishSecretRef", "name") == secret
    assert [each.secret for each in decision.key_secrets] == [
        name for name in [secret] if name != "account"
    ]


def test_missing_ranks_are_made_and_others_left_alone() -> None:
    status = admitted()
    pods = pods_of(step(status))
    decision = step(status, pods=in_phase(pods[:1], "Running"))
    assert [at(each, "metadata", "name") for each in pods_of(decision)] == ["train-1"]


def test_a_job_runs_and_succeeds_and_leaves_only_pods_that_ended() -> None:
    status = admitted(url="diesel://host:1")
    pods = pods_of(step(status))
    decision = step(status, pods=in_phase(pods, "Running", "Pending"))
    assert (decision.status["phase"], decision.status["running"]) == ("Starting", 1)
    decision = step(decision.status, pods=in_phase(pods, "Running", "Running"))
    assert decision.status["phase"] == "Running"
    decision = step(decision.status, pods=in_phase(pods, "Succeeded", "Running"))
    assert decision.status["phase"] == "Running"
    decision = step(decision.status, pods=in_phase(pods, "Succeeded", "Succeeded"))
    assert decision.status["phase"] == "Succeeded"
    assert condition_of(decision.status, "Finished")["status"] == "True"
    decision = step(decision.status, pods=in_phase(pods, "Succeeded", "Succeeded"))
    assert decision.delete_pods == ()
    assert decision.delete_secrets == ("train-task-0",)
    assert decision.delete_services == ("train-ranks",)
    assert not (decision.create)
    assert not (decision.events)


def test_a_pod_that_fails_restarts_all_then_fails_the_job() -> None:
    spec: Json = {"restarts": 1}
    status = admitted(spec)
    pods = pods_of(step(status, spec))
    failed = in_phase(pods, "Running", "Failed")
    decision = step(status, spec, failed)
    assert (decision.status["restarts"], decision.delete_pods) == (1, ())  # first it is counted
    status = decision.status
    decision = step(status, spec, failed)
    assert decision.delete_pods == ("train-0", "train-1")
    assert not decision.create
    decision = step(status, spec)
    new = pods_of(decision)
    assert len(new) == 2
    decision = step(status, spec, in_phase(new, "Running", "Failed"))
    assert decision.status["phase"] == "Failed"
    assert reason_of(decision.status, "Finished") == "PodFailed"
    decision = step(decision.status, spec, in_phase(new, "Running", "Failed"))
    assert decision.delete_pods == ("train-0",)


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
def test_a_spec_that_means_nothing_is_refused_by_name(spec: Json, field: str) -> None:
    decision = decide(situation(training_job(spec)), DEFAULTS)
    assert decision.status["phase"] == "Failed"
    assert field in text(condition_of(decision.status, "Admitted"), "message")


def test_selectors_of_datasets_and_template_hold_together() -> None:
    placed = dataset({"placement": {"nodeSelector": {"disk": "ssd"}}}, READY)
    nodes = [node("a", disk="ssd"), node("b"), node("c", disk="hdd")]
    decision = decide(situation(training_job(), [placed], nodes=nodes), DEFAULTS)
    assert names(items(decision.status, "nodes")) == ["a"]
    pod = pods_of(step(decision.status))[0]
    assert texts(pod, "spec", "nodeSelector") == {"disk": "ssd"}
    contrary: Json = {"template": {"spec": {"containers": [{}], "nodeSelector": {"disk": "hdd"}}}}
    decision = decide(situation(training_job(contrary), [placed], nodes=nodes), DEFAULTS)
    assert decision.status["phase"] == "Failed"


def test_a_survey_counts_what_is_left_on_nodes() -> None:
    def pod(phase: str) -> Json:
        resources = {"requests": {"cpu": "500m"}, "limits": {STORAGE: "100", "cpu": "2"}}
        return {
            "spec": {"nodeName": "a", "containers": [{"resources": resources}] * 2},
            "status": {"phase": phase},
        }

    def held(name: str, state: str, **more: object) -> Json:
        status = {"bytes": 300, "nodes": [{"name": "a", "state": state, "share": 50, **more}]}
        return dataset(status=status, name=name).raw

    (only,) = survey(
        [
            node_object("a", storage="1000"),
            node_object("lost", ready="Unknown"),
            node_object("closed", unschedulable=True),
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

    pod: Json = {
        "containers": [container("1"), container("500m")],
        "initContainers": [container("2")],
    }
    assert pod_requests(pod) == {"cpu": 2}


def test_versions_are_pinned_at_admission() -> None:
    """A Dataset that is prepared again, or deleted, changes nothing for a job that was admitted."""
    status = admitted()
    newer = dataset(status={**READY, "version": 8})
    for found in ([newer], []):
        decision = decide(situation(training_job(status=status), found), DEFAULTS)
        csi = fields(pods_of(decision)[0], "spec", "volumes", 0, "csi")
        assert texts(csi, "volumeAttributes")["version"] == "7"
