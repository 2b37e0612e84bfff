"""Accounts with real programs and a real Redis: roles, removed users, a total loss."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from diesel_fs.credentials import Credentials, parse_key
from diesel_fs.errors import PermissionDenied
from diesel_fs.remote.open import open_repository
from diesel_fs.storage.accounts.account import Account, Role
from dlcmd.main import run
from tests.cli.conftest import Dlcmd
from tests.cli.conftest import dlcmd as dlcmd
from tests.storage.metadata.redis_servers import RedisServer, free_port
from tests.trees import facts, odd_tree, write
from tests.waiting import until, wait_until

from .program import Server, new_repository
from .shell_users import ShellUser, program_environment, user_with

README = Path(__file__).resolve().parents[2] / "deploy" / "README.md"
IN_README = "file:///data?meta=redis://localhost"


class AccountsSite:
    """Ann may read `pets` and change `cars`; eve may do nothing."""

    def __init__(self, folder: Path, redis: RedisServer, meta: str) -> None:
        self.folder = folder
        self.redis = redis
        store = (folder / "store").as_uri()
        self.direct_url = f"{store}?meta={meta}"
        ann = Account("ann", b"", grants={"pets": Role.READ, "cars": Role.WRITE})
        made = new_repository(self.direct_url, "root", ann, Account("eve", b""))
        for name in ("pets", "cars"):
            odd_tree(folder / name)
            (folder / name / f"of {name}").write_bytes(name.encode())
            assert run(["--url", self.direct_url, "-q", "put", str(folder / name), name]) == 0
        self.server = Server(folder / "server", "--store", store, "--meta", meta, workers=2)
        self.root, self.ann, self.eve = (
            user_with(made[name], self.server.url, folder) for name in ("root", "ann", "eve")
        )
        self._gets = 0

    def got(self, user: ShellUser, name: str) -> object:
        self._gets += 1
        copy = self.folder / f"copy{self._gets}"
        user("get", name, copy)
        found = facts(copy)
        shutil.rmtree(copy)
        return found

    def seen(self) -> dict[str, object]:
        found: dict[str, object] = {
            "users": self.root("user", "ls", "--json").objects,
            "export": self.root("user", "export").out,
            "names": [user("ls").out for user in (self.root, self.ann, self.eve)],
            "refused": self.eve("ls", "pets", code=10).err,
        }
        for name in ("pets", "cars"):
            found[name] = self.got(self.ann, name)
            found[f"{name}, listed"] = self.ann("ls", "-R", name).out
            found[f"{name}, counted"] = self.ann("du", name, "--json").objects
        return found


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path / "redis", {"appendonly": "yes"}, port=free_port()) as redis:
        yield redis


@pytest.fixture
def site(tmp_path: Path, redis: RedisServer) -> Iterator[AccountsSite]:
    site = AccountsSite(tmp_path, redis, redis.url)
    yield site
    site.server.close()


def test_accounts_through_a_server(site: AccountsSite) -> None:
    """Only a public key travels."""
    assert site.root("user", "ls").out == b"ann   cars:write pets:read\neve\nroot  admin\n"
    assert ShellUser(site.direct_url)("user", "ls").out == site.root("user", "ls").out
    assert site.root("user", "export").out == ShellUser(site.direct_url)("user", "export").out
    assert "already" in site.root("user", "add", "ann", code=12).err
    assert "no administrator" in site.root("user", "rm", "root", code=12).err
    for words in (["user", "ls"], ["user", "add", "bo"], ["grant", "pets", "eve", "read"]):
        assert "may not" in (err := site.ann(*words, code=12).err) or "no administrator" in err
    text = site.root("user", "export").out
    site.root("user", "rm", "eve")
    site.root("user", "import", "-", stdin=text)
    assert site.root("user", "export").out == text
    assert "line 2" in site.root("user", "import", "-", stdin=text[:30] + b"\n", code=15).err
    # The administrator of a dataset grants roles on that one
    site.root("grant", "pets", "ann", "admin")
    site.ann("grant", "pets", "eve", "read")
    assert site.eve("ls").out == b"pets\n"
    assert "cars" in site.ann("grant", "cars", "eve", "read", code=12).err


def test_du_prints_the_same_through_a_server(site: AccountsSite, tmp_path: Path) -> None:
    """The reclaimable bytes, too, though a reader knows nothing of chunks."""
    source = write(tmp_path / "more", {"large": bytes(range(256)) * 400})
    for content in (b"1", b"2" * 3):
        write(source, {"large": content * 100_000})
        site.ann("put", source, "cars")
    site.ann("rm", "cars/plain.txt")
    for words in (["du"], ["du", "--json"], ["du", "--json", "pets"], ["du", "cars/large"]):
        assert site.ann(*words).out == ShellUser(site.direct_url)(*words).out
    counted = site.ann("du", "--json", "cars").objects[0]
    assert int(str(counted["reclaimable_bytes"])) > 300
    site.root("purge", "--grace", "0", "cars")
    assert (
        site.ann("du", "--json", "cars").out
        == ShellUser(site.direct_url)("du", "--json", "cars").out
    )


def test_a_user_does_not_see_datasets_that_it_may_not_read(
    site: AccountsSite, tmp_path: Path, dlcmd: Dlcmd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S10: neither in a listing nor in an answer."""
    assert site.ann("ls").out == b"cars\npets\n"
    assert site.eve("ls").out == b""
    monkeypatch.setenv("DIESEL_URL", site.server.url)
    monkeypatch.setenv("DIESEL_USER", "eve")
    assert site.eve.key_file is not None
    source = write(tmp_path / "more", {"x": b"1"})
    for words in (
        ["ls", "NAME"],
        ["stat", "NAME"],
        ["cat", "NAME/plain.txt"],
        ["get", "NAME", "out"],
        ["du", "NAME"],
        ["rm", "NAME/plain.txt"],
        ["put", str(source), "NAME"],
        ["save-meta", "NAME", str(tmp_path / "meta")],
        ["verify", "NAME"],
        ["recover", "NAME"],
        ["purge", "NAME"],
        ["delete-dataset", "NAME", "--yes"],
        ["grant", "NAME", "eve", "read"],
    ):
        answers = {}
        for name in ("pets", "nothing"):
            own = [word.replace("NAME", name) for word in words]
            result = dlcmd("--key-file", site.eve.key_file, *own, code=10)
            answers[name] = result.out, result.err.replace(name, "NAME")
        assert answers["pets"] == answers["nothing"], words
    site.root("verify", "pets")
    assert site.got(site.root, "pets") == facts(site.folder / "pets")


def test_a_removed_user_or_an_old_key_loses_access(site: AccountsSite) -> None:
    """It ends within seconds on an open connection, and at once for the next login."""
    assert site.ann.key_file is not None
    old = ShellUser(site.server.url, "ann", site.folder / "old.key")
    site.ann.key_file.rename(site.folder / "old.key")
    ann = Credentials("ann", parse_key((site.folder / "old.key").read_text()))
    with open_repository(site.server.url, ann) as repository:
        repository.dataset("pets")
        site.root("user", "add", "ann", "--renew", "--key-out", site.ann.key_file)
        with pytest.raises(PermissionDenied):
            wait_until(lambda: repository.dataset("pets") and False, within_s=10)
    old("ls", code=12)
    assert site.ann("ls").out == b"cars\npets\n"
    site.root("user", "rm", "ann")
    assert "no such user, or another key" in site.ann("ls", code=12).err


def test_unknown_users_and_wrong_keys_get_the_same_error(site: AccountsSite) -> None:
    """FAULTS S1."""
    assert site.ann.key_file is not None
    unknown = ShellUser(site.server.url, "nobody", site.ann.key_file)("ls", code=12).err
    wrong = ShellUser(site.server.url, "root", site.ann.key_file)("ls", code=12).err
    assert unknown == wrong
    for words in (
        r"refused user=nobody from=127\.0\.0\.1:\d+ do=login .*there is no such user",
        r"refused user=root from=127\.0\.0\.1:\d+ do=login .*the signature is not by its key",
    ):
        assert re.search(words, site.server.log)


def test_a_server_without_redis_has_accounts_too(tmp_path: Path) -> None:
    """They are in a file beside the chunks, which several workers read."""
    store = (tmp_path / "store").as_uri()
    ShellUser(store)("user", "add", "root", "--admin", "--key-out", tmp_path / "root.key")
    with Server(tmp_path / "server", "--store", store, workers=2) as server:
        root = ShellUser(server.url, "root", tmp_path / "root.key")
        root("put", write(tmp_path / "src", {"a": b"1"}), "pets")
        root("user", "add", "ann", "--key-out", tmp_path / "ann.key")
        ann = ShellUser(server.url, "ann", tmp_path / "ann.key")
        assert ann("ls").out == b""
        root("grant", "pets", "ann", "read")
        assert ann("cat", "pets/a").out == b"1"
        root("user", "rm", "ann")
        ann("cat", "pets/a", code=12)


def commands_in(section: str) -> str:
    text = README.read_text(encoding="utf-8")
    body = re.split(rf"^#+ {re.escape(section)}$", text, flags=re.MULTILINE)[1]
    return "".join(re.findall(r"```sh\n(.*?)```", body.split("\n## ")[0], re.DOTALL))


@pytest.mark.deep
def test_C3_after_the_total_loss_of_redis(site: AccountsSite, tmp_path: Path) -> None:
    """The test runs the README's commands, as they stand there."""
    before = site.seen()
    programs = tmp_path / "bin"
    programs.mkdir()
    dlcmd = programs / "dlcmd"
    dlcmd.write_text(f'#!/bin/sh\nexec {sys.executable} -m dlcmd "$@"\n')
    dlcmd.chmod(0o755)
    script = commands_in("After the total loss of Redis").replace(IN_README, site.direct_url)
    assert site.direct_url in script
    site.root("user", "export", tmp_path / "accounts.jsonl")
    with site.redis.client() as client:
        client.flushall()

    for user in (site.root, site.ann, site.eve):
        assert "no such user, or another key" in user("ls", code=12).err
    until(lambda: "the accounts have been lost" in site.server.log, "the log")
    path = {"PATH": f"{programs}:/usr/bin:/bin"}
    done = subprocess.run(
        ["sh", "-euc", script],
        cwd=tmp_path,
        env={**program_environment(), **path},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done
    after = site.seen()
    assert after == before
    for name in ("pets", "cars"):
        site.root("verify", name)


def test_C3_recovering_makes_no_accounts(site: AccountsSite) -> None:
    with site.redis.client() as client:
        client.flushall()
    direct = ShellUser(site.direct_url)
    direct("recover", "pets")
    assert direct("user", "ls").out == b""
    assert json.loads(direct("user", "export").out) == {"diesel-accounts": 1}
    site.root("ls", code=12)


def test_C1_users_stay_logged_in_while_redis_restarts(site: AccountsSite) -> None:
    site.redis.kill()
    result = site.ann.run("ls")
    assert result.code in (0, 14), result
    assert site.redis.url.removeprefix("unix://") not in result.err
    site.redis.start()
    wait_until(lambda: site.ann.run("cat", "pets/plain.txt").out == b"plain")
    site.root("user", "add", "bo")
