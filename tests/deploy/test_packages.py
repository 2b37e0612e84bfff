"""The contents of the packages: the sdist, the wheel made from it, man pages and completions.
`tests/deploy/clean_root` installs them, and the Debian package.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import click
import pytest

from deploy.packages.debian import HOME, LINKS
from deploy.packages.man_pages import man_pages
from deploy.packages.share import COMPLETIONS, PROGRAMS, write_share
from dlcmd.main import program as dlcmd
from dlcmd.verbs.completion import SCRIPTS
from tests.test_documents import options_of
from tests.test_house import FILES, TREE
from tests.test_layers import SOURCES, modules

pytestmark = pytest.mark.deep

PROJECT = tomllib.loads((TREE / "pyproject.toml").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the packages of a copy of this tree, made of exactly the files in git."""
    tree = tmp_path_factory.mktemp("copy") / "tree"
    for path in FILES:
        copy = tree / path.relative_to(TREE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    roots = os.pathsep.join(map(str, (tree, tree / "server", tree / "cli")))
    subprocess.run(
        [sys.executable, "-m", "deploy.packages.dist"], cwd=tree, check=True, timeout=300,
        env={**os.environ, "PYTHONPATH": roots},
    )  # fmt: skip
    return tree / "dist"


def test_the_sdist_has_all_that_the_makefile_needs(dist: Path) -> None:
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        members = [each for each in archive if each.isfile()]
        metadata = archive.extractfile(next(each for each in members if "/PKG-INFO" in each.name))
        assert metadata is not None
        lines = metadata.read().decode().splitlines()
    held = {each.name.partition("/")[2] for each in members}
    assert {str(path.relative_to(TREE)) for path in FILES} - held == {".gitignore"}
    assert {"License-Expression: Apache-2.0", "License-File: LICENSE"} <= {*lines}
    assert {(each.uid, each.uname) for each in members} == {(0, "root")}
    assert len({each.mtime for each in members}) == 1


def test_the_wheel_has_the_packages_and_no_tests(dist: Path) -> None:
    with zipfile.ZipFile(next(dist.glob("*.whl"))) as wheel:
        held = set(wheel.namelist())
        name = next(each for each in held if each.endswith("entry_points.txt"))
        entry_points = wheel.read(name).decode()
    needed = {
        str(path.relative_to(SOURCES[name.partition(".")[0]])) for name, path in modules().items()
    }
    data = {
        str(path.relative_to(root))
        for name, root in SOURCES.items()
        for suffix in ("py.typed", "*.proto", "*.pyi", "*.md")
        for path in (root / name).rglob(suffix)
    }
    assert "diesel_kubernetes/csi/csi.proto" in data
    assert needed | data <= held
    tops = {each.partition("/")[0] for each in held}
    assert {top for top in tops if not top.startswith("diesel_fs-")} == {*SOURCES}
    for program, target in PROJECT["project"]["scripts"].items():
        assert f"{program} = {target}" in entry_points
    shares = {each.partition(".data/data/share/")[2] for each in held}
    assert {*COMPLETIONS.values(), "man/man1/dlcmd-put.1", "man/man8/mount.diesel.8"} <= shares


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("share")
    write_share(folder)
    return folder


def test_the_completions_lie_where_the_shells_look(share: Path) -> None:
    for shell, place in COMPLETIONS.items():
        assert (share / place).read_text(encoding="utf-8") == SCRIPTS[shell]


def _commands(command: click.Command, name: str) -> dict[str, click.Command]:
    found = {name: command}
    if isinstance(command, click.Group):
        for verb in command.list_commands(click.Context(command)):
            below = command.get_command(click.Context(command), verb)
            assert below is not None
            found |= _commands(below, f"{name}-{verb}")
    return found


def test_every_command_has_a_man_page_that_describes_its_options(share: Path) -> None:
    programs = {"dlcmd": dlcmd} | {str(each.name): each for each, _ in PROGRAMS}
    commands = {n: c for name, each in programs.items() for n, c in _commands(each, name).items()}
    pages = {path.stem: path for path in share.rglob("*.[1-8]")}
    assert set(pages) == set(commands)
    for name, path in pages.items():
        shown = _shown(path)
        missing = [each for each in options_of(commands[name]) if f"{each}" not in shown]
        hidden = {p.opts[0] for p in commands[name].params if getattr(p, "hidden", False)}
        assert {*missing} <= hidden, name
        assert re.match(
            rf"{re.escape(name)} [-\u2010\u2013\u2014] \S", shown.split("NAME\n")[1].lstrip()
        )


def _shown(path: Path) -> str:
    command = ["mandoc", "-Tutf8", "-Owidth=900", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return re.sub(".\b", "", done.stdout)


def test_mandoc_accepts_the_pages(share: Path) -> None:
    pages = sorted(map(str, share.rglob("*.[1-8]")))
    command = ["mandoc", "-Tlint", "-Wwarning", *pages]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", 0)


def test_a_page_is_made_from_the_text_of_the_help() -> None:
    @click.command("tool", help="Do `this -n`.\n\n\b\nExample:\n  .tool 'x' \\n\n\n'Quoted.")
    @click.option("--long", help="What it does.", metavar="N")
    def tool() -> None: ...

    ((name, text),) = man_pages(tool, 8, 0)
    assert name == "tool.8"
    assert '.TH "TOOL" "8" "1970-01-01"' in text
    assert "Do \\fBthis \\-n\\fR." in text
    assert ".nf\nExample:\n\\&  .tool 'x' \\en\n.fi\n.PP\n\\&'Quoted.\n" in text
    assert ".TP\n\\fB\\-\\-long N\\fR\nWhat it does.\n" in text


def test_the_debian_package_links_to_existing_programs() -> None:
    assert {*LINKS.values()} <= PROJECT["project"]["scripts"].keys()
    for unit in (TREE / "deploy" / "systemd").iterdir():
        assert f"ExecStart={HOME}/bin/" in unit.read_text(encoding="utf-8")
