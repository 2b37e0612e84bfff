"""The work queue: an object has one worker at a time, and one that fails comes again."""

import asyncio
from collections.abc import Callable

from diesel_kubernetes.operator.queue import Key, WorkQueue

A, B = Key("datasets", "default", "a"), Key("datasets", "default", "b")


def run(
    queue: WorkQueue, until: Callable[[], bool], first: Callable[[], None] = lambda: None
) -> None:
    """Run a queue until a condition holds."""

    async def main() -> None:
        first()
        task = asyncio.create_task(queue.run())
        async with asyncio.timeout(30):
            while not until():  # noqa: ASYNC110  # the queue has no event for this
                await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(main())


def test_what_is_added_often_is_handled_once() -> None:
    seen: list[Key] = []

    async def handle(key: Key) -> None:
        seen.append(key)

    queue = WorkQueue(handle, 2)
    for key in (A, A, B, A):
        queue.add(key)
    run(queue, lambda: len(seen) == 2)
    assert seen == [A, B]


def test_an_object_that_changes_meanwhile_is_handled_again_but_never_twice_at_once() -> None:
    active: set[Key] = set()
    count = 0

    async def handle(key: Key) -> None:
        nonlocal count
        assert key not in active
        active.add(key)
        if count < 3:
            queue.add(key)
        await asyncio.sleep(0)
        active.discard(key)
        count += 1

    queue = WorkQueue(handle, 4)
    queue.add(A)
    run(queue, lambda: count == 4 and not active)


def test_a_failure_does_not_stop_the_others_and_comes_again() -> None:
    seen: list[Key] = []

    async def handle(key: Key) -> None:
        seen.append(key)
        if seen.count(A) == 1 and key == A:
            raise ValueError("away")

    queue = WorkQueue(handle, 1)
    queue.add(A)
    queue.add(B)
    run(queue, lambda: seen.count(A) == 2)
    assert seen == [A, B, A]


def test_a_later_look_comes_in_time_and_an_event_comes_first() -> None:
    seen: list[Key] = []

    async def handle(key: Key) -> float | None:
        seen.append(key)
        return 0.01 if len(seen) < 3 else None

    queue = WorkQueue(handle, 1)

    def add_later_and_now() -> None:
        queue.add_later(A, 3600.0)
        queue.add(A)

    run(queue, lambda: len(seen) == 3, add_later_and_now)
    assert seen == [A, A, A]
