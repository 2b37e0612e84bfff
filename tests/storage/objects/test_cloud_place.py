"""URLs of buckets, and endpoint and credentials from the environment and the AWS profile."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from diesel_fs.errors import ConfigError, ObjectStoreRefused
from diesel_fs.storage.objects.cloud.location import (
    BucketLocation,
    parse_bucket_url,
    resolve_access,
)
from diesel_fs.storage.objects.cloud.store import open_cloud
from tests.rows import each_row
from tests.storage.objects.s3_server import Server
from tests.storage.objects.scripted_store import LEASE, chunk

S3 = BucketLocation("s3", "bucket", "")
NAME = chunk("a")


@each_row(
    ("url", "place"),
    [
        ("s3://bucket", BucketLocation("s3", "bucket", "")),
        ("s3://bucket/", BucketLocation("s3", "bucket", "")),
        ("s3://my.bucket-1/a/b c/d=1/", BucketLocation("s3", "my.bucket-1", "a/b c/d=1")),
        ("s3://bucket/a/b%20c/d%3D1", BucketLocation("s3", "bucket", "a/b c/d=1")),
        ("gs://bucket_2/prefix", BucketLocation("gs", "bucket_2", "prefix")),
        ("az://container/prefix", BucketLocation("az", "container", "prefix")),
    ],
)
def test_a_url_is_parsed_into_a_location(url: str, place: BucketLocation) -> None:
    assert parse_bucket_url(url) == place
    assert parse_bucket_url(str(place)) == place


@each_row(
    "url",
    [
        "",
        "bucket/prefix",
        "http://host/bucket",
        "file:///folder",
        "s3:bucket",
        "s3://",
        "s3:///prefix",
        "s3://b",
        "s3://bucket:443/prefix",
        "s3://[bucket/prefix",
        "s3://key:hunter2@bucket/prefix",
        "s3://hunter2@bucket/prefix",
        "s3://bucket/a//b",
        "s3://bucket/../b",
        "s3://bucket/a/./b",
        "s3://bucket/a%2F%2Fb",
        "s3://bucket/a%252Fb",
        "s3://bucket/%2E%2E/b",
        "s3://bucket/a%00b",
        "s3://bucket/a\\b",
        "s3://bucket/ü",
        "s3://bucket/a?meta=redis://:hunter2@host",
        "s3://bucket/a#b",
        "s3://bucket/" + "a" * 129,
        "s3://bucket/" + "a/" * 300,
    ],
)
def test_a_bad_url_is_refused_without_repeating_secrets(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_bucket_url(url)
    assert "hunter2" not in str(caught.value)


def test_keys_lie_below_the_prefix() -> None:
    assert BucketLocation("s3", "bucket", "").key("DIESEL-STORE") == "DIESEL-STORE"
    assert BucketLocation("s3", "bucket", "a/b").key("DIESEL-STORE") == "a/b/DIESEL-STORE"


@each_row(
    ("environ", "host", "plain_http"),
    [
        ({}, "s3.us-east-1.amazonaws.com", False),
        ({"AWS_DEFAULT_REGION": "eu-west-1"}, "s3.eu-west-1.amazonaws.com", False),
        ({"AWS_ENDPOINT_URL": "https://minio:9000/"}, "minio:9000", False),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9000"}, "127.0.0.1:9000", True),
        ({"AWS_ENDPOINT_URL_S3": "https://one", "AWS_ENDPOINT_URL": "http://two"}, "one", False),
    ],
)
def test_plain_http_is_used_only_for_an_http_endpoint(
    environ: dict[str, str], host: str, plain_http: bool
) -> None:
    access = resolve_access(S3, environ)
    assert (access.host, access.plain_http) == (host, plain_http)


@each_row(
    "endpoint", ["minio:9000", "ftp://host", "https://", "https://me:hunter2@host", "http://h:x"]
)
def test_a_bad_endpoint_is_refused(endpoint: str) -> None:
    for scheme, name in (("s3", "AWS_ENDPOINT_URL"), ("az", "AZURE_STORAGE_ENDPOINT")):
        with pytest.raises(ConfigError) as caught:
            resolve_access(parse_bucket_url(f"{scheme}://bucket"), {name: endpoint})
        assert "hunter2" not in str(caught.value)


def profiles(home: Path) -> dict[str, str]:
    (home / ".aws").mkdir()
    (home / ".aws" / "config").write_text(
        "[default]\nregion = eu-west-1\n[profile lab]\nendpoint_url = https://lab:9000\n"
    )
    (home / ".aws" / "credentials").write_text(
        "[default]\naws_access_key_id = ours\naws_secret_access_key = hunter%2\n"
        "[lab]\naws_access_key_id = labs\naws_secret_access_key = b\naws_session_token = c\n"
    )
    return {"HOME": str(home)}


def test_the_aws_profile_of_the_user_is_read(tmp_path: Path) -> None:
    environ = profiles(tmp_path)
    assert resolve_access(S3, environ).options == {
        "region": "eu-west-1",
        "access_key_id": "ours",
        "secret_access_key": "hunter%2",
    }
    access = resolve_access(S3, {**environ, "AWS_PROFILE": "lab"})
    assert access.host == "lab:9000"
    assert "session_token" in access.options
    with pytest.raises(
        ObjectStoreRefused, match=r"profile none: .*\(none\) could not be found; ch"
    ):
        resolve_access(S3, {**environ, "AWS_PROFILE": "none"})


def giver(folder: Path, **fields: object) -> str:
    """A program that gives credentials, as the AWS tools call it, and counts its runs."""
    program = folder / "giver"
    text = json.dumps({"Version": 1, "SecretAccessKey": "secret", **fields})
    program.write_text(f"#!/bin/sh\necho x >> {folder}/runs\ncat <<'END'\n{text}\nEND\n")
    program.chmod(0o700)
    return str(program)


def test_all_settings_of_a_profile_are_honoured(tmp_path: Path) -> None:
    environ = profiles(tmp_path)
    with (tmp_path / ".aws" / "config").open("a") as config:
        config.write(
            f"[profile given]\ncredential_process = {giver(tmp_path, AccessKeyId='given')}\n"
            "services = here\n[services here]\ns3 =\n  endpoint_url = http://here:9\n"
            "[profile sso]\nsso_session = us\nsso_account_id = 1\nsso_role_name = r\n"
            "[sso-session us]\nsso_region = us-east-1\nsso_start_url = https://x\n"
            "[profile role]\nrole_arn = arn:aws:iam::123456789012:role/r\nsource_profile = none\n"
            "[profile bad]\ncredential_process = /bin/false\n"
        )
    given = resolve_access(S3, {**environ, "AWS_PROFILE": "given"})
    assert (given.host, given.plain_http) == ("here:9", True)
    assert given.options["access_key_id"] == "given"
    assert not given.is_over()
    for name, why in {"sso": "SSO", "role": "none", "bad": "custom-process;"}.items():
        with pytest.raises(ObjectStoreRefused, match=rf"of the profile {name}: .*{why}.*aws s3 ls"):
            resolve_access(S3, {**environ, "AWS_PROFILE": name})
    keys = {"AWS_ACCESS_KEY_ID": "mine", "AWS_SECRET_ACCESS_KEY": "my secret"}
    named = resolve_access(S3, {**environ, **keys, "AWS_PROFILE": "bad"})
    assert named.options["access_key_id"] == "mine"


def test_a_role_is_assumed(s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "config").write_text(
        "[default]\nregion = us-east-1\nrole_arn = arn:aws:iam::123456789012:role/r\n"
        "source_profile = own\n[profile own]\naws_access_key_id=a\naws_secret_access_key=b\n"
    )
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.environ["AWS_ENDPOINT_URL"])  # also of the roles
    access = resolve_access(S3, {"HOME": str(tmp_path)})
    assert access.options["session_token"]
    assert not access.is_over()


def test_O1_expiring_credentials_are_read_again_in_time(s3: Server, tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "AWS_ENDPOINT_URL": s3.environ["AWS_ENDPOINT_URL"]}
    (tmp_path / ".aws").mkdir()

    def expire_in(seconds: float) -> None:
        until = datetime.now(UTC) + timedelta(seconds=seconds)
        program = giver(tmp_path, AccessKeyId="given", Expiration=until.isoformat())
        (tmp_path / ".aws/config").write_text(f"[default]\ncredential_process = {program}\n")

    def runs() -> int:
        return len((tmp_path / "runs").read_text())

    expire_in(30)
    store = open_cloud(s3.place(), create=True, environ=environ)
    before = runs()
    store.put(NAME, [b"1"])
    assert runs() > before
    expire_in(7200)
    store.put(LEASE, [b"1"])
    before = runs()
    for name in (NAME, LEASE):
        assert store.get(name) == b"1"
    assert runs() == before


def test_the_environment_wins_over_the_profile(tmp_path: Path) -> None:
    environ = {**profiles(tmp_path), "AWS_REGION": "us-west-2"}
    keys = {"AWS_ACCESS_KEY_ID": "mine", "AWS_SECRET_ACCESS_KEY": "my secret"}
    assert resolve_access(S3, {**environ, **keys}).options == {
        "region": "us-west-2",
        "access_key_id": "mine",
        "secret_access_key": "my secret",
    }
    unsigned = resolve_access(S3, {**environ, "AWS_SKIP_SIGNATURE": "true"})
    assert unsigned.options == {"region": "us-west-2"}


def test_secrets_are_in_no_repr_and_no_message(tmp_path: Path) -> None:
    environ = profiles(tmp_path)
    assert "hunter" not in repr(resolve_access(S3, environ))
    (tmp_path / ".aws" / "credentials").write_text("aws_secret_access_key = hunter2\n")
    with pytest.raises(ConfigError, match="credentials") as caught:
        resolve_access(S3, environ)
    assert "hunter2" not in f"{caught.value!r} {caught.value.__cause__!r}"
    assert caught.value.__suppress_context__
