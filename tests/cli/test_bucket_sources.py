"""A bucket as the source of `dlcmd put`, on a real S3 server (moto), with keys of all kinds that
other programs make. tests/ingest/test_bucket.py tests the handling of objects in a put.
"""

import json
import os
from pathlib import Path

import boto3
import pytest

from diesel_fs.names import shown
from diesel_fs.storage.objects.retry import LongPauses
from diesel_fs.urls import parse_url
from dlcmd.args import buckets
from tests.ingest.test_tar import tar_of
from tests.rows import each_row
from tests.storage.conftest import s3 as s3
from tests.storage.objects.s3_server import Server
from tests.storage.objects.scripted_s3 import BUCKET, Rule, ScriptedS3, Stored

from .conftest import Dlcmd


class Keys:
    def __init__(self, server: Server) -> None:
        self.url = server.place()
        self.bucket = server.bucket
        self.prefix = self.url.removeprefix(f"s3://{server.bucket}/")
        self.client = boto3.client("s3", endpoint_url=server.environ["AWS_ENDPOINT_URL"])

    def put(self, contents: dict[str, bytes], **options: str) -> None:
        for key, content in contents.items():
            self.client.put_object(
                Bucket=self.bucket, Key=f"{self.prefix}/{key}", Body=content, **options
            )


@pytest.fixture
def keys(s3: Server, monkeypatch: pytest.MonkeyPatch) -> Keys:
    for name in [name for name in os.environ if "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    for name, text in s3.environ.items():
        monkeypatch.setenv(name, text)
    return Keys(s3)


def files_of(dlcmd: Dlcmd, dataset: str, folder: Path) -> dict[str, bytes]:
    dlcmd("get", dataset, folder)
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


GOOD = {
    "a+b % # & [x] ~": b"signs",
    "\u00fc/\u4f60\u597d.jpg": b"letters",
    "tab\t and escape\x1b[2J": b"control characters",
    "deep/" + "/".join(["f" * 100] * 8): b"of 900 bytes",
    "both/below": b"below",
    "large": bytes(range(256)) * (9 << 12),
    "empty": b"",
    "*'()!@=,:;?\\\"<>|{}^`": b"more signs",
}
REFUSED = ["a//b", "./x", "../x", "y/./z", "y/../z", "/slash", "n" * 256, "both", ".diesel/x"]


def test_I16_keys_of_all_kinds(dlcmd: Dlcmd, keys: Keys, tmp_path: Path) -> None:
    keys.put(GOOD | dict.fromkeys(REFUSED, b"refused"))
    keys.put({"cat/": b"", "deep/": b"", "": b"", "full/": b"with content"})
    failed = dlcmd("--json", "put", keys.url, "pets", code=3).objects[-1]["failed"]
    assert isinstance(failed, list)
    named = {each["path"] for each in failed}
    assert named == {*REFUSED, "full/"}
    assert files_of(dlcmd, "pets", tmp_path / "copy") == GOOD
    assert not (tmp_path / "copy/cat").exists()
    again = dlcmd("--json", "put", keys.url, "pets", code=3).objects[-1]
    assert (again["unchanged"], again["files"]) == (len(GOOD), 0)


def test_markers_of_folders_alone_are_no_files(dlcmd: Dlcmd, keys: Keys) -> None:
    keys.put({"cat/": b"", "dog/1": b"1"})
    dlcmd("put", keys.url, "pets")
    assert dlcmd("ls", "-R", "pets").out == b"dog\ndog/1\n"


def test_prefixes_of_all_kinds(dlcmd: Dlcmd, keys: Keys, tmp_path: Path) -> None:
    """Characters with a meaning in URLs are written with %."""
    for number, (prefix, written) in enumerate(
        [("a&b [c]", "a&b [c]"), ("50%", "50%25"), ("\u00fc", "\u00fc"), ("x#?y", "x%23%3Fy")]
    ):
        keys.put({f"{prefix}/file": prefix.encode(), f"{prefix}/t/a.tar": tar_of(("m", b"1"))})
        dlcmd("put", f"{keys.url}/{written}", f"d{number}")
        assert files_of(dlcmd, f"d{number}", tmp_path / str(number))["file"] == prefix.encode()
        dlcmd("put", f"{keys.url}/{written}/file", f"d{number}/one")
        assert dlcmd("cat", f"d{number}/one").out == prefix.encode()


def test_I16_an_archived_object_is_named_and_the_others_are_put(dlcmd: Dlcmd, keys: Keys) -> None:
    keys.put({f"{number:03}": b"%d" % number for number in range(200)}, StorageClass="GLACIER")
    keys.put({"fine": b"1"})
    result = dlcmd("put", keys.url, "pets", code=3)
    assert "archived" in result.err
    assert "restore" in result.err
    assert dlcmd("ls", "pets").out == b"fine\n"


def test_a_glob_of_archives_takes_keys_literally(dlcmd: Dlcmd, keys: Keys) -> None:
    keys.put({"a b/x+y%.tar": tar_of(("m", b"1")), "a b//z.tar": tar_of(("n", b"1"))})
    keys.put({"a b/folder.tar/": b""})
    dlcmd("put", "--unpack", f"{keys.url}/a b/*.tar", "pets")
    assert dlcmd("ls", "pets").out == b"m\n"


def test_the_settings_of_the_vendors_tools_are_honoured(
    dlcmd: Dlcmd, keys: Keys, s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile with credentials from a program, of another profile, with its own endpoint."""
    keys.put({"file": b"1"})
    for name in s3.environ:
        monkeypatch.delenv(name)
    answer = {"Version": 1, "AccessKeyId": "testing", "SecretAccessKey": "testing-secret"}
    (tmp_path / "answer").write_text(json.dumps(answer), encoding="utf-8")
    endpoint = s3.environ["AWS_ENDPOINT_URL"]
    (tmp_path / "config").write_text(
        f"[profile lab]\nregion = eu-north-1\nservices = near\n"
        f"credential_process = cat {tmp_path}/answer\n"
        f"[services near]\ns3 =\n  endpoint_url = {endpoint}\n",
        encoding="utf-8",
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    dlcmd("put", keys.url, "pets")
    assert dlcmd("cat", "pets/file").out == b"1"
    monkeypatch.setenv("AWS_PROFILE", "typo")
    result = dlcmd("put", keys.url, "other", code=13)
    assert "typo" in result.err


@pytest.fixture
def other_vendor(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> Keys:
    """The same bucket, read by the library that reads Google's and Azure's buckets."""
    monkeypatch.setattr(buckets, "_requests_to", buckets._PathRequests)
    return keys


def test_buckets_of_other_vendors(dlcmd: Dlcmd, other_vendor: Keys, tmp_path: Path) -> None:
    """Their library removes the slash from a marker's key, so one with nothing below is a file."""
    good = {key: content for key, content in GOOD.items() if "\t" not in key}
    other_vendor.put(good | {"deep/": b"", "": b"", "alone/": b""})
    dlcmd("put", other_vendor.url, "pets", code=0)
    assert files_of(dlcmd, "pets", tmp_path / "copy") == good | {"alone": b""}


@each_row("key, why", [("a\tb", "control characters"), ("a//b", "empty or dotted parts")])
def test_a_key_that_another_vendors_library_refuses_is_named(
    dlcmd: Dlcmd, other_vendor: Keys, key: str, why: str
) -> None:
    """The library then lists no object of its page."""
    other_vendor.put({key: b"1", "fine": b"1"})
    (line,) = dlcmd("put", other_vendor.url, "pets", code=13).err.splitlines()
    assert f"/{shown(key.encode())} has {why}" in line
    assert "rename or remove that object" in line
    other_vendor.client.delete_object(
        Bucket=other_vendor.bucket, Key=f"{other_vendor.prefix}/{key}"
    )


def test_O3_a_store_that_requests_a_pause_of_a_minute_and_more_gets_it(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`Retry-After` is longer than our own deadline."""
    waited: list[float] = []
    monkeypatch.setattr(LongPauses, "wait", lambda _, seconds, __: waited.append(seconds))
    busy = Rule("GET", "", status=503, headers={"Retry-After": "90"}, times=2)
    with ScriptedS3(busy) as server:
        server.objects["x/a"] = Stored(b"1", 0)
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        (found,) = buckets.CloudBucket(parse_url(f"s3://{BUCKET}/x")).objects()
    assert (found.key, found.size, waited) == (b"a", 1, [90, 90])
