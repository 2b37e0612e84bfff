"""Objects that are too large for one request: whole or not there, whatever breaks on the way."""

import os
import random
from collections.abc import Iterator

import pytest

from diesel_fs.errors import ObjectExists, ObjectMissing, ObjectStoreError
from diesel_fs.storage.objects.cloud import requests as cloud_requests
from diesel_fs.storage.objects.cloud import store as cloud
from diesel_fs.storage.objects.cloud.store import open_cloud
from tests.storage.objects.s3_server import Server
from tests.storage.objects.scripted_s3 import Rule, ScriptedS3
from tests.storage.objects.scripted_store import VirtualSleep, chunk, key, store_on

NAME = chunk("aaaa")
PART = 5 << 20  # S3 takes no smaller ones but the last
CONTENT = random.Random(1).randbytes(3 * PART + 12345)
PIECES = [CONTENT[:7], CONTENT[7 : 2 * PART + 1], CONTENT[2 * PART + 1 :]]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if "proxy" in name.lower()]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(cloud, "ONE_REQUEST_BYTES_MAX", PART)
    monkeypatch.setattr(cloud_requests, "PART_BYTES", PART)


@pytest.fixture
def sleeps() -> VirtualSleep:
    return VirtualSleep()


@pytest.fixture
def server() -> Iterator[ScriptedS3]:
    """One without a script."""
    with ScriptedS3() as server:
        yield server


def part_requests(server: ScriptedS3) -> list[int]:
    """The numbers of parts that came, ascending."""
    return sorted(
        int(each.query["partNumber"]) for each in server.asked if "partNumber" in each.query
    )


def test_a_large_object_over_a_whole_s3_server(s3: Server) -> None:
    store = open_cloud(s3.place(), create=True, environ=s3.environ)
    store.put(NAME, PIECES)
    assert store.get(NAME) == CONTENT
    assert store.get(NAME, PART - 3, 10) == CONTENT[PART - 3 : PART + 7]
    with pytest.raises(ObjectExists):
        store.put(NAME, [b"y" * len(CONTENT)])
    assert store.stat(NAME).bytes == len(CONTENT)
    store.delete(NAME)


def test_what_fits_one_request_goes_in_one(server: ScriptedS3, sleeps: VirtualSleep) -> None:
    store = store_on(server, sleeps)
    store.put(NAME, [CONTENT[:PART]])
    assert [each.method for each in server.asked] == ["PUT"]
    server.asked.clear()
    store.put(chunk("bbbb"), [CONTENT[: PART + 1]])
    assert part_requests(server) == [1, 2]
    assert server.objects[key(chunk("bbbb"))].content == CONTENT[: PART + 1]
    assert not server.uploads


def test_what_is_there_is_not_replaced(server: ScriptedS3, sleeps: VirtualSleep) -> None:
    server_content = b"another's"
    store = store_on(server, sleeps)
    server.put(key(NAME), server_content)
    with pytest.raises(ObjectExists):
        store.put(NAME, PIECES)
    assert server.objects[key(NAME)].content == server_content
    assert part_requests(server) == []


@pytest.mark.parametrize("where", ["uploads", "partNumber=2", "uploadId"])
def test_O3_a_request_that_fails_is_tried_again_with_the_whole(
    sleeps: VirtualSleep, where: str
) -> None:
    method = "PUT" if where == "partNumber=2" else "POST"
    with ScriptedS3(Rule(method, where, status=503)) as server:
        store = store_on(server, sleeps)
        store.put(NAME, PIECES)
        assert server.objects[key(NAME)].content == CONTENT
    assert len(sleeps.slept) == 1


def test_O3_what_goes_on_failing_leaves_no_object_and_no_upload(sleeps: VirtualSleep) -> None:
    rule = Rule("PUT", "partNumber=3", status=500, times=1 << 30)
    with ScriptedS3(rule) as server:
        store = store_on(server, sleeps)
        with pytest.raises(ObjectStoreError):
            store.put(NAME, PIECES)
        with pytest.raises(ObjectMissing):
            store.stat(NAME)
        assert not server.uploads, "they are given up, which the bucket would be charged for"
        assert rule.hits
        rule.times = rule.hits


def test_O4_a_last_answer_that_was_lost_is_no_failure(sleeps: VirtualSleep) -> None:
    """The object is there, and ours: its content says so."""
    with ScriptedS3(Rule("POST", "uploadId", reset=True, done=True)) as server:
        store = store_on(server, sleeps)
        store.put(NAME, PIECES)
        assert store.get(NAME) == CONTENT
        assert part_requests(server) == [1, 2, 3, 4], "sent once"
