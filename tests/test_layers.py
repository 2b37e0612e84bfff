"""The layers of the design, checked over the syntax trees: arrows point only downwards.

The table below is the authority. A module may import every unit of a lower layer, and of its own
layer those that stand after its name. `x/` is a package, whose modules may import each other;
`diesel_fs` is the public surface, the package's own `__init__`. A module that the table does not
know fails the test: say where it belongs before it is written. Imports count wherever they stand,
inside functions and under TYPE_CHECKING too.
"""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

TABLE = """
L0  errors
L0  credentials: errors
L0  urls: errors
L0  settings: errors credentials urls
L0  metrics: errors
L0  available_memory
L0  mountinfo
L0  whole_files: errors
L0  daemons: errors whole_files

L1  cache
L1  cache.policy
L1  cache.ownership
L1  names
L1  entries: names
L1  chunk_id: entries
L1  chunk: entries chunk_id
L1  chunk_builder: entries chunk_id chunk
L1  layout: entries chunk_id
L1  snapshot_layout: entries chunk_id chunk
L1  snapshot: entries chunk_id snapshot_layout
L1  snapshot_plan: entries chunk_id snapshot snapshot_layout
L1  tally: entries chunk_id snapshot_layout
L1  snapshot_merge: entries chunk_id chunk snapshot snapshot_layout snapshot_plan tally
L1  snapshot_match: entries snapshot snapshot_layout
L1  plans: entries snapshot
L1  shuffle: entries snapshot
L1  order_lists: entries snapshot shuffle
L1  messages: names
L1  accounts: names
L1  control_wire: entries messages plans shuffle snapshot
L1  greeting: names
L1  wire: greeting messages
L1  task
L1  task.membership: names
L1  task.rent
L1  task.breaker
L1  task.wire: names
L1  task.hello: greeting messages task.membership task.wire wire
L1  task.registration: messages task.membership

L2  storage/
L2  storage.cloud_requests: storage/
L2  storage.cloud: storage/ storage.cloud_requests
L2  storage.cloud_helper: storage/ storage.cloud
L2  keys
L2  rpc_connection: storage/ keys
L2  rpc: storage/ keys rpc_connection
L2  task.request
L2  task.mapped
L2  task.client_connection: task.mapped
L2  task.link: task.client_connection task.mapped
L2  task.addresses: storage/ rpc_connection
L2  task.launch: task.addresses task.client_connection task.request
L2  task.tls
L2  task.channel
L2  task.handshake: task.channel task.tls
L2  task.peer: task.channel task.handshake
L2  task.acceptor: task.channel task.handshake task.tls

L3  stores
L3  clouds: stores
L3  administration: stores
L3  leases
L3  snapshots: leases
L3  pins: leases snapshots
L3  snapshot_pieces
L3  catalogue
L3  commits
L3  folding: snapshots commits leases
L3  repository: snapshots catalogue commits stores leases pins folding
L3  wire_values: catalogue snapshots
L3  remote_objects: wire_values
L3  remote: repository snapshots snapshot_pieces catalogue commits pins wire_values remote_objects
L3  repositories: repository remote
L3  addressing: repository
L3  reopening: repository repositories snapshots
L3  recovery: repository snapshots catalogue commits folding pins
L3  tombstones: commits leases
L3  rewriting: repository commits
L3  housekeeping: repository snapshots catalogue leases pins tombstones rewriting folding
L3  cache.followed
L3  cache.chunks: cache.followed
L3  cache.store: cache.chunks cache.followed
L3  cache.content_file: cache.store
L3  cache.extents
L3  cache.budget
L3  cache.shelves
L3  cache.trouble
L3  cache.disk_shelf: cache.shelves cache.trouble
L3  cache.tier: cache.budget cache.shelves
L3  cache.merged_reads: cache.budget cache.shelves cache.tier wire_values
L3  task.memory
L3  task.lending: task.memory
L3  task.spill: cache.disk_shelf cache.shelves task.memory
L3  task.chunk_memory: task.lending task.memory
L3  task.client: repository snapshots
L3  task.registry: repository remote stores

L4  task.holdings
L4  task.master: task.holdings
L4  task.local: task.master
L4  task.daemon: task.holdings task.local task.master
L4  task.__main__: task.daemon
L4  writer/
L4  client: writer/
L4  differences: writer/
L4  extract
L4  control
L4  nodes
L4  hidden: nodes
L4  vfs: hidden nodes
L4  following: vfs hidden nodes

L5  fuse/
L5  torch/
L5  diesel_fs: fuse/ torch/

L6  diesel_server/
L6  dlcmd/
"""

TREE = Path(__file__).resolve().parents[1]
SOURCES = {"diesel_fs": TREE, "diesel_server": TREE / "server", "dlcmd": TREE / "cli"}

# What the pure layer may import from outside: values and computation. What reads a clock, a file, a
# socket, the environment or chance belongs into layer 2, or is handed in by the caller.
PURE_LAYER = 1
PURE = frozenset(
    "__future__ abc array base64 binascii bisect collections contextlib dataclasses enum errno"
    " functools hashlib heapq hmac itertools json math operator re stat string struct sys threading"
    " types typing _typeshed unicodedata uuid zlib lz4 msgpack numpy xxhash".split()
)
IMPURE_CALLS = frozenset(
    "open print input np.fromfile np.load np.memmap np.save uuid.uuid1 uuid.uuid4 uuid1"
    " uuid4".split()
)
# Its runtime hangs in a forked child, and users' training processes fork. The first three are what
# programs reach it through: whoever imports them is one.
OBSTORE_UNITS = frozenset(
    {
        *("storage.cloud", "storage.cloud_requests", "storage.cloud_helper", "clouds"),
        *("dlcmd/", "diesel_server/", "fuse/", "task.daemon"),
    }
)


@dataclass(frozen=True, slots=True)
class Unit:
    """One line of the table."""

    name: str
    layer: int
    beside: frozenset[str]


def parse_table(table: str) -> dict[str, Unit]:
    """The units by name; only what stands in the same layer counts as beside."""
    units: dict[str, Unit] = {}
    for line in filter(None, map(str.strip, table.splitlines())):
        layer, rest = line.split(maxsplit=1)
        name, _, beside = rest.partition(":")
        units[name] = Unit(name, int(layer[1:]), frozenset(beside.split()))
    return units


UNITS = parse_table(TABLE)


def unit_of(module: str, units: Mapping[str, Unit] = UNITS) -> Unit | None:
    """The unit of a module (`diesel_fs.cache.policy`): the exact one, or the package's."""
    name = module.removeprefix("diesel_fs.")
    return units.get(name) or units.get(name.split(".")[0] + "/")


def modules() -> dict[str, Path]:
    """All modules of the three packages, by dotted name."""
    found = {}
    for package, root in SOURCES.items():
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(source: str, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported; `from x import y` gives `x.y`."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.ImportFrom(module=origin, names=names, level=level):
                here = module.split(".")
                parents = here[: len(here) - level + is_package] if level else []
                start = ".".join([*parents, *filter(None, [origin])])
                yield from ((node.lineno, f"{start}.{alias.name}") for alias in names)
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]) if ast.unparse(
                function
            ) in ("import_module", "importlib.import_module", "__import__"):
                yield node.lineno, module.split(".")[0] + name if name[0] == "." else name


def owner(name: str, known: frozenset[str]) -> str | None:
    """The module of ours that an imported name is, or lies in; None for other people's."""
    while name:
        if name in known:
            return name
        name = name.rpartition(".")[0]
    return None


def breaches(
    source: str,
    module: str,
    *,
    is_package: bool = False,
    known: frozenset[str],
    units: Mapping[str, Unit] = UNITS,
) -> list[str]:
    """What in this source the table does not allow, one line each."""
    me = unit_of(module, units)
    if me is None:
        return [f"{module}: not in the table"]
    found = []
    for line, name in imports(source, module, is_package=is_package):
        where = f"{module}:{line}: imports {name}"
        target = owner(name, known)
        if target is not None:
            other = unit_of(target, units)
            if other is None:
                found.append(f"{where}, which is not in the table")
            elif other.layer > me.layer:
                found.append(f"{where}, upwards from L{me.layer} to L{other.layer}")
            elif other.layer == me.layer and other is not me and other.name not in me.beside:
                found.append(f"{where}, beside it in L{me.layer}, and the table does not say so")
            elif (
                other.name == "clouds" or other.name.startswith("storage.cloud")
            ) and me.name not in OBSTORE_UNITS:
                found.append(f"{where}, which brings obstore, and only programs may")
        elif me.layer == PURE_LAYER and name.split(".")[0] not in PURE:
            found.append(f"{where}, and L{PURE_LAYER} is pure")
        elif name.split(".")[0] == "obstore" and me.name not in OBSTORE_UNITS:
            found.append(f"{where}, whose runtime hangs in forked children of users' processes")
    if me.layer == PURE_LAYER:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in IMPURE_CALLS:
                call = ast.unparse(node.func)
                found.append(f"{module}:{node.lineno}: calls {call}, and L{PURE_LAYER} is pure")
    return found


ALL = modules()


@pytest.mark.parametrize("module", sorted(ALL))
def test_arrows_point_downwards(module: str) -> None:
    path = ALL[module]
    found = breaches(
        path.read_text(encoding="utf-8"),
        module,
        is_package=path.name == "__init__.py",
        known=frozenset(ALL),
    )
    assert not found, "\n".join(found)


def test_the_table_holds_together() -> None:
    """Each unit has a module. Who stands beside one is of the same layer, and no two import each
    other."""
    owners = {unit.name for unit in map(unit_of, ALL) if unit is not None}
    assert sorted(UNITS.keys() - owners) == []
    for unit in UNITS.values():
        for name in unit.beside:
            assert UNITS[name].layer == unit.layer, (unit.name, name)
            assert unit.name not in UNITS[name].beside, (unit.name, name)


MADE_UP = frozenset(
    "diesel_fs diesel_fs.errors diesel_fs.entries diesel_fs.chunk diesel_fs.cache diesel_fs.client"
    " diesel_fs.cache.policy diesel_fs.cache.store diesel_fs.storage diesel_fs.storage.folder"
    " diesel_fs.storage.objects diesel_fs.storage.cloud diesel_fs.stray diesel_fs.writer"
    " diesel_fs.vfs dlcmd dlcmd.main diesel_server".split()
)


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("diesel_fs.chunk", "from .client import connect", "upwards"),
        ("diesel_fs.chunk", "from . import client", "upwards"),
        ("diesel_fs.chunk", "import diesel_fs.client as x", "upwards"),
        ("diesel_fs.chunk", "from diesel_fs import __version__", "upwards"),
        ("diesel_fs.chunk", "def f():\n    from .client import connect", "upwards"),
        ("diesel_fs.chunk", "if TYPE_CHECKING:\n    from .client import Dataset", "upwards"),
        ("diesel_fs.chunk", "importlib.import_module('diesel_fs.client')", "upwards"),
        ("diesel_fs.chunk", "from .cache.store import Store", "upwards"),
        ("diesel_fs.chunk", "from .gone import x", "upwards"),  # a name of the public surface
        ("diesel_fs.chunk", "import os", "pure"),
        ("diesel_fs.chunk", "import socket.x", "pure"),
        ("diesel_fs.chunk", "from sqlite3 import connect", "pure"),
        ("diesel_fs.chunk", "x = open(path)", "pure"),
        ("diesel_fs.entries", "from .chunk import Chunk", "beside"),
        ("diesel_fs.vfs", "from .writer import put", "beside"),
        ("diesel_fs.vfs", "import obstore", "obstore"),
        ("diesel_fs.storage.folder", "import obstore", "obstore"),
        ("diesel_fs.client", "from .storage.cloud import open_cloud", "obstore"),
        ("diesel_fs.client", "from dlcmd.main import main", "upwards"),
        ("diesel_server", "from dlcmd import main", "beside"),
        ("diesel_fs.client", "from .stray import x", "not in the table"),
        ("diesel_fs.stray", "", "not in the table"),
        ("diesel_fs.cache.stray", "", "not in the table"),
    ],
)
def test_a_breach_is_found(module: str, source: str, complaint: str) -> None:
    found = breaches(source, module, known=MADE_UP)
    assert len(found) == 1
    assert complaint in found[0]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("diesel_fs.chunk", "import struct\nfrom .entries import Entry\nfrom .errors import X"),
        ("diesel_fs.storage.folder", "import os\nfrom .objects import ObjectStore"),
        ("diesel_fs.cache.store", "from .policy import Policy\nfrom ..chunk import read"),
        ("diesel_fs.client", "from .writer import put"),
        ("dlcmd.main", "import obstore\nimport diesel_fs\nfrom diesel_fs.client import connect"),
        ("dlcmd.main", "from diesel_fs.storage.cloud import open_cloud"),
    ],
)
def test_what_is_allowed_passes(module: str, source: str) -> None:
    assert breaches(source, module, known=MADE_UP) == []


def test_a_package_resolves_its_own_relative_imports() -> None:
    found = breaches("from .store import Store", "diesel_fs.cache", is_package=True, known=MADE_UP)
    assert ["upwards" in line for line in found] == [True]
