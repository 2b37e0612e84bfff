"""The checks: from facts about a machine, mount or store to findings, with advice. Pure.

Every threshold stands here, with its reason.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING

from diesel_fs.names import shown
from diesel_fs.repository.validation import CLOCK_ALLOWANCE_S

from ..show.output import bytes_text, count_text
from .findings import Figure, Finding, State

MOUNT_BYTES_MIN = 256 << 20
"""A mount's three processes take some 35 MB each, its cache at least 64 MiB."""

MOUNT_BYTES_SMALL = 1 << 30
"""With less memory, a mount holds few chunks: half of it is for contents."""

FILES_MIN, FILES_FEW = 256, 1024
"""A lower limit of open files is a fault, or a warning. A mount opens a few hundred, and every
process of a data loader has sockets besides."""

FREE_BYTES_MIN, FREE_BYTES_LOW = 64 << 20, 1 << 30
"""Fewer free bytes in the user's folders are a fault (no room for the log and a small snapshot), or
a warning (no room for the snapshot of millions of files, some 100 bytes each)."""

FREE_FILES_MIN = 100
"""Snapshots, logs and sockets need files on the same disk."""

OLD_CACHE_BYTES = 8 << 20
"""Less space in copies from earlier boots is not worth a warning."""

UNUSED_S = 30 * 86_400.0

CACHE_FREE_FRACTION = 0.05
"""A cache leaves this part of its disk free, so it takes nothing new on a fuller disk."""

CLOCK_NOTICE_S = 5.0
"""NTP keeps a clock right to a fraction of a second; a Date header has whole seconds."""

LATENCY_SLOW_S = 0.2
"""A bucket in the same region answers in 10 to 100 ms; in a slower store, reads that were not
announced dominate an epoch."""

METADATA_SLOW_S = 0.05
"""Redis answers in less than a millisecond, or over a slow network in some milliseconds."""

BANDWIDTH_SLOW = 20_000_000
"""Bytes a second. One GPU that trains on ImageNet reads about 100 MB/s."""

REDIS_FULL = 0.9
"""A Redis that uses this part of its `maxmemory` soon refuses writes."""

if TYPE_CHECKING:  # to import it takes 0.2 s, and most repositories need no Redis
    from diesel_fs.storage.metadata.redis.link import ServerFacts

_IN_A_CONTAINER = "start a container with --device /dev/fuse --cap-add SYS_ADMIN"


# This machine


@dataclass(frozen=True, slots=True)
class FuseFacts:
    device_errno: str = ""
    """The name of the error of opening /dev/fuse, or ""."""
    device_error: str = ""
    is_root: bool = True
    may_administrate: bool = True
    helper: str = ""
    helper_has_rights: bool = True
    native_error: str = ""
    """Why the native session cannot be used, as far as known without a mount."""
    linux: str = ""


def fuse_findings(facts: FuseFacts) -> Iterator[Finding]:
    match facts.device_errno:
        case "":
            yield Finding("fuse.device", "ok", f"/dev/fuse can be opened (Linux {facts.linux})")
        case "ENOENT" | "ENODEV" | "ENXIO":
            is_gone = facts.device_errno == "ENOENT"
            found = "there is no /dev/fuse" if is_gone else "/dev/fuse has no driver"
            cure = f"`modprobe fuse` as root; {_IN_A_CONTAINER}"
            yield Finding("fuse.device", "fault", f"{found}, so nothing can be mounted", cure)
        case "EACCES":
            found = "this user may not open /dev/fuse, so nothing can be mounted"
            yield Finding("fuse.device", "fault", found, "`chmod 666 /dev/fuse` as root")
        case _:
            found = f"/dev/fuse cannot be opened ({facts.device_error}), so nothing can be mounted"
            yield Finding("fuse.device", "fault", found, _IN_A_CONTAINER)
    if facts.is_root:
        if not facts.may_administrate:
            found = "root has no CAP_SYS_ADMIN here, so it may not mount"
            yield Finding("fuse.rights", "fault", found, _IN_A_CONTAINER)
    elif not facts.helper:
        found = "there is no fusermount3, by which users who are not root mount"
        yield Finding("fuse.rights", "fault", found, "`apt-get install fuse3`")
    elif not facts.helper_has_rights:
        found = f"{facts.helper} is not setuid root, so it may not mount"
        yield Finding("fuse.rights", "fault", found, f"`chmod u+s {quote(facts.helper)}` as root")


def session_finding(session: str, notes: Sequence[str], seconds: float) -> Finding:
    why = f" ({'; '.join(notes)})" if notes else ""
    found = f"a mount works, with the session {session}{why}"
    figures: dict[str, Figure] = {"session": session, "seconds": round(seconds, 2)}
    if session == "pyfuse3":
        cure = "use Linux 5.4 or later: here each file costs two requests more"
        return Finding("session", "warning", found, cure, figures)
    return Finding("session", "ok", found, figures=figures)


def expected_session(facts: FuseFacts) -> Finding:
    if facts.native_error:
        found = f"the session kernel is taken first (native: {facts.native_error}); not tried"
        return Finding("session", "ok", found, figures={"session": "kernel"})
    found = "the session native is taken first; not tried"
    return Finding("session", "ok", found, figures={"session": "native"})


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    limit_bytes: int
    available_bytes: int
    mount_bytes: int


def memory_finding(facts: MemoryFacts) -> Finding:
    limit, free = bytes_text(facts.limit_bytes), bytes_text(facts.available_bytes)
    figures: dict[str, Figure] = {
        "limit_bytes": facts.limit_bytes,
        "available_bytes": facts.available_bytes,
        "mount_bytes": facts.mount_bytes,
    }
    least = min(facts.limit_bytes, facts.available_bytes)
    if least < MOUNT_BYTES_MIN:
        found = (
            f"programs may use {limit} and {free} are free; a mount needs"
            f" {bytes_text(MOUNT_BYTES_MIN)}, the training besides"
        )
        return Finding("memory", "fault", found, _more_memory(facts), figures)
    found = f"{free} are free of {limit}; a mount takes {bytes_text(facts.mount_bytes)} of that"
    if least < MOUNT_BYTES_SMALL:
        return Finding("memory", "warning", found, _more_memory(facts), figures)
    return Finding("memory", "ok", found, figures=figures)


def _more_memory(facts: MemoryFacts) -> str:
    if facts.limit_bytes <= facts.available_bytes:
        return (
            "raise the memory limit of the container, job or control group to 1 GiB or more"
            " (docker --memory, resources.limits.memory, sbatch --mem, memory.max)"
        )
    return "end other programs, or take a machine with more memory"


def files_finding(soft: int, hard: int) -> Finding:
    found = f"a process may open {soft:,} files"
    figures: dict[str, Figure] = {"soft": soft, "hard": hard}
    cure = f"`ulimit -n {hard}`" if hard > soft else "raise nofile in /etc/security/limits.conf"
    state: State = "fault" if soft < FILES_MIN else "warning" if soft < FILES_FEW else "ok"
    return Finding("files", state, found, "" if state == "ok" else cure, figures)


@dataclass(frozen=True, slots=True)
class FolderFacts:
    """The disk of a missing folder is that of the nearest folder above."""

    what: str
    """`state`, `cache` or `tmp`; the check's name ends with it."""
    use: str
    path: str
    exists: bool = True
    owner_error: str = ""
    write_error: str = ""
    free_bytes: int = 0
    total_bytes: int = 0
    free_files: int | None = None
    """None if the file system does not count them."""
    kind: str = ""


def folder_finding(facts: FolderFacts) -> Finding:
    check, where = f"folder.{facts.what}", f"{facts.path} ({facts.use})"
    figures: dict[str, Figure] = {
        "path": facts.path, "free_bytes": facts.free_bytes, "total_bytes": facts.total_bytes,
        "file_system": facts.kind,
    }  # fmt: skip
    other = (
        "name another folder in TMPDIR"
        if facts.what == "tmp"
        else f"name another folder in XDG_{facts.what.upper()}_HOME"
    )
    if facts.owner_error:
        found = f"{where}: {facts.owner_error}"
        cure = f"`chmod 700 {quote(facts.path)}` as its owner, or {other}"
        return Finding(check, "fault", found, cure, figures)
    if facts.write_error:
        found = f"nothing can be written to {where}: {facts.write_error}"
        return Finding(check, "fault", found, other, figures)
    free = f"{bytes_text(facts.free_bytes)} are free in {where}"
    if facts.free_bytes < FREE_BYTES_MIN:
        cure = f"free some space on that disk, or {other}"
        return Finding(check, "fault", f"the disk is full: {free}", cure, figures)
    if facts.free_files is not None and facts.free_files < FREE_FILES_MIN:
        found = f"the disk takes only {facts.free_files} more files: {where}"
        return Finding(check, "fault", found, f"remove files from that disk, or {other}", figures)
    if facts.free_bytes < FREE_BYTES_LOW:
        found = f"only {free}: too little for the snapshots of large datasets"
        return Finding(check, "warning", found, other, figures)
    return Finding(check, "ok", free, figures=figures)


@dataclass(frozen=True, slots=True)
class OldCopies:
    """Copies of snapshots and images from earlier boots, which no program uses again."""

    folder: str
    boot: str
    files: int
    bytes: int


def old_copies_finding(facts: OldCopies) -> Finding | None:
    if facts.bytes < OLD_CACHE_BYTES:
        return None
    found = (
        f"{count_text(facts.files, 'file')} of earlier boots, {bytes_text(facts.bytes)}, lie in"
        f" {facts.folder}; nothing uses them any more"
    )
    cure = f"`find {quote(facts.folder)} -type f ! -name '*.{facts.boot}*' -delete`"
    figures: dict[str, Figure] = {"bytes": facts.bytes, "files": facts.files}
    return Finding("cache.old", "warning", found, cure, figures)


# The repository


def clock_finding(ahead_s: float, whose: str, error_s: float = 0.0) -> Finding:
    """This host's clock is `ahead_s` seconds ahead of the clock of `whose` (negative: behind),
    measured with an error of at most `error_s`."""
    off_s = max(0.0, abs(ahead_s) - error_s)
    direction = "ahead of" if ahead_s > 0 else "behind"
    found = f"this host's clock is {abs(ahead_s):,.1f} s {direction} that of {whose}"
    figures: dict[str, Figure] = {"ahead_s": round(ahead_s, 3)}
    cure = "set the clock right: `chronyc makestep`, or `timedatectl set-ntp true`"
    if off_s > CLOCK_ALLOWANCE_S:
        found += (
            f"; more than {CLOCK_ALLOWANCE_S} s lets puts, purges and signed requests be refused"
        )
        return Finding("clock", "fault", found, cure, figures)
    if off_s > CLOCK_NOTICE_S:
        return Finding("clock", "warning", found, cure, figures)
    return Finding("clock", "ok", f"this host's clock agrees with that of {whose}", "", figures)


def latency_finding(check: str, what: str, seconds: float, slow_s: float, cure: str) -> Finding:
    text = f"{what} answers in {1000 * seconds:,.1f} ms"
    figures: dict[str, Figure] = {"seconds": round(seconds, 6)}
    if seconds > slow_s:
        found = f"{text}; more than {1000 * slow_s:,.0f} ms is slow"
        return Finding(check, "warning", found, cure, figures)
    return Finding(check, "ok", text, figures=figures)


def bandwidth_finding(read_bytes: int, seconds: float) -> Finding:
    """Reads of less than 1 MiB show too little for a warning."""
    rate = read_bytes / max(seconds, 1e-6)
    found = f"{bytes_text(read_bytes)} of a chunk came at {bytes_text(rate)}/s"
    figures: dict[str, Figure] = {"bytes": read_bytes, "bytes_per_s": round(rate)}
    if read_bytes >= 1 << 20 and rate < BANDWIDTH_SLOW:
        cure = "`dlcmd forecast DATASET --store-bandwidth RATE` shows an epoch's waits;"
        cure += " mount with --cache-dir or --task, and run in the store's region"
        return Finding("store.bandwidth", "warning", found, cure, figures)
    return Finding("store.bandwidth", "ok", found, figures=figures)


def redis_finding(facts: "ServerFacts", where: str) -> Finding:
    figures: dict[str, Figure] = {
        "version": facts.version, "policy": facts.policy, "used_bytes": facts.used_bytes,
        "limit_bytes": facts.limit_bytes, "keeps_log": facts.keeps_log,
    }  # fmt: skip
    text = f"{where} is Redis {facts.version} with maxmemory-policy {facts.policy}"
    used = f"{bytes_text(facts.used_bytes)} of {bytes_text(facts.limit_bytes)} maxmemory"
    if facts.limit_bytes and facts.used_bytes > REDIS_FULL * facts.limit_bytes:
        found = f"{text}, and uses {used}: it will refuse writes"
        cure = "`redis-cli CONFIG SET maxmemory SIZE` with a larger size, or make room with"
        cure += " `dlcmd purge` and `dlcmd delete-dataset`"
        return Finding("metadata", "fault", found, cure, figures)
    if not facts.keeps_log:
        found = f"{text}, and keeps no log: a crash loses what was committed last"
        cure = "`redis-cli CONFIG SET appendonly yes`, and `appendonly yes` in redis.conf"
        return Finding("metadata", "warning", found, cure, figures)
    return Finding("metadata", "ok", text, figures=figures)


# Mounts


@dataclass(frozen=True, slots=True)
class MountFacts:
    path: str
    source: str
    state: str
    """`alive`, `dead`, `hung`, or `closed`: another user's."""
    stats: Mapping[str, object] | None = None


def mount_findings(facts: MountFacts) -> Iterator[Finding]:
    where = f"{facts.source} on {facts.path}"
    figures: dict[str, Figure] = {"path": facts.path, "state": facts.state}
    if facts.state == "dead":
        found = f"the mount of {where} is dead: nothing serves it, and what reads there fails"
        cure = f"`dlcmd umount {quote(facts.path)}`, then mount again"
        yield Finding("mount", "fault", found, cure, figures)
        return
    if facts.state == "hung":
        found = f"the mount of {where} does not answer, and what reads there hangs"
        cure = f"`dlcmd umount --force {quote(facts.path)}`, then mount again; see its log"
        yield Finding("mount", "fault", found, cure, figures)
        return
    if facts.stats is None:
        reason = "of another user, who lets no others read it" if facts.state == "closed" else ""
        found = f"the mount of {where} is alive" + (f" ({reason})" if reason else "")
        yield Finding("mount", "ok", found, figures=figures)
        return
    stats = facts.stats
    figures |= {"session": _text(stats, "session"), "version": _number(stats, "version")}
    found = f"the mount of {where} is alive, with the session {_text(stats, 'session')}"
    yield Finding("mount", "ok", found, figures=figures)
    yield from _stats_findings(facts.path, stats)


def _stats_findings(path: str, stats: Mapping[str, object]) -> Iterator[Finding]:
    if warning := _text(stats, "warning"):
        cure = f"unmount {path}, and mount the current version when the metadata store is back"
        yield Finding("mount.stale", "warning", f"{path}: {warning}", cure)
    failed = _number(_group(stats, "reads"), "failed")
    if failed:
        found = f"{path}: {count_text(failed, 'read')} failed since it was mounted"
        cure = "its log has the cause; `dlcmd verify DATASET` looks for lost chunks"
        yield Finding("mount.reads", "fault", found, cure, {"failed": failed})
    residency = _group(stats, "residency")
    budget, size = _number(residency, "budget_bytes"), _number(stats, "bytes")
    if budget and size > budget:
        found = (
            f"{path}: {bytes_text(budget)} of memory for a dataset of {bytes_text(size)}, so each"
            " epoch reads from the store again"
        )
        cure = "`dlcmd forecast DATASET` compares --memory, --cache-dir and --task"
        figures: dict[str, Figure] = {"budget_bytes": budget, "dataset_bytes": size}
        yield Finding("mount.memory", "ok", found, cure, figures)


@dataclass(frozen=True, slots=True)
class CurrentVersion:
    identity: str
    version: int


def behind_finding(facts: MountFacts, current: CurrentVersion | None) -> Finding | None:
    """`current` is the newest version of the mount's dataset; None if the repository has no such
    dataset."""
    stats = facts.stats or {}
    name, version = _text(stats, "dataset"), _number(stats, "version")
    at = quote(facts.path)
    again = f"`dlcmd umount {at}` and `dlcmd mount {name} {at}`"
    if current is None:
        found = f"{facts.path}: the repository has no dataset {name!r} (any more)"
        cure = "name the repository of the mount by --url; a deleted dataset must be put again"
        return Finding("mount.stale", "warning", found, cure)
    if current.identity != _text(stats, "identity"):
        found = f"{facts.path}: {name!r} is another dataset in the repository now"
        return Finding("mount.stale", "warning", found, again)
    if current.version > version and "follow" not in stats:
        behind_s = (current.version - version) / 1e6  # versions are microseconds
        found = (
            f"{facts.path} shows version {version}, and {current.version} is current, which is"
            f" {behind_s:,.0f} s newer"
        )
        figures: dict[str, Figure] = {"version": version, "current": current.version}
        cure = f"{again}; --follow shows new versions by itself"
        return Finding("mount.stale", "warning", found, cure, figures)
    return None


def _group(values: Mapping[str, object], name: str) -> Mapping[str, object]:
    found = values.get(name)
    return found if isinstance(found, Mapping) else {}


def _text(values: Mapping[str, object], name: str) -> str:
    found = values.get(name)
    return shown(found.encode()) if isinstance(found, str) else ""


def _number(values: Mapping[str, object], name: str) -> int:
    found = values.get(name)
    return int(found) if isinstance(found, int | float) else 0


# Folders that the user names


@dataclass(frozen=True, slots=True)
class CachedUse:
    folder: str
    bytes: int
    unused_s: float
    is_pinned: bool


@dataclass(frozen=True, slots=True)
class PlaceFacts:
    path: str
    exists: bool = True
    is_folder: bool = True
    is_cache: bool = False
    is_store: bool = False
    content: str = ""
    """The name of something that keeps the folder from becoming a cache, or ""."""
    error: str = ""
    owner_error: str = ""
    free_bytes: int = 0
    total_bytes: int = 0
    kind: str = ""
    is_network: bool = False
    datasets: Sequence[CachedUse] = ()


def place_findings(facts: PlaceFacts) -> Iterator[Finding]:
    path = facts.path
    if not facts.is_folder:
        yield Finding("place", "fault", f"{path} is no folder", "name a folder")
    elif facts.is_store:
        found = f"{path} is the store of a repository, and no place for mounts or caches"
        yield Finding(
            "place", "fault", found, f"`dlcmd doctor {quote(f'file://{path}')}` checks the store"
        )
    elif facts.error:
        cure = "name a folder of your own, or let root give you this one (`chown`)"
        yield Finding("place", "fault", f"{path}: {facts.error}", cure)
    elif facts.content and not facts.is_cache:
        found = f"{path} is neither empty nor a cache: it holds {facts.content!r}"
        yield Finding("place", "fault", found, "name an empty folder, or one that does not exist")
    else:
        yield from _usable_place_findings(facts)


def _usable_place_findings(facts: PlaceFacts) -> Iterator[Finding]:
    path, free = facts.path, bytes_text(facts.free_bytes)
    figures: dict[str, Figure] = {
        "path": path, "free_bytes": facts.free_bytes, "total_bytes": facts.total_bytes,
        "file_system": facts.kind,
    }  # fmt: skip
    if facts.is_cache:
        used = sum(each.bytes for each in facts.datasets)
        found = f"{path} is a cache with {bytes_text(used)}; {free} are free ({facts.kind})"
    elif not facts.exists:
        found = f"{path} does not exist; a mount makes it ({free} are free, {facts.kind})"
    else:
        found = f"{path} is empty; one can mount on it, and {free} are free ({facts.kind})"
    yield Finding("place", "ok", found, figures=figures)
    if facts.owner_error:
        found = f"no cache can be kept in {path}: {facts.owner_error}"
        state: State = "fault" if facts.is_cache else "warning"
        yield Finding(
            "place.cache", state, found, f"`chmod 700 {quote(path)}` as its owner", figures
        )
    elif facts.free_bytes < CACHE_FREE_FRACTION * facts.total_bytes:
        found = (
            f"the disk of {path} is full ({free} free): a cache leaves"
            f" {100 * CACHE_FREE_FRACTION:.0f} % of its disk free, so it takes nothing new"
        )
        cure = "free some space on that disk, or name a folder on another one"
        yield Finding("place.cache", "fault", found, cure, figures)
    elif facts.kind in ("tmpfs", "ramfs"):
        found = f"a cache in {path} would lie in memory ({facts.kind})"
        cure = "for a cache, name a folder on a local SSD; for a mount this is good"
        yield Finding("place.cache", "ok", found, cure, figures)
    elif facts.is_network:
        found = f"{path} lies on a network ({facts.kind}): a cache there is slow, and not private"
        cure = "for a cache, name a folder on a local SSD; for a mount this is good"
        yield Finding("place.cache", "warning", found, cure, figures)
    for each in facts.datasets:
        if each.unused_s > UNUSED_S and not each.is_pinned:
            found = (
                f"no job has used {each.folder} for {each.unused_s / 86_400:.0f} days; it has"
                f" {bytes_text(each.bytes)}"
            )
            yield Finding(
                "cache.old", "warning", found, f"`rm -r {quote(each.folder)}` while no job runs",
                {"bytes": each.bytes, "unused_s": round(each.unused_s)},
            )  # fmt: skip
