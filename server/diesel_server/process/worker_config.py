"""The config that the supervisor sends to a worker at its start, and the worker's report.

    supervisor to worker, on its standard input     one line of JSON, the `WorkerConfig`; then
                                                    nothing, until the supervisor ends
    worker to supervisor, on a file descriptor      one line of JSON: {} (it accepts connections),
                                                    or an error

URLs hold passwords, and so do some environment variables. They are passed in this way because every
user of the machine can read a command line, and every process that the worker starts inherits its
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
    """The configuration of one worker. An empty path means that there is none."""

    url: str = field(repr=False)
    slot: int  # its number among the workers
    is_first: bool  # the server starts: an error of the worker ends all of it
    sockets: Sequence[int]  # file descriptors that listen
    cells: int  # file descriptor of the shared memory of the metrics
    workers: int
    status: int  # file descriptor of the report to the supervisor
    certificate: str
    key: str
    cache: str
    cache_bytes: int
    environment: Mapping[str, str] = field(repr=False)  # variables that may hold secrets


def split_environment(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The variables that a worker inherits, and those that its config carries."""
    told = {name: value for name, value in environment.items() if name.startswith(_SECRET_PREFIXES)}
    return {name: value for name, value in environment.items() if name not in told}, told


def config_line(config: WorkerConfig) -> bytes:
    """A config as the line that is sent."""
    return json.dumps(asdict(config)).encode() + b"\n"


def read_config(pipe: BinaryIO) -> WorkerConfig:
    """The config that the supervisor sends. Raises EOFError if the supervisor has ended."""
    line = pipe.readline(CONFIG_BYTES_MAX)
    if not line.endswith(b"\n"):
        raise EOFError
    return WorkerConfig(**json.loads(line))
