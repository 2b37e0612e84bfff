"""A READ of a file that the prefetch worker is fetching waits for it: one request to the store."""

import time
from pathlib import Path

import pytest

from diesel_fs.mounts import MountRequest
from diesel_fs.mounts.plans.control import Control, explicit
from tests.mounts import slow_daemon
from tests.mounts.observed import current_stats, figures, mounted, noise, put
from tests.waiting import wait_until

pytestmark = [pytest.mark.fuse, pytest.mark.only_session("native", "kernel")]

FILES, FILE_BYTES = 24, 20_000
FIRST = 8
STORE_S = "0.3"


def test_a_READ_of_a_file_that_is_being_fetched_makes_no_request_of_its_own(
    tmp_path: Path, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first files show that the store is slow. Then a reader is faster than the worker."""
    url = (tmp_path / "store").as_uri()
    files = {f"file{number:02}": noise(number, FILE_BYTES) for number in range(FILES)}
    put(url, files, one_each=True)
    for variable in (slow_daemon.STORE, slow_daemon.SPANS):
        monkeypatch.setenv(variable, STORE_S)
    request = MountRequest(url, "ds", str(tmp_path / "mount"), session=session)
    with mounted(request, slow_daemon.PROGRAM) as at, Control.connect(at) as control:
        entries, names = range(1, FILES + 1), sorted(files)  # the root is entry 0
        control.announce("first", [explicit(epoch=0, entries=entries[:FIRST])])
        wait_until(lambda: figures(current_stats(at), "residency")["pushed_entries"] >= FIRST)
        before = current_stats(at)
        control.announce("rest", [explicit(epoch=0, entries=entries[FIRST:])])
        time.sleep(float(STORE_S) / 3)  # the worker is fetching
        for name in names[FIRST:]:
            assert (at / name).read_bytes() == files[name]
        found = current_stats(at)
        reads, reads_before = figures(found, "reads"), figures(before, "reads")
        assert reads["held"] > reads_before["held"]
        assert reads["hits"] > reads_before["hits"]
        assert reads["misses"] == reads_before["misses"]
