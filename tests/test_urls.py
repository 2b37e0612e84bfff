"""URLs of repositories: each form is parsed, and no text or message shows a password."""

from pathlib import Path

import pytest

from diesel_fs.errors import ConfigError
from diesel_fs.urls import RepositoryUrl, parse_url, passwords_in, shown_url

from .rows import each_row


@each_row(
    ("text", "meant"),
    [
        ("file:///a/b", RepositoryUrl("file", path=Path("/a/b"))),
        ("file://localhost/a%20b", RepositoryUrl("file", path=Path("/a b"))),
        (
            "file:///a?meta=redis://h:1/2",
            RepositoryUrl("file", path=Path("/a"), meta="redis://h:1/2"),
        ),
        ("s3://bucket", RepositoryUrl("s3", host="bucket")),
        ("s3://bucket/a/b/", RepositoryUrl("s3", host="bucket", prefix="a/b")),
        (
            "gs://b/p?meta=rediss://u:p@h",
            RepositoryUrl("gs", host="b", prefix="p", meta="rediss://u:p@h"),
        ),
        *(
            (f"s3://b?meta={meta}", RepositoryUrl("s3", host="b", meta=meta))
            for meta in ("redis+cluster://h:1", "redis+sentinel://u:p+q@h,i:2/main")
        ),
        ("diesel://h:9300", RepositoryUrl("diesel", host="h:9300")),
        ("diesel+tls://a:1,b:2", RepositoryUrl("diesel+tls", host="a:1,b:2")),
    ],
)
def test_an_address_is_parsed(text: str, meant: RepositoryUrl) -> None:
    assert parse_url(text) == meant
    assert parse_url(meant.full_url) == meant


@each_row(
    "text",
    [
        "", "/a/b", "file://host/a", "file:a", "s3://", "s3:///a", "s3://key:secret@bucket/a",
        "s3://b/../c", "s3://b/a//b", "file:///a#b", "file:///a?x=1", "file:///a%00b",
        "file:///a?meta=redis", "http://h", "diesel://", "diesel://h/x", "diesel://u:p@h:1",
        "diesel://h?meta=redis://x", "file:///%ff",
        "file:///a?meta=redis://:x#secret@h", "file:///a?meta=redis://:x&secret@h",
        "redis://me:secret\u2100@h", "me:secret@h", "file:///a?meta=:secret@h",
    ],
)  # fmt: skip
def test_a_bad_address_is_refused_without_showing_its_password(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_url(text)
    assert "secret" not in str(refused.value)


def test_no_password_is_shown() -> None:
    url = parse_url("file:///a?meta=redis://me:hush@h:1/2")
    assert "hush" in url.full_url
    for shown in (str(url), repr(url), shown_url(url.full_url), shown_url(url.meta)):
        assert "hush" not in shown
        assert "h:1/2" in shown
    assert shown_url("redis://:hush@h") == "redis://***@h"
    assert shown_url("redis+sentinel://u:hush@a:1,b:2/m") == "redis+sentinel://***@a:1,b:2/m"
    assert shown_url("file:///a@b") == "file:///a@b"


@each_row(
    ("text", "left"),
    [
        ("redis://:p@hush@h:1/2", "redis://***@h:1/2"),
        ("redis+sentinel://u:hu@sh@a:1,b:2/m", "redis+sentinel://***@a:1,b:2/m"),
        ("to redis://:hu/sh@h:1/0, twice", "to redis://***@h:1/0, twice"),
        ("redis://me:hu#s?h@h", "redis://***@h"),
        ("redis://:12/hush@h", "redis://***@h"),
        ("diesel://h:9300/pets@12", None),
        ("diesel://[::1]:9300/pets@12", None),
        ("redis+cluster://a:1,b:2/0 by me@here", None),
        ("https://h/a:b@c", None),
    ],
)
def test_no_password_is_shown_that_should_have_been_escaped(text: str, left: str | None) -> None:
    assert shown_url(text) == (text if left is None else left)


def test_passwords_are_found_as_they_are_written_and_as_they_are_meant() -> None:
    text = "redis://:a@b%40c@h and https://me:pass@h, but file:///x@y and diesel://h:1"
    assert [*passwords_in(text)] == ["a@b%40c", "a@b@c", "pass"]
