"""Mutants are small, the same each time, and apart from the tree; kills differ from survivals."""

import ast
import os
import sys
import time
from pathlib import Path

import pytest

from tests.rows import each_row

from . import verdicts
from .coverage_map import Batch, CoverageMap, batches, measure
from .mutants import Mutant, candidates, draw
from .sandbox import sandbox
from .verdicts import Verdict, as_line, differences, in_order, judge, read_verdicts, table

TREE = Path(__file__).resolve().parents[2]

needs_copies = pytest.mark.skipif(
    os.geteuid() != 0 or "overlay" not in Path("/proc/filesystems").read_text(encoding="ascii"),
    reason="copies of the tree take root and overlayfs",
)


@each_row(
    ("line", "changed"),
    [
        ("x = a < b", ["x = a <= b", "x = a >= b"]),
        ("x = (a) is  not (b)", ["x = (a) is (b)"]),
        ("x = a and b", ["x = a or b"]),
        ("x = not (a)", ["x = (a)"]),
        ("if a: x.y = b", ["if not a: x.y = b", "if a: pass"]),
        ("x = 'ä' if y else a + b", ["x = 'ä' if not y else a + b", "x = 'ä' if y else a - b"]),
        ("x = 0", ["x = 1", "x = (-1)"]),
        ("x = f(exist_ok=True)", ["x = f(exist_ok=False)"]),
        ("def f(): return a", ["def f(): return None"]),
        ("x += y", ["x -= y", "pass"]),
        ("f(max(a, b))", ["f(min(a, b))", "pass"]),
        ("raise ValueError(f'{1 + a}', 2)", ["pass"]),
        ("while a < b: break", ["while a <= b: break", "while a >= b: break", "while a < b: pass"]),
    ],
)
def test_changes_of_each_kind_of_line(line: str, changed: list[str]) -> None:
    found = candidates(f"# a comment\n{line}\n", "diesel_fs/a/b.py")
    assert sorted(mutant.after for mutant in found) == sorted(changed)
    assert {(mutant.line, mutant.before) for mutant in found} == {(2, line)}


@each_row(
    "source",
    [
        '"""One + 1 < 2."""',
        "assert a < 1, 'not 1'",
        "__all__ = [f(1)]",
        "Size = Literal[1, 2]",
        "def f(a: Annotated[int, 1] = 3) -> Literal[1]: ...",
        "log.warning('%d', 1 + a)",
        "if TYPE_CHECKING:\n    f(1)",
        "for a in zip(b, c, strict=True): ...",
        "@dataclass(frozen=True)\nclass A: ...",
        "x = a + 'text'",
    ],
)
def test_lines_that_are_not_changed(source: str) -> None:
    assert candidates(source, "diesel_fs/a/b.py") == []


def test_mutants_are_the_same_each_time_and_change_one_line_of_code() -> None:
    def drawn(seed: int) -> list[Mutant]:
        return draw(TREE, ["repository", "torch"], 9, seed, lambda file, line: line % 2 == 0)

    mutants = drawn(1)
    assert mutants == drawn(1)
    assert mutants != drawn(2)
    assert [mutant.package for mutant in mutants] == ["repository"] * 5 + ["torch"] * 5
    assert len({(mutant.file, mutant.line) for mutant in mutants}) == 10
    for mutant in mutants:
        source = (TREE / mutant.file).read_text(encoding="utf-8")
        changed = mutant.applied(source)
        lines = zip(source.split("\n"), changed.split("\n"), strict=True)
        different = [number for number, (old, new) in enumerate(lines, 1) if old != new]
        assert different == [mutant.line]
        assert mutant.line % 2 == 0
        compile(changed, mutant.file, "exec")
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source))


def test_a_mutant_of_a_line_that_has_changed_is_refused() -> None:
    mutant = Mutant("diesel_fs/a/b.py", 2, "constant", "b = 1", "b = 2")
    assert mutant.applied("a\nb = 1\n") == "a\nb = 2\n"
    for source in ("a\nb = 3\n", "a"):
        with pytest.raises(ValueError, match="is no longer"):
            mutant.applied(source)


LIMITS = '''"""A toy."""

import subprocess
import sys


def is_full(count: int) -> bool:
    return count >= 3


def wait(count: int) -> int:
    while count > 0:
        count -= 1
    return count


if __name__ == "__main__":
    print(40 + 2)
'''
TESTS = """
import subprocess, sys
from diesel_fs.toy.limits import is_full, wait

def test_full(): assert is_full(4) and not is_full(1)
def test_wait(): assert wait(3) == 0
def test_program():
    command = [sys.executable, "-m", "diesel_fs.toy.limits"]
    assert subprocess.check_output(command) == b"42\\n"
def test_fails(): assert is_full(0)
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    for folder in ("diesel_fs/toy", "tests/toy"):
        (tree / folder).mkdir(parents=True)
        (tree / folder / "__init__.py").touch()
    (tree / "diesel_fs" / "__init__.py").touch()
    (tree / "diesel_fs/toy/limits.py").write_text(LIMITS, encoding="utf-8")
    (tree / "tests/toy/test_limits.py").write_text(TESTS, encoding="utf-8")
    (tree / ".venv").symlink_to(sys.prefix)
    return tree


@needs_copies
def test_a_copy_is_apart_from_the_tree_and_ends_its_daemons(toy: Path) -> None:
    before = {path: path.lstat().st_mtime_ns for path in toy.rglob("*")}
    file, script = "diesel_fs/toy/limits.py", "cat $0; echo > $0; touch new; sleep 4321 & exit 7"
    with sandbox(toy, {file: "changed\n"}) as copy:
        assert copy.run(["sh", "-c", script, str(toy / file)], {}, 60) == 7
        assert (copy.scratch / "log").read_text() == "changed\n"
        began = time.monotonic()
        assert copy.run(["sh", "-c", "sleep 4321 & sleep 4321"], {}, 0.5) is None
        assert time.monotonic() - began < 60
    assert not copy.scratch.exists()
    assert {path: path.lstat().st_mtime_ns for path in toy.rglob("*")} == before
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert b"sleep\x004321\x00" not in commands


@pytest.mark.deep
@needs_copies
def test_kills_and_survivals(toy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "HANG_S_MIN", 2.0)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # a toy needs none
    folder = tmp_path / "cover"
    (batch,) = batches(toy, folder, [])
    assert batch == Batch("tests.toy.test_limits", ("tests/toy/test_limits.py",))
    measure(toy, folder, batch)
    assert batches(toy, folder, ["tests/toy"]) == []
    measured = CoverageMap(folder)
    found = candidates(LIMITS, "diesel_fs/toy/limits.py")
    assert all(measured.covers(mutant.file, mutant.line) for mutant in found)

    def chosen(after: str) -> tuple[Mutant, list[str]]:
        (mutant,) = [mutant for mutant in found if mutant.after.strip() == after]
        return mutant, in_order(mutant, measured)

    def status(after: str) -> tuple[str, str, int]:
        verdict = judge(toy, *chosen(after), measured.seconds, "all", 60)
        return verdict.status, verdict.by.rpartition("::")[2], verdict.of

    assert status("return count < 3") == ("killed", "test_full", 1)
    assert status("return count > 3") == ("survived", "", 1)
    assert status("count += 1") == ("timed out", "test_wait", 1)
    in_a_child_process = [f"{batch.files[0]}::test_program"]
    assert chosen("print(40 - 2)")[1] == in_a_child_process


def test_runs_are_resumed_and_compared(tmp_path: Path) -> None:
    mutants = [Mutant(f"diesel_fs/a/{n}.py", n, "constant", "1", "2") for n in range(1, 6)]
    statuses = ["killed", "timed out", "survived", "killed", "unfinished"]
    ran = [
        Verdict(mutant, status, "t", 1, 2, 3.0)
        for mutant, status in zip(mutants, statuses, strict=True)
    ]
    file = tmp_path / "all.jsonl"
    file.write_text("".join(map(as_line, ran)) + as_line(ran[0])[:40], encoding="utf-8")
    first = read_verdicts(file)
    assert list(first.values()) == ran
    second = {**first, mutants[0]: Verdict(mutants[0], "survived", "", 2, 2, 3.0)}
    assert differences(first, second) == ([mutants[0]], [], 3, 2)
    lines = table(ran).splitlines()
    assert [line.split() for line in lines[:2]] == [
        "package mutants killed timed out survived unfinished flaky".split(),
        "a 5 2 1 1 1 0".split(),
    ]
    assert lines[-1] == "unfinished (1 of 2 tests, t): diesel_fs/a/5.py:5  1  ->  2"
