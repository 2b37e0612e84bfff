"""Faults of a bucket and of the connection to it (FAULTS, part O), from a scripted server."""

import os
import socket
import threading
import time
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
from tests.storage.objects.s3_server import credentials
from tests.storage.objects.scripted_s3 import BUCKET, Rule, ScriptedS3
from tests.storage.objects.scripted_store import (
    LEASE,
    LIMITS,
    POLICY,
    URL,
    VirtualSleep,
    chunk,
    key,
    store_on,
)

NAME = chunk("aaaa")
MIB = 1 << 20


CALLS: dict[str, Callable[[RetryingStore], object]] = {
    "PUT": lambda store: store.put(NAME, [b"content"]),
    "GET": lambda store: store.get(NAME),
    "HEAD": lambda store: store.stat(NAME),
    "DELETE": lambda store: store.delete(NAME),
}


def made(method: str, server: ScriptedS3) -> None:
    """Put the objects that a call of `method` needs."""
    if method != "PUT":
        server.put(key(NAME), b"content")


# O1, O18: what asking again does not change


@pytest.mark.parametrize("method", [*CALLS])
def test_O1_a_forbidden_request_is_not_retried(sleeps: VirtualSleep, method: str) -> None:
    with ScriptedS3(Rule(method, NAME, status=403)) as server:
        store = store_on(server, sleeps)
        made(method, server)
        with pytest.raises(ObjectStoreRefused, match=r"at 127\.0\.0\.1:\d+: cannot .*403"):
            CALLS[method](store)
        assert len(server.asked) == 1
    assert sleeps.slept == []


def test_O1_a_forbidden_store_is_not_a_missing_one() -> None:
    with ScriptedS3(Rule("GET", status=403, times=2)) as server:
        for create in (False, True):
            with pytest.raises(ObjectStoreRefused):
                open_cloud(URL, create=create, environ=credentials(server.endpoint))
        assert len(server.asked) == 2


def test_O1_expired_credentials_are_read_again_once(sleeps: VirtualSleep) -> None:
    expired = Rule("GET", NAME, status=400, code="ExpiredToken")
    with ScriptedS3(
        expired, Rule("GET", NAME, status=400, code="ExpiredToken", skip=1, times=2)
    ) as s:
        environ = credentials(s.endpoint)
        store = open_cloud(URL, create=True, environ=environ, limits=LIMITS, clock=sleeps.clock())
        store.put(NAME, [b"content"])
        environ["AWS_ACCESS_KEY_ID"] = "renewed"
        assert store.get(NAME) == b"content"
        assert "Credential=renewed/" in s.asked[-1].headers["authorization"]
        with pytest.raises(ObjectStoreRefused, match="have expired"):
            store.get(NAME)
    assert sleeps.slept == []


def test_O18_a_wrong_clock_is_named_as_the_cause(sleeps: VirtualSleep) -> None:
    with ScriptedS3(Rule("GET", NAME, status=403, code="RequestTimeTooSkewed")) as server:
        store = store_on(server, sleeps)
        with pytest.raises(ObjectStoreRefused, match="clock is wrong"):
            store.get(NAME)
    assert sleeps.slept == []


# O2, and what is not there


def test_O2_object_missing_is_raised_only_while_the_store_is_there(
    server: ScriptedS3, sleeps: VirtualSleep
) -> None:
    store = store_on(server, sleeps)
    for call in (store.get, store.stat):
        with pytest.raises(ObjectMissing):
            call(NAME)
    content = server.objects[key(STORE_MARKER)].content
    server.put(key(STORE_MARKER), content.replace(store.store_id.hex.encode(), b"0" * 32))
    with pytest.raises(ObjectStoreError, match="another store") as caught:
        store.get(NAME)
    assert not isinstance(caught.value, ObjectMissing)
    del server.objects[key(STORE_MARKER)]
    for call in (store.get, store.stat):
        with pytest.raises(ObjectStoreError, match="has gone") as caught:
            call(NAME)
        assert not isinstance(caught.value, ObjectMissing)
    assert sleeps.slept == []


def test_a_missing_bucket_is_named_as_the_cause(server: ScriptedS3) -> None:
    environ = credentials(server.endpoint)
    for create in (False, True):
        with pytest.raises(ObjectStoreError, match=r"s3://other/.*no such bucket") as caught:
            open_cloud("s3://other/prefix", create=create, environ=environ)
        assert not isinstance(caught.value, ObjectMissing)


def test_a_store_is_made_only_under_an_empty_prefix(server: ScriptedS3) -> None:
    environ = credentials(server.endpoint)
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
    assert sorted(server.objects) == [STORE_MARKER, NAME]
    assert [*store.names("")] == [STORE_MARKER, NAME]


def test_several_callers_that_create_one_store_get_the_same() -> None:
    with ScriptedS3() as server, ThreadPoolExecutor(8) as pool:
        server.delay_s = 0.01
        environ = credentials(server.endpoint)
        opened = [pool.submit(open_cloud, URL, create=True, environ=environ) for _ in range(8)]
        assert len({each.result(30).store_id for each in opened}) == 1


# O3: errors that pass


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
@pytest.mark.parametrize("method", [*CALLS])
def test_O3_transient_errors_are_retried(sleeps: VirtualSleep, method: str, status: int) -> None:
    with ScriptedS3(Rule(method, NAME, status=status, times=2)) as server:
        store = store_on(server, sleeps)
        made(method, server)
        CALLS[method](store)
        assert len(server.asked) == 3  # the library itself repeats nothing
        assert (key(NAME) in server.objects) == (method != "DELETE")
    throttled = status in (429, 503)
    assert sleeps.slept == ([1.0, 1.0] if throttled else [0.05, 0.1])


@pytest.mark.parametrize("method", [*CALLS])
def test_O3_lasting_errors_end_at_the_deadline(sleeps: VirtualSleep, method: str) -> None:
    script = Rule(method, NAME, status=500, times=1000)
    with ScriptedS3(script) as server:
        store = store_on(server, sleeps)
        made(method, server)
        with pytest.raises(ObjectStoreError, match=r"\(500\).*attempts in"):
            CALLS[method](store)
        assert len(server.asked) == len(sleeps.slept) + 1
        assert 1 < sum(sleeps.slept) < POLICY.deadline_s
        script.times = script.hits


def test_O3_creating_a_store_is_retried(sleeps: VirtualSleep) -> None:
    with ScriptedS3(Rule("GET", status=503), Rule("PUT", status=500, done=True)) as server:
        store = store_on(server, sleeps)
        assert [*store.names("")] == [STORE_MARKER]


# O4: connections that break


@pytest.mark.parametrize("method", [*CALLS])
@pytest.mark.parametrize("done", [False, True])
def test_O4_after_a_lost_answer_the_request_is_repeated(
    sleeps: VirtualSleep, method: str, done: bool
) -> None:
    """A put that was carried out finds its own object when it is repeated, and has succeeded."""
    with ScriptedS3(Rule(method, NAME, reset=True, done=done)) as server:
        store = store_on(server, sleeps)
        made(method, server)
        CALLS[method](store)
        assert (key(NAME) in server.objects) == (method != "DELETE")
    assert len(sleeps.slept) == 1


@pytest.mark.parametrize("theirs", [b"Content", b"content and more", b"con"])
def test_O4_a_lost_answer_does_not_hide_an_object_of_another_writer(
    sleeps: VirtualSleep, theirs: bytes
) -> None:
    overtaken = Rule("PUT", NAME, act=lambda server: server.put(key(NAME), theirs), reset=True)
    with ScriptedS3(overtaken) as server:
        store = store_on(server, sleeps)
        with pytest.raises(ObjectExists):
            store.put(NAME, [b"con", b"tent"])
        assert server.objects[key(NAME)].content == theirs


def test_O4_without_a_lost_answer_equal_content_is_no_success(
    server: ScriptedS3, sleeps: VirtualSleep
) -> None:
    store = store_on(server, sleeps)
    store.put(NAME, [b"content"])
    with pytest.raises(ObjectExists):
        store.put(NAME, [b"content"])


@pytest.mark.parametrize("then", ["reset", "close", "stall"])
def test_O4_a_broken_read_resumes_behind_the_last_good_byte(
    sleeps: VirtualSleep, then: Literal["reset", "close", "stall"]
) -> None:
    content = os.urandom(5 * MIB // 2)
    with ScriptedS3(Rule("GET", NAME, keep=MIB, then=then, times=2)) as server:
        limits = AttemptLimits(
            stall_s=0.5, put_stall_s=0.5, bytes_per_s_min=1 << 20
        )  # for two stalls
        store = store_on(server, sleeps, limits=limits)
        server.put(key(NAME), content)
        room = bytearray(len(content))
        store.read_into(NAME, 0, room)
        assert room == content
        for number, asked in enumerate(server.asked[1:], 1):
            assert asked.headers["if-match"] == server.objects[key(NAME)].etag
            start = int(asked.headers["range"].removeprefix("bytes=").split("-")[0])
            assert 0 < start <= number * MIB
        assert len(server.asked) == 3
    assert sleeps.slept == []


def test_O4_a_body_that_makes_no_progress_ends_at_the_deadline(sleeps: VirtualSleep) -> None:
    broken = Rule("GET", NAME, keep=0, then="close", times=1000)
    with ScriptedS3(broken) as server:
        store = store_on(server, sleeps)
        server.put(key(NAME), b"content")
        with pytest.raises(ObjectStoreError, match="attempts in"):
            store.get(NAME)
        broken.times = broken.hits


def test_O4_a_refused_connection_is_named_as_the_cause(sleeps: VirtualSleep) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        environ = credentials(f"http://127.0.0.1:{port}")
        with pytest.raises(ObjectStoreError, match=f"127.0.0.1:{port}: .*refused") as caught:
            open_cloud(URL, environ=environ, policy=POLICY, limits=LIMITS, clock=sleeps.clock())
    assert len(sleeps.slept) > 2
    assert "testing-secret" not in repr(caught.value)


def test_O4_an_unknown_host_is_named_as_the_cause(sleeps: VirtualSleep) -> None:
    environ = credentials("http://no-such-host.invalid:9000")
    with pytest.raises(ObjectStoreError, match=r"no-such-host\.invalid:9000: .*no such host"):
        open_cloud(URL, environ=environ, policy=POLICY, limits=LIMITS, clock=sleeps.clock())


# O5: answers that stand still


def test_O5_a_stalled_answer_is_given_up_and_the_request_repeated(sleeps: VirtualSleep) -> None:
    with ScriptedS3(
        Rule("GET", NAME, act=_hold, reset=True),
        Rule("GET", NAME, keep=0, then="stall"),
        Rule("HEAD", NAME, act=_hold, reset=True),
    ) as server:
        store = store_on(server, sleeps)
        server.put(key(NAME), b"content")
        begun = time.monotonic()
        assert store.get(NAME) == b"content"
        assert store.stat(NAME).bytes == 7
        assert time.monotonic() - begun < 5 * LIMITS.stall_s


def _hold(server: ScriptedS3) -> None:
    """Do not answer for longer than any client waits."""
    server.stopped.wait(10 * LIMITS.stall_s)


def test_O5_an_answer_that_comes_too_slowly_is_given_up(sleeps: VirtualSleep) -> None:
    content = os.urandom(MIB)
    with ScriptedS3(Rule("GET", NAME, keep=1000, then="dribble")) as server:
        limits = AttemptLimits(stall_s=0.5, put_stall_s=0.5, bytes_per_s_min=1 << 14)
        assert limits.attempt_s(MIB, put=False) > 60  # so another limit ends it
        store = store_on(server, sleeps, limits=limits, policy=RetryPolicy(deadline_s=100))
        server.put(key(NAME), content)
        begun = time.monotonic()
        assert store.get(NAME) == content
        assert time.monotonic() - begun < 5 * LIMITS.stall_s
        assert len(server.asked) == 2


def test_O5_an_answer_slower_than_the_minimum_is_given_up_in_time(sleeps: VirtualSleep) -> None:
    """The body comes at 20 bytes a second: it does not stall, but it is too slow for its size."""
    content = os.urandom(1000)
    limits = AttemptLimits(stall_s=0.5, put_stall_s=0.5, bytes_per_s_min=640)
    with ScriptedS3(Rule("GET", NAME, keep=1, then="dribble")) as server:
        store = store_on(server, sleeps, limits=limits)
        server.put(key(NAME), content)
        begun = time.monotonic()
        assert store.get(NAME) == content
        assert time.monotonic() - begun < 2 * limits.attempt_s(len(content), put=False)
        assert "if-match" not in server.asked[1].headers  # the read begins again and is not resumed


def test_O5_a_put_that_the_server_does_not_read_is_given_up(sleeps: VirtualSleep) -> None:
    with ScriptedS3(Rule("PUT", NAME, act=_hold, reset=True)) as server:
        store = store_on(server, sleeps)
        begun = time.monotonic()
        store.put(NAME, [os.urandom(MIB)])
        assert time.monotonic() - begun < 5 * LIMITS.stall_s


def test_O5_a_lasting_stall_ends_at_the_deadline(sleeps: VirtualSleep) -> None:
    stalled = Rule("GET", NAME, keep=0, then="stall", times=1000)
    with ScriptedS3(stalled) as server:
        store = store_on(server, sleeps)
        server.put(key(NAME), b"content")
        begun = time.monotonic()
        with pytest.raises(ObjectStoreError, match="attempts in"):
            store.get(NAME)
        assert time.monotonic() - begun < POLICY.deadline_s + 1
        stalled.times = stalled.hits


# O7, O9: other bytes


def test_O7_damaged_bytes_of_a_read_are_returned_unchecked(sleeps: VirtualSleep) -> None:
    """S3's ETag is in general no checksum of the content; readers check our own checksums."""
    with ScriptedS3(Rule("GET", NAME, flip=3)) as server:
        store = store_on(server, sleeps)
        server.put(key(NAME), b"\0\0")
        assert store.get(NAME) == b"\x08\0"
        assert store.get(NAME) == b"\0\0"


def test_B14_a_put_carries_a_checksum(server: ScriptedS3, sleeps: VirtualSleep) -> None:
    store = store_on(server, sleeps)
    store.put(NAME, [b"con", b"tent"])
    sent = server.asked[-1].headers
    assert sent["x-amz-checksum-sha256"]
    assert sent["x-amz-content-sha256"] != "UNSIGNED-PAYLOAD"
    assert "x-amz-content-sha256" in sent["authorization"]


def test_B14_a_put_that_the_store_calls_damaged_is_an_error(sleeps: VirtualSleep) -> None:
    damaged = Rule("PUT", NAME, status=400, code="XAmzContentSHA256Mismatch")
    with ScriptedS3(damaged) as server:
        store = store_on(server, sleeps)
        with pytest.raises(ObjectStoreError, match="XAmzContentSHA256Mismatch"):
            store.put(NAME, [b"content"])
        assert key(NAME) not in server.objects


def test_O9_a_resumed_read_is_of_one_version(sleeps: VirtualSleep) -> None:
    old, new = b"o" * MIB, b"n" * MIB

    def change(server: ScriptedS3) -> None:
        server.put(key(LEASE), new)

    script = Rule("GET", LEASE, keep=MIB // 2, then="close"), Rule("GET", LEASE, act=change)
    with ScriptedS3(*script) as server:
        store = store_on(server, sleeps)
        server.put(key(LEASE), old)
        assert store.get(LEASE) == new
    assert len(sleeps.slept) == 1


def test_O9_ranges_are_of_one_version(server: ScriptedS3, sleeps: VirtualSleep) -> None:
    store = store_on(server, sleeps)
    for name in (LEASE, NAME):
        server.put(key(name), b"old content")
        ranges = store.read_ranges(name, [(0, 3), (4, 7), (0, 3)], memoryview(bytearray(7)))
        assert bytes(next(ranges)) == b"old"
        assert bytes(next(ranges)) == b"content"
        server.put(key(name), b"new content")
        if name == LEASE:
            with pytest.raises(ObjectStoreError, match="changed"):
                next(ranges)
    assert server.asked[1].headers["if-match"] == server.asked[2].headers["if-match"]


def test_after_a_failure_ranges_continue_behind_the_last_one(sleeps: VirtualSleep) -> None:
    with ScriptedS3(Rule("GET", NAME, status=500, skip=1, times=2)) as server:
        store = store_on(server, sleeps)
        server.put(key(NAME), b"0123456789")
        room = memoryview(bytearray(4))
        ranges = [(0, 2), (5, 4), (9, 1)]
        assert [bytes(view) for view in store.read_ranges(NAME, ranges, room)] == [
            b"01",
            b"5678",
            b"9",
        ]
        with pytest.raises(TruncatedError):
            [*store.read_ranges(NAME, [(0, 1), (8, 4)], room)]


def ranged(store: RetryingStore, way: str) -> bytes:
    """Bytes 2 to 5 of NAME, by one of the ways to read a part of an object."""
    room = bytearray(3)
    if way == "get":
        return bytes(store.get(NAME, 2, 3))
    if way == "read_into":
        store.read_into(NAME, 2, room)
    else:
        next(iter(store.read_ranges(NAME, [(2, 3)], memoryview(room))))
    return bytes(room)


@pytest.mark.parametrize("way", ["get", "read_into", "read_ranges"])
@pytest.mark.parametrize(
    "rule",
    [
        Rule("GET", NAME, ignore="range", times=2),
        Rule("GET", NAME, status=200, code="Oops", times=2),
        Rule("GET", NAME, status=206, code="Oops", times=2),
    ],
    ids=["the whole object", "an error page", "a part without its range"],
)
def test_a_200_instead_of_a_206_is_retried(sleeps: VirtualSleep, rule: Rule, way: str) -> None:
    with ScriptedS3(replace(rule)) as server:
        store = store_on(server, sleeps)
        server.put(key(NAME), b"0123456789")
        assert ranged(store, way) == b"234"


def test_a_store_that_always_ignores_ranges_is_an_error(sleeps: VirtualSleep) -> None:
    script = Rule("GET", NAME, ignore="range", times=1000)
    with ScriptedS3(script) as server:
        store = store_on(server, sleeps)
        server.put(key(NAME), b"0123456789")
        with pytest.raises(ObjectStoreError, match=r"not of the range .* attempts in"):
            store.get(NAME, 2, 3)
        script.times = script.hits  # however many there were


# O11: conditions


def inner(store: RetryingStore) -> CloudStore:
    assert isinstance(store.inner, CloudStore)
    return store.inner


def test_O11_support_of_conditional_puts_is_found_out(
    server: ScriptedS3, sleeps: VirtualSleep
) -> None:
    store = store_on(server, sleeps)
    assert inner(store).supports_conditional_put is True
    store.put(NAME, [b"x"])
    assert server.asked[-1].headers["if-none-match"] == "*"
    assert server.count("PUT") == 1


@pytest.mark.parametrize("way", ["ignored", "501", "400"])
def test_O11_without_conditional_puts_the_store_is_asked_first(
    sleeps: VirtualSleep, way: str
) -> None:
    if way == "ignored":
        rule = Rule("PUT", ignore="if-none-match", times=1000)
    else:
        # The rule hits only requests with the condition; the first is the put of the marker.
        rule = Rule("PUT", status=int(way), code="NotImplemented", skip=0, times=1)
    probe = Rule("PUT", STORE_MARKER, status=rule.status, code="NotImplemented")
    script = (rule,) if way == "ignored" else (rule, Rule("PUT", STORE_MARKER), probe)
    with ScriptedS3(*script) as server:
        store = store_on(server, sleeps)
        assert inner(store).supports_conditional_put is False
        marker = server.objects[key(STORE_MARKER)].content
        store.put(NAME, [b"content"])
        with pytest.raises(ObjectExists):
            store.put(NAME, [b"other"])
        assert server.objects[key(NAME)].content == b"content"
        assert [each.method for each in server.asked] == ["HEAD", "PUT", "HEAD"]
        assert server.objects[key(STORE_MARKER)].content == marker
        if way == "ignored":
            rule.times = rule.hits


def test_O11_a_conflict_is_retried(sleeps: VirtualSleep) -> None:
    with ScriptedS3(Rule("PUT", NAME, status=409, times=2)) as server:
        store = store_on(server, sleeps)
        store.put(NAME, [b"content"])
        assert server.objects[key(NAME)].content == b"content"


def test_O11_a_conflict_is_not_a_lost_answer(sleeps: VirtualSleep) -> None:
    """Another writer that was faster with equal content has won."""
    lost = Rule("PUT", NAME, act=lambda s: s.put(key(NAME), b"content"), status=409)
    with ScriptedS3(lost) as server:
        store = store_on(server, sleeps)
        with pytest.raises(ObjectExists):
            store.put(NAME, [b"content"])


def test_a_full_store_is_no_space(sleeps: VirtualSleep) -> None:
    with ScriptedS3(
        Rule("PUT", NAME, status=507), Rule("PUT", NAME, status=403, code="QuotaExceeded")
    ) as s:
        store = store_on(s, sleeps)
        for _ in range(2):
            with pytest.raises(NoSpaceError):
                store.put(NAME, [b"content"])
    assert sleeps.slept == []


def test_after_a_lost_answer_a_lease_is_written_again(sleeps: VirtualSleep) -> None:
    with ScriptedS3(Rule("PUT", LEASE, reset=True, done=True)) as server:
        store = store_on(server, sleeps)
        store.replace(LEASE, [b"one"])
        store.replace(LEASE, [b"two"])
        assert server.objects[key(LEASE)].content == b"two"


# O19, O20


def test_O19_a_put_does_not_follow_a_redirect(sleeps: VirtualSleep) -> None:
    with (
        ScriptedS3() as elsewhere,
        ScriptedS3(Rule("PUT", NAME, status=307, headers={"Location": elsewhere.endpoint})) as s,
    ):
        store = store_on(s, sleeps)
        with pytest.raises(ObjectStoreError, match=r"elsewhere.*AWS_REGION"):
            store.put(NAME, [b"content"])
        assert elsewhere.asked == []
    assert sleeps.slept == []


def test_O20_requests_under_way_are_bounded(
    server: ScriptedS3, sleeps: VirtualSleep, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud_requests, "_slots", threading.BoundedSemaphore(4))
    store = store_on(server, sleeps)
    server.put(key(NAME), b"content")
    server.busiest, server.delay_s = 0, 0.005
    with ThreadPoolExecutor(100) as pool:
        got = [*pool.map(lambda _: bytes(store.get(NAME)), range(200))]
    assert got == [b"content"] * 200
    assert server.busiest == 4


def test_O20_a_slot_that_never_gets_free_is_an_error(
    server: ScriptedS3, sleeps: VirtualSleep, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_on(server, sleeps)
    monkeypatch.setattr(cloud_requests, "_slots", threading.BoundedSemaphore(1))
    with cloud_requests._slots, pytest.raises(ObjectStoreError, match="under way"):
        store.get(NAME)


def test_O20_every_end_of_a_read_frees_its_slot(
    sleeps: VirtualSleep, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (Rule("GET", NAME, status=403), Rule("GET", NAME, keep=10, then="close"))
    with ScriptedS3(*script) as server:
        store = store_on(server, sleeps)
        slots = threading.BoundedSemaphore(1)
        monkeypatch.setattr(cloud_requests, "_slots", slots)
        server.put(key(NAME), b"x" * 100)
        for wanted in (None, 1 << 40, 0, 10):
            try:
                store.get(NAME, 5, wanted)
            except DieselError:
                continue
        assert [*store.names("")] == [STORE_MARKER, NAME]
        assert slots.acquire(blocking=False)


# S8


def test_S8_no_message_holds_a_secret(sleeps: VirtualSleep) -> None:
    statuses = (400, 403, 404, 416, 500)
    script = [Rule("GET", NAME, status=status) for status in statuses]
    with ScriptedS3(*script, Rule("GET", NAME, reset=True)) as server:
        store = inner(store_on(server, sleeps))
        server.put(key(NAME), b"content")
        for _ in range(len(statuses) + 1):
            with pytest.raises(DieselError) as caught:
                store.get(NAME, 1, 2)
            error: BaseException | None = caught.value
            while error is not None:
                assert "testing" not in f"{error} {error!r}"
                assert isinstance(
                    error, DieselError
                )  # errors of the library may hold signed addresses
                assert error.__suppress_context__ or error.__context__ is None
                error = error.__cause__
