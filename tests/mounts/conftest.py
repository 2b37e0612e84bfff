"""Mounts of plain folders for tests, over every session."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from diesel_fs.errors import DieselError
from diesel_fs.mounts import MountRequest, mount, stats, umount
from diesel_fs.mounts.mountpoints.mountpoint import mounted_at
from tests.mounts.folder_dataset import RELEASE_SUFFIX
from tests.unprivileged_user import USER

TESTED_SESSIONS = ("native", "kernel", "pyfuse3")
ALL_SESSIONS = ("test_agreement.py", "test_folders.py", "test_semantics.py")

PROGRAM = (sys.executable, "-m", "tests.mounts.folder_daemon")

ODD_NAMES = [
    *(b"x" * 255, b"not-utf-8-\xff\xfe", b"new\nline", b"tab\t", b"esc\x1b[31m", b'quote"'),
    *(b"back\\slash", b"-leading", b" leading space", b"trailing space ", b"~", b"*?[a]"),
    *("émoji-🐘".encode(), b"cafe\xcc\x81", b"caf\xc3\xa9", b"CON", b".hidden", b"a,b=c"),
]


@pytest.fixture(params=TESTED_SESSIONS, scope="session")
def session(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Choose the sessions of each test, and their tiers.

    A test marked `@pytest.mark.only_session(NAME, ...)` runs over these alone. Any other runs
    over the native session in the fast tier and over the kernel session in the deep one; those
    of `ALL_SESSIONS` also over pyfuse3, the reference.
    """
    kept: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        mark = item.get_closest_marker("only_session")
        session = item.callspec.params.get("session") if hasattr(item, "callspec") else None
        names = TESTED_SESSIONS if item.path.name in ALL_SESSIONS else TESTED_SESSIONS[:2]
        names = names if mark is None else mark.args
        if session is not None and session not in names:
            others.append(item)
            continue
        kept.append(item)
        if session is not None and session != names[0] and item.path.name != "test_semantics.py":
            item.add_marker("deep")
    config.hook.pytest_deselected(items=others)
    items[:] = kept


@dataclass(frozen=True, slots=True)
class LiveMount:
    """A mount, the source folder that it shows, and the process ID of its supervisor."""

    source: Path
    at: Path
    pid: int

    def release_reads(self) -> None:
        self.source.with_name(self.source.name + RELEASE_SUFFIX).touch()


def request_for(source: Path, at: Path, session: str = "auto", **options: object) -> MountRequest:
    """A request to mount a source folder. No test reaches its read deadline by chance."""
    values: dict[str, object] = {
        "url": source.as_uri(),
        "dataset": "folder",
        "mountpoint": str(at),
        "session": session,
        "read_deadline_s": 20.0,
        **options,
    }
    return MountRequest(**values)  # type: ignore[arg-type]  # fields by name


@contextmanager
def mounting(
    source: Path, at: Path, session: str = "auto", **options: object
) -> Iterator[LiveMount]:
    at.mkdir(exist_ok=True)
    mount(request_for(source, at, session, **options), program=PROGRAM)
    try:
        pid = stats(at)["pid"]
        assert isinstance(pid, int)
        yield LiveMount(source, at, pid)
    finally:
        while mounted_at(str(at)) is not None:
            with suppress(DieselError):
                umount(at, force=True)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "a").write_bytes(b"alpha" * 1000)
    (folder / "b").write_bytes(b"beta")
    return folder


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder that an ordinary user may use; pytest's own folders are closed to other users."""
    folder = Path(tempfile.mkdtemp(prefix="diesel-user-"))
    os.chown(folder, USER, USER)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, session: str) -> Iterator[LiveMount]:
    source = tmp_path_factory.mktemp("tree") / "source"
    source.mkdir()
    (source / "odd").mkdir()
    for number, name in enumerate(ODD_NAMES):
        with open(os.path.join(os.fsencode(source), b"odd", name), "wb") as file:
            file.write(b"content %d" % number)
    (source / "empty").touch()
    (source / "empty folder").mkdir(mode=0o700)
    (source / "deep" / "er" / "still").mkdir(parents=True)
    (source / "deep" / "er" / "still" / "file").write_bytes(b"found")
    (source / "page").write_bytes(os.urandom(4096))
    (source / "large").write_bytes(os.urandom(5_000_001))
    with (source / "sparse").open("wb") as file:
        file.write(b"a")
        file.truncate(1 << 20)
    (source / "program").write_text("#!/bin/sh\necho ran\n")
    (source / "program").chmod(0o755)
    (source / "secret").write_bytes(b"s")
    (source / "secret").chmod(0o640)
    (source / "link").symlink_to("deep/er/still/file")
    (source / "broken link").symlink_to(b"nowhere/\xff".decode("utf-8", "surrogateescape"))
    (source / "old").write_bytes(b"before 1970")
    os.utime(source / "old", ns=(-1_500_000_001, -1_500_000_001))
    os.utime(source / "empty", ns=(0, 4_900_000_000_123_456_789))
    with mounting(source, source.parent / "mount", session) as mounted:
        yield mounted
