"""The documents describe the public surface: names, verbs, options, exit codes, modules, links.

The documents are all pages of the tree; they are compared with the programs' own tables and
sources.
"""

import ast
import inspect
import re
import signal
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path

import click

import diesel_fs
from diesel_fs import errors
from diesel_fs.peers.members.options import TaskKwargs
from diesel_kubernetes import names as kubernetes_names
from diesel_kubernetes.csi import main as csi
from diesel_kubernetes.operator import main as operator
from diesel_server import main as server
from diesel_server import options as server_options
from dlcmd import main
from tests.bench.benchmarks import BENCHMARKS
from tests.cli.test_program import commands

from .rows import each_row
from .test_errors import all_kinds
from .test_house import FILES, SOURCES
from .test_layers import LAYERS, modules

TREE = Path(__file__).resolve().parents[1]
PAGES = [path for path in FILES if path.suffix == ".md"]
PRODUCT = [path for path in FILES if path.relative_to(TREE).parts[0] != "tests"]
TESTS = sorted({*SOURCES} - {*PRODUCT})


def page(name: str) -> str:
    return (TREE / name).read_text(encoding="utf-8")


ARCHITECTURE = page("ARCHITECTURE.md")
REFERENCE = page("cli/dlcmd/README.md")
PYTHON_API = page("diesel_fs/client/README.md")

CODE = re.compile(r"`([^`]*)`")


def rows(text: str, section: str) -> list[list[str]]:
    body = re.split(r"^## ", text, flags=re.MULTILINE)
    table = next(part for part in body if part.startswith(f"{section}\n"))
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    split = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines[2:]]
    return [[cell.strip().replace("\\|", "|") for cell in cells] for cells in split]


def words_of(cell: str) -> str:
    return " ".join(takewhile(str.islower, CODE.findall(cell)[0].split()))


def metavar(option: click.Option) -> str:
    if option.is_flag:
        return ""
    if isinstance(option.type, click.Choice):
        return "|".join(map(str, option.type.choices))
    return option.metavar or option.type.name.upper()


def options_of(command: click.Command) -> dict[str, str]:
    context = command.make_context(command.name, [], resilient_parsing=True)
    found = [each for each in command.get_params(context) if isinstance(each, click.Option)]
    return {name: metavar(each) for each in found for name in each.opts}


def documented_options(text: str) -> dict[str, str]:
    """The options among the code in a text, with the text after each."""
    found = [code.partition(" ") for code in CODE.findall(text) if code.startswith("-")]
    return {name: behind for name, _, behind in found}


SHARED = options_of(main.program)
"""The options that may stand before or after any verb."""


def test_all_that_is_public_resolves() -> None:
    assert sorted(set(diesel_fs.__all__)) == sorted(diesel_fs.__all__) == sorted(dir(diesel_fs))
    for name in diesel_fs.__all__:
        assert getattr(diesel_fs, name) is not None
    assert not hasattr(diesel_fs, "no_such_name")
    scope: dict[str, object] = {}
    exec("from diesel_fs import *", scope)  # noqa: S102
    assert set(diesel_fs.__all__) <= set(scope)


def test_every_error_that_a_caller_can_meet_is_public() -> None:
    tree = {kind.__name__ for kind in all_kinds() if kind.__module__ == errors.__name__}
    assert {"DieselError", *tree} <= set(diesel_fs.__all__)


def test_the_python_interface_is_documented() -> None:
    """Each public name, each public part of a dataset, and only existing parameters."""
    calls = [code for row in rows(PYTHON_API, "Calls") for code in CODE.findall(row[0])]
    by_object = defaultdict(set)
    for call in calls:
        match = re.fullmatch(r"(?:(diesel_fs|ds)\.(\w+)|(len\(ds\)))(?:\((.*)\))?", call)
        assert match, call
        if match[3]:
            continue
        by_object[match[1]].add(match[2])
        home = diesel_fs if match[1] == "diesel_fs" else diesel_fs.Dataset
        if match[4] is not None:
            known = set(inspect.signature(getattr(home, match[2])).parameters)
            known |= TaskKwargs.__annotations__.keys() if "task" in known else set()
            assert set(match[4].split(", ")) - {"", "..."} <= known, call
    kinds = {kind.__name__ for kind in all_kinds()}
    parts = {name for name in dir(diesel_fs.Dataset) if not name.startswith("_")}
    assert by_object["ds"] == parts | {"name"}
    assert by_object["diesel_fs"] == set(diesel_fs.__all__) - kinds


def test_every_verb_and_its_options_are_documented() -> None:
    """Removed options must leave the page."""
    documented = {
        words_of(verb): documented_options(options) for verb, options, _ in rows(REFERENCE, "Verbs")
    }
    assert documented == {
        name: {key: text for key, text in options_of(command).items() if key not in SHARED}
        for name, command in commands().items()
    }
    assert documented["mount"]["--stale"] == "refuse|warn|allow"


def test_the_options_of_all_verbs_are_documented() -> None:
    below = REFERENCE.partition("Before or after any verb:")[2].partition("\n## ")[0]
    assert documented_options(below) == SHARED
    for command in commands().values():
        assert options_of(command).items() >= SHARED.items()


@each_row(
    ("name", "program"),
    [
        ("server/diesel_server/README.md", server.program),
        ("server/diesel_kubernetes/README.md", csi.program),
        ("server/diesel_kubernetes/operator/OPERATOR.md", operator.program),
    ],
)
def test_the_options_of_each_program_are_documented(name: str, program: click.Command) -> None:
    cells = [row[0] for row in rows(page(name), "Options")]
    known = options_of(program)
    for option in ("--version", "-h", "--help"):
        del known[option]
    assert documented_options(" ".join(cells)) == known


def test_attributes_and_secrets_of_volumes_are_documented() -> None:
    text = page("server/diesel_kubernetes/csi/VOLUMES.md")
    tables = text.partition("## What a volume names")[2].partition("\n## ")[0].split("\n\n")
    attributes, secrets = (
        [name for line in table.splitlines()[2:] for name in CODE.findall(line.split(" | ")[0])]
        for table in tables
        if table.startswith("| ")
    )
    assert sorted(attributes) == sorted(kubernetes_names.ATTRIBUTES)
    assert sorted(secrets) == sorted(kubernetes_names.SECRETS)


PROGRAMS_WITH_PREFIXES = (
    (server_options.PREFIX, server.program),
    (csi.PREFIX, csi.program),
    (operator.PREFIX, operator.program),
)


def test_every_variable_of_the_environment_is_documented() -> None:
    """And no variable that nothing reads."""
    named = re.compile(r"\b(?:DIESEL|XDG)(?:_[A-Z]+)+\b(?!_)")
    sources = [path for path in SOURCES if path in PRODUCT]
    read = {name for path in sources for name in named.findall(path.read_text(encoding="utf-8"))}
    read -= {server_options.PREFIX, csi.PREFIX, operator.PREFIX}
    of_options = {
        f"{prefix}{name[1:].replace('-', '_').upper()}"
        for prefix, command in PROGRAMS_WITH_PREFIXES
        for name in options_of(command)
    }
    written = {name for path in PAGES for name in named.findall(path.read_text(encoding="utf-8"))}
    assert len(read) > 8
    assert read <= written, read - written
    assert written <= read | of_options, written - read - of_options
    table = {name for row in rows(REFERENCE, "Environment and files") for name in row[:1]}
    ours = {name for name in read if name.startswith("DIESEL_")} - of_options
    assert ours <= set(named.findall(" ".join(table)))


def test_every_exit_code_is_documented() -> None:
    failures = {kind.exit_code for kind in all_kinds() if kind.__module__ == errors.__name__}
    signals = {main.INTERRUPTED, main.READER_GONE, 128 + signal.SIGTERM, 128 + signal.SIGHUP}
    ends = {0, errors.DieselError.exit_code} | failures | signals
    assert [int(code) for code, _ in rows(REFERENCE, "Exit codes")] == sorted(ends)


def test_the_map_names_every_package() -> None:
    table = ARCHITECTURE.partition("| package |")[2].partition("\n\n")[0]
    named = [CODE.findall(line)[0].rstrip("/") for line in table.splitlines()[2:]]
    assert named == list(LAYERS)


def test_the_paths_that_data_takes_name_modules() -> None:
    paths = ARCHITECTURE.partition("Three paths that data takes")[2].partition("\n## ")[0]
    named = CODE.findall(paths)
    assert len(named) > 15
    known = modules()
    assert [name for name in named if not {name, f"diesel_fs.{name}"} & known.keys()] == []


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


@each_row("path", PAGES)
def test_links_lead_somewhere_and_named_files_exist(path: Path) -> None:
    text = prose(path.read_text(encoding="utf-8"))
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert (path.parent / target).exists(), target
    there = [str(file) for file in FILES]
    for name in CODE.findall(text):
        if re.fullmatch(r"[\w./@-]+\.(py|md|sh|yaml)", name):
            known = any(file.endswith(f"/{name}") for file in there)
            assert known or (path.parent / name).exists(), name


def sections(text: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    heads = re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@each_row("path", PAGES)
def test_links_to_a_section_name_one_that_is_there(path: Path) -> None:
    text = prose(path.read_text(encoding="utf-8"))
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", text):
        linked = path.parent / target if target else path
        assert anchor in sections(linked.read_text(encoding="utf-8")), (target, anchor)


def test_pages_that_sources_name_exist() -> None:
    there = {path.name for path in PAGES}
    for path in SOURCES:
        named = re.findall(r"\b([A-Z]{4,}\.md)\b", path.read_text(encoding="utf-8"))
        assert set(named) <= there, path


def test_targets_of_make_exist() -> None:
    makefile = page("Makefile")
    texts = [path.read_text(encoding="utf-8") for path in PAGES]
    found = re.compile(r"(?:`|^ *)make\s+([a-z]+)", re.MULTILINE)
    named = {target for text in texts for target in found.findall(text)}
    assert {"demo", "test", "install", "lint", "bench", "fuzz"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_results_name_existing_benchmarks() -> None:
    """The table of measurements names each by how it begins; in the table of papers, each row with
    a figure names its benchmark."""
    results = page("tests/bench/RESULTS.md")
    for row in rows(results, "How a figure is measured"):
        for name in CODE.findall(row[0]):
            assert any(each.startswith(name.removesuffix("...")) for each in BENCHMARKS), name
    effects = rows(results, "What the papers promise")
    assert {row[0] for row in effects} == {"DIESEL", "LCache", "Lobster", "iCache", "DLCache"}
    for row in effects:
        kind, *named = re.split(", ", row[-1])
        assert kind in {"real", "simulated"}, row
        assert named or row[-2] == "not measured", row
        assert {f"`{name}`" for name in BENCHMARKS} >= {*named}, row


EXTRA = re.compile(r"\.whl\)?\[(\w+)\]|extra `(\w+)`")


def test_pages_install_the_wheel_and_no_release() -> None:
    """No index has a release, so no page and no message may tell users to install DIESEL-FS by its
    name; and each extra that one names exists."""
    extras = tomllib.loads(page("pyproject.toml"))["project"]["optional-dependencies"]
    named = set[str]()
    for path in [*PAGES, *(each for each in SOURCES if each in PRODUCT)]:
        text = path.read_text(encoding="utf-8")
        for words in re.findall(r"pip install ([^`\n]*)", text):
            by_name = re.search(r"\bdiesel[-_]fs(?!-\S*\.whl)", words)
            assert by_name is None, (path, words)
        named |= {first or second for first, second in EXTRA.findall(text)}
    assert {"fsspec", "pyfuse3", "kubernetes"} <= named <= extras.keys()


COMMAND = re.compile(r"(?:^ *|`|\| )(dlcmd [a-z][^`\n#|<>&;)]*)", re.MULTILINE)


def test_commands_in_pages_name_existing_verbs_and_options() -> None:
    """Commands in the text, and in indented blocks, count too."""
    known, tried = commands(), 0
    for path in PAGES:
        for line in COMMAND.findall(path.read_text(encoding="utf-8")):
            words = line.replace("\\|", " ").split()[1:]
            verb = " ".join(words[:2]) if " ".join(words[:2]) in known else words[0]
            assert verb in known or verb in main.VERBS or verb in main.SYNONYMS, (path, line)
            if verb not in known or verb == "run":
                continue
            options = {
                word.partition("=")[0].strip("[]'\"(),.:")
                for word in words
                if word.startswith("--")
            }
            assert options - {"", "--"} <= options_of(known[verb]).keys(), (path, line)
            tried += 1
    assert tried > 100


@cache
def syntax(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes())


def functions_in(path: Path) -> list[str]:
    nodes = ast.walk(syntax(path))
    return [e.name for e in nodes if isinstance(e, ast.FunctionDef | ast.AsyncFunctionDef)]


def fast_tests(path: Path) -> Iterable[str]:
    """The tests of a module that are not marked `deep`; a mark on some of its parameters, or of a
    fixture's, leaves the others fast."""
    if "pytest.mark.deep" in path.read_text(encoding="utf-8"):
        return unmarked_tests(syntax(path))
    return functions_in(path)


def unmarked_tests(tree: ast.Module) -> Iterator[str]:
    """As `fast_tests`, for a module that marks something."""
    whole = [node.value for node in tree.body if isinstance(node, ast.Assign)]
    if any(
        "pytest.mark.deep" in ast.unparse(value) and "param" not in ast.unparse(value)
        for value in whole
    ):
        return
    for node in ast.walk(tree):
        decorators = map(ast.unparse, getattr(node, "decorator_list", ()))
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if "pytest.mark.deep" not in decorators:
            yield node.name


def codes_in(names: Iterable[str]) -> set[str]:
    """The codes that tests' names begin with, those between the ends of a run included."""
    return {
        f"{first[0]}{number}"
        for name in names
        for first, last in spans_in(name)
        for number in range(int(first[1:]), int(last[1:]) + 1)
    }


def spans_in(name: str) -> Iterator[tuple[str, str]]:
    """First and last of each run of codes that a test's name begins with: `A1_to_A4_C3` has two."""
    match = re.match(r"test_((?:[A-Z]\d+_(?:to_)?)+)", name)
    for first, last in re.findall(r"([A-Z]\d+)_(?:to_([A-Z]\d+)_)?", match[1] if match else ""):
        yield first, last or first


def test_every_fault_that_a_test_names_is_described() -> None:
    """And each described fault has a test, or its text says how it is shown, or why not."""
    listed = re.findall(r"^\| ([A-Z]\d+) \| (.*) \|$", page("tests/FAULTS.md"), re.MULTILINE)
    described = dict(listed)
    assert len(described) == len(listed) > 150
    names = [name for path in TESTS for name in functions_in(path)]
    assert [name for name in names if re.match(r"test_[a-z]\d+_", name)] == []
    assert {code for name in names for span in spans_in(name) for code in span} <= described.keys()
    carried = codes_in(names)
    for code, text in described.items():
        assert text.endswith("."), code
        shown = re.findall(r"`(tests/[^`]*)`", text.partition("Shown by ")[2])
        assert (code in carried) + bool(shown) + ("Not shown by a test: " in text) == 1, code
        assert all(re.search(rf"\b{code}\b", page(name)) for name in shown), code


def test_every_fault_has_a_test_in_the_fast_tier() -> None:
    """Unless it is shown elsewhere, or `FAULTS.md` says why only the deep tier can show it."""
    tests = [path for path in TESTS if path.name.startswith("test_")]
    fast = codes_in(name for path in tests for name in fast_tests(path))
    deep = codes_in(name for path in tests for name in functions_in(path)) - fast
    texts = dict(re.findall(r"^\| ([A-Z]\d+) \| (.*) \|$", page("tests/FAULTS.md"), re.MULTILINE))
    assert {code for code in deep if "Deep tier: " not in texts[code]} == set()


def left_out(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(ast.Attribute(attr="flag" | "integer"), [ast.Constant(str(name)), *more]):
                if more or "default" in {each.arg for each in node.keywords}:
                    yield name


def test_fields_that_a_request_may_leave_out_are_documented() -> None:
    """`WIRE.md`, section 5, names the fields for which the readers of requests have a default."""
    readers: list[ast.AST] = [
        ast.parse(path.read_bytes()) for path in (TREE / "server/diesel_server").rglob("*.py")
    ]
    for name, parts in (
        ("diesel_fs/peers/members/membership.py", {"parse_join", "parse_member"}),
        ("diesel_fs/repository/interface.py", {"PurgeOptions"}),
    ):
        body = ast.parse(page(name)).body
        readers += [each for each in body if getattr(each, "name", "") in parts]
    found = {name for reader in readers for name in left_out(reader)}
    omissible = (
        page("diesel_fs/net/WIRE.md")
        .partition("These fields may be left out")[2]
        .partition("Every other field")[0]
    )
    assert len(found) > 8
    # these two are read by name
    assert set(CODE.findall(omissible)) == found | {"since_s", "chunks"}
