"""Buckets and the process that uses them: forked children, memory, and threads.

Each test runs a program of its own, since the library's runtime stays in a process for ever.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.storage.objects.s3_server import credentials, without_proxies
from tests.storage.objects.scripted_s3 import ScriptedS3
from tests.storage.objects.scripted_store import URL, chunk, key

NAME = chunk("aaaa")
TREE = Path(__file__).resolve().parents[3]
PRELUDE = f"""
import os, signal, sys, time, uuid
from diesel_fs.errors import ObjectStoreError
from diesel_fs.storage.objects.cloud.store import CloudStore, open_cloud
from diesel_fs.storage.objects.cloud.location import parse_bucket_url
from diesel_fs.storage.objects.cloud.requests import CloudRequests

NAME = {NAME!r}
def unused():
    "A store that has sent no request."
    return CloudStore(CloudRequests(parse_bucket_url({URL!r})), uuid.uuid4())

def in_child(act):
    "What a forked child returns within 5 seconds; a child that hangs is killed."
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(5)
        try:
            said = bytes(act())
        except ObjectStoreError as error:
            said = str(error).encode()
        os.write(write, said)
        os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        said = file.read()
    assert os.waitpid(pid, 0)[1] == 0, "it hung"
    return said.decode()
"""
FORKED = "before this process was forked"


def run(code: str, server: ScriptedS3) -> str:
    """What the program prints."""
    environ = {**without_proxies(), **credentials(server.endpoint), "PYTHONPATH": str(TREE)}
    environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's threads would be counted
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PRELUDE + code]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("code", "said"),
    [
        # The parent has sent nothing before the fork: the child can send requests.
        ("print(in_child(lambda: unused().get(NAME)))", "content"),
        ("store = unused(); print(in_child(lambda: store.get(NAME)))", "content"),
        # The parent can still send requests, and so can its next child.
        (
            (
                "store = unused(); a = in_child(lambda: store.get(NAME))\n"
                "print(a, in_child(lambda: store.get(NAME)), store.get(NAME).decode())"
            ),
            "content content content",
        ),
        # The parent has sent a request: the child gets an error at once, with any store.
        ("store = unused(); store.get(NAME); print(in_child(lambda: store.get(NAME)))", FORKED),
        ("unused().get(NAME); print(in_child(lambda: unused().get(NAME)))", FORKED),
        (
            "unused().get(NAME); print(in_child(lambda: open_cloud('s3://bucket').get(NAME)))",
            FORKED,
        ),
        (
            (
                "store = unused(); store.get(NAME)\n"
                "print(in_child(lambda: in_child(lambda: store.get(NAME)).encode()))"
            ),
            FORKED,
        ),
        (
            (
                "def child():\n"
                "  unused().get(NAME)\n"
                "  return in_child(lambda: unused().get(NAME)).encode()\n"
                "print(in_child(child))"
            ),
            FORKED,
        ),
        # The parent can go on sending requests.
        (
            (
                "store = unused(); store.get(NAME); in_child(lambda: store.get(NAME))\n"
                "print(store.get(NAME).decode())"
            ),
            "content",
        ),
    ],
)
def test_Z9_a_forked_child_works_or_gets_an_error_at_once(code: str, said: str) -> None:
    with ScriptedS3() as server:
        server.put(key(NAME), b"content")
        assert said in run("assert not unused().fork_safe\n" + code, server)


MEASURE = """
def peak_bytes(act):
    "By how many bytes the peak of resident memory grows."
    def status(name):
        for line in open("/proc/self/status"):
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    before = status("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")
    act()
    return status("VmHWM") - before
store = unused()
SIZE = 64 << 20
content = bytearray(os.urandom(1 << 20) * 64)
parts = [memoryview(content)[at:at + (3 << 20)] for at in range(0, SIZE, 3 << 20)]
store.supports_conditional_put = True
store.put("datasets/" + "0" * 32 + "/DATASET", [b"x" * 100_000])
"""


def test_a_large_object_is_not_copied() -> None:
    """A put was measured to take 0 MiB of memory beside the object, and a read 3 MiB."""
    code = (
        MEASURE
        + """
put = peak_bytes(lambda: store.put(NAME, parts))
room = bytearray(SIZE)
room[::4096] = b"x" * (SIZE // 4096)
read = peak_bytes(lambda: store.read_into(NAME, 0, room))
assert room == content
print(put, read)
"""
    )
    with ScriptedS3() as server:
        put, read = map(int, run(code, server).split())
    assert put < 16 << 20
    assert read < 16 << 20


def test_a_huge_length_takes_no_memory() -> None:
    code = (
        MEASURE
        + """
from diesel_fs.errors import TruncatedError
def act():
    try:
        store.get("datasets/" + "0" * 32 + "/DATASET", 0, 1 << 40)
    except TruncatedError:
        return
    raise AssertionError
print(peak_bytes(act))
"""
    )
    with ScriptedS3() as server:
        assert int(run(code, server)) < 8 << 20


def test_importing_sends_nothing_and_starts_no_thread() -> None:
    code = "unused(); print(len(os.listdir('/proc/self/task')))"
    with ScriptedS3() as server:
        assert run(code, server) == "1\n"
        assert server.asked == []
