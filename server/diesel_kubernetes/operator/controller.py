"""Looks at one object after the other, and does what `datasets.py` and `training.py` decide.

It holds no state: all that it knows of an object it reads anew, and each write can be done twice.
Only what nodes report is read apart from that, for all objects at once (`refresh_holdings`).
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
from .cluster import Cluster, ConfigMaps, Datasets, Jobs, Pods, Secrets, Services, TrainingJobs
from .fields import Json, at, fields, items, seconds_of, text, texts, whole
from .holdings import NodeHoldings, held_key
from .objects import (
    LABEL_DATASET,
    LABEL_PURPOSE,
    LABEL_TRAINING,
    PREPARE,
    PROGRESS_PORT,
    RECLAIM,
    USES,
    PlannedVolume,
    is_ours,
    job_name,
    key_secret,
)
from .placement import NodeState
from .queue import Key
from .resources import RECLAIM_FINALIZER, Defaults, Object, parse_object

log = logging.getLogger("diesel.operator")

DATASETS, TRAINING_JOBS = "datasets", "trainingjobs"

PROGRESS_S = 2.0
"""How long a preparation has to say how far it is."""
PROGRESS_BYTES_MAX = 4096

CONFLICT_S = 0.1

YOUNG_S = 5.0
"""A Job younger than this is not asked how far it is."""


class Hindered(Exception):
    """Something that a TrainingJob needs cannot be made now; it is tried again."""

    def __init__(self, reason: str, why: str) -> None:
        """`reason` is that of the condition `ObjectsMade`."""
        super().__init__(why)
        self.reason = reason


class KnownPods:
    """Names of pods, as the watch has shown them. It may be behind, and empty at first: it only
    says what is worth reading."""

    def __init__(self) -> None:
        self._by_job: dict[tuple[str, str], set[str]] = {}
        self._by_dataset: dict[tuple[str, str], set[str]] = {}

    def note(self, raw: Json, *, is_gone: bool) -> None:
        """A pod was seen, or seen to be gone."""
        namespace, name = text(raw, "metadata", "namespace"), text(raw, "metadata", "name")
        labels = texts(raw, "metadata", "labels")
        if job := labels.get("job-name"):
            _keep(self._by_job, (namespace, job), name, is_gone=is_gone)
        for label in labels:
            if label.startswith(USES):
                key = namespace, label.removeprefix(USES)
                _keep(self._by_dataset, key, name, is_gone=is_gone)

    def pods(self, namespace: str, job: str) -> set[str]:
        """The pods of a Job."""
        return self._by_job.get((namespace, job), set())

    def readers(self, namespace: str, dataset: str) -> set[str]:
        """The pods that read a Dataset."""
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


class Controller:
    """Handles keys, in any number of tasks at once, but each key in one."""

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
        """`driver_namespace` is where nodes report what they hold; empty: nobody does."""
        self._cluster = cluster
        self._defaults = defaults
        self._interval_s = interval_s
        self._driver_namespace = driver_namespace
        self._clock = clock
        self.wake = wake
        """Called with objects that should be looked at after a change of another one."""
        self._known = KnownPods()
        self._reports: list[NodeReport] = []
        self._holdings = NodeHoldings()
        self._known_datasets: dict[Key, tuple[Held, frozenset[str]]] = {}
        self._wrong_reports: set[str] = set()
        self._is_blind = False
        self._http: httpx2.AsyncClient | None = None  # it takes 0.1 s to make

    def note_pod(self, raw: Json, *, is_gone: bool) -> None:
        """A pod was seen: its name is kept, so that it can be read without a list."""
        self._known.note(raw, is_gone=is_gone)

    async def close(self) -> None:
        """Close connections."""
        if self._http is not None:
            await self._http.aclose()

    async def handle(self, key: Key) -> float | None:
        """Do the next step for an object; after how many seconds to look again."""
        handle = self._dataset if key.plural == DATASETS else self._training_job
        try:
            return await handle(key)
        except ApiError as error:
            if error.status.code == HTTPStatus.CONFLICT:  # it was changed meanwhile
                return CONFLICT_S
            raise

    # What nodes hold

    async def refresh_holdings(self) -> None:
        """Read what the plugins of all nodes report, and have the Datasets looked at that are
        concerned. Where that cannot be read, the reports before are used until they are too
        old."""
        if not self._driver_namespace:
            return
        try:
            found = await self._cluster.find(ConfigMaps, self._driver_namespace, {LABEL_NODE: None})
        except (ApiError, httpx2.HTTPError) as error:
            if not self._is_blind:  # it is said once
                log.warning("shares of nodes are estimates: cannot read their reports: %s", error)
            self._is_blind = True
        else:
            self._is_blind = False
            self._reports = self._parsed(found)
        before, self._holdings = self._holdings, NodeHoldings(self._reports, self._clock())
        datasets_changed, nodes_changed = self._holdings.changed_since(before)
        for key, (held, nodes) in list(self._known_datasets.items()):
            if held in datasets_changed or not nodes_changed.isdisjoint(nodes):
                self.wake(key)

    def _parsed(self, found: list[Json]) -> list[NodeReport]:
        """The reports in ConfigMaps. One that is none is left out, and said once."""
        reports, wrong = [], set()
        for raw in found:
            try:
                reports.append(parse_config_map(raw))
            except FormatError as error:
                wrong.add(text(raw, "metadata", "name"))
                if text(raw, "metadata", "name") not in self._wrong_reports:
                    log.warning("a report of a node is not used: %s", error.message)
        self._wrong_reports = wrong
        return reports

    def _note_dataset(self, key: Key, raw: Json | None) -> None:
        """Keep what makes a Dataset concerned by reports."""
        status = fields(raw, "status")
        held = held_key(key.namespace, status)
        if held is None:
            self._known_datasets.pop(key, None)
        else:
            nodes = frozenset(text(each, "name") for each in items(status, "nodes"))
            self._known_datasets[key] = held, nodes

    # Datasets

    async def _dataset(self, key: Key) -> float | None:
        raw = await self._cluster.get(Datasets, key.namespace, key.name)
        self._note_dataset(key, raw)
        if raw is None:
            return None
        seen = parse_object(raw)
        situation = await self._situation(seen)
        decision = datasets.decide(situation, self._defaults)
        if decision.add_finalizer:
            made = await self._cluster.set_finalizers(
                Datasets, raw, [*seen.finalizers, RECLAIM_FINALIZER]
            )
            if made is None:
                return None
            raw = made
        for job in decision.create:
            await self._cluster.create(job)
        for event in decision.events:
            await self._cluster.create(event)
        if decision.status != seen.status:
            await self._cluster.write_status(Datasets, raw, decision.status)
            raw = await self._cluster.get(Datasets, key.namespace, key.name) or raw
            if decision.status.get("phase") != seen.status.get("phase"):
                await self._wake_readers(seen)
        for name in decision.delete_jobs:
            await self._cluster.delete(Jobs, key.namespace, name)
        if decision.remove_finalizer:
            left = [each for each in seen.finalizers if each != RECLAIM_FINALIZER]
            await self._cluster.set_finalizers(Datasets, raw, left)
        return decision.again_s

    async def _situation(self, seen: Object) -> datasets.Situation:
        """What the cluster has of a Dataset.

        The API server looks through all objects of a namespace for each list, so there is none
        where names tell enough: else the time for many Datasets would grow with their square.
        """
        own = await self._jobs(seen)
        pods: list[Json] = []
        for job in filter(self._may_tell, own):
            pods += await self._pods_of(seen.namespace, text(job, "metadata", "name"))
        readers: list[Json] = []
        is_read = self._known.readers(seen.namespace, seen.name) or items(seen.status, "nodes")
        if seen.is_deleted or is_read:
            uses = {f"{USES}{seen.name}": None}
            readers = await self._cluster.find(Pods, seen.namespace, uses)
        jobs = tuple(datasets.view_of_job(each, pods) for each in own)
        return datasets.Situation(
            seen=seen,
            jobs=jobs,
            pods=tuple(readers),
            progress=await self._progress(jobs),
            now_s=self._clock(),
            interval_s=self._interval_s,
            holdings=self._holdings,
        )

    async def _pods_of(self, namespace: str, job: str) -> list[Json]:
        names = self._known.pods(namespace, job)
        if not names:
            return await self._cluster.find(Pods, namespace, {"job-name": job})
        found = [await self._cluster.get(Pods, namespace, name) for name in sorted(names)]
        return [each for each in found if each is not None]

    async def _jobs(self, seen: Object) -> list[Json]:
        """The Jobs of a Dataset that matter for its next step."""
        observed = whole(seen.status, "observedGeneration")
        if seen.is_deleted or observed not in (0, seen.generation):
            found = await self._cluster.find(Jobs, seen.namespace, {LABEL_DATASET: seen.name})
            return [each for each in found if is_ours(each, seen) or _is_reclaim(each)]
        if observed and text(seen.status, "phase") in datasets.SETTLED:
            return []
        # The last attempt, and the one that an operator may have made before it was killed
        attempt = max(1, whole(seen.status, "attempt"))
        names = [job_name(seen, PREPARE, each) for each in (attempt, attempt + 1)]
        made = [await self._cluster.get(Jobs, seen.namespace, name) for name in names]
        return [each for each in made if each is not None and is_ours(each, seen)]

    def _may_tell(self, job: Json) -> bool:
        """Whether the pods of a Job have something to say: it has ended, or runs for a while."""
        if items(job, "status", "conditions"):
            return True
        since_s = seconds_of(text(job, "status", "startTime"))
        return bool(since_s) and self._clock() - since_s >= min(self._interval_s, YOUNG_S)

    async def _progress(self, jobs: tuple[datasets.JobView, ...]) -> Json:
        """How far the running preparation is, by its own account; {} where it does not answer."""
        running = next((each for each in jobs if each.runs and each.address), None)
        if running is None:
            return {}
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
                        return {}
                return _progress(json.loads(content))
        return {}

    async def _wake_readers(self, seen: Object) -> None:
        for raw in await self._cluster.find(TrainingJobs, seen.namespace):
            if any(text(each, "name") == seen.name for each in items(raw, "spec", "datasets")):
                self.wake(Key(TRAINING_JOBS, seen.namespace, text(raw, "metadata", "name")))

    # TrainingJobs

    async def _training_job(self, key: Key) -> float | None:
        raw = await self._cluster.get(TrainingJobs, key.namespace, key.name)
        if raw is None:
            return None
        seen = parse_object(raw)
        names = {text(each, "name") for each in items(raw, "spec", "datasets")}
        found = {name: await self._cluster.get(Datasets, key.namespace, name) for name in names}
        pods = await self._cluster.find(Pods, key.namespace, {LABEL_TRAINING: seen.name})
        situation = training.Situation(
            seen=seen,
            datasets={name: each for name, each in found.items() if each is not None},
            pods=tuple(each for each in pods if is_ours(each, seen)),
            now_s=self._clock(),
        )
        decision = training.decide(situation, self._defaults)
        if decision.wants_survey:
            situation = replace(situation, nodes=await self._survey(situation))
            decision = training.decide(situation, self._defaults)
        try:
            await self._make(seen, decision)
        except Hindered as error:
            await self._say(raw, situation, error.reason, str(error))
            raise
        for event in decision.events:
            await self._cluster.create(event)
        status = training.unhindered(situation, decision.status)
        if status != seen.status:
            await self._cluster.write_status(TrainingJobs, raw, status)
        for name in decision.delete_pods:
            await self._cluster.delete(Pods, key.namespace, name)
        for name in decision.delete_secrets:
            await self._cluster.delete(Secrets, key.namespace, name)
        for name in decision.delete_services:
            await self._cluster.delete(Services, key.namespace, name)
        return decision.again_s

    async def _survey(self, situation: training.Situation) -> tuple[NodeState, ...]:
        own = [text(each, "metadata", "uid") for each in situation.datasets.values()]
        return training.survey(
            await self._cluster.nodes(),
            await self._cluster.find(Pods, "*"),
            await self._cluster.find(Datasets, "*"),
            own,
        )

    async def _make(self, seen: Object, decision: training.Decision) -> None:
        for volume in decision.key_secrets:
            with _forbidden("SecretDenied"):
                await self._make_key(seen, volume)
        for made in decision.create:
            with _forbidden("Forbidden"):  # by a quota, or a policy of the cluster
                is_made = await self._cluster.create(made)
            if is_made:
                continue
            kind = Pods if text(made, "kind") == "Pod" else Services
            name = text(made, "metadata", "name")
            there = await self._cluster.get(kind, seen.namespace, name)
            if there is not None and not is_ours(there, seen):
                kind_name = text(made, "kind")
                raise Hindered("NameTaken", f"the {kind_name} {name} is not of this TrainingJob")

    async def _make_key(self, seen: Object, volume: PlannedVolume) -> None:
        """Make the Secret of a volume once. The key that is there is never replaced."""
        source = await self._cluster.get(Secrets, seen.namespace, volume.key_from)
        data = texts(source, "data")
        await self._cluster.create(key_secret(seen, volume.secret, data, secrets.token_hex(32)))

    async def _say(self, raw: Json, situation: training.Situation, reason: str, why: str) -> None:
        status = training.hindered(situation, reason, why)
        if status != situation.seen.status:
            await self._cluster.write_status(TrainingJobs, raw, status)


@contextmanager
def _forbidden(reason: str) -> Iterator[None]:
    """Raises Hindered where the cluster forbids what is done."""
    try:
        yield
    except ApiError as error:
        if error.status.code != HTTPStatus.FORBIDDEN:
            raise
        raise Hindered(reason, str(error.status.message)) from error


def _is_reclaim(job: Json) -> bool:
    return texts(job, "metadata", "labels").get(LABEL_PURPOSE) == RECLAIM


def _progress(found: object) -> Json:
    """What a pod said of its progress; only whole numbers are taken from it."""
    made: Json = {
        name: max(0, whole(found, name)) for name in ("entries", "bytes") if at(found, name)
    }
    percent = at(found, "percent")
    if isinstance(percent, int) and 0 <= percent <= 100:
        made["percent"] = percent
    return made


def keys_of(raw: Json, plural: str) -> list[Key]:
    """Which objects are to be looked at when this one has changed."""
    metadata = fields(raw, "metadata")
    namespace, labels = text(metadata, "namespace"), texts(metadata, "labels")
    if plural in (DATASETS, TRAINING_JOBS):
        return [Key(plural, namespace, text(metadata, "name"))]
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
