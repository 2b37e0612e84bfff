"""The options of a mount: one value, which the mount's daemon reads from a pipe.

Every user of the machine can read a process's arguments, and the options contain a key.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from ..credentials import Credentials, parse_key
from ..errors import UsageError
from ..net.endpoints import parse_endpoint
from ..peers.members.options import NO_TASK, FillPolicy, TaskOptions
from ..settings import READ_DEADLINE_S
from ..system.available_memory import memory_limit_bytes
from ..system.daemons import DaemonRequest
from ..urls import HostPort, parse_url

LOOPBACK = "127.0.0.1"
ID_MAX = (1 << 32) - 2  # of a user or group; the next number means none


@dataclass(frozen=True, slots=True)
class MountRequest(DaemonRequest):
    """Paths are absolute; 0 and "" stand for the default."""

    BYTES_MAX: ClassVar[int] = 65_536
    """The capacity of a pipe: a foreground mount writes the request to its own stdin."""

    url: str
    dataset: str
    mountpoint: str
    snapshot_file: str = ""
    stale: str = "warn"  # refuse, warn, allow
    offline: bool = False  # the snapshot's version is not checked
    version: int = 0  # a kept version; 0: the current one
    follow: bool = False
    follow_interval_s: float = 0.0  # how often a mount that follows looks for a newer version
    session: str = "auto"  # or native, kernel, pyfuse3
    memory_bytes: int = 0
    policy: FillPolicy = "on-demand"
    seed: int = 0  # of shuffled lists in `.diesel`
    group_size: int = 0
    allow_other: bool = False
    uid: int = -1  # the owner of all files; -1: the user of this process
    gid: int = -1
    umask: int = 0
    log_file: str = ""
    metrics: str = ""  # [HOST:]PORT for Prometheus
    read_deadline_s: float = READ_DEADLINE_S
    user: str = ""  # of a DIESEL-FS server
    key: str = field(default="", repr=False)
    task_options: TaskOptions = NO_TASK
    made_folders: tuple[str, ...] = ()  # created for the mount point; removed at its end

    def with_credentials(self, credentials: Credentials | None) -> "MountRequest":
        if credentials is None:
            return self
        return replace(self, user=credentials.user, key=credentials.key_text)

    @property
    def credentials(self) -> Credentials | None:
        """Raises ConfigError for a bad key."""
        return Credentials(self.user, parse_key(self.key)) if self.user else None

    def check(self) -> None:
        """Raises UsageError for bad values, and for options that exclude each other."""
        self.task_options.check()
        if self.metrics:
            parse_endpoint(self.metrics, default_host=LOOPBACK)
        for name, number in (("uid", self.uid), ("gid", self.gid)):
            if not -1 <= number <= ID_MAX:
                raise UsageError(f"no {name} is {number}: the greatest is {ID_MAX}")
        if self.memory_bytes > memory_limit_bytes():
            raise UsageError(
                f"{self.memory_bytes:,} bytes of memory are more than the"
                f" {memory_limit_bytes():,} bytes that programs may use here",
                advice="name less, or none: a mount then takes half of what is free",
            )
        if self.offline and not self.snapshot_file:
            raise UsageError(
                "--offline needs --snapshot FILE",
                advice="`dlcmd save-meta` writes the snapshot of a dataset to a file",
            )
        if self.version and (self.follow or self.snapshot_file):
            option = "--follow" if self.follow else "--snapshot"
            raise UsageError(
                f"{self.dataset}@{self.version} and {option} exclude each other",
                advice="a named version never changes: leave out one of the two",
            )
        if self.follow and (self.snapshot_file or self.offline):
            option = "--snapshot" if self.snapshot_file else "--offline"
            raise UsageError(
                f"--follow and {option} exclude each other",
                advice="leave out one: a mount that follows begins with the current version",
            )

    @property
    def metrics_endpoint(self) -> HostPort | None:
        """Without a host, only this machine can reach it. Raises ConfigError."""
        return parse_endpoint(self.metrics, default_host=LOOPBACK) if self.metrics else None

    @property
    def log_folder(self) -> str:
        """The folder for order logs (`cache/ORDER_LOG.md`); "" if the mount keeps none."""
        options = self.task_options
        return "" if options.cache_layout == "chunks" else options.cache_dir

    @property
    def forbidden_folders(self) -> Sequence[Path]:
        """The store and the cache, for `prepare_mountpoint`."""
        store = [parse_url(self.url).path] if self.url.startswith("file:") else []
        return store + [Path(self.task_options.cache_dir)] * bool(self.task_options.cache_dir)

    @property
    def owner_ids(self) -> tuple[int, int]:
        return (
            os.getuid() if self.uid < 0 else self.uid,
            os.getgid() if self.gid < 0 else self.gid,
        )
