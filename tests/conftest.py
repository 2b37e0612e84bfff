"""Fixtures of every test: an empty home, no DIESEL_ variables, and no mount that is left behind.

Tests are in two tiers. A test that is marked `deep` runs in `make test-deep` alone, and property
tests run in both, with few examples and with many (`tests/examples.py`). Programs are started by a
fork (`tests/zygote.py`), and what each test costs is counted (`tests/costs.py`).

A test that hangs dumps its stacks by pytest's `faulthandler_timeout` (see pyproject.toml).
"""

import fcntl
import gc
import os
import stat
import subprocess
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import pytest

from diesel_fs.repository.local import LocalRepository
from tests import affected, costs, zygote
from tests.examples import register_profiles

register_profiles()


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(costs.CostsPlugin())


@pytest.fixture(scope="session", autouse=True)
def own_environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give programs under test a new user's home, and no options in the environment."""
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("DIESEL_")]:
            patch.delenv(name)
        patch.setenv("HOME", str(home))
        for kind in ("CACHE", "CONFIG", "DATA", "STATE"):
            patch.setenv(f"XDG_{kind}_HOME", str(home / kind.lower()))
        # Programs under test start from compiled modules, as installed ones do.
        patch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
        # A program that a signal ends prints its stacks.
        patch.setenv("PYTHONFAULTHANDLER", "1")
        with zygote.installed():
            yield


def _mounts_below(folder: Path) -> list[str]:
    lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    return [
        point for point in (line.split()[1] for line in lines) if point.startswith(f"{folder}/")
    ]


@pytest.fixture(scope="module", autouse=True)
def no_mount_is_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fail the module that leaves a mount behind, and detach the mount, so that no process hangs on
    it."""
    yield
    left = _mounts_below(tmp_path_factory.getbasetemp())
    detach = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-uz"]
    for point in left:
        subprocess.run([*detach, point], check=False)
    assert not left, f"left mounted: {left}"


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[LocalRepository]:
    with LocalRepository.open((tmp_path / "store").as_uri(), create=True) as opened:
        yield opened


@pytest.fixture
def device_for_all() -> Iterator[None]:
    """Let all users open /dev/fuse, as distributions do; for tests that run as root."""
    before = stat.S_IMODE(os.stat("/dev/fuse").st_mode)
    os.chmod("/dev/fuse", 0o666)  # noqa: S103  # as on any desktop
    yield
    os.chmod("/dev/fuse", before)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--affected",
        metavar="COMMIT",
        help="of the tests marked deep, run those of packages that changes since COMMIT reach",
    )


@pytest.hookimpl(tryfirst=True)  # before marks deselect tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the tests marked `alone`, for which other processes wait. If /dev/fuse cannot be
    opened, skip those marked `fuse`, with the reason."""
    if commit := config.getoption("--affected"):
        affected.mark(items, affected.folders(affected.changed_files(commit)))
    items.sort(key=lambda item: not _is_alone(item))
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as error:
        skip = pytest.mark.skip(reason=f"cannot open /dev/fuse: {error.strerror}")
        for item in items:
            if item.get_closest_marker("fuse"):
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Exclude the objects of the collection, which live as long as the process, from all later
    garbage collections: there are a million of them."""
    gc.collect()
    gc.freeze()


_TURN = pytest.StashKey[ExitStack]()
"""The turn of the test that ran last, if it was alone and the next one is, too."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Run tests marked `alone` while no other process of this checkout runs a test."""
    stash, alone = item.config.stash, _is_alone(item)
    real_start = item.get_closest_marker("real_start") is not None
    with zygote.by_exec() if real_start else nullcontext(), stash.get(_TURN, ExitStack()) as turn:
        if _TURN in stash:
            del stash[_TURN]
        else:
            turn.enter_context(_turn(alone=alone))
        result = yield
        if alone and nextitem is not None and _is_alone(nextitem):
            stash[_TURN] = turn.pop_all()  # otherwise it would wait for a test of another process
        return result


def _is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("alone") is not None


@contextmanager
def _turn(*, alone: bool) -> Iterator[None]:
    """Take part in the turns of this checkout's test processes, by locks on two files.

    Each test holds the room, shared, or alone if it needs that. A test that waits to be alone holds
    the door meanwhile, so that no other test enters; otherwise it would wait forever.
    """
    with open(__file__, "rb") as door, Path(__file__).with_name("__init__.py").open("rb") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        try:
            yield
        finally:  # unlock, not only close: a child that the test left may have the file open
            fcntl.flock(room, fcntl.LOCK_UN)
