"""A secret reaches the mount and nothing else: no arguments, log, file or error has it."""

import os
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from diesel_fs.credentials import Credentials, key_text
from tests.server.program import Server, new_repository

from .conftest import FILES, put_files
from .plugin import Plugin
from .test_publishing import Code, failed, shown

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root binds mounts"),
]


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Credentials]]:
    """The URL of a server, and the account `trainer` on it."""
    folder = tmp_path_factory.mktemp("served")
    url = (folder / "store").as_uri()
    credentials = new_repository(url, "trainer")["trainer"]
    put_files(url, FILES)
    with Server(folder, "--store", url) as server:
        yield server.url, credentials


def traces_of(secret: str, plugin: Plugin) -> list[str]:
    """Where a secret can be found: the plugin's folder, and the arguments of all processes."""
    found = []
    for path in plugin.folder.rglob("*"):
        is_own = path.is_file() and "/root/" not in str(path)
        if is_own and secret.encode() in path.read_bytes():
            found.append(str(path))
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if secret.encode() in line.read_bytes():
                found.append(str(line))
        except OSError:
            continue
    return found


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


@pytest.mark.parametrize("name", ["key", "taskKey", "redisPassword", "AWS_SECRET_ACCESS_KEY"])
def test_an_error_repeats_no_secret(
    plugin: Plugin, users: tuple[str, Credentials], tmp_path: Path, name: str
) -> None:
    """Of a server that refuses the key, and of a dataset that does not exist."""
    canary = key_text(b"canary--" * 4) if name == "key" else f"canary-{name}"
    secrets = {"user": "trainer", "key": users[1].key_text, name: canary}
    with pytest.raises(grpc.RpcError) as error:
        plugin.kubelet.publish(
            tmp_path / "mount", {"dataset": "no-such", "url": users[0]}, secrets=secrets
        )
    code, text = failed(error)
    assert code is (Code.PERMISSION_DENIED if name == "key" else Code.NOT_FOUND)
    for secret in {*secrets.values()} - {"trainer"}:
        assert secret not in text
        assert traces_of(secret, plugin) == []


def test_a_secret_that_a_message_repeats_is_hidden(
    plugin: Plugin, store: str, tmp_path: Path
) -> None:
    """Whatever a store says: here the dataset's own name is the secret."""
    with pytest.raises(grpc.RpcError) as error:
        plugin.kubelet.publish(
            tmp_path / "mount",
            {"dataset": "canary-name", "url": store},
            secrets={"redisPassword": "canary-name"},
        )
    assert "canary-name" not in failed(error)[1]
    assert "***" in failed(error)[1]
    assert "canary-name" not in plugin.log.read_text()


def test_a_key_that_nobody_knows_is_named_and_not_shown(
    plugin: Plugin, store: str, tmp_path: Path
) -> None:
    with pytest.raises(grpc.RpcError) as error:
        plugin.kubelet.publish(
            tmp_path / "mount", {"dataset": "pets", "url": store}, secrets={"colour": "canary-red"}
        )
    code, text = failed(error)
    assert code is Code.INVALID_ARGUMENT
    assert "'colour'" in text
    assert "canary-red" not in text
