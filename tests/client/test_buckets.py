"""Tests of the Python API over a bucket, also in processes that fork.

The library that reads buckets hangs in forked children, so a helper process reads for the process
that opens the dataset, and for its children.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from diesel_fs.client.dataset import connect
from diesel_fs.errors import NoSuchDataset, NoSuchPath, ObjectMissing, ObjectStoreError
from diesel_fs.storage.objects.cloud import opening
from diesel_fs.storage.objects.cloud.proxy import CloudProxy
from tests.cli.conftest import program_environment
from tests.cli.conftest import redis_server as redis_server
from tests.forks import in_child
from tests.storage.conftest import s3 as s3
from tests.storage.metadata.redis_servers import RedisServer, until
from tests.storage.objects.s3_server import Server
from tests.waiting import wait_until

CONTENTS = {f"d{i % 3}/f{i:02}": b"content %d" % i * (i + 1) for i in range(40)}
TRAIN = Path(__file__).with_name("train.py")
DEADLINE_S = 120.0


@pytest.fixture
def url(s3: Server, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The dataset has a few chunks and was put from Python. When the test ends, the bucket's helper
    must end too."""
    # A `dlcmd` that ran in this process opens buckets without a helper
    monkeypatch.setattr(opening, "_opener", opening._by_helper)
    for name, text in s3.environ.items():
        monkeypatch.setenv(name, text)
    with redis_server.client() as client:
        client.flushall()
    found = f"{s3.place()}?meta={redis_server.url}"
    with connect("pets", found, create=True) as dataset:
        for number, (path, content) in enumerate(CONTENTS.items()):
            dataset.put(content, path)
            if number % 10 == 0:
                dataset.flush()
    wait_for_helper_end(found)
    yield found
    wait_for_helper_end(found)


def helpers(url: str) -> list[int]:
    words = {b"diesel_fs.storage.objects.cloud.proxy_process", url.split("?")[0].encode()}
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if words <= {*each.read_bytes().split(b"\0")}:
                found.append(int(each.parent.name))
    return found


def wait_for_helper_end(url: str) -> None:
    until(lambda: not helpers(url), "the end of the helper", DEADLINE_S)


def test_a_dataset_in_a_bucket_is_read_written_and_purged(url: str) -> None:
    with connect("pets", url) as dataset:
        assert [dataset.get(path) for path in CONTENTS] == [*CONTENTS.values()]
        assert [*map(bytes, dataset.read_many([*CONTENTS]))] == [*CONTENTS.values()]
        dataset.put(b"new", "new")
        dataset.delete("d0/f00")
        assert dataset.get("new") == b"new"
        with pytest.raises(NoSuchPath):
            dataset.get("d0/f00")
        before = dataset.version
        dataset.put(os.urandom(9 << 20), "large")
        dataset.flush()
        with connect(f"pets@{before}", url) as older:
            assert "large" not in older.ls()
        dataset.purge(grace_s=0, max_unused=0.0)
        assert len(dataset.get("large")) == 9 << 20


@pytest.mark.deep
@pytest.mark.real_start  # the program finds out whether it was imported
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_of_a_data_loader_read_from_a_bucket(url: str, start: str) -> None:
    ended = subprocess.run(
        [sys.executable, TRAIN, url, start, "2"],
        env=program_environment(),
        capture_output=True, text=True, check=False, timeout=DEADLINE_S,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    epochs = [json.loads(line) for line in ended.stdout.splitlines()]
    expected = {path: hashlib.sha256(content).hexdigest() for path, content in CONTENTS.items()}
    assert [dict(epoch) for epoch in epochs] == [expected, expected]
    assert [len(epoch) for epoch in epochs] == [40, 40]
    assert [path for path, _ in epochs[0]] != [path for path, _ in epochs[1]]


def test_Z9_forked_children_share_their_parents_helper(url: str) -> None:
    """Other threads of the parent read meanwhile."""
    with connect("pets", url, memory_bytes=1) as dataset:
        ends = threading.Event()

        def read() -> None:
            for path, content in CONTENTS.items():
                assert dataset.get(path) == content

        def read_on() -> None:
            while not ends.is_set():
                read()

        readers = [threading.Thread(target=read_on) for _ in range(2)]
        for reader in readers:
            reader.start()
        assert [in_child(read) for _ in range(4)] == [0] * 4
        assert len(helpers(url)) == 1
        ends.set()
        for reader in readers:
            reader.join()
        read()


def test_Z9_a_child_that_outlives_its_parent_reads_on(url: str) -> None:
    reports, report = os.pipe()
    waits, go_on = os.pipe()

    def parent() -> None:
        dataset = connect("pets", url, memory_bytes=1)
        dataset.get("d0/f00")

        def child() -> None:
            os.read(waits, 1)
            assert all(dataset.get(path) == content for path, content in CONTENTS.items())
            os.write(report, b"1")

        if os.fork() == 0:
            os._exit(in_child(child))

    assert in_child(parent) == 0
    os.close(report)
    assert len(helpers(url)) == 1
    os.write(go_on, b"+")
    with open(reports, "rb") as answer:
        assert answer.read() == b"1"
    os.close(waits)
    os.close(go_on)


def test_a_killed_helper_is_replaced_and_logged(url: str, caplog: pytest.LogCaptureFixture) -> None:
    with connect("pets", url, memory_bytes=1) as dataset:
        assert dataset.get("d0/f00") == CONTENTS["d0/f00"]
        (before,) = helpers(url)
        os.kill(before, signal.SIGKILL)
        assert dataset.get("d1/f13") == CONTENTS["d1/f13"]
        (after,) = helpers(url)
        assert after != before
        assert "starts another" in caplog.text
        os.kill(after, signal.SIGKILL)

        def read() -> None:
            assert dataset.get("d2/f32") == CONTENTS["d2/f32"]

        assert in_child(read) == 0
        read()


def test_a_put_whose_helper_is_killed_raises_an_error(url: str) -> None:
    lost = pytest.raises(ObjectStoreError, match=r"has ended; its log is .*buckets.log")
    with lost, connect("pets", url) as dataset:
        dataset.put(b"1", "one")
        os.kill(helpers(url)[0], signal.SIGKILL)
    with connect("pets", url) as dataset:
        assert len(dataset.ls()) == 3


def test_a_call_after_an_interrupted_one_gets_its_own_answer(url: str) -> None:
    """As after Ctrl-C in a notebook during a call."""
    store = CloudProxy.open(url.split("?")[0])
    (helper,) = helpers(url)
    names = [*store.housekeeping.names("")]
    sizes = {name: store.stat(name).bytes for name in names}

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    os.kill(helper, signal.SIGSTOP)
    threads = list(Path(f"/proc/{helper}/task").glob("*/stat"))
    wait_until(lambda: all(") T " in thread.read_text() for thread in threads))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            store.get(names[0])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.kill(helper, signal.SIGCONT)
        signal.signal(signal.SIGALRM, before)
    for name, size in sizes.items():
        assert len(store.get(name)) == size
    assert helpers(url) == [helper]
    store.housekeeping.close_idle()


def test_errors_of_opening_pass_through_the_helper(url: str) -> None:
    place, _, meta = url.partition("?")
    with pytest.raises(ObjectMissing, match="no DIESEL-FS store is here"):
        connect("pets", f"{place}-nowhere?{meta}")
    with pytest.raises(ObjectStoreError, match="no-such-bucket"):
        connect("pets", f"s3://no-such-bucket-of-ours/x?{meta}")
    with pytest.raises(NoSuchDataset):
        connect("dogs", url)
