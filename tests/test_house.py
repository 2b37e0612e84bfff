"""The house rules that no tool checks: contents of files, names, and the installed package."""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import diesel_fs

from .rows import each_row

TREE = Path(__file__).resolve().parents[1]
NAMED = re.compile(r"`([\w/]+(?:\.py|/))`")
"""Modules and folders that a text names."""

VAGUE_NAMES = {"utils", "util", "common", "helpers", "base", "manager", "misc"}

# Put together here, so that this file does not contain them itself. A package host or an index
# option belongs into a machine's own configuration: the project installs from wherever that points.
FOREIGN = [
    re.compile(b"(?<![\\w.~-])" + b"/wo" + b"rk/"),
    re.compile(b"/op" + b"t/(pypi|wheels)"),
    re.compile(b"(pypi|pytho" + b"nhosted)" + b"\\.org"),
    re.compile(b"download\\.pyto" + b"rch"),
    re.compile(b"deb\\.deb" + b"ian|archive\\.ubu" + b"ntu"),
    re.compile(b"--(extra-)?inde" + b"x-url|--find-li" + b"nks"),
]


def project_files() -> list[Path]:
    """All files that are or would be committed; without git, those in our folders."""
    try:
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(command, cwd=TREE, check=True, capture_output=True).stdout
        paths = [TREE / name.decode() for name in names.split(b"\0") if name]
    except (OSError, subprocess.CalledProcessError):
        folders = ("diesel_fs", "server", "cli", "tests", "deploy", ".ci")
        paths = [path for folder in folders for path in (TREE / folder).rglob("*")]
        paths = [path for path in [*paths, *TREE.glob("*")] if "__pycache__" not in path.parts]
    return [path for path in paths if path.is_file()]


FILES = project_files()
SOURCES = [path for path in FILES if path.suffix == ".py" and not path.name.endswith("_pb2.py")]
"""All modules except generated ones."""


def foreign(content: bytes) -> list[bytes]:
    return [match.group() for pattern in FOREIGN for match in pattern.finditer(content)]


def test_no_file_names_this_machine_or_a_package_host() -> None:
    found = {str(path.relative_to(TREE)): foreign(path.read_bytes()) for path in FILES}
    assert {name: names for name, names in found.items() if names} == {}


@each_row(
    "content",
    [b"cd /wo%srk/main" % b"", b"pip install --inde%sx-url x" % b"", b"https://py%spi.org/" % b""],
)
def test_a_foreign_name_is_found(content: bytes) -> None:
    assert foreign(content)
    assert not foreign(content.replace(b"/", b"~").replace(b"-", b"~").replace(b".", b"~"))


def test_module_names_are_not_generic() -> None:
    assert [path for path in SOURCES if VAGUE_NAMES & {path.stem, path.parent.name}] == []


def test_every_module_has_a_docstring() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    silent = [path for path, text in texts.items() if text and not text.startswith('"""')]
    assert silent == []


PACKAGES = [path for path in SOURCES if path.name == "__init__.py" and "tests" not in path.parts]


@each_row("path", PACKAGES)
def test_every_package_has_a_page_for_newcomers(path: Path) -> None:
    page = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    assert page
    if path.parent.parent == TREE / "diesel_fs" and path.parent.name != "torch":
        assert 5 <= len(page.splitlines()) <= 20
        named = NAMED.findall(page)
        assert any((path.parent / name).exists() for name in named)
        places = [path.parent, TREE / "diesel_fs", *path.parent.glob("*/")]
        assert [name for name in named if not any((at / name).exists() for at in places)] == []


def cut_sentences(source: str) -> list[str]:
    """The paragraphs of docstrings that are followed by a blank line in the middle of a sentence.

    Paragraphs that are indented, or begin with a backslash or a bar, are code, lists or tables.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                *before, _ = re.split(r"\n\s*\n", inspect.cleandoc(text))
                prose = [each for each in before if not each.startswith((" ", "\b", "|"))]
                found += [each for each in prose if not re.search(r"[.:?!][)\"`]?$", each)]
    return found


def test_no_blank_line_cuts_a_sentence() -> None:
    found = {str(path): cut_sentences(path.read_text(encoding="utf-8")) for path in SOURCES}
    assert {name: cut for name, cut in found.items() if cut} == {}


@each_row(
    ("text", "cut"),
    [
        ("One,\n\nand two.", ["One,"]),
        ("One.\n\nTwo;\n\nthree.", ["Two;"]),
        ("One\ntwo (three).\n\nFour:\n\n    five\n\n|\bsix|\n\nseven", []),
    ],
)
def test_a_cut_sentence_is_found(text: str, cut: list[str]) -> None:
    for place in ("{}", "def f():\n {}", "class A:\n a = 1\n {}", "class A:\n def f(self):\n  {}"):
        assert cut_sentences(place.format(repr(text))) == cut


def test_every_folder_of_modules_is_a_package() -> None:
    """Otherwise `find` would silently leave it out of the distribution."""
    folders = {path.parent for path in SOURCES}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


def test_entry_points_lead_somewhere() -> None:
    with (TREE / "pyproject.toml").open("rb") as file:
        declared = tomllib.load(file)["project"]["scripts"]
    installed = {point.name: point for point in entry_points(group="console_scripts")}
    for name, target in declared.items():
        assert installed[name].value == target
        assert callable(installed[name].load())


@pytest.mark.real_start
def test_a_users_process_gets_no_foreign_runtime() -> None:
    """Importing the library starts no thread and loads nothing that hangs in a forked child."""
    code = """if True:
        import sys, threading, diesel_fs
        assert threading.active_count() == 1
        loaded = {"obstore", "pyfuse3", "torch", "redis"} & set(sys.modules)
        sys.exit(f"loaded: {loaded}" if loaded else 0)
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def server(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "diesel_server", *arguments]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_the_server_has_a_version_and_help() -> None:
    assert server("--version").stdout == f"diesel-server, version {diesel_fs.__version__}\n"
    assert "--listen" in server("--help").stdout
