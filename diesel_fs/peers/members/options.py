"""The options of a training task, and the request that starts a master with them.

`TaskOptions` declares each option once: the options of `dlcmd mount` and the keyword arguments of
`diesel_fs.connect` and `diesel_fs.mount` come from its fields. All values are immutable. The module
imports no numpy, so that a mount starts fast.
"""

import hashlib
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, replace
from pathlib import Path
from typing import ClassVar, Literal, SupportsFloat, SupportsIndex, TypedDict, TypeVar, get_args
from uuid import UUID

from ...arguments import check_words, flag, number, text, whole_number, wrong_type
from ...cache.disk.rule import COOL_DOWN_S, LRFU_P, LRFU_STEP, EvictionRule
from ...credentials import Credentials, parse_key
from ...errors import ConfigError, UsageError
from ...names import cut
from ...settings import KEY_FILE_BYTES_MAX, private_text
from ...system.daemons import DaemonRequest
from .membership import TaskName

IDLE_TIMEOUT_S = 10.0
"""How long a master stays without clients: between two epochs, workers end and new ones start."""

FillPolicy = Literal["on-demand", "oneshot"]

Eviction = Literal["plan", "importance", "lrfu", "lru", "lfu", "none"]
"""How a full cache chooses victims (`cache/policies/eviction.py`)."""


def chunk_policy(evict: str) -> str:
    """The eviction policy for caches of chunks, if the user chose `evict`. The files of one chunk
    differ in importance, so only caches of files evict by it. `lrfu` decides only between datasets
    (`cache/policies/lrfu.py`)."""
    return "plan" if evict in ("importance", "lrfu") else evict


CacheLayout = Literal["auto", "chunks", "order"]
"""What a mount's cache folder keeps: chunks, or order logs (`cache/ORDER_LOG.md`)."""


class TaskKwargs(TypedDict, total=False):
    """The fields of `TaskOptions` as arguments of `diesel_fs.connect` and `diesel_fs.mount`. None:
    not given."""

    task: str | None
    task_key: str | None  # None: DIESEL_TASK_KEY
    rank: SupportsIndex | str | None  # text: digits, as in an environment variable
    world: SupportsIndex | str | None  # as `rank`
    peers: Sequence[str] | str | None  # text: separated by commas
    listen: str | None
    advertise: str | None
    cache_dir: str | os.PathLike[str] | None
    cache_bytes: SupportsIndex | None
    cache_layout: CacheLayout | None
    order_log_below: SupportsIndex | None
    policy: FillPolicy | None
    evict: Eviction | None
    cool_down_s: SupportsIndex | None
    lrfu_p: SupportsFloat | None
    lrfu_step: SupportsFloat | None
    peer_tls: bool | None
    peers_through_master: bool | None


OptionKind = Literal[
    "text", "count", "addresses", "folder", "size", "time", "number", "choice", "flag"
]
"""A count may also be text, from an environment variable; addresses are a list, or text with
commas; a size is in bytes, a time in whole seconds."""


@dataclass(frozen=True, slots=True)
class OptionSpec:
    """How an option is shown and checked. Without `help` it is no option of `dlcmd mount`."""

    kind: OptionKind
    metavar: str | None
    help: str
    low: int
    high: int | None
    """`low` and `high` are the bounds of a number; `high` None: without end."""
    choices: tuple[str, ...]


_Kind = TypeVar("_Kind")

_POLICIES: tuple[FillPolicy, ...] = get_args(FillPolicy)
_EVICTIONS: tuple[Eviction, ...] = get_args(Eviction)
_LAYOUTS: tuple[CacheLayout, ...] = get_args(CacheLayout)
_CLI_NAMES = {
    "memory_bytes": "--memory",
    "cache_bytes": "--cache-size",
    "cool_down_s": "--cool-down",
}
_MAKE_A_KEY = "make one: head -c 32 /dev/urandom | base64"


def cli_name(name: str) -> str:
    return _CLI_NAMES.get(name, "--" + name.replace("_", "-"))


def _option(
    default: _Kind, kind: OptionKind, metavar: str | None = None, help_text: str = "",
    *, low: int = 0, high: int | None = None, choices: tuple[str, ...] = (),
    is_secret: bool = False,
) -> _Kind:  # fmt: skip
    spec = OptionSpec(kind, metavar, help_text, low, high, choices)
    made: _Kind = field(default=default, repr=not is_secret, metadata={"option": spec})
    return made


@dataclass(frozen=True, slots=True)
class TaskOptions(DaemonRequest):
    """The options of a task, and of this node in it. "", 0, None and () mean: not given."""

    BYTES_MAX: ClassVar[int] = 256 << 10
    """Some thousand peers and a key fit in."""

    task: str = _option(
        "", "text", "NAME", "Read through the cache that the nodes of this training task share."
    )
    task_key: str = _option("", "text", is_secret=True)  # the key file's content
    rank: int | None = _option(
        None, "count", "N", "Which of the task's nodes this one is, from 0 on.  [default: as SLURM"
        " or torchrun say]",
    )  # fmt: skip
    world: int | None = _option(
        None, "count", "N", "How many nodes the task has.  [default: as SLURM or torchrun say,"
        " else 1]", low=1,
    )  # fmt: skip
    peers: tuple[str, ...] = _option(
        (), "addresses", "HOST:PORT,...", "Where all nodes listen, in the order of their ranks;"
        " needed where there is no Redis.",
    )  # fmt: skip
    listen: str = _option(
        "", "text", "HOST:PORT", "Where this node listens for the others.  [default: its address in"
        " --peers, else the address by which this machine reaches the server or Redis]",
    )  # fmt: skip
    advertise: str = _option(
        "", "text", "HOST[:PORT]", "The address that the other nodes are given for this one, if not"
        " that of --listen.",
    )  # fmt: skip
    cache_dir: str = _option(
        "", "folder", "DIR", "Keep chunks in this folder, too, also for the next job: when the task"
        " ends, the chunks in memory are written there. Without --task it is a cache of this node"
        " alone.",
    )  # fmt: skip
    cache_bytes: int = _option(
        0, "size", None, "How large --cache-dir may get.  [default: half of the free space there"
        " and of what it already holds]",
    )  # fmt: skip
    cache_layout: str = _option(
        "auto", "choice", None, "What --cache-dir keeps. `chunks`: whole chunks of the dataset."
        " `order`: files in the order in which the training job will read them, which a local disk"
        " reads several times as fast where files are small; only a job that announces its orders"
        " profits (`dlcmd run`). `auto`: chunks, until such a job reads small files of a dataset"
        " that is larger than the memory.", choices=_LAYOUTS,
    )  # fmt: skip
    order_log_below: int = _option(
        0, "size", None, "Which files `--cache-layout auto` takes for small: those below this size,"
        " on average.  [default: as the speed of the disk of --cache-dir says, which is measured at"
        " its first use]",
    )  # fmt: skip
    policy: FillPolicy = _option(  # noqa: RUF009  # `_option` makes a field
        "on-demand", "choice", None, "Load chunks into memory when they are first read, or all from"
        " the start.", choices=_POLICIES,
    )  # fmt: skip
    evict: str = _option(
        "plan", "choice", None, "Eviction policy of the task's cache when it is full: plan evicts"
        " what is read again last, where the task's mounts know what will be read, and else does as"
        " lru, which evicts what was not read for the longest time; lfu evicts what was read least"
        " often; none keeps what came first. importance is plan, and a mount also keeps the files"
        " that training says are the most important (ImportanceSampler); it needs no task. lrfu is"
        " plan, and where other jobs fill the same --cache-dir, it first evicts the datasets that"
        " the fewest and oldest jobs have used; what a running job uses stays, with each policy."
        "  [default: plan]", choices=_EVICTIONS,
    )  # fmt: skip
    cool_down_s: int = _option(
        COOL_DOWN_S, "time", "TIME", "When this job needs room in --cache-dir, it leaves the"
        " datasets that were used within this time, although no job uses them now: 0, 90m, 24h."
        "  [default: 10m]",
    )  # fmt: skip
    lrfu_p: float = _option(
        LRFU_P, "number", "P", "With --evict lrfu: after h hours, a use of a dataset counts"
        " 1/P^(STEP*h), P from 1 on.  [default: 2]", low=1,
    )  # fmt: skip
    lrfu_step: float = _option(
        LRFU_STEP, "number", "STEP", "See --lrfu-p; from 0, with which the number of uses decides,"
        " to 1, with which the last use does.  [default: 1/24: half as much after a day]", high=1,
    )  # fmt: skip
    peer_tls: bool = _option(
        False, "flag", None, "Encrypt what the nodes of the task send each other."
    )
    peers_through_master: bool = _option(
        False, "flag", None, "Have this node's master ask the other nodes, where its readers cannot"
        " reach them themselves.",
    )  # fmt: skip

    def __bool__(self) -> bool:
        return bool(self.task)

    @property
    def eviction_rule(self) -> EvictionRule:
        """Which datasets this node evicts from its cache folder."""
        return EvictionRule(self.cool_down_s, self.evict == "lrfu", self.lrfu_p, self.lrfu_step)

    def or_single_node(
        self, shared_name: str, spelled: Callable[[str], str] = cli_name
    ) -> "TaskOptions":
        """If these options name a cache folder and no task, make them those of a task of one node,
        which all callers on this machine with this `shared_name` join. Raises as `check`."""
        is_alone = self.rank is None and self.world is None
        if self.task or not self.cache_dir or not is_alone or self.cache_layout == "order":
            self.check(spelled)
            return self
        return replace(self, task=single_node_task(shared_name), rank=0, world=1)

    def check(self, spelled: Callable[[str], str] = cli_name) -> None:
        """Raise UsageError if options contradict each other, or need a task and none is named;
        ConfigError if the key is blank. `spelled` gives a field's name as the user writes it."""
        if self.cache_bytes and not self.cache_dir:
            raise UsageError(
                "a size of a cache without its folder", advice=f"say {spelled('cache_dir')}"
            )
        if self.cache_layout != "auto" and not self.cache_dir:
            raise UsageError(
                "a layout of a cache without its folder", advice=f"say {spelled('cache_dir')}"
            )
        if self.order_log_below and not (self.cache_dir and self.cache_layout == "auto"):
            raise UsageError(
                f"{spelled('order_log_below')} is of use only for a cache folder with the layout"
                " auto",
                advice="leave it out" if self.cache_dir else f"say {spelled('cache_dir')}",
            )
        if self.evict == "lrfu" and not self.cache_dir:
            raise UsageError(
                f"{spelled('evict')} lrfu chooses what stays in a cache folder, and none is named",
                advice=f"say {spelled('cache_dir')}",
            )
        if self.cool_down_s != COOL_DOWN_S and not self.cache_dir:
            raise UsageError(
                f"{spelled('cool_down_s')} is about a cache folder, and none is named",
                advice=f"say {spelled('cache_dir')}",
            )
        for name, value, default_value in (
            ("lrfu_p", self.lrfu_p, LRFU_P),
            ("lrfu_step", self.lrfu_step, LRFU_STEP),
        ):
            if value != default_value and self.evict != "lrfu":
                raise UsageError(
                    f"{spelled(name)} is about {spelled('evict')} lrfu",
                    advice=f"say {spelled('evict')} lrfu, or leave it out",
                )
        if self.peers and self.world is not None and len(self.peers) < self.world:
            raise UsageError(
                f"{spelled('peers')} names {len(self.peers)} nodes, and {spelled('world')} says"
                f" {self.world}",
                advice="name all of them, in the order of their ranks",
            )
        if self.task:
            if self.task_key and not self.task_key.strip():  # the user meant to give a secret
                raise ConfigError("the task's key is empty", advice=_MAKE_A_KEY)
            return
        default = TaskOptions()
        # The key may come from the environment; a mount without a task has a policy
        free = {"task_key", "policy"}
        if self.cache_layout == "order":
            free |= {"cache_dir", "cache_bytes", "cache_layout", "cool_down_s"}
        # importance is about the mount's own memory, lrfu about the cache folder
        if self.evict in ("importance", "lrfu"):
            free |= {"evict", "lrfu_p", "lrfu_step"}
        for each in fields(TaskOptions):
            is_free = each.name in free
            if not is_free and getattr(self, each.name) != getattr(default, each.name):
                raise _needs_task_error(each.name, spelled)

    @classmethod
    def from_kwargs(
        cls,
        kwargs: TaskKwargs,
        shared_name: str,
        *,
        words: Sequence[str] = (),
        task_only: Mapping[str, object] | None = None,
        spelled: Callable[[str], str] = str,
    ) -> "TaskOptions":
        """The options in the keyword arguments of a call of the library.

        `shared_name`, `spelled`: see `or_single_node` and `check`. `words`, the names of the call's
        other arguments, are for messages; `task_only` are those that need a task. Raises UsageError
        that names the unknown or bad argument, and as `check`."""
        given: dict[str, object] = {**kwargs}
        check_words(given, [*words, *sorted(TaskKwargs.__optional_keys__)])
        task = given.get("task")
        if isinstance(task, str) and not task:  # an unset variable of a script, perhaps
            raise UsageError("the task's name is empty", advice="leave it out to use no task")
        values = {each.name: _checked_value(each, given.get(each.name)) for each in fields(cls)}
        options = TaskOptions.from_values(values).or_single_node(shared_name, spelled)
        if not options:
            for word, value in {"task_key": given.get("task_key"), **(task_only or {})}.items():
                if value:
                    raise _needs_task_error(word, spelled)
        return options


def option_specs() -> dict[str, OptionSpec]:
    return {each.name: each.metadata["option"] for each in fields(TaskOptions)}


def _checked_value(option: "Field[object]", value: object) -> object:
    """Raises UsageError that names the argument, but never quotes one of the kind text, which may
    be secret."""
    word, spec = option.name, option.metadata["option"]
    match spec.kind:
        case "text":
            if value is None:
                return os.environ.get("DIESEL_TASK_KEY", "") if word == "task_key" else ""
            return text(word, value)
        case "count" if isinstance(value, str):
            if not re.fullmatch("[0-9]{1,9}", value.strip(), re.ASCII):
                raise UsageError(f"{word} is a number, not {value!r}")
            return int(value)
        case "count" | "size" | "time" | "number" if value is None:
            return option.default
        case "count" | "size" | "time":
            return whole_number(word, value)
        case "number":
            return number(word, value, spec.low, spec.high)
        case "addresses":
            return _addresses(word, value)
        case "folder":
            path = os.fspath(value) if isinstance(value, os.PathLike) else value
            if path is None or isinstance(path, str):
                return os.path.abspath(path) if path else ""
            raise wrong_type(word, "a path", path)
        case "choice":
            for each in spec.choices:
                if value is None or (isinstance(value, str) and each == value):
                    return each  # the first is the default
            bad = repr(cut(value)) if isinstance(value, str) else f"of type {type(value).__name__}"
            raise UsageError(f"bad {word} {bad}", advice=f"one of {', '.join(spec.choices)}")
    return value is not None and flag(word, value)


def _addresses(word: str, value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return tuple(filter(None, map(str.strip, value.split(","))))
    if value is None:
        return ()
    if not isinstance(value, Sequence) or isinstance(value, bytes | bytearray):
        raise wrong_type(word, "a list of HOST:PORT", value)
    for each in value:
        if not isinstance(each, str):
            raise wrong_type(word, "a list of HOST:PORT", each)
    return tuple(value)


def _needs_task_error(name: str, spelled: Callable[[str], str]) -> UsageError:
    return UsageError(f"{spelled(name)} is about a task", advice=f"say which, by {spelled('task')}")


NO_TASK = TaskOptions()

_MASTER_OPTIONS = {each.name for each in fields(TaskOptions)} - {"task", "task_key", "rank"}
_MASTER_OPTIONS |= {"memory_bytes"}


@dataclass(frozen=True, slots=True)
class TaskRequest(TaskOptions):
    """All that a master needs to start. It is sent over a pipe, as other users can read the
    arguments of a program."""

    url: str = ""
    user: str = ""
    key: str = field(default="", repr=False)
    dataset: str = ""
    identity: str = ""  # the dataset's, hexadecimal
    version: int = 0
    memory_bytes: int = 0
    memory_is_default: bool = False  # not given by the user
    log_file: str = ""
    idle_timeout_s: float = IDLE_TIMEOUT_S

    @property
    def name(self) -> TaskName:
        """Without an account at a server, the user's number, which must be the same on all nodes,
        is part of the name. Raises UsageError."""
        return TaskName(UUID(hex=self.identity), self.user or f"uid:{os.geteuid()}", self.task)

    def differing_options(self, running: "TaskRequest") -> list[str]:
        """The options, as users write them, that this request gives and the running master has
        otherwise. Defaults do not count, nor do keys, which are not saved."""
        default = TaskRequest(memory_bytes=self.memory_bytes * self.memory_is_default)
        return [
            cli_name(name)
            for name in (each.name for each in fields(TaskRequest))
            if name in _MASTER_OPTIONS
            and getattr(self, name) not in (getattr(default, name), getattr(running, name))
        ]

    def asks_for_the_same(self, running: "TaskRequest") -> bool:
        """Whether a master with the request `running` does all that this one asks for. Unlike in
        `differing_options`, defaults count, too."""
        computed = self.memory_is_default and running.memory_is_default
        return all(
            getattr(self, name) == getattr(running, name)
            or (name == "memory_bytes" and computed)
            or (name == "world" and self.world is None)
            for name in _MASTER_OPTIONS
        )

    @property
    def credentials(self) -> Credentials | None:
        """Raises ConfigError for a malformed key."""
        return Credentials(self.user, parse_key(self.key)) if self.user else None


SINGLE_NODE_PREFIX = "alone-"
"""Begins the name of a task that no user has named."""


def single_node_task(shared_name: str) -> str:
    """The task that this user's processes on this machine with this `shared_name` join."""
    text = f"{socket.gethostname()}\0{os.geteuid()}\0{shared_name}"
    digest = hashlib.sha256(text.encode(errors="surrogateescape"))
    return f"{SINGLE_NODE_PREFIX}{digest.hexdigest()[:24]}"


def read_key_file(path: Path) -> str:
    """Raises ConfigError, and PermissionDenied if other users may read the file."""
    text = private_text(path, "the task's key", KEY_FILE_BYTES_MAX)
    if not text.isascii():
        raise ConfigError(f"{path} is not ASCII text", advice=_MAKE_A_KEY)
    if not text.strip():
        raise ConfigError(f"{path} is empty: it holds no key", advice=_MAKE_A_KEY)
    return text.strip()
