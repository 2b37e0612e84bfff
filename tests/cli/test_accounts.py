"""Tests of `dlcmd user` and `dlcmd grant` with direct access to the repository."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from diesel_fs.credentials import KEY_PREFIX, parse_key
from diesel_fs.net import keys
from diesel_fs.storage.accounts.account import parse_accounts, parse_public_key, public_key_text
from diesel_fs.storage.objects.folder import FolderStore
from tests.storage.metadata.redis_servers import RedisServer, emptied_server
from tests.tiers import fast_first
from tests.trees import write

from .conftest import Dlcmd


@pytest.fixture(params=fast_first(["file", "redis"]))
def place(request: pytest.FixtureRequest, dlcmd: Dlcmd, monkeypatch: pytest.MonkeyPatch) -> str:
    url = dlcmd.store.as_uri()
    if request.param == "redis":
        server = emptied_server()
        url += f"?meta={server.url}"
        monkeypatch.setenv("DIESEL_URL", url)
    return url


def users(dlcmd: Dlcmd) -> dict[str, dict[str, object]]:
    return {str(each["user"]): each for each in dlcmd("user", "ls", "--json").objects}


def test_the_first_account_needs_no_repository(dlcmd: Dlcmd, tmp_path: Path, place: str) -> None:
    """stdout has the key alone; stderr explains its use."""
    result = dlcmd("user", "add", "root", "--admin")
    seed = parse_key(result.out.decode())
    assert result.out.decode().count("\n") == 1
    assert "not shown again" in result.err
    assert "--user root --key-file" in result.err
    assert KEY_PREFIX not in result.err
    found = users(dlcmd)["root"]
    assert found["admin"] is True
    assert parse_public_key(str(found["public_key"])) == keys.public_key(seed)
    FolderStore.open(dlcmd.store)
    (added,) = dlcmd("--json", "user", "add", "ann", "--admin").objects
    public = public_key_text(keys.public_key(parse_key(str(added["key"]))))
    assert added == {"user": "ann", "admin": True, "public_key": public, "key": added["key"]}
    (added,) = dlcmd("--json", "user", "add", "bo", "--key-out", tmp_path / "key").objects
    assert (added["key_file"], "key" in added) == (str(tmp_path / "key"), False)
    assert dlcmd("-q", "user", "add", "eve").err == ""
    assert dlcmd("user", "add", "joe", "--public-key", public).out == b"added joe\n"
    assert users(dlcmd)["joe"]["public_key"] == public
    dlcmd("user", "add", "amy", "--public-key", public, "--key-out", "x", code=2)


def test_a_verb_that_only_reads_makes_no_repository(dlcmd: Dlcmd) -> None:
    for words in (["user", "ls"], ["user", "rm", "ann"], ["grant", "pets", "ann", "read"]):
        dlcmd(*words, code=13)
    dlcmd("user", "add", "ann", "--renew", code=13)
    assert not dlcmd.store.exists()


def test_users_are_listed_with_their_roles(dlcmd: Dlcmd, place: str) -> None:
    dlcmd("user", "add", "root", "--admin")
    dlcmd("user", "add", "ann")
    dlcmd("user", "add", "bo")
    dlcmd("grant", "pets", "ann", "read")
    dlcmd("grant", "cars", "ann", "admin")
    assert dlcmd("user", "ls").out == b"ann   cars:admin pets:read\nbo\nroot  admin\n"
    dlcmd("grant", "cars", "ann", "none")
    assert users(dlcmd)["ann"]["grants"] == {"pets": "read"}
    result = dlcmd("grant", "pets", "ann", "write")
    assert result.out == b"ann may change pets\n"
    (described,) = dlcmd("grant", "pets", "ann", "write", "--json").objects
    assert described == {"dataset": "pets", "user": "ann", "role": "write"}
    before = users(dlcmd)["ann"]
    assert KEY_PREFIX in dlcmd("user", "add", "ann", "--renew").out.decode()
    after = users(dlcmd)["ann"]
    assert after["grants"] == before["grants"]
    assert after["public_key"] != before["public_key"]
    for rights in (["--admin"], []):
        dlcmd("user", "add", "ann", "--renew", *rights)
        assert users(dlcmd)["ann"]["admin"] is True
    dlcmd("user", "rm", "ann")
    assert set(users(dlcmd)) == {"bo", "root"}
    assert "no administrator" in dlcmd("user", "rm", "root").err
    assert dlcmd("user", "rm", "bo", "--json").objects == [{"removed": "bo"}]


def test_bad_names_keys_and_roles_are_refused(dlcmd: Dlcmd, place: str) -> None:
    dlcmd("user", "add", "ann")
    before = users(dlcmd)
    assert "already" in dlcmd("user", "add", "ann", code=12).err
    for words in ("user rm bo", "user add bo --renew", "grant pets bo read"):
        assert "no user 'bo'" in dlcmd(*words.split(), code=10).err
    assert "bad user name" in dlcmd("user", "add", "../x", code=2).err
    assert "there is no role 'owner'" in dlcmd("grant", "pets", "ann", "owner", code=2).err
    assert "bad dataset name" in dlcmd("grant", "a/b", "ann", "read", code=2).err
    assert "user --help" in dlcmd("user", "frobnicate", code=2).err
    assert "Usage: dlcmd user" in dlcmd("user", code=2).err
    assert users(dlcmd) == before


def test_a_key_goes_to_a_new_file_of_its_owner(dlcmd: Dlcmd, tmp_path: Path, place: str) -> None:
    file = tmp_path / "key"
    old = os.umask(0)
    try:
        result = dlcmd("user", "add", "ann", "--key-out", file)
    finally:
        os.umask(old)
    assert result.out == b"added ann\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    public = users(dlcmd)["ann"]["public_key"]
    assert public_key_text(keys.public_key(parse_key(file.read_text()))) == public
    # An existing file is not written over, and no account is made; no new file is left either
    assert "exists; name a new file" in dlcmd("user", "add", "bo", "--key-out", file, code=12).err
    dlcmd("user", "add", "ann", "--key-out", tmp_path / "other", code=12)
    assert set(users(dlcmd)) == {"ann"}
    assert sorted(path.name for path in tmp_path.glob("*")) == ["key", "store"]
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    dlcmd("user", "add", "bo", "--key-out", tmp_path / "link", code=12)


def test_S8_a_secret_key_given_as_public_is_not_repeated(dlcmd: Dlcmd) -> None:
    secret = dlcmd("user", "add", "ann").out.decode().strip()
    result = dlcmd.program("-v", "user", "add", "bo", "--public-key", secret, code=2)
    assert secret.removeprefix(KEY_PREFIX)[:20] not in result.err


def test_accounts_are_exported_and_imported(dlcmd: Dlcmd, tmp_path: Path, place: str) -> None:
    """An account is a name, a public key and roles, nothing else."""
    dlcmd("user", "add", "root", "--admin")
    dlcmd("user", "add", "ann")
    dlcmd("grant", "pets", "ann", "write")
    before = users(dlcmd)
    file = tmp_path / "accounts.jsonl"
    assert dlcmd("user", "export", file).out == f"wrote 2 users to {file}\n".encode()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert dlcmd("user", "export").out == file.read_bytes()
    assert KEY_PREFIX.encode() not in file.read_bytes()
    first, ann, _ = map(json.loads, file.read_bytes().splitlines())
    assert first == {"diesel-accounts": 1}
    assert (ann["user"], ann["admin"], ann["grants"]) == ("ann", False, {"pets": "write"})
    assert set(parse_accounts(file.read_bytes())) == {"ann", "root"}
    dlcmd("put", write(tmp_path / "src", {"a": b"1"}), "pets")  # the accounts are no dataset
    assert b"accounts" not in dlcmd("verify", "pets").out
    assert dlcmd("ls").out == b"pets\n"

    dlcmd("user", "add", "bo")
    dlcmd("user", "rm", "ann")
    assert dlcmd("user", "import", file).out == b"imported 2 users\n"
    assert set(users(dlcmd)) == {"ann", "bo", "root"}
    dlcmd("user", "import", file, "--replace")
    assert users(dlcmd) == before
    for bad in (b"", b"nonsense", file.read_bytes() + b"{}\n"):
        (tmp_path / "bad").write_bytes(bad)
        result = dlcmd("user", "import", tmp_path / "bad", "--replace", code=15)
        assert len(result.err.splitlines()) == 1
    dlcmd("user", "import", tmp_path / "gone", code=10)
    for verb in ("import", "export"):
        assert "is a folder" in dlcmd("user", verb, tmp_path, code=2).err
    assert users(dlcmd) == before

    assert dlcmd.program("user", "export", "/dev/stdout").out == file.read_bytes()
    assert dlcmd.fifo("user", "export") == file.read_bytes()

    other = (tmp_path / "other").as_uri()
    assert dlcmd.program("--url", other, "user", "import", "-", stdin=file.read_bytes()).code == 0
    assert dlcmd("--url", other, "user", "export").out == file.read_bytes()


def test_C1_G8_a_redis_that_is_down_or_anothers_is_refused(dlcmd: Dlcmd, tmp_path: Path) -> None:
    with RedisServer(tmp_path / "redis") as server:
        url = f"{dlcmd.store.as_uri()}?meta={server.url}"
        dlcmd("--url", url, "user", "add", "ann")
        other = f"{(tmp_path / 'other').as_uri()}?meta={server.url}"
        for words in (["user", "add", "bo"], ["put", write(tmp_path / "src", {"a": b""}), "pets"]):
            assert "another object store" in dlcmd("--url", other, *words, code=2).err
    assert "cannot reach" in dlcmd("--url", url, "user", "ls", code=14).err
    assert "meta=redis" in dlcmd("--url", "s3://bucket", "user", "ls", code=14).err


@pytest.mark.real_start
def test_start_up_does_not_import_cryptography() -> None:
    """Only verbs that make, sign or check a key need that library."""
    code = "import sys, diesel_fs.remote.open; sys.exit('cryptography' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
