"""Wrong listings of a bucket (FAULTS, O12) are corrected, or an error."""

import random
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import pytest

from diesel_fs.errors import ObjectStoreError
from diesel_fs.format.object_names import STORE_MARKER
from diesel_fs.storage.objects.cloud.store import open_cloud
from tests.rows import each_row
from tests.storage.objects.s3_server import credentials
from tests.storage.objects.scripted_s3 import Rule, ScriptedS3
from tests.storage.objects.scripted_store import (
    CHUNKS,
    LEASE,
    LIMITS,
    URL,
    ScriptedBucket,
    VirtualSleep,
    chunk,
    key,
    store_on,
)

NAMES = sorted(chunk(f"{letter}{digit}") for letter in "abc" for digit in range(4))
PAGES = replace(LIMITS, page_keys=5)
"""The library returns pages of the server one by one, and does not join them."""

EMPTY = "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
_CONTENTS = re.compile(r"<Contents>.*?</Contents>", re.DOTALL)


@pytest.fixture
def bucket(server: ScriptedS3, sleeps: VirtualSleep) -> ScriptedBucket:
    store = store_on(server, sleeps, limits=PAGES)
    for name in NAMES:
        server.put(key(name), b"x")
    server.page_keys = 5
    return ScriptedBucket(server, sleeps, store)


def always(edit: Callable[[str], str]) -> Rule:
    return Rule("GET", "list-type=2", edit=edit, times=None)


def reordered(order: Callable[[list[str]], Sequence[str]]) -> Rule:
    def edit(page: str) -> str:
        entries = _CONTENTS.findall(page)
        return page.replace("".join(entries), "".join(order(entries)))

    return always(edit)


def without_token(page: str) -> str:
    page = re.sub("<NextContinuationToken>.*?</NextContinuationToken>", "", page)
    return page.replace("<IsTruncated>true", "<IsTruncated>false")


def encoded(page: str) -> str:
    """Encode the names in a page, but not their prefix."""
    return re.sub(f"(?<=<Key>{key('')}).*?(?=</Key>)", lambda m: m[0].replace("/", "%2F"), page)


def test_pages_are_fetched_as_they_are_needed(bucket: ScriptedBucket) -> None:
    listing = bucket.store.housekeeping.names(CHUNKS)
    assert next(listing) == NAMES[0]
    assert len(bucket.server.requests) == 1
    assert [*listing] == NAMES[1:]
    assert len(bucket.server.requests) == 4  # three pages, and an empty one behind the last name
    bucket.server.requests.clear()
    assert [*bucket.store.housekeeping.names(CHUNKS, NAMES[6])] == NAMES[7:]
    assert bucket.server.requests[0].query["start-after"] == key(NAMES[6])


@each_row(
    ("rule", "pauses"),
    [
        (always(without_token), 0),
        (Rule("GET", "list-type=2", status=500, skip=1, times=2), 2),
        (Rule("GET", "list-type=2", status=503, skip=1, times=2), 2),
        (Rule("GET", "list-type=2", keep=300, then="close", skip=1), 1),
        (Rule("GET", "continuation-token", status=400, code="InvalidArgument", times=2), 2),
    ],
    ids=["ends too early", "500", "503", "breaks off", "refused token"],
)
def test_O12_a_listing_survives_a_failure(bucket: ScriptedBucket, rule: Rule, pauses: int) -> None:
    bucket.sleeps.slept.clear()
    bucket.server.plan(rule)
    assert [*bucket.store.housekeeping.names(CHUNKS)] == NAMES
    assert len(bucket.sleeps.slept) == pauses


@each_row(
    "order",
    [
        lambda entries: entries[::-1],
        lambda entries: [*entries, *entries],
        lambda entries: [entry for entry in entries for _ in range(2)],
        lambda entries: random.Random(3).sample(entries, len(entries)),
    ],
    ids=["backwards", "page twice", "each twice", "shuffled"],
)
@each_row("page_keys", [4, 1000])
def test_O12_an_unordered_listing_is_sorted_or_an_error(
    server: ScriptedS3,
    sleeps: VirtualSleep,
    order: Callable[[list[str]], Sequence[str]],
    page_keys: int,
) -> None:
    store = store_on(server, sleeps, limits=PAGES)
    for name in NAMES:
        server.put(key(name), b"x")
    server.page_keys = page_keys
    server.plan(reordered(order))
    with suppress(ObjectStoreError):
        assert [*store.housekeeping.names(CHUNKS)] == NAMES
    assert [
        *store.housekeeping.names(CHUNKS)
    ] == NAMES  # after the first fault all is read and sorted
    server.plan()


def test_O12_a_skipped_name_is_an_error(bucket: ScriptedBucket) -> None:
    bucket.server.page_keys = 1000
    bucket.server.plan(reordered(lambda entries: [*entries[:1], *entries[2:], *entries[1:2]]))
    listing = bucket.store.inner.housekeeping.names(CHUNKS)
    given = [next(listing)]
    with pytest.raises(ObjectStoreError, match="not in order"):
        given.extend(listing)
    assert [*bucket.store.inner.housekeeping.names(CHUNKS)] == NAMES


def test_O12_a_repeated_page_is_merged_or_an_error(bucket: ScriptedBucket) -> None:
    """A continuation token leads back to the page before, once or for ever."""
    pages: list[str] = []

    def once(page: str) -> str:
        pages.append(page)
        return pages[0] if len(pages) == 2 else page

    bucket.server.plan(always(once))
    assert [*bucket.store.housekeeping.names(CHUNKS)] == NAMES
    bucket.server.plan(always(lambda _: pages[0]))
    with pytest.raises(ObjectStoreError, match="repeats without end"):
        [*bucket.store.housekeeping.names(CHUNKS)]


@each_row(
    ("edit", "prefix", "complaint"),
    [
        (encoded, CHUNKS, "encoding"),
        (lambda page: EMPTY, "", "incomplete"),
        (lambda page: "", CHUNKS, "no listing"),
        (lambda page: "no XML", CHUNKS, "no listing"),
        (lambda page: "<ListBucketResult><Contents><Key>a", CHUNKS, "no listing"),
    ],
    ids=["encoded names", "without the marker", "nothing", "no XML", "half"],
)
def test_O12_an_incomplete_or_malformed_listing_is_an_error(
    bucket: ScriptedBucket, edit: Callable[[str], str], prefix: str, complaint: str
) -> None:
    bucket.server.plan(always(edit))
    with pytest.raises(ObjectStoreError, match=complaint):
        [*bucket.store.housekeeping.names(prefix)]


def test_O1_expired_credentials_in_a_listing_are_read_again(bucket: ScriptedBucket) -> None:
    environ = credentials(bucket.server.endpoint)

    def renew(_: ScriptedS3) -> None:
        environ["AWS_ACCESS_KEY_ID"] = "renewed"

    bucket.server.plan(
        Rule("GET", "continuation-token", act=renew, status=400, code="ExpiredToken")
    )
    assert [*open_cloud(URL, environ=environ, limits=PAGES).housekeeping.names(CHUNKS)] == NAMES
    keys = [each.headers["authorization"] for each in bucket.server.requests]
    renewed = ["Credential=renewed/" in each for each in keys]
    assert renewed[-5:] == [False, False, True, True, True]


def test_a_listing_sees_changes_made_meanwhile(bucket: ScriptedBucket) -> None:
    bucket.server.page_keys = 2
    listing = bucket.store.housekeeping.names(CHUNKS)
    assert next(listing) == NAMES[0]
    del bucket.server.objects[key(NAMES[1])]
    del bucket.server.objects[key(NAMES[11])]
    bucket.server.put(key(chunk("aaaa")), b"x")
    bucket.server.put(key(chunk("zzzz")), b"x")
    found = [*listing]
    assert set(NAMES[2:11]) <= {*found}
    assert found == sorted(found)


def test_O12_B10_keys_of_others_are_left_out_and_reported(bucket: ScriptedBucket) -> None:
    foreign = [
        ".DS_Store",
        "README",
        "datasets/",
        "datasets/cats/1.jpg",
        "datasets/cats/2.jpg",
        f"{CHUNKS}aaaa/",
        f"{CHUNKS}aaaa/short",
        f"{LEASE}/below",
        "a space & <more>/x%20y/ü",
    ]
    for name in (*map(key, foreign), "some/prefixother/" + chunk("d"), chunk("d")):
        bucket.server.put(name, b"")
    bucket.server.put(key(LEASE), b"x")
    assert [*bucket.store.housekeeping.names("")] == [STORE_MARKER, *NAMES, LEASE]
    reported = {
        ".DS_Store",
        "README",
        "a space & <more>/",
        "datasets/cats/",
        f"{CHUNKS}aaaa/short",
        f"{LEASE}/",
    }
    assert {*bucket.store.housekeeping.foreign()} == reported
    assert [*bucket.store.housekeeping.foreign(CHUNKS)] == [f"{CHUNKS}aaaa/short"]
    bucket.server.plan(always(lambda page: page.replace(key(NAMES[0]), NAMES[0])))
    assert [*bucket.store.housekeeping.names("")] == [STORE_MARKER, *NAMES[1:], LEASE]
    assert {*bucket.store.housekeeping.foreign()} == reported


def test_a_key_that_cannot_be_listed_is_named_in_the_error(bucket: ScriptedBucket) -> None:
    bucket.server.put(key("datasets//x"), b"")
    with pytest.raises(ObjectStoreError, match="prefix of its own"):
        [*bucket.store.housekeeping.names("")]
