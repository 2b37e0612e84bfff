"""A real task on four nodes: networks of their own, masters, mounts and training processes.

Nodes are network namespaces (`nodes.py`), the store is an S3 server that counts requests, the
metadata are in Redis. Readers check every byte against the generated files.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from tests.processes import is_running
from tests.waiting import until

from .nodes import Nodes, needs_links
from .running import WAIT_MAX_S, Outcome, Reader, RunningTask, is_right

pytestmark = pytest.mark.deep

FILES = 1_200
NODES = 4
SETTLED_S = 12.0  # TTL, a renewal, and a busy machine
ITS_SHARE = 0.5  # of the dataset: a node's own, and some more after another node has left


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningTask]:
    folder = tmp_path_factory.mktemp("nodes")
    with Nodes(folder, NODES) as nodes, RunningTask(nodes, files=FILES) as task:
        yield task


@pytest.fixture
def task(ground: RunningTask) -> Iterator[RunningTask]:
    ground.forget()
    ground.part = ITS_SHARE
    yield ground
    ground.end()


def joined(task: RunningTask, ranks: "range | list[int]") -> list[Reader]:
    readers = [task.reader(rank) for rank in ranks]
    for reader in readers:
        reader.ready()
    task.gathered([*ranks])
    return readers


def epochs(readers: list[Reader], *, pace_s: float = 0.0, batch: int = 64) -> list[Outcome]:
    for seed, reader in enumerate(readers):
        reader.begin(seed, pace_s=pace_s, batch=batch)
    return [reader.outcome() for reader in readers]


def all_right(outcomes: list[Outcome]) -> bool:
    assert [each for each in outcomes if not is_right(each, FILES)] == []
    return True


# Shared reads


@pytest.mark.parametrize("part", [0, 1.4], ids=["everywhere", "shares"])
@pytest.mark.parametrize("count", [1, 4])
def test_the_store_is_read_once_for_all_nodes(task: RunningTask, count: int, part: float) -> None:
    task.world, task.part = count, part / count
    readers = joined(task, range(count))
    task.forget()
    assert all_right(epochs(readers))
    assert task.stored_bytes <= task.egress_bytes() <= 1.05 * task.stored_bytes
    task.forget()
    assert all_right(epochs(readers))
    assert task.egress_bytes() == 0


def test_each_process_makes_one_connection_to_each_other_node_at_most(task: RunningTask) -> None:
    readers = joined(task, range(NODES))
    more = [task.reader(rank) for rank in range(NODES) for _ in range(2)]
    assert all_right(epochs([*readers, *(each.ready() for each in more)]))
    made = Counter((origin, target) for origin, target, _ in task.nodes.connections())
    assert len(made) == NODES * (NODES - 1)
    assert max(made.values()) <= 3 + 1  # readers of a node, and its master


def test_if_readers_may_not_connect_to_nodes_their_master_does(task: RunningTask) -> None:
    """`--peers-through-master`, for processes and mounts."""
    task.world = 3
    readers = [task.reader(rank, peers_through_master=True).ready() for rank in range(2)]
    task.mount(2, "--peers-through-master")
    readers.append(task.reader(2, peers_through_master=True).ready())
    task.gathered([0, 1, 2])
    assert all_right(epochs(readers))
    task.forget()
    assert all_right(epochs(readers))
    assert task.egress_bytes() == 0, "the other nodes' shares came from their masters"
    made = Counter((origin, target) for origin, target, _ in task.nodes.connections())
    assert len(made) == 3 * 2
    assert max(made.values()) == 1, "one connection from master to master, and no other"


# Nodes that die, hang, or are cut off


def kill(pids: list[int], number: int = signal.SIGKILL) -> None:
    assert pids
    for pid in pids:
        os.kill(pid, number)


def test_F1_kill_9_of_a_master_costs_no_reader_a_byte(task: RunningTask) -> None:
    readers = joined(task, range(NODES))
    assert all_right(epochs(readers))
    task.forget()
    for seed, reader in enumerate(readers):
        reader.begin(seed, pace_s=0.15)
    time.sleep(0.7)
    killed = task.masters(3)
    kill(killed)
    outcomes = [reader.outcome() for reader in readers]
    assert all_right(outcomes)
    assert task.egress_bytes() > 0, "it was killed too late to matter"
    # Its readers have started another one, which all use like the one before.
    until(lambda: readers[3].epoch(9) and task.masters(3), "another master", WAIT_MAX_S)
    assert task.masters(3) != killed
    task.gathered()
    until(lambda: reads_nothing(task, readers), "all being cached again", WAIT_MAX_S)
    before = given_bytes(readers[0], 3)
    assert is_right(readers[0].epoch(10), FILES)
    assert given_bytes(readers[0], 3) > before


def test_F1_a_dead_nodes_share_is_taken_over_until_it_is_back(task: RunningTask) -> None:
    readers = joined(task, range(NODES))
    assert all_right(epochs(readers))
    for seed, reader in enumerate(readers[:3]):
        reader.begin(seed, pace_s=0.15)
    time.sleep(0.7)
    task.forget()
    task.nodes[3].kill()
    outcomes = [reader.outcome() for reader in readers[:3]]
    assert all_right(outcomes)
    assert task.egress_bytes() > 0, "it was killed too late to matter"
    # Its share is taken over: what others read is cached again.
    task.gathered([0, 1, 2])
    until(lambda: reads_nothing(task, readers[:3]), "all being cached again", WAIT_MAX_S)
    # It comes back, and is used again; others have its chunks.
    task.forget()
    back = task.reader(3).ready()
    task.gathered()
    assert all_right(epochs([back, *readers[:3]]))
    assert task.egress_bytes() <= 0.05 * task.stored_bytes
    until(lambda: is_used_again(task, readers), "node 3 being used", WAIT_MAX_S)


def reads_nothing(task: RunningTask, readers: list[Reader]) -> bool:
    task.forget()
    assert all_right(epochs(readers))
    return task.egress_bytes() == 0


def test_F2_a_hanging_master_is_paused_and_later_used_again(task: RunningTask) -> None:
    readers = joined(task, range(NODES))
    assert all_right(epochs(readers, batch=16, pace_s=0.05))
    for seed, reader in enumerate(readers):
        reader.begin(seed, batch=16, pace_s=0.05)
    time.sleep(0.3)
    hung = task.masters(3)
    kill(hung, signal.SIGSTOP)
    try:
        outcomes = [reader.outcome() for reader in readers]
        late = [client_figures(reader)["timed_out"] for reader in readers[:3]]
    finally:
        kill(hung, signal.SIGCONT)
    assert all_right(outcomes)
    # A reader that waited each time would have asked it in each of an epoch's batches.
    assert 0 < max(late) < FILES / 16 / 4
    task.gathered()
    until(lambda: is_used_again(task, readers), "node 3 being used again", WAIT_MAX_S)
    task.forget()
    assert all_right(epochs(readers))


def client_figures(reader: Reader) -> dict[str, int]:
    return cast("dict[str, int]", reader.stats()["client"])


def link_to(reader: Reader, rank: int) -> dict[str, object]:
    client = cast("dict[str, dict[str, dict[str, object]]]", reader.stats()["client"])
    return client["links"].get(str(rank), {"bytes": 0})


def is_used_again(task: RunningTask, readers: list[Reader]) -> bool:
    before, reads = given_bytes(readers[0], 3), client_figures(readers[0])["store_reads"]
    assert is_right(readers[0].epoch(5), FILES)
    return (
        given_bytes(readers[0], 3) > before and client_figures(readers[0])["store_reads"] == reads
    )


def given_bytes(reader: Reader, rank: int) -> int:
    return cast(int, link_to(reader, rank)["bytes"])


def test_a_node_that_is_cut_off_does_not_disturb_others(task: RunningTask) -> None:
    needs_links()
    readers = joined(task, range(NODES))
    epochs(readers)
    for seed, reader in enumerate(readers):
        reader.begin(seed, pace_s=0.2)
    time.sleep(0.5)
    task.nodes[3].cut()
    try:
        outcomes = [reader.outcome() for reader in readers[:3]]
    finally:
        task.nodes[3].restore()
    assert all_right(outcomes)
    own = readers[3].outcome()
    assert own.wrong == 0
    task.gathered()
    assert all_right(epochs(readers))


def test_two_nodes_that_cannot_reach_each_other_read_on(task: RunningTask) -> None:
    needs_links()
    readers = joined(task, range(NODES))
    epochs(readers)
    task.nodes[0].block(task.nodes[3])
    task.nodes[3].block(task.nodes[0])
    try:
        task.forget()
        outcomes = epochs(readers, pace_s=0.05)
        assert all_right(outcomes)
        assert task.egress_bytes() > 0
        assert link_to(readers[0], 3)["state"] in ("open", "half open")
        assert link_to(readers[1], 3)["state"] == "closed"
    finally:
        task.nodes[0].unblock(task.nodes[3])
        task.nodes[3].unblock(task.nodes[0])
    until(lambda: is_used_again(task, readers), "node 3 being used again", WAIT_MAX_S)


def test_F3_a_slow_link_costs_only_time_outs(task: RunningTask) -> None:
    needs_links()
    readers = joined(task, range(NODES))
    assert all_right(epochs(readers))
    task.nodes[3].limit_bandwidth(1000)
    try:
        outcomes = epochs(readers[:3])
    finally:
        task.nodes[3].limit_bandwidth(0)
    assert all_right(outcomes)
    share_s = task.stored_bytes / NODES * 3 / 125_000  # what waiting for it would take
    assert max(each.s for each in outcomes) < share_s


# Nodes that lie or are strangers


@pytest.mark.parametrize("lie", ["flipped", "zeros", "another"])
def test_F5_a_lying_peer_is_detected_and_gets_no_more_requests(task: RunningTask, lie: str) -> None:
    liar = task.reader(3, master="tests.peers.corrupting_master", lies=lie)
    readers = [task.reader(rank) for rank in range(3)]
    for reader in (liar, *readers):
        reader.ready()
    task.gathered()
    assert is_right(
        liar.epoch(1), FILES
    )  # it holds the chunks that it owns, and gives its own clients right bytes
    outcomes = epochs(readers)
    assert all_right(outcomes)
    assert sum(task.damaged(rank) for rank in range(3)) >= 3
    assert "quarantined" in [link_to(reader, 3)["state"] for reader in readers]
    # The others have checked the whole chunks that it gave them, too.
    assert all_right(epochs(readers))


def test_F6_another_secret_and_another_task_are_refused(task: RunningTask, tmp_path: Path) -> None:
    peers = ",".join(f"{node.address}:9400" for node in task.nodes.nodes[:3])
    task.world = 3
    task.options = {"peers": peers, "listen": ""}
    keys = ["the same key of two of the nodes", "the same key of two of the nodes", "another key "]
    readers = [task.reader(rank, task_key=keys[rank] * 2).ready() for rank in range(3)]
    task.gathered([0, 1])  # a node reads the store until it is connected to the others
    assert all_right(epochs(readers))
    until(
        lambda: all_right(epochs(readers)) and given_bytes(readers[0], 1) > 0,
        "node 0 reading from node 1",
        WAIT_MAX_S,
    )
    assert given_bytes(readers[0], 2) == given_bytes(readers[2], 0) == 0
    assert task.figure(0, "peers", "2", "parts") == 0
    peers_of_0 = cast("dict[str, dict[str, object]]", task.stats(0)["peers"])
    assert peers_of_0["2"]["state"] in ("open", "half open")


def test_F8_the_newer_of_two_masters_of_a_rank_counts(task: RunningTask) -> None:
    readers = joined(task, range(3))
    epochs(readers)
    before = task.masters(2)
    # The same rank again, from another machine.
    twin = Reader(
        task.nodes[3], readers[2].opened | {"listen": f"{task.nodes[3].address}:0"}, FILES
    )
    twin.ready()
    assert twin.log.count("has replaced another one of rank 2") == 1
    assert "has replaced another one" not in readers[2].log
    assert "--world is" not in twin.log
    try:
        until(lambda: not any(is_running(pid) for pid in before), "the older one's end", SETTLED_S)
        assert all_right(epochs([*readers, twin]))
        task.gathered([0, 1, 3], count=3)
    finally:
        twin.close()


def test_F8_a_world_smaller_than_the_task_is_a_warning(task: RunningTask) -> None:
    readers = joined(task, range(3))
    few = {"rank": 1, "world": 2, "listen": f"{task.nodes[3].address}:0"}
    odd = Reader(task.nodes[3], readers[2].opened | few, FILES).ready()
    try:
        assert odd.log.count("there is a node 2 in this task, but --world is 2 here") == 1
        assert all_right(epochs([*readers, odd]))
    finally:
        odd.close()


def test_F8_nodes_with_different_peers_lists_read_right_bytes(task: RunningTask) -> None:
    addresses = [f"{node.address}:9400" for node in task.nodes]
    lists = [addresses, addresses[:2], [addresses[1], addresses[0]], addresses]
    task.world = 4
    key = "the key that all nodes of this test have"
    readers = []
    for rank, peers in ((0, lists[0]), (1, lists[1]), (3, lists[3])):
        task.options = {"peers": ",".join(peers), "listen": addresses[rank]}
        task.world = len(peers)
        readers.append(task.reader(rank, task_key=key).ready())
    assert all_right(epochs(readers))
    assert all_right(epochs(readers))


# Open ports, and leftovers of a task


def test_mounts_and_processes_share_a_master_and_a_task_leaves_nothing(task: RunningTask) -> None:
    mounted = task.reader(0, mount=task.mount(0))
    readers = [mounted, *(task.reader(rank) for rank in range(NODES))]
    for reader in readers:
        reader.ready()
    task.gathered()
    assert len(task.masters(0)) == 1
    task.forget()
    assert all_right(epochs(readers))
    assert task.egress_bytes() <= 1.05 * task.stored_bytes
    assert task.redis.keys("dfs:{task.*")
    for reader in readers:
        reader.close()
    task.umount(0)
    until(lambda: not any(each.matching("diesel") for each in task.nodes), "their end", 30)
    assert task.redis.keys("dfs:{task.*") == []
    for node in task.nodes:
        assert node.pids() == []
        assert node.sockets(listening=True) == []
        runtime = Path(node.environment["XDG_RUNTIME_DIR"])
        assert not [each for each in runtime.rglob("*") if each.is_socket()]


def test_S5_a_master_listens_at_the_given_address_only(task: RunningTask) -> None:
    joined(task, range(2))
    for rank in range(2):
        listening = task.nodes[rank].sockets(listening=True)
        assert [each.local for each in listening] == [task.nodes[rank].address]


def test_S17_another_user_of_the_node_gets_nothing(task: RunningTask) -> None:
    if os.geteuid() or not shutil.which("setpriv"):
        pytest.skip("only root can become another user")
    task.world = 1
    reader = task.reader(0).ready()
    reader.epoch(1)
    place = task.socket(0)
    code = (
        "import socket, sys\n"
        "link = socket.socket(socket.AF_UNIX)\n"
        "link.settimeout(10)\n"
        "try:\n"
        "    link.connect(sys.argv[1])\n"
        "except PermissionError:\n"
        "    sys.exit(3)\n"
        "try:\n"
        "    link.sendall(bytes([6]) + bytes(15))\n"
        "    sys.exit(4 if link.recv(16) else 5)\n"
        "except ConnectionError:\n"
        "    sys.exit(5)\n"
    )
    other = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable]
    command = [*other, "-c", code, str(place)]
    assert subprocess.run(command, check=False, timeout=30).returncode == 3
    # The modes of the folders are one protection, the master's check of the user another.
    folders = [place.parent, *place.parent.parents]
    opened = [each for each in folders if task.nodes.runtime in (each, *each.parents)]
    modes = {each: each.stat().st_mode & 0o7777 for each in (*opened, place)}
    try:
        for each in modes:
            each.chmod(0o777)
        assert subprocess.run(command, check=False, timeout=30).returncode == 5
    finally:
        for each, mode in modes.items():
            each.chmod(mode)
    assert is_right(reader.epoch(2), FILES)
