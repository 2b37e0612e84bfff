"""Decides the next step for a Dataset. Pure.

`OPERATOR.md` has the phases. `decide` looks only at the object, its Jobs, the pods that read it and
reports of nodes, and remembers nothing: an operator may be killed at any step.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from diesel_fs.errors import (
    BusyError,
    DieselError,
    FormatError,
    MetadataError,
    NoSpaceError,
    NotFoundError,
    ObjectMissing,
    ObjectStoreError,
    ObjectStoreRefused,
    PartialError,
    PermissionDenied,
    UsageError,
    error_by_class_name,
)

from .api_objects import Job, Pod
from .decoding import Json, decode, seconds_of
from .holdings import ReportedHoldings, held_key
from .objects import (
    LABEL_ATTEMPT,
    LABEL_GENERATION,
    LABEL_PURPOSE,
    LABEL_TRAINING,
    PREPARE,
    RECLAIM,
    News,
    event,
    job_name,
    preparation_job,
    reclaim_job,
    volume_name,
)
from .placement import Holding
from .resources import (
    RECLAIM_FINALIZER,
    ConditionContent,
    DatasetObject,
    DatasetPhase,
    DatasetStatus,
    NodeShare,
    Progress,
    with_condition,
)
from .specs import DatasetSpec, Defaults, parse_dataset

BACKOFF_S, BACKOFF_MAX_S = 10.0, 300.0
LOOK_S = 1.0
"""The pause before another look at something that is about to end: its event may be lost."""

SETTLED = (DatasetPhase.READY, DatasetPhase.FAILED)

NODES_MAX = 200  # in one status

_REASONS: tuple[tuple[type[DieselError], str], ...] = (
    (ObjectStoreRefused, "Denied"), (PermissionDenied, "Denied"), (UsageError, "InvalidUsage"),
    (ObjectMissing, "StoreMissing"), (PartialError, "Partial"), (NotFoundError, "NotFound"),
    (BusyError, "Busy"),
    (ObjectStoreError, "StoreUnreachable"), (MetadataError, "MetadataUnreachable"),
    (FormatError, "Corrupt"), (NoSpaceError, "NoSpace"),
)  # fmt: skip
_TEXT_CHARS_MAX = 300

_LASTING = frozenset({"Denied"})
"""After these reasons the operator makes no other attempt, though the error's class allows one."""


@dataclass(frozen=True, slots=True)
class Description:
    entries: int = 0
    files: int = 0
    bytes: int = 0
    version: int = 0
    identity: str = ""


@dataclass(frozen=True, slots=True)
class JobReport:
    """The termination message of a Job's pod, which `prepare.py` writes."""

    dataset: Description | None = None
    error: str = ""
    message: str = ""
    advice: str = ""
    done: bool = False
    """Whether the work is done and there is no dataset to describe, as after a deletion."""
    text: str = ""
    """The end of a termination message that is no report."""


def parse_report(message: str) -> JobReport:
    """A pod may write any text into its termination message."""
    try:
        found = json.loads(message)
    except ValueError:
        return JobReport(text=message[-_TEXT_CHARS_MAX:])
    return decode(JobReport, found)


@dataclass(frozen=True, slots=True)
class JobView:
    name: str
    purpose: str
    generation: int
    attempt: int
    is_leaving: bool
    succeeded: bool
    failed: bool
    reason: str
    finished_s: float
    report: JobReport
    address: str
    waits: str = ""  # why its pod cannot start

    @property
    def runs(self) -> bool:
        """Its pod may still wait."""
        return not (self.succeeded or self.failed)


def view_of_job(job: Job, pods: Sequence[Pod]) -> JobView:
    labels = job.metadata.labels
    ended = {each.type: each for each in job.status.conditions if each.holds}
    report = JobReport()
    address = waits = ""
    for pod in pods:
        if pod.metadata.labels.get("job-name") != job.metadata.name:
            continue
        waits = _why_it_waits(pod) or waits
        state = pod.first_state
        if state.terminated.message:
            report = parse_report(state.terminated.message)
        if state.running is not None:
            address = pod.status.pod_ip
    failed = ended.get("Failed")
    time = (failed.last_transition_time if failed else "") or job.status.completion_time
    return JobView(
        name=job.metadata.name,
        purpose=labels.get(LABEL_PURPOSE, ""),
        generation=_number(labels.get(LABEL_GENERATION, "")),
        attempt=_number(labels.get(LABEL_ATTEMPT, "")),
        is_leaving=job.metadata.is_leaving,
        succeeded="Complete" in ended,
        failed=failed is not None,
        reason=failed.reason if failed else "",
        finished_s=seconds_of(time),
        report=report,
        address=address,
        waits=waits,
    )


def _why_it_waits(pod: Pod) -> str:
    """Returns why a pod cannot be scheduled, or which image or Secret is missing; or ""."""
    for each in pod.status.conditions:
        if each.type == "PodScheduled" and each.status == "False":
            return each.message
    waiting = pod.first_state.waiting
    return f"{waiting.reason}: {waiting.message}" if waiting.message else ""


def _number(label: str) -> int:
    return int(label) if label.isdecimal() else 0


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """`reason` is that of the condition in the status."""

    reason: str
    message: str = ""
    may_pass: bool = False
    """Whether another attempt may succeed although nothing is changed."""
    described: Description | None = None
    """None after a failure or a deletion."""


def outcome_of(job: JobView) -> JobOutcome:
    report = job.report
    if report.dataset not in (None, Description()):
        return JobOutcome("Prepared", described=report.dataset)
    if report.error:
        error = error_by_class_name(report.error, report.message, report.advice)
        found = (reason for kind, reason in _REASONS if isinstance(error, kind))
        reason = next(found, "Failed")
        return JobOutcome(reason, str(error), error.retry and reason not in _LASTING)
    if job.reason == "DeadlineExceeded":
        return JobOutcome("DeadlineExceeded", f"the Job {job.name} took too long")
    if report.done:
        return JobOutcome("Done")
    text = report.text.strip()
    message = f"the pod of the Job {job.name} ended without a report{text and f': {text}'}"
    return JobOutcome("Interrupted", message, may_pass=True)


def backoff_s(attempt: int) -> float:
    """The pause after the failed attempt of this number (from 1)."""
    return float(min(BACKOFF_S * 2 ** min(attempt - 1, 16), BACKOFF_MAX_S))


@dataclass(frozen=True, slots=True)
class DatasetDecision:
    """The controller adds the finalizer, makes objects, makes events, writes the status, deletes
    Jobs and removes the finalizer, in this order."""

    status: DatasetStatus
    add_finalizer: bool = False
    create: tuple[Json, ...] = ()
    events: tuple[Json, ...] = ()
    delete_jobs: tuple[str, ...] = ()
    remove_finalizer: bool = False
    again_s: float | None = None
    """The pause before another turn if no event comes; None: no turn without an event."""


@dataclass(frozen=True, slots=True)
class DatasetSituation:
    seen: DatasetObject
    jobs: tuple[JobView, ...]
    pods: tuple[Pod, ...]
    """The pods that read the dataset, also ended ones."""
    progress: Progress | None
    """None: no preparation runs, or it did not answer."""
    now_s: float
    interval_s: float  # between two looks at work under way
    holdings: ReportedHoldings = field(default_factory=ReportedHoldings)


def decide(situation: DatasetSituation, defaults: Defaults) -> DatasetDecision:
    seen = situation.seen
    if seen.is_deleted:
        return _with_event(situation, _deleting(situation, defaults))
    try:
        spec = parse_dataset(seen, defaults)
    except DieselError as error:
        failed = _finished(situation, DatasetPhase.FAILED, "InvalidSpec", str(error))
        return _with_event(situation, DatasetDecision(failed))
    decision = _preparing(situation, spec, defaults)
    has = RECLAIM_FINALIZER in seen.metadata.finalizers
    decision = replace(
        decision,
        status=_with_nodes(decision.status, situation),
        add_finalizer=spec.reclaims and not has,
        remove_finalizer=has and not spec.reclaims,
    )
    return _with_event(situation, decision)


# Preparation


def _preparing(
    situation: DatasetSituation, spec: DatasetSpec, defaults: Defaults
) -> DatasetDecision:
    seen, status = situation.seen, situation.seen.status
    preparations = [each for each in situation.jobs if each.purpose == PREPARE]
    old = [each for each in preparations if each.generation != seen.generation]
    delete = _not_leaving(old)
    is_observed = status.observed_generation == seen.generation
    if is_observed and status.phase in SETTLED:
        return DatasetDecision(status, delete_jobs=delete)
    if old:  # they must be gone first: two Jobs would put at once
        message = "the preparation of the former specification is being stopped"
        made = _in_phase(situation, DatasetPhase.PREPARING, "Replacing", message)
        # The new generation counts as observed when no old Job is left
        made = replace(made, attempt=0, observed_generation=status.observed_generation)
        return DatasetDecision(made, delete_jobs=delete, again_s=LOOK_S)
    if not preparations:
        attempt = max(1, status.attempt or 0) if is_observed else 1
        return _attempt(situation, spec, attempt, defaults)
    latest = max(preparations, key=lambda each: each.attempt)
    if latest.is_leaving:
        made = _in_phase(situation, DatasetPhase.PREPARING, "Interrupted", "the Job was deleted")
        return DatasetDecision(made, again_s=LOOK_S)
    if latest.runs:
        message = f"the Job {latest.name} {f'waits: {latest.waits}' if latest.waits else 'runs'}"
        made = _in_phase(situation, DatasetPhase.PREPARING, "Running", message)
        progress = situation.progress or made.progress
        made = replace(made, attempt=latest.attempt, progress=progress)
        return DatasetDecision(made, again_s=situation.interval_s)
    return _after_attempt(situation, spec, defaults, latest)


def _attempt(
    situation: DatasetSituation, spec: DatasetSpec, attempt: int, defaults: Defaults
) -> DatasetDecision:
    message = f"the Job {job_name(situation.seen, PREPARE, attempt)} runs"
    made = _in_phase(situation, DatasetPhase.PREPARING, "Running", message)
    job = preparation_job(situation.seen, spec, attempt, defaults)
    return DatasetDecision(
        replace(made, attempt=attempt), create=(job,), again_s=situation.interval_s
    )


def _after_attempt(
    situation: DatasetSituation, spec: DatasetSpec, defaults: Defaults, latest: JobView
) -> DatasetDecision:
    ended = outcome_of(latest)
    if found := ended.described:
        message = f"version {found.version} has {found.files} files"
        made = _finished(situation, DatasetPhase.READY, "Prepared", message)
        key = held_key(situation.seen.namespace, found.identity)
        return DatasetDecision(
            replace(
                made,
                attempt=latest.attempt,
                entries=found.entries,
                files=found.files,
                bytes=found.bytes,
                version=found.version,
                identity=str(key[1]) if key else "",
            )
        )
    if not ended.may_pass or latest.attempt > spec.preparation.retries:
        made = _finished(situation, DatasetPhase.FAILED, ended.reason, ended.message)
        return DatasetDecision(replace(made, attempt=latest.attempt))
    due_s = latest.finished_s + backoff_s(latest.attempt)
    if situation.now_s >= due_s:
        return _attempt(situation, spec, latest.attempt + 1, defaults)
    message = f"attempt {latest.attempt} failed, and is made again: {ended.message}"
    made = _in_phase(situation, DatasetPhase.PREPARING, ended.reason, message)
    return DatasetDecision(replace(made, attempt=latest.attempt), again_s=due_s - situation.now_s)


# Deletion


def _deleting(situation: DatasetSituation, defaults: Defaults) -> DatasetDecision:
    """Without our finalizer, nothing is left to do: the cluster deletes the object."""
    seen = situation.seen
    if RECLAIM_FINALIZER not in seen.metadata.finalizers:
        return DatasetDecision(seen.status)
    reclaims = [each for each in situation.jobs if each.purpose == RECLAIM]
    let_go = DatasetDecision(seen.status, delete_jobs=_not_leaving(reclaims), remove_finalizer=True)
    try:
        spec = parse_dataset(seen, defaults)
    except DieselError:  # a Dataset with this spec was never prepared
        return let_go
    if not spec.reclaims:
        return let_go
    readers = sorted(each.name for each in situation.pods if not each.has_ended)
    if readers:
        message = f"pods read it: {', '.join(readers[:5])}"
        made = _in_phase(situation, DatasetPhase.DELETING, "InUse", message)
        return DatasetDecision(made, again_s=situation.interval_s)
    preparations = [each for each in situation.jobs if each.purpose == PREPARE]
    if preparations:
        made = _in_phase(
            situation, DatasetPhase.DELETING, "Stopping", "the preparation is being stopped"
        )
        return DatasetDecision(made, delete_jobs=_not_leaving(preparations), again_s=LOOK_S)
    latest = max(reclaims, key=lambda each: each.attempt, default=None)
    message, attempt, again_s = "the data are being deleted", 1, situation.interval_s
    create: tuple[Json, ...] = ()
    if latest is None:
        create = (reclaim_job(seen, spec, attempt, defaults),)
    elif not latest.runs:
        ended = outcome_of(latest)
        # If no preparation has ever ended well, there may not even be a repository
        never_ready = not seen.status.version
        is_nothing = ended.reason == "NotFound" or (never_ready and ended.reason == "StoreMissing")
        if latest.succeeded or is_nothing:
            return let_go
        message, attempt = f"{ended.reason}: {ended.message}", latest.attempt + 1
        again_s = latest.finished_s + backoff_s(latest.attempt) - situation.now_s
        if again_s <= 0:
            create = (reclaim_job(seen, spec, attempt, defaults),)
            again_s = situation.interval_s
    made = _in_phase(situation, DatasetPhase.DELETING, "Reclaiming", message)
    old = tuple(each.name for each in reclaims if latest and each.attempt < latest.attempt)
    return DatasetDecision(made, create=create, delete_jobs=old, again_s=again_s)


def _not_leaving(jobs: Sequence[JobView]) -> tuple[str, ...]:
    return tuple(each.name for each in jobs if not each.is_leaving)


# The status


def _in_phase(
    situation: DatasetSituation, phase: DatasetPhase, reason: str, message: str
) -> DatasetStatus:
    seen = situation.seen
    made = replace(seen.status, phase=phase.value, observed_generation=seen.generation)
    found = ConditionContent("Ready", reason, message, holds=phase is DatasetPhase.READY)
    return with_condition(made, found, seen, situation.now_s)


def _finished(
    situation: DatasetSituation, phase: DatasetPhase, reason: str, message: str
) -> DatasetStatus:
    return replace(_in_phase(situation, phase, reason, message), progress=None)


def _with_event(situation: DatasetSituation, decision: DatasetDecision) -> DatasetDecision:
    before, after = situation.seen.status, decision.status
    old, new = before.condition("Ready"), after.condition("Ready")
    if before.phase == after.phase and old.reason == new.reason:
        return decision
    bad_reasons = (*(reason for _, reason in _REASONS), "Interrupted")
    news = News(
        is_bad=after.phase == DatasetPhase.FAILED or new.reason in bad_reasons,
        reason=new.reason,
        message=f"{after.phase}: {new.message}",
    )
    made = event(situation.seen, news, situation.now_s)
    return replace(decision, events=(*decision.events, made))


# The nodes that have blocks


def _with_nodes(status: DatasetStatus, situation: DatasetSituation) -> DatasetStatus:
    """Adds the nodes that have blocks of the dataset (parts in a cache: `OPERATOR.md`), with
    measured shares, or else estimated ones."""
    made = _expected_nodes(status, situation)
    if key := held_key(situation.seen.namespace, status.identity):
        for name in made.keys() | situation.holdings.nodes(key):
            held = situation.holdings.find(name, key, status.version or 0)
            if held is None:
                continue
            expected = made.pop(name, NodeShare())
            is_active = held.is_used or expected.state == "Active"
            if is_active or held.share:
                made[name] = NodeShare(
                    name,
                    "Active" if is_active else "Cached",
                    held.share,
                    keeps=bool(held.disk) or (is_active and expected.keeps),
                    disk_share=held.disk,
                    measured=True,
                )
    nodes = tuple(made[name] for name in sorted(made))
    if not nodes and status.nodes is None:
        return status
    return replace(status, nodes=nodes[:NODES_MAX])


def _expected_nodes(status: DatasetStatus, situation: DatasetSituation) -> dict[str, NodeShare]:
    groups: dict[str, set[str]] = {}
    shared: set[str] = set()
    kept: set[str] = set()
    active: set[str] = set()
    for pod in situation.pods:
        node = pod.spec.node_name
        if not node:
            continue
        attributes = _attributes(pod, situation.seen.name)
        if not pod.has_ended:
            group = pod.metadata.labels.get(LABEL_TRAINING, "")
            groups.setdefault(group, set()).add(node)
            active.add(node)
            if "task" in attributes:
                shared.add(group)
        if "cacheDir" in attributes:
            kept.add(node)
    shares: dict[str, int] = {}
    for group, nodes in groups.items():
        share = 100 // len(nodes) if group in shared else 100
        for node in nodes:
            shares[node] = max(share, shares.get(node, 0))
    made = {node: NodeShare(node, "Active", shares[node], keeps=node in kept) for node in active}
    for each in status.nodes or ():
        if each.name not in active and (each.keeps or each.name in kept):
            made[each.name] = NodeShare(each.name, "Cached", each.share_on_disk, keeps=True)
    return made


def _attributes(pod: Pod, dataset: str) -> Mapping[str, str]:
    found = (each for each in pod.spec.volumes if each.name == volume_name(dataset))
    return next((each.csi.volume_attributes for each in found), {})


def holding_of(status: DatasetStatus) -> Holding:
    """The shares of a dataset that nodes have in memory or on a disk."""
    shares = {each.name: Fraction(each.share, 100) for each in status.nodes or ()}
    return Holding(status.bytes or 0, shares)


def holding_on_disks(status: DatasetStatus) -> Holding:
    """The shares that stay on nodes' disks when no pod reads the dataset."""
    shares = {
        each.name: Fraction(each.share_on_disk, 100) for each in status.nodes or () if each.keeps
    }
    return Holding(status.bytes or 0, shares)
