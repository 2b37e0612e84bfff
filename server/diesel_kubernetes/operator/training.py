"""Decides the next step for a TrainingJob. Pure.

The workflow is algorithm 1 of DLCache: when its datasets are ready, the job is admitted if they
fit, and is placed by the score of nodes. The turn that decides this only writes the status; later
turns make pods from the status, so another operator makes the same pods.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from lightkube.utils.quantity import parse_quantity

from diesel_fs.errors import DieselError, UsageError

from .api_objects import ClusterNode, Container, Pod, PodSpec
from .datasets import holding_of, holding_on_disks
from .decoding import Json
from .objects import (
    LABEL_ATTEMPT,
    LABEL_RANK,
    News,
    PodPlan,
    event,
    key_secret_name,
    merged_selectors,
    ranks_service,
    service_name,
    task_name,
    training_pod,
)
from .placement import Amounts, NodeState, admission, in_order
from .resources import (
    ChosenNode,
    ConditionContent,
    DatasetObject,
    DatasetPhase,
    DatasetUse,
    PlannedVolume,
    TrainingObject,
    TrainingPhase,
    TrainingStatus,
    with_condition,
)
from .specs import DatasetSpec, Defaults, TrainingSpec, parse_dataset, parse_training

_FINAL = (TrainingPhase.SUCCEEDED, TrainingPhase.FAILED, TrainingPhase.REJECTED)
_STARTED = (TrainingPhase.STARTING, TrainingPhase.RUNNING)

RETRY_S = 30.0
"""The pause before another look at Datasets that are missing or not ready: events may be lost."""

SHOWN_NODES_MAX = 50

MADE = "ObjectsMade"
"""The condition of this type is false if the cluster has refused an object of the job, true when
the operator has made all objects after that."""


@dataclass(frozen=True, slots=True)
class TrainingDecision:
    """The controller makes Secrets with keys, the Service, pods and events, writes the status, and
    deletes, in this order."""

    status: TrainingStatus
    wants_survey: bool = False
    """Whether `decide` must be called again, with the nodes of the cluster."""
    key_secrets: tuple[PlannedVolume, ...] = ()
    create: tuple[Json, ...] = ()
    events: tuple[Json, ...] = ()
    delete_pods: tuple[str, ...] = ()
    delete_secrets: tuple[str, ...] = ()
    delete_services: tuple[str, ...] = ()
    again_s: float | None = None
    """The pause before another turn if no event comes; None: no turn without an event."""


@dataclass(frozen=True, slots=True)
class TrainingSituation:
    seen: TrainingObject
    datasets: Mapping[str, DatasetObject]
    """The job's Datasets by name, without missing ones."""
    pods: tuple[Pod, ...]
    now_s: float
    nodes: tuple[NodeState, ...] | None = None
    """The nodes that can get pods; None if they were not read (see `wants_survey`)."""


def decide(situation: TrainingSituation, defaults: Defaults) -> TrainingDecision:
    seen, status = situation.seen, situation.seen.status
    if seen.is_deleted:
        return TrainingDecision(status)
    is_observed = status.observed_generation == seen.generation
    # A job that was admitted is not started again, even if its specification has changed
    if status.phase in _FINAL and (is_observed or status.volumes):
        return _clean_up(situation)
    try:
        spec = parse_training(seen)
        if status.phase in _STARTED:
            return _with_event(situation, _running(situation, spec))
        return _with_event(situation, _waiting(situation, spec, defaults))
    except UsageError as error:
        found = ConditionContent("Admitted", "InvalidSpec", str(error))
        made = _with(situation, status, found, TrainingPhase.FAILED)
        return _with_event(situation, TrainingDecision(made))


_Chosen = Sequence[tuple[DatasetObject, DatasetSpec]]


def _waiting(
    situation: TrainingSituation, spec: TrainingSpec, defaults: Defaults
) -> TrainingDecision:
    chosen: list[tuple[DatasetObject, DatasetSpec]] = []
    for use in spec.uses:
        dataset = situation.datasets.get(use.name)
        if dataset is None:
            return _not_ready(situation, "DatasetMissing", f"there is no Dataset {use.name}")
        status = dataset.status
        is_observed = status.observed_generation == dataset.generation
        if dataset.is_deleted:
            return _not_ready(situation, "DatasetMissing", f"{use.name} is being deleted")
        if is_observed and status.phase == DatasetPhase.FAILED:
            why = status.condition("Ready").message
            return _not_ready(situation, "DatasetFailed", f"{use.name}: {why}")
        if not is_observed or status.phase != DatasetPhase.READY:
            return _not_ready(situation, "DatasetNotReady", f"{use.name} is not ready")
        try:
            chosen.append((dataset, parse_dataset(dataset, defaults)))
        except DieselError as error:
            return _not_ready(situation, "DatasetFailed", f"{use.name}: {error}")
    if situation.nodes is None:
        return TrainingDecision(situation.seen.status, wants_survey=True)
    return _admitted(situation, spec, chosen)


def _not_ready(situation: TrainingSituation, reason: str, message: str) -> TrainingDecision:
    found = ConditionContent("DatasetsReady", reason, message)
    made = _with(situation, situation.seen.status, found, TrainingPhase.PENDING)
    return TrainingDecision(made, again_s=RETRY_S)


def _admitted(
    situation: TrainingSituation, spec: TrainingSpec, chosen: _Chosen
) -> TrainingDecision:
    """Admits or rejects the job (DLCache, algorithm 1, line 3), and orders the nodes (section
    III-B)."""
    selector = merged_selectors(
        spec.pod.node_selector, *(each.placement.node_selector for _, each in chosen)
    )
    nodes = [each for each in situation.nodes or () if each.matches(selector)]
    sums = admission(nodes, [holding_on_disks(dataset.status) for dataset, _ in chosen])
    message = (
        f"the datasets need {sums.needed_bytes} bytes; {len(nodes)} nodes have"
        f" {sums.free_bytes} free and {sums.preemptible_bytes} preemptible"
    )
    are_ready = ConditionContent("DatasetsReady", "AllReady", holds=True)
    made = _with(situation, situation.seen.status, are_ready)
    if spec.checks_storage and not sums.fits:
        no_space = ConditionContent("Admitted", "NoSpace", message)
        return TrainingDecision(_with(situation, made, no_space, TrainingPhase.REJECTED))
    holdings = [holding_of(dataset.status) for dataset, _ in chosen]
    order = in_order(nodes, holdings, pod_requests(spec.pod))
    reason = "Fits" if spec.checks_storage else "NotChecked"
    found = ConditionContent("Admitted", reason, message, holds=True)
    made = _with(situation, made, found, TrainingPhase.STARTING)
    made = replace(
        made,
        nodes=tuple(
            ChosenNode(each.node.name, each.node.hostname, f"{float(each.score):.3f}")
            for each in order[:SHOWN_NODES_MAX]
        ),
        node_selector=selector,
        volumes=_planned_volumes(situation.seen, spec.uses, chosen),
        restarts=0,
    )
    return TrainingDecision(made, again_s=0.0)


def _planned_volumes(
    seen: TrainingObject, uses: Sequence[DatasetUse], chosen: _Chosen
) -> tuple[PlannedVolume, ...]:
    made = []
    for number, (use, (dataset, spec)) in enumerate(zip(uses, chosen, strict=True)):
        repository = spec.repository
        attributes = {
            "dataset": spec.dataset,
            "version": str(dataset.status.version or 0),
            **repository.attributes,
            **({"policy": "oneshot"} if spec.warms_up else {}),
            **use.options,
        }
        secret, key_from = repository.secret, ""
        if repository.can_share_caches:
            attributes["task"] = task_name(seen)
            if repository.needs_task_key and repository.secret:
                secret, key_from = key_secret_name(seen, number), repository.secret
        made.append(PlannedVolume(dataset.name, use.mount_path, attributes, secret, key_from))
    return tuple(made)


def _running(situation: TrainingSituation, spec: TrainingSpec) -> TrainingDecision:
    seen, status = situation.seen, situation.seen.status
    restarts = status.restarts or 0
    current: dict[int, Pod] = {}
    old = []
    for pod in situation.pods:
        labels = pod.metadata.labels
        rank, attempt = labels.get(LABEL_RANK, ""), labels.get(LABEL_ATTEMPT, "")
        if attempt == str(restarts) and rank.isdecimal() and int(rank) < spec.replicas:
            current[int(rank)] = pod
        else:
            old.append(pod)
    phases = [each.status.phase for each in current.values()]
    running, succeeded = phases.count("Running"), phases.count("Succeeded")
    made = replace(status, running=running, succeeded=succeeded, replicas=spec.replicas)
    if failed := [each for each in current.values() if each.status.phase == "Failed"]:
        message = f"{failed[0].name} has failed{_why_it_failed(failed[0])}"
        if restarts < spec.restarts:
            found = ConditionContent("Finished", "Restarting", message)
            made = _with(situation, made, found, TrainingPhase.STARTING)
            return TrainingDecision(replace(made, restarts=restarts + 1), again_s=0.0)
        found = ConditionContent("Finished", "PodFailed", message)
        return TrainingDecision(_with(situation, made, found, TrainingPhase.FAILED), again_s=0.0)
    if succeeded == spec.replicas:
        found = ConditionContent("Finished", "Succeeded", holds=True)
        return TrainingDecision(_with(situation, made, found, TrainingPhase.SUCCEEDED), again_s=0.0)
    is_up = running + succeeded == spec.replicas
    found = ConditionContent("Finished", "Running", f"{running} of {spec.replicas} pods run")
    phase = TrainingPhase.RUNNING if is_up else TrainingPhase.STARTING
    made = _with(situation, made, found, phase)
    if old:  # pods of an earlier attempt: their names are needed again
        delete = tuple(each.name for each in old if not each.metadata.is_leaving)
        return TrainingDecision(made, delete_pods=delete, again_s=1.0)
    missing = [rank for rank in range(spec.replicas) if rank not in current]
    if not missing:
        return TrainingDecision(made)
    order = [each.hostname for each in status.nodes or ()]
    plan = PodPlan(seen, spec, status.volumes, order, status.node_selector or {}, restarts)
    create = [training_pod(plan, rank) for rank in missing]
    if spec.replicas > 1:
        create.insert(0, ranks_service(seen))
    keys = tuple(each for each in status.volumes if each.key_from)
    return TrainingDecision(made, key_secrets=keys, create=tuple(create))


def _clean_up(situation: TrainingSituation) -> TrainingDecision:
    seen, status = situation.seen, situation.seen.status
    active = [
        each.name for each in situation.pods if not each.has_ended and not each.metadata.is_leaving
    ]
    had_service = status.volumes and (status.replicas or 0) > 1
    return TrainingDecision(
        status,
        delete_pods=tuple(active),
        delete_secrets=tuple(each.secret_name for each in status.volumes if each.key_from),
        delete_services=(service_name(seen),) if had_service else (),
    )


def _why_it_failed(pod: Pod) -> str:
    for each in pod.status.container_statuses:
        ended = each.state.terminated
        if ended.exit_code:
            shown = ended.message or ended.reason
            return f": {each.name} ended with exit code {ended.exit_code} {shown}"
    return f": {pod.status.reason}" if pod.status.reason else ""


def _with(
    situation: TrainingSituation,
    status: TrainingStatus,
    found: ConditionContent,
    phase: TrainingPhase | None = None,
) -> TrainingStatus:
    """`phase` None means as before."""
    seen = situation.seen
    made = replace(
        status,
        phase=status.phase if phase is None else phase.value,
        observed_generation=seen.generation,
    )
    return with_condition(made, found, seen, situation.now_s)


def _with_event(situation: TrainingSituation, decision: TrainingDecision) -> TrainingDecision:
    before, after = situation.seen.status, decision.status
    changed = [
        each for each in after.conditions if before.condition(each.type).reason != each.reason
    ]
    if before.phase == after.phase and not changed:
        return decision
    reason = changed[-1].reason if changed else ""
    is_bad = after.phase in (TrainingPhase.FAILED, TrainingPhase.REJECTED)
    news = News(
        is_bad=is_bad or reason in ("DatasetFailed", "Restarting"),
        reason=reason or after.phase,
        message=f"{after.phase}: {changed[-1].message if changed else ''}",
    )
    made = event(situation.seen, news, situation.now_s)
    return replace(decision, events=(*decision.events, made))


def hindered(situation: TrainingSituation, reason: str, message: str) -> TrainingStatus:
    """The status while the cluster refuses an object of the job; the operator tries again."""
    return _with(situation, situation.seen.status, ConditionContent(MADE, reason, message))


def unhindered(situation: TrainingSituation, status: TrainingStatus) -> TrainingStatus:
    """Takes the result of `hindered` back: all objects could be made."""
    if status.condition(MADE).status != "False":
        return status
    return _with(
        situation, status, ConditionContent(MADE, "AllMade", "all has been made", holds=True)
    )


def amounts(resources: Json) -> dict[str, Fraction]:
    """Parses the API's quantities (`500m`, `16Gi`); malformed ones become 0."""
    found = {}
    for name, value in resources.items():
        try:
            parsed = parse_quantity(str(value))
        except ValueError:
            parsed = None
        found[name] = Fraction(parsed) if parsed is not None else Fraction()
    return found


def pod_requests(pod: PodSpec) -> dict[str, Fraction]:
    """A limit counts if there is no request. An init container counts if its request is larger than
    the sum over the containers."""
    found: dict[str, Fraction] = {}
    for each in pod.containers:
        for name, amount in _requests(each).items():
            found[name] = found.get(name, Fraction()) + amount
    for each in pod.init_containers:
        for name, amount in _requests(each).items():
            found[name] = max(found.get(name, Fraction()), amount)
    return found


def _requests(container: Container) -> Amounts:
    given = container.resources
    return {**amounts(given.limits), **amounts(given.requests)}


def survey(
    nodes: Sequence[ClusterNode],
    pods: Sequence[Pod],
    datasets: Sequence[DatasetObject],
    own: Collection[str],
) -> tuple[NodeState, ...]:
    """Returns only nodes that can get pods. Their `preemptible_bytes` leave out the job's own
    Datasets, whose UIDs are `own`."""
    requested: dict[str, dict[str, Fraction]] = {}
    for pod in pods:
        if pod.has_ended:
            continue
        sums = requested.setdefault(pod.spec.node_name, {"pods": Fraction()})
        sums["pods"] += 1
        for name, amount in pod_requests(pod.spec).items():
            sums[name] = sums.get(name, Fraction()) + amount
    cached: dict[str, int] = {}
    preemptible: dict[str, int] = {}
    for dataset in datasets:
        held = holding_on_disks(dataset.status)  # chunks in memory take no room on a disk
        for each in dataset.status.nodes or ():
            if not each.keeps:
                continue
            size = int(held.content_bytes * held.shares[each.name])
            cached[each.name] = cached.get(each.name, 0) + size
            if each.state == "Cached" and dataset.uid not in own:
                preemptible[each.name] = preemptible.get(each.name, 0) + size
    found = []
    for node in nodes:
        name, labels = node.metadata.name, node.metadata.labels
        if node.spec.unschedulable or not node.is_ready:
            continue
        found.append(
            NodeState(
                name=name,
                hostname=labels.get("kubernetes.io/hostname", name),
                labels=labels,
                allocatable=amounts(node.status.allocatable),
                requested=requested.get(name, {}),
                cached_bytes=cached.get(name, 0),
                preemptible_bytes=preemptible.get(name, 0),
            )
        )
    return tuple(found)
