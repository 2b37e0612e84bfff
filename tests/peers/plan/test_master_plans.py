"""Masters that send each other the orders of their nodes' readers, over real sockets; and a client
that sends its order to its master.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import trio

from diesel_fs.orders.computed import ComputedOrder
from diesel_fs.orders.plan import Epoch
from diesel_fs.peers import wire
from diesel_fs.peers.master import master as module
from diesel_fs.peers.master.master import Master
from diesel_fs.peers.master.peer import Peer
from diesel_fs.peers.plan import task_plan
from diesel_fs.peers.plan.messages import TAKEN, UNKNOWN, Positions, plan_body
from diesel_fs.peers.plan.sender import PlanSender, StreamProgress
from tests.rows import each_row

from ...waiting import soon, wait_until
from ..connected_masters import FakeAnswers, Node, authenticated_raw
from ..master.test_data_plane import check_served
from ..master.test_master import Task
from ..planes import Plane, is_closed


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setattr(module, "EXCHANGE_S", 0.05)
    monkeypatch.setattr(task_plan, "APPLY_S", 0.02)
    return Task(tmp_path)


def order_of(task: Task, seed: int) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
    files = task.snapshot.files()
    return np.random.default_rng(seed).permutation(files).astype(np.uint32)


class Reader:
    """Sends one stream to a master in the caller's thread; a client does this in a thread of its
    own."""

    def __init__(self, task: Task, master: Master, client: int) -> None:
        self.sender = PlanSender(
            task.snapshot, lambda body: master.plan.take(master.rank, body, client=client)
        )

    def send(
        self, epoch: Epoch, position: int = 0,
        values: "np.ndarray[tuple[int], np.dtype[np.float32]] | None" = None,
    ) -> None:  # fmt: skip
        progress = StreamProgress((epoch,), epoch.number, position)
        self.sender._values = values
        assert self.sender._send({"train": progress})


def plan(node: Master) -> dict[str, int]:
    found = node.stats()["plan"]
    assert isinstance(found, dict)
    return found


async def end(task: Task, rank: int) -> None:
    """End a master at once; the registry forgets it. A renewal may be on its way."""
    task.kill(rank)
    for _ in range(10):
        await trio.sleep(0.05)
        task.registry.members.pop(rank, None)


def knows(node: Master, streams: int) -> Callable[[], bool]:
    return lambda: plan(node)["planned_streams"] == streams == plan(node)["streams"]


async def test_all_masters_know_all_streams_and_follow_their_positions(task: Task) -> None:
    async with task.nodes(3, "plan") as nodes:
        orders = [order_of(task, rank) for rank in range(3)]
        readers = [Reader(task, node, 5) for node in nodes]
        readers[0].send(Epoch(0, orders[0]))
        readers[1].send(Epoch(0, orders[1]))
        computed = ComputedOrder(7, 0, 4)
        entries = computed.entries(task.snapshot).astype(np.uint32)
        readers[2].send(Epoch(0, entries, computed=computed))
        for node in nodes:
            await soon(knows(node, 3))
            assert plan(node)["nodes"] == 3
        total = 4 * len(entries)  # of the computed order, one more epoch
        assert {plan(node)["uses_left"] for node in nodes} == {total}
        for position in (10, 4):  # the reader has gone back
            readers[0].send(Epoch(0, orders[0]), position)
            for node in nodes:
                await soon(partial(is_left, node, total - position))


def is_left(node: Master, uses: int) -> bool:
    return plan(node)["uses_left"] == uses


async def test_the_streams_of_a_dead_master_end_and_come_back_with_the_next(task: Task) -> None:
    async with task.node(0, policy="plan") as first:
        Reader(task, first, 5).send(Epoch(0, order_of(task, 1)))
        async with task.node(1, policy="plan") as second:
            Reader(task, second, 5).send(Epoch(0, order_of(task, 2)))
            await soon(knows(first, 2))
            await soon(knows(second, 2))
            await end(task, 1)
            await soon(knows(first, 1))
        async with task.node(1, policy="plan") as again:
            await soon(knows(again, 1))  # the positions of others, although no reader has moved
            body = plan_body(Positions({"train": (0, 3)}), len(task.snapshot))
            assert again.plan.take(1, body, client=5) == UNKNOWN
            Reader(task, again, 5).send(Epoch(0, order_of(task, 2)), 3)
            await soon(knows(first, 2))


async def test_masters_know_which_chunks_the_others_have(task: Task) -> None:
    async with task.nodes(2, "plan") as [first, second]:
        Reader(task, first, 5).send(Epoch(0, order_of(task, 1)))
        await task.check(first)

        def is_known() -> bool:
            found = second.cache.ledger.held_elsewhere
            return found is not None and bool((found == first.cache.held).all())

        assert first.cache.held.any()
        await soon(is_known)


async def test_all_masters_know_the_values_of_chunks(task: Task) -> None:
    values = np.arange(task.snapshot.chunk_count, dtype=np.float32)

    def is_known(node: Master, times: int) -> bool:
        found = node.cache.ledger.tables.memory._values  # type: ignore[attr-defined]  # of `plan`
        return found is not None and bool((found == times * values).all())

    async with task.node(0, policy="plan") as first:
        Reader(task, first, 5).send(Epoch(0, order_of(task, 1)), values=values)
        async with task.node(1, policy="plan") as second:
            await soon(partial(is_known, second, 1))
            Reader(task, second, 5).send(Epoch(0, order_of(task, 2)), values=values)
            for node in (first, second):
                await soon(partial(is_known, node, 2))
            await end(task, 1)
            await soon(partial(is_known, first, 1))
        async with task.node(1, policy="plan") as again:
            await soon(partial(is_known, again, 1))


async def test_with_another_policy_a_master_passes_plans_on_and_uses_none(task: Task) -> None:
    async with task.node(0) as first, task.node(1, policy="plan") as second:
        Reader(task, first, 5).send(Epoch(0, order_of(task, 1)))
        await soon(knows(second, 1))
        assert plan(first)["planned_streams"] == 0


async def test_without_a_plan_masters_send_each_other_nothing(task: Task) -> None:
    async with task.nodes(2, "plan") as nodes:
        await trio.sleep(0.5)
        for node in nodes:
            assert all(not each.peer.stats()["connections"] for each in node._peers.values())


async def test_masters_of_other_versions_exchange_no_plans(task: Task) -> None:
    """Their readers' orders have the indices of another snapshot."""
    async with task.node(0, policy="plan") as first:
        task.put("more", 99)
        task.snapshot = task.dataset.snapshot
        async with task.node(1, policy="plan") as second:
            Reader(task, second, 5).send(Epoch(0, order_of(task, 1)))
            await soon(knows(second, 1))
            await trio.sleep(0.3)
            assert plan(first)["streams"] == 0
            await first.switch_version(task.snapshot)
            await soon(knows(first, 1))


# One connection


@each_row("status", range(5))
@each_row("size", [1, 49_152])
async def test_a_message_about_plans_comes_whole_and_is_answered(
    status: int, size: int, answers: FakeAnswers, peer: Peer
) -> None:
    answers.plan_status = status
    assert await peer.send_plan(bytes(size)) == status
    assert answers.plans[-1] == (0, bytes(size))


async def test_plans_and_reads_share_one_connection(answers: FakeAnswers, peer: Peer) -> None:
    async with trio.open_nursery() as nursery:
        for number in range(100):
            nursery.start_soon(peer.send_plan, bytes([number]) * 30_000)
        for _ in range(20):
            assert await peer.ping()
    assert len(answers.plans) == 100
    assert peer.stats()["connections"] == 1


async def test_a_master_slow_with_a_plan_still_gets_requests(node: Node, peer: Peer) -> None:
    assert await peer.ping()
    node.acceptor._plane = None  # no answer
    assert await peer.send_plan(b"x") is None
    assert peer.stats()["state"] == "closed"


async def test_other_clients_and_connections_may_not_send_plans(node: Node, plane: Plane) -> None:
    raw = await authenticated_raw(node.port, is_client=True)
    await raw.send(wire.plan_request(1, b"said"))
    assert await raw.receive_all() == b""
    assert not node.answers.plans
    end = plane.connect(is_local=True)
    end.sendall(wire.plan_request(1, b"said"))
    assert is_closed(end)
    assert plane.plans.empty()
    check_served(plane)


# The client's thread


class SlowMaster:
    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.status: int | None = TAKEN

    def send(self, body: bytes) -> int | None:
        self.bodies.append(body)
        return self.status


def test_the_sender_sends_the_newest_state_and_sends_a_new_master_everything(task: Task) -> None:
    master = SlowMaster()
    sender = PlanSender(task.snapshot, master.send, send_s=0.01)
    epoch = Epoch(0, order_of(task, 1))
    sender.set_streams({})
    assert sender._thread is None, "a client without a plan has no thread"
    sender.set_streams({"train": StreamProgress((epoch,), 0, 0)})
    wait_until(lambda: len(master.bodies) == 2)
    master.status = None
    sender.set_streams({"train": StreamProgress((epoch,), 0, 1)})
    wait_until(lambda: len(master.bodies) == 3)
    master.status = TAKEN
    wait_until(lambda: len(master.bodies) >= 5)
    assert master.bodies[3] == master.bodies[0], "the order"
    for position in range(100):
        sender.set_streams({"train": StreamProgress((epoch,), 0, position)})
    sender.set_streams({"train": StreamProgress((), 0, 0)})  # it was read to its end
    wait_until(lambda: plan_body(Positions({"train": (0, len(epoch))}), 1) in master.bodies)
    sender.set_streams({})
    wait_until(lambda: b"end" in master.bodies[-1])
    sender.close()
    count = len(master.bodies)
    sender.set_streams({"train": StreamProgress((epoch,), 0, 1)})
    assert sender._thread is not None
    sender._thread.join(5)
    assert len(master.bodies) == count


def test_an_order_of_the_same_entries_is_known_by_its_digest(task: Task) -> None:
    master = SlowMaster()
    sender = PlanSender(task.snapshot, master.send)
    epoch = Epoch(0, order_of(task, 1))
    assert sender._send({"train": StreamProgress((epoch,), 0, 0)})
    count = len(master.bodies)
    twin = StreamProgress((replace(epoch),), 0, 0)
    assert sender._send({"train": twin, "other": twin})
    assert len(master.bodies) == count + 1, "the other stream, without its order"
