"""What a worker is told by its parent when it begins, and what it tells when it has.

Owned here: the bytes between the two. Not owned: what either does (`supervisor.py`, `worker.py`).

    parent to worker, on its standard input     one line of JSON, the task; then nothing, until the
                                                end of the parent ends it
    worker to parent, on a descriptor           one line of JSON: {} (it accepts), or an error

URLs hold passwords, and so do some variables of the environment: they come this way, since
everybody on the machine can read a command line, and whatever the worker starts inherits its
environment.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import BinaryIO

CONFIG_BYTES_MAX = 1 << 20

_SECRET_PREFIXES = ("DIESEL_", "AWS_", "AZURE_", "GOOGLE_", "REDIS")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """What a worker is to do. Descriptors are those that it inherits; empty paths are none."""

    url: str = field(repr=False)
    slot: int
    is_first: bool  # nobody has served before: what is wrong is the operator's to know
    sockets: Sequence[int]
    cells: int
    workers: int
    status: int
    certificate: str
    key: str
    cache: str
    cache_bytes: int
    environment: Mapping[str, str] = field(repr=False)


def split_environment(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """What a worker inherits, and what it is told."""
    told = {name: value for name, value in environment.items() if name.startswith(_SECRET_PREFIXES)}
    return {name: value for name, value in environment.items() if name not in told}, told


def config_line(task: WorkerConfig) -> bytes:
    """A task as it is sent."""
    return json.dumps(asdict(task)).encode() + b"\n"


def read_config(pipe: BinaryIO) -> WorkerConfig:
    """The task that a parent sends. Raises EOFError where it has gone."""
    line = pipe.readline(CONFIG_BYTES_MAX)
    if not line.endswith(b"\n"):
        raise EOFError
    return WorkerConfig(**json.loads(line))
