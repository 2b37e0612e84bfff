"""How long readers of real mounts wait, and for what: in statistics, `dlcmd top`, and metrics."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

import diesel_fs
from diesel_fs.client.dataset import connect
from diesel_fs.errors import ConfigError, ConflictError
from diesel_fs.mounts import MountRequest, mount, umount
from diesel_fs.mounts.mount_metrics import TABLE
from diesel_fs.mounts.mountpoint import mounted_at
from diesel_fs.mounts.waits import CAUSE_NAMES
from diesel_fs.peers.options import TaskOptions
from tests.cli.conftest import program_environment
from tests.mounts import slow_daemon
from tests.mounts.observed import current_stats, mounted, noise
from tests.waiting import wait_until

pytestmark = pytest.mark.fuse

FILES = 6
SLOW_S = "0.15"


@pytest.fixture
def url(tmp_path: Path) -> str:
    """A dataset of some files, each in a chunk of its own, and one that is compressed."""
    address = (tmp_path / "store").as_uri()
    with connect("ds", address, create=True) as written:
        for number in range(FILES):
            written.put(noise(number, 20_000), f"file{number}")
            written.flush()
        for number in range(FILES):
            written.put(b"much the same " * 5_000, f"packed{number}")
            written.flush()
    return address


@contextmanager
def slow_mount(url: str, at: Path, session: str, slow: str, **options: object) -> Iterator[Path]:
    """A mount in which one thing takes `SLOW_S`."""
    request = MountRequest(url, "ds", str(at), session=session, **options)  # type: ignore[arg-type]  # fields by name
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(slow, SLOW_S)
        at.mkdir()
        with mounted(request, slow_daemon.PROGRAM):
            yield at


def waits(at: Path) -> Mapping[str, object]:
    found = current_stats(at)["waits"]
    assert isinstance(found, Mapping)
    return found


def share(found: Mapping[str, object], cause: str) -> float:
    """The part of all waiting that was for a cause."""
    causes, waited_s = found["causes_s"], found["waited_s"]
    assert isinstance(causes, Mapping)
    assert isinstance(waited_s, float)
    assert sum(causes.values()) == pytest.approx(waited_s, abs=1e-4)
    return float(causes[cause]) / waited_s


def read(*paths: Path, **environment: str) -> None:
    """Reads files in another process."""
    subprocess.run(
        ["cat", *paths], check=True, stdout=subprocess.DEVNULL, env={**os.environ, **environment}
    )


@pytest.mark.parametrize(
    ("slow", "cause", "name"),
    [
        (slow_daemon.STORE, "store", "file"),
        (slow_daemon.DECODE, "decompression", "packed"),
    ],
)
def test_waiting_is_for_what_is_slow(
    url: str, tmp_path: Path, session: str, slow: str, cause: str, name: str
) -> None:
    with slow_mount(url, tmp_path / "mount", session, slow) as at:
        read(*(at / f"{name}{number}" for number in range(FILES)))
        found = waits(at)
        assert share(found, cause) > 0.6, found
        assert found["waited_s"] > float(SLOW_S)  # type: ignore[operator]  # a number


def test_waiting_for_a_node_of_the_task_is_for_a_peer(
    url: str, tmp_path: Path, session: str
) -> None:
    """Here that is this node's own master."""
    options = TaskOptions(task="night", rank=0, world=1)
    with slow_mount(url, tmp_path / "mount", session, slow_daemon.PEER, task_options=options) as at:
        read(*(at / f"file{number}" for number in range(FILES)))
        found = waits(at)
        assert share(found, "peer") > 0.6, found


@pytest.mark.only_session("kernel", "pyfuse3")
def test_waiting_for_names_is_for_metadata(url: str, tmp_path: Path, session: str) -> None:
    with slow_mount(url, tmp_path / "mount", session, slow_daemon.LOOKUP) as at:
        for number in range(FILES):
            os.stat(at / f"file{number}")
        found = waits(at)
        assert share(found, "metadata") > 0.9, found


@pytest.mark.only_session("native", "kernel")
def test_each_rank_has_its_own_figures(url: str, tmp_path: Path, session: str) -> None:
    with slow_mount(url, tmp_path / "mount", session, slow_daemon.STORE) as at:
        read(at / "file0", RANK="0")
        read(at / "file1", RANK="1")
        read(at / "file2", RANK="not a number")

        def by_rank() -> dict[object, Mapping[str, object]]:
            readers = waits(at)["readers"]
            assert isinstance(readers, list)
            return {each["rank"]: each for each in readers}

        wait_until(lambda: {0, 1, None} <= by_rank().keys())
        for rank in (0, 1):
            assert share(by_rank()[rank], "store") > 0.6
            assert by_rank()[rank]["command"] == "cat"


# dlcmd top ----------------------------------------------------------------------------------------


@contextmanager
def top(*arguments: str | Path) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-m", "dlcmd", "top", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=program_environment(),
    ) as process:  # fmt: skip
        yield process


def test_top_divides_each_interval(url: str, tmp_path: Path, session: str) -> None:
    """Its parts add up to the interval; it ends with the mount, and says so."""
    with (
        slow_mount(url, tmp_path / "mount", session, slow_daemon.STORE) as at,
        top("--json", "--interval", "0.2", at) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        first = json.loads(process.stdout.readline())
        assert first["waited_s"] == 0.0
        assert first["idle_s"] == pytest.approx(first["interval_s"], abs=1e-4)
        read(*(at / f"file{number}" for number in range(FILES)))
        lines = [first]
        while not lines[-1]["waited_s"]:
            lines.append(json.loads(process.stdout.readline()))
        umount(at)
        lines += [json.loads(line) for line in process.stdout]
        for line in lines:
            parts = sum(line["causes_s"].values()) + line["reader_s"] + line["idle_s"]
            assert parts == pytest.approx(line["interval_s"], abs=1e-3)
            assert set(line["causes_s"]) == set(CAUSE_NAMES)
        causes = {name: sum(line["causes_s"][name] for line in lines) for name in CAUSE_NAMES}
        assert max(causes, key=lambda name: causes[name]) == "store"
        assert any(line["readers"] for line in lines)
        assert process.wait(60) == 10
        error, described = process.stderr.read().splitlines()
        assert error == f"dlcmd: the mount on {at} has ended"
        assert json.loads(described)["error"] == "NotFoundError"


@pytest.mark.only_session("kernel")
def test_top_ends_with_ctrl_c_and_after_its_count(url: str, tmp_path: Path, session: str) -> None:
    at = tmp_path / "mount"
    at.mkdir()
    with mounted(MountRequest(url, "ds", str(at), session=session)):
        with top("--interval", "0.1", at) as process:
            assert process.stdout is not None
            assert re.fullmatch(
                r"\d\d:\d\d:\d\d waited \d+% \(.*\); \d+ requests/s, \S+ \S+/s\n",
                process.stdout.readline(),
            )
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        with top("--interval", "0.1", "--count", "2", at) as process:
            out, err = process.communicate()
            assert (len(out.splitlines()), err, process.returncode) == (2, "", 0)
        ours, terminal = os.openpty()
        subprocess.run(
            [sys.executable, "-m", "dlcmd", "top", "--interval", "0.1", "--count", "1", at],
            stdout=terminal, check=True, env=program_environment(),
        )  # fmt: skip
        os.close(terminal)
        shown = os.read(ours, 1 << 16).decode()
        os.close(ours)
        assert "readers waited" in shown
        assert "page cache" in shown
        assert shown.startswith("\x1b[?25l")
        assert shown.endswith("\x1b[?25h")


# metrics ------------------------------------------------------------------------------------------


def get(address: str) -> str:
    with urllib.request.urlopen(address, timeout=30) as answer:  # noqa: S310  # it is http
        return bytes(answer.read()).decode()


PLACES = {"native": "127.0.0.1:0", "kernel": "[::1]:0", "pyfuse3": "0"}


def test_prometheus_gets_the_figures_of_a_mount(url: str, tmp_path: Path, session: str) -> None:
    place = PLACES[session]
    at = tmp_path / "mount"
    at.mkdir()
    with mounted(MountRequest(url, "ds", str(at), session=session, metrics=place)):
        read(at / "file0", RANK="5")
        address = str(current_stats(at)["metrics"])
        assert address.startswith("http://[::1]:" if ":1]" in place else "http://127.0.0.1:")

        def families() -> dict[str, dict[tuple[str, ...], float]]:
            return {
                family.name: {tuple(each.labels.values()): each.value for each in family.samples}
                for family in text_string_to_metric_families(get(address))
            }

        wait_until(lambda: families()["diesel_mount_read_bytes"][()] == 20_000)
        if session != "pyfuse3":
            wait_until(lambda: ("5",) in families().get("diesel_mount_rank_requests", {}))
        found = families()
        assert found.keys() <= {metric.name.removesuffix("_total") for metric in TABLE}
        assert {*found["diesel_mount_waited_seconds"]} == {(cause,) for cause in CAUSE_NAMES}
        assert sum(found["diesel_mount_waited_seconds"].values()) > 0
        assert {labels[0] for labels in found["diesel_mount_info"]} == {"ds"}
        assert found["diesel_mount_requests"][("read",)] >= 1
        assert get(address.replace("/metrics", "/healthz")) == "ok\n"
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(address.replace("/metrics", "/other"))


@pytest.mark.only_session("kernel")
def test_a_port_that_is_in_use_is_an_error_before_the_mount_is_made(
    url: str, tmp_path: Path, session: str
) -> None:
    at = tmp_path / "made" / "mount"
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConflictError, match=f"cannot listen at {place}"):
            mount(MountRequest(url, "ds", str(at), session=session, metrics=place))
    assert mounted_at(str(at)) is None
    assert not at.parent.exists()
    for bad in ("here", "127.0.0.1:x", "127.0.0.1:99999999"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            mount(MountRequest(url, "ds", str(at), session=session, metrics=bad))
    with diesel_fs.mount("ds", at, url=url, metrics="0") as made:
        assert "diesel_mount_uptime_seconds" in get(made.metrics)


@pytest.mark.only_session("kernel")
def test_metrics_of_a_mount_that_does_not_answer_are_unavailable(
    url: str, tmp_path: Path, session: str
) -> None:
    """Until it answers again."""
    at = tmp_path / "mount"
    at.mkdir()
    with mounted(MountRequest(url, "ds", str(at), session=session, metrics="0")):
        found = current_stats(at)
        address, server = str(found["metrics"]), found["server_pid"]
        assert isinstance(server, int)
        os.kill(server, signal.SIGSTOP)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            get(address)
        os.kill(server, signal.SIGCONT)

        def is_served() -> bool:
            with suppress(urllib.error.HTTPError):
                return "diesel_mount_info" in get(address)
            return False

        wait_until(is_served)


def test_every_metric_is_documented() -> None:
    """Exactly those, with their labels and kinds."""
    page = Path(diesel_fs.__file__).parent / "mounts" / "METRICS.md"
    rows = re.findall(r"^\| `(\w+)`.* \| (counter|gauge): ", page.read_text(), re.MULTILINE)
    assert rows == [(metric.name, metric.kind) for metric in TABLE]
