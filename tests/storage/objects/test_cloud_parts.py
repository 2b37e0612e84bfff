"""Objects that are put in several parts: they are there whole or not at all, whatever fails."""

import random
from dataclasses import replace

import pytest

from diesel_fs.errors import ObjectExists, ObjectMissing, ObjectStoreError
from diesel_fs.storage.objects.cloud.answers import AttemptLimits
from diesel_fs.storage.objects.cloud.store import open_cloud
from diesel_fs.storage.objects.retry import RetryingStore
from tests.storage.objects.s3_server import Server
from tests.storage.objects.scripted_s3 import Rule, ScriptedS3
from tests.storage.objects.scripted_store import LIMITS, VirtualSleep, chunk, key
from tests.storage.objects.scripted_store import store_on as store_with_limits

NAME = chunk("aaaa")
PART = 5 << 20  # S3 takes no smaller ones but the last
CONTENT = random.Random(1).randbytes(3 * PART + 12345)
SMALL_PARTS = replace(LIMITS, put_bytes_max=PART, part_bytes=PART)
PIECES = [CONTENT[:7], CONTENT[7 : 2 * PART + 1], CONTENT[2 * PART + 1 :]]


def store_on(server: ScriptedS3, sleeps: VirtualSleep) -> RetryingStore:
    """A new store that puts objects larger than `PART` in parts."""
    return store_with_limits(server, sleeps, limits=SMALL_PARTS)


def part_requests(server: ScriptedS3) -> list[int]:
    """The numbers of the parts that the server got, ascending."""
    return sorted(
        int(each.query["partNumber"]) for each in server.asked if "partNumber" in each.query
    )


def test_a_large_object_on_a_complete_s3_server(s3: Server) -> None:
    limits = AttemptLimits(put_bytes_max=PART, part_bytes=PART)
    store = open_cloud(s3.place(), create=True, environ=s3.environ, limits=limits)
    store.put(NAME, PIECES)
    assert store.get(NAME) == CONTENT
    assert store.get(NAME, PART - 3, 10) == CONTENT[PART - 3 : PART + 7]
    with pytest.raises(ObjectExists):
        store.put(NAME, [b"y" * len(CONTENT)])
    assert store.stat(NAME).bytes == len(CONTENT)
    store.delete(NAME)


def test_an_object_that_fits_one_request_is_put_in_one(
    server: ScriptedS3, sleeps: VirtualSleep
) -> None:
    store = store_on(server, sleeps)
    store.put(NAME, [CONTENT[:PART]])
    assert [each.method for each in server.asked] == ["PUT"]
    server.asked.clear()
    store.put(chunk("bbbb"), [CONTENT[: PART + 1]])
    assert part_requests(server) == [1, 2]
    assert server.objects[key(chunk("bbbb"))].content == CONTENT[: PART + 1]
    assert not server.uploads


def test_an_existing_object_is_not_replaced(server: ScriptedS3, sleeps: VirtualSleep) -> None:
    server_content = b"another's"
    store = store_on(server, sleeps)
    server.put(key(NAME), server_content)
    with pytest.raises(ObjectExists):
        store.put(NAME, PIECES)
    assert server.objects[key(NAME)].content == server_content
    assert part_requests(server) == []


@pytest.mark.parametrize("where", ["uploads", "partNumber=2", "uploadId"])
def test_O3_after_a_failed_request_the_whole_put_is_repeated(
    sleeps: VirtualSleep, where: str
) -> None:
    method = "PUT" if where == "partNumber=2" else "POST"
    with ScriptedS3(Rule(method, where, status=503)) as server:
        store = store_on(server, sleeps)
        store.put(NAME, PIECES)
        assert server.objects[key(NAME)].content == CONTENT
    assert len(sleeps.slept) == 1


def test_O3_a_put_that_keeps_failing_leaves_no_object_and_no_upload(sleeps: VirtualSleep) -> None:
    rule = Rule("PUT", "partNumber=3", status=500, times=1 << 30)
    with ScriptedS3(rule) as server:
        store = store_on(server, sleeps)
        with pytest.raises(ObjectStoreError):
            store.put(NAME, PIECES)
        with pytest.raises(ObjectMissing):
            store.stat(NAME)
        assert not server.uploads, "an upload is left, for which the bucket is charged"
        assert rule.hits
        rule.times = rule.hits


def test_O4_a_lost_last_answer_is_no_failure(sleeps: VirtualSleep) -> None:
    """The object exists and has our content, so the put has succeeded."""
    with ScriptedS3(Rule("POST", "uploadId", reset=True, done=True)) as server:
        store = store_on(server, sleeps)
        store.put(NAME, PIECES)
        assert store.get(NAME) == CONTENT
        assert part_requests(server) == [1, 2, 3, 4], "sent once"
