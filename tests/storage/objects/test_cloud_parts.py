"""Objects that are put in several parts: they are there whole or not at all, whatever fails."""

import random
from dataclasses import replace

import pytest

from diesel_fs.errors import ObjectExists, ObjectMissing, ObjectStoreError
from diesel_fs.storage.objects.cloud.answers import AttemptLimits
from diesel_fs.storage.objects.cloud.store import open_cloud
from tests.rows import each_row
from tests.storage.objects.s3_server import Server
from tests.storage.objects.scripted_s3 import Rule, ScriptedS3
from tests.storage.objects.scripted_store import (
    LIMITS,
    ScriptedBucket,
    VirtualSleep,
    chunk,
    key,
    store_on,
)

NAME = chunk("aaaa")
PART = 5 << 20  # S3 accepts smaller parts only at the end
CONTENT = random.Random(1).randbytes(3 * PART + 12345)
PIECES = [CONTENT[:7], CONTENT[7 : 2 * PART + 1], CONTENT[2 * PART + 1 :]]


@pytest.fixture
def bucket(server: ScriptedS3, sleeps: VirtualSleep) -> ScriptedBucket:
    limits = replace(LIMITS, put_bytes_max=PART, part_bytes=PART)
    return ScriptedBucket(server, sleeps, store_on(server, sleeps, limits=limits))


def part_requests(server: ScriptedS3) -> list[int]:
    queries = [each.query for each in server.requests]
    return sorted(int(query["partNumber"]) for query in queries if "partNumber" in query)


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


def test_only_a_new_object_that_fits_no_request_is_put_in_parts(bucket: ScriptedBucket) -> None:
    bucket.store.put(NAME, [CONTENT[:PART]])
    assert [each.method for each in bucket.server.requests] == ["PUT"]
    bucket.server.requests.clear()
    with pytest.raises(ObjectExists):
        bucket.store.put(NAME, PIECES)
    assert bucket.server.objects[key(NAME)].content == CONTENT[:PART]
    assert part_requests(bucket.server) == []
    bucket.store.put(chunk("bbbb"), [CONTENT[: PART + 1]])
    assert part_requests(bucket.server) == [1, 2]
    assert bucket.server.objects[key(chunk("bbbb"))].content == CONTENT[: PART + 1]
    assert not bucket.server.uploads


@each_row(
    "rule",
    [
        Rule("POST", "uploads", status=503),
        Rule("PUT", "partNumber=2", status=503),
        Rule("POST", "uploadId", status=503),
    ],
)
def test_O3_a_failed_request_repeats_the_whole_put(bucket: ScriptedBucket, rule: Rule) -> None:
    bucket.sleeps.slept.clear()
    bucket.server.objects.pop(key(NAME), None)
    bucket.server.plan(rule)
    bucket.store.put(NAME, PIECES)
    assert bucket.server.objects[key(NAME)].content == CONTENT
    assert len(bucket.sleeps.slept) == 1


def test_O3_a_put_that_keeps_failing_leaves_no_object_and_no_upload(bucket: ScriptedBucket) -> None:
    bucket.server.plan(Rule("PUT", "partNumber=3", status=500, times=None))
    with pytest.raises(ObjectStoreError):
        bucket.store.put(NAME, PIECES)
    with pytest.raises(ObjectMissing):
        bucket.store.stat(NAME)
    assert not bucket.server.uploads, "an upload is left, for which the bucket is charged"


def test_O4_a_lost_last_answer_is_no_failure(bucket: ScriptedBucket) -> None:
    bucket.server.plan(Rule("POST", "uploadId", reset=True, done=True))
    bucket.store.put(NAME, PIECES)
    assert bucket.store.get(NAME) == CONTENT
    assert part_requests(bucket.server) == [1, 2, 3, 4], "sent once"
