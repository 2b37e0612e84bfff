"""The layers of the design, checked over the syntax trees: a folder is a layer.

One rule: a package imports only packages that stand before it in `LAYERS`, and the modules of one
package do not import each other in a circle. Imports count wherever they stand, inside functions
and under TYPE_CHECKING too. Two more rules: the modules of `PURE` compute and do no I/O, and only
the modules of `OBSTORE` may import obstore.
"""

import ast
import functools
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from .rows import each_row

LAYERS = (
    *"errors names arguments urls credentials settings metrics".split(),
    *"system format orders net storage cache repository remote peers ingest client".split(),
    *"mounts forecast torch diesel_fs diesel_server dlcmd".split(),
    "diesel_kubernetes",
)
"""From the bottom up. Training scripts import `torch`. The last four are `diesel_fs/__init__.py`
(which users import), the two programs, and the programs for Kubernetes.
"""

PROGRAMS = frozenset({"diesel_server", "dlcmd", "diesel_kubernetes"})
"""Programs do not import one another. A program may run another one."""

# These may only compute. Code that reads a clock, a file, a socket, the environment or chance lies
# elsewhere, or the caller passes the value.
PURE = (
    *"format orders net.messages net.frames net.breaker storage.accounts.account".split(),
    *"cache.policies cache.fetching.coalesce cache.fetching.flights".split(),
    *"cache.fetching.read_plan".split(),
    *"peers.members.ownership peers.members.membership peers.members.chunk_owners".split(),
    *"peers.wire peers.local_wire peers.plan.messages peers.plan.publisher".split(),
    *"peers.node.chunk_future peers.node.ledger peers.node.replacement".split(),
    *"peers.node.lookahead peers.plan.future_build".split(),
    *"mounts.plans.control_wire".split(),
    *"mounts.sessions.protocol mounts.prefetch.planner mounts.prefetch.decisions".split(),
    *"mounts.prefetch.streams mounts.prefetch.turns mounts.prefetch.balance".split(),
    *"mounts.prefetch.room mounts.prefetch.eviction mounts.prefetch.miss_fill".split(),
    *"mounts.prefetch.freed_pages mounts.prefetch.resident_set mounts.prefetch.memory".split(),
    *"mounts.prefetch.memory_split mounts.prefetch.pages.staging_area".split(),
    *"forecast torch.workers".split(),
    *"diesel_kubernetes.names diesel_kubernetes.operator.placement".split(),
    *"diesel_kubernetes.reports diesel_kubernetes.operator.holdings".split(),
    *"dlcmd.doctor.checks dlcmd.doctor.findings".split(),
)
PURE_IMPORTS = frozenset(
    "__future__ abc array base64 binascii bisect collections contextlib csv dataclasses enum errno"
    " fractions functools hashlib heapq hmac itertools json math operator re shlex stat string"
    " struct sys threading types typing _typeshed unicodedata uuid zlib lz4 msgpack numpy"
    " xxhash".split()
)
IMPURE_CALLS = frozenset(
    "open print input np.fromfile np.load np.memmap np.save uuid.uuid1 uuid.uuid4 uuid1"
    " uuid4".split()
)

# obstore's runtime hangs in a forked child, and users' training processes fork. Only the cloud
# store itself and our own programs may load it into a process.
OBSTORE_MODULES = ("storage.objects.cloud.store", "storage.objects.cloud.requests")
OBSTORE = (
    *OBSTORE_MODULES,
    *("storage.objects.cloud.proxy_process", "storage.objects.cloud.direct"),
    *("peers.master.daemon", "mounts", "dlcmd", "diesel_server"),
)

TREE = Path(__file__).resolve().parents[1]
SOURCES = {
    "diesel_fs": TREE,
    "diesel_server": TREE / "server",
    "dlcmd": TREE / "cli",
    "diesel_kubernetes": TREE / "server",
}


def modules() -> dict[str, Path]:
    """All modules of the four packages, by dotted name."""
    found = {}
    for package, root in SOURCES.items():
        for path in sorted((root / package).rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def imports(source: str, module: str, *, is_package: bool) -> tuple[tuple[int, str], ...]:
    """Line and dotted name of everything imported; `from x import y` gives `x.y`."""
    return tuple(_imports(source, module, is_package=is_package))


def _imports(source: str, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
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
    while name:
        if name in known:
            return name
        name = name.rpartition(".")[0]
    return None


def layer(module: str) -> str:
    """The layer of a module: its package, or the module itself at the top of `diesel_fs`."""
    top, _, rest = module.partition(".")
    return rest.split(".")[0] if top == "diesel_fs" and rest else top


def within(module: str, places: tuple[str, ...]) -> bool:
    """Whether a module is one of `places`, or lies in a package that is."""
    name = module.removeprefix("diesel_fs.")
    return any(f"{name}.".startswith(f"{place}.") for place in places)


def breaches(
    source: str, module: str, *, is_package: bool = False, known: frozenset[str]
) -> list[str]:
    if layer(module) not in LAYERS:
        return [f"{module}: its package is not in LAYERS"]
    is_pure = within(module, PURE)
    found = []
    for line, name in imports(source, module, is_package=is_package):
        where = f"{module}:{line}: imports {name}"
        target = owner(name, known)
        if target is not None:
            if layer(target) not in LAYERS:
                found.append(f"{where}, whose package is not in LAYERS")
            elif LAYERS.index(layer(target)) > LAYERS.index(layer(module)):
                found.append(f"{where}, which stands above it")
            elif {layer(module), layer(target)} <= PROGRAMS and layer(module) != layer(target):
                found.append(f"{where}, another program")
            elif within(target, OBSTORE_MODULES) and not within(module, OBSTORE):
                found.append(f"{where}, which brings obstore, and only programs may")
        elif is_pure and name.split(".")[0] not in PURE_IMPORTS:
            found.append(f"{where}, and it is pure")
        elif name.split(".")[0] == "obstore" and not within(module, OBSTORE):
            found.append(f"{where}, whose runtime hangs in forked children of users' processes")
    if is_pure:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in IMPURE_CALLS:
                call = ast.unparse(node.func)
                found.append(f"{module}:{node.lineno}: calls {call}, and it is pure")
    return found


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


ALL = modules()


@each_row("module", sorted(ALL))
def test_imports_point_downwards(module: str) -> None:
    path = ALL[module]
    found = breaches(
        path.read_text(encoding="utf-8"),
        module,
        is_package=path.name == "__init__.py",
        known=frozenset(ALL),
    )
    assert not found, "\n".join(found)


def import_graph() -> dict[str, set[str]]:
    graph = {}
    for module, path in ALL.items():
        source, is_package = path.read_text(encoding="utf-8"), path.name == "__init__.py"
        owners = {
            owner(name, frozenset(ALL))
            for _, name in imports(source, module, is_package=is_package)
        }
        graph[module] = {each for each in owners if each is not None and each != module}
    return graph


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circle(import_graph()) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})


@each_row("package", ["mounts", "peers"])
def test_folders_of_a_package_import_each_other_in_one_direction(package: str) -> None:
    """Its `__init__` names the order. A module beside the folders counts as one of its own."""
    inside = f"diesel_fs.{package}."

    def part(module: str) -> str:
        return ".".join(module.split(".")[:3])

    graph: dict[str, set[str]] = {}
    for module, imported in import_graph().items():
        if module.startswith(inside):
            parts = {part(each) for each in imported if each.startswith(inside)}
            graph.setdefault(part(module), set()).update(parts - {part(module)})
    assert {"diesel_fs.mounts.sessions", "diesel_fs.peers.members"} & set(graph)
    assert circle(graph) == []


def test_each_layer_and_each_exception_exists() -> None:
    assert {layer(module) for module in ALL} == set(LAYERS)
    for place in (*PURE, *OBSTORE):
        assert any(within(module, (place,)) for module in ALL), place


MADE_UP = frozenset(
    "diesel_fs diesel_fs.errors diesel_fs.format diesel_fs.format.entries diesel_fs.format.chunk"
    " diesel_fs.client diesel_fs.client.dataset diesel_fs.cache diesel_fs.cache.policies.eviction"
    " diesel_fs.cache.store diesel_fs.storage.objects.folder diesel_fs.storage.objects.cloud.store"
    " diesel_fs.stray diesel_fs.ingest dlcmd dlcmd.main diesel_server diesel_kubernetes.csi".split()
)


@each_row(
    ("module", "source", "complaint"),
    [
        ("diesel_fs.format.chunk", "from ..client.dataset import connect", "above"),
        ("diesel_fs.format.chunk", "from .. import client", "above"),
        ("diesel_fs.format.chunk", "import diesel_fs.client as x", "above"),
        ("diesel_fs.format.chunk", "from diesel_fs import __version__", "above"),
        ("diesel_fs.format.chunk", "def f():\n    from ..client import connect", "above"),
        ("diesel_fs.format.chunk", "if TYPE_CHECKING:\n    from ..client import Dataset", "above"),
        ("diesel_fs.format.chunk", "importlib.import_module('diesel_fs.client')", "above"),
        ("diesel_fs.format.chunk", "from ..cache.store import Store", "above"),
        ("diesel_fs.format.chunk", "from ..gone import x", "above"),  # a name that users import
        ("diesel_fs.format.chunk", "import os", "pure"),
        ("diesel_fs.format.chunk", "import socket.x", "pure"),
        ("diesel_fs.format.chunk", "from sqlite3 import connect", "pure"),
        ("diesel_fs.format.chunk", "x = open(path)", "pure"),
        ("diesel_fs.cache.policies.eviction", "import os", "pure"),
        ("diesel_fs.ingest.put", "from ..client import connect", "above"),
        ("diesel_fs.ingest.put", "import obstore", "obstore"),
        ("diesel_fs.storage.objects.folder", "import obstore", "obstore"),
        ("diesel_fs.client.dataset", "from ..storage.objects.cloud.store import x", "obstore"),
        ("diesel_fs.client.dataset", "from dlcmd.main import main", "above"),
        ("dlcmd.main", "import diesel_server", "another program"),
        ("diesel_kubernetes.csi", "from dlcmd.main import main", "another program"),
        ("diesel_kubernetes.csi", "import obstore", "obstore"),
        ("diesel_fs.client.dataset", "from ..stray import x", "not in LAYERS"),
        ("diesel_fs.stray", "", "not in LAYERS"),
    ],
)
def test_a_breach_is_found(module: str, source: str, complaint: str) -> None:
    found = breaches(source, module, known=MADE_UP)
    assert len(found) == 1
    assert complaint in found[0]


@each_row(
    ("module", "source"),
    [
        (
            "diesel_fs.format.chunk",
            "import struct\nfrom .entries import Entry",
        ),
        ("diesel_fs.storage.objects.folder", "import os\nfrom ...format.chunk import Chunk"),
        ("diesel_fs.cache.store", "from .policy import Policy\nfrom ..format.chunk import read"),
        ("diesel_fs.cache.store", "import os"),
        ("diesel_fs.client.dataset", "from ..ingest import put"),
        ("dlcmd.main", "import obstore\nimport diesel_fs\nfrom diesel_fs.client.dataset import x"),
        ("dlcmd.main", "from diesel_fs.storage.objects.cloud.store import open_cloud"),
    ],
)
def test_allowed_imports_pass(module: str, source: str) -> None:
    assert breaches(source, module, known=MADE_UP) == []
