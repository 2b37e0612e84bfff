"""Decides what to do next for a Dataset, from what the cluster has of it. Pure.

`OPERATOR.md` has the phases. Every decision is made anew from the object, its Jobs and the pods
that read it; so it does not matter at which step an operator before was killed.
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

from .fields import Json, at, fields, items, seconds_of, text, texts, whole
from .holdings import NodeHoldings, held_key
from .objects import (
    LABEL_ATTEMPT,
    LABEL_GENERATION,
    LABEL_PURPOSE,
    LABEL_TRAINING,
    PREPARE,
    RECLAIM,
    event,
    preparation_job,
    reclaim_job,
    volume_name,
)
from .placement import Holding
from .resources import (
    RECLAIM_FINALIZER,
    DatasetPhase,
    DatasetSpec,
    Defaults,
    Object,
    condition_of,
    parse_dataset,
    with_condition,
)

BACKOFF_S, BACKOFF_MAX_S = 10.0, 300.0
LOOK_S = 1.0
"""How soon something is looked at again that is about to end, beside the event of its end."""

SETTLED = (DatasetPhase.READY, DatasetPhase.FAILED)
"""Phases in which nothing is left to do until the spec changes."""

NODES_MAX = 200
"""How many nodes a status names at most."""

_REASONS: tuple[tuple[type[DieselError], str], ...] = (
    (ObjectStoreRefused, "Denied"), (PermissionDenied, "Denied"), (UsageError, "InvalidUsage"),
    (ObjectMissing, "StoreMissing"), (PartialError, "Partial"), (NotFoundError, "NotFound"),
    (BusyError, "Busy"),
    (ObjectStoreError, "StoreUnreachable"), (MetadataError, "MetadataUnreachable"),
    (FormatError, "Corrupt"), (NoSpaceError, "NoSpace"),
)  # fmt: skip
_SAID_CHARS_MAX = 300

_LASTING = frozenset({"Denied"})
"""Reasons that last, though the class of the error says that it may be tried again."""


@dataclass(frozen=True, slots=True)
class JobView:
    """A Job of a Dataset, and what its pod has reported."""

    name: str
    purpose: str
    generation: int
    attempt: int
    is_leaving: bool
    succeeded: bool
    failed: bool
    reason: str
    """Of the condition by which it failed."""
    finished_s: float
    report: Json
    """What the pod said at its end; empty: nothing."""
    address: str
    """Of the running pod; empty: it does not run."""
    waits: str = ""
    """Why its pod does not run yet, if that is known."""

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return not (self.succeeded or self.failed)


def view_of_job(job: Json, pods: Sequence[Json]) -> JobView:
    """What a Job and its pods say."""
    labels = texts(job, "metadata", "labels")
    ended = {
        text(each, "type"): fields(each)
        for each in items(job, "status", "conditions")
        if at(each, "status") == "True"
    }
    own = [each for each in pods if texts(each, "metadata", "labels").get("job-name")
           == text(job, "metadata", "name")]  # fmt: skip
    report: Json = {}
    address = waits = ""
    for pod in own:
        waits = _waiting(pod) or waits
        state = fields(pod, "status", "containerStatuses", 0, "state")
        report = parse_report(text(state, "terminated", "message")) or report
        if "running" in state:
            address = text(pod, "status", "podIP")
    failed = ended.get("Failed", {})
    time = text(failed, "lastTransitionTime") or text(job, "status", "completionTime")
    return JobView(
        name=text(job, "metadata", "name"),
        purpose=labels.get(LABEL_PURPOSE, ""),
        generation=_number(labels.get(LABEL_GENERATION, "")),
        attempt=_number(labels.get(LABEL_ATTEMPT, "")),
        is_leaving=bool(text(job, "metadata", "deletionTimestamp")),
        succeeded="Complete" in ended,
        failed="Failed" in ended,
        reason=text(failed, "reason"),
        finished_s=seconds_of(time),
        report=report,
        address=address,
        waits=waits,
    )


def _waiting(pod: Json) -> str:
    """Why a pod does not run: it cannot be scheduled, or an image or a Secret is missing."""
    for each in items(pod, "status", "conditions"):
        if at(each, "type") == "PodScheduled" and at(each, "status") == "False":
            return text(each, "message")
    waiting = fields(pod, "status", "containerStatuses", 0, "state", "waiting")
    if text(waiting, "message"):
        return f"{text(waiting, 'reason')}: {text(waiting, 'message')}"
    return ""


def _number(label: str) -> int:
    return int(label) if label.isdecimal() else 0


def parse_report(message: str) -> Json:
    """The report in a termination message; empty for none. Pods write it, so it may be anything."""
    try:
        found = json.loads(message)
    except ValueError:
        return {"said": message[-_SAID_CHARS_MAX:]} if message else {}
    return fields(found)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a Job ended."""

    reason: str
    message: str
    may_pass: bool
    """Whether it may succeed later although nobody changes anything."""
    described: Json
    """What was said of the dataset, if it is there."""


def outcome_of(job: JobView) -> Outcome:
    """How a Job that has ended ended."""
    if described := fields(job.report, "dataset"):
        return Outcome("Prepared", "", False, described)
    if name := text(job.report, "error"):
        advice = text(job.report, "advice")
        error = error_by_class_name(name, text(job.report, "message"), advice)
        found = (reason for kind, reason in _REASONS if isinstance(error, kind))
        reason = next(found, "Failed")
        return Outcome(reason, str(error), error.retry and reason not in _LASTING, {})
    if job.reason == "DeadlineExceeded":
        return Outcome("DeadlineExceeded", f"the Job {job.name} took too long", False, {})
    if at(job.report, "done") is True:
        return Outcome("Done", "", False, {})
    said = text(job.report, "said").strip()
    message = f"the pod of the Job {job.name} ended without a report{said and f': {said}'}"
    return Outcome("Interrupted", message, True, {})


def backoff_s(attempt: int) -> float:
    """How long after the end of an attempt the next one is made."""
    return float(min(BACKOFF_S * 2 ** min(attempt - 1, 16), BACKOFF_MAX_S))


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done, in this order: the finalizer is added, objects are made, events are told,
    the status is written, Jobs are deleted, the finalizer is removed."""

    status: Json
    add_finalizer: bool = False
    create: tuple[Json, ...] = ()
    events: tuple[Json, ...] = ()
    delete_jobs: tuple[str, ...] = ()
    remove_finalizer: bool = False
    again_s: float | None = None
    """In how many seconds to look again, if nothing happens."""


@dataclass(frozen=True, slots=True)
class Situation:
    """A Dataset, and what the cluster has of it."""

    seen: Object
    jobs: tuple[JobView, ...]
    pods: tuple[Json, ...]
    """The pods of its namespace that read it, ended ones too."""
    progress: Json
    """What the running preparation told about itself; empty: nothing."""
    now_s: float
    interval_s: float
    holdings: NodeHoldings = field(default_factory=NodeHoldings)
    """What nodes report that they hold."""


def decide(situation: Situation, defaults: Defaults) -> Decision:
    """The next step for a Dataset."""
    seen = situation.seen
    if seen.is_deleted:
        return _deleting(situation, defaults)
    try:
        spec = parse_dataset(seen, defaults)
    except DieselError as error:
        return _told(situation, _settled(situation, DatasetPhase.FAILED, "InvalidSpec", str(error)))
    decision = _preparing(situation, spec, defaults)
    has = RECLAIM_FINALIZER in seen.finalizers
    decision = replace(
        decision,
        status=_with_nodes(decision.status, situation),
        add_finalizer=spec.reclaims and not has,
        remove_finalizer=has and not spec.reclaims,
    )
    return _told(situation, decision)


def _preparing(situation: Situation, spec: DatasetSpec, defaults: Defaults) -> Decision:
    seen, status = situation.seen, situation.seen.status
    preparations = [each for each in situation.jobs if each.purpose == PREPARE]
    old = [each for each in preparations if each.generation != seen.generation]
    delete = tuple(each.name for each in old if not each.is_leaving)
    is_observed = whole(status, "observedGeneration") == seen.generation
    phase = text(status, "phase")
    if is_observed and phase in SETTLED:
        return Decision(status, delete_jobs=delete)
    if old:  # all of them must be gone: two would put at once
        message = "the preparation of the former specification is ended"
        made = _in_phase(situation, DatasetPhase.PREPARING, "Replacing", message)
        # The new generation counts as observed when no old Job is left to be looked for
        made |= {"attempt": 0, "observedGeneration": whole(status, "observedGeneration")}
        return Decision(made, delete_jobs=delete, again_s=LOOK_S)
    current = [each for each in preparations if each.generation == seen.generation]
    if not current:
        attempt = max(1, whole(status, "attempt")) if is_observed else 1
        return _attempt(situation, spec, attempt, defaults, delete)
    latest = max(current, key=lambda each: each.attempt)
    if latest.is_leaving:
        made = _in_phase(situation, DatasetPhase.PREPARING, "Interrupted", "the Job was deleted")
        return Decision(made, delete_jobs=delete, again_s=LOOK_S)
    if latest.runs:
        message = f"the Job {latest.name} {f'waits: {latest.waits}' if latest.waits else 'runs'}"
        made = _in_phase(situation, DatasetPhase.PREPARING, "Running", message)
        made |= {"attempt": latest.attempt}
        if situation.progress:
            made["progress"] = situation.progress
        return Decision(made, delete_jobs=delete, again_s=situation.interval_s)
    ended = outcome_of(latest)
    if ended.described:
        made = _in_phase(situation, DatasetPhase.READY, "Prepared", _described(ended.described))
        counts = {
            name: whole(ended.described, name) for name in ("entries", "files", "bytes", "version")
        }
        made |= {**counts, "attempt": latest.attempt}
        if key := held_key(seen.namespace, ended.described):
            made["identity"] = str(key[1])
        else:
            made.pop("identity", None)
        made.pop("progress", None)
        return Decision(made, delete_jobs=delete)
    if not ended.may_pass or latest.attempt > spec.retries:
        decision = _settled(situation, DatasetPhase.FAILED, ended.reason, ended.message)
        made = {**decision.status, "attempt": latest.attempt}
        made.pop("progress", None)
        return replace(decision, status=made, delete_jobs=delete)
    due_s = latest.finished_s + backoff_s(latest.attempt)
    if situation.now_s >= due_s:
        return _attempt(situation, spec, latest.attempt + 1, defaults, delete)
    message = f"attempt {latest.attempt} failed, and is made again: {ended.message}"
    made = _in_phase(situation, DatasetPhase.PREPARING, ended.reason, message)
    made |= {"attempt": latest.attempt}
    return Decision(made, delete_jobs=delete, again_s=due_s - situation.now_s)


def _described(found: Json) -> str:
    return f"version {whole(found, 'version')} has {whole(found, 'files')} files"


def _attempt(
    situation: Situation,
    spec: DatasetSpec,
    attempt: int,
    defaults: Defaults,
    delete: tuple[str, ...],
) -> Decision:
    job = preparation_job(situation.seen, spec, attempt, defaults)
    message = f"the Job {text(job, 'metadata', 'name')} runs"
    made = _in_phase(situation, DatasetPhase.PREPARING, "Running", message)
    made |= {"attempt": attempt}
    return Decision(made, create=(job,), delete_jobs=delete, again_s=situation.interval_s)


def _deleting(situation: Situation, defaults: Defaults) -> Decision:
    """What is left to do for a Dataset that is deleted. Without our finalizer, the cluster does all
    of it."""
    seen = situation.seen
    if RECLAIM_FINALIZER not in seen.finalizers:
        return Decision(seen.status)
    reclaims = [each for each in situation.jobs if each.purpose == RECLAIM]
    names = tuple(each.name for each in reclaims if not each.is_leaving)
    try:
        spec = parse_dataset(seen, defaults)
    except DieselError:  # it was never prepared as it stands there now
        return Decision(seen.status, delete_jobs=names, remove_finalizer=True)
    if not spec.reclaims:
        return Decision(seen.status, delete_jobs=names, remove_finalizer=True)
    readers = [text(each, "metadata", "name") for each in situation.pods if _is_active(each)]
    preparations = [each for each in situation.jobs if each.purpose == PREPARE]
    if readers:
        message = f"pods read it: {', '.join(sorted(readers)[:5])}"
        made = _in_phase(situation, DatasetPhase.DELETING, "InUse", message)
        return _told(situation, Decision(made, again_s=situation.interval_s))
    if preparations:
        made = _in_phase(situation, DatasetPhase.DELETING, "Stopping", "the preparation is ended")
        delete = tuple(each.name for each in preparations if not each.is_leaving)
        return _told(situation, Decision(made, delete_jobs=delete, again_s=LOOK_S))
    latest = max(reclaims, key=lambda each: each.attempt, default=None)
    message, attempt, again_s = "the data are being deleted", 1, situation.interval_s
    create: tuple[Json, ...] = ()
    if latest is None:
        create = (reclaim_job(seen, spec, attempt, defaults),)
    elif not latest.runs:
        ended = outcome_of(latest)
        # Where no preparation has ended well, there may not even be a repository
        never_ready = not whole(seen.status, "version")
        is_nothing = ended.reason == "NotFound" or (never_ready and ended.reason == "StoreMissing")
        if latest.succeeded or is_nothing:
            return Decision(seen.status, delete_jobs=names, remove_finalizer=True)
        message, attempt = f"{ended.reason}: {ended.message}", latest.attempt + 1
        again_s = latest.finished_s + backoff_s(latest.attempt) - situation.now_s
        if again_s <= 0:
            create = (reclaim_job(seen, spec, attempt, defaults),)
            again_s = situation.interval_s
    made = _in_phase(situation, DatasetPhase.DELETING, "Reclaiming", message)
    old = tuple(each.name for each in reclaims if latest and each.attempt < latest.attempt)
    return _told(situation, Decision(made, create=create, delete_jobs=old, again_s=again_s))


def _in_phase(situation: Situation, phase: DatasetPhase, reason: str, message: str) -> Json:
    """The status with a phase and the reason of its condition."""
    seen = situation.seen
    made = {**seen.status, "phase": phase.value, "observedGeneration": seen.generation}
    holds = phase is DatasetPhase.READY
    return with_condition(made, "Ready", holds, reason, message, seen, situation.now_s)


def _settled(situation: Situation, phase: DatasetPhase, reason: str, message: str) -> Decision:
    return Decision(_in_phase(situation, phase, reason, message))


def _told(situation: Situation, decision: Decision) -> Decision:
    """A decision with an event, where phase or reason change."""
    before, after = situation.seen.status, decision.status
    old, new = condition_of(before, "Ready"), condition_of(after, "Ready")
    if before.get("phase") == after.get("phase") and old.get("reason") == new.get("reason"):
        return decision
    is_bad = after.get("phase") == DatasetPhase.FAILED or new.get("reason") in (
        *(reason for _, reason in _REASONS), "Interrupted"
    )  # fmt: skip
    made = event(
        situation.seen,
        "Warning" if is_bad else "Normal",
        text(new, "reason"),
        f"{after.get('phase')}: {text(new, 'message')}",
        situation.now_s,
    )
    return replace(decision, events=(*decision.events, made))


def _is_active(pod: Json) -> bool:
    return text(pod, "status", "phase") not in ("Succeeded", "Failed")


def _with_nodes(status: Json, situation: Situation) -> Json:
    """The status with the nodes that have blocks of the dataset (`OPERATOR.md`): as they were
    measured where that is so, else as the pods let expect."""
    made = _expected_nodes(status, situation)
    if key := held_key(situation.seen.namespace, status):
        for name in made.keys() | situation.holdings.nodes(key):
            held = situation.holdings.find(name, key, whole(status, "version"))
            if held is None:
                continue
            expected = made.pop(name, {})
            is_active = held.is_used or at(expected, "state") == "Active"
            if is_active or held.share:
                made[name] = {
                    "name": name,
                    "state": "Active" if is_active else "Cached",
                    "share": held.share,
                    "keeps": bool(held.disk) or (is_active and at(expected, "keeps") is True),
                    "diskShare": held.disk,
                    "measured": True,
                }
    nodes = [made[name] for name in sorted(made)]
    return {**status, "nodes": nodes[:NODES_MAX]} if nodes or "nodes" in status else status


def _expected_nodes(status: Json, situation: Situation) -> dict[str, Json]:
    """The nodes that should have blocks, by name, judged by where pods run and have run."""
    groups: dict[str, set[str]] = {}
    shared: set[str] = set()
    kept: set[str] = set()
    active: set[str] = set()
    for pod in situation.pods:
        node = text(pod, "spec", "nodeName")
        if not node:
            continue
        attributes = _attributes(pod, situation.seen.name)
        if _is_active(pod):
            group = texts(pod, "metadata", "labels").get(LABEL_TRAINING, "")
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
    made: dict[str, Json] = {}
    for node in active:
        state: Json = {"name": node, "state": "Active", "share": shares[node]}
        made[node] = {**state, "keeps": node in kept, "measured": False}
    for each in items(status, "nodes"):
        name = text(each, "name")
        if name not in active and (at(each, "keeps") is True or name in kept):
            share = whole(each, "diskShare", default=whole(each, "share"))
            state = {"name": name, "state": "Cached", "share": share}
            made[name] = {**state, "keeps": True, "measured": False}
    return made


def _attributes(pod: Json, dataset: str) -> dict[str, str]:
    """The attributes of the volume of a Dataset in a pod."""
    for volume in items(pod, "spec", "volumes"):
        if text(volume, "name") == volume_name(dataset):
            return texts(volume, "csi", "volumeAttributes")
    return {}


def holding_of(status: Mapping[str, object], *, on_disk: bool = False) -> Holding:
    """The dataset of a status, and the shares of nodes; of those on disks, or all."""
    shares = {
        text(each, "name"): Fraction(_share(each, on_disk=on_disk), 100)
        for each in items(dict(status), "nodes")
        if not on_disk or at(each, "keeps") is True
    }
    return Holding(whole(dict(status), "bytes"), shares)


def _share(node: object, *, on_disk: bool) -> int:
    """The share of a node of a status; that on its disk is told apart where it was measured."""
    share = whole(node, "share")
    return whole(node, "diskShare", default=share) if on_disk else share
