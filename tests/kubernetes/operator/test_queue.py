"""The work queue: an object has one worker at a time, and a failed one is handled again."""

import asyncio
from collections.abc import Callable, Sequence

from diesel_kubernetes.operator.queue import Key, WorkQueue

A, B = Key("datasets", "default", "a"), Key("datasets", "default", "b")


async def run(queue: WorkQueue, until: Callable[[], bool]) -> None:
    task = asyncio.create_task(queue.run())
    async with asyncio.timeout(30):
        while not until():  # noqa: ASYNC110  # the queue has no event for this
            await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def handled(
    keys: Sequence[Key],
    count: int,
    answer: Callable[[list[Key]], float | None] = lambda _: None,
    *,
    later: Sequence[Key] = (),
) -> list[Key]:
    """Return the first `count` keys that are handled of those that were added, for now or for much
    later.

    `answer` gets the keys that were handled, and returns when the last one comes again.
    """
    seen: list[Key] = []

    async def handle(key: Key) -> float | None:
        seen.append(key)
        return answer(seen)

    async def main() -> None:
        queue = WorkQueue(handle, 1)
        for key in later:
            queue.add_later(key, 3600.0)
        for key in keys:
            queue.add(key)
        await run(queue, lambda: len(seen) == count)

    asyncio.run(main())
    return seen


def test_a_key_that_is_added_often_is_handled_once() -> None:
    assert handled([A, A, B, A], 2) == [A, B]


def test_a_failure_does_not_stop_the_others_and_is_tried_again() -> None:
    def fail_first(seen: list[Key]) -> None:
        if seen == [A]:
            raise ValueError("away")

    assert handled([A, B], 3, fail_first) == [A, B, A]


def test_a_delayed_key_comes_in_time_and_an_event_comes_first() -> None:
    def soon_twice(seen: list[Key]) -> float | None:
        return 0.01 if len(seen) < 3 else None

    assert handled([A], 3, soon_twice, later=[A]) == [A, A, A]


def test_a_changed_object_is_handled_again_but_never_twice_at_once() -> None:
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
    asyncio.run(run(queue, lambda: count == 4 and not active))
