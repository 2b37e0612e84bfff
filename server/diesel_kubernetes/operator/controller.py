"""The reconciler: it reads a Dataset or TrainingJob, and does the next step for it.

`datasets.py` and `training.py` decide the step, `cluster.py` reads and writes. A step is safe to do
twice, and the controller keeps no state of objects, so it may be killed between any two writes. All
tasks run in one asyncio loop:

- Workers of the queue (`queue.py`) call `handle(key)`: a *turn* of the object. The queue never
  gives one key to two workers, so no two steps of one object interleave. Steps of different objects
  interleave at each call of the cluster.
- One task calls `refresh_holdings` at intervals. It reads the reports of all nodes and replaces
  `_reports` and `_holdings` without a wait in between; a step that began before keeps the old
  index. Then it wakes the Datasets of which a node now holds more or less.
- The watch (`handlers.py`) calls `note_pod`, which never waits.

If somebody else, a user or a second operator, changes an object between a read and a write, the API
server refuses the write (409), and `handle` plans another turn.

Only hints are kept between turns: names of pods (`KnownPods`), the reports, and the nodes of each
Dataset (`_known_datasets`). They save list requests to the API server. A wrong hint costs such a
request, or a turn, and never decides anything.
"""

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http import HTTPStatus

import httpx2
from lightkube import ApiError

from diesel_fs.errors import FormatError

from ..names import LABEL_NODE
from ..reports import Held, NodeReport, parse_config_map
from . import datasets, training
from .api_objects import AnyObject, ClusterNode, Job, Metadata, Pod, Secret
from .cluster import Cluster, ConfigMaps, Datasets, Jobs, Pods, Secrets, Services, TrainingJobs
from .decoding import Json, decode, encode, seconds_of
from .holdings import ReportedHoldings, held_key
from .objects import (
    LABEL_DATASET,
    LABEL_PURPOSE,
    LABEL_TRAINING,
    PREPARE,
    PROGRESS_PORT,
    RECLAIM,
    USES,
    job_name,
    key_secret,
)
from .placement import NodeState
from .queue import Key
from .resources import (
    RECLAIM_FINALIZER,
    DatasetObject,
    Object,
    PlannedVolume,
    Progress,
    TrainingObject,
    decode_dataset,
    decode_training,
)
from .specs import Defaults

log = logging.getLogger("diesel.operator")

DATASETS, TRAINING_JOBS = "datasets", "trainingjobs"

PROGRESS_S = 2.0
PROGRESS_BYTES_MAX = 4096

CONFLICT_S = 0.1

YOUNG_S = 5.0
"""The pods of younger Jobs get no requests for the progress."""


class Hindered(Exception):
    """An object of a TrainingJob cannot be made now; the queue tries again. `reason` is that of the
    condition in the status."""

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


class KnownPods:
    """Names of pods that the watch has seen. The watch may be behind, and there are no names at
    first."""

    def __init__(self) -> None:
        self._by_job: dict[tuple[str, str], set[str]] = {}
        self._by_dataset: dict[tuple[str, str], set[str]] = {}

    def note(self, pod: Metadata, *, is_gone: bool) -> None:
        namespace, name, labels = pod.namespace, pod.name, pod.labels
        if job := labels.get("job-name"):
            _keep(self._by_job, (namespace, job), name, is_gone=is_gone)
        for label in labels:
            if label.startswith(USES):
                key = namespace, label.removeprefix(USES)
                _keep(self._by_dataset, key, name, is_gone=is_gone)

    def pods(self, namespace: str, job: str) -> set[str]:
        return self._by_job.get((namespace, job), set())

    def readers(self, namespace: str, dataset: str) -> set[str]:
        return self._by_dataset.get((namespace, dataset), set())


def _keep(
    index: dict[tuple[str, str], set[str]], key: tuple[str, str], name: str, *, is_gone: bool
) -> None:
    names = index.setdefault(key, set())
    if is_gone:
        names.discard(name)
    else:
        names.add(name)
    if not names:
        del index[key]


class Reconciler:
    """`handle` may run for many keys at once."""

    def __init__(
        self,
        cluster: Cluster,
        defaults: Defaults,
        *,
        interval_s: float = 10.0,
        driver_namespace: str = "",
        wake: Callable[[Key], None] = lambda _: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`driver_namespace` has the reports of nodes; "" means that there are none. `interval_s`
        is the pause between two looks at work that makes progress, `clock` returns seconds since
        1970."""
        self._cluster = cluster
        self._defaults = defaults
        self._interval_s = interval_s
        self._driver_namespace = driver_namespace
        self._clock = clock
        self.wake = wake
        self._known = KnownPods()
        self._reports: list[NodeReport] = []
        self._holdings = ReportedHoldings()
        self._known_datasets: dict[Key, tuple[Held, frozenset[str]]] = {}
        self._wrong_reports: set[str] = set()
        self._is_blind = False  # the last reading of the reports failed
        self._http: httpx2.AsyncClient | None = None  # made when needed: that takes 0.1 s

    def note_pod(self, raw: Json, *, is_gone: bool) -> None:
        """Remembers a pod that the watch has seen, so that no list request is needed for it."""
        self._known.note(decode(Metadata, raw.get("metadata")), is_gone=is_gone)

    async def close(self) -> None:
        if self._http is not None:
            await self._http.aclose()

    async def handle(self, key: Key) -> float | None:
        """Returns the seconds until the object's next turn; None: no turn is planned. Raises
        Hindered, ApiError: the queue tries again later."""
        handle = self._dataset if key.plural == DATASETS else self._training_job
        try:
            return await handle(key)
        except ApiError as error:
            if error.status.code == HTTPStatus.CONFLICT:
                return CONFLICT_S
            raise

    # What nodes hold

    async def refresh_holdings(self) -> None:
        """Wakes the Datasets with changed shares. If the reports cannot be read, the earlier ones
        are used until they are too old."""
        if not self._driver_namespace:
            return
        try:
            found = await self._cluster.find(ConfigMaps, self._driver_namespace, {LABEL_NODE: None})
        except (ApiError, httpx2.HTTPError) as error:
            if not self._is_blind:
                log.warning("shares of nodes are estimates: cannot read their reports: %s", error)
            self._is_blind = True
        else:
            self._is_blind = False
            self._reports = self._parsed(found)
        before, self._holdings = self._holdings, ReportedHoldings(self._reports, self._clock())
        datasets_changed, nodes_changed = self._holdings.changed_since(before)
        for key, (held, nodes) in list(self._known_datasets.items()):
            if held in datasets_changed or not nodes_changed.isdisjoint(nodes):
                self.wake(key)

    def _parsed(self, found: list[Json]) -> list[NodeReport]:
        reports, wrong = [], set()
        for raw in found:
            try:
                reports.append(parse_config_map(raw))
            except FormatError as error:
                name = decode(AnyObject, raw).metadata.name
                wrong.add(name)
                if name not in self._wrong_reports:
                    log.warning("a report of a node is not used: %s", error.message)
        self._wrong_reports = wrong
        return reports

    def _note_dataset(self, key: Key, seen: DatasetObject | None) -> None:
        held = held_key(key.namespace, seen.status.identity) if seen else None
        if seen is None or held is None:
            self._known_datasets.pop(key, None)
        else:
            nodes = frozenset(each.name for each in seen.status.nodes or ())
            self._known_datasets[key] = held, nodes

    # Datasets

    async def _get_dataset(self, namespace: str, name: str) -> DatasetObject | None:
        raw = await self._cluster.get(Datasets, namespace, name)
        return None if raw is None else decode_dataset(raw)

    async def _dataset(self, key: Key) -> float | None:
        seen = await self._get_dataset(key.namespace, key.name)
        self._note_dataset(key, seen)
        if seen is None:
            return None
        decision = datasets.decide(await self._situation(seen), self._defaults)
        raw = seen.raw
        finalizers = list(seen.metadata.finalizers)
        if decision.add_finalizer:
            made = await self._cluster.set_finalizers(
                Datasets, raw, [*finalizers, RECLAIM_FINALIZER]
            )
            if made is None:
                return None
            raw = made
        for job in decision.create:
            await self._cluster.create(job)
        for event in decision.events:
            await self._cluster.create(event)
        if decision.status != seen.status:
            await self._cluster.write_status(Datasets, raw, encode(decision.status))
            raw = await self._cluster.get(Datasets, key.namespace, key.name) or raw
            if decision.status.phase != seen.status.phase:
                await self._wake_readers(seen)
        for name in decision.delete_jobs:
            await self._cluster.delete(Jobs, key.namespace, name)
        if decision.remove_finalizer:
            finalizers.remove(RECLAIM_FINALIZER)
            await self._cluster.set_finalizers(Datasets, raw, finalizers)
        return decision.again_s

    async def _situation(self, seen: DatasetObject) -> datasets.DatasetSituation:
        """Reads all that `datasets.decide` needs, by known names where possible: a list request
        makes the API server look through all objects of a namespace, so the time would grow with
        the square of the number of Datasets."""
        own = await self._jobs(seen)
        pods: list[Pod] = []
        for job in filter(self._may_report, own):
            pods += await self._pods_of(seen.namespace, job.metadata.name)
        readers: list[Json] = []
        is_read = self._known.readers(seen.namespace, seen.name) or seen.status.nodes
        if seen.is_deleted or is_read:
            uses = {f"{USES}{seen.name}": None}
            readers = await self._cluster.find(Pods, seen.namespace, uses)
        jobs = tuple(datasets.view_of_job(each, pods) for each in own)
        return datasets.DatasetSituation(
            seen=seen,
            jobs=jobs,
            pods=tuple(decode(Pod, each) for each in readers),
            progress=await self._progress(jobs),
            now_s=self._clock(),
            interval_s=self._interval_s,
            holdings=self._holdings,
        )

    async def _pods_of(self, namespace: str, job: str) -> list[Pod]:
        names = self._known.pods(namespace, job)
        if not names:
            found = await self._cluster.find(Pods, namespace, {"job-name": job})
            return [decode(Pod, each) for each in found]
        known = [await self._cluster.get(Pods, namespace, name) for name in sorted(names)]
        return [decode(Pod, each) for each in known if each is not None]

    async def _jobs(self, seen: DatasetObject) -> list[Job]:
        observed = seen.status.observed_generation
        if seen.is_deleted or observed not in (0, seen.generation):
            found = await self._cluster.find(Jobs, seen.namespace, {LABEL_DATASET: seen.name})
            jobs = [decode(Job, each) for each in found]
            return [each for each in jobs if _is_own_job(each, seen)]
        if observed and seen.status.phase in datasets.SETTLED:
            return []
        # The last attempt, and one that an operator may have made before it was killed
        attempt = max(1, seen.status.attempt or 0)
        names = [job_name(seen, PREPARE, each) for each in (attempt, attempt + 1)]
        made = [await self._cluster.get(Jobs, seen.namespace, name) for name in names]
        jobs = [decode(Job, each) for each in made if each is not None]
        return [each for each in jobs if each.metadata.is_owned_by(seen.uid)]

    def _may_report(self, job: Job) -> bool:
        """Whether a Job's pods are worth reading: it has ended, or has run long enough to have some
        progress."""
        if job.status.conditions:
            return True
        since_s = seconds_of(job.status.start_time)
        return bool(since_s) and self._clock() - since_s >= min(self._interval_s, YOUNG_S)

    async def _progress(self, jobs: tuple[datasets.JobView, ...]) -> Progress | None:
        running = next((each for each in jobs if each.runs and each.address), None)
        if running is None:
            return None
        if self._http is None:
            self._http = httpx2.AsyncClient(trust_env=False, timeout=PROGRESS_S)
        host = f"[{running.address}]" if ":" in running.address else running.address
        with suppress(httpx2.HTTPError, httpx2.InvalidURL, ValueError):
            url = f"http://{host}:{PROGRESS_PORT}/progress"
            async with asyncio.timeout(PROGRESS_S), self._http.stream("GET", url) as answer:
                content = b""
                async for piece in answer.aiter_bytes():
                    content += piece
                    if len(content) > PROGRESS_BYTES_MAX:
                        return None
                return _checked(decode(Progress, json.loads(content)))
        return None

    async def _wake_readers(self, seen: Object) -> None:
        for raw in await self._cluster.find(TrainingJobs, seen.namespace):
            job = decode_training(raw)
            if any(each.name == seen.name for each in job.given.datasets):
                self.wake(Key(TRAINING_JOBS, seen.namespace, job.name))

    # TrainingJobs

    async def _training_job(self, key: Key) -> float | None:
        raw = await self._cluster.get(TrainingJobs, key.namespace, key.name)
        if raw is None:
            return None
        seen = decode_training(raw)
        names = {each.name for each in seen.given.datasets}
        found = {name: await self._get_dataset(key.namespace, name) for name in names}
        listed = await self._cluster.find(Pods, key.namespace, {LABEL_TRAINING: seen.name})
        pods = [decode(Pod, each) for each in listed]
        situation = training.TrainingSituation(
            seen=seen,
            datasets={name: each for name, each in found.items() if each is not None},
            pods=tuple(each for each in pods if each.metadata.is_owned_by(seen.uid)),
            now_s=self._clock(),
        )
        decision = training.decide(situation, self._defaults)
        if decision.wants_survey:
            situation = replace(situation, nodes=await self._survey(situation))
            decision = training.decide(situation, self._defaults)
        try:
            await self._make(seen, decision)
        except Hindered as error:
            await self._write_condition(situation, error.reason, str(error))
            raise
        for event in decision.events:
            await self._cluster.create(event)
        status = training.unhindered(situation, decision.status)
        if status != seen.status:
            await self._cluster.write_status(TrainingJobs, raw, encode(status))
        for name in decision.delete_pods:
            await self._cluster.delete(Pods, key.namespace, name)
        for name in decision.delete_secrets:
            await self._cluster.delete(Secrets, key.namespace, name)
        for name in decision.delete_services:
            await self._cluster.delete(Services, key.namespace, name)
        return decision.again_s

    async def _survey(self, situation: training.TrainingSituation) -> tuple[NodeState, ...]:
        nodes = [decode(ClusterNode, each) for each in await self._cluster.nodes()]
        pods = [decode(Pod, each) for each in await self._cluster.find(Pods, "*")]
        found = [decode_dataset(each) for each in await self._cluster.find(Datasets, "*")]
        own = {each.uid for each in situation.datasets.values()}
        return training.survey(nodes, pods, found, own)

    async def _make(self, seen: TrainingObject, decision: training.TrainingDecision) -> None:
        for volume in decision.key_secrets:
            with _forbidden("SecretDenied"):
                await self._make_key(seen, volume)
        for made in decision.create:
            with _forbidden("Forbidden"):  # by a quota, or a policy of the cluster
                is_made = await self._cluster.create(made)
            if is_made:
                continue
            wanted = decode(AnyObject, made)
            kind = Pods if wanted.kind == "Pod" else Services
            name = wanted.metadata.name
            there = await self._cluster.get(kind, seen.namespace, name)
            if there is None or decode(AnyObject, there).metadata.is_owned_by(seen.uid):
                continue
            raise Hindered("NameTaken", f"the {wanted.kind} {name} is not of this TrainingJob")

    async def _make_key(self, seen: TrainingObject, volume: PlannedVolume) -> None:
        """Makes the Secret with a volume's keys and a new key for the task, unless it exists."""
        source = await self._cluster.get(Secrets, seen.namespace, volume.key_from)
        data = decode(Secret, source).data
        made = key_secret(seen, volume.secret_name, data, secrets.token_hex(32))
        await self._cluster.create(made)

    async def _write_condition(
        self, situation: training.TrainingSituation, reason: str, why: str
    ) -> None:
        status = training.hindered(situation, reason, why)
        if status != situation.seen.status:
            await self._cluster.write_status(TrainingJobs, situation.seen.raw, encode(status))


@contextmanager
def _forbidden(reason: str) -> Iterator[None]:
    """A refusal of the cluster (403) becomes Hindered."""
    try:
        yield
    except ApiError as error:
        if error.status.code != HTTPStatus.FORBIDDEN:
            raise
        raise Hindered(reason, str(error.status.message)) from error


def _is_own_job(job: Job, seen: Object) -> bool:
    """Whether a Job with the Dataset's label belongs to this Dataset, not to an earlier one of its
    name. A reclaim Job has no owner: the label is enough."""
    is_reclaim = job.metadata.labels.get(LABEL_PURPOSE) == RECLAIM
    return is_reclaim or job.metadata.is_owned_by(seen.uid)


def _checked(found: Progress) -> Progress | None:
    """Leaves out impossible figures. Returns None if nothing is left."""
    percent = found.percent
    made = Progress(
        entries=max(0, found.entries) if found.entries else None,
        bytes=max(0, found.bytes) if found.bytes else None,
        percent=percent if percent is not None and 0 <= percent <= 100 else None,
    )
    return None if made == Progress() else made


def keys_of(raw: Json, plural: str) -> list[Key]:
    """The Datasets and TrainingJobs that get a turn when the object `raw` has changed. `plural` is
    its kind, as in the API's paths (`pods`)."""
    metadata = decode(Metadata, raw.get("metadata"))
    namespace, labels = metadata.namespace, metadata.labels
    if plural in (DATASETS, TRAINING_JOBS):
        return [Key(plural, namespace, metadata.name)]
    found = [
        Key(DATASETS, namespace, name.removeprefix(USES))
        for name in labels
        if name.startswith(USES)
    ]
    if name := labels.get(LABEL_DATASET):
        found.append(Key(DATASETS, namespace, name))
    if name := labels.get(LABEL_TRAINING):
        found.append(Key(TRAINING_JOBS, namespace, name))
    return found
