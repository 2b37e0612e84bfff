"""Whether a peer is asked, and how long it is waited for."""

import random

from diesel_fs.task.breaker import (
    FAILURES,
    PATIENCE_MAX_S,
    PATIENCE_MIN_S,
    PAUSE_MAX_S,
    QUARANTINE_S,
    Breaker,
    Mood,
)


def paused(breaker: Breaker, now_s: float) -> None:
    for _ in range(FAILURES):
        breaker.failed(breaker.admit(now_s), now_s)


def test_three_failures_in_a_row_and_nobody_asks_for_a_second() -> None:
    breaker = Breaker()
    for _ in range(5):  # not in a row
        assert not breaker.failed(breaker.admit(0), 0)
        assert not breaker.failed(breaker.admit(0), 0)
        assert not breaker.succeeded(breaker.admit(0))
    assert [breaker.failed(breaker.admit(0), 0) for _ in range(3)] == [False, False, True]
    assert breaker.admit(0.99) == 0
    assert breaker.mood(0.99) is Mood.PAUSED


def test_then_one_at_a_time_tries() -> None:
    breaker = Breaker()
    paused(breaker, 0)
    ticket = breaker.admit(1)
    assert ticket
    assert breaker.mood(1) is Mood.TRIED
    assert breaker.admit(1) == 0
    assert breaker.succeeded(ticket)
    assert breaker.admit(1)
    assert breaker.admit(1)
    assert breaker.mood(1) is Mood.ASKED


def test_each_failure_doubles_the_pause_and_success_forgets_that() -> None:
    breaker = Breaker()
    paused(breaker, 0)
    now_s, pauses = 0.0, []
    for _ in range(6):
        begun_s = now_s
        while not (ticket := breaker.admit(now_s)):
            now_s += 0.5
        pauses.append(now_s - begun_s)
        assert breaker.failed(ticket, now_s)
    assert pauses == [1, 2, 4, 8, PAUSE_MAX_S, PAUSE_MAX_S]
    assert breaker.succeeded(breaker.admit(now_s + PAUSE_MAX_S))
    paused(breaker, 100)
    assert breaker.admit(101)


def test_a_refusal_pauses_at_once() -> None:
    breaker = Breaker()
    assert breaker.refused(breaker.admit(0), 0)
    assert breaker.admit(0.5) == 0
    assert breaker.admit(1)


def test_who_was_let_in_before_has_no_say_any_more() -> None:
    breaker = Breaker()
    old = breaker.admit(0)
    paused(breaker, 0)
    assert not breaker.failed(old, 0.5)
    assert not breaker.succeeded(old)
    breaker.withdrawn(old)
    assert breaker.admit(0.9) == 0
    tried = breaker.admit(1)
    breaker.withdrawn(old)
    assert breaker.admit(1) == 0, "the one that tries is still under way"
    breaker.withdrawn(tried)
    assert breaker.admit(1)


def test_F5_three_damaged_parts_and_a_minute_of_quarantine() -> None:
    breaker = Breaker()
    assert [breaker.damaged(5) for _ in range(3)] == [False, False, True]
    assert breaker.mood(6) is Mood.QUARANTINED
    assert breaker.admit(4 + QUARANTINE_S) == 0
    assert breaker.admit(5 + QUARANTINE_S)
    assert not breaker.damaged(100)


def test_patience_follows_the_95th_percentile_within_bounds() -> None:
    breaker = Breaker()
    assert breaker.patience_s(0) == PATIENCE_MAX_S
    for _ in range(128):
        breaker.took(0.0001, 4096)
    assert breaker.patience_s(0) == PATIENCE_MIN_S
    assert breaker.patience_s(8 << 20) == PATIENCE_MIN_S + 1
    chance = random.Random(1)
    times = [chance.uniform(0, 0.2) for _ in range(128)]
    for seconds in times:
        breaker.took(seconds, 4096)
    assert abs(breaker.patience_s(0) - 4 * sorted(times)[121]) < 0.01
    for _ in range(128):
        breaker.took(3, 4096)
    assert breaker.patience_s(0) == PATIENCE_MAX_S
    for _ in range(128):
        breaker.took(0.001, 8 << 20)  # the network's time, and none of the peer's
    assert breaker.patience_s(0) == PATIENCE_MAX_S
