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
from diesel_fs.storage.objects.retry import RetryingStore
from tests.storage.objects.s3_server import credentials
from tests.storage.objects.scripted_s3 import Rule, ScriptedS3
from tests.storage.objects.scripted_store import (
    CHUNKS,
    LEASE,
    LIMITS,
    URL,
    VirtualSleep,
    chunk,
    key,
    store_on,
)

NAMES = sorted(chunk(f"{letter}{digit}") for letter in "abc" for digit in range(4))
PAGES = replace(LIMITS, page_keys=5)
"""The library returns pages of the server one by one, and does not join them."""

_CONTENTS = re.compile(r"<Contents>.*?</Contents>", re.DOTALL)


def filled(server: ScriptedS3, sleeps: VirtualSleep, page_keys: int = 5) -> RetryingStore:
    """A store that holds `NAMES`, on a server that lists `page_keys` names in a page."""
    store = store_on(server, sleeps, limits=PAGES)
    for name in NAMES:
        server.put(key(name), b"x")
    server.page_keys = page_keys
    return store


def reordered(order: Callable[[list[str]], Sequence[str]]) -> Callable[[str], str]:
    """An edit of a page that reorders or changes its entries."""

    def edit(page: str) -> str:
        entries = _CONTENTS.findall(page)
        return page.replace("".join(entries), "".join(order(entries)))

    return edit


def always(edit: Callable[[str], str]) -> Rule:
    """A rule for every listing, however many there are; `ended` asserts that there were some."""
    return Rule("GET", "list-type=2", edit=edit, times=1 << 30)


def ended(rule: Rule) -> None:
    assert rule.hits
    rule.times = rule.hits


def test_pages_are_fetched_as_they_are_needed(server: ScriptedS3, sleeps: VirtualSleep) -> None:
    store = filled(server, sleeps)
    listing = store.names(CHUNKS)
    assert next(listing) == NAMES[0]
    assert len(server.asked) == 1
    assert [*listing] == NAMES[1:]
    assert len(server.asked) == 4  # three pages, and an empty one behind the last name
    server.asked.clear()
    assert [*store.names(CHUNKS, NAMES[6])] == NAMES[7:]
    assert server.asked[0].query["start-after"] == key(NAMES[6])


def test_O12_a_listing_that_ends_too_early_is_continued(sleeps: VirtualSleep) -> None:
    def cut(page: str) -> str:
        return re.sub("<NextContinuationToken>.*?</NextContinuationToken>", "", page).replace(
            "<IsTruncated>true", "<IsTruncated>false"
        )

    rule = always(cut)
    with ScriptedS3(rule) as server:
        assert [*filled(server, sleeps).names(CHUNKS)] == NAMES
        ended(rule)


@pytest.mark.parametrize(
    "order",
    [
        lambda entries: entries[::-1],
        lambda entries: [*entries, *entries],
        lambda entries: [entry for entry in entries for _ in range(2)],
        lambda entries: random.Random(3).sample(entries, len(entries)),
    ],
    ids=["backwards", "page twice", "each twice", "shuffled"],
)
@pytest.mark.parametrize("page_keys", [4, 1000])
def test_O12_an_unordered_listing_is_sorted_or_an_error(
    sleeps: VirtualSleep, order: Callable[[list[str]], Sequence[str]], page_keys: int
) -> None:
    rule = always(reordered(order))
    with ScriptedS3(rule) as server:
        store = filled(server, sleeps, page_keys)
        with suppress(ObjectStoreError):
            assert [*store.names(CHUNKS)] == NAMES
        assert [*store.names(CHUNKS)] == NAMES  # after the first fault all is read and sorted
        ended(rule)


def test_O12_a_skipped_name_is_an_error(sleeps: VirtualSleep) -> None:
    """The second name comes last, after others have been yielded."""
    rule = always(reordered(lambda entries: [*entries[:1], *entries[2:], *entries[1:2]]))
    with ScriptedS3(rule) as server:
        store = filled(server, sleeps, 1000)
        listing = store.inner.names(CHUNKS)
        given = [next(listing)]
        with pytest.raises(ObjectStoreError, match="not in order"):
            given.extend(listing)
        assert [*store.inner.names(CHUNKS)] == NAMES
        ended(rule)


def test_O12_a_repeated_page_is_merged(server: ScriptedS3, sleeps: VirtualSleep) -> None:
    """A continuation token leads back to the page before."""
    pages: list[str] = []

    def again(page: str) -> str:
        pages.append(page)
        return pages[0] if len(pages) == 2 else page

    rule = always(again)
    store = filled(server, sleeps)
    server.script = (rule,)
    assert [*store.names(CHUNKS)] == NAMES
    ended(rule)


def test_O12_a_page_that_repeats_for_ever_is_an_error(
    server: ScriptedS3, sleeps: VirtualSleep
) -> None:
    pages: list[str] = []

    def again(page: str) -> str:
        pages.append(page)
        return pages[0]

    rule = always(again)
    store = filled(server, sleeps)
    server.script = (rule,)
    with pytest.raises(ObjectStoreError, match="repeats without end"):
        [*store.names(CHUNKS)]
    ended(rule)


def test_O12_names_outside_of_the_prefix_are_left_out(
    server: ScriptedS3, sleeps: VirtualSleep
) -> None:
    store = filled(server, sleeps)
    server.put("some/prefixother/" + chunk("d"), b"x")
    server.put(chunk("d"), b"x")
    assert [*store.names("")] == [STORE_MARKER, *NAMES]
    moved = always(lambda page: page.replace(key(NAMES[0]), NAMES[0]))
    server.script = (moved,)
    assert [*store.names("")] == [STORE_MARKER, *NAMES[1:]]
    assert [*store.foreign()] == []
    ended(moved)


def test_O12_encoded_names_are_an_error(sleeps: VirtualSleep) -> None:
    rule = always(
        lambda page: re.sub(
            "<Key>(.*?)</Key>", lambda m: f"<Key>{m[1].replace('/', '%2F')}</Key>", page
        ).replace("some%2Fprefix%2F", "some/prefix/")
    )
    with ScriptedS3(rule) as server:
        with pytest.raises(ObjectStoreError, match="encoding"):
            [*filled(server, sleeps).names(CHUNKS)]
        ended(rule)


def test_O12_a_listing_of_everything_has_the_marker(sleeps: VirtualSleep) -> None:
    rule = always(
        lambda page: "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
    )
    with ScriptedS3(rule) as server:
        store = filled(server, sleeps)
        with pytest.raises(ObjectStoreError, match="incomplete"):
            [*store.names("")]
        ended(rule)


@pytest.mark.parametrize("page", ["", "no XML", "<ListBucketResult><Contents><Key>a"])
def test_O12_an_answer_that_is_not_a_listing_is_an_error(sleeps: VirtualSleep, page: str) -> None:
    rule = always(lambda _: page)
    with ScriptedS3(rule) as server:
        with pytest.raises(ObjectStoreError, match="no listing"):
            [*filled(server, sleeps).names(CHUNKS)]
        ended(rule)


@pytest.mark.parametrize("status", [500, 503])
def test_O12_a_page_that_fails_is_asked_for_again(sleeps: VirtualSleep, status: int) -> None:
    failing = Rule("GET", "list-type=2", status=status, skip=2, times=2)
    with ScriptedS3(failing) as server:
        store = filled(server, sleeps)
        failing.skip = failing.seen + 1
        assert [*store.names(CHUNKS)] == NAMES
    assert len(sleeps.slept) == 2


def test_O12_a_refused_continuation_token_is_not_used_again(sleeps: VirtualSleep) -> None:
    refused = Rule("GET", "continuation-token", status=400, code="InvalidArgument", times=2)
    with ScriptedS3(refused) as server:
        assert [*filled(server, sleeps).names(CHUNKS)] == NAMES
    assert len(sleeps.slept) == 2


def test_O1_expired_credentials_in_a_listing_are_read_again(sleeps: VirtualSleep) -> None:
    environ: dict[str, str] = {}

    def renew(server: ScriptedS3) -> None:
        environ["AWS_ACCESS_KEY_ID"] = "renewed"

    expired = Rule("GET", "continuation-token", act=renew, status=400, code="ExpiredToken")
    with ScriptedS3(expired) as server:
        filled(server, sleeps)
        environ |= credentials(server.endpoint)
        assert [*open_cloud(URL, environ=environ, limits=PAGES).names(CHUNKS)] == NAMES
        asked = [each.headers["authorization"] for each in server.asked]
        renewed = ["Credential=renewed/" in each for each in asked]
        assert renewed[-5:] == [False, False, True, True, True]


def test_O12_a_page_that_breaks_off_is_asked_for_again(sleeps: VirtualSleep) -> None:
    with ScriptedS3(Rule("GET", "list-type=2", keep=300, then="close", skip=2)) as server:
        assert [*filled(server, sleeps).names(CHUNKS)] == NAMES


def test_a_listing_sees_changes_made_meanwhile(server: ScriptedS3, sleeps: VirtualSleep) -> None:
    store = filled(server, sleeps, 2)
    listing = store.names(CHUNKS)
    assert next(listing) == NAMES[0]
    del server.objects[key(NAMES[1])]
    del server.objects[key(NAMES[11])]
    server.put(key(chunk("aaaa")), b"x")
    server.put(key(chunk("zzzz")), b"x")
    found = [*listing]
    assert set(NAMES[2:11]) <= {*found}
    assert found == sorted(found)


def test_B10_foreign_keys_are_left_out_and_reported(
    server: ScriptedS3, sleeps: VirtualSleep
) -> None:
    store = filled(server, sleeps)
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
    for name in foreign:
        server.put(key(name), b"")
    server.put(key(LEASE), b"x")
    assert [*store.names("")] == [STORE_MARKER, *NAMES, LEASE]
    assert {*store.foreign()} == {
        ".DS_Store",
        "README",
        "a space & <more>/",
        "datasets/cats/",
        f"{CHUNKS}aaaa/short",
        f"{LEASE}/",
    }
    assert [*store.foreign(CHUNKS)] == [f"{CHUNKS}aaaa/short"]


def test_a_key_that_cannot_be_listed_is_named_in_the_error(
    server: ScriptedS3, sleeps: VirtualSleep
) -> None:
    store = filled(server, sleeps)
    server.put(key("datasets//x"), b"")
    with pytest.raises(ObjectStoreError, match="prefix of its own"):
        [*store.names("")]
