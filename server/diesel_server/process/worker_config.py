"""The config that the supervisor sends to a worker at its start, and the worker's report.

    supervisor to worker, on its standard input     one line of JSON, the `WorkerConfig`; then
                                                    nothing, until the supervisor ends
    worker to supervisor, on a file descriptor      one line of JSON: {} (it accepts connections),
                                                    or an error

URLs and some environment variables hold passwords. They go over the pipe, since every user of the
machine can read a command line, and a worker's child processes inherit its environment.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import BinaryIO

CONFIG_BYTES_MAX = 1 << 20

_SECRET_PREFIXES = ("DIESEL_", "AWS_", "AZURE_", "GOOGLE_", "REDIS")


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """`certificate`, `key` and `cache` are paths; "" means none."""

    url: str = field(repr=False)
    slot: int  # the worker's number, from 0
    is_first: bool  # the server is starting: an error of the worker ends the server
    sockets: Sequence[int]  # descriptors of the listening sockets
    cells: int  # descriptor of the shared memory of the metrics
    workers: int  # number of all workers
    status: int  # descriptor for the report
    certificate: str
    key: str
    cache: str
    cache_bytes: int
    environment: Mapping[str, str] = field(repr=False)  # variables that may hold secrets


def split_environment(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Returns the variables that a worker inherits, and the possibly secret ones for its config."""
    secret = {
        name: value for name, value in environment.items() if name.startswith(_SECRET_PREFIXES)
    }
    return {name: value for name, value in environment.items() if name not in secret}, secret


def config_line(config: WorkerConfig) -> bytes:
    return json.dumps(asdict(config)).encode() + b"\n"


def read_config(pipe: BinaryIO) -> WorkerConfig:
    """Raises EOFError if the supervisor has ended."""
    line = pipe.readline(CONFIG_BYTES_MAX)
    if not line.endswith(b"\n"):
        raise EOFError
    return WorkerConfig(**json.loads(line))
