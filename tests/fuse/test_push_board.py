"""The board that server and helper share: what is pushed soon, and how long a READ waits for it."""

import os

import numpy as np
import trio
import trio.lowlevel
import trio.testing

from diesel_fs.fuse.push_board import HOLD_STEP_S, HOLD_STEPS, PushBoard


def boards(entry_count: int = 1000) -> tuple[PushBoard, PushBoard]:
    """The server's and the helper's view of one board."""
    server, descriptor = PushBoard.make(entry_count)
    helper = PushBoard(descriptor)
    os.close(descriptor)
    return server, helper


def soon(board: PushBoard) -> list[int]:
    return [entry for entry in range(1000) if board.is_soon(entry)]


def test_what_is_announced_is_soon_until_something_else_is() -> None:
    server, helper = boards()
    assert soon(server) == []
    helper.announce(np.array([3, 999, 0], np.uint32))
    assert soon(server) == [0, 3, 999]
    helper.announce(np.array([3, 4], np.uint32))
    assert soon(server) == [3, 4]
    helper.announce(np.empty(0, np.uint32))
    assert soon(server) == []


def held_s(server: PushBoard, helper: PushBoard, signs: int) -> float:
    """How long a READ is held while the helper goes on for so many steps, in virtual seconds."""

    async def go_on() -> None:
        for _ in range(signs):
            helper.went_on()
            await trio.sleep(HOLD_STEP_S / 2)

    async def measure() -> float:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(go_on)
            await trio.lowlevel.checkpoint()
            start_s = trio.current_time()
            await server.hold()
            return trio.current_time() - start_s

    return trio.run(measure, clock=trio.testing.MockClock(autojump_threshold=0))


def test_a_READ_waits_while_the_helper_goes_on() -> None:
    """A step where it stands still, as it does when it waits for the page that the READ locked; and

    never longer than a few milliseconds.
    """
    assert abs(held_s(*boards(), signs=0) - HOLD_STEP_S) < 1e-9
    assert HOLD_STEP_S < held_s(*boards(), signs=5) < HOLD_STEPS * HOLD_STEP_S
    assert abs(held_s(*boards(), signs=100) - HOLD_STEPS * HOLD_STEP_S) < 1e-9
