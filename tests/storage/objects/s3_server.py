"""A complete S3 server for the tests of one session: moto's, or one that the environment names.

If `S3_SERVER_UNDER_TEST` is set, it is the URL of the server's endpoint, `S3_BUCKET_UNDER_TEST` a
bucket there, and `AWS_...` are the credentials (`make test-s3` sets all of them). Otherwise moto is
started as a process of its own, on a free port.
"""

import contextlib
import os
import re
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

BUCKET = "diesel-tests"
START_S = 60.0


@dataclass(frozen=True, slots=True)
class Server:
    bucket: str
    environ: Mapping[str, str]

    def place(self) -> str:
        return f"s3://{self.bucket}/{uuid.uuid4().hex}"


def credentials(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing-secret",
        "AWS_REGION": "us-east-1",
    }


def without_proxies() -> dict[str, str]:
    """This process's environment without proxies, which must not come before a test's server."""
    return {name: text for name, text in os.environ.items() if "proxy" not in name.lower()}


@contextlib.contextmanager
def s3_server(folder: Path) -> Iterator[Server]:
    if endpoint := os.environ.get("S3_SERVER_UNDER_TEST"):
        environ = {**os.environ, "AWS_ENDPOINT_URL": endpoint}
        yield Server(os.environ.get("S3_BUCKET_UNDER_TEST", BUCKET), environ)
        return
    log = folder / "moto.log"
    program = "tests.storage.objects.moto_program"
    command = [sys.executable, "-m", program, "-H", "127.0.0.1", "-p", "0"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=without_proxies())
    try:
        endpoint = _wait_for_endpoint(log, process)
        request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")  # noqa: S310
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=START_S):
            yield Server(BUCKET, credentials(endpoint))
    finally:
        process.kill()
        process.wait(START_S)


def _wait_for_endpoint(log: Path, process: "subprocess.Popen[bytes]") -> str:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        text = log.read_text(encoding="utf-8")
        if match := re.search(r"Running on (http://127\.0\.0\.1:\d+)", text):
            return match[1]
        time.sleep(0.05)
    raise AssertionError(f"moto did not start: {log.read_text(encoding='utf-8')[-2000:]}")
