"""Faults of a bucket and of the connection to it (FAULTS, part O), from a scripted server."""

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Literal

import pytest

from diesel_fs.errors import (
    ConflictError,
    DieselError,
    NoSpaceError,
    ObjectExists,
    ObjectMissing,
    ObjectStoreError,
    ObjectStoreRefused,
    TruncatedError,
)
from diesel_fs.format.object_names import STORE_MARKER
from diesel_fs.storage.objects.cloud import requests as cloud_requests
from diesel_fs.storage.objects.cloud.answers import AttemptLimits
from diesel_fs.storage.objects.cloud.store import CloudStore, open_cloud
from diesel_fs.storage.objects.retry import RetryingStore, RetryPolicy
from tests.forks import within
from tests.rows import each_row
from tests.storage.objects.s3_server import credentials
from tests.storage.objects.scripted_s3 import BUCKET, Rule, ScriptedS3
from tests.storage.objects.scripted_store import (
    LEASE,
    LIMITS,
    POLICY,
    URL,
    ScriptedBucket,
    VirtualSleep,
    chunk,
    key,
    store_on,
)

NAME = chunk("aaaa")
CONTENT = b"content"
MIB = 1 << 20
SKEWED, DAMAGED = "RequestTimeTooSkewed", "XAmzContentSHA256Mismatch"


CALLS: dict[str, Callable[[RetryingStore], object]] = {
    "PUT": lambda store: store.put(NAME, [b"con", b"tent"]),
    "GET": lambda store: store.get(NAME, 2, 3),
    "HEAD": lambda store: store.stat(NAME),
    "DELETE": lambda store: store.delete(NAME),
}


def call(bucket: ScriptedBucket, rule: Rule) -> None:
    """The server has the objects that the call needs."""
    bucket.server.objects.pop(key(NAME), None)
    if rule.operation != "PUT":
        bucket.server.put(key(NAME), CONTENT)
    bucket.server.plan(replace(rule))
    bucket.server.requests.clear()
    CALLS[rule.operation](bucket.store)


@each_row(
    ("rule", "pauses"),
    [
        *(
            (Rule(method, NAME, status=status, times=2), pauses)
            for method in CALLS
            for status, pauses in (
                (429, [1.0, 1.0]),
                (500, [0.05, 0.1]),
                (502, [0.05, 0.1]),
                (503, [1.0, 1.0]),
                (504, [0.05, 0.1]),
            )
        ),
        *((Rule(method, NAME, reset=True), [0.05]) for method in CALLS),
        *((Rule(method, NAME, reset=True, done=True), [0.05]) for method in CALLS),
        (Rule("PUT", NAME, status=409, times=2), [0.05, 0.1]),
    ],
)
def test_O3_O4_O11_after_an_error_that_passes_the_request_is_repeated(
    bucket: ScriptedBucket, rule: Rule, pauses: list[float]
) -> None:
    """A put that was carried out finds its own object when it is repeated, and has succeeded."""
    bucket.sleeps.slept.clear()
    call(bucket, rule)
    assert (key(NAME) in bucket.server.objects) == (rule.operation != "DELETE")
    assert bucket.sleeps.slept == pauses
    if not rule.done:
        assert len(bucket.server.requests) == len(pauses) + 1  # the library itself repeats nothing


@each_row(
    ("rule", "complaint"),
    [
        *(
            (Rule(method, NAME, status=500, times=None), r"\(500\).*attempts in")
            for method in CALLS
        ),
        (Rule("GET", NAME, keep=0, then="close", times=None), "attempts in"),
        (Rule("GET", NAME, keep=0, then="stall", times=None), "attempts in"),
        (Rule("GET", NAME, ignore="range", times=None), r"not of the range .* attempts in"),
    ],
)
def test_O3_O4_O5_deadlines_end_faults(bucket: ScriptedBucket, rule: Rule, complaint: str) -> None:
    bucket.sleeps.slept.clear()
    with within(POLICY.deadline_s + 1), pytest.raises(ObjectStoreError, match=complaint):
        call(bucket, rule)
    if rule.status:
        assert len(bucket.server.requests) == len(bucket.sleeps.slept) + 1
        assert 1 < sum(bucket.sleeps.slept) < POLICY.deadline_s


def test_O3_creating_a_store_is_retried(server: ScriptedS3, sleeps: VirtualSleep) -> None:
    server.plan(Rule("GET", status=503), Rule("PUT", status=500, done=True))
    assert [*store_on(server, sleeps).housekeeping.names("")] == [STORE_MARKER]


def test_after_a_lost_answer_a_lease_is_written_again(bucket: ScriptedBucket) -> None:
    bucket.server.plan(Rule("PUT", LEASE, reset=True, done=True))
    bucket.store.replace(LEASE, [b"one"])
    bucket.store.replace(LEASE, [b"two"])
    assert bucket.server.objects[key(LEASE)].content == b"two"


@each_row(
    ("rule", "error", "complaint"),
    [
        *(
            (
                Rule(method, NAME, status=403),
                ObjectStoreRefused,
                r"at 127\.0\.0\.1:\d+: cannot .*403",
            )
            for method in CALLS
        ),
        (Rule("GET", NAME, status=403, code=SKEWED), ObjectStoreRefused, "clock is wrong"),
        (Rule("PUT", NAME, status=400, code=DAMAGED), ObjectStoreError, DAMAGED),
        (Rule("PUT", NAME, status=507), NoSpaceError, None),
        (Rule("PUT", NAME, status=403, code="QuotaExceeded"), NoSpaceError, None),
    ],
)
def test_O1_O18_B14_an_error_that_stays_is_raised_at_once(
    bucket: ScriptedBucket, rule: Rule, error: type[DieselError], complaint: str | None
) -> None:
    with pytest.raises(error, match=complaint):
        call(bucket, rule)
    assert len(bucket.server.requests) == 1
    assert bucket.sleeps.slept == []
    assert (key(NAME) in bucket.server.objects) == (rule.operation != "PUT")


def test_O1_a_forbidden_store_is_not_a_missing_one(server: ScriptedS3) -> None:
    server.plan(Rule("GET", status=403, times=2))
    for create in (False, True):
        with pytest.raises(ObjectStoreRefused):
            open_cloud(URL, create=create, environ=credentials(server.endpoint))
    assert len(server.requests) == 2


def test_O1_expired_credentials_are_read_again(server: ScriptedS3, sleeps: VirtualSleep) -> None:
    environ = credentials(server.endpoint)
    store = open_cloud(URL, create=True, environ=environ, limits=LIMITS, clock=sleeps.clock())
    store.put(NAME, [CONTENT])
    environ["AWS_ACCESS_KEY_ID"] = "renewed"
    server.plan(Rule("GET", NAME, status=400, code="ExpiredToken"))
    assert store.get(NAME) == CONTENT
    assert "Credential=renewed/" in server.requests[-1].headers["authorization"]
    server.plan(Rule("GET", NAME, status=400, code="ExpiredToken", times=2))
    with pytest.raises(ObjectStoreRefused, match="have expired"):
        store.get(NAME)
    assert sleeps.slept == []


def test_O4_an_address_without_a_server_is_named(sleeps: VirtualSleep) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        for place, complaint in (
            (f"127.0.0.1:{port}", f"127.0.0.1:{port}: .*refused"),
            ("no-such-host.invalid:9000", r"no-such-host\.invalid:9000: .*no such host"),
        ):
            environ = credentials(f"http://{place}")
            with pytest.raises(ObjectStoreError, match=complaint) as caught:
                open_cloud(URL, environ=environ, policy=POLICY, limits=LIMITS, clock=sleeps.clock())
            assert len(sleeps.slept) > 2
            assert "testing-secret" not in repr(caught.value)


def test_O19_a_put_does_not_follow_a_redirect(bucket: ScriptedBucket) -> None:
    with ScriptedS3() as elsewhere:
        bucket.server.plan(Rule("PUT", NAME, status=307, headers={"Location": elsewhere.endpoint}))
        with pytest.raises(ObjectStoreError, match=r"elsewhere.*AWS_REGION"):
            bucket.store.put(NAME, [CONTENT])
        assert elsewhere.requests == []
    assert bucket.sleeps.slept == []


def test_S8_no_message_holds_a_secret(bucket: ScriptedBucket) -> None:
    rules = [Rule("GET", NAME, status=status) for status in (400, 403, 404, 416, 500)]
    bucket.server.put(key(NAME), CONTENT)
    bucket.server.plan(*rules, Rule("GET", NAME, reset=True))
    for _ in bucket.server.script:
        with pytest.raises(DieselError) as caught:
            inner(bucket.store).get(NAME, 1, 2)
        error: BaseException | None = caught.value
        while error is not None:
            assert "testing" not in f"{error} {error!r}"
            # Errors of the library may hold signed addresses
            assert isinstance(error, DieselError)
            assert error.__suppress_context__ or error.__context__ is None
            error = error.__cause__


def test_O2_object_missing_is_raised_only_while_the_store_is_there(bucket: ScriptedBucket) -> None:
    for call in (bucket.store.get, bucket.store.stat):
        with pytest.raises(ObjectMissing):
            call(NAME)
    content = bucket.server.objects[key(STORE_MARKER)].content
    bucket.server.put(
        key(STORE_MARKER), content.replace(bucket.store.store_id.hex.encode(), b"0" * 32)
    )
    with pytest.raises(ObjectStoreError, match="another store") as caught:
        bucket.store.get(NAME)
    assert not isinstance(caught.value, ObjectMissing)
    del bucket.server.objects[key(STORE_MARKER)]
    for call in (bucket.store.get, bucket.store.stat):
        with pytest.raises(ObjectStoreError, match="has gone") as caught:
            call(NAME)
        assert not isinstance(caught.value, ObjectMissing)
    assert bucket.sleeps.slept == []


def test_a_store_is_made_only_under_an_empty_prefix(server: ScriptedS3) -> None:
    environ = credentials(server.endpoint)
    for create in (False, True):
        with pytest.raises(ObjectStoreError, match=r"s3://other/.*no such bucket") as caught:
            open_cloud("s3://other/prefix", create=create, environ=environ)
        assert not isinstance(caught.value, ObjectMissing)
    with pytest.raises(ObjectMissing, match="no DIESEL-FS store"):
        open_cloud(URL, environ=environ)
    server.put(key("cats/1.jpg"), b"x")
    with pytest.raises(ConflictError, match="neither empty"):
        open_cloud(URL, create=True, environ=environ)
    assert [*server.objects] == [key("cats/1.jpg")]
    del server.objects[key("cats/1.jpg")]
    server.put("some/prefix2/other", b"x")  # beside it, not in it
    store = open_cloud(URL, create=True, environ=environ)
    assert open_cloud(URL, create=True, environ=environ).store_id == store.store_id
    assert open_cloud(URL, environ=environ).store_id == store.store_id


def test_a_store_may_have_a_whole_bucket(server: ScriptedS3) -> None:
    store = open_cloud(f"s3://{BUCKET}", create=True, environ=credentials(server.endpoint))
    store.put(NAME, [b"x"])
    assert sorted(server.objects) == [*store.housekeeping.names("")] == [STORE_MARKER, NAME]


def test_several_callers_that_create_one_store_get_the_same(server: ScriptedS3) -> None:
    server.delay_s = 0.01
    environ = credentials(server.endpoint)
    with ThreadPoolExecutor(8) as pool:
        opened = [pool.submit(open_cloud, URL, create=True, environ=environ) for _ in range(8)]
        assert len({each.result(30).store_id for each in opened}) == 1


@pytest.mark.parametrize("then", ["reset", "close", "stall"])
def test_O4_a_broken_read_resumes_behind_the_last_good_byte(
    server: ScriptedS3, sleeps: VirtualSleep, then: Literal["reset", "close", "stall"]
) -> None:
    content = os.urandom(5 * MIB // 2)
    limits = AttemptLimits(stall_s=0.5, put_stall_s=0.5, bytes_per_s_min=MIB)  # for two stalls
    store = store_on(server, sleeps, limits=limits)
    server.plan(Rule("GET", NAME, keep=MIB, then=then, times=2))
    server.put(key(NAME), content)
    room = bytearray(len(content))
    store.read_into(NAME, 0, room)
    assert room == content
    for number, request in enumerate(server.requests[1:], 1):
        assert request.headers["if-match"] == server.objects[key(NAME)].etag
        start = int(request.headers["range"].removeprefix("bytes=").split("-")[0])
        assert 0 < start <= number * MIB
    assert len(server.requests) == 3
    assert sleeps.slept == []


def test_O5_a_request_that_stalls_is_given_up_and_repeated(bucket: ScriptedBucket) -> None:
    def hold(s3: ScriptedS3) -> None:
        s3.stopped.wait(10 * LIMITS.stall_s)

    bucket.server.plan(
        Rule("GET", NAME, act=hold, reset=True),
        Rule("GET", NAME, keep=0, then="stall"),
        Rule("HEAD", NAME, act=hold, reset=True),
        Rule("PUT", chunk("bbbb"), act=hold, reset=True),
    )
    bucket.server.put(key(NAME), CONTENT)
    with within(5 * LIMITS.stall_s):
        assert bucket.store.get(NAME) == CONTENT
        assert bucket.store.stat(NAME).bytes == 7
    with within(5 * LIMITS.stall_s):
        bucket.store.put(chunk("bbbb"), [os.urandom(MIB)])


def test_O5_an_answer_that_trickles_is_given_up(server: ScriptedS3, sleeps: VirtualSleep) -> None:
    """The body comes at 20 bytes a second: too slow to make progress, or for its size."""
    server.plan(Rule("GET", NAME, keep=1000, then="dribble"))
    limits = AttemptLimits(stall_s=0.5, put_stall_s=0.5, bytes_per_s_min=1 << 14)
    assert limits.attempt_s(MIB, put=False) > 60  # so another limit ends it
    store = store_on(server, sleeps, limits=limits, policy=RetryPolicy(deadline_s=100))
    server.put(key(NAME), os.urandom(MIB))
    with within(5 * LIMITS.stall_s):
        assert store.get(NAME) == server.objects[key(NAME)].content
    assert len(server.requests) == 2

    server.plan(Rule("GET", NAME, keep=1, then="dribble"))
    limits = AttemptLimits(stall_s=0.5, put_stall_s=0.5, bytes_per_s_min=640)
    store = store_on(server, sleeps, limits=limits)
    server.put(key(NAME), os.urandom(1000))
    with within(2 * limits.attempt_s(1000, put=False)):
        assert store.get(NAME) == server.objects[key(NAME)].content
    assert "if-match" not in server.requests[1].headers  # the read begins again and is not resumed


def test_O7_damaged_bytes_of_a_read_are_returned_unchecked(bucket: ScriptedBucket) -> None:
    """S3's ETag is in general no checksum of the content; readers check our own checksums."""
    bucket.server.plan(Rule("GET", NAME, flip=3))
    bucket.server.put(key(NAME), b"\0\0")
    assert bucket.store.get(NAME) == b"\x08\0"
    assert bucket.store.get(NAME) == b"\0\0"


def test_O9_a_resumed_read_is_of_one_version(bucket: ScriptedBucket) -> None:
    old, new = b"o" * MIB, b"n" * MIB
    bucket.server.plan(
        Rule("GET", LEASE, keep=MIB // 2, then="close"),
        Rule("GET", LEASE, act=lambda s: s.put(key(LEASE), new)),
    )
    bucket.server.put(key(LEASE), old)
    assert bucket.store.get(LEASE) == new
    assert len(bucket.sleeps.slept) == 1


def test_O9_ranges_are_of_one_version(bucket: ScriptedBucket) -> None:
    for name in (LEASE, NAME):
        bucket.server.put(key(name), b"old content")
        ranges = bucket.store.fast_reads.read_ranges(
            name, [(0, 3), (4, 7), (0, 3)], memoryview(bytearray(7))
        )
        assert bytes(next(ranges)) == b"old"
        assert bytes(next(ranges)) == b"content"
        bucket.server.put(key(name), b"new content")
        if name == LEASE:
            with pytest.raises(ObjectStoreError, match="changed"):
                next(ranges)
    assert (
        bucket.server.requests[1].headers["if-match"]
        == bucket.server.requests[2].headers["if-match"]
    )


def test_after_a_failure_ranges_continue_behind_the_last_one(bucket: ScriptedBucket) -> None:
    bucket.server.plan(Rule("GET", NAME, status=500, skip=1, times=2))
    bucket.server.put(key(NAME), b"0123456789")
    room = memoryview(bytearray(4))
    found = [
        bytes(view)
        for view in bucket.store.fast_reads.read_ranges(NAME, [(0, 2), (5, 4), (9, 1)], room)
    ]
    assert found == [b"01", b"5678", b"9"]
    with pytest.raises(TruncatedError):
        [*bucket.store.fast_reads.read_ranges(NAME, [(0, 1), (8, 4)], room)]


@each_row(
    "rule",
    [
        Rule("GET", NAME, ignore="range", times=2),
        Rule("GET", NAME, status=200, code="Oops", times=2),
        Rule("GET", NAME, status=206, code="Oops", times=2),
    ],
    ids=["the whole object", "an error page", "a part without its range"],
)
def test_a_200_instead_of_a_206_is_retried(bucket: ScriptedBucket, rule: Rule) -> None:
    bucket.server.put(key(NAME), b"0123456789")
    bucket.server.plan(replace(rule))
    assert bucket.store.get(NAME, 2, 3) == b"234"
    bucket.server.plan(replace(rule))
    bucket.store.read_into(NAME, 2, room := bytearray(3))
    assert room == b"234"
    bucket.server.plan(replace(rule))
    assert [
        bytes(each)
        for each in bucket.store.fast_reads.read_ranges(NAME, [(1, 3)], memoryview(room))
    ] == [b"123"]


def inner(store: RetryingStore) -> CloudStore:
    assert isinstance(store.inner, CloudStore)
    return store.inner


def test_B14_O11_a_put_carries_a_checksum_and_a_condition(bucket: ScriptedBucket) -> None:
    assert inner(bucket.store).supports_conditional_put is True
    bucket.store.put(NAME, [b"con", b"tent"])
    assert bucket.server.count("PUT") == 1
    sent = bucket.server.requests[-1].headers
    assert sent["if-none-match"] == "*"
    assert sent["x-amz-checksum-sha256"]
    assert sent["x-amz-content-sha256"] != "UNSIGNED-PAYLOAD"
    assert "x-amz-content-sha256" in sent["authorization"]


NOT_IMPLEMENTED = Rule("PUT", STORE_MARKER, code="NotImplemented")


@pytest.mark.parametrize(
    "rules",
    [
        [Rule("PUT", ignore="if-none-match", times=None)],
        # The rules hit only requests with the condition; the first is the put of the marker
        *(
            [
                replace(NOT_IMPLEMENTED, status=status),
                Rule("PUT", STORE_MARKER),
                replace(NOT_IMPLEMENTED, status=status),
            ]
            for status in (501, 400)
        ),
    ],
    ids=["ignored", "501", "400"],
)
def test_O11_without_conditional_puts_a_put_first_checks_the_store(
    server: ScriptedS3, sleeps: VirtualSleep, rules: list[Rule]
) -> None:
    server.plan(*rules)
    store = store_on(server, sleeps)
    assert inner(store).supports_conditional_put is False
    marker = server.objects[key(STORE_MARKER)].content
    store.put(NAME, [CONTENT])
    with pytest.raises(ObjectExists):
        store.put(NAME, [b"other"])
    assert server.objects[key(NAME)].content == CONTENT
    assert [each.method for each in server.requests] == ["HEAD", "PUT", "HEAD"]
    assert server.objects[key(STORE_MARKER)].content == marker


def test_O11_a_conflict_is_not_a_lost_answer(bucket: ScriptedBucket) -> None:
    bucket.server.plan(Rule("PUT", NAME, act=lambda s: s.put(key(NAME), CONTENT), status=409))
    with pytest.raises(ObjectExists):
        bucket.store.put(NAME, [CONTENT])


def test_O20_requests_are_bounded(bucket: ScriptedBucket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cloud_requests, "_slots", threading.BoundedSemaphore(4))
    bucket.server.put(key(NAME), CONTENT)
    bucket.server.busiest, bucket.server.delay_s = 0, 0.005
    with ThreadPoolExecutor(100) as pool:
        got = [*pool.map(lambda _: bytes(bucket.store.get(NAME)), range(200))]
    assert got == [CONTENT] * 200
    assert bucket.server.busiest == 4


def test_O20_each_end_of_a_read_frees_a_slot(
    bucket: ScriptedBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = threading.BoundedSemaphore(1)
    monkeypatch.setattr(cloud_requests, "_slots", slots)
    with slots, pytest.raises(ObjectStoreError, match="under way"):
        bucket.store.get(NAME)
    bucket.server.plan(Rule("GET", NAME, status=403), Rule("GET", NAME, keep=10, then="close"))
    bucket.server.put(key(NAME), b"x" * 100)
    for wanted in (None, 1 << 40, 0, 10):
        try:
            bucket.store.get(NAME, 5, wanted)
        except DieselError:
            continue
    assert [*bucket.store.housekeeping.names("")] == [STORE_MARKER, NAME]
    assert slots.acquire(blocking=False)
