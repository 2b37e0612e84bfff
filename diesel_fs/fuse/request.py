"""What the mount daemon is asked to do: one value that travels to it over a pipe, never in argv."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Literal

from ..credentials import Credentials, parse_key
from ..errors import UsageError
from ..settings import READ_DEADLINE_S
from ..task.request import NO_TASK, TaskOptions
from ..urls import parse_url

Policy = Literal["on-demand", "oneshot"]

REQUEST_BYTES_MAX = 65_536
"""What a pipe holds: a program that becomes its own daemon writes this to itself."""


@dataclass(frozen=True, slots=True)
class MountRequest:
    """A dataset, where to mount it, and how. Paths are absolute; 0 and "" mean: the default."""

    url: str
    dataset: str
    mountpoint: str
    snapshot_file: str = ""
    stale: str = "warn"  # refuse, warn, allow
    offline: bool = False
    version: int = 0  # one that is kept; 0: the current one
    follow: bool = False
    look_s: float = 0.0  # how often a mount that follows looks for another version
    session: str = "auto"
    memory_bytes: int = 0
    policy: Policy = "on-demand"
    seed: int = 0
    group_size: int = 0
    allow_other: bool = False
    uid: int = -1  # of whoever mounts
    gid: int = -1
    umask: int = 0
    log_file: str = ""
    read_deadline_s: float = READ_DEADLINE_S
    user: str = ""  # to a server
    key: str = field(default="", repr=False)
    joins: TaskOptions = NO_TASK

    def made_by(self, credentials: Credentials | None) -> "MountRequest":
        """The same request, of somebody whom a server knows."""
        if credentials is None:
            return self
        return replace(self, user=credentials.user, key=credentials.key_text)

    @property
    def credentials(self) -> Credentials | None:
        """Whose request it is. Raises ConfigError."""
        return Credentials(self.user, parse_key(self.key)) if self.user else None

    def to_json(self) -> bytes:
        """The request as it travels. Raises UsageError where it is too long."""
        text = json.dumps(asdict(self)).encode()
        if len(text) > REQUEST_BYTES_MAX:
            raise UsageError(f"a mount request of {len(text)} bytes (at most {REQUEST_BYTES_MAX})")
        return text

    @classmethod
    def from_json(cls, text: bytes) -> "MountRequest":
        """The request that was sent. Raises UsageError for anything else."""
        try:
            values = json.loads(text)
        except ValueError as error:
            raise UsageError(f"not a mount request: {error}") from error
        if not isinstance(values, dict) or set(values) != {each.name for each in fields(cls)}:
            raise UsageError("not a mount request: other fields than this version's")
        return cls(**{**values, "joins": TaskOptions.from_values(values["joins"])})

    def check(self) -> None:
        """Raises UsageError for what cannot be had together."""
        self.joins.check()
        if self.version and (self.follow or self.snapshot_file):
            option = "--follow" if self.follow else "--snapshot"
            raise UsageError(
                f"{self.dataset}@{self.version} and {option} exclude each other",
                advice="a version is mounted as it is",
            )
        if self.follow and (self.snapshot_file or self.offline):
            option = "--snapshot" if self.snapshot_file else "--offline"
            raise UsageError(
                f"--follow and {option} exclude each other",
                advice="a mount that follows begins with the current version",
            )

    @property
    def kept_outside(self) -> Sequence[Path]:
        """Folders that the mount must neither hide nor lie in."""
        return [parse_url(self.url).path] if self.url.startswith("file:") else []

    @property
    def owner_ids(self) -> tuple[int, int]:
        """The user and group that everything belongs to."""
        return (
            os.getuid() if self.uid < 0 else self.uid,
            os.getgid() if self.gid < 0 else self.gid,
        )
