"""What a master is asked to be: one value that travels to it over a pipe, never in argv.

Owned here: the options of a task as users give them, and the request that is made of them. Not
owned: starting a master (`launch.py`), being one (`__main__.py`). Pure values; no numpy, as a mount
is to be there at once.
"""

import hashlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import ClassVar, Literal, Self, TypedDict
from uuid import UUID

from ..credentials import Credentials, parse_key
from ..daemons import Request
from ..errors import ConfigError, PermissionDenied, UsageError
from .membership import TaskName

KEY_BYTES_MAX = 4096

LINGER_S = 10.0
"""How long a master stays that nobody uses: workers end and begin between two epochs."""

FillPolicy = Literal["on-demand", "oneshot"]


class TaskWords(TypedDict, total=False):
    """The words of a Python call that are about a task: each as `TaskOptions` has it."""

    task: str
    task_key: str | None  # None: what the environment has
    rank: int | None
    world: int | None
    peers: Sequence[str]
    listen: str
    advertise: str
    cache_dir: str | os.PathLike[str]
    cache_bytes: int
    policy: FillPolicy
    evict: str
    peer_tls: bool


@dataclass(frozen=True, slots=True)
class TaskOptions(Request):
    """A task and this node's part in it, as users say it. "", 0, None and () mean: the default."""

    BYTES_MAX: ClassVar[int] = 256 << 10
    """Some thousand peers, and a key."""

    task: str = ""
    task_key: str = field(default="", repr=False)  # what its key file holds
    rank: int | None = None
    world: int | None = None
    peers: tuple[str, ...] = ()
    listen: str = ""
    advertise: str = ""
    cache_dir: str = ""
    cache_bytes: int = 0
    policy: FillPolicy = "on-demand"
    evict: str = "lru"
    peer_tls: bool = False

    def __bool__(self) -> bool:
        """Whether a task is wanted at all."""
        return bool(self.task)

    def or_alone(self, what: str) -> Self:
        """These; where no task is named but a folder for a cache is, a task of this machine alone,
        for all on it who mean the same `what`. Raises UsageError as `check`."""
        if self.task or not self.cache_dir or self.rank is not None or self.world is not None:
            self.check()
            return self
        return replace(self, task=own_task(what), rank=0, world=1)

    def check(self) -> None:
        """Raises UsageError for what means nothing without a task, or cannot be had together."""
        if self.cache_bytes and not self.cache_dir:
            raise UsageError("a size of a cache without its folder", advice="say --cache-dir")
        if self.peers and self.world is not None and len(self.peers) < self.world:
            raise UsageError(
                f"--peers names {len(self.peers)} nodes, and --world says {self.world}",
                advice="name all of them, in the order of their ranks",
            )
        if self.task:
            return
        default = TaskOptions()
        for each in fields(TaskOptions):
            if each.name in ("task_key", "policy"):  # of the environment; of a mount as well
                continue
            if getattr(self, each.name) != getattr(default, each.name):
                option = "--" + each.name.replace("_", "-")
                raise UsageError(f"{option} is about a task", advice="say which, by --task NAME")

    @classmethod
    def of(cls, words: "TaskWords", what: str) -> Self:
        """The options that these words of a call mean; `what`: see `or_alone`. Raises UsageError
        as `check`."""
        key, folder = words.get("task_key"), words.get("cache_dir")
        return cls(
            task=words.get("task", ""),
            task_key=os.environ.get("DIESEL_TASK_KEY", "") if key is None else key,
            rank=words.get("rank"),
            world=words.get("world"),
            peers=tuple(words.get("peers", ())),
            listen=words.get("listen", ""),
            advertise=words.get("advertise", ""),
            cache_dir=os.path.abspath(folder) if folder else "",
            cache_bytes=words.get("cache_bytes", 0),
            policy=words.get("policy", "on-demand"),
            evict=words.get("evict", "lru"),
            peer_tls=words.get("peer_tls", False),
        ).or_alone(what)


NO_TASK = TaskOptions()

_OF_MASTER = {each.name for each in fields(TaskOptions)} - {"task", "task_key", "rank"}
_OF_MASTER |= {"memory_bytes"}
_WRITTEN = {"memory_bytes": "--memory", "cache_bytes": "--cache-size"}


@dataclass(frozen=True, slots=True)
class TaskRequest(TaskOptions):
    """A master: of which task, for which version of which dataset, and how."""

    url: str = ""
    user: str = ""  # to a server
    key: str = field(default="", repr=False)
    dataset: str = ""
    identity: str = ""  # hexadecimal
    version: int = 0
    memory_bytes: int = 0
    memory_guessed: bool = False  # nobody has asked for just so much
    log_file: str = ""
    linger_s: float = LINGER_S

    @property
    def name(self) -> TaskName:
        """Which task it is: of the account at a server; without one, of the user of this machine,
        who should have the same number on all nodes. Raises UsageError."""
        return TaskName(UUID(hex=self.identity), self.user or f"uid:{os.geteuid()}", self.task)

    def unlike(self, running: "TaskRequest") -> list[str]:
        """The options that say something else here than what a master was started with, as users
        write them; keys are not compared, as none is kept."""
        default, found = TaskRequest(memory_bytes=self.memory_bytes * self.memory_guessed), []
        for each in fields(TaskRequest):
            said = getattr(self, each.name)
            if each.name in _OF_MASTER and said not in (
                getattr(default, each.name),
                getattr(running, each.name),
            ):
                found.append(_WRITTEN.get(each.name, "--" + each.name.replace("_", "-")))
        return found

    @property
    def credentials(self) -> Credentials | None:
        """Whose request it is. Raises ConfigError."""
        return Credentials(self.user, parse_key(self.key)) if self.user else None


def own_task(what: str) -> str:
    """The name of a task that only what is named so on this machine is in."""
    place = f"{socket.gethostname()}\0{os.geteuid()}\0{what}".encode(errors="surrogateescape")
    return f"alone-{hashlib.sha256(place).hexdigest()[:24]}"


def key_in(path: Path) -> str:
    """What a task's key file holds. Raises ConfigError, and PermissionDenied where others may read
    it."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise PermissionDenied(
                    f"others may read the task's key in {path}", advice=f"chmod 600 {path}"
                )
            content = file.read(KEY_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read the task's key in {path}: {error.strerror}") from error
    if len(content) > KEY_BYTES_MAX:
        raise ConfigError(f"{path} is too long for a task's key (at most {KEY_BYTES_MAX} bytes)")
    try:
        return content.decode("ascii").strip()
    except UnicodeDecodeError:
        raise ConfigError(
            f"{path} holds no text", advice="make one: head -c 32 /dev/urandom | base64"
        ) from None
