"""What a master is asked to be: one value that travels to it over a pipe, never in argv.

Owned here: the options of a task as users give them, and the request that is made of them. Not
owned: starting a master (`launch.py`), being one (`__main__.py`). Pure values; no numpy, as a mount
is to be there at once.
"""

import difflib
import hashlib
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import index
from pathlib import Path
from typing import ClassVar, Literal, Self, SupportsIndex, TypedDict, TypeVar, get_args
from uuid import UUID

from ..credentials import Credentials, parse_key
from ..errors import ConfigError, UsageError
from ..settings import KEY_FILE_BYTES_MAX, private_text
from ..system.daemons import DaemonRequest
from .membership import TaskName

IDLE_TIMEOUT_S = 10.0
"""How long a master stays that nobody uses: workers end and begin between two epochs."""

FillPolicy = Literal["on-demand", "oneshot"]
Eviction = Literal["lru", "lfu", "none"]


class TaskKwargs(TypedDict, total=False):
    """The words of a Python call that are about a task: each as `TaskOptions` has it, and None
    for what is not said."""

    task: str | None
    task_key: str | None  # None: what the environment has
    rank: SupportsIndex | str | None  # text: as an environment has it
    world: SupportsIndex | str | None
    peers: Sequence[str] | str | None  # text: with commas between
    listen: str | None
    advertise: str | None
    cache_dir: str | os.PathLike[str] | None
    cache_bytes: SupportsIndex | None
    policy: FillPolicy | None
    evict: Eviction | None
    peer_tls: bool | None


_Kind = TypeVar("_Kind")

_POLICIES: tuple[FillPolicy, ...] = get_args(FillPolicy)
_EVICTIONS: tuple[Eviction, ...] = get_args(Eviction)
_KNOWN_KWARGS = sorted(TaskKwargs.__optional_keys__)
_WRITTEN = {"memory_bytes": "--memory", "cache_bytes": "--cache-size"}
_MAKE_A_KEY = "make one: head -c 32 /dev/urandom | base64"


def _option(name: str) -> str:
    """A field as `dlcmd` has it."""
    return _WRITTEN.get(name, "--" + name.replace("_", "-"))


@dataclass(frozen=True, slots=True)
class TaskOptions(DaemonRequest):
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

    def or_single_node(self, shared_name: str, spelled: Callable[[str], str] = _option) -> Self:
        """These; where no task is named but a folder for a cache is, a task of this machine alone,
        for all on it who mean the same `shared_name`. Raises as `check`."""
        if self.task or not self.cache_dir or self.rank is not None or self.world is not None:
            self.check(spelled)
            return self
        return replace(self, task=single_node_task(shared_name), rank=0, world=1)

    def check(self, spelled: Callable[[str], str] = _option) -> None:
        """Raises UsageError for what means nothing without a task, or cannot be had together, and
        ConfigError for a key of blanks. `spelled`: how users write a field."""
        if self.cache_bytes and not self.cache_dir:
            raise UsageError(
                "a size of a cache without its folder", advice=f"say {spelled('cache_dir')}"
            )
        if self.peers and self.world is not None and len(self.peers) < self.world:
            raise UsageError(
                f"{spelled('peers')} names {len(self.peers)} nodes, and {spelled('world')} says"
                f" {self.world}",
                advice="name all of them, in the order of their ranks",
            )
        if self.task:
            if self.task_key and not self.task_key.strip():  # no secret, and was meant as one
                raise ConfigError("the task's key is empty", advice=_MAKE_A_KEY)
            return
        default = TaskOptions()
        for each in fields(TaskOptions):
            if each.name in ("task_key", "policy"):  # of the environment; of a mount as well
                continue
            if getattr(self, each.name) != getattr(default, each.name):
                raise _needs_task_error(each.name, spelled)

    @classmethod
    def from_kwargs(
        cls, kwargs: TaskKwargs, shared_name: str, *, task_only: Mapping[str, object] | None = None
    ) -> Self:
        """The options that these words of a call mean; `shared_name`: see `or_single_node`.
        `task_only`: more of its words, which mean nothing without a task. Raises UsageError, which
        names the word, for one that is unknown or has no meaning, and as `check`."""
        reader = _KwargReader(kwargs)
        found = cls(
            task=reader.text("task"),
            task_key=reader.text("task_key", os.environ.get("DIESEL_TASK_KEY", "")),
            rank=reader.number("rank"),
            world=reader.number("world"),
            peers=reader.names("peers"),
            listen=reader.text("listen"),
            advertise=reader.text("advertise"),
            cache_dir=reader.folder("cache_dir"),
            cache_bytes=reader.number("cache_bytes", written=False) or 0,
            policy=reader.one_of("policy", _POLICIES),
            evict=reader.one_of("evict", _EVICTIONS),
            peer_tls=reader.flag("peer_tls"),
        ).or_single_node(shared_name, str)
        if not found:
            for word, value in {"task_key": reader.get("task_key"), **(task_only or {})}.items():
                if value:
                    raise _needs_task_error(word, str)
        return found


class _KwargReader:
    """The words of a call, whose values may be anything. Its methods raise UsageError, which names
    the word, and not what should be text: that may be a secret."""

    def __init__(self, words: TaskKwargs) -> None:
        self._kwargs: dict[str, object] = {**words}
        for word in self._kwargs:
            if word not in _KNOWN_KWARGS:
                near = difflib.get_close_matches(word, _KNOWN_KWARGS, 1)
                meant = f"is {near[0]} meant?" if near else f"known: {', '.join(_KNOWN_KWARGS)}"
                raise UsageError(f"unknown word {word!r}", advice=meant)

    def get(self, word: str) -> object:
        """What is said, None for nothing."""
        return self._kwargs.get(word)

    def text(self, word: str, default: str = "") -> str:
        value = self.get(word)
        if value is not None and not isinstance(value, str):
            raise _bad(word, "text", value)
        return default if value is None else value

    def number(self, word: str, *, written: bool = True) -> int | None:
        """`written`: also as text, as an environment has it."""
        value = self.get(word)
        if written and isinstance(value, str):
            if not re.fullmatch("[0-9]{1,9}", value.strip(), re.ASCII):
                raise UsageError(f"{word} is a number, not {value!r}")
            return int(value)
        return None if value is None else non_negative_int(word, value)

    def names(self, word: str) -> tuple[str, ...]:
        """Several, or one text with commas between."""
        value = self.get(word)
        if value is None:
            return ()
        if isinstance(value, str):
            return tuple(filter(None, map(str.strip, value.split(","))))
        if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray):
            raise _bad(word, "a list of HOST:PORT", value)
        for each in value:
            if not isinstance(each, str):
                raise _bad(word, "a list of HOST:PORT", each)
        return tuple(value)

    def folder(self, word: str) -> str:
        """Absolute; empty for none."""
        value = self.get(word)
        path = os.fspath(value) if isinstance(value, os.PathLike) else value
        if path is not None and not isinstance(path, str):
            raise _bad(word, "a path", path)
        return os.path.abspath(path) if path else ""

    def one_of(self, word: str, kinds: tuple[_Kind, ...]) -> _Kind:
        """The first where nothing is said."""
        value = self.get(word)
        if value is None:
            return kinds[0]
        for each in kinds:
            if each == value:
                return each
        raise UsageError(f"bad {word} {value!r}", advice=f"one of {', '.join(map(str, kinds))}")

    def flag(self, word: str) -> bool:
        value = self.get(word)
        if value is not None and not isinstance(value, bool):
            raise _bad(word, "True or False", value)
        return bool(value)


def non_negative_int(word: str, value: object) -> int:
    """The number from 0 on that a word of a call has. Raises UsageError, which names the word."""
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise _bad(word, "a whole number", value)
    try:
        found = index(value)
    except TypeError:  # an array, for one
        raise _bad(word, "a whole number", value) from None
    if found < 0:
        raise UsageError(f"{word} is a number from 0 on, not {found}")
    return found


def _bad(word: str, meant: str, value: object) -> UsageError:
    return UsageError(f"{word} is {meant}, not of type {type(value).__name__}")


def _needs_task_error(name: str, spelled: Callable[[str], str]) -> UsageError:
    return UsageError(f"{spelled(name)} is about a task", advice=f"say which, by {spelled('task')}")


NO_TASK = TaskOptions()

_MASTER_OPTIONS = {each.name for each in fields(TaskOptions)} - {"task", "task_key", "rank"}
_MASTER_OPTIONS |= {"memory_bytes"}


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
    memory_is_default: bool = False  # nobody has asked for just so much
    log_file: str = ""
    idle_timeout_s: float = IDLE_TIMEOUT_S

    @property
    def name(self) -> TaskName:
        """Which task it is: of the account at a server; without one, of the user of this machine,
        who should have the same number on all nodes. Raises UsageError."""
        return TaskName(UUID(hex=self.identity), self.user or f"uid:{os.geteuid()}", self.task)

    def differing_options(self, running: "TaskRequest") -> list[str]:
        """The options that say something else here than what a master was started with, as users
        write them; keys are not compared, as none is kept."""
        default, found = TaskRequest(memory_bytes=self.memory_bytes * self.memory_is_default), []
        for each in fields(TaskRequest):
            value = getattr(self, each.name)
            if each.name in _MASTER_OPTIONS and value not in (
                getattr(default, each.name),
                getattr(running, each.name),
            ):
                found.append(_option(each.name))
        return found

    @property
    def credentials(self) -> Credentials | None:
        """Whose request it is. Raises ConfigError."""
        return Credentials(self.user, parse_key(self.key)) if self.user else None


def single_node_task(shared_name: str) -> str:
    """The name of a task that only what is named so on this machine is in."""
    place = f"{socket.gethostname()}\0{os.geteuid()}\0{shared_name}".encode(
        errors="surrogateescape"
    )
    return f"alone-{hashlib.sha256(place).hexdigest()[:24]}"


def read_key_file(path: Path) -> str:
    """What a task's key file holds. Raises ConfigError, and PermissionDenied where others may read
    it."""
    text = private_text(path, "the task's key", KEY_FILE_BYTES_MAX)
    if not text.isascii():
        raise ConfigError(f"{path} holds no text", advice=_MAKE_A_KEY)
    if not text.strip():
        raise ConfigError(f"{path} is empty: it holds no key", advice=_MAKE_A_KEY)
    return text.strip()
