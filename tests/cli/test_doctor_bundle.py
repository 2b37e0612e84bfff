"""`dlcmd doctor --bundle` lists files, asks the user, and packs them, readable by the user alone.

`tests/server/test_secrets.py` looks for secrets in the archive.
"""

import json
import os
import pty
import sys
import tarfile
from pathlib import Path

import pytest

from diesel_fs.settings import Settings, user_folders
from dlcmd.doctor.redaction import Redactor, known_secrets
from tests.rows import each_row
from tests.trees import write

from .conftest import Dlcmd


def contents(archive: Path) -> dict[str, bytes]:
    found = {}
    with tarfile.open(archive) as packed:
        for member in packed:
            file = packed.extractfile(member)
            assert file is not None
            assert (member.uid, member.uname, member.mode) == (0, "", 0o600)
            found[member.name.removeprefix("diesel-bundle/")] = file.read()
    return found


@each_row(
    ("text", "left"),
    [
        ("password=abc, x", "password=***, x"),
        ('{"token": "a b", "n": 1}', '{"token": ***, "n": 1}'),
        ("Authorization: Bearer abc.def", "Authorization: ***"),
        ("to redis://me:pass@host/0", "to redis://***@host/0"),
        ("to redis://:pa@ss@host/0", "to redis://***@host/0"),
        ("AccountKey=ab12==;x", "AccountKey=***;x"),
        ("key diesel-key-1:QUJD== next", "key *** next"),
        ("GET /?X-Amz-Signature=ab12&x=1", "GET /?X-Amz-Signature=***&x=1"),
        ("it said hunter22!", "it said ***!"),
        ("others may read the key in /a", "others may read the key in /a"),
        ("it needs a password; set DIESEL_REDIS_PASSWORD", None),
    ],
)
def test_secrets_are_removed_from_texts(text: str, left: str | None) -> None:
    redactor = Redactor(iter(["hunter22", "us"]))
    assert redactor.text(text) == (text if left is None else left)


def test_secrets_are_removed_from_values_and_numbers_stay(tmp_path: Path) -> None:
    password, fifo = tmp_path / "password", tmp_path / "fifo"
    password.write_text("s\u00e9cret-of-redis\n", encoding="utf-8")
    os.mkfifo(fifo)
    environment = {
        "MY_TOKEN": "t0k3n-of-mine", "TOKENIZERS_PARALLELISM": "false", "A_KEY": "us",
        "http_proxy": "me:pass-of-proxy@h:1", "DIESEL_REDIS_PASSWORD_FILE": str(password),
        "AWS_SHARED_CREDENTIALS_FILE": str(fifo),
    }  # fmt: skip
    redactor = Redactor(known_secrets(Settings(key_file="/dev/zero"), environment))
    text = "a t0k3n-of-mine pass-of-proxy s\u00e9cret-of-redis."
    value = {"password": "x", "ok": [True, 1.5, "false us", text], "key_file": "/k"}
    expected = {"password": "***", "ok": [True, 1.5, "false us", "a *** *** ***."]}
    assert redactor.value(value) == {**expected, "key_file": "/k"}


@pytest.fixture
def log(dlcmd: Dlcmd, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = user_folders()["state"] / "mount-pets-mnt.log"
    path.parent.mkdir(parents=True)
    path.write_text("".join(f"line {number}\n" for number in range(100_000)))
    return path


def test_the_content_is_listed_and_then_packed(dlcmd: Dlcmd, log: Path, tmp_path: Path) -> None:
    archive, server_log = tmp_path / "help.tar.gz", tmp_path / "server.log"
    server_log.write_text("of the server\n")
    dlcmd("doctor", "-n", "--bundle", archive)
    result = dlcmd("doctor", "--bundle", archive, code=2)
    assert "this would write" in result.err
    assert "--yes" in result.err
    assert not archive.exists()
    result = dlcmd("doctor", "--yes", "--log", server_log, "--bundle", archive)
    assert archive.stat().st_mode & 0o777 == 0o600
    members = contents(archive)
    listed = [line.split()[-1] for line in result.out.decode().splitlines()[:-1]]
    assert listed == list(members)
    versions = json.loads(members["versions.json"])
    assert versions["packages"]["numpy"]
    assert versions["python"] == sys.version.split()[0]
    settings = json.loads(members["settings.json"])
    assert settings["repository"] == dlcmd.store.as_uri()
    found = json.loads(members["doctor.json"])["findings"]
    assert "memory" in {each["check"] for each in found}
    assert b"Max open files" in members["machine/limits.txt"]
    tail = members[f"logs/{log.name}"]
    assert 200 << 10 < len(tail) <= 256 << 10
    assert tail.startswith(b"line ")
    assert tail.endswith(b"line 99999\n")
    assert members["logs/named-0-server.log"] == b"of the server\n"


def test_the_archive_outlives_the_reader_of_the_list(dlcmd: Dlcmd, tmp_path: Path) -> None:
    """The reader may end at any time, as in `dlcmd doctor --yes --bundle help.tgz | head -1`."""
    receiver, sender = os.pipe()
    os.close(receiver)
    words = ("doctor", "--yes", "--bundle", tmp_path / "help.tgz")
    with dlcmd.start(*words, stdout=sender) as process:
        process.communicate(timeout=60)
    os.close(sender)
    assert process.returncode == 141
    assert "versions.json" in contents(tmp_path / "help.tgz")


def test_a_file_that_exists_is_not_replaced(dlcmd: Dlcmd, tmp_path: Path) -> None:
    archive = write(tmp_path, {"help.tgz": b"of somebody"}) / "help.tgz"
    (tmp_path / "link.tgz").symlink_to(tmp_path / "elsewhere")
    for there in (archive, tmp_path / "link.tgz"):
        assert "exists already" in dlcmd("doctor", "--yes", "--bundle", there, code=12).err
    assert archive.read_bytes() == b"of somebody"
    assert not (tmp_path / "elsewhere").exists()
    refused = dlcmd("doctor", "--bundle", tmp_path / "help.zip", code=2).err
    assert "does not end in .tar.gz" in refused
    assert "give --bundle" in dlcmd("doctor", "--yes", code=2).err
    for name, code in (("nothing", 10), (".", 2)):
        words = ("doctor", "--bundle", tmp_path / "a.tgz", "-n", "--log", tmp_path / name)
        result = dlcmd(*words, code=code)
        assert str(tmp_path) in result.err
    missing = tmp_path / "missing" / "help.tar.gz"
    assert str(missing) in dlcmd("doctor", "--yes", "--bundle", missing, code=12).err


@each_row("answer", ["y", "n"])
def test_on_a_terminal_it_asks_first(answer: str, dlcmd: Dlcmd, tmp_path: Path) -> None:
    archive = tmp_path / "help.tar.gz"
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    with dlcmd.start("doctor", "--bundle", archive, stdin=theirs) as process:
        output = process.communicate(timeout=60)[1].decode()
    os.close(ours)
    os.close(theirs)
    assert process.returncode == 0
    assert f"write {archive}?" in output
    assert archive.exists() == (answer == "y")
    assert ("nothing has been written" in output) == (answer == "n")
