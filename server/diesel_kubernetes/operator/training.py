"""Decides what to do next for a TrainingJob, from what the cluster has of it. Pure.

The workflow is algorithm 1 of DLCache: the job is admitted if its datasets fit, is placed by the
score of nodes, and starts when its datasets are ready. What was decided at admission is written to
the status before anything is made, so a later operator makes the same pods.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from lightkube.utils.quantity import parse_quantity

from diesel_fs.errors import DieselError, UsageError

from .datasets import holding_of
from .fields import Json, at, fields, flag, items, text, texts, whole
from .objects import (
    LABEL_ATTEMPT,
    LABEL_RANK,
    PlannedVolume,
    event,
    key_secret_name,
    merged_selectors,
    planned_volumes,
    ranks_service,
    service_name,
    task_name,
    training_pod,
)
from .placement import Amounts, Holding, NodeState, admission, in_order
from .resources import (
    DatasetPhase,
    DatasetSpec,
    Defaults,
    Object,
    TrainingPhase,
    TrainingSpec,
    condition_of,
    parse_dataset,
    parse_object,
    parse_training,
    with_condition,
)

_FINAL = (TrainingPhase.SUCCEEDED, TrainingPhase.FAILED, TrainingPhase.REJECTED)
_STARTED = (TrainingPhase.STARTING, TrainingPhase.RUNNING)

RETRY_S = 30.0
"""How soon a job whose Dataset is missing is looked at again, beside the event."""

SHOWN_NODES_MAX = 50

MADE = "ObjectsMade"
"""The condition that says what cannot be made for a job; a job without trouble has none."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done, in this order: Secrets with keys, the Service, pods, events, the status,
    and then what is deleted."""

    status: Json
    wants_survey: bool = False
    """The nodes must be looked at before anything can be decided."""
    key_secrets: tuple[PlannedVolume, ...] = ()
    create: tuple[Json, ...] = ()
    events: tuple[Json, ...] = ()
    delete_pods: tuple[str, ...] = ()
    delete_secrets: tuple[str, ...] = ()
    delete_services: tuple[str, ...] = ()
    again_s: float | None = None


@dataclass(frozen=True, slots=True)
class Situation:
    """A TrainingJob, and what the cluster has of it."""

    seen: Object
    datasets: Mapping[str, Json]
    """Those that it names, and that are there."""
    pods: tuple[Json, ...]
    now_s: float
    nodes: tuple[NodeState, ...] | None = None
    """None: they were not looked at."""


def decide(situation: Situation, defaults: Defaults) -> Decision:
    """The next step for a TrainingJob."""
    seen, status = situation.seen, situation.seen.status
    if seen.is_deleted:
        return Decision(status)
    phase = text(status, "phase")
    is_observed = whole(status, "observedGeneration") == seen.generation
    if phase in _FINAL and (is_observed or planned_volumes(status)):
        return _ended(situation)
    try:
        spec = parse_training(seen)
        if phase in _STARTED:
            return _told(situation, _running(situation, spec))
        return _told(situation, _waiting(situation, spec, defaults))
    except UsageError as error:
        made = _with(situation, status, TrainingPhase.FAILED, "Admitted", "InvalidSpec", str(error))
        return _told(situation, Decision(made))


def _waiting(situation: Situation, spec: TrainingSpec, defaults: Defaults) -> Decision:
    """Before admission: all Datasets must be ready."""
    seen = situation.seen
    chosen: list[tuple[Object, DatasetSpec]] = []
    for use in spec.uses:
        raw = situation.datasets.get(use.name)
        if raw is None:
            return _not_ready(situation, "DatasetMissing", f"there is no Dataset {use.name}")
        dataset = parse_object(raw)
        phase = text(dataset.status, "phase")
        is_observed = whole(dataset.status, "observedGeneration") == dataset.generation
        if dataset.is_deleted:
            return _not_ready(situation, "DatasetMissing", f"{use.name} is being deleted")
        if is_observed and phase == DatasetPhase.FAILED:
            why = text(condition_of(dataset.status, "Ready"), "message")
            return _not_ready(situation, "DatasetFailed", f"{use.name}: {why}")
        if not is_observed or phase != DatasetPhase.READY:
            return _not_ready(situation, "DatasetNotReady", f"{use.name} is not ready")
        try:
            chosen.append((dataset, parse_dataset(dataset, defaults)))
        except DieselError as error:
            return _not_ready(situation, "DatasetFailed", f"{use.name}: {error}")
    if situation.nodes is None:
        return Decision(seen.status, wants_survey=True)
    return _admitted(situation, spec, chosen)


def _not_ready(situation: Situation, reason: str, message: str) -> Decision:
    status = situation.seen.status
    made = _with(situation, status, TrainingPhase.PENDING, "DatasetsReady", reason, message)
    return Decision(made, again_s=RETRY_S)


def _admitted(
    situation: Situation, spec: TrainingSpec, chosen: Sequence[tuple[Object, DatasetSpec]]
) -> Decision:
    """Algorithm 1, line 3, and the order of nodes (III-B)."""
    selector = merged_selectors(
        texts(spec.template, "spec", "nodeSelector"), *(each.node_selector for _, each in chosen)
    )
    nodes = [each for each in situation.nodes or () if each.matches(selector)]
    holdings = [holding_of(dataset.status) for dataset, _ in chosen]
    kept = [holding_of(dataset.status, on_disk=True) for dataset, _ in chosen]
    sums = admission(nodes, kept)
    message = (
        f"the datasets need {sums.needed_bytes} bytes; {len(nodes)} nodes have"
        f" {sums.free_bytes} free and {sums.preemptible_bytes} preemptible"
    )
    made = _with(
        situation, situation.seen.status, None, "DatasetsReady", "AllReady", "", holds=True
    )
    if spec.checks_storage and not sums.fits:
        return Decision(
            _with(situation, made, TrainingPhase.REJECTED, "Admitted", "NoSpace", message)
        )
    order = in_order(nodes, holdings, pod_requests(fields(spec.template, "spec")))
    reason = "Fits" if spec.checks_storage else "NotChecked"
    made = _with(situation, made, TrainingPhase.STARTING, "Admitted", reason, message, holds=True)
    made |= {
        "nodes": [
            {
                "name": each.node.name,
                "hostname": each.node.hostname,
                "score": f"{float(each.score):.3f}",
            }
            for each in order[:SHOWN_NODES_MAX]
        ],
        "nodeSelector": selector,
        "volumes": [
            _planned(situation.seen, number, use.mount_path, use.options, dataset, each).to_json()
            for number, (use, (dataset, each)) in enumerate(zip(spec.uses, chosen, strict=True))
        ],
        "restarts": 0,
    }
    return Decision(made, again_s=0.0)


def _planned(
    seen: Object,
    number: int,
    path: str,
    options: Mapping[str, str],
    dataset: Object,
    spec: DatasetSpec,
) -> PlannedVolume:
    repository = spec.repository
    attributes = {
        "dataset": spec.dataset,
        "version": str(whole(dataset.status, "version")),
        **repository.attributes,
        **({"policy": "oneshot"} if flag(dataset.raw, "spec", "warmUp") else {}),
        **options,
    }
    secret, key_from = repository.secret, ""
    if repository.can_share_caches:
        attributes["task"] = task_name(seen)
        if repository.needs_task_key and repository.secret:
            secret, key_from = key_secret_name(seen, number), repository.secret
    return PlannedVolume(dataset.name, path, attributes, secret, key_from)


@dataclass(frozen=True, slots=True)
class _Pods:
    """The pods of one attempt, by rank."""

    by_rank: Mapping[int, Json] = field(default_factory=dict)

    def count(self, phase: str) -> int:
        return sum(text(each, "status", "phase") == phase for each in self.by_rank.values())


def _running(situation: Situation, spec: TrainingSpec) -> Decision:
    """After admission: all ranks have a pod, until they have ended."""
    seen, status = situation.seen, situation.seen.status
    restarts = whole(status, "restarts")
    current: dict[int, Json] = {}
    old = []
    for pod in situation.pods:
        labels = texts(pod, "metadata", "labels")
        rank, attempt = labels.get(LABEL_RANK, ""), labels.get(LABEL_ATTEMPT, "")
        if attempt == str(restarts) and rank.isdecimal() and int(rank) < spec.replicas:
            current[int(rank)] = pod
        else:
            old.append(pod)
    delete = tuple(_name(each) for each in old if not _is_leaving(each))
    pods = _Pods(current)
    running, succeeded = pods.count("Running"), pods.count("Succeeded")
    made = {**status, "running": running, "succeeded": succeeded, "replicas": spec.replicas}
    if failed := [each for each in current.values() if text(each, "status", "phase") == "Failed"]:
        message = f"{_name(failed[0])} has failed{_why(failed[0])}"
        if restarts < spec.restarts:
            made = _with(situation, made, TrainingPhase.STARTING, "Finished", "Restarting", message)
            return Decision({**made, "restarts": restarts + 1}, again_s=0.0)
        return Decision(
            _with(situation, made, TrainingPhase.FAILED, "Finished", "PodFailed", message),
            again_s=0.0,
        )
    if succeeded == spec.replicas:
        return Decision(
            _with(
                situation, made, TrainingPhase.SUCCEEDED, "Finished", "Succeeded", "", holds=True
            ),
            again_s=0.0,
        )
    is_up = running + succeeded == spec.replicas
    phase = TrainingPhase.RUNNING if is_up else TrainingPhase.STARTING
    message = f"{running} of {spec.replicas} pods run"
    made = _with(situation, made, phase, "Finished", "Running", message)
    if old:  # their names are needed again
        return Decision(made, delete_pods=delete, again_s=1.0)
    volumes = planned_volumes(status)
    missing = [rank for rank in range(spec.replicas) if rank not in current]
    if not missing:
        return Decision(made)
    order = [text(each, "hostname") for each in items(status, "nodes")]
    selector = texts(status, "nodeSelector")
    create = [
        training_pod(seen, spec, volumes, order, selector, rank, restarts) for rank in missing
    ]
    if spec.replicas > 1:
        create.insert(0, ranks_service(seen))
    keys = tuple(each for each in volumes if each.key_from)
    return Decision(made, key_secrets=keys, create=tuple(create))


def _ended(situation: Situation) -> Decision:
    """What a job that has ended leaves: its pods that have ended, and nothing else."""
    seen, status = situation.seen, situation.seen.status
    volumes = planned_volumes(status)
    active = [
        _name(each)
        for each in situation.pods
        if text(each, "status", "phase") not in ("Succeeded", "Failed") and not _is_leaving(each)
    ]
    return Decision(
        status,
        delete_pods=tuple(active),
        delete_secrets=tuple(each.secret for each in volumes if each.key_from),
        delete_services=(service_name(seen),) if volumes and whole(status, "replicas") > 1 else (),
    )


def _name(pod: Json) -> str:
    return text(pod, "metadata", "name")


def _is_leaving(pod: Json) -> bool:
    return bool(text(pod, "metadata", "deletionTimestamp"))


def _why(pod: Json) -> str:
    """What is known of why a pod failed, to be added to a sentence."""
    for each in items(pod, "status", "containerStatuses"):
        ended = fields(each, "state", "terminated")
        if whole(ended, "exitCode"):
            shown = text(ended, "message") or text(ended, "reason")
            return f": {text(each, 'name')} ended with exit code {whole(ended, 'exitCode')} {shown}"
    reason = text(pod, "status", "reason")
    return f": {reason}" if reason else ""


def _with(
    situation: Situation,
    status: Json,
    phase: TrainingPhase | None,
    kind: str,
    reason: str,
    message: str,
    *,
    holds: bool = False,
) -> Json:
    seen = situation.seen
    made = {**status, "observedGeneration": seen.generation}
    if phase is not None:
        made["phase"] = phase.value
    return with_condition(made, kind, holds, reason, message, seen, situation.now_s)


def _told(situation: Situation, decision: Decision) -> Decision:
    """A decision with an event where the phase changes, or the reason why it does not."""
    before, after = situation.seen.status, decision.status
    changed = [
        fields(each)
        for each in items(after, "conditions")
        if text(condition_of(before, text(each, "type")), "reason") != text(each, "reason")
    ]
    if before.get("phase") == after.get("phase") and not changed:
        return decision
    cause = changed[-1] if changed else {}
    is_bad = after.get("phase") in (TrainingPhase.FAILED, TrainingPhase.REJECTED) or at(
        cause, "reason"
    ) in ("DatasetFailed", "Restarting")
    made = event(
        situation.seen,
        "Warning" if is_bad else "Normal",
        text(cause, "reason") or str(after.get("phase")),
        f"{after.get('phase')}: {text(cause, 'message')}",
        situation.now_s,
    )
    return replace(decision, events=(*decision.events, made))


def hindered(situation: Situation, reason: str, message: str) -> Json:
    """The status of a job for which the operator could not make something. It tries again."""
    return _with(situation, situation.seen.status, None, MADE, reason, message)


def unhindered(situation: Situation, status: Json) -> Json:
    """A status, now that all that the job needs has been made."""
    if text(condition_of(status, MADE), "status") != "False":
        return status
    return _with(situation, status, None, MADE, "AllMade", "all has been made", holds=True)


def amounts(resources: object) -> dict[str, Fraction]:
    """Resources as the API writes them (`500m`, `16Gi`), in numbers. What is malformed is 0."""
    found = {}
    for name, value in fields(resources).items():
        try:
            parsed = parse_quantity(str(value))
        except ValueError:
            parsed = None
        found[name] = Fraction(parsed) if parsed is not None else Fraction()
    return found


def pod_requests(pod: Json) -> dict[str, Fraction]:
    """What a pod requests: the sum of its containers, or its largest init container. A limit counts
    where no request stands."""
    found: dict[str, Fraction] = {}
    for each in items(pod, "containers"):
        for name, amount in _requests(each).items():
            found[name] = found.get(name, Fraction()) + amount
    for each in items(pod, "initContainers"):
        for name, amount in _requests(each).items():
            found[name] = max(found.get(name, Fraction()), amount)
    return found


def _requests(container: object) -> Amounts:
    limits = amounts(at(container, "resources", "limits"))
    return {**limits, **amounts(at(container, "resources", "requests"))}


def survey(
    nodes: Sequence[Json], pods: Sequence[Json], datasets: Sequence[Json], own: Sequence[str]
) -> tuple[NodeState, ...]:
    """The nodes on which pods can be scheduled, with what is left on them.

    `own` are the UIDs of the Datasets of the job in question, whose blocks are to stay.
    """
    requested: dict[str, dict[str, Fraction]] = {}
    for pod in pods:
        if text(pod, "status", "phase") in ("Succeeded", "Failed"):
            continue
        sums = requested.setdefault(text(pod, "spec", "nodeName"), {"pods": Fraction()})
        sums["pods"] += 1
        for name, amount in pod_requests(fields(pod, "spec")).items():
            sums[name] = sums.get(name, Fraction()) + amount
    cached: dict[str, int] = {}
    preemptible: dict[str, int] = {}
    for dataset in datasets:
        held = holding_of(fields(dataset, "status"), on_disk=True)
        for each in items(dataset, "status", "nodes"):
            if at(each, "keeps") is not True:
                continue  # in memory: that is no storage
            name = text(each, "name")
            size = int(_part(held, name))
            cached[name] = cached.get(name, 0) + size
            is_free = text(each, "state") == "Cached"
            if is_free and text(dataset, "metadata", "uid") not in own:
                preemptible[name] = preemptible.get(name, 0) + size
    found = []
    for node in nodes:
        name = text(node, "metadata", "name")
        if flag(node, "spec", "unschedulable") or not _is_ready(node):
            continue
        labels = texts(node, "metadata", "labels")
        found.append(
            NodeState(
                name=name,
                hostname=labels.get("kubernetes.io/hostname", name),
                labels=labels,
                allocatable=amounts(at(node, "status", "allocatable")),
                requested=requested.get(name, {}),
                cached_bytes=cached.get(name, 0),
                preemptible_bytes=preemptible.get(name, 0),
            )
        )
    return tuple(found)


def _part(held: Holding, node: str) -> Fraction:
    return held.content_bytes * held.shares.get(node, Fraction())


def _is_ready(node: Json) -> bool:
    conditions = [fields(each) for each in items(node, "status", "conditions")]
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)
