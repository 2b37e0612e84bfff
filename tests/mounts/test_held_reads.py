"""A READ of a file that the prefetch worker is fetching waits for it: one request to the store."""

import time
from pathlib import Path

import pytest

from diesel_fs.mounts import MountRequest
from diesel_fs.mounts.plans.control import Control, explicit
from tests.mounts import slow_daemon
from tests.mounts.observed import current_stats, figures, mounted, noise, put
from tests.waiting import wait_until

pytestmark = [pytest.mark.fuse, pytest.mark.only_session("native", "kernel", "pyfuse3")]

GROUPS, GROUP_FILES, FILE_BYTES = 10, 4, 20_000
STORE_S = 0.5


def test_a_READ_of_a_file_that_is_being_fetched_gets_the_bytes_of_the_worker(
    tmp_path: Path, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first files show that the store is slow. Then a reader opens a file that the worker is
    fetching. On a busy machine it may come too early or too late: then other files are tried."""
    url = (tmp_path / "store").as_uri()
    names = [f"file{number:02}" for number in range(GROUPS * GROUP_FILES)]
    files = {name: noise(number, FILE_BYTES) for number, name in enumerate(names)}
    put(url, files, one_each=True)
    for variable in (slow_daemon.STORE, slow_daemon.SPANS):
        monkeypatch.setenv(variable, str(STORE_S))
    request = MountRequest(url, "ds", str(tmp_path / "mount"), session=session)
    with mounted(request, slow_daemon.PROGRAM) as at, Control.connect(at) as control:

        def pushed() -> int:
            return figures(current_stats(at), "residency")["pushed_entries"]

        def announce(group: int) -> None:
            first = 1 + group * GROUP_FILES  # the root is entry 0
            entries = range(first, first + GROUP_FILES)
            control.announce(f"group{group}", [explicit(epoch=0, entries=entries)])

        announce(0)
        wait_until(lambda: pushed() >= GROUP_FILES)
        before = figures(current_stats(at), "reads")
        found = before
        for group in range(1, GROUPS):
            announce(group)
            time.sleep(STORE_S / 3)
            name = names[group * GROUP_FILES]
            assert (at / name).read_bytes() == files[name]
            found = figures(current_stats(at), "reads")
            if found["hits"] > before["hits"]:
                break
        assert found["hits"] > before["hits"]
        assert found["held"] > before["held"]
