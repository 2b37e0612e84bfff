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
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

import diesel_fs
from diesel_fs.errors import ConfigError, ConflictError
from diesel_fs.mounts import MountRequest, mount, umount
from diesel_fs.mounts.mountpoints.mountpoint import mounted_at
from diesel_fs.mounts.statistics.mount_metrics import TABLE
from diesel_fs.mounts.statistics.waits import CAUSE_NAMES
from diesel_fs.peers.members.options import TaskOptions
from tests.cli.conftest import program_environment
from tests.mounts import slow_daemon
from tests.mounts.observed import Processes, current_stats, figures, mounted, noise, put
from tests.waiting import wait_until

pytestmark = pytest.mark.fuse

FILES = 6
SLOW_S = "0.15"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    address = (tmp_path_factory.mktemp("waits") / "store").as_uri()
    packed = dict.fromkeys(
        (f"packed{number}" for number in range(FILES)), b"much the same " * 5_000
    )
    files = {f"file{number}": noise(number, 20_000) for number in range(FILES)}
    put(address, {**files, **packed}, one_each=True)
    return address


@pytest.fixture
def request_of(url: str, tmp_path: Path, session: str) -> MountRequest:
    return MountRequest(url, "ds", str(tmp_path / "mount"), session=session)


@contextmanager
def slow_mount(request: MountRequest, slow: str) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(slow, SLOW_S)
        with mounted(request, slow_daemon.PROGRAM) as at:
            yield at


def share(found: Mapping[str, object], cause: str) -> float:
    causes, waited_s = figures(found, "causes_s"), figures(found)["waited_s"]
    assert sum(causes.values()) == pytest.approx(waited_s, abs=1e-4)
    return causes[cause] / waited_s


def read(*paths: Path, **environment: str) -> None:
    subprocess.run(
        ["cat", *paths], check=True, stdout=subprocess.DEVNULL, env={**os.environ, **environment}
    )


@pytest.mark.parametrize(
    ("slow", "cause", "name"),
    [
        (slow_daemon.STORE, "store", "file"),
        (slow_daemon.DECODE, "decompression", "packed"),
        (slow_daemon.PEER, "peer", "file"),
        pytest.param(
            slow_daemon.LOOKUP, "metadata", "", marks=pytest.mark.only_session("kernel", "pyfuse3")
        ),
    ],
)
def test_waits_name_their_cause(request_of: MountRequest, slow: str, cause: str, name: str) -> None:
    """A node of the task is this node's own master here."""
    if cause == "peer":
        options = TaskOptions(task="night", rank=0, world=1)
        request_of = replace(request_of, task_options=options)
    with slow_mount(request_of, slow) as at:
        if name:
            read(*(at / f"{name}{number}" for number in range(FILES)))
        else:
            for number in range(FILES):
                os.stat(at / f"file{number}")
        found = figures(current_stats(at), "waits")
        assert share(found, cause) > (0.6 if name else 0.9), found
        assert found["waited_s"] > float(SLOW_S)


@pytest.mark.only_session("native", "kernel")
def test_each_rank_has_its_own_figures(request_of: MountRequest) -> None:
    with slow_mount(request_of, slow_daemon.STORE) as at:
        for number, rank in enumerate(("0", "1", "not a number")):
            read(at / f"file{number}", RANK=rank)

        def by_rank() -> dict[object, dict[str, object]]:
            readers = figures(current_stats(at), "waits")["readers"]
            return {each["rank"]: each for each in cast("list[dict[str, object]]", readers)}

        wait_until(lambda: {0, 1, None} <= by_rank().keys())
        for number in (0, 1):
            assert share(by_rank()[number], "store") > 0.6
            assert by_rank()[number]["command"] == "cat"


# dlcmd top ----------------------------------------------------------------------------------------


@contextmanager
def top(*arguments: str | Path) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        [sys.executable, "-m", "dlcmd", "top", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=program_environment(),
    ) as process:  # fmt: skip
        yield process


def test_top_divides_each_interval(request_of: MountRequest) -> None:
    with (
        slow_mount(request_of, slow_daemon.STORE) as at,
        top("--json", "--interval", "0.2", at) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        first = json.loads(process.stdout.readline())
        assert first["causes_s"]["store"] == 0.0
        read(*(at / f"file{number}" for number in range(FILES)))
        lines = [first]
        while not lines[-1]["causes_s"]["store"]:
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
def test_top_ends_with_ctrl_c_and_after_its_count(request_of: MountRequest) -> None:
    with mounted(request_of) as at:
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


def test_prometheus_gets_the_figures_of_a_mount(request_of: MountRequest, session: str) -> None:
    place, host = ("127.0.0.1:0", "127.0.0.1") if session == "native" else ("[::1]:0", "[::1]")
    with mounted(replace(request_of, metrics=place)) as at:
        read(at / "file0", RANK="5")
        address = str(current_stats(at)["metrics"])
        assert address.startswith(f"http://{host}:")

        def families() -> dict[str, dict[tuple[str, ...], float]]:
            return {
                family.name: {tuple(each.labels.values()): each.value for each in family.samples}
                for family in text_string_to_metric_families(get(address))
            }

        wait_until(lambda: families()["diesel_mount_read_bytes"][()] == 20_000)
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
        server = Processes.of(at).server
        os.kill(server, signal.SIGSTOP)

        def status() -> int:
            try:
                return 200 if "diesel_mount_info" in families() else 0
            except urllib.error.HTTPError as error:
                return error.code

        wait_until(lambda: status() == 503)  # a recent answer is repeated
        os.kill(server, signal.SIGCONT)
        wait_until(lambda: status() == 200)


@pytest.mark.only_session("kernel")
def test_a_port_that_is_in_use_is_an_error_before_the_mount_is_made(
    request_of: MountRequest, url: str, tmp_path: Path
) -> None:
    at = tmp_path / "made" / "mount"
    request_of = replace(request_of, mountpoint=str(at))
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = f"127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(ConflictError, match=f"cannot listen at {place}"):
            mount(replace(request_of, metrics=place))
    assert mounted_at(str(at)) is None
    assert not at.parent.exists()
    for bad in ("here", "127.0.0.1:x", "127.0.0.1:99999999"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            mount(replace(request_of, metrics=bad))
    with diesel_fs.mount("ds", at, url=url, metrics="0") as made:
        assert "diesel_mount_uptime_seconds" in get(made.metrics)


def test_every_metric_is_documented() -> None:
    page = Path(diesel_fs.__file__).parent / "mounts" / "METRICS.md"
    rows = re.findall(r"^\| `(\w+)`.* \| (counter|gauge): ", page.read_text(), re.MULTILINE)
    assert rows == [(metric.name, metric.kind) for metric in TABLE]
