"""Buckets and the process that uses them: forked children, memory, threads, and trust in TLS.

Each test runs a program of its own, since the library's runtime stays in a process for ever.
"""

import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType

import pytest

from tests.server.certificates import Authority
from tests.storage.objects.s3_server import credentials, without_proxies
from tests.storage.objects.scripted_s3 import ScriptedS3
from tests.storage.objects.scripted_store import URL, chunk, key

NAME = chunk("aaaa")
TREE = Path(__file__).resolve().parents[3]
PRELUDE = f"""
import os, signal, sys, time, uuid
from diesel_fs.errors import DieselError, ObjectStoreError, TruncatedError
from diesel_fs.storage.objects.cloud.store import CloudStore, open_cloud
from diesel_fs.storage.objects.cloud.location import parse_bucket_url
from diesel_fs.storage.objects.cloud.requests import CloudRequests

NAME = {NAME!r}
def unused():
    "A store that has sent no request."
    return CloudStore(CloudRequests(parse_bucket_url({URL!r})), uuid.uuid4())

def anew():
    return unused().get(NAME)

def in_child(act):
    "What a forked child returns within 5 seconds; a child that hangs is killed."
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(5)
        try:
            printed = bytes(act())
        except ObjectStoreError as error:
            printed = str(error).encode()
        os.write(write, printed)
        os._exit(0)
    os.close(write)
    with open(read, "rb") as file:
        printed = file.read()
    assert os.waitpid(pid, 0)[1] == 0, "it hung"
    return printed.decode()
"""
FORKED = "an object store in the cloud was used before this process was forked"


def run(code: str, endpoint: str, more: Mapping[str, str] = MappingProxyType({})) -> str:
    environ = {**without_proxies(), **credentials(endpoint), "PYTHONPATH": str(TREE), **more}
    environ["OPENBLAS_NUM_THREADS"] = "1"  # numpy's threads would be counted
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", PRELUDE + code]
    done = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        # The parent has sent nothing before the fork: the child can send requests, and so can the
        # parent and its next child
        ("print(in_child(anew))", "content"),
        ("print(in_child(get), in_child(get), get().decode())", "content content content"),
        # The parent has sent a request: the child gets an error at once, with any store
        ("anew(); print(in_child(anew))", FORKED),
        ("anew(); print(in_child(lambda: open_cloud('s3://bucket').get(NAME)))", FORKED),
        ("get(); print(in_child(lambda: in_child(get).encode()))", FORKED),
        ("print(in_child(lambda: anew() and in_child(anew).encode()))", FORKED),
        # The parent can go on sending requests
        ("get(); printed = in_child(get); print(get().decode(), printed)", f"content {FORKED}"),
    ],
)
def test_Z9_a_forked_child_works_or_fails(server: ScriptedS3, code: str, printed: str) -> None:
    server.put(key(NAME), b"content")
    begin = "store = unused(); get = lambda: store.get(NAME); assert not store.fork_safe\n"
    assert printed in run(begin + code, server.endpoint)


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


def test_a_large_object_is_not_copied(server: ScriptedS3) -> None:
    """A put was measured to take 0 MiB of memory beside the object, and a read 3 MiB.

    A read of a huge length takes no memory either."""
    code = """
put = peak_bytes(lambda: store.put(NAME, parts))
room = bytearray(SIZE)
room[::4096] = b"x" * (SIZE // 4096)
read = peak_bytes(lambda: store.read_into(NAME, 0, room))
assert room == content
def read_too_much():
    try:
        store.get("datasets/" + "0" * 32 + "/DATASET", 0, 1 << 40)
    except TruncatedError:
        return
    raise AssertionError
print(put, read, peak_bytes(read_too_much))
"""
    put, read, huge = map(int, run(MEASURE + code, server.endpoint).split())
    assert put < 16 << 20
    assert read < 16 << 20
    assert huge < 8 << 20


def test_importing_sends_nothing_and_starts_no_thread(server: ScriptedS3) -> None:
    code = "unused(); print(len(os.listdir('/proc/self/task')))"
    assert run(code, server.endpoint) == "1\n"
    assert server.requests == []


class Redirecting(ThreadingHTTPServer):
    daemon_threads = True
    elsewhere = ""
    requests = 0

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: clients that do not trust the certificate hang up."""


class _Redirect(BaseHTTPRequestHandler):
    server: Redirecting

    def do_GET(self) -> None:
        self.server.requests += 1
        self.send_response(307)
        self.send_header("Location", self.server.elsewhere + self.path)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def redirecting(authority: Authority) -> Iterator[Redirecting]:
    pair = authority.issue()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    with Redirecting(("127.0.0.1", 0), _Redirect) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


@pytest.mark.parametrize(
    ("trusted", "complaint"), [(True, "from https to http"), (False, "certificate is not trusted")]
)
def test_O19_https_does_not_become_http(
    server: ScriptedS3,
    redirecting: Redirecting,
    authority: Authority,
    trusted: bool,
    complaint: str,
) -> None:
    redirecting.elsewhere = server.endpoint
    code = f"""
try:
    open_cloud({URL!r})
except DieselError as error:
    print(type(error).__name__, error)
"""
    trust = {"SSL_CERT_FILE": str(authority.path)} if trusted else {}
    printed = run(code, f"https://127.0.0.1:{redirecting.server_port}", trust)
    assert printed.startswith("PermanentStoreError ")
    assert complaint in printed
    assert redirecting.requests == trusted
    assert server.requests == []
