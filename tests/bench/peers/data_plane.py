"""The prototype of a task's data plane on each node (`data_plane_program.py`): its servers share
the files of a dataset, and its clients read from all of them."""

import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.peers.nodes import NodeHost, Nodes, end
from tests.server.program import until

from ..client_process import ClientProcess
from ..inputs import Shape
from ..reader import write_list

NAME = "the prototype"
PORT = 11411
PROGRAM = Path(__file__).with_name("data_plane_program.py")
_LOAD_S = 60.0


class Servers:
    """A server on each node; number R of N has each N-th file from R on."""

    def __init__(self, nodes: Nodes, shape: Shape, source: Path) -> None:
        self._nodes = nodes
        self._size = shape.file_bytes
        paths = (f"{source}/{path}" for path in shape.paths())
        self._paths = write_list(paths, nodes.folder / "prototype-paths")
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for rank, place in enumerate(self._nodes):
                server = place.start(
                    *self._words("serve", self._address(place), self._sums(rank)),
                    *(self._paths, str(rank), str(len(self._nodes))), out=subprocess.DEVNULL,
                )  # fmt: skip
                stack.callback(end, server)
            for place in self._nodes:
                until(
                    lambda place=place: any(  # type: ignore[misc]  # mypy cannot infer a lambda with defaults
                        each.port == PORT for each in place.sockets(listening=True)
                    ),
                    f"{NAME} on {place.name}", _LOAD_S,
                )  # fmt: skip
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def client(self, place: NodeHost) -> ClientProcess:
        """Start a client on a node, which ends with the servers."""
        addresses = ",".join(map(self._address, self._nodes))
        sums = ",".join(str(self._sums(rank)) for rank in range(len(self._nodes)))
        client = ClientProcess(place, *self._words("read", addresses, sums, str(self._size)))
        self._stack.callback(client.close)
        return client

    def _words(self, *words: str | Path) -> tuple[str | Path, ...]:
        return sys.executable, "-P", PROGRAM, *words

    def _address(self, place: NodeHost) -> str:
        return f"{place.address}:{PORT}"

    def _sums(self, rank: int) -> Path:
        return self._nodes.folder / f"prototype-sums-{rank}"
