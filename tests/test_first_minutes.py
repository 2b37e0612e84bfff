"""The first commands of README.md and the first program of the Python API work as written."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from diesel_fs.system.mountinfo import mounts

from .test_house import FILES, TREE
from .trees import facts
from .unprivileged_user import USER, as_user, module_path, needs_root, user_python

pytestmark = [pytest.mark.deep, pytest.mark.fuse]


def block(page: str, section: str, language: str) -> str:
    text = (TREE / page).read_text(encoding="utf-8")
    body = text.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    found = re.search(rf"^```{language}\n(.*?)^```", body, re.MULTILINE | re.DOTALL)
    assert found, section
    return found[1]


COMMANDS = block("README.md", "Five minutes", "sh")
PROGRAM = block("diesel_fs/client/README.md", "A first program", "python")


@pytest.fixture
def home() -> Iterator[Path]:
    """A new user's home. (Other users cannot enter pytest's own folders.)"""
    folder = Path(tempfile.mkdtemp(prefix="diesel-home-"))
    yield folder
    left = [each.path for each in mounts() if Path(each.path).is_relative_to(folder)]
    for path in left:
        subprocess.run(["umount", "--lazy", path], check=False)
    shutil.rmtree(folder)
    assert left == []


def typed(home: Path, tree: Path, *who: str) -> str:
    """Run the commands one after the other, then the program on the repository that they have made;
    return their output. None may fail."""
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    output = ""
    for program, text in ((["sh", "-eu"], COMMANDS), ([tree / ".venv/bin/python"], PROGRAM)):
        done = subprocess.run(
            [*who, *program], input=text, cwd=tree, env=environment, text=True,
            capture_output=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        output += done.stdout
    return output


def check(home: Path, output: str) -> None:
    """Check that all files came back, that a mount showed them, and that the mount left nothing
    behind."""
    there = facts(home / "images")
    assert len(there) > 1000
    assert facts(home / "copy") == there
    size = sum(path.stat().st_size for path in (home / "images").rglob("*.jpg"))
    assert re.search(rf"^ *{size}$", output, re.MULTILINE)
    for word in ("cat", "is mounted on", "requests of the kernel", "is unmounted"):
        assert word in output
    assert not (home / "pets").exists()
    assert (home / ".local/share/diesel").is_dir()


def tree_of_the_user(home: Path) -> Path:
    """The user may not read this checkout. The copy's `make install` is done already: it uses the
    packages of this environment."""
    tree = home / "diesel-fs"
    for path in FILES:
        copy = tree / path.relative_to(TREE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
    python = tree / ".venv/bin/python"
    subprocess.run([user_python(), "-m", "venv", "--without-pip", tree / ".venv"], check=True)
    (packages,) = (tree / ".venv/lib").glob("python3*/site-packages")
    ours = [str(tree), str(tree / "server"), str(tree / "cli")]
    others = module_path().split(os.pathsep)[1:]
    (packages / "borrowed.pth").write_text("\n".join(ours + others), encoding="utf-8")
    for name in ("dlcmd", "diesel-server"):
        text = Path(sys.executable).with_name(name).read_text(encoding="utf-8")
        script = python.with_name(name)
        script.write_text(f"#!{python}\n" + text.partition("\n")[2], encoding="utf-8")
        script.chmod(0o755)
    (tree / ".venv/made").mkdir()
    (tree / ".venv/made/install").touch()
    subprocess.run(["chown", "-R", f"{USER}:{USER}", home], check=True)
    return tree


def test_the_first_minutes_in_the_readme(home: Path) -> None:
    """As the user who runs the tests, on most machines root."""
    # does nothing if its inputs have not changed since the last time
    subprocess.run(["make", "install"], cwd=TREE, check=True, capture_output=True)
    check(home, typed(home, TREE))


@needs_root
@pytest.mark.usefixtures("device_for_all")
def test_the_first_minutes_in_the_readme_as_an_ordinary_user(home: Path) -> None:
    check(home, typed(home, tree_of_the_user(home), *as_user()))
