"""FAULTS A with power cuts: acknowledged work is on the disk, other work is there whole or absent.

The real programs run under a kernel of their own, which writes only synced bytes to its disk, and
which is killed. Control tests run the same with syncs that do nothing, and must lose something.
POWERCUT_ROUNDS=N in the environment makes N times as many cuts.
"""

import os
import random
import shlex
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from diesel_fs.errors import DieselError, FormatError
from diesel_fs.format.snapshot.reader import Snapshot
from diesel_fs.ingest import FolderSource, PutOptions, put
from diesel_fs.repository.local import LocalRepository
from diesel_fs.storage.metadata.sqlite.database_file import LEASE_NAME
from diesel_fs.storage.metadata.sqlite.store import SqliteMetadata
from diesel_fs.storage.objects.folder import FolderStore

from ..bench.dlcmd import compile_program
from ..datasets import dataset_state
from ..repository.test_crash import source_tree
from ..rows import each_row
from ..storage.metadata.batches import check as check_metadata
from ..trees import Facts, facts, write
from . import guest_driver
from .machine import Machine, Tools, Unsuitable, after_reboot

pytestmark = pytest.mark.deep

TOP = Path(__file__).parents[2]
ROUNDS = int(os.environ.get("POWERCUT_ROUNDS", "1"))
PYTHON = shlex.quote(sys.executable)
DLCMD = f"{PYTHON} -m dlcmd --url file:///mnt/a/repo"
HERE = f"cd {shlex.quote(str(TOP))}\nexport PYTHONPATH={shlex.quote(f'{TOP}:{TOP}/cli')}\n"


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Tools:
    compile_program()  # the guest cannot keep compiled modules
    try:
        return Tools(tmp_path_factory.mktemp("tools"))
    except Unsuitable as why:
        pytest.skip(str(why))


class Story:
    """A put, a put that replaces and deletes, and a deletion; with the dataset after each."""

    def __init__(self, folder: Path) -> None:
        self.before = source_tree(folder / "before")
        self.after = folder / "after"
        shutil.copytree(self.before, self.after)
        write(self.after, {"d0/f00": b"changed", "new": b"new", "large": os.urandom(150_000)})
        (self.after / "d1/f01").unlink()
        for path in [*folder.rglob("*"), self.before, self.after]:
            os.utime(path, (int(path.stat().st_mtime),) * 2)  # the guest sees whole seconds
        self.states: list[Facts] = [{}, facts(self.before), facts(self.after)]
        self.states.append(self.states[2].copy())
        del self.states[3][b"d0/f05"]

    def script(self, mode: str, preload: str = "", jobs: int = 1) -> str:
        small = f"--chunk-size 64K --jobs {jobs}"
        lines = (
            "echo @began",
            f"run 1 {preload} {DLCMD} put {self.before} ds {small}",
            f"run 2 {preload} {DLCMD} put {self.after} ds {small} --delete",
            f"run 3 {preload} {DLCMD} rm ds/d0/f05",
        )
        return "\n".join([HERE, *([ROLLBACK] if mode == "rollback" else []), *lines])


ROLLBACK = f"run 0 {DLCMD} put README.md other\n: > /mnt/a/repo/meta.lease\n"
"""A lease file, even a free one, stands for another host: then SQLite uses no WAL, as on a network
file system."""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Story:
    return Story(tmp_path_factory.mktemp("story"))


def done(said: list[str]) -> int:
    return max([int(line.split()[1]) for line in said if line.startswith("did ")], default=0)


def check(root: Path, story: Story, acknowledged: int, *, between: bool) -> None:
    """With `between`, the next step may have begun."""
    old = story.states[acknowledged]
    new = story.states[min(acknowledged + 1, 3)] if between else old
    lease = root / "repo/meta.lease"
    if lease.exists():
        lease.write_bytes(b"")  # this host is another than the guest was; its lease has expired
    with LocalRepository.open((root / "repo").as_uri(), create=not acknowledged) as repository:
        assert [found.name for found in repository.objects.list("") if not found.bytes] == []
        if "ds" not in [info.name for info in repository.datasets()]:
            assert not acknowledged
        else:
            check_dataset(repository, old, new, exactly=acknowledged > 0 and not between)
        put(repository, "ds", FolderSource(story.after), options=PutOptions(delete=True))
        assert dataset_state(repository) == story.states[2]
        assert repository.verify("ds").problems == []


def check_dataset(repository: LocalRepository, old: Facts, new: Facts, *, exactly: bool) -> None:
    if exactly:
        assert dataset_state(repository) == old  # before any writer repairs something
    repository.begin("ds")  # a repository that was cut off before it had a marker gets one
    assert repository.verify("ds").problems == []
    showing = dataset_state(repository)
    if exactly:
        assert showing == old
    for path in {**old, **new, **showing}:
        if "file" in (kinds := [facts[path][0] for facts in (old, new) if path in facts]):
            assert showing.get(path) in (old.get(path), new.get(path)), path
        else:
            assert kinds or showing[path][0] == "folder", path
    repository.recover("ds")
    again = dataset_state(repository)
    for path in {**showing, **again}:  # rebuilt = live + orphans, which are of the new state
        assert again.get(path) in (showing.get(path), new.get(path)), path


def steps(machine: Machine, answers: Path) -> Iterator[tuple[int, str]]:
    """Each step of the guest's programs; they are stopped until the next one is requested."""
    for report in machine.reports():
        if report.startswith("step "):
            _, number, call = report.split()
            yield int(number), call
            (answers / number).touch()


@pytest.mark.parametrize("mode", ["wal", "rollback"])
def test_A4_A7_power_cut_at_every_step_and_right_after_the_acknowledgement(
    tools: Tools, story: Story, tmp_path: Path, mode: str
) -> None:
    """Cuts at every step if POWERCUT_ROUNDS is large; otherwise at some, drawn by a seed."""
    disk = tools.new_disk(tmp_path / "disk")
    (answers := tmp_path / "answers").mkdir()
    script = story.script(mode, tools.preloaded(steps=answers))
    dice = random.Random(mode)
    checked: set[str] = set()
    cuts, acknowledged = 0, 0
    with Machine(tools, tmp_path, {"a": disk}, script) as machine:
        for _number, call in steps(machine, answers):
            first = done(machine.said) > acknowledged  # since then nothing has got to the disk
            acknowledged = done(machine.said)
            if first or call not in checked or dice.random() < ROUNDS / 25:
                checked.add(call)
                cuts += 1
                copy = machine.copy_disk(disk, tmp_path / "copy")
                with after_reboot(copy, tmp_path / "after") as root:
                    check(root, story, acknowledged, between=not first)
        assert done(machine.said) == 3
        assert cuts >= 5, "A16: proves nothing"
        assert {"fsync", "link", "unlink"} <= checked
        copy = machine.copy_disk(disk, tmp_path / "copy")
        machine.cut()
    assert copy.read_bytes() == disk.read_bytes(), "a copy is not what a cut leaves"
    with after_reboot(disk, tmp_path / "after") as root:
        check(root, story, 3, between=False)


@pytest.mark.parametrize("seed", range(2 * ROUNDS))
def test_A1_to_A11_a_power_cut_at_any_time_loses_no_acknowledged_step(
    tools: Tools, story: Story, tmp_path: Path, seed: int
) -> None:
    disk = tools.new_disk(tmp_path / "disk")
    dice = random.Random(seed)
    with Machine(tools, tmp_path, {"a": disk}, story.script("wal", jobs=2)) as machine:
        machine.wait_for("began")
        began_s, wait_s = time.monotonic(), 0.8
        if seed % 2:
            machine.wait_for("did 1")
            wait_s = time.monotonic() - began_s  # the rest takes longer than the first put did
        time.sleep(dice.random() * wait_s)
        machine.cut()
    assert done(machine.said) < 3, "A16: the cut came after the end"
    with after_reboot(disk, tmp_path / "after") as root:
        check(root, story, done(machine.said), between=True)


@contextmanager
def cut_after_the_first_put(tools: Tools, story: Story, folder: Path, skip: str) -> Iterator[Path]:
    """The syncs of some kind do nothing."""
    disk = tools.new_disk(folder / "disk")
    with Machine(
        tools, folder, {"a": disk}, story.script("wal", tools.preloaded(skip=skip))
    ) as machine:
        machine.wait_for("did 1")
    with after_reboot(disk, folder / "after") as root:
        yield root


def test_A16_without_syncs_all_is_lost(tools: Tools, story: Story, tmp_path: Path) -> None:
    with cut_after_the_first_put(tools, story, tmp_path, "all") as root:
        assert not (root / "repo").exists(), "the guest's disk keeps what was not synced"


def test_A4_without_sync_of_files_they_are_empty_under_their_names(
    tools: Tools, story: Story, tmp_path: Path
) -> None:
    with cut_after_the_first_put(tools, story, tmp_path, "files") as root:
        chunks = [path for path in (root / "repo/datasets").rglob("chunks/*/*") if path.is_file()]
        assert chunks
        assert any(not path.stat().st_size for path in chunks)


# The stores by themselves, so that no later sync of another covers a missing one: each case on a
# disk of its own, all of one machine, which has room for 16. "" skips no sync.

SKIPS = ("", "files", "folders")
OBJECT_CASES = [(what, skip) for what in ("put", "delete", "replace") for skip in SKIPS]
SAVE_CASES = [("save", skip) for skip in SKIPS]
COMMIT_CASES = [(mode, skip) for mode in ("wal", "rollback") for skip in ("", "files")]
Disks = dict[tuple[str, str], Path]


@pytest.fixture(scope="module")
def disks(tools: Tools, tmp_path_factory: pytest.TempPathFactory) -> Disks:
    """The disk of each case after a power cut that follows the acknowledgement."""
    folder = tmp_path_factory.mktemp("stores")
    cases = OBJECT_CASES + SAVE_CASES + COMMIT_CASES
    found = {chr(ord("a") + n): tools.new_disk(folder / f"disk{n}") for n in range(len(cases))}
    lines = [HERE]
    for letter, (what, skip) in zip(found, cases, strict=True):
        preload = tools.preloaded(skip=skip) if skip else ""
        driver = f"{preload} {PYTHON} -m tests.powercut.guest_driver {what} /mnt/{letter}"
        lines.append(f"{driver} || echo @failed {what} {skip}")
    with Machine(tools, folder, found, "\n".join(lines)) as machine:
        machine.wait_for("end")
        machine.cut()
    acknowledged = [line for line in machine.said if line.startswith("did ")]
    expected = len(OBJECT_CASES + SAVE_CASES) + guest_driver.COMMITS * len(COMMIT_CASES)
    assert len(acknowledged) == expected, "A16: proves nothing"
    return dict(zip(cases, found.values(), strict=True))


@each_row(("what", "skip"), OBJECT_CASES)
def test_A4_acknowledged_objects_survive_unless_a_sync_is_left_out(
    disks: Disks, tmp_path: Path, what: str, skip: str
) -> None:
    wanted = {name: guest_driver.content(name) for name in guest_driver.SIZES}
    if what == "delete":
        del wanted[guest_driver.object_name("a")]
    if what == "replace":
        wanted[guest_driver.LEASE] = b"new"
    found: dict[str, bytes] = {}
    with after_reboot(disks[what, skip], tmp_path / "after") as root, suppress(DieselError):
        store = FolderStore.open(root)
        found = {name: bytes(store.get(name)) for name in store.housekeeping.names("datasets/")}
    assert (found == wanted) == (not skip)


@each_row(("what", "skip"), SAVE_CASES)
def test_A12_a_saved_snapshot_survives_unless_a_sync_is_left_out(
    disks: Disks, tmp_path: Path, what: str, skip: str
) -> None:
    with after_reboot(disks[what, skip], tmp_path / "after") as root:
        try:
            name = Snapshot(memoryview((root / "saved").read_bytes()), verify=True).dataset
        except (OSError, FormatError):
            name = "lost"
        assert (name == "new") == (not skip)


@each_row(("mode", "skip"), COMMIT_CASES)
def test_A7_every_acknowledged_commit_survives(
    disks: Disks, tmp_path: Path, mode: str, skip: str
) -> None:
    """The last commit is kept, too: an unlink ends a rollback journal."""
    with after_reboot(disks[mode, skip], tmp_path / "after") as root:
        (root / LEASE_NAME).unlink(missing_ok=True)
        path = root / "meta.sqlite"
        if skip:
            assert not path.exists() or not path.stat().st_size
            return
        numbers = range(1, guest_driver.COMMITS + 1)
        with closing(SqliteMetadata.open(path)) as meta:
            chunks = [guest_driver.made_chunk(number) for number in numbers]
            assert len(meta.chunks(guest_driver.IDENTITY)) == len(chunks)
            check_metadata(meta, guest_driver.DATASET_NAME, chunks)
