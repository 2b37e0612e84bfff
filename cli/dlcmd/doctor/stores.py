"""Facts about a repository: whether it answers, how fast, its clock, and the user's rights.

Nothing is written without `StoreQuestion.writes` (`--write`). With it, one object or file is
written under a new name, in a place that belongs to DIESEL-FS, and removed at once. If this process
dies, a purge or the store itself removes it later.
"""

import os
import secrets
import statistics
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from uuid import uuid4

from diesel_fs.errors import (
    DieselError,
    MetadataBehind,
    ObjectMissing,
    PermissionDenied,
    UsageError,
)
from diesel_fs.format.object_names import STORE_MARKER, chunk_object, lease_object
from diesel_fs.remote.open import open_configured
from diesel_fs.remote.repository import RemoteRepository
from diesel_fs.repository.catalog import DatasetInfo
from diesel_fs.repository.interface import Repository
from diesel_fs.repository.leases import NO_VERSION, Lease
from diesel_fs.repository.stored import StoredRepository
from diesel_fs.settings import Settings
from diesel_fs.storage.metadata.redis.address import parse_redis_url
from diesel_fs.storage.objects.cloud.direct import open_buckets_directly
from diesel_fs.storage.objects.cloud.location import parse_bucket_url, resolve_access
from diesel_fs.storage.objects.folder import object_temporary_name
from diesel_fs.urls import CLOUD_SCHEMES, SERVER_SCHEMES, RepositoryUrl, parse_url

from ..show.output import count_text
from .checks import (
    LATENCY_SLOW_S,
    METADATA_SLOW_S,
    bandwidth_finding,
    clock_finding,
    latency_finding,
    redis_finding,
)
from .findings import Finding
from .machine import write_error
from .probes import Emit, Probe, failed

REQUESTS = 5

HTTP_S = 4.0

READ_BYTES, PART_BYTES, READ_THREADS, READ_S = 16 << 20, 1 << 20, 4, 2.0

DATASETS_TRIED = 20

_SLOW_STORE = "run in the region of the store, or mount with --cache-dir or --task"
_SLOW_REDIS = "run Redis near the jobs, on a machine that is not busy (`redis-cli --latency`)"


@dataclass(frozen=True, slots=True)
class StoreQuestion:
    settings: Settings
    is_named: bool
    """Otherwise it need not exist yet."""
    measures: bool = True
    writes: bool = False

    @property
    def shown(self) -> str:
        return str(parse_url(self.settings.repository_url))


def store_probe(question: StoreQuestion) -> Probe:
    url = parse_url(question.settings.repository_url)
    if url.scheme in SERVER_SCHEMES:
        cure = "check that the server runs, and that its address and the network are right"
    elif url.scheme in CLOUD_SCHEMES:
        cure = "check the network, AWS_ENDPOINT_URL and the proxies (`https_proxy`)"
    else:
        cure = "check the disk or file server on which it lies (`dmesg`, `findmnt`)"

    def work(emit: Emit) -> None:
        if _can_be_reached(url, emit):
            _examine(question, url, emit)

    return Probe("store", f"the repository {question.shown}", work, cure)


def open_for_reading(settings: Settings) -> Repository:
    """The caller closes the repository. Raises DieselError."""
    open_buckets_directly()
    return open_configured(settings)


def _can_be_reached(url: RepositoryUrl, emit: Emit) -> bool:
    """Emits a fault if a bucket's endpoint does not answer, and a finding about its clock from the
    Date header. Other repositories count as reachable: opening them fails soon enough."""
    if url.scheme not in CLOUD_SCHEMES:
        return True
    access = resolve_access(parse_bucket_url(url.objects_url), os.environ)
    endpoint = f"{'http' if access.plain_http else 'https'}://{access.host}/"
    request = urllib.request.Request(endpoint, method="HEAD")  # noqa: S310  # http or https
    requested_s = time.time()
    try:
        with urllib.request.build_opener(_NoRedirect).open(request, timeout=HTTP_S) as answer:
            date = answer.headers.get("Date")
    except urllib.error.HTTPError as error:  # a refusal or a redirect has a date, too
        date = error.headers.get("Date")
        error.close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        emit(Finding(
            "store", "fault", f"the object store at {access.host} cannot be reached: {reason}",
            "check the network, AWS_ENDPOINT_URL, AWS_REGION and the proxies (`https_proxy`)",
        ))  # fmt: skip
        return False
    with suppress(TypeError, ValueError):  # no date, or none that can be read
        theirs_s = parsedate_to_datetime(date).timestamp()
        ours_s = (requested_s + time.time()) / 2
        error_s = 1.0 + (time.time() - requested_s) / 2  # the header has whole seconds
        emit(clock_finding(ours_s - theirs_s - 0.5, f"the object store at {access.host}", error_s))
    return True


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it would lead to the vendor's web pages."""

    def redirect_request(self, *_: object) -> None:
        """Returns None, so that urllib raises HTTPError."""


def _examine(question: StoreQuestion, url: RepositoryUrl, emit: Emit) -> None:
    try:
        repository = open_for_reading(question.settings)
    except ObjectMissing as error:
        if url.scheme == "file" and not question.is_named:
            found = f"there is no repository yet at {url}, and no other is named"
            cure = "`dlcmd put FOLDER DATASET` makes it; --url or DIESEL_URL names another one"
            emit(Finding("store", "warning", found, cure))
        else:
            emit(failed("store", error, "check the address; `dlcmd put` makes a repository"))
        return
    with repository:
        if isinstance(repository, StoredRepository):
            _examine_stores(question, repository, emit)
        else:
            _examine_server(question, repository, emit)


# Stores that this process opens itself


def _examine_stores(question: StoreQuestion, repository: StoredRepository, emit: Emit) -> None:
    url, objects = repository.url, repository.objects
    datasets = repository.datasets()
    has = count_text(len(datasets), "dataset")
    emit(
        Finding("store", "ok", f"{url} can be read; it has {has}", "", {"datasets": len(datasets)})
    )
    seconds = _median_seconds(lambda: objects.get(STORE_MARKER))
    emit(latency_finding("store.latency", "the store", seconds, LATENCY_SLOW_S, _SLOW_STORE))
    _examine_metadata(repository, emit)
    _emit_no_dataset(datasets, emit)
    if question.measures:
        _measure_bandwidth(repository, datasets, emit)
    emit(_write_finding(question, repository, datasets))


def _examine_metadata(repository: StoredRepository, emit: Emit) -> None:
    where = "the metadata store"
    if problem := repository.meta_problem:
        has_no_named_metadata = repository.url.scheme != "file" and not repository.url.meta
        if has_no_named_metadata or isinstance(problem, PermissionDenied):
            found = f"{problem.message}: jobs can read, by the last snapshot"
            emit(Finding("metadata", "warning", found, problem.advice or "add ?meta=redis://host"))
        else:
            cure = "`dlcmd recover DATASET`" if isinstance(problem, MetadataBehind) else ""
            emit(failed("metadata", problem, cure))
        return
    meta = repository.meta
    if repository.url.meta:
        from diesel_fs.storage.metadata.redis.store import (  # noqa: PLC0415  # it takes 0.2 s
            RedisMetadata,
        )

        assert isinstance(meta, RedisMetadata)
        where = f"Redis at {parse_redis_url(repository.url.meta)}"
        for facts in meta.server_facts():
            emit(redis_finding(facts, where))
        seconds = _median_seconds(meta.now_s)
        emit(latency_finding("metadata.latency", where, seconds, METADATA_SLOW_S, _SLOW_REDIS))
    else:
        emit(Finding("metadata", "ok", "SQLite beside the chunks can be used"))
    requested_s = time.time()
    # SQLite's `now_s` makes a temporary file: that fails in a read-only folder
    with suppress(DieselError):
        theirs_s = meta.now_s()
        now_s = time.time()
        emit(clock_finding((requested_s + now_s) / 2 - theirs_s, where, (now_s - requested_s) / 2))


def _write_finding(
    question: StoreQuestion, repository: StoredRepository, datasets: list[DatasetInfo]
) -> Finding:
    url, check = repository.url, "store.rights"
    try:
        if question.writes:
            _try_to_write(repository, datasets)
            return Finding(check, "ok", f"this user may read {url} and write to it (tried)")
    except (DieselError, OSError) as error:
        reason = error.message if isinstance(error, DieselError) else error.strerror
        found = f"this user may read {url}, and not write to it: {reason}"
        return Finding(check, "fault", found, "give this user the right to write there")
    if url.scheme != "file":
        found = f"this user may read {url}; whether it may write was not tried"
        return Finding(check, "ok", found, "--write tries it")
    if reason := write_error(url.path.resolve()):
        found = (
            f"this user may read {url}, and not write to it ({reason}): jobs run, and their mounts"
            " cannot register what they read, which a purge then deletes"
        )
        cure = "to put, purge or protect long jobs, give this user the right to write there"
        return Finding(check, "warning", found, cure)
    return Finding(check, "ok", f"this user may read {url} and, by its mode, write to it")


def _try_to_write(repository: StoredRepository, datasets: list[DatasetInfo]) -> None:
    """In a folder, this writes an empty temporary file, such as a killed put leaves. In a bucket,
    it writes a lease on no version, of an existing dataset if there is one. Raises DieselError,
    OSError."""
    if repository.url.scheme == "file":
        path = repository.url.path.resolve() / object_temporary_name()
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        os.unlink(path)
        return
    token = secrets.token_hex(16)
    name = lease_object(datasets[0].identity if datasets else uuid4(), token)
    try:
        repository.objects.replace(name, [Lease.own(token, NO_VERSION, 1.0).to_json()])
    finally:
        with suppress(PermissionDenied):
            repository.objects.delete(name)


# Servers


def _examine_server(question: StoreQuestion, repository: Repository, emit: Emit) -> None:
    url = repository.url
    user = repository.credentials.user if repository.credentials else "?"
    datasets = repository.datasets()  # connects, and logs in
    may_read = count_text(len(datasets), "dataset")
    found = f"{url} accepts the user {user!r}, who may read {may_read}"
    emit(Finding("store", "ok", found, "", {"datasets": len(datasets)}))
    seconds = _median_seconds(repository.datasets)
    emit(latency_finding("store.latency", "the server", seconds, LATENCY_SLOW_S, _SLOW_STORE))
    _emit_no_dataset(datasets, emit)
    if isinstance(repository, RemoteRepository) and datasets:
        requested_s = time.time()
        repository.dataset(datasets[0].name)
        error_s = time.time() - requested_s
        emit(clock_finding(-repository.clock_offset_s, f"the server at {url.host}", error_s))
        if repository.metadata_error:
            found = f"the server cannot use its metadata store: {repository.metadata_error}"
            emit(Finding("metadata", "fault", found, "start its Redis, and see the server's log"))
    if question.measures:
        _measure_bandwidth(repository, datasets, emit)
    if question.writes:
        emit(_roles_finding(repository, datasets, user))
    else:
        found = f"{user!r} may read {may_read}; whether the user may write was not tried"
        emit(Finding("store.rights", "ok", found, "--write tries it"))


def _roles_finding(repository: Repository, datasets: list[DatasetInfo], user: str) -> Finding:
    """Begins a put into each dataset, and puts nothing."""
    refused = []
    for info in datasets[:DATASETS_TRIED]:
        try:
            repository.begin(info.name, create=False)
        except PermissionDenied:
            refused.append(info.name)
    if refused:
        found = f"{user!r} may read, and not write, {', '.join(refused)}"
        cure = f"an administrator can run `dlcmd grant {refused[0]} {user} write`"
        return Finding("store.rights", "fault", found, cure)
    many = count_text(min(len(datasets), DATASETS_TRIED), "dataset")
    return Finding("store.rights", "ok", f"{user!r} may read and write {many} (tried)")


# Both kinds


def _emit_no_dataset(datasets: list[DatasetInfo], emit: Emit) -> None:
    if not datasets:
        cure = "`dlcmd put FOLDER DATASET` makes one; on a server, a role on one is needed"
        emit(Finding("store.datasets", "warning", "there is no dataset to read", cure))


def _median_seconds(request: Callable[[], object]) -> float:
    taken = []
    for _ in range(REQUESTS):
        begun_s = time.perf_counter()
        request()
        taken.append(time.perf_counter() - begun_s)
    return statistics.median(taken)


def _measure_bandwidth(repository: Repository, datasets: list[DatasetInfo], emit: Emit) -> None:
    """Skips a dataset if its chunk is gone, or if a server refuses to list its chunks."""
    for info in datasets:
        with suppress(ObjectMissing, UsageError):
            name = _some_chunk(repository, info)
            if name:
                size = repository.objects.stat(name).bytes
                emit(_read_chunk(repository, name, min(size, READ_BYTES)))
                return


def _some_chunk(repository: Repository, info: DatasetInfo) -> str:
    if info.head is not None and info.head.chunks:
        return chunk_object(info.identity, info.head.newest)
    first = next(repository.chunk_ids(info.identity), None)
    return "" if first is None else chunk_object(info.identity, first)


def _read_chunk(repository: Repository, name: str, size: int) -> Finding:
    """The threads are daemons: a read that never ends must not keep the program. Raises
    DieselError."""
    begun_s = time.perf_counter()
    parts = [(start, min(PART_BYTES, size - start)) for start in range(0, size, PART_BYTES)]
    done: list[int] = []
    errors: list[DieselError] = []

    def read() -> None:
        with suppress(IndexError):
            while time.perf_counter() - begun_s < READ_S and not errors:
                start, length = parts.pop()
                try:
                    repository.objects.fast_reads.read(name, start, length)
                except DieselError as error:
                    errors.append(error)
                else:
                    done.append(length)

    threads = [threading.Thread(target=read, daemon=True) for _ in range(READ_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return bandwidth_finding(sum(done), time.perf_counter() - begun_s)
