"""`dlcmd dashboard` over HTTP, beside real mounts, a task and a server.

`tests/browser` looks at the page itself, in a browser.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from importlib.resources import files
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from diesel_fs.errors import ConfigError, DieselError
from diesel_fs.ingest import FolderSource, PutOptions, put
from diesel_fs.metrics import exposition, private_cells
from diesel_fs.mounts import MountRequest, mount, umount
from diesel_fs.mounts import stats as stats_of
from diesel_fs.peers.members.options import TaskOptions
from diesel_fs.remote.open import open_repository
from diesel_fs.repository.local import LocalRepository
from dlcmd.dashboard.history import EVERY_S, POINTS, History
from dlcmd.dashboard.servers import parse_metrics, parse_metrics_place, total
from dlcmd.dashboard.watcher import add_up
from dlcmd.dashboard.web import CONNECTIONS_MAX
from tests.rows import each_row
from tests.server.program import Server, new_repository
from tests.storage.metadata.redis_servers import free_port as free_port
from tests.trees import write
from tests.waiting import wait_until

from .conftest import Dlcmd
from .dashboards import Dashboard, Object, Value, at, item, items

FILES = {f"class/{number:03}.jpg": os.urandom(9_000) for number in range(120)}
HOSTILE = '<img src=x onerror="alert(1)">\n\x1b[31m&amp;'
CHUNK_BYTES = 64 << 10


NO_TASK = TaskOptions()


class Place:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.url = (folder / "store").as_uri()
        self.mounted: list[Path] = []
        source = write(folder / "source", FILES)
        options = PutOptions(chunk_bytes=CHUNK_BYTES, compress="none", jobs=1)
        with LocalRepository.open(self.url, create=True) as repository:
            put(repository, "pets", FolderSource(source), options=options)
            write(folder / "source", {"class/000.jpg": os.urandom(9_000)})
            put(repository, "pets", FolderSource(source), options=options)

    def mount(self, name: str, task: TaskOptions = NO_TASK) -> Path:
        at = self.folder / name
        mount(MountRequest(self.url, "pets", str(at), task_options=task))
        self.mounted.append(at)
        return at

    def close(self) -> None:
        for each in self.mounted:
            with suppress(DieselError):
                umount(each, lazy=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    made = Place(tmp_path_factory.mktemp("dashboard"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def board(place: Place) -> Iterator[Dashboard]:
    with Dashboard("--url", place.url) as started:
        yield started


@pytest.mark.deep
@pytest.mark.fuse
def test_figures_of_a_mount_equal_those_of_stats(place: Place, board: Dashboard) -> None:
    mounted = place.mount("plain")
    path = str(mounted)
    before = board.until(lambda state: item(state, "mounts", path=path).get("totals"))
    order = (mounted / ".diesel" / "filelist").read_text().splitlines()
    for each in order[:50]:
        (mounted / each).read_bytes()
    wait_until(lambda: at(_stats(mounted), "residency", "resident_entries") == len(FILES))
    tick = int(str(before["tick"]))

    def is_equal(state: Object) -> bool:
        known, stats = item(state, "mounts", path=path), _stats(mounted)
        totals, [plan] = known["totals"], items(known, "plans")
        [stream] = items(stats["residency"], "streams")
        return (
            int(str(state["tick"])) > tick
            and at(totals, "reads") == at(stats, "reads", "hits")
            and at(totals, "fetched_reads") == at(stats, "reads", "misses")
            and at(totals, "read_bytes") == at(stats, "reads", "bytes") != 0
            and at(totals, "fetched_bytes") == at(stats, "cache", "fetched_bytes")
            and at(totals, "pushed_bytes") == at(stats, "residency", "pushed_bytes") != 0
            and at(totals, "resident_bytes") == at(stats, "residency", "resident_bytes")
            and known["version"] == str(stats["version"])
            and (plan["position"], plan["length"]) == (stream["position"], len(FILES))
        )

    board.until(is_equal)
    wait_until(lambda: len(json.loads(board.get("/history?of=all").body)["time"]) > 1)
    history = json.loads(board.get("/history?of=all&since=0").body)
    assert {"store_s", "idle_s", "read", "memory", "peer", "time"} <= history.keys()
    assert json.loads(board.get(f"/history?of=all&since={history['time'][-1]}").body)["time"] == []
    umount(mounted)
    gone = board.until(lambda state: item(state, "mounts", path=path).get("state") == "gone")
    assert float(str(item(gone, "mounts", path=path)["age_s"])) < 60


def _stats(mounted: Path) -> Object:
    found: Object = json.loads(json.dumps(stats_of(mounted)))
    return found


@pytest.mark.fuse
def test_a_task_shows_its_members_and_their_shares(place: Place, board: Dashboard) -> None:
    """Two nodes on this machine: each reports its own part, and both own all chunks."""
    peers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    for rank in range(2):
        options = TaskOptions.from_kwargs({
            "task": "nightly", "rank": rank, "world": 2, "peers": peers,
            "task_key": "k" * 32, "policy": "oneshot",
        }, str(rank))  # fmt: skip
        place.mount(f"node{rank}", options)
    with LocalRepository.open(place.url) as repository:
        chunks = repository.view("pets").chunk_count

    def is_whole(state: Object) -> bool:
        members = items(item(state, "tasks", name="nightly") or {"members": []}, "members")
        shares = [int(str(each["share_chunks"])) for each in members]
        return (
            len(members) == 2
            and sum(shares) == chunks
            and all(shares)
            and [each.get("held_chunks") for each in members] == shares
        )

    found = item(board.until(is_whole), "tasks", name="nightly")
    assert (found["world"], found["member_count"], found["dataset"]) == (2, 2, "pets")
    assert all(each["is_here"] for each in items(found, "members"))
    for rank in range(2):
        umount(place.folder / f"node{rank}")
    board.until(lambda state: not item(state, "tasks", name="nightly"))


@pytest.mark.fuse
def test_hostile_names_are_text(place: Place, board: Dashboard) -> None:
    """The names contain HTML and control characters."""
    mounted = place.mount(HOSTILE)
    path = f"{place.folder}/" + '<img src=x onerror="alert(1)">\\n\\x1b[31m&amp;'
    board.until(lambda state: item(state, "mounts", path=path).get("totals"))
    program = place.folder / "<b>\x1b[7m"
    shutil.copy("/bin/cat", program)
    subprocess.run([program, mounted / min(FILES)], stdout=subprocess.DEVNULL, check=True)

    def is_seen(state: Object) -> bool:
        readers = items(at(item(state, "mounts", path=path), "figures"), "readers")
        return any(each["command"] == "<b>\\x1b[7m" for each in readers)

    board.until(is_seen)
    umount(mounted)


@pytest.mark.fuse
def test_a_mount_whose_process_is_killed_is_lost(place: Place, board: Dashboard) -> None:
    mounted = place.mount("killed")

    def known(state: Object) -> Object:
        return item(state, "mounts", path=str(mounted))

    board.until(lambda state: known(state).get("state") == "live")
    stats = stats_of(mounted)
    for name in ("pid", "server_pid"):
        os.kill(int(str(stats[name])), signal.SIGKILL)
    lost = board.until(lambda state: known(state).get("state") in ("lost", "gone"))
    assert "totals" in known(lost)


def test_a_server_and_its_death_are_shown(tmp_path: Path) -> None:
    store = (tmp_path / "store").as_uri()
    credentials = new_repository(store)["root"]
    port = free_port()
    options = ("--store", store, "--metrics", str(port))
    server = Server(tmp_path / "server", *options)
    unanswered = socket.create_server(("127.0.0.1", 0))
    deaf, own = f"127.0.0.1:{unanswered.getsockname()[1]}", f"127.0.0.1:{port}"
    arguments = ("--server-metrics", str(port), "--server-metrics", deaf)

    def states(state: Object) -> list[Value]:
        return [at(item(state, "servers", place=each), "state") for each in (own, deaf)]

    try:
        server.metrics_port  # noqa: B018  # waits until it listens
        with Dashboard("--url", store, *arguments) as board:
            source = write(tmp_path / "source", FILES)
            with open_repository(server.url, credentials) as repository:
                put(repository, "pets", FolderSource(source), options=PutOptions(jobs=1))
            state = board.until(
                lambda state: (
                    states(state)[0] == "live"
                    and at(item(state, "servers", place=own), "totals", "chunks") != 0
                )
            )
            found = item(state, "servers", place=own)
            assert float(str(at(found, "totals", "received_bytes"))) > sum(map(len, FILES.values()))
            assert at(found, "gauges", "workers") == 1
            server.kill()
            state = board.until(lambda state: states(state) == ["lost", "lost"])
            found = item(state, "servers", place=own)
            assert found["problem"] == "Connection refused"
            assert at(found, "totals", "chunks") != 0
            assert item(state, "servers", place=deaf)["age_s"] is None
            server.close()
            server = Server(tmp_path / "server", *options)
            board.until(lambda state: states(state)[0] == "live")
    finally:
        server.close()
        unanswered.close()


def test_datasets_have_versions_sizes_and_holes(place: Place, board: Dashboard) -> None:
    def rows(_: Object) -> list[Object]:
        return items(json.loads(board.get("/datasets").body), "datasets")

    board.until(lambda state: rows(state) and rows(state)[0]["holes_bytes"] is not None)
    [pets] = rows({})
    with LocalRepository.open(place.url) as repository:
        head = repository.dataset("pets").head
        assert head is not None
        assert (pets["name"], pets["version"]) == ("pets", str(head.version))
        assert (pets["files"], pets["bytes"]) == (head.files, head.bytes)
        assert pets["holes_bytes"] == repository.reclaimable_bytes("pets") != 0
        kept = repository.kept_versions("pets")
    assert pets["kept"] == len(kept)
    assert [at(each, "version") for each in items(pets, "versions")] == [
        str(each.version) for each in reversed(kept)
    ]


def test_many_datasets_are_listed_and_a_repository_may_be_missing(tmp_path: Path) -> None:
    url, names = (tmp_path / "store").as_uri(), [f"set-{number:03}" for number in range(100)]
    with Dashboard("--url", url) as board:
        state = board.until(lambda state: at(state["datasets"], "state") == "lost")
        assert at(state["datasets"], "problem")
    with LocalRepository.open(url, create=True) as repository:
        for name in names:
            identity = uuid.uuid4()
            repository.meta.create(name, identity)
            repository.catalogue.add(name, identity, 1)
    with Dashboard("--url", url) as board:
        board.until(lambda state: at(state["datasets"], "count") == 100)
        found = items(json.loads(board.get("/datasets").body), "datasets")
        assert [each["name"] for each in found] == names


def test_the_page_is_small_and_names_no_other_host(board: Dashboard) -> None:
    """Headers forbid everything else."""
    got = board.get("/")
    policy = got.headers["content-security-policy"]
    assert got.status == 200
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert got.headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in got.headers
    names = [each.name for each in (files("dlcmd.dashboard") / "page").iterdir()]
    pages = {name: board.get(f"/{name}") for name in names}
    assert {each.status for each in pages.values()} == {200}
    assert sum(len(each.body) for each in pages.values()) < 150_000
    text = b"".join(each.body for each in pages.values()).decode()
    assert {*re.findall(r"\w+://[^\s\"'`]*", text)} == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(|<script>", text)
    linked = {*re.findall(r'(?:href|src)="([^#"]+)"', pages["index.html"].body.decode())}
    assert linked <= pages.keys()


def test_requests_that_have_no_answer_are_refused(board: Dashboard) -> None:
    for path, status in {
        "/../main.py": 404, "/history?of=nobody": 404, "/history?of=all&since=nan": 400,
        "/state?after=-1": 400,
    }.items():  # fmt: skip
        assert board.get(path).status == status
    assert board.get("/", method="POST").status == 405
    assert board.get("/", X="x" * 9_000).status == 431
    head = board.get("/", method="HEAD")
    assert (head.status, head.body, int(head.headers["content-length"]) > 1000) == (200, b"", True)
    for garbage in (b"\0\xff\r\n\r\n", b"GET http://x/ HTTP/1.1\r\n\r\n", b"GET / HTTP/2\r\n\r\n",
                    b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"):  # fmt: skip
        with socket.create_connection(("127.0.0.1", board.port), timeout=30) as link:
            link.sendall(garbage)
            assert link.recv(100).startswith(b"HTTP/1.1 400 ")
    assert board.get("/").status == 200


def test_silent_connections_shut_no_client_out(board: Dashboard) -> None:
    with ExitStack() as stack:
        silent = []
        for _ in range(2 * CONNECTIONS_MAX):
            link = socket.create_connection(("127.0.0.1", board.port), timeout=30)
            silent.append(stack.enter_context(link))
            link.sendall(b"GET / HTTP/1.1\r\nHost: ")
        for _ in range(5):
            assert board.get("/").status == 200
        assert silent[0].recv(100) == b"", "the oldest one has made way"


def test_a_page_of_another_name_cannot_read_it(board: Dashboard) -> None:
    """DNS rebinding makes such a page: its name leads to 127.0.0.1."""
    for path in ("/", "/state", "/datasets"):
        assert board.get(path, Host="evil.example:9320").status == 421
        assert board.get(path, Host="").status == 421
    for name in ("localhost", "localhost:1234", "127.0.0.1", "[::1]:80"):
        assert board.get("/", Host=name).status == 200


def test_with_a_token_nothing_is_shown_without_it(tmp_path: Path) -> None:
    token = "a-token-of-many-characters"  # noqa: S105
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text(f"{token}\n")
    with Dashboard("--url", tmp_path.as_uri(), "--token-file", file) as board:
        assert token not in board.first_line
        for path in ("/", "/page.js", "/state", "/datasets", "/nothing", "/?token=wrong"):
            got = board.get(path)
            assert got.status == 401
            assert token.encode() not in got.body
        assert board.get("/", Authorization=f"Bearer {token}x").status == 401
        assert board.get("/", Authorization=f"Bearer {token}", Host="any.example").status == 200
        once = board.get(f"/?token={token}")
        assert (once.status, once.headers["location"]) == (303, "/")
        value, *flags = once.headers["set-cookie"].split("; ")
        assert {"HttpOnly", "SameSite=Strict"} <= {*flags}
        assert token not in once.headers["set-cookie"]
        assert board.get("/state", Cookie=f"other=1; {value}").status == 200
        assert board.get("/state", Cookie=f"{value}0").status == 401
        assert token.encode() not in board.get("/state", Cookie=value).body


def test_other_machines_need_a_token(dlcmd: Dlcmd, tmp_path: Path) -> None:
    failed = dlcmd("dashboard", "--listen", "0.0.0.0:0", code=2).err
    assert "other machines can reach 0.0.0.0:0, and there is no token" in failed
    file = write(tmp_path, {"token": b"a-token-of-many-characters"}) / "token"
    file.chmod(0o644)
    assert "chmod 600" in dlcmd("dashboard", "--token-file", file, code=12).err
    file.chmod(0o600)
    file.write_text("short")
    assert "16 characters" in dlcmd("dashboard", "--token-file", file, code=2).err
    assert "HOST:PORT" in dlcmd("dashboard", "--listen", "here", code=2).err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "another program listens there" in dlcmd("dashboard", "--listen", port, code=12).err


@each_row(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_and_nothing_is_left_to_finish(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], number: signal.Signals, code: int
) -> None:
    with Dashboard("--url", tmp_path.as_uri()) as board:
        board.state()
        board.process.send_signal(number)
        assert board.process.wait(20) == code
    errors = capfd.readouterr().err
    assert ("ended by SIGTERM" in errors) == (number == signal.SIGTERM)
    assert "again" not in errors


@each_row(
    ("text", "place"),
    [
        ("9400", "127.0.0.1:9400/metrics"),
        ("gpu7:9400", "gpu7:9400/metrics"),
        ("http://[::1]:1/m", "[::1]:1/m"),
    ],
)
def test_the_address_of_a_servers_metrics(text: str, place: str) -> None:
    host, path = parse_metrics_place(text)
    assert f"{host}{path}" == place
    for bad in ("https://gpu7:9400", "http://user:secret@gpu7:9400", "gpu7", "gpu7:x"):
        with pytest.raises(ConfigError) as raised:
            parse_metrics_place(bad)
        assert "secret" not in str(raised.value)


def test_a_servers_metrics_are_understood() -> None:
    """Prometheus's own parser gives the same values."""
    cells = private_cells()
    cells.add("diesel_requests_total", "put", "ok", amount=7)
    cells.add("diesel_requests_total", "stat", "refused", amount=2)
    cells.add("diesel_tier_hits_total", "disk", amount=1.5e9)
    cells.observe("diesel_request_seconds", "put", value=0.1)
    text = exposition([cells])
    expected = Counter[str]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith("diesel_request_seconds"):
                expected[sample.name] += sample.value  # type: ignore[assignment]  # no whole number
    found = parse_metrics(text)
    assert {name: total(found, name) for name in expected} == expected
    assert found["diesel_tier_hits_total", "disk"] == 1.5e9
    assert parse_metrics("<html>no metrics here</html>") == {}
    endless = parse_metrics("diesel_requests_total 1e999\ndiesel_requests_total 2\n")
    assert total(endless, "diesel_requests_total") == 2


def test_a_history_keeps_an_hour() -> None:
    history, newest = History(("read", "store")), POINTS + 9
    for number in range(POINTS + 10):
        history.add(1000.0 + EVERY_S * number, {"read": number})
    kept = history.since(0.0)
    assert (len(kept["time"]), kept["time"][0], kept["read"][-1]) == (POINTS, 1050.0, newest)
    assert kept["store"] == [0.0] * POINTS
    assert history.since(kept["time"][-3])["time"] == kept["time"][-2:]
    history.add(1000.0 + EVERY_S * POINTS, {"read": -1})
    kept = history.since(0.0)
    assert kept["read"] == [float(number) for number in range(10, POINTS)] + [-1.0]
    assert kept["time"] == sorted(kept["time"])
    history.add(7.0, {"read": -2})
    assert history.since(0.0) == {"time": [7.0], "read": [-2.0], "store": [0.0]}
    added = add_up([{"read": 1.0, "store": 2.0}, {"read": 3.0}])
    assert added == {"count": 2.0, "read": 4.0, "store": 2.0}
