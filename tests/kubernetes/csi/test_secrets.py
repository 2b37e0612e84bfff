"""A secret reaches the mount and nothing else: no arguments, log, file or error has it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from diesel_fs.credentials import Credentials, key_text
from tests.processes import command_lines
from tests.rows import each_row
from tests.server.program import Server, new_repository

from .conftest import FILES, MOUNTS_AS_ROOT, put_files, shown
from .plugin import Plugin
from .test_publishing import Code, refused

pytestmark = MOUNTS_AS_ROOT


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Credentials]]:
    folder = tmp_path_factory.mktemp("served")
    url = (folder / "store").as_uri()
    credentials = new_repository(url, "trainer")["trainer"]
    put_files(url, FILES)
    with Server(folder, "--store", url) as server:
        yield server.url, credentials


def traces_of(secret: str, plugin: Plugin) -> list[Path]:
    """Search the plugin's folder, and the arguments of all processes."""
    own = [path for path in plugin.folder.rglob("*") if path.is_file()]
    own = [path for path in own if "/root/" not in str(path)]
    found = [path for path in own if secret.encode() in path.read_bytes()]
    shown = [pid for pid, line in command_lines() if secret.encode() in line]
    return [*found, *(Path(f"/proc/{pid}/cmdline") for pid in shown)]


def test_a_key_opens_a_server_and_is_seen_nowhere(
    plugin: Plugin, users: tuple[str, Credentials], tmp_path: Path
) -> None:
    url, credentials = users
    target = tmp_path / "mount"
    secrets = {"user": "trainer", "key": credentials.key_text, "taskKey": "canary-of-the-task"}
    plugin.kubelet.publish(target, {"dataset": "pets", "url": url}, secrets=secrets)
    assert shown(target) == FILES
    for secret in (credentials.key_text, "canary-of-the-task"):
        assert traces_of(secret, plugin) == []
    plugin.kubelet.unpublish(target)


@each_row(
    ("dataset", "name", "secret", "code", "message"),
    [
        ("no-such", "key", key_text(b"canary--" * 4), Code.PERMISSION_DENIED, ""),
        ("no-such", "taskKey", "canary-of-task", Code.NOT_FOUND, "no-such"),
        ("no-such", "redisPassword", "canary-of-redis", Code.NOT_FOUND, "no-such"),
        ("no-such", "AWS_SECRET_ACCESS_KEY", "canary-of-aws", Code.NOT_FOUND, "no-such"),
        ("canary-name", "redisPassword", "canary-name", Code.NOT_FOUND, "***"),
        ("pets", "colour", "canary-red", Code.INVALID_ARGUMENT, "'colour'"),
    ],
)
def test_an_error_repeats_no_secret(
    plugin: Plugin,
    users: tuple[str, Credentials],
    tmp_path: Path,
    dataset: str,
    name: str,
    secret: str,
    code: Code,
    message: str,
) -> None:
    url, credentials = users
    attributes = {"dataset": dataset, "url": url}
    secrets = {"user": "trainer", "key": credentials.key_text, name: secret}
    text = refused(code, plugin.kubelet.publish, tmp_path / "mount", attributes, secrets=secrets)
    assert message in text
    for each in {*secrets.values()} - {"trainer"}:
        assert each not in text
        assert each not in plugin.log.read_text()
        assert traces_of(each, plugin) == []
