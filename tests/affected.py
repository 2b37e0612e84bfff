"""Which tests marked `deep` a change may break: those of the packages that it reaches.

`make test AFFECTED=1` runs them with the fast tier. A change reaches the modules that it edits and
all that import these, directly or not; a changed test, or a module of helpers in a folder of tests,
reaches the tests of its folder. What every test uses (`tests/*.py`, `pyproject.toml`) reaches all.
"""

import subprocess
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import pytest

from tests.test_layers import SOURCES, TREE, imports, modules, owner

FOLDERS = {"diesel_server": "server", "dlcmd": "cli", "diesel_kubernetes": "kubernetes"}
"""The tests of `diesel_fs.x.y` are in `tests/x/y`, or `tests/x`."""

EVERYTHING = "tests"


def changed_files(commit: str) -> list[str]:
    """New files are included."""
    listing = (["diff", "--name-only", commit], ["ls-files", "--others", "--exclude-standard"])
    found = []
    for words in listing:
        done = subprocess.run(["git", *words], cwd=TREE, check=True, stdout=subprocess.PIPE)
        found += done.stdout.decode().splitlines()
    return found


def folders(changed: Iterable[str]) -> set[str]:
    """Return folders such as `tests/peers`."""
    found, reached = set(), set()
    known = {str(path.relative_to(TREE)): name for name, path in modules().items()}
    for each in map(PurePosixPath, changed):
        if str(each) in known:
            reached.add(known[str(each)])
        elif each.parts[0] == "tests" and len(each.parts) > 2:
            found.add(str(each.parent))
        elif each.suffix in (".py", ".toml") and each.parts[0] not in SOURCES:
            found.add(EVERYTHING)
    # A module at the top of `diesel_fs`, such as errors.py, has no folder of tests but those of its
    # importers
    return found | ({_folder(name) for name in _with_importers(reached)} - {EVERYTHING})


def _with_importers(reached: set[str]) -> set[str]:
    paths = modules()
    importers: dict[str, set[str]] = {}
    for name, path in paths.items():
        source = path.read_text(encoding="utf-8")
        for _, imported in imports(source, name, is_package=path.name == "__init__.py"):
            if (found := owner(imported, frozenset(paths))) is not None:
                importers.setdefault(found, set()).add(name)
    left, all_reached = list(reached), set(reached)
    while left:
        new = importers.get(left.pop(), set()) - all_reached
        all_reached |= new
        left += new
    return all_reached


def _folder(module: str) -> str:
    top, *rest = module.split(".")
    place = Path("tests", FOLDERS.get(top, ""), *(() if top in FOLDERS else rest))
    while not (TREE / place).is_dir():
        place = place.parent
    return str(place)


def mark(items: Iterable[pytest.Item], reached: set[str]) -> None:
    """Mark tests in these folders as `affected`: they run though they are marked `deep`."""
    for item in items:
        place = item.path.relative_to(TREE).parent
        if any(place.is_relative_to(folder) for folder in reached):
            item.add_marker("affected")
