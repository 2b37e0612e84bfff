"""Runs tests against a real object store: OpenStack Swift on loopback, by its S3 interface.

    python -m tests.storage.objects.swift_server COMMAND...

starts Swift's proxy, account, container and object server (from the system's packages) in a folder
of its own, makes a bucket, runs the command with an environment that names both, and ends the
servers. There is one replica; a client sees no difference.
"""

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.storage.objects.s3_server import BUCKET, START_S, credentials, without_proxies

STORAGE = ("account", "container", "object")
USER, KEY = "test:tester", "testing-secret"

_SWIFT = """\
[swift-hash]
swift_hash_path_suffix = tests
[swift-constraints]
max_file_size = 5368709122
[storage-policy:0]
name = gold
default = yes
"""
_SERVER = """\
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
devices = {folder}/devices
mount_check = false
user = {user}
swift_dir = {folder}
workers = 0
[pipeline:main]
pipeline = {pipeline}
[app:{kind}-server]
use = egg:swift#{kind}
"""
_FILTERS = ("catch_errors", "gatekeeper", "listing_formats", "bulk", "slo", "dlo")
_PROXY = """\
account_autocreate = true
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:{unused}
[filter:s3api]
use = egg:swift#s3api
s3_acl = false
location = us-east-1
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing-secret .admin
""" + "".join(f"[filter:{name}]\nuse = egg:swift#{name}\n" for name in _FILTERS)
_PIPELINE = "catch_errors gatekeeper cache listing_formats bulk s3api tempauth slo dlo proxy-server"


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def make_ring(folder: Path, kind: str, port: int) -> None:
    ring = str(folder / f"{kind}.builder")
    for words in (
        f"{ring} create 1 1 1",
        f"{ring} add r1z1-127.0.0.1:{port}/one 1",
        f"{ring} rebalance",
    ):
        command = ["swift-ring-builder", *words.split()]
        subprocess.run(command, check=True, capture_output=True, timeout=START_S)


def wait_for_port(port: int, process: "subprocess.Popen[bytes]", log: Path) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    sys.exit(f"{log.stem} does not answer:\n{log.read_text(encoding='utf-8')[-3000:]}")


@contextlib.contextmanager
def swift() -> Iterator[str]:
    with TemporaryDirectory(prefix="swift-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        (folder / "devices" / "one").mkdir(parents=True)
        (folder / "swift.conf").write_text(_SWIFT, encoding="utf-8")
        *ports, proxy, unused = free_ports(len(STORAGE) + 2)
        for kind, port in zip((*STORAGE, "proxy"), (*ports, proxy), strict=True):
            is_proxy = kind == "proxy"
            text = (_SERVER + _PROXY if is_proxy else _SERVER).format(
                port=port,
                folder=folder,
                user=getpass.getuser(),
                pipeline=_PIPELINE if is_proxy else f"{kind}-server",
                kind=kind,
                unused=unused,
            )
            config = folder / f"{kind}.conf"
            config.write_text(text, encoding="utf-8")
            if not is_proxy:
                make_ring(folder, kind, port)
            log = folder / f"{kind}.log"
            with log.open("wb") as file:
                process = subprocess.Popen(
                    [f"swift-{kind}-server", str(config), "--verbose"],
                    stdout=file,
                    stderr=file,
                    env={**without_proxies(), "SWIFT_DIR": name},
                )
            stack.callback(process.wait, START_S)
            stack.callback(process.kill)
            wait_for_port(port, process, log)
        yield f"http://127.0.0.1:{proxy}"


def main(command: Sequence[str]) -> int:
    missing = [f"swift-{kind}-server" for kind in (*STORAGE, "proxy")]
    missing = [name for name in missing if not shutil.which(name)]
    if missing:
        print(f"not installed: {' '.join(missing)}", file=sys.stderr)
        return 1
    import boto3  # noqa: PLC0415 # comes with moto, and only this needs it

    for name in os.environ.keys() - without_proxies().keys():
        del os.environ[name]
    with swift() as endpoint:
        environ = {**credentials(endpoint), "AWS_ACCESS_KEY_ID": USER, "AWS_SECRET_ACCESS_KEY": KEY}
        client = boto3.client(
            "s3",
            endpoint_url=endpoint,
            aws_access_key_id=USER,
            aws_secret_access_key=KEY,
            region_name="us-east-1",
        )
        client.create_bucket(Bucket=BUCKET)
        environ |= {"S3_SERVER_UNDER_TEST": endpoint, "S3_BUCKET_UNDER_TEST": BUCKET}
        result = subprocess.run(command, check=False, env={**without_proxies(), **environ})
        return result.returncode


if __name__ == "__main__":
    os.umask(0o077)
    sys.exit(main(sys.argv[1:]))
