"""How a session waits for requests: most take no turn of trio's, and other tasks get theirs."""

import os
import time
from collections.abc import Iterator
from itertools import pairwise

import pyfuse3
import pytest
import trio

from diesel_fs.mounts.sessions.pyfuse3 import TrioStandIn, installed
from diesel_fs.mounts.sessions.session import RequestWait

LATE_S = 5.0  # far more than needed, also on a busy machine: only a hang takes longer


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """The ends of a pipe: bytes written to it stand for a request."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


async def test_requests_that_keep_coming_take_few_turns_of_trio(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], b"request")
    stand_in, requests, turns = TrioStandIn(RequestWait(lambda: True)), 0, 0

    async def others() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(others)
            while turns < 10:
                async with stand_in.Lock():
                    await stand_in.wait_readable(pipe[0])
                requests += 1
            nursery.cancel_scope.cancel()
    assert requests > 3 * turns


async def test_a_wait_for_a_request_delays_other_tasks_little(pipe: tuple[int, int]) -> None:
    stand_in = TrioStandIn(RequestWait(lambda: True))
    with trio.move_on_after(0.05):
        while True:
            await stand_in.wait_readable(pipe[0])  # no request comes
    os.write(pipe[1], b"one")
    await stand_in.wait_readable(pipe[0])
    os.read(pipe[0], 3)
    start_s = time.monotonic()
    with trio.move_on_after(0.0):
        await stand_in.wait_readable(pipe[0])
    assert time.monotonic() - start_s < LATE_S


async def test_while_a_read_waits_poll_waits_for_no_request(pipe: tuple[int, int]) -> None:
    """The bytes of the read probably come first, and they come through trio."""
    wait = RequestWait(lambda: False, slice_s=1e6, poll_s=1e6)
    os.write(pipe[1], b"one")
    await wait.readable(pipe[0])  # a slice begins
    os.read(pipe[0], 3)
    with trio.move_on_after(0.01) as scope:
        await wait.readable(pipe[0])
    assert scope.cancelled_caught


async def test_the_lock_has_one_owner_and_passes_on_when_its_owner_waits() -> None:
    lock = TrioStandIn.Lock()
    events: list[str] = []

    async def worker(name: str) -> None:
        for turn in range(3):
            async with lock:
                events.append(f"{name}{turn}")
            if name == "a" and turn == 1:
                await trio.sleep(0.01)
            async with lock:
                events.append("in")
                await trio.lowlevel.checkpoint()
                events.append("out")

    async with trio.open_nursery() as nursery:
        for name in "abc":
            nursery.start_soon(worker, name)
    assert len(events) == 3 * 3 * 3
    assert all(after == "out" for at, after in pairwise(events) if at == "in")
    assert {name[0] for name in events if name[-1].isdigit()} == set("abc")


def test_pyfuse3_gets_trio_back_afterwards() -> None:
    """The attribute exists for asyncio mode of pyfuse3; this test fails if a release drops it."""
    stand_in = TrioStandIn(RequestWait(lambda: True))
    assert vars(pyfuse3)["trio"] is trio
    with installed(stand_in):
        assert vars(pyfuse3)["trio"] is stand_in
    assert vars(pyfuse3)["trio"] is trio
