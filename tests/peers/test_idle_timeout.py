"""When a master (the process that serves a node's readers) ends because it has none, and what a
reader does when its master has ended."""

from pathlib import Path

import pytest
import trio
import trio.testing

from diesel_fs.peers import client
from diesel_fs.peers.local import LocalServer
from diesel_fs.peers.options import TaskRequest


async def test_a_master_stays_when_a_reader_of_its_version_follows_one_of_another() -> None:
    server = LocalServer(None)  # type: ignore[arg-type]  # it serves no client

    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.wait_until_idle, 60.0)
        await trio.testing.wait_all_tasks_blocked()
        server.other_version_requested()
        server.reader_joined()
        await trio.testing.wait_all_tasks_blocked()
        assert nursery.child_tasks, "it has ended"
        nursery.cancel_scope.cancel()


def test_a_reader_restarts_a_master_only_at_its_own_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new master may have another socket, for example as another rank: the reader, which knows
    only its own, must not start masters again and again."""
    monkeypatch.setattr(client, "is_alive", lambda place: place.name == "other")
    monkeypatch.setattr(client, "join", lambda _: tmp_path / "other")
    request = TaskRequest(task="night")
    assert not client._restart_master(request, tmp_path / "mine", has_served=False)


def test_an_idle_master_logs_why_it_ends(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "diesel.task"):
        trio.run(LocalServer(None).wait_until_idle, 0.01)  # type: ignore[arg-type]  # no client connects
    assert "no client for 0.01 s: the master ends" in caplog.text
