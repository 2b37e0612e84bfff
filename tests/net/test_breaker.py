"""Circuit breakers: when a failing service is tried again, and the timeouts of peers."""

import random

from diesel_fs.net.breaker import (
    FAILURES_MAX,
    PAUSE_MAX_S,
    QUARANTINE_S,
    TIMEOUT_MAX_S,
    TIMEOUT_MIN_S,
    BreakerState,
    CircuitBreaker,
    PeerBreaker,
)


def open_breaker(breaker: CircuitBreaker, now_s: float) -> None:
    for _ in range(FAILURES_MAX):
        breaker.record_failure(breaker.admit(now_s), now_s)


def test_three_failures_in_a_row_open_the_breaker_for_a_second() -> None:
    breaker = PeerBreaker()
    for _ in range(5):  # never three in a row
        assert not breaker.record_failure(breaker.admit(0), 0)
        assert not breaker.record_failure(breaker.admit(0), 0)
        assert not breaker.record_success(breaker.admit(0))
    assert [breaker.record_failure(breaker.admit(0), 0) for _ in range(3)] == [False, False, True]
    assert breaker.admit(0.99) == 0
    assert breaker.state(0.99) is BreakerState.OPEN


def test_after_the_pause_one_request_at_a_time_tries() -> None:
    breaker = PeerBreaker()
    open_breaker(breaker, 0)
    ticket = breaker.admit(1)
    assert ticket
    assert breaker.state(1) is BreakerState.HALF_OPEN
    assert breaker.admit(1) == 0
    assert breaker.record_success(ticket)
    assert breaker.admit(1)
    assert breaker.admit(1)
    assert breaker.state(1) is BreakerState.CLOSED


def test_each_failure_doubles_the_pause_and_a_success_resets_it() -> None:
    breaker = PeerBreaker()
    open_breaker(breaker, 0)
    now_s, pauses = 0.0, []
    for _ in range(6):
        begun_s = now_s
        while not (ticket := breaker.admit(now_s)):
            now_s += 0.5
        pauses.append(now_s - begun_s)
        assert breaker.record_failure(ticket, now_s)
    assert pauses == [1, 2, 4, 8, PAUSE_MAX_S, PAUSE_MAX_S]
    assert breaker.record_success(breaker.admit(now_s + PAUSE_MAX_S))
    open_breaker(breaker, 100)
    assert breaker.admit(101)


def test_one_refusal_opens_the_breaker() -> None:
    breaker = PeerBreaker()
    assert breaker.record_refusal(breaker.admit(0), 0)
    assert breaker.admit(0.5) == 0
    assert breaker.admit(1)


def test_outcomes_of_requests_from_before_the_last_change_are_ignored() -> None:
    breaker = PeerBreaker()
    old = breaker.admit(0)
    open_breaker(breaker, 0)
    assert not breaker.record_failure(old, 0.5)
    assert not breaker.record_success(old)
    breaker.cancel(old)
    assert breaker.admit(0.9) == 0
    probe = breaker.admit(1)
    breaker.cancel(old)
    assert breaker.admit(1) == 0, "the request that tries is still under way"
    breaker.cancel(probe)
    assert breaker.admit(1)


def test_F5_three_damaged_parts_put_a_peer_in_quarantine_for_a_minute() -> None:
    breaker = PeerBreaker()
    assert [breaker.record_damage(5) for _ in range(3)] == [False, False, True]
    assert breaker.state(6) is BreakerState.QUARANTINED
    assert breaker.admit(4 + QUARANTINE_S) == 0
    assert breaker.admit(5 + QUARANTINE_S)
    assert not breaker.record_damage(100)


def test_an_answer_that_was_under_way_does_not_end_a_quarantine() -> None:
    breaker = PeerBreaker()
    under_way = breaker.admit(5)
    for _ in range(3):
        breaker.record_damage(5)
    breaker.record_success(under_way)
    assert not breaker.is_clean, "callers ask `admit`"
    assert breaker.is_open(6)
    assert breaker.admit(6) == 0
    assert breaker.record_success(breaker.admit(5 + QUARANTINE_S))
    assert breaker.is_clean


def test_the_timeout_follows_the_95th_percentile_within_bounds() -> None:
    breaker = PeerBreaker()
    assert breaker.timeout_s(0) == TIMEOUT_MAX_S
    for _ in range(128):
        breaker.record_latency(0.0001, 4096)
    assert breaker.timeout_s(0) == TIMEOUT_MIN_S
    assert breaker.timeout_s(8 << 20) == TIMEOUT_MIN_S + 1
    chance = random.Random(1)
    times = [chance.uniform(0, 0.2) for _ in range(128)]
    for seconds in times:
        breaker.record_latency(seconds, 4096)
    assert abs(breaker.timeout_s(0) - 4 * sorted(times)[121]) < 0.01
    for _ in range(128):
        breaker.record_latency(3, 4096)
    assert breaker.timeout_s(0) == TIMEOUT_MAX_S
    for _ in range(128):
        breaker.record_latency(0.001, 8 << 20)  # so large that its time is the network's
    assert breaker.timeout_s(0) == TIMEOUT_MAX_S


def test_without_tickets_every_failure_while_open_prolongs_the_pause() -> None:
    breaker = CircuitBreaker(3, 30.0)
    assert [breaker.record_failure(None, 0) for _ in range(3)] == [False, False, True]
    assert breaker.is_open(29)
    assert not breaker.is_open(30)
    assert breaker.record_failure(None, 40), "half open: one failure is enough"
    assert breaker.record_failure(None, 50)
    assert breaker.is_open(79)
    assert not breaker.is_open(80)
    assert breaker.record_success()
    assert not breaker.record_failure(None, 90)
