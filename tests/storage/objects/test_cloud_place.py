"""URLs of buckets, and endpoint and credentials from the environment and the AWS profile."""

from pathlib import Path

import pytest

from diesel_fs.errors import ConfigError
from diesel_fs.storage.objects.cloud.location import (
    BucketLocation,
    parse_bucket_url,
    resolve_access,
)
from tests.rows import each_row

S3 = BucketLocation("s3", "bucket", "")


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
    """The environment of a user whose home folder has two AWS profiles."""
    (home / ".aws").mkdir()
    (home / ".aws" / "config").write_text(
        "[default]\nregion = eu-west-1\n[profile lab]\nendpoint_url = https://lab:9000\n"
    )
    (home / ".aws" / "credentials").write_text(
        "[default]\naws_access_key_id = ours\naws_secret_access_key = hunter%2\n"
        "[lab]\naws_access_key_id = labs\naws_secret_access_key = b\naws_session_token = c\n"
    )
    return {"HOME": str(home)}


def test_the_users_aws_profile_is_read(tmp_path: Path) -> None:
    environ = profiles(tmp_path)
    assert resolve_access(S3, environ).options == {
        "region": "eu-west-1",
        "access_key_id": "ours",
        "secret_access_key": "hunter%2",
    }
    access = resolve_access(S3, {**environ, "AWS_PROFILE": "lab"})
    assert access.host == "lab:9000"
    assert "session_token" in access.options
    assert resolve_access(S3, {**environ, "AWS_PROFILE": "none"}).options == {"region": "us-east-1"}


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
